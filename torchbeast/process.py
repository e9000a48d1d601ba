"""What every process of ours does: log lines, signals, limits, memory.

No torch in here: environment servers import this file.
"""

import contextlib
import ctypes
import logging
import os
import resource
import select
import signal
import threading

from torchbeast.environment import BadInput

log = logging.getLogger("torchbeast")

# What ends a program in order: Ctrl-C, a service manager, a terminal that is closed.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handle_signals(handler) -> dict:
    """Has SIGNALS call the handler. Returns {signal: handler before}."""
    signals = set(SIGNALS)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # That is what nohup is for.
        signals.remove(signal.SIGHUP)
    return {s: signal.signal(s, handler) for s in signals}


def setup_logging(path=None):
    """Sends log lines to stderr, and to the file at path."""
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in log.handlers[:]:
        log.removeHandler(handler)
        handler.close()
    line = logging.Formatter("[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    threading.excepthook = _thread_excepthook
    logging.raiseExceptions = False  # A full disk must not hide what goes to stderr.
    handlers = [logging.StreamHandler()]
    if path is not None:
        handlers.append(logging.FileHandler(path))
    for handler in handlers:
        handler.setFormatter(line)
        log.addHandler(handler)


def _thread_excepthook(args):
    """Logs an OSError of a thread as one line. (TensorBoard's writer dies in a thread
    of its own when the disk is full; the next write raises the error again, where it is
    handled.)"""
    if issubclass(args.exc_type, OSError):
        log.error("%s: %s", args.thread.name, args.exc_value)
    else:
        threading.__excepthook__(args)


def keep_freed_memory():
    """Has glibc keep freed memory for the next allocation. To be called before there
    are threads.

    By default glibc hands large blocks back at once, and the kernel clears each new one
    page by page, which took a third of the time of an update of the shallow network on
    a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return  # Not glibc.
    TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # malloc.h
    mallopt(MMAP_THRESHOLD, 2**30)
    mallopt(TRIM_THRESHOLD, 2**31 - 1)
    # Only one arena keeps: those of other threads are unmapped when they are empty.
    mallopt(ARENA_MAX, 1)


def allow_open_files(num_files):
    """Raises this process's limit of open files if it is too low for num_files, beside
    some 60 of libraries, logs and environments. Raises BadInput if that is not allowed.
    """
    needed = num_files + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and needed > hard:
        raise BadInput(
            f"this command needs {needed} open files, the limit is {hard}: raise it "
            "(ulimit -Hn; LimitNOFILE= of systemd; docker run --ulimit nofile=...)"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextlib.contextmanager
def signals_blocked():
    """A context for starting a process that is never to see SIGNALS, not even in its
    first moment. The signals are sent to the whole process group; this process acts on
    them."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def open_standard_files():
    """Opens /dev/null in place of standard input, output or error where they are
    closed. Otherwise the next file that is opened would take their place."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


class Stop(Exception):
    """Ends the run early, with a message for the user and an exit code."""

    def __init__(self, message, exit_code=1, save=True):
        super().__init__(message)
        self.exit_code = exit_code
        self.save = save  # Whether the state is worth a checkpoint.


class Signals:
    """Makes check() raise Stop after one of SIGNALS. A second signal, unless it is
    SIGHUP, quits at once.

    on_second: called in the signal handler. It has to end the children without
    blocking.
    """

    def __init__(self):
        self.on_second = lambda: None
        self.received = None

    def __enter__(self):
        self._old = handle_signals(self._handle)
        return self

    def __exit__(self, *_):
        for s, handler in self._old.items():
            signal.signal(s, handler)

    def _handle(self, signum, _frame):
        if self.received is not None:
            if signum == signal.SIGHUP:
                return  # Of a terminal that is closed two come, or more.
            self.on_second()
            with contextlib.suppress(OSError, ValueError):
                if select.select([], [2], [], 0)[1]:  # Not a pipe that nobody reads.
                    os.write(2, b"\nquit without saving\n")
            os._exit(128 + signum)
        self.received = signal.Signals(signum)

    def check(self):
        if self.received is not None:
            raise Stop(f"stopped by {self.received.name}", 128 + self.received)
