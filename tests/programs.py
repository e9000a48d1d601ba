"""Starts the real programs, as a user would, and looks at what they leave behind."""

import contextlib
import csv
import importlib
import io
import os
import pathlib
import queue
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from typing import NamedTuple

import pytest
import torch

from tests import zygote
from tests.supervisor import cmdline, marked, stat
from torchbeast import process
from torchbeast.messages import log
from torchbeast.process import SIGNALS

ROOT = pathlib.Path(__file__).parent.parent
TIMEOUT_S = 300  # Against hangs; nothing takes a tenth of it.
SMALL = {
    "monobeast": ("--num_actors", 1, "--envs_per_actor", 2),
    "polybeast": ("--num_servers", 1, "--envs_per_server", 2),
}
SERIAL = ("--num_actors", 0)
# Its learner does not keep a core busy while a test waits for something else.
CALM = "tests.faulty_envs:Quick-v0"
both = pytest.mark.parametrize("module", SMALL)
# For what both share: the other one is tested by make test-long.
mono_first, poly_first = (
    pytest.mark.parametrize(
        "module",
        [first, pytest.param(second, marks=pytest.mark.long)],
    )
    for first, second in (list(SMALL), list(SMALL)[::-1])
)


def args(module, savedir, *others, env="CartPole-v1", steps=10**8):
    """Flags of a small run "x" of a program; an update has 40 steps."""
    servers = () if "--server_addresses" in others else SMALL[module]
    return ("--env", env, "--savedir", savedir, "--xpid", "x", "--total_steps", steps,
            "--batch_size", 2, *servers, *others)  # fmt: skip


def command(*args, module="monobeast", ranks=None, torchrun=()):
    """ranks: the number of learners that torchrun is to start, with these flags."""
    launcher = [sys.executable]
    if ranks is not None:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        launcher += torchrun or ("--standalone",)
    return [*launcher, "-m", module, *map(str, args)]


def run(*args, module="monobeast", ranks=None, torchrun=(), timeout_s=TIMEOUT_S,
        cwd=ROOT, prefix=(), **kwargs):  # fmt: skip
    """Runs the program to its end. Its output is in .stdout and .stderr."""
    process = zygote.start(
        [*prefix, *command(*args, module=module, ranks=ranks, torchrun=torchrun)],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )
    with process:
        try:
            output = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return Result(process.returncode, *output)


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def main(*args, module="monobeast", stderr=None):
    """Runs the program's main() to its end in this process, which has imported PyTorch
    already. What its child processes print is not in the Result.

    stderr: an open file instead of Result.stderr.
    """
    stdout, stderr = io.StringIO(), io.StringIO() if stderr is None else stderr
    handlers = {s: signal.getsignal(s) for s in SIGNALS}
    environ = dict(os.environ)
    end = threading.Timer(TIMEOUT_S, os.kill, (os.getpid(), signal.SIGTERM))
    end.daemon = True
    end.start()
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                code = importlib.import_module(module).main([str(a) for a in args])
            except SystemExit as e:
                code = e.code or 0
    finally:
        end.cancel()
        for s, handler in handlers.items():
            signal.signal(s, handler)
        for handler in log.handlers[:]:  # One is of the run's out.log.
            log.removeHandler(handler)
            handler.close()
        os.environ.clear()
        os.environ.update(environ)
    text = stderr.getvalue() if isinstance(stderr, io.StringIO) else ""
    return Result(code, stdout.getvalue(), text)


def succeeds(*args, **kwargs):
    """The Result of main(), whose exit code is 0."""
    result = main(*args, **kwargs)
    assert result.returncode == 0, result.stderr
    return result


def refusal(*args, **kwargs):
    """The one line with which the program refuses these arguments; exit code 2."""
    result = main(*args, **kwargs)
    assert result.returncode == 2, result
    [line] = result.stderr.splitlines()
    return line


class Program:
    """The program in the background; wait_for() reads its stderr line by line."""

    def __init__(self, *args, module="monobeast", host=None, cwd=ROOT, **kwargs):
        self.shm_before = shared_memory()
        self.mark = secrets.token_hex(8)
        self.process = zygote.start(
            [*(host.prefix if host else ()), *command(*args, module=module, **kwargs)],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "MARK": self.mark},
        )
        self.output = ""
        self._lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stderr:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, text, timeout_s=TIMEOUT_S):
        """The next line with this text in it."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"no {text!r} within {timeout_s} s:\n{self.output}"
                ) from None
            if line is None:
                raise AssertionError(f"ended without {text!r}:\n{self.output}")
            self.output += line
            if text in line:
                return line

    def workers(self):
        """Process ids of actors or servers. (multiprocessing has helpers, too.)"""
        return workers(self.process.pid)

    def ranks(self):
        """Process ids of the learners that torchrun has started, in their order."""
        pids = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                environ = pathlib.Path(f"/proc/{pid}/environ").read_text()
                if match := re.search("\0RANK=([0-9]+)\0", environ):
                    pids[int(match[1])] = pid
        return [pids[rank] for rank in sorted(pids)]

    def stop(self, signum=signal.SIGINT):
        """Signals the program alone, and asserts that it ends by that."""
        self.signal(signum)
        assert self.end() == 128 + signum

    def signal(self, signum):
        self.process.send_signal(signum)

    def signal_all(self, signum):
        """Signals the program's process group and those of its actors or servers."""
        for pid in [self.process.pid, *self.workers()]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signum)

    def end(self, timeout_s=TIMEOUT_S):
        """Waits for the end. Returns the exit code; all output is in .output. Asserts
        that nothing is left behind."""
        code = self.process.wait(timeout_s)
        while (line := self._lines.get(timeout=TIMEOUT_S)) is not None:
            self.output += line
        deadline = time.monotonic() + 60  # Orphans need a moment to notice.
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"processes left behind: {[cmdline(p) for p in left]}"
        if code == -signal.SIGKILL:
            self.remove_names()
        # Other programs' memory has a name for a moment.
        names = shared_memory() - self.shm_before
        while names and time.monotonic() < deadline:
            time.sleep(0.1)
            names &= shared_memory()
        assert not names, f"shared memory left behind: {names}"
        return code

    def remove_names(self):
        """Removes what it could not when it was killed: PyTorch gives shared memory a
        name for a moment."""
        for name in shared_memory():
            if name.startswith(f"torch_{self.process.pid}_"):
                (pathlib.Path("/dev/shm") / name).unlink(missing_ok=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.signal_all(signal.SIGKILL)
        self.process.wait()
        self.remove_names()
        for pid in marked(self.mark):  # torchrun's children, which it cannot end now.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def shared_memory():
    """Names of what PyTorch and multiprocessing have there."""
    names = os.listdir("/dev/shm")
    return {n for n in names if n.startswith(("torch_", "psm_", "sem.", "pym-"))}


def workers(pid):
    """Process ids of a program's actors or servers. (multiprocessing has helpers.)"""
    names = "spawn_main", "torchbeast.remote.server", "torchbeast.remote.dialer"
    return [p for p in children(pid) if any(name in cmdline(p) for name in names)]


def children(pid):
    return sorted(p for p in process.children(pid) if stat(p))


def read_logs(path):
    """The rows of logs.csv as dicts of strings."""
    with open(path / "logs.csv", newline="") as f:
        return list(csv.DictReader(f))


def step(savedir, name="x"):
    """How far a run is."""
    try:
        rows = read_logs(savedir / name)
    except OSError:
        return 0
    return int(rows[-1]["step"] or 0) if rows else 0


def load(savedir, name="x"):
    """The checkpoint of a run."""
    return torch.load(savedir / name / "model.tar", weights_only=True)


def wait_for_steps(savedir, n, timeout_s=TIMEOUT_S, name="x"):
    """Until a run has made n steps from now."""
    deadline = time.monotonic() + timeout_s
    until = step(savedir, name) + n
    while step(savedir, name) < until:
        assert time.monotonic() < deadline, f"still at step {step(savedir, name)}"
        time.sleep(0.05)


def rollouts(output):
    """{what: how many} of them, as PolyBeast says at its end. Asserts that none is
    missing."""
    lines = re.findall(r"rollouts: .*", output)
    assert lines, output
    line = lines[-1]
    numbers = map(int, re.findall(r"\d+", line))
    names = "delivered", "learned from", "begun", "lost with their stream", "unfinished"
    n = dict(zip(names, numbers, strict=True))
    assert n["begun"] == n["delivered"] + n["lost with their stream"] + n["unfinished"]
    # A batch waits, another one opens.
    assert n["learned from"] <= n["delivered"] <= n["learned from"] + 8, line
    return n


# Disks.


@contextlib.contextmanager
def disk(path, option):
    """A disk at path: in memory, "size=200k"; or what is there, read only, "bind".
    Where the machine does not allow that, the test is skipped."""
    path.mkdir(exist_ok=True)
    commands = [["mount", "-t", "tmpfs", "-o", option, "tmpfs", path]]
    if option == "bind":
        commands = [
            ["mount", "--bind", path, path],
            ["mount", "-o", "remount,ro,bind", path],
        ]
    try:
        for command in commands:
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except subprocess.CalledProcessError as e:
                pytest.skip(f"no disk can be mounted: {e.stderr.strip()}")
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], capture_output=True)


def private_mounts(*commands):
    """What to put before a program that is to run after these commands, whose mounts
    nobody else sees. Where the machine does not allow that, the test is skipped."""
    user = [] if os.getuid() == 0 else ["--map-root-user"]
    prefix = ["unshare", *user, "--mount", "sh", "-ec", "; ".join(commands) + '; "$@"']
    try:
        subprocess.run(
            [*prefix, "", "true"], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"no private mounts: {getattr(e, 'stderr', '') or e}")
    return [*prefix, ""]


# Other hosts.


class Host:
    """A network namespace, linked to ours; Program(host=host) runs in it. Where the
    machine does not allow that, another name for this host."""

    def __init__(self, name=None, ip="127.0.0.1", our_ip="127.0.0.1"):
        self.name = name
        self.ip = ip
        self.our_ip = our_ip  # As it sees this one.
        self.prefix = ["ip", "netns", "exec", name] if name else []

    def cut_off(self, program):
        """Nothing goes to the host of this program any more, nor comes from it: as if
        its power failed."""
        if self.name:
            self._ip("link", "set", self.name, "down")
        else:
            program.signal_all(signal.SIGSTOP)

    def restore(self, program):
        if self.name:
            self._ip("link", "set", self.name, "up")
        else:
            program.signal_all(signal.SIGCONT)

    def create(self):
        self._ip("netns", "add", self.name)
        self._ip("link", "add", self.name, "type", "veth", "peer", "name", "eth0",
                 "netns", self.name)  # fmt: skip
        self._ip("addr", "add", f"{self.our_ip}/30", "dev", self.name)
        self._ip("link", "set", self.name, "up")
        inside = ("-n", self.name)
        self._ip(*inside, "addr", "add", f"{self.ip}/30", "dev", "eth0")
        self._ip(*inside, "link", "set", "eth0", "up")
        self._ip(*inside, "link", "set", "lo", "up")

    def delete(self):
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)

    @staticmethod
    def _ip(*args):
        subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def hosts(n):
    """n of them."""
    if shutil.which("ip") is None:
        reason = "iproute2 is not installed"
    else:
        # An address of the network that is set aside for measurements (RFC 2544).
        ip = f"198.18.{os.getpid() % 256}"
        result = [
            Host(f"beast{os.getpid()}-{i}", f"{ip}.{4 * i + 2}", f"{ip}.{4 * i + 1}")
            for i in range(n)
        ]
        try:
            for host in result:
                host.create()
            yield result
            return
        except subprocess.CalledProcessError as e:
            reason = e.stderr.strip()
        finally:
            for host in result:
                host.delete()
    warnings.warn(f"no network namespaces, all on one host: {reason}", stacklevel=1)
    yield [Host() for _ in range(n)]
