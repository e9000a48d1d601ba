"""What every program here does on the command line: flags of the environment, bad input
as one line, log lines, processes. No torch in here: environment servers import it.
"""

import argparse
import ctypes
import logging
import math
import resource
import signal
import threading
from multiprocessing import resource_tracker

from environment import BadInput

log = logging.getLogger("torchbeast")

# What ends a program in order: Ctrl-C, a service manager, a terminal that is closed.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handle_signals(handler) -> dict:
    """Has SIGNALS call the handler. Returns {signal: handler before}."""
    signals = set(SIGNALS)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # That is what nohup is for.
        signals.remove(signal.SIGHUP)
    return {s: signal.signal(s, handler) for s in signals}


class Parser(argparse.ArgumentParser):
    """Bad input is one line on stderr and exit code 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def number(kind, low=None, high=None, above=None):
    """An argparse type: int or float within bounds."""
    bounds = [
        f"{sign} {bound}"
        for sign, bound in ((">=", low), (">", above), ("<=", high))
        if bound is not None
    ]

    def parse(text):
        try:
            x = kind(text)
        except ValueError:
            name = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}") from None
        if not (
            math.isfinite(x)
            and (low is None or x >= low)
            and (high is None or x <= high)
            and (above is None or x > above)
        ):
            raise argparse.ArgumentTypeError(f"{text}, expected {' and '.join(bounds)}")
        return x

    return parse


def environment_parser() -> argparse.ArgumentParser:
    """The flags of whoever makes environments, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("environment")
    g.add_argument("--env", metavar="ID", default="PongNoFrameskip-v4",
                   help="Gymnasium's name of it (default: %(default)s)")
    g.add_argument("--sticky_actions", type=number(float, 0, 1), metavar="P",
                   help="Atari: probability that the last action is repeated "
                   "(default: as the environment is registered)")
    g.add_argument("--full_action_space", action="store_true",
                   help="Atari: all 18 actions in every game")
    g.add_argument("--terminal_on_life_loss", default=True,
                   action=argparse.BooleanOptionalAction,
                   help="Atari: a lost life ends a training episode (default: yes)")
    g.add_argument("--env_timeout_seconds", type=number(float, above=0), default=300,
                   metavar="S", help="the actor or server of an environment that does "
                   "not answer for so long is restarted (default: %(default)s)")
    # fmt: on
    return p


def setup_logging(path=None):
    """Log lines go to stderr, and to path."""
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
    """TensorBoard's writer dies in a thread of its own when the disk is full: one line.
    The next write to it raises the error where it is dealt with."""
    if issubclass(args.exc_type, OSError):
        log.error("%s: %s", args.thread.name, args.exc_value)
    else:
        threading.__excepthook__(args)


def keep_freed_memory():
    """Has glibc keep freed memory for the next allocation. By default it hands large
    blocks back at once, and each new one is cleared by the kernel page by page: a third
    of the time of an update of the shallow network on a CPU. Before there are threads.
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
    """Raises this process's limit of open files, if it is too low for so many beside
    some 60 of libraries, logs and environments. BadInput if that is not allowed."""
    needed = num_files + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and needed > hard:
        raise BadInput(
            f"this command needs {needed} open files, the limit is {hard}: raise it "
            "(ulimit -Hn; LimitNOFILE= of systemd; docker run --ulimit nofile=...)"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def start_process(process):
    """Starts a multiprocessing.Process that never sees SIGNALS: they are sent to the
    whole group, and are this process's to act on. They are blocked, so that it is so
    from the first moment. OSError if the machine has too many processes or open
    files."""
    resource_tracker.ensure_running()  # Else start() does it, and unblocks them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
