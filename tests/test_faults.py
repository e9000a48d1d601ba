"""Both programs, and what their machine does to them. What takes longer is in
faults.py; what an environment or a network does, in test_program.py and
test_polybeast_faults.py.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import pty
import resource
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest
import torch

import polybeast_env
from tests import zygote
from tests.programs import (
    ROOT,
    SERIAL,
    TIMEOUT_S,
    args,
    both,
    command,
    disk,
    load,
    main,
    mono_first,
    poly_first,
    read_logs,
    refusal,
    run,
    succeeds,
    wait_for_steps,
    workers,
)
from tests.test_polybeast_env import free_port
from torchbeast import actors, files, machine, process
from torchbeast.log_writer import COLUMNS
from torchbeast.messages import BadInput
from torchbeast.remote import servers

LOG = ("--log_interval_steps", 40)  # A line for every update.


def quick(module, *others, **kwargs):
    """As args(), of a program without child processes that import PyTorch."""
    return args(module, *others, *(SERIAL if module == "monobeast" else ()), **kwargs)


# Two runs of one name.


@pytest.mark.survives("run-in-use")
@both
def test_a_run_that_is_being_trained_is_refused_naming_who_does(trained, module):
    with files.lock(trained / "x" / "lock"):
        before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
        line = refusal(*args(module, trained, steps=400), module=module)
        assert f"--xpid x is being trained by process {os.getpid()} on " in line
        assert before == {path: path.stat().st_mtime_ns for path in trained.rglob("*")}


@pytest.mark.survives("no-locks")
def test_where_nothing_can_be_locked_there_is_a_warning(tmp_path, monkeypatch, caplog):
    def no_locks(file, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    monkeypatch.setattr(files.log, "handlers", [caplog.handler])
    files.lock(tmp_path / "lock").close()
    assert "lock: not locked: No locks available" in caplog.text


# Checkpoints that are none.


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (pathlib.Path.touch, (self.path,))


def without(name):
    """A checkpoint in which that is missing."""

    def damage(path):
        checkpoint = torch.load(path, weights_only=True)
        del checkpoint[name]
        torch.save(checkpoint, path)

    return damage


def directory(path):
    path.unlink()
    path.mkdir()


DAMAGE = {
    "code": lambda path: torch.save({"model": Evil(path.with_name("ran"))}, path),
    "code in the old format": lambda path: torch.save(
        Evil(path.with_name("ran")), path, _use_new_zipfile_serialization=False
    ),
    "code without a format": lambda path: path.write_bytes(
        __import__("pickle").dumps(Evil(path.with_name("ran")))
    ),
    "TorchScript": lambda path: torch.jit.save(
        torch.jit.script(torch.nn.Linear(1, 1)), path
    ),
    "garbage": lambda path: path.write_bytes(b"garbage"),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "directory": directory,
    "a number": lambda path: torch.save(7, path),
    "no flags": without("flags"),
    "no flags of an agent": lambda path: torch.save({"flags": 1, "step": 1}, path),
    "no step": without("step"),
}
OTHERS = ("monobeast", "test"), ("polybeast", "train"), ("polybeast", "test")


@pytest.mark.survives("checkpoint-damaged")
@pytest.mark.parametrize(
    ("module", "mode", "damage"),
    [
        *(("monobeast", "train", damage) for damage in DAMAGE),
        *((module, mode, "code") for module, mode in OTHERS),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_one_line_and_not_run(
    trained, module, mode, damage
):
    path = trained / "x" / "model.tar"
    DAMAGE[damage](path)
    line = refusal(*args(module, trained), "--mode", mode, module=module)
    assert f"{path} is not a checkpoint that can be read: " in line
    assert "weights_only" not in line
    assert not path.with_name("ran").exists()


@pytest.mark.survives("checkpoint-damaged")
@pytest.mark.parametrize("name", ["model", "optimizer", "updates"])
@both
def test_a_checkpoint_in_which_something_of_the_agents_is_missing_is_not_resumed(
    trained, module, name
):
    path = trained / "x" / "model.tar"
    checkpoint = load(trained)
    del checkpoint["agent"][name]
    torch.save(checkpoint, path)
    line = refusal(*args(module, trained), module=module)
    assert f"checkpoint {path} lacks the agent's '{name}'" in line


# Disks.


@contextlib.contextmanager
def limited_files(num_bytes):
    """A write past it fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_one_error(result, *words):
    """The program ended with exit code 1, and said why once."""
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    errors = [x for x in result.stderr.splitlines() if all(w in x for w in words)]
    assert len(errors) == 1, result.stderr


@pytest.mark.slow
@pytest.mark.survives("disk-full-logging")
@poly_first
def test_full_disk_under_tensorboard_ends_the_run_without_a_traceback(savedir, module):
    flags = ("--disable_checkpoint", "--unroll_length", 1, "--log_interval_steps", 2)
    with limited_files(300_000):  # MonoBeast's weights in shared memory have 270,000.
        result = main(*quick(module, savedir, *flags), module=module)
    assert result.returncode == 1
    assert "File too large" in result.stderr and str(savedir / "x") in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.survives("disk-full-saving")
@both
def test_full_disk_while_saving_keeps_the_last_checkpoint(trained, module):
    before = (trained / "x" / "model.tar").read_bytes()
    with limited_files(len(before) // 2):
        result = main(*quick(module, trained, steps=800), module=module)
    assert_one_error(result, "File too large", "model.tar")
    assert (trained / "x" / "model.tar").read_bytes() == before
    assert not list((trained / "x").glob("*.tmp"))


@pytest.mark.survives("disk-full-logging")
@both
def test_full_disk_while_logging_ends_the_run_with_one_error(tmp_path, module):
    with disk(tmp_path / "disk", "size=1m") as path:
        (path / "other").write_bytes(bytes(2**20 - 28_000))
        flags = (*LOG, "--disable_checkpoint")
        result = main(*quick(module, path, *flags), module=module)
        assert_one_error(result, "No space left on device", "no checkpoint was written")
        logs = (path / "x" / "logs.csv").read_text()
        # There is room again, and the run begins anew.
        (path / "other").unlink()
        succeeds(*quick(module, path, *flags, steps=400), module=module)
        assert (path / "x" / "attempt-1" / "logs.csv").read_text() == logs


@pytest.mark.survives("disk-read-only")
@both
def test_a_disk_that_cannot_be_written_to_is_one_line(trained, module):
    with disk(trained, "bind") as path:
        line = refusal(*args(module, path), module=module)
        assert f"--savedir {path}" in line and "Read-only file system" in line
        # Testing only reads.
        test = main(*args(module, path), "--mode", "test", "--num_test_episodes", 1,
                    module=module)  # fmt: skip
        assert test.returncode == 0 and "1 episodes: mean return" in test.stdout
        assert "test.json: not written: Read-only file system" in test.stderr


@pytest.mark.survives("logs-damaged")
@both
def test_logs_and_notes_that_were_damaged_do_not_hold_up_a_run(trained, module):
    """As a machine leaves them whose power failed."""
    path = trained / "x"
    header = ",".join([*COLUMNS, "total_loss"])
    row = ",".join(["400"] + ["1"] * header.count(","))
    later = row.replace("400", "440", 1)  # Made after the checkpoint.
    text = f"{header}\n{row}\n{later}\n400,1\n\0\0\0\0\n40"
    (path / "logs.csv").write_text(text)
    (path / "meta.json").write_bytes(bytes(100))
    result = succeeds(*quick(module, trained, *LOG, steps=600), module=module)
    assert [int(r["step"]) for r in read_logs(path)] == [400, 440, 480, 520, 560, 600]
    assert json.loads((path / "meta.json").read_text())["first_step"] == 400
    assert "meta.json is written anew" in result.stderr


@pytest.mark.survives("logs-damaged")
@pytest.mark.parametrize(
    ("module", "logs", "notes"),
    [
        ("monobeast", bytes(200_000), "[]"),
        ("polybeast", b"\xff\xfe" * 2500, '{"earlier_sessions": 5}'),
        ("monobeast", b"%s" + 200_000 * b"x", "null"),
        ("polybeast", b'%s"1' + 200_000 * b"\n1,2", "[7]"),
    ],
)
def test_nor_do_those_of_which_nothing_is_left(trained, module, logs, notes):
    path = trained / "x"
    header = ",".join([*COLUMNS, "total_loss"]).encode() + b"\n"
    (path / "logs.csv").write_bytes(logs.replace(b"%s", header))
    (path / "meta.json").write_text(notes)
    result = succeeds(*quick(module, trained, *LOG, steps=480), module=module)
    assert [int(r["step"]) for r in read_logs(path)] == [440, 480]
    assert "meta.json is written anew" in result.stderr


# Terminals and pipes.


@contextlib.contextmanager
def started(module, savedir, *others, **kwargs):
    """The program as a subprocess.Popen."""
    process = zygote.start(
        command(*args(module, savedir, *LOG, *others), module=module),
        cwd=ROOT, start_new_session=True, **kwargs,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.survives("terminal-closed")
@mono_first
def test_a_terminal_that_is_closed_ends_a_run_as_a_signal_does(savedir, module):
    ours, its = pty.openpty()

    def read():  # What is not read is waited for.
        with contextlib.suppress(OSError):
            while True:
                os.read(ours, 1000)

    with started(
        module, savedir, stdin=its, stdout=its, stderr=its,
        env={**os.environ, "TERM": "xterm"},
        preexec_fn=lambda: fcntl.ioctl(its, termios.TIOCSCTTY, 0),
    ) as process:  # fmt: skip
        os.close(its)
        threading.Thread(target=read, daemon=True).start()
        wait_for_steps(savedir, 40)
        os.close(ours)
        for _ in range(3):  # The shell sends one, the system another.
            process.send_signal(signal.SIGHUP)
            time.sleep(0.1)
        # After the run has ended it is the system that ends it.
        assert process.wait(TIMEOUT_S) in (128 + signal.SIGHUP, -signal.SIGHUP)
    assert load(savedir)["step"] > 0
    assert "stopped by SIGHUP" in (savedir / "x" / "out.log").read_text()


@pytest.mark.slow
@pytest.mark.survives("terminal-closed")
@poly_first
def test_nohup_lets_a_run_go_on(savedir, module):
    with started(
        module, savedir, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    ) as process:  # fmt: skip
        wait_for_steps(savedir, 40)
        os.killpg(process.pid, signal.SIGHUP)
        wait_for_steps(savedir, 400)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM


@pytest.mark.survives("output-closed")
@poly_first
def test_signals_end_a_run_whose_output_nobody_reads(savedir, module):
    reader, writer = os.pipe()
    with started(module, savedir, stderr=writer) as process:
        wait_for_steps(savedir, 40)
        fill = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fill, b" ")
        [child] = workers(process.pid)
        os.kill(child, signal.SIGKILL)  # It has something to say about that.
        time.sleep(2)
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None:
            assert time.monotonic() < deadline
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        assert process.returncode == 128 + signal.SIGTERM
    for end in (reader, writer, fill):
        os.close(end)


@pytest.mark.slow
@pytest.mark.survives("output-closed")
@mono_first
def test_a_run_without_input_and_output_trains(savedir, module):
    shell = shlex.join(command(*quick(module, savedir, steps=400), module=module))
    shell = ["sh", "-c", f"exec {shell} <&- >&- 2>&-"]
    assert subprocess.run(shell, cwd=ROOT, timeout=TIMEOUT_S).returncode == 0
    assert load(savedir)["step"] == 400
    assert "step 400 of 400" in (savedir / "x" / "out.log").read_text()


# Open files and processes.


@pytest.mark.survives("open-files-too-few")
@pytest.mark.parametrize("module", ["monobeast", "polybeast", "polybeast_env"])
def test_too_few_open_files_are_one_line(tmp_path, module, monkeypatch):
    monkeypatch.setattr(process.resource, "getrlimit", lambda _: (48, 48))
    env = ("--env", "CartPole-v1")
    flags = env if module == "polybeast_env" else args(module, tmp_path)
    assert "open files, the limit is 48" in refusal(*flags, module=module)


@pytest.mark.slow
@pytest.mark.survives("open-files-too-few")
@both
def test_more_open_files_are_allowed_for_where_that_is_possible(tmp_path, module):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 4096))

    result = run(*args(module, tmp_path, steps=40), module=module, preexec_fn=limit)
    assert result.returncode == 0, result.stderr


@pytest.mark.survives("open-files-too-few")
def test_the_limit_of_open_files_is_raised_as_far_as_the_system_allows(monkeypatch):
    limits = []
    monkeypatch.setattr(process.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(
        process.resource, "setrlimit", lambda _, limit: limits.append(limit)
    )
    process.allow_open_files(100)
    assert limits == [(4096, 4096)]
    with pytest.raises(BadInput, match="open files, the limit is 4096"):
        process.allow_open_files(4096)


def test_what_is_only_looked_at_ends_no_run(tmp_path, monkeypatch):
    def no_file(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(machine, "open", no_file, raising=False)
    flags = args("monobeast", tmp_path, *SERIAL, "--log_interval_steps", 40, steps=80)
    succeeds(*flags)
    rows = read_logs(tmp_path / "x")
    assert [(row["step"], row["rss_mb"]) for row in rows] == [("40", ""), ("80", "")]


def test_a_limit_that_is_too_low_for_hosts_names_the_flag_to_lower(tmp_path):
    flags = ("--listen", "127.0.0.1:1", "--max_streams", 10**5, "--savedir", tmp_path)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard > 2 * 10**5:
        pytest.skip("this machine allows 200,000 open files")
    assert "or use a smaller --max_streams" in refusal(*flags, module="polybeast")
    assert not list(tmp_path.iterdir())


@pytest.mark.survives("signal")
def test_the_first_of_two_signals_gives_the_exit_code():
    script = """if True:
        import os, signal, sys
        from torchbeast.process import Signals

        class AtTheEnd:
            def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGTERM):
                kill(pid, signum)

        at_the_end = AtTheEnd()
        with Signals() as signals:
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        sys.exit(signals.stop().exit_code)
    """
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT)
    assert result.returncode == 130


def test_a_signal_long_after_the_first_is_what_it_was_before():
    script = """if True:
        import signal, time
        from torchbeast.process import ignore_again

        ignore_again(time.monotonic() - 2)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGTERM)
    """
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT)
    assert result.returncode == -signal.SIGTERM


def no_processes(*args, **kwargs):
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.survives("actor-cannot-start")
def test_an_actor_that_cannot_be_started_ends_the_run_with_one_error(
    savedir, monkeypatch
):
    monkeypatch.setattr(actors.resource_tracker, "ensure_running", no_processes)
    result = main(*args("monobeast", savedir))
    error = "actor 0 cannot be started: Resource temporarily unavailable"
    assert_one_error(result, error)
    assert load(savedir)["step"] == 0


@pytest.mark.survives("server-cannot-start")
def test_a_server_is_started_again_as_soon_as_that_is_possible(monkeypatch, caplog):
    monkeypatch.setattr(files.log, "handlers", [caplog.handler])
    flags = polybeast_env.parser().parse_args(["--env", "CartPole-v1"])
    popen = servers.subprocess.Popen

    def restart_until(text):
        while text not in caplog.text:
            running.restart_ended()
            time.sleep(0.01)

    with servers.Servers(polybeast_env.create_env) as running:
        running.start(flags, [f"127.0.0.1:{free_port()}"])
        running.kill()
        monkeypatch.setattr(servers.subprocess, "Popen", no_processes)
        restart_until("cannot be started again: Resource temporarily unavailable")
        monkeypatch.setattr(servers.subprocess, "Popen", popen)
        restart_until("started again\n")


@pytest.mark.survives("shared-memory-too-small")
def test_without_shared_memory_monobeast_is_refused_in_one_line(savedir, monkeypatch):
    def no_memory(self):
        raise RuntimeError("unable to open shared memory object: Read-only file system")

    monkeypatch.setattr(torch.Tensor, "share_memory_", no_memory)
    line = refusal(*args("monobeast", savedir))
    assert "/dev/shm: RuntimeError: unable to open shared memory object" in line
