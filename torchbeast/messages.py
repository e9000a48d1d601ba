"""What programs say: log lines, and the exceptions that become one line.

No torch in here: environment servers import this file.
"""

import logging
import re
import threading
import time
from collections import Counter, deque


class Log(logging.Logger):
    """A logger that environments cannot silence: logging.config.dictConfig() disables
    those that logging.getLogger() knows, logging.disable() all others."""

    def isEnabledFor(self, level):
        return level >= self.level


log = Log("torchbeast", logging.INFO)


REMIND_S = 60  # What comes over and over is logged again after this, then twice this.


class Early(logging.Handler):
    """Keeps the last lines until there is a file for them."""

    def __init__(self):
        super().__init__()
        self.records = deque(maxlen=100)

    def emit(self, record):
        # As a text: an error among the arguments would keep its frames.
        record.msg, record.args = record.getMessage(), None
        self.records.append(record)


def setup_logging(path=None, rank=0):
    """Sends log lines to stderr, and to the file at path, with those that were logged
    before there was a path. Of learners of other ranks than 0 only warnings go to
    stderr."""
    early = [r for h in log.handlers if isinstance(h, Early) for r in h.records]
    for handler in log.handlers[:]:
        log.removeHandler(handler)
        handler.close()
    who = f"rank {rank}: " if rank > 0 else ""
    line = logging.Formatter(f"[%(asctime)s] {who}%(message)s", datefmt="%H:%M:%S")
    threading.excepthook = _thread_excepthook
    logging.raiseExceptions = False  # A full disk must not hide what goes to stderr.
    handlers = [logging.StreamHandler()]
    handlers[0].setLevel(logging.WARNING if rank > 0 else logging.INFO)
    handlers.append(Early() if path is None else logging.FileHandler(path))
    for handler in handlers:
        handler.setFormatter(line)
        log.addHandler(handler)
    if path is not None:
        for record in early:
            handlers[1].handle(record)


def _thread_excepthook(args):
    """Logs an OSError of a thread as one line. (TensorBoard's writer dies in a thread
    of its own when the disk is full; the next write raises the error again, where it is
    handled.)"""
    if issubclass(args.exc_type, OSError):
        log.error("%s: %s", args.thread.name, args.exc_value)
    else:
        threading.__excepthook__(args)


class BadInput(ValueError):
    """A mistake of the user's. The programs print it as one line and exit with code
    2."""


class Stop(Exception):
    """Ends the run early, with a message for the user and an exit code."""

    def __init__(self, message, exit_code=1, save=True):
        super().__init__(message)
        self.exit_code = exit_code
        self.save = save  # Whether the state is worth a checkpoint.


def first_line(error, with_type=True):
    """Returns the error's type, and its message's first line without control
    characters."""
    lines = [line for line in str(error).splitlines() if line.strip()][:1]
    line = "".join(c for c in "".join(lines) if c.isprintable())
    if not with_type:
        return line
    name = type(error).__name__
    return f"{name}: {line}" if line else name


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
        self._seen = {}  # {(who, text): (how often, when it is due next, wait)}
        self._swept_at = 0.0

    def count(self, who, text, now=None):
        """Returns how often the text came from them, and whether that is to be logged:
        at first, after REMIND_S, then after twice this, and so on; and at first again
        when it has stayed away since it was due, for longer than the next wait."""
        now = time.monotonic() if now is None else now
        if now >= self._swept_at + REMIND_S:  # What has stayed away is forgotten.
            self._swept_at = now
            seen = self._seen.items()
            self._seen = {k: x for k, x in seen if now <= x[1] + x[2]}
        num_texts = Counter(who for who, _ in self._seen)
        if who not in num_texts and len(num_texts) >= self.MAX_WHO:
            who = None
        key = who, re.sub(r"0x[0-9a-f]+|\d+", "#", text)
        if key not in self._seen and num_texts[who] >= self.MAX_TEXTS:
            key = who, None
        number, due_at, wait_s = self._seen.get(key, (0, now, REMIND_S))
        due = now >= due_at
        if due:
            due_at, wait_s = now + wait_s, 2 * wait_s
        self._seen[key] = number + 1, due_at, wait_s
        return number + 1, due
