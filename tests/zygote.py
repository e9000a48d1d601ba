"""Starts programs as forks of a process that has imported PyTorch, which takes a new
process two to three seconds of a core.

    python tests/zygote.py FD

forks what it is asked for on that socket, until the other end is closed. A fork is what
`python -m module` would be, but for its command line in /proc.
"""

import ctypes
import gc
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types

# The variable by which tests find a program's processes, and its characters.
MARK, MARK_SIZE = "MARK", 16
# Variables that Python and libraries read before a fork could change them.
EARLY = ("PYTHON", "OMP_", "OPENBLAS_", "MKL_", "TORCH_", "LD_PRELOAD", "MALLOC_")
# Modules that import PyTorch.
PROGRAMS = ("monobeast", "polybeast", "warpbeast", "torch.distributed.run")
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

_lock = threading.Lock()
_zygote = None  # The socket on which it is asked.


def start(words, **kwargs):
    """subprocess.Popen(words, **kwargs), forked where that makes no difference."""
    kind = Forked if can_fork(words, **kwargs) else subprocess.Popen
    return kind(words, **kwargs)


def can_fork(words, env=os.environ, preexec_fn=None, **_):
    if sys.platform != "linux" or preexec_fn is not None:
        return False
    python, option, module = words[:3]
    plain = python == sys.executable and option == "-m" and module in PROGRAMS
    return plain and early(env) == READ


def early(env, them=True):
    """Those variables, or all others."""
    return {k: v for k, v in env.items() if k.startswith(EARLY) == them}


READ = early(os.environ)  # No test has begun.


class Forked(subprocess.Popen):
    """A process that was forked from the one that has PyTorch; its parent is this
    process all the same."""

    def __init__(self, words, *, start_new_session=False, **kwargs):
        self._new_session = start_new_session
        super().__init__(words, **kwargs)

    def _execute_child(
        self, words, executable, preexec_fn, close_fds, pass_fds, cwd, env,
        startupinfo, creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite,
        errread, errwrite, *_,
    ):  # fmt: skip
        what = {
            "words": words[2:],
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "new_session": self._new_session,
        }
        fds = [i if fd == -1 else fd
               for i, fd in enumerate((p2cread, c2pwrite, errwrite))]  # fmt: skip
        self.pid = _ask(json.dumps(what).encode(), fds)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _ask(what, fds):
    """Returns the process id of a fork, which this process has adopted."""
    global _zygote
    prctl = ctypes.CDLL(None).prctl
    with _lock:
        if _zygote is None:
            _zygote, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with its:
                subprocess.Popen(
                    [sys.executable, __file__, str(its.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[its.fileno()],
                    start_new_session=True,  # Ctrl-C is the programs'.
                    env={**early(os.environ, False), **READ, MARK: "-" * MARK_SIZE},
                )
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(_zygote, [what], fds)
            return int(_zygote.recv(100))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# The process that forks.


def serve(asked):
    """Forks what is asked for. Returns in a fork, with what it is to be."""
    while True:
        what, fds, *_ = socket.recv_fds(asked, 2**20, 3)
        if not what:
            os._exit(0)  # The tests have ended.
        pids, its = os.pipe()
        # A child whose parent has ended is adopted: a grandchild of this process.
        if (child := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                for fd in (pids, its, asked.detach()):
                    os.close(fd)
                return json.loads(what), fds
            os.write(its, str(pid).encode())
            os._exit(0)
        os.waitpid(child, 0)
        asked.send(os.read(pids, 100))
        for fd in (pids, its, *fds):
            os.close(fd)


def become(words, cwd, env, new_session, fds):
    """Runs a program in this process, as `python -m` does."""
    module, *argv = words
    if new_session:
        os.setsid()
    for i, fd in enumerate(fds):
        os.dup2(fd, i)
        os.close(fd)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if len(env.get(MARK, "")) == MARK_SIZE:
        show(MARK, env[MARK])
    random.seed()
    sys.modules["numpy"].random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[0] = cwd
    sys.argv = ["-m", *argv]
    sys.modules["__main__"] = types.ModuleType("__main__")
    runpy._run_module_as_main(module)


def show(name, value):
    """Changes a variable in /proc/self/environ, where stands what a process was started
    with, to one of the same length."""
    with open("/proc/self/stat") as f:
        env_start = int(f.read().rpartition(")")[2].split()[47])  # man 5 proc
    with open("/proc/self/environ", "rb") as f:
        at = b"\0" + f.read()
        at = at.index(f"\0{name}=".encode()) + len(name) + 1
    with open("/proc/self/mem", "r+b", buffering=0) as f:
        f.seek(env_start + at)
        f.write(value.encode())


if __name__ == "__main__":
    sys.path[0] = "/"  # Not the tests' directory.
    import gymnasium  # noqa: F401
    import torch  # noqa: F401

    gc.freeze()
    what, fds = serve(socket.socket(fileno=int(sys.argv[1])))
    become(**what, fds=fds)
