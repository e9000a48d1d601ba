"""Faults of hosts that dial, and of their network: make test-faults."""

import os
import signal
import time

import pytest

from tests.faults import Link, end
from tests.programs import CALM, hosts, wait_for_steps
from tests.test_dialing import connect, dial, here, listen

GONE, BACK = (
    "host 127.0.0.1: 0 streams, 1 before",
    "host 127.0.0.1: 1 streams, 0 before",
)


def link(address, **kwargs):
    """A Link to the learner at the address, which listens."""
    connect(address).close()
    return Link(int(address.rpartition(":")[2]), **kwargs)


@pytest.mark.survives("network-slow")
def test_a_slow_network_makes_steps_late_and_loses_none(savedir):
    address = here()
    with (
        listen(savedir, address) as learner,
        link(address, delay_s=0.2) as proxy,
        dial(proxy.address) as host,
    ):
        wait_for_steps(savedir, 160)
        proxy.cut.set()  # For less than it takes to be given up.
        time.sleep(10)
        proxy.cut.clear()
        wait_for_steps(savedir, 160)
        assert "dials again: the learner" not in host.output
        assert end(learner, savedir) == 0


@pytest.mark.survives("connection-half-open")
def test_a_half_open_connection_is_given_up_by_both_sides(savedir):
    address = here()
    with (
        listen(savedir, address) as learner,
        link(address) as proxy,
        dial(proxy.address) as host,
    ):
        wait_for_steps(savedir, 1000)
        proxy.cut.set()  # Both sides' connections stay open.
        learner.wait_for(GONE)
        host.wait_for("no stream, dials again: ")
        proxy.cut.clear()
        learner.wait_for(BACK)
        wait_for_steps(savedir, 1000)
        assert end(learner, savedir) >= 2


@pytest.mark.survives("connection-half-open")
def test_a_stream_outlives_a_long_step_and_not_a_host_that_vanishes_in_one(savedir):
    address = here()
    env = "tests.faulty_envs:Stuck-v0"
    with (
        listen(savedir, address, env=env) as learner,
        dial(address, env=env) as host,
    ):
        host.wait_for("sleeps for an hour")
        with pytest.raises(AssertionError, match="no '.* 0 streams.*' within"):
            # Pings go to and fro meanwhile.
            learner.wait_for(GONE, timeout_s=45)
        host.signal_all(signal.SIGSTOP)
        learner.wait_for(GONE)
        host.signal_all(signal.SIGCONT)
        end(learner, savedir)


@pytest.mark.survives("environment-hangs")
def test_a_host_stuck_in_its_environment_is_restarted_after_the_time_out(savedir):
    address = here()
    env = "tests.faulty_envs:Stuck-v0"
    with (
        listen(savedir, address, env=env) as learner,
        dial(address, "--env_timeout_seconds", 5, env=env) as host,
    ):
        host.wait_for("sleeps for an hour")
        host.wait_for("started again")
        learner.wait_for(GONE)
        learner.wait_for(BACK)
        end(learner, savedir)


@pytest.mark.survives("server-stopped")
def test_a_host_that_stops_for_40_s_costs_its_rollouts_and_comes_back(savedir):
    address = here()
    with (
        listen(savedir, address, env=CALM) as learner,
        dial(address, env=CALM) as host,
        dial(address, env=CALM) as other,
    ):
        learner.wait_for("host 127.0.0.1: 2 streams")
        wait_for_steps(savedir, 400)
        [pid] = host.workers()
        os.kill(pid, signal.SIGSTOP)
        wait_for_steps(savedir, 400)  # The other one goes on.
        learner.wait_for("host 127.0.0.1: 1 streams, 2 before")
        os.kill(pid, signal.SIGCONT)
        learner.wait_for("host 127.0.0.1: 2 streams, 1 before")
        wait_for_steps(savedir, 400)
        assert end(learner, savedir) == 2
        assert "dials again: the learner ended" not in other.output


@pytest.mark.survives("host-vanishes")
def test_a_host_that_vanishes_without_a_word_comes_back(savedir):
    port = here().rpartition(":")[2]
    with (
        hosts(1) as [one],
        listen(savedir, f"0.0.0.0:{port}", "--insecure") as learner,
        dial(f"{one.our_ip}:{port}", "--insecure", host=one) as host,
    ):
        wait_for_steps(savedir, 1000)
        one.cut_off(host)
        learner.wait_for(f"host {one.ip}: 0 streams, 1 before")
        one.restore(host)
        learner.wait_for(f"host {one.ip}: 1 streams, 0 before")
        wait_for_steps(savedir, 1000)
        assert end(learner, savedir) >= 2
