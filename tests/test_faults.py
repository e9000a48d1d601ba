"""Both programs, and what their machine does to them. What takes longer is in
faults.py; what an environment or a network does, in test_program.py and
test_polybeast_faults.py.
"""

import contextlib
import errno
import fcntl
import importlib
import json
import os
import pathlib
import pty
import resource
import shlex
import shutil
import signal
import subprocess
import termios
import threading
import time

import pytest
import torch

import actors
import files
import monobeast
import polybeast_env
from tests.programs import (
    ROOT,
    TIMEOUT_S,
    Program,
    command,
    disk,
    read_logs,
    run,
    wait_for_steps,
)
from tests.test_polybeast_env import free_port

SMALL = {
    "monobeast": ("--num_actors", 1, "--envs_per_actor", 2),
    "polybeast": ("--num_servers", 1, "--envs_per_server", 2),
}
both = pytest.mark.parametrize("module", SMALL)


def args(module, savedir, *others, env="CartPole-v1", steps=10**8):
    """Run "x" of a program."""
    return ("--env", env, "--savedir", savedir, "--xpid", "x", "--total_steps", steps,
            "--batch_size", 2, *SMALL[module], *others)  # fmt: skip


def start(module, savedir, *others, **kwargs):
    return Program(*args(module, savedir, *others, **kwargs), module=module)


def refused(module, capfd, *args):
    """The one line with which the program, in this process, refuses."""
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(module).main([str(a) for a in args])
    assert exit.value.code == 2
    [line] = capfd.readouterr().err.splitlines()
    return line


def load(savedir):
    return torch.load(savedir / "x" / "model.tar", weights_only=True)


@pytest.fixture
def savedir(tmp_path):
    return tmp_path / "logs"


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    savedir = tmp_path_factory.mktemp("trained")
    for module in SMALL:
        directory = savedir / module
        result = run(*args(module, directory, steps=400), module=module)
        assert result.returncode == 0, result.stderr
    return savedir


@pytest.fixture
def trained(trained_once, module, savedir):
    """A savedir of its own, with a run of 400 steps."""
    shutil.copytree(trained_once / module, savedir, symlinks=True)
    return savedir


# Two runs of one name.


@both
def test_a_run_that_is_being_trained_is_refused_naming_who_does(trained, module, capfd):
    with files.lock(trained / "x" / "lock"):
        before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
        line = refused(module, capfd, *args(module, trained, steps=400))
        assert f"--xpid x is being trained by process {os.getpid()} on " in line
        assert before == {path: path.stat().st_mtime_ns for path in trained.rglob("*")}


def test_where_nothing_can_be_locked_there_is_a_warning(tmp_path, monkeypatch, caplog):
    def no_locks(file, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    monkeypatch.setattr(files.log, "propagate", True)
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
    "no weights": without("model"),
    "no step": without("step"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("mode", ["train", "test"])
@both
def test_what_is_no_checkpoint_is_refused_in_one_line_and_not_run(
    trained, module, mode, damage, capfd
):
    path = trained / "x" / "model.tar"
    DAMAGE[damage](path)
    line = refused(module, capfd, *args(module, trained), "--mode", mode)
    assert f"{path} is not a checkpoint that can be read: " in line
    assert not path.with_name("ran").exists()


@both
def test_a_checkpoint_of_which_something_is_missing_is_not_resumed(
    trained, module, capfd
):
    without("optimizer")(trained / "x" / "model.tar")
    line = refused(module, capfd, *args(module, trained))
    assert "not a checkpoint that can be read: KeyError: 'optimizer'" in line


# Disks.


def limit_files_to(num_bytes):
    """For preexec_fn: a write past it fails, as on a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def assert_one_error(result, *words):
    """The program ended with exit code 1, and said why once."""
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    errors = [x for x in result.stderr.splitlines() if all(w in x for w in words)]
    assert len(errors) == 1, result.stderr


@both
def test_full_disk_under_tensorboard_ends_the_run_without_a_traceback(savedir, module):
    others = ("--log_interval_steps", 40, "--disable_checkpoint")
    result = run(*args(module, savedir, *others), module=module,
                 preexec_fn=limit_files_to(300_000))  # fmt: skip
    assert result.returncode == 1
    assert "File too large" in result.stderr and str(savedir / "x") in result.stderr
    assert "Traceback" not in result.stderr


@both
def test_full_disk_while_saving_keeps_the_last_checkpoint(trained, module):
    before = (trained / "x" / "model.tar").read_bytes()
    result = run(*args(module, trained, steps=2000), module=module,
                 preexec_fn=limit_files_to(len(before) // 2))  # fmt: skip
    assert_one_error(result, "File too large", "model.tar")
    assert (trained / "x" / "model.tar").read_bytes() == before
    assert not list((trained / "x").glob("*.tmp"))


@both
def test_full_disk_while_logging_ends_the_run_with_one_error(tmp_path, module):
    with disk(tmp_path / "disk", "size=1m") as path:
        (path / "other").write_bytes(bytes(2**20 - 28_000))
        others = ("--log_interval_steps", 40, "--disable_checkpoint")
        result = run(*args(module, path, *others), module=module)
        assert_one_error(result, "No space left on device", "no checkpoint was written")
        logs = (path / "x" / "logs.csv").read_text()
        # There is room again, and the run goes on.
        (path / "other").unlink()
        result = run(*args(module, path, *others, steps=400), module=module)
        assert result.returncode == 0, result.stderr
        assert (path / "x" / "logs.csv").read_text().startswith(logs)


@both
def test_a_disk_that_cannot_be_written_to_is_one_line(trained, module, capfd):
    with disk(trained, "bind") as path:
        line = refused(module, capfd, *args(module, path))
        assert f"--savedir {path}" in line and "Read-only file system" in line
        # Testing only reads.
        test = run(*args(module, path), "--mode", "test", "--num_test_episodes", 1,
                   module=module)  # fmt: skip
        assert test.returncode == 0 and "1 episodes: mean return" in test.stdout
        assert "test.json: not written: Read-only file system" in test.stderr


@both
def test_logs_and_notes_that_were_damaged_do_not_hold_up_a_run(trained, module):
    """As a machine leaves them whose power failed."""
    path = trained / "x"
    header = (path / "logs.csv").read_text().splitlines()[0]
    row = ",".join(["400"] + ["1"] * header.count(","))
    later = row.replace("400", "440", 1)  # Made after the checkpoint.
    text = f"{header}\n{row}\n{later}\n400,1\n\0\0\0\0\n40"
    (path / "logs.csv").write_text(text)
    (path / "meta.json").write_bytes(bytes(100))
    result = run(*args(module, trained, "--log_interval_steps", 40, steps=600),
                 module=module)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert [int(r["step"]) for r in read_logs(path)] == [400, 440, 480, 520, 560, 600]
    assert json.loads((path / "meta.json").read_text())["first_step"] == 400
    assert "meta.json is written anew" in result.stderr


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
    header = (path / "logs.csv").read_bytes().splitlines(keepends=True)[0]
    (path / "logs.csv").write_bytes(logs.replace(b"%s", header))
    (path / "meta.json").write_text(notes)
    result = run(*args(module, trained, "--log_interval_steps", 40, steps=480),
                 module=module)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert [int(r["step"]) for r in read_logs(path)] == [440, 480]
    assert "meta.json is written anew" in result.stderr


# Terminals and pipes.


@contextlib.contextmanager
def started(module, savedir, *others, **kwargs):
    """The program as a subprocess.Popen."""
    process = subprocess.Popen(
        command(*args(module, savedir, *others), module=module),
        cwd=ROOT, start_new_session=True, **kwargs,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@both
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
        wait_for_steps(savedir, 400)
        os.close(ours)
        for _ in range(3):  # The shell sends one, the system another.
            process.send_signal(signal.SIGHUP)
            time.sleep(0.1)
        # After the run has ended it is the system that ends it.
        assert process.wait(TIMEOUT_S) in (128 + signal.SIGHUP, -signal.SIGHUP)
    assert load(savedir)["step"] > 0
    assert "stopped by SIGHUP" in (savedir / "x" / "out.log").read_text()


@both
def test_nohup_lets_a_run_go_on(savedir, module):
    with started(
        module, savedir, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    ) as process:  # fmt: skip
        wait_for_steps(savedir, 400)
        os.killpg(process.pid, signal.SIGHUP)
        wait_for_steps(savedir, 4000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM


@both
def test_signals_end_a_run_whose_output_nobody_reads(savedir, module):
    reader, writer = os.pipe()
    with started(module, savedir, stderr=writer) as process:
        wait_for_steps(savedir, 400)
        fill = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fill, b" ")
        time.sleep(6)  # By then it has something to say.
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None:
            assert time.monotonic() < deadline
            process.send_signal(signal.SIGTERM)
            time.sleep(1)
        assert process.returncode == 128 + signal.SIGTERM
    for end in (reader, writer, fill):
        os.close(end)


@both
def test_a_run_without_input_and_output_trains(savedir, module):
    shell = shlex.join(command(*args(module, savedir, steps=400), module=module))
    shell = ["sh", "-c", f"exec {shell} <&- >&- 2>&-"]
    assert subprocess.run(shell, cwd=ROOT, timeout=TIMEOUT_S).returncode == 0
    assert load(savedir)["step"] == 400
    assert "step 400 of 400" in (savedir / "x" / "out.log").read_text()


# Open files and processes.


def limit_open_files_to(soft, hard):
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("module", [*SMALL, "polybeast_env"])
def test_too_few_open_files_are_one_line(tmp_path, module):
    flags = args(module, tmp_path) if module in SMALL else ("--env", "CartPole-v1")
    result = run(*flags, module=module, preexec_fn=limit_open_files_to(48, 48))
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert "open files, the limit is 48" in line


@both
def test_more_open_files_are_allowed_for_where_that_is_possible(tmp_path, module):
    result = run(*args(module, tmp_path, steps=400), module=module,
                 preexec_fn=limit_open_files_to(24, 4096))  # fmt: skip
    assert result.returncode == 0, result.stderr


def no_processes(process):
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


def test_an_actor_that_cannot_be_started_ends_the_run_with_one_error(
    savedir, capfd, monkeypatch
):
    monkeypatch.setattr(actors, "start_process", no_processes)
    assert monobeast.main([str(a) for a in args("monobeast", savedir)]) == 1
    error = "actor 0 cannot be started: Resource temporarily unavailable"
    stderr = capfd.readouterr().err
    assert error in stderr and "Traceback" not in stderr
    assert load(savedir)["step"] == 0


def test_a_server_is_started_again_as_soon_as_that_is_possible(monkeypatch, caplog):
    monkeypatch.setattr(files.log, "propagate", True)
    flags = polybeast_env.parser().parse_args(["--env", "CartPole-v1"])
    start_process = polybeast_env.start_process

    def restart_until(text):
        while text not in caplog.text:
            servers.restart_ended()

    with polybeast_env.Servers() as servers:
        servers.start(flags, [f"127.0.0.1:{free_port()}"])
        servers.kill()
        monkeypatch.setattr(polybeast_env, "start_process", no_processes)
        restart_until("cannot be started again: Resource temporarily unavailable")
        monkeypatch.setattr(polybeast_env, "start_process", start_process)
        restart_until("started again\n")


@both
def test_an_observation_of_another_shape_costs_its_rollouts(savedir, module):
    env = "tests.faulty_envs:WrongShape-v0"  # After 300 steps.
    result = run(*args(module, savedir, env=env, steps=1200), module=module)
    assert result.returncode == 0, result.stderr
    assert "Output array is the wrong shape" in result.stderr
