"""PolyBeast with servers of others, when something goes wrong: the real programs."""

import re
import signal
import time

from tests.programs import Program, hosts, read_logs
from tests.test_polybeast_env import READY

CARTPOLE = "CartPole-v1"


def serve(address, *args, env=CARTPOLE, num_envs=2, num_servers=1, host=None):
    program = Program("--env", env, "--address", address, "--envs_per_server", num_envs,
                      "--num_servers", num_servers, *args, module="polybeast_env",
                      host=host)  # fmt: skip
    program.wait_for(READY)
    return program


def learn(savedir, addresses, *args, env=CARTPOLE):
    """PolyBeast, run "x"."""
    return Program("--env", env, "--server_addresses", addresses, "--savedir", savedir,
                   "--xpid", "x", "--log_interval_steps", 200, *args,
                   module="polybeast")  # fmt: skip


def step(savedir):
    """How far the run is."""
    try:
        rows = read_logs(savedir / "x")
    except OSError:
        return 0
    return int(rows[-1]["step"]) if rows else 0


def wait_for_steps(savedir, n, timeout_s=120):
    """Until the run has made n steps from now."""
    deadline = time.monotonic() + timeout_s
    until = step(savedir) + n
    while step(savedir) < until:
        assert time.monotonic() < deadline, f"still at step {step(savedir)}"
        time.sleep(0.05)


def rollouts(program):
    """(delivered, learned from), as the program said at its end."""
    line = re.search(r"rollouts: (\d+) delivered, (\d+) learned from", program.output)
    return int(line[1]), int(line[2])


def test_all_hosts_vanish_without_a_word_and_come_back(tmp_path):
    with (
        hosts(2) as (one, two),
        serve(f"{one.ip}:50051", host=one) as first,
        serve(f"{two.ip}:50052", host=two) as second,
        learn(tmp_path, f"{one.ip}:50051,{two.ip}:50052") as learner,
    ):
        wait_for_steps(tmp_path, 1000)
        one.cut_off(first)
        two.cut_off(second)
        for _ in range(2):  # After 20 s and more.
            learner.wait_for("no stream")
        one.restore(first)
        two.restore(second)
        for _ in range(2):
            learner.wait_for(": connected")
        wait_for_steps(tmp_path, 1000)
        learner.signal(signal.SIGINT)
        assert learner.end() == 130
        # One line when a server is lost, one when it is back.
        for address in (f"{one.ip}:50051", f"{two.ip}:50052"):
            assert learner.output.count(f"{address}: no stream") == 1
            assert learner.output.count(f"{address}: connected") == 1
        for server in (first, second):  # They had noticed, too.
            server.wait_for("disconnected")
