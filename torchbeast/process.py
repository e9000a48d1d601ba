"""What every process of ours does: log lines, signals, limits, memory.

No torch in here: environment servers import this file.
"""

import atexit
import contextlib
import ctypes
import glob
import logging
import os
import re
import resource
import select
import signal
import threading
import time
from collections import Counter
from multiprocessing import resource_tracker


class Log(logging.Logger):
    """A logger that environments cannot silence: logging.config.dictConfig() disables
    those that logging.getLogger() knows, logging.disable() all others."""

    def isEnabledFor(self, level):
        return level >= self.level


log = Log("torchbeast", logging.INFO)

REMIND_S = 60  # What comes over and over is logged again after this, then twice this.

# What ends a program in order: Ctrl-C, a service manager, a terminal that is closed.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handle_signals(handler) -> dict:
    """Has SIGNALS call the handler. Returns {signal: handler before}."""
    signals = set(SIGNALS)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # That is what nohup is for.
        signals.remove(signal.SIGHUP)
    return {s: signal.signal(s, handler) for s in signals}


def setup_logging(path=None, rank=0):
    """Sends log lines to stderr, and to the file at path. Of learners of other ranks
    than 0 only warnings go to stderr."""
    for handler in log.handlers[:]:
        log.removeHandler(handler)
        handler.close()
    who = f"rank {rank}: " if rank > 0 else ""
    line = logging.Formatter(f"[%(asctime)s] {who}%(message)s", datefmt="%H:%M:%S")
    threading.excepthook = _thread_excepthook
    logging.raiseExceptions = False  # A full disk must not hide what goes to stderr.
    handlers = [logging.StreamHandler()]
    handlers[0].setLevel(logging.WARNING if rank > 0 else logging.INFO)
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


def allow_open_files(num_files, remedy=""):
    """Raises this process's limit of open files as far as the system allows: whoever
    connects takes one, and environments may take any number. Raises BadInput, which
    names a remedy beside a higher limit, if there can be fewer than num_files, beside
    some 60 of libraries, logs and environments.
    """
    needed = num_files + 64
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise BadInput(
            f"this command needs {needed} open files, the limit is {hard}: raise it "
            "(ulimit -Hn; LimitNOFILE= of systemd; docker run --ulimit nofile=...)"
            f"{remedy}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def signals_blocked():
    """A context for starting a process that calls lead_group(), lest SIGNALS end it
    before that. The signals are sent to the whole process group; this process acts on
    them."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def lead_group():
    """Makes this process the leader of a session and a process group of its own, which
    end with end_group(). SIGNALS do nothing in it: its parent acts on them.

    Whatever an environment starts gets SIGNALS as by default. (A mask, or SIG_IGN,
    would be inherited: simulators would outlive their terminate().)
    """
    os.setsid()
    for s in SIGNALS:
        signal.signal(s, _do_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.register_at_fork(after_in_child=_default_signals)


def _do_nothing(signum, frame):
    pass


def _default_signals():
    for s in SIGNALS:
        signal.signal(s, signal.SIG_DFL)


def end_group():
    """Ends this process, which has called lead_group(), and all that it started."""
    os.killpg(os.getpid(), signal.SIGKILL)


def follow_parent():
    """Has this process get SIGTERM when its parent ends, in whatever way."""
    PR_SET_PDEATHSIG = 1  # sys/prctl.h
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def kill_group(process):
    """Kills a child that calls lead_group(), and all that it started, whether or not it
    has ended itself. process: multiprocessing's or subprocess's."""
    process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def children(pid="self") -> set[int]:
    """Returns the process ids of a process's children."""
    found = set()
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError), open(path) as f:
            found.update(map(int, f.read().split()))
    return found


def kill_children(pids):
    """Kills children of this process, their children and so on."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    for pid in pids - {tracker}:  # It ends with us, and others may need it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)  # It starts no more of them.
            kill_children(children(pid))
            os.kill(pid, signal.SIGKILL)


def open_standard_files():
    """Opens /dev/null in place of standard input, output or error where they are
    closed. Otherwise the next file that is opened would take their place."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, where nothing else handles them."""

    def __init__(self, signum):
        super().__init__()
        self.signum = signum


def _terminate(signum, frame):
    raise Terminated(signum)


@contextlib.contextmanager
def terminable():
    """A context in which SIGTERM and SIGHUP raise, as Ctrl-C does, instead of ending
    this process at once."""
    before = {}
    for s in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(s) == signal.SIG_DFL:
            before[s] = signal.signal(s, _terminate)
    try:
        yield
    finally:
        for s, handler in before.items():
            if signal.getsignal(s) == _terminate:
                signal.signal(s, handler)


def ignore_again(received_at):
    """Has SIGNALS do nothing until a second after received_at, and while this process
    ends, so that its exit code is that of the first signal."""

    def handler(signum, _frame):
        if time.monotonic() > received_at + 1:
            old = before[signum]
            signal.signal(signum, signal.SIG_DFL if old == _terminate else old)
            signal.raise_signal(signum)

    def ignore():  # Python gives its own handlers up before it ends.
        for s in before:
            if signal.getsignal(s) == handler:
                signal.signal(s, signal.SIG_IGN)

    before = handle_signals(handler)
    atexit.register(ignore)


class BadInput(ValueError):
    """A mistake of the user's. The programs print it as one line and exit with code
    2."""


class Stop(Exception):
    """Ends the run early, with a message for the user and an exit code."""

    def __init__(self, message, exit_code=1, save=True):
        super().__init__(message)
        self.exit_code = exit_code
        self.save = save  # Whether the state is worth a checkpoint.


class Signals:
    """Makes check() raise Stop after one of SIGNALS. A second signal, unless it is
    SIGHUP, quits at once. What comes within a second of the first is the first again:
    the programs timeout and srun pass on what their whole process group got.

    on_second: called in the signal handler. It has to end the children without
    blocking.
    """

    current = None  # Those of this process, while they are handled.

    def __init__(self):
        self.on_second = lambda: None
        self.received = None

    def __enter__(self):
        Signals.current = self
        self._old = handle_signals(self._handle)
        return self

    def __exit__(self, *_):
        Signals.current = None
        for s, handler in self._old.items():
            signal.signal(s, handler)
        if self.received is not None:
            ignore_again(self.received_at)

    def _handle(self, signum, _frame):
        if self.received is not None:
            again = time.monotonic() < self.received_at + 1
            if again or signum == signal.SIGHUP:
                return  # Of a terminal that is closed two SIGHUPs come, or more.
            self.on_second()
            kill_children(children())
            with contextlib.suppress(OSError, ValueError):
                if select.select([], [2], [], 0)[1]:  # Not a pipe that nobody reads.
                    cursor = b"\x1b[?25h" if os.isatty(2) else b""  # rich hides it.
                    os.write(2, cursor + b"\nquit without saving\n")
            os._exit(128 + signum)
        self.received_at = time.monotonic()  # First: a signal may interrupt this.
        self.received = signal.Signals(signum)

    def stop(self):
        """Returns the Stop after a signal, else None."""
        if self.received is not None:
            return Stop(f"stopped by {self.received.name}", 128 + self.received)

    def check(self):
        if stop := self.stop():
            raise stop


def check_signals():
    """Raises Stop after a signal, if signals are handled. Any thread may call it."""
    if (signals := Signals.current) is not None:
        signals.check()


def first_line(error, with_type=True):
    """Returns the error's type, and its message's first line without control
    characters."""
    lines = [line for line in str(error).splitlines() if line.strip()][:1]
    line = "".join(c for c in "".join(lines) if c.isprintable())
    return f"{type(error).__name__}: {line}" if with_type else line


class Repeated:
    """Shortens tracebacks that come over and over."""

    def __init__(self):
        self._seen = Counter()

    def shorten(self, text):
        """Returns a traceback the first time, then its last line and how often it came.
        Only its frames count: its message may be another one each time."""
        frames = "\n".join(line for line in text.splitlines() if line[:6] == "  File")
        if len(self._seen) > 1000:  # Where each is different.
            self._seen.clear()
        self._seen[frames or text] += 1
        number = self._seen[frames or text]
        if number == 1:
            return text
        last = (text.strip().splitlines() or [""])[-1]
        return f" {last} (this traceback came {number} times)"


class Throttle:
    """Says which lines about others, such as a learner's hosts, are to be logged.

    Numbers in a text aside, MAX_TEXTS of each of MAX_WHO others are told apart. All
    that comes beyond is one: who sends texts may make each of them different.
    """

    MAX_TEXTS, MAX_WHO = 5, 100

    def __init__(self):
        self._seen = {}  # {who: {text: (how often, when it is due next, wait)}}
        self._swept_at = 0.0

    def count(self, who, text, now=None):
        """Returns how often the text came from them, and whether that is to be logged:
        at first, after REMIND_S, then after twice this, and so on; and at first again
        when it has stayed away since it was due, for longer than the next wait."""
        now = time.monotonic() if now is None else now
        self._sweep(now)
        if who not in self._seen and len(self._seen) >= self.MAX_WHO:
            who = None
        texts = self._seen.setdefault(who, {})
        text = re.sub(r"0x[0-9a-f]+|\d+", "#", text)
        if text not in texts and len(texts) >= self.MAX_TEXTS:
            text = None
        number, due_at, wait_s = texts.get(text, (0, now, REMIND_S))
        due = now >= due_at
        if due:
            due_at, wait_s = now + wait_s, 2 * wait_s
        texts[text] = number + 1, due_at, wait_s
        return number + 1, due

    def _sweep(self, now):
        """Forgets what has stayed away, once a minute."""
        if now < self._swept_at + REMIND_S:
            return
        self._swept_at = now
        for who, texts in list(self._seen.items()):
            for text, (_, due_at, wait_s) in list(texts.items()):
                if now > due_at + wait_s:
                    del texts[text]
            if not texts:
                del self._seen[who]
