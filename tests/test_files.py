"""Directories of sockets, and what is never deleted with them."""

import contextlib
import os
import pathlib
import signal
import socket
import tempfile
import time

import pytest

from torchbeast import files


@pytest.fixture(autouse=True)
def temporary(monkeypatch):
    """The machine's temporary directory; sockets' paths must be short."""
    with tempfile.TemporaryDirectory() as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield pathlib.Path(path)


def make(path, *names):
    """A directory that a killed process has left, with a socket and these files."""
    path.mkdir()
    for name in ("lock", *names):
        (path / name).touch()
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(path / "server0"))
    return path


def sweep():
    with contextlib.ExitStack() as stack:
        return pathlib.Path(files.socket_directory(stack))


def test_a_socket_directory_lives_as_long_as_the_stack(temporary):
    with contextlib.ExitStack() as stack:
        path = pathlib.Path(files.socket_directory(stack))
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(path / "server0"))
        assert [p.name for p in sorted(path.iterdir())] == ["lock", "server0"]
        assert sweep() != path and path.exists()
    assert list(temporary.iterdir()) == []


def test_the_sockets_of_a_killed_process_are_removed(temporary):
    killed = make(temporary / f"{files.SOCKETS}killed")
    sweep()
    assert not killed.exists()


def test_a_finished_run_in_the_temporary_directory_stays(temporary):
    """Its default name begins with torchbeast-, and it has a lock that nobody holds."""
    run = make(temporary / "torchbeast-20261124-120000-7", "model.tar", "logs.csv")
    sweep()
    assert {p.name for p in run.iterdir()} >= {"lock", "model.tar", "logs.csv"}


@pytest.mark.parametrize("name", ["model.tar", "notes"])
def test_a_directory_with_anything_but_sockets_stays_whole(temporary, name):
    other = make(temporary / f"{files.SOCKETS}other", name)
    sweep()
    assert {p.name for p in other.iterdir()} == {"lock", "server0", name}


def test_a_directory_of_another_user_stays(temporary, monkeypatch):
    other = make(temporary / f"{files.SOCKETS}other")
    uid = os.getuid()
    monkeypatch.setattr(files.os, "getuid", lambda: uid + 1)
    files.remove_sockets(other)
    assert len(list(other.iterdir())) == 2


def test_a_link_to_a_directory_is_not_followed(temporary):
    elsewhere = make(temporary / "elsewhere")
    (temporary / f"{files.SOCKETS}link").symlink_to(elsewhere)
    sweep()
    assert len(list(elsewhere.iterdir())) == 2


def test_a_link_of_somebody_else_is_not_replaced(temporary):
    theirs, run = temporary / "theirs", temporary / "run"
    theirs.mkdir()
    latest = temporary / "latest"
    for target in (theirs, "missing/theirs", "run.old"):
        latest.symlink_to(target)
        files.link(run, "latest")
        ours = target == "run.old"
        assert os.readlink(latest) == ("run" if ours else str(target))
        latest.unlink()


def test_a_lock_ends_with_its_process_while_a_fork_of_that_lives(temporary):
    """As of an environment in the learner's process."""
    lock, (ours, theirs) = files.lock(temporary / "lock"), os.pipe()
    if (pid := os.fork()) == 0:
        os.write(theirs, b".")
        time.sleep(300)
        os._exit(0)
    try:
        os.read(ours, 1)
        with pytest.raises(files.Locked):
            files.lock(temporary / "lock")
        lock.close()
        files.lock(temporary / "lock").close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ours)
        os.close(theirs)
