"""MonoBeast and WarpBeast where there is less than on Linux: not_linux/sitecustomize.py
hides what macOS lacks. Nobody has tried them on macOS itself."""

import os
import resource
import select
import signal
import subprocess
import sys

import pytest

from tests.programs import (
    ROOT,
    TIMEOUT_S,
    Program,
    args,
    load,
    read_logs,
    run,
    wait_for_steps,
)
from torchbeast import machine, process


@pytest.fixture
def hidden(monkeypatch):
    """Programs that are started now find none of it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/not_linux"))


@pytest.fixture
def no_proc(monkeypatch):
    """This process does not see /proc."""
    monkeypatch.setattr(process.os.path, "exists", lambda path: False)


@pytest.fixture
def sleeper():
    words = ["sh", "-c", "sleep 300 & wait"]
    with subprocess.Popen(words, start_new_session=True) as shell:
        yield shell
        process.kill_group(shell)


def test_children_are_found_and_killed_without_proc(no_proc, sleeper):
    assert sleeper.pid in process.children()
    while not (grandchildren := process.children(sleeper.pid)):
        pass
    [ended] = map(os.pidfd_open, grandchildren)
    process.kill_children({sleeper.pid})
    assert sleeper.wait() == -signal.SIGKILL
    assert select.select([ended], [], [], TIMEOUT_S)[0]
    os.close(ended)


def test_where_there_is_no_ps_either_no_children_are_known(no_proc, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert process.children() == set()


def test_without_an_account_of_cores_all_are_used(monkeypatch):
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(machine, "_num_cores", None)
    assert machine.num_cores() == 6
    assert machine.core_shares(2) == [{0, 1, 2}, {3, 4, 5}]
    machine.use_only({0})  # Does nothing.


def test_without_meminfo_the_available_memory_is_the_machines(monkeypatch):
    def no_file(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(machine, "open", no_file, raising=False)
    assert machine.available_memory_bytes() == machine.memory_bytes() > 2**20
    assert machine.rss_mb() is None


def test_a_limit_of_open_files_that_is_none_is_not_asked_for(monkeypatch):
    limits = []

    def set_limit(_, limit):
        if limit[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(limit)

    monkeypatch.setattr(resource, "setrlimit", set_limit)
    hard = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, hard))
    process.allow_open_files(100)
    process.allow_open_files(1000)
    assert limits == [(1064, hard)]


# Programs.


@pytest.mark.slow
def test_the_shim_hides_all_of_it(hidden):
    code = """import ctypes, multiprocessing, os, pathlib, select, shutil
for hidden in (
    lambda: open("/proc/self/statm"), lambda: os.listdir("/proc"),
    lambda: pathlib.Path("/proc/meminfo").read_text(), lambda: os.stat("/proc"),
    lambda: shutil.disk_usage("/dev/shm"), lambda: os.sched_getaffinity(0),
    lambda: select.epoll(), lambda: ctypes.CDLL(None).prctl,
    lambda: multiprocessing.get_context("fork"),
):
    try:
        hidden()
    except (OSError, AttributeError, ValueError):
        print("hidden")
assert multiprocessing.get_start_method() == "spawn"
"""
    words = [sys.executable, "-c", code]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.stdout.split() == ["hidden"] * 9 and not result.stderr


PROGRAMS = {
    "monobeast": ("--num_actors", 2, "--eval_interval_steps", 2000),
    "warpbeast": ("--env", "warp/Catch", "--num_envs", 8),
}


@pytest.mark.long
@pytest.mark.parametrize("module", PROGRAMS)
def test_a_program_trains_resumes_and_plays(module, hidden, savedir):
    flags = PROGRAMS[module]
    if module == "monobeast":
        flags = (*args(module, savedir)[:6], *flags, "--num_test_episodes", 2)
    else:
        flags = (*flags, "--savedir", savedir, "--xpid", "x")
    for steps in (3000, 6000):
        result = run(*flags, "--total_steps", steps, module=module)
        assert result.returncode == 0, result.stderr
        assert load(savedir)["step"] >= steps
        assert "Traceback" not in result.stderr
    assert read_logs(savedir / "x")[-1]["rss_mb"] == ""  # The shim was there.
    result = run(*flags, "--mode", "test", module=module)
    assert result.returncode == 0 and "mean return" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_is_left_of_monobeast_when_it_is_ended(signum, code, hidden, savedir):
    flags = args("monobeast", savedir, "--num_actors", 2)
    with Program(*flags) as program:
        wait_for_steps(savedir, 2000)
        program.signal(signum)
        assert program.end() == code


@pytest.mark.long
def test_the_launcher_runs_two_at_a_time(hidden, savedir):
    words = ["--slots", "2" if machine.num_cores() > 1 else "1", "--seed", "1,2", "--"]
    words += [sys.executable, "-m", "monobeast", "--env", "CartPole-v1"]
    words += ["--num_actors", "0", "--total_steps", "2000", "--savedir", str(savedir)]
    result = run(*words, module="torchbeast.launch")
    assert result.returncode == 0, result.stderr
    assert [load(savedir, f"seed={i}")["step"] for i in (1, 2)] == [2000, 2000]
