"""examples/ray: hosts on a Ray cluster, all of whose nodes are on this machine."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.programs import ROOT, cmdline, step, wait_for_steps
from tests.test_dialing import CARTPOLE, here, listen

FLEET = ROOT / "examples/ray/fleet.py"


@contextlib.contextmanager
def cluster(num_nodes):
    """A cluster whose head runs no actors."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        cluster.nodes = [cluster.add_node(num_cpus=2) for _ in range(num_nodes)]
        yield cluster
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def fleet(cluster, output, *args):
    command = [sys.executable, FLEET, "--hosts", 2, "--num_servers", 1, *args]
    env = {**os.environ, "RAY_ADDRESS": cluster.address}
    with (
        open(output, "w") as f,
        subprocess.Popen([*map(str, command)], stdout=f, stderr=f, env=env) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def hosts(address):
    """The processes of hosts that dial the learner."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        line = cmdline(int(path.name))
        if "-m polybeast_env " in line and address in line:
            found.append(int(path.name))
    return sorted(found)


def wait_for_hosts(address, num, without=(), timeout_s=90):
    """Until there are so many of them, other than those. Returns them."""
    deadline = time.monotonic() + timeout_s
    while len(found := hosts(address)) != num or set(found) & set(without):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


def parent(pid):
    return psutil.Process(pid).ppid()


def test_without_ray_it_says_what_is_missing():
    code = "import runpy, sys; sys.modules['ray'] = None; runpy.run_path(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", code, FLEET], capture_output=True, text=True
    )
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line == "fleet: error: missing ray, expected pip install 'ray[default]'"


@pytest.mark.long
def test_hosts_on_ray_outlive_processes_and_nodes_and_the_learner_outlives_ray(
    savedir, tmp_path
):
    address, output = here(), tmp_path / "fleet.out"
    args = ("--learner", address, "--env", CARTPOLE)
    with listen(savedir, address) as learner:
        with cluster(2) as ray, fleet(ray, output, *args) as program:
            first = wait_for_hosts(address, 2)
            wait_for_steps(savedir, 2000)

            os.kill(first[0], signal.SIGKILL)  # A host.
            second = wait_for_hosts(address, 2, without=first[:1])
            os.kill(parent(second[0]), signal.SIGKILL)  # Ray's actor around it.
            third = wait_for_hosts(address, 2, without=second[:1])
            wait_for_steps(savedir, 2000)

            ray.remove_node(ray.nodes[0], allow_graceful=False)
            assert len(set(wait_for_hosts(address, 2)) | set(third)) >= 2
            wait_for_steps(savedir, 2000)

            ray.remove_node(ray.head_node, allow_graceful=False)
            wait_for_hosts(address, 0, timeout_s=240)  # Nodes wait for it for a minute.
            assert program.wait(120) != 0
        assert "ended (exit code -9), starts again" in output.read_text()
        reached = step(savedir)
        with cluster(1) as ray:
            with fleet(ray, output, *args) as program:
                wait_for_steps(savedir, 2000)
                program.send_signal(signal.SIGINT)
                assert program.wait(60) == 130
                wait_for_hosts(address, 0)
            with fleet(ray, output, *args, "--env", "CartPoel-v1") as program:
                assert program.wait(120) == 2
            assert "CartPole-v1" in output.read_text()
            assert "Traceback" not in output.read_text()
        assert step(savedir) > reached
        learner.stop()
