"""examples/slurm, on a real Slurm: a controller and three nodes on this machine."""

import contextlib
import os
import pathlib
import re
import secrets
import socket
import subprocess
import sys
import time

import pytest

from tests import certificates
from tests.programs import ROOT, cmdline, load, marked, wait_for_steps

SCRIPT = ROOT / "examples/slurm/train.sbatch"
SWEEP = ROOT / "examples/slurm/sweep.sbatch"
NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={path}/munge.sock
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
StateSaveLocation={path}/controller
SlurmctldLogFile={path}/controller.log
SlurmctldPidFile={path}/controller.pid
SlurmdSpoolDir={path}/%n
SlurmdLogFile={path}/%n.log
SlurmdPidFile={path}/%n.pid
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """Its commands, for jobs in a directory with certificates."""

    def __init__(self, path):
        self.path = path
        self.mark = secrets.token_hex(8)
        self.env = {**os.environ, "SLURM_CONF": str(path / "slurm.conf"),
                    "MARK": self.mark, "PYTHON": sys.executable,
                    "PYTHONPATH": str(ROOT), "SAVEDIR": str(path)}  # fmt: skip

    def __call__(self, *args):
        return subprocess.run(
            [*map(str, args)],
            env=self.env,
            cwd=self.path,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def submit(self, *args):
        return self("sbatch", "--parsable", "-J", "x", *args).strip()

    def jobs(self):
        """{job: its state}."""
        lines = self("squeue", "--noheader", "--format", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_until(self, condition):
        deadline = time.monotonic() + 60
        while not condition(self.jobs()):
            assert time.monotonic() < deadline, self.jobs()
            time.sleep(0.2)

    def output(self, job):
        return (self.path / f"x-{job}.out").read_text()

    def start_again(self, job):
        """Slurm waits two minutes before it starts a job that it has requeued."""
        self.wait_until(lambda jobs: jobs.get(job) == "PENDING")
        time.sleep(2)  # It would be taken for the old one within a second.
        self("scontrol", "update", f"JobId={job}", "StartTime=now")


@contextlib.contextmanager
def cluster(path):
    (path / "controller").mkdir()
    (path / "munge.key").write_bytes(secrets.token_bytes(1024))
    (path / "munge.key").chmod(0o600)
    host, gpus = socket.gethostname().partition(".")[0], path / "gpu"
    for i in range(2):
        pathlib.Path(f"{gpus}{i}").touch()
    (path / "gres.conf").write_text(f"Name=gpu File={gpus}[0-1]\n")
    ports = [16817, *range(17001, 17001 + len(NODES))]
    conf = CONF.format(path=path, host=host, port=ports[0])
    for node, port in zip(NODES, ports[1:]):
        conf += f"NodeName={node} NodeHostname={host} Port={port} CPUs=2 Gres=gpu:2\n"
        (path / node).mkdir()
    (path / "slurm.conf").write_text(conf)
    slurm = Slurm(path)
    files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid",
             "log-file": "munge.log", "seed-file": "munge.seed"}  # fmt: skip
    slurm("munged", "--force", *(f"--{k}={path / v}" for k, v in files.items()))
    try:
        slurm("slurmctld")
        for node in NODES:
            slurm("slurmd", "-N", node)
        deadline = time.monotonic() + 60
        while "idle" not in slurm("sinfo", "--noheader", "--format", "%t"):
            assert time.monotonic() < deadline, slurm("sinfo")
            time.sleep(0.5)
        yield slurm
        slurm("scancel", "--me")
        slurm.wait_until(lambda jobs: not jobs)
    finally:
        slurm("scontrol", "shutdown")
        for name in ("controller.pid", *(f"{node}.pid" for node in NODES), "munge.pid"):
            if (path / name).exists():  # It is removed at the end.
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int((path / name).read_text()), 15)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    path = tmp_path_factory.mktemp("slurm")
    certificates.make(path / "certs", "fleet", learners=",".join(NODES))
    with cluster(path) as slurm:
        yield slurm
    deadline = time.monotonic() + 20
    while left := marked(slurm.mark):
        assert time.monotonic() < deadline, [cmdline(pid) for pid in left]
        time.sleep(0.1)


def test_a_job_without_a_role_is_one_line():
    env = {**os.environ, "SLURM_JOB_NAME": "x", "SLURM_JOB_ID": "1"}
    for args in ([], ["learner", "--env", "CartPole-v1"]):
        result = subprocess.run(
            ["bash", SCRIPT, *args], capture_output=True, text=True, env=env
        )
        assert result.returncode == 2
        [line] = result.stderr.splitlines()
        assert line.startswith("train.sbatch: expected learners or hosts, got '")


@pytest.mark.long
def test_a_run_on_slurm_is_requeued_cancelled_resumed_and_ends_with_its_hosts(slurm):
    env = ("--env", "CartPole-v1")
    flags = (*env, "--total_steps", 10**8, "--batch_size", 4)
    learners = ("--gpus-per-node", 2, "--cpus-per-task", 1, SCRIPT, "learners")
    hosts = slurm.submit("--array", "1-2", "-c", 2, SCRIPT, "hosts", *env)
    first, second = f"{hosts}_1", f"{hosts}_2"
    # Hosts wait.
    slurm.wait_until(lambda jobs: list(jobs.values()) == ["RUNNING", "RUNNING"])
    job = slurm.submit(*learners, *flags)
    wait_for_steps(slurm.path, 2000)
    assert "2 learners on 1 hosts" in slurm.output(job)

    # An administrator requeues a host, then the learners.
    slurm("scontrol", "requeue", first)
    slurm.start_again(first)
    wait_for_steps(slurm.path, 2000)
    slurm("scontrol", "requeue", job)
    slurm.start_again(job)
    reached = load(slurm.path)["step"]
    assert reached >= 4000
    wait_for_steps(slurm.path, 2000)

    # Their time is up.
    slurm("scancel", "--batch", "--signal", "USR1", job)
    slurm.start_again(job)
    assert load(slurm.path)["step"] > reached
    reached = load(slurm.path)["step"]
    wait_for_steps(slurm.path, 2000)
    assert slurm.output(job).count("resuming ") == 2

    # Somebody cancels them, and submits them again. Then it is complete.
    slurm("scancel", job)
    slurm.wait_until(lambda jobs: set(jobs) == {first, second})
    assert load(slurm.path)["step"] > reached
    total = load(slurm.path)["step"] + 4000
    job = slurm.submit(*learners, *flags, "--total_steps", total)
    slurm.wait_until(lambda jobs: job not in jobs)
    assert load(slurm.path)["step"] == total, slurm.output(job)
    assert re.search(f"step {total} of {total};", slurm.output(job))
    slurm.wait_until(lambda jobs: not jobs)
    assert "Traceback" not in slurm.output(job)


@pytest.mark.long
def test_an_array_job_runs_each_combination_and_its_tasks_resume(slurm):
    program = (sys.executable, "-m", "monobeast", "--env", "CartPole-v1",
               "--num_actors", 0, "--log_interval_steps", 200)  # fmt: skip

    def submit(array, steps):
        flags = "--seed", "1,2", "--", *program, "--total_steps", steps
        return slurm.submit("--array", array, "-c", 1, SWEEP, *flags,
                            "--savedir", slurm.path)  # fmt: skip

    job = submit("1-3", 10**8)
    for seed in (1, 2):
        wait_for_steps(slurm.path, 1000, name=f"seed={seed}")
    # There is no third run.
    slurm.wait_until(lambda jobs: set(jobs) == {f"{job}_1", f"{job}_2"})
    assert slurm.output(f"{job}_3") == "sweep.sbatch: task 3 of 2 runs\n"

    # The first one's time is up.
    task = f"{job}_1"
    slurm("scancel", "--batch", "--signal", "USR1", task)
    slurm.start_again(task)
    wait_for_steps(slurm.path, 1000, name="seed=1")
    assert "resuming " in slurm.output(task)
    assert "resuming " not in slurm.output(f"{job}_2")

    # Somebody cancels them, and submits them again. Then they are complete.
    slurm("scancel", job)
    slurm.wait_until(lambda jobs: not jobs)
    steps = [load(slurm.path, f"seed={seed}")["step"] for seed in (1, 2)]
    total = min(steps) + 1000
    job = submit("1-2", total)
    slurm.wait_until(lambda jobs: not jobs)
    for seed, step in zip((1, 2), steps):
        assert load(slurm.path, f"seed={seed}")["step"] >= total
        done = "nothing is left to do" if step >= total else f" of {total}; results"
        assert done in slurm.output(f"{job}_{seed}")
