"""Tests that are broken off leave nothing that runs."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests import zygote
from tests.programs import ROOT, TIMEOUT_S, cmdline, command, marked

# What a test may start, none of which Ctrl-C would reach.
TEST = """
import os, pathlib, signal, subprocess, time
from tests.programs import Program

def test_that_never_ends(tmp_path):
    flags = "--env", "CartPole-v1", "--num_servers", 1, "--address", "unix:" + ADDRESS
    with Program(*flags, module="polybeast_env") as program:
        program.wait_for("environments for each stream")
        if os.fork() == 0:  # With all open that is open in the process of the test.
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(1000)
            os._exit(0)
        process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        pathlib.Path("new").write_text(str(os.getpid()))
        os.rename("new", "started")
        process.wait()
"""
BROKEN_OFF = [
    ((), "test", signal.SIGKILL),
    ((), "test", signal.SIGINT),
    ((), "test", signal.SIGTERM),
    (("-n", "1"), "test", signal.SIGKILL),
    (("-n", "1"), "pytest", signal.SIGKILL),
    (("-n", "1"), "pytest", signal.SIGTERM),
    (("-n", "1"), "group", signal.SIGINT),
]


@pytest.mark.parametrize(
    ("flags", "who", "signum"),
    [
        BROKEN_OFF[0],
        *(pytest.param(*x, marks=pytest.mark.long) for x in BROKEN_OFF[1:-1]),
        pytest.param(*BROKEN_OFF[-1], marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_of_tests_that_are_broken_off(tmp_path, flags, who, signum):
    started = tmp_path / "started"
    test = f"ADDRESS = {os.environ['TMPDIR'] + '/' + started.parent.name!r}\n{TEST}"
    (tmp_path / "test_it.py").write_text(test)
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", *flags, "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OF": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + TIMEOUT_S
    while not started.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    pids = marked(str(tmp_path))
    assert sum("polybeast_env" in cmdline(pid) for pid in pids) == 1
    assert sum("sleep" in cmdline(pid) for pid in pids) == 1
    if who == "group":
        os.killpg(process.pid, signum)
    else:
        pid = {"test": int(started.read_text()), "pytest": process.pid}[who]
        os.kill(pid, signum)
    process.wait(TIMEOUT_S)
    while (left := marked(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, [cmdline(pid) for pid in left]


def test_a_program_that_is_forked_is_what_a_new_process_would_be():
    words, found = command("--env", "Nope-v0"), []
    for start in (subprocess.Popen, zygote.Forked):
        with start(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            found.append((process.stderr.read(), process.wait(TIMEOUT_S)))
    assert found[0] == found[1] and found[0][1] == 2
