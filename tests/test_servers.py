"""Server processes that hang while they start, and children of other users."""

import argparse
import importlib
import os
import signal
import subprocess
import threading
import time

import pytest

import polybeast_env
from torchbeast import environment, process
from torchbeast.messages import BadInput, Stop
from torchbeast.process import Signals
from torchbeast.remote import servers


@pytest.fixture
def create_env(tmp_path, monkeypatch):
    """A function in a module whose import hangs where HANGS is set."""
    lines = "import os, time", "if 'HANGS' in os.environ:", "    time.sleep(3600)"
    text = "\n".join([*lines, "def create_env(flags, num_envs): pass"])
    (tmp_path / "hangs_at_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(servers, "END_S", 0)
    return importlib.import_module("hangs_at_import").create_env


def start(running):
    flags = {"env": "x", "num_servers": 1, "env_timeout_seconds": 0.5, "tls_cert": None}
    running.start_here(argparse.Namespace(**flags))


def test_a_signal_ends_the_wait_for_a_server_that_hangs_while_it_starts(
    create_env, monkeypatch
):
    monkeypatch.setenv("HANGS", "1")
    with Signals() as signals, servers.Servers(create_env) as running:
        os.kill(os.getpid(), signal.SIGTERM)
        start(running)
        with pytest.raises(Stop, match="stopped by SIGTERM"):
            signals.check()


@pytest.mark.survives("environment-hangs")
def test_a_server_that_hangs_while_it_starts_is_given_up(create_env, monkeypatch):
    monkeypatch.setenv("HANGS", "1")
    monkeypatch.setattr(servers, "START_S", 1)
    with servers.Servers(create_env) as running:
        with pytest.raises(BadInput, match="the server at .* did not start within 1 s"):
            start(running)


@pytest.mark.survives("environment-hangs")
def test_a_server_that_hangs_while_it_starts_again_is_killed(create_env, monkeypatch):
    with servers.Servers(create_env) as running:
        start(running)
        [server] = running._servers
        monkeypatch.setattr(servers, "START_S", 1)
        monkeypatch.setenv("HANGS", "1")
        server.process.kill()
        deadline, first = time.monotonic() + 60, server.process
        while server.process is first:
            assert time.monotonic() < deadline
            running.restart_ended()
            time.sleep(0.05)
        hanging = server.process
        monkeypatch.delenv("HANGS")
        while hanging.poll() is None:
            assert time.monotonic() < deadline
            running.restart_ended()
            time.sleep(0.05)
        monkeypatch.setattr(servers, "START_S", 60)
        while not server.ready:
            assert time.monotonic() < deadline
            running.restart_ended()
            time.sleep(0.05)


@pytest.mark.survives("second-signal")
def test_children_are_killed_though_one_is_of_another_user(monkeypatch):
    """As with sudo, or a program that is setuid."""
    children = [subprocess.Popen(["sleep", "100"]) for _ in range(3)]
    theirs, kill = children[1].pid, os.kill

    def refuse(pid, signum):
        if pid == theirs:
            raise PermissionError
        kill(pid, signum)

    with monkeypatch.context() as patch:
        patch.setattr(process.os, "kill", refuse)
        process.kill_children({child.pid for child in children})
    assert children[0].wait(30) == children[2].wait(30) == -signal.SIGKILL
    assert children[1].poll() is None
    children[1].kill()
    children[1].wait()


def test_a_signal_ends_the_command_while_its_servers_start(
    create_env, monkeypatch, tmp_path
):
    monkeypatch.setenv("HANGS", "1")
    monkeypatch.setattr(polybeast_env, "create_env", create_env)
    monkeypatch.setattr(environment, "probe", lambda *_: None)
    timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    words = ["--num_servers", "1", "--address", f"unix:{tmp_path}/s"]
    assert polybeast_env.main(words) == 128 + signal.SIGTERM
    timer.cancel()  # If that was for another reason.
