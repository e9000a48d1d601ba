"""Signals, while environments have processes and shared memory: whoever gets one, the
run ends as it should, and its environments are closed."""

import argparse
import contextlib
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import time

import pytest

from tests.faulty_envs import Base
from tests.programs import (
    ROOT,
    SERIAL,
    TIMEOUT_S,
    Program,
    args,
    load,
    marked,
    poly_first,
    read_logs,
    wait_for_steps,
)
from torchbeast import calls, environment, process
from torchbeast.messages import Stop

LOG = ("--log_interval_steps", 40)  # A line for every update.
slow, long = pytest.mark.slow, pytest.mark.long


class Simulator:
    """What programs leave of an environment that has a file of a name of its own."""

    def __init__(self):
        self.name = f"simulator-{secrets.token_hex(8)}"

    def args(self, module, savedir, *others, seconds=0.0):
        """Flags of a program whose environments take so long to make."""
        env_args = "--env_args", f"name={self.name}", f"seconds={seconds}"
        env = "tests.hostile_envs:HasASimulator-v0"
        return args(module, savedir, *LOG, *env_args, *others, env=env)

    def files(self):
        return sorted(pathlib.Path("/dev/shm").glob(f"{self.name}*"))


@pytest.fixture
def simulator():
    """Asserts that nothing of it is left."""
    simulator = Simulator()
    yield simulator
    left = simulator.files()
    for path in left:
        path.unlink()
    assert not left


@pytest.mark.slow
@pytest.mark.survives("signal")
@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=long)]
)
def test_a_signal_that_a_simulator_gets_too_ends_a_serial_run_in_order(
    savedir, simulator, signum
):
    """A terminal sends Ctrl-C to all processes in it."""
    with Program(*simulator.args("monobeast", savedir, *SERIAL)) as program:
        wait_for_steps(savedir, 400)
        os.killpg(program.process.pid, signum)
        assert program.end() == 128 + signum
    assert f"stopped by {signum.name}" in program.output
    assert "Traceback" not in program.output
    assert load(savedir)["step"] == int(read_logs(savedir / "x")[-1]["step"]) > 0


@pytest.mark.long
@pytest.mark.survives("signal")
@poly_first
def test_nor_is_it_a_fault_of_actors_or_servers(savedir, simulator, module):
    """A service manager sends SIGTERM to all processes of a service."""
    others = ("--max_actor_restarts", 0) if module == "monobeast" else ()
    flags = simulator.args(module, savedir, *others)
    with Program(*flags, module=module) as program:
        wait_for_steps(savedir, 400)
        for pid in sorted(marked(program.mark), reverse=True):  # The simulators first.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert program.end() == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in program.output
    assert load(savedir)["step"] == int(read_logs(savedir / "x")[-1]["step"]) > 0


def moment(module, others, workers, number, signum, *marks):
    """When to send a signal: there are so many environments, in the program itself or
    in its actors and servers."""
    name = f"{others[0] if others else module}-{workers}-{number}-{signum.name}"
    return pytest.param(module, others, workers, number, signum, marks=marks, id=name)


@pytest.mark.survives("signal-at-start")
@pytest.mark.parametrize(
    ("module", "others", "workers", "number", "signum"),
    [
        moment("monobeast", SERIAL, 0, 3, signal.SIGINT, slow),
        moment("monobeast", (), 1, 3, signal.SIGINT, long),
        moment("polybeast", (), 1, 3, signal.SIGINT, slow),
        moment("monobeast", SERIAL, 0, 1, signal.SIGTERM, long),
        moment("monobeast", SERIAL, 0, 6, signal.SIGINT, long),
        moment("monobeast", (), 0, 2, signal.SIGINT, long),
        moment("monobeast", (), 1, 6, signal.SIGTERM, long),
        moment("polybeast", (), 0, 1, signal.SIGINT, slow),
        moment("polybeast", (), 0, 2, signal.SIGTERM, long),
        moment("polybeast", (), 1, 1, signal.SIGTERM, long),
        moment("polybeast", (), 1, 6, signal.SIGINT, long),
    ],
)
def test_environments_are_closed_after_a_signal_that_comes_while_they_are_made(
    savedir, simulator, module, others, workers, number, signum
):
    num = "--envs_per_actor" if module == "monobeast" else "--envs_per_server"
    flags = simulator.args(module, savedir, *others, num, 6, seconds=1.5)
    with Program(*flags, module=module) as program:
        deadline = time.monotonic() + TIMEOUT_S
        while len(simulator.files()) != number or len(program.workers()) != workers:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(program.process.pid, signum)
        assert program.end() == 128 + signum
    assert "Traceback" not in program.output


@pytest.mark.long
def test_the_environment_of_an_evaluation_is_closed_when_the_run_ends(
    savedir, simulator
):
    others = *SERIAL, "--eval_interval_steps", 40, "--num_test_episodes", 1
    flags = simulator.args("monobeast", savedir, *others)
    with Program(*flags) as program:
        program.wait_for(", mean return")
        program.stop(signal.SIGTERM)
    assert not simulator.files()


def test_what_a_simulators_library_does_to_the_handlers_of_signals_is_undone():
    """ViZDoom's leaves the system's behind, which end the program at once."""
    script = """if True:
        import argparse, ctypes, signal
        from torchbeast.environment import Environment, probe
        from tests.faulty_envs import Base

        class HandlesSignals(Base):
            def close(self):
                ctypes.CDLL(None).signal(signal.SIGINT, None)

        flags = argparse.Namespace(env="HandlesSignals", seed=None)
        probe(lambda *_: Environment(HandlesSignals()), flags, 1)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise SystemExit(7)
    """
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, cwd=ROOT).returncode == 7


def test_a_program_keeps_its_streams_whatever_an_environment_puts_there(monkeypatch):
    class Silences(Base):
        def __init__(self):
            super().__init__()
            sys.stdout = sys.stderr = None

    streams = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), streams):
        monkeypatch.setattr(sys, name, stream)
    flags = argparse.Namespace(env="Silences", seed=None)
    environment.probe(lambda *_: environment.Environment(Silences()), flags, 1)
    assert (sys.stdout, sys.stderr) == streams


def test_a_signal_whose_exception_is_lost_while_a_run_starts_ends_the_run():
    """Python prints, and ignores, what is raised in a destructor."""
    with process.terminable():
        with contextlib.suppress(process.Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
        with process.Signals() as signals, pytest.raises(Stop, match="SIGTERM"):
            signals.check()
    with process.terminable(), process.Signals() as signals:
        signals.check()


def test_a_signal_whose_exception_becomes_an_error_is_a_signal():
    """As it does where an extension in C++ is being imported."""
    with pytest.raises(process.Terminated), process.terminable():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except process.Terminated as e:
            raise ImportError("initialization failed") from e
    with pytest.raises(ImportError), process.terminable():
        raise ImportError("no signal")


FORK = """
import os, signal
from torchbeast import process
process.open_standard_files()
process.leave_forks_alone()
own = [os.fstat(fd).st_ino for fd in (*range(3), *process._copies)]
assert own[:3] == own[3:]
os.close(1)
process.open_standard_files()
assert os.fstat(1).st_ino == own[1]
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # As nohup has it.
signal.signal(signal.SIGTERM, lambda *_: None)
copies = list(process._copies)
if (pid := os.fork()) == 0:
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    for fd in copies:
        try:
            os.fstat(fd)
            os._exit(8)
        except OSError:
            pass
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""


def test_a_fork_ignores_what_nohup_does_and_has_none_of_our_files():
    words = [sys.executable, "-c", FORK]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("change", ["", "sys.stdout.close()", "sys.stdout = None"])
def test_a_program_does_not_wait_for_a_thread_that_was_left_behind(change):
    code = f"""
import sys, threading
from torchbeast import process
process.LEAVE_S = 0.1
threading.Thread(target=threading.Event().wait, name="forever").start()
{change}
process.leave(3)
"""
    words = [sys.executable, "-c", code]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 3
    assert "ends without thread forever, which an envir" in result.stderr


def test_a_call_that_does_not_return_is_named_when_nobody_waits_any_more(
    monkeypatch, caplog
):
    monkeypatch.setattr(calls.log, "handlers", [caplog.handler])
    monkeypatch.setattr(calls, "RETURN_S", 0.1)
    monkeypatch.setattr(calls, "_calls", {})
    for name in "end", "end_group":
        monkeypatch.setattr(calls, name, lambda: None)
    with calls.Call("step() of Slow-v0"):
        calls.end_process()
    assert "step() of Slow-v0 did not return within 0.1 s: its env" in caplog.text
