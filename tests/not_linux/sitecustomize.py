"""Hides from Python what only Linux has: with this directory in PYTHONPATH, each Python
process believes that it runs on something like macOS. C and C++ still see all."""

import builtins
import ctypes
import errno
import functools
import io
import multiprocessing.context
import os
import resource
import select

HIDDEN = ("/proc/", "/sys/", "/dev/shm/")


def hide(module, name):
    function = getattr(module, name)

    @functools.wraps(function)
    def hidden(path=".", *args, **kwargs):
        text = "." if path is None or isinstance(path, int) else os.fsdecode(path)
        if f"{text}/".startswith(HIDDEN):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
        return function(path, *args, **kwargs)

    setattr(module, name, hidden)


for module, names in {
    builtins: ["open"],
    io: ["open"],
    os: ["open", "stat", "lstat", "statvfs", "listdir", "scandir", "readlink"],
}.items():
    for name in names:
        hide(module, name)
del os.sched_getaffinity, os.sched_setaffinity, select.epoll

contexts = multiprocessing.context._concrete_contexts
del contexts["fork"], contexts["forkserver"]
multiprocessing.context._default_context._default_context = contexts["spawn"]


def setrlimit(kind, limits, set_limit=resource.setrlimit):
    if kind == resource.RLIMIT_NOFILE and limits[0] > 10240:  # OPEN_MAX of macOS.
        raise ValueError("current limit exceeds maximum limit")
    set_limit(kind, limits)


resource.setrlimit = setrlimit


class CDLL(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("prctl", "mallopt"):
            raise AttributeError(f"symbol not found: {name}")
        return super().__getattr__(name)


ctypes.CDLL = CDLL
