"""What PolyBeast's learner does about its streams while it trains: it follows a file of
servers' addresses, and logs which streams fail and come back.
"""

import os
import pathlib
import re
import time
from collections import Counter

import tls
from command_line import allow_open_files, log
from environment import BadInput

FILES_PER_STREAM = 8
MAX_CHANGES = 10  # Of a file, told of one by one.
MAX_ERROR_CHARACTERS = 200
QUIET_S = 10  # A stream that fails over and over is told of so often.
REMIND_S = 60  # And one that stays away after that time, then twice of it, and so on.


def addresses(flags):
    """Those of --server_addresses, HOST:PORT,... or @FILE. BadInput if none, or if one
    may not be connected to."""
    flag = flags.server_addresses
    try:
        if flag.startswith("@"):
            return read(flag[1:], flags)
        if found := parse(flag):
            tls.check(flags, found)
            return found
    except (OSError, ValueError) as e:
        file = f" {flag}" if flag.startswith("@") else ""
        raise BadInput(f"--server_addresses{file}: {reason(e)}") from e
    raise BadInput("--server_addresses is empty, expected HOST:PORT,... or @FILE")


def parse(text):
    """Addresses of lines, or between commas; # begins a comment. BadInput if one of
    them is none."""
    lines = [line.partition("#")[0] for line in text.splitlines()]
    found = [a.strip() for a in ",".join(lines).split(",") if a.strip()]
    for address in found:
        port = re.fullmatch(r"unix:.+|\S+:([0-9]{1,5})", address)
        if not port or not 0 < int(port[1] or 1) < 65536:
            raise BadInput(f"{address!r}: expected HOST:PORT or unix:PATH")
    return found


def read(path, flags):
    """The addresses of a file. OSError or ValueError if there is none, or if one may
    not be connected to."""
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():  # A pipe would be waited for.
        raise ValueError("expected a file")
    if found := parse(path.read_text(encoding="utf-8-sig")):
        tls.check(flags, found)
        allow_open_files(FILES_PER_STREAM * len(found))
        return found
    raise ValueError("no address in it")


def reason(error):
    return getattr(error, "strerror", None) or str(error)


class Streams:
    """The streams of an ActorPool. check() is called several times a second.

    If --server_addresses is @FILE, the pool gets the addresses that are written into
    the file, as often as they are there, and loses those that are taken out of it. As
    long as the file cannot be read, is empty, has an address that is none or may not
    be connected to, or more than files may be opened for, nothing changes.
    """

    def __init__(self, actors, flags):
        self._actors = actors
        self._flags = flags
        flag = flags.server_addresses
        self._path = flag[1:] if flag is not None and flag.startswith("@") else None
        self._read = None  # What tells whether the file has changed since.
        self._warned = None  # Of what.
        self._logs = {}  # By the streams' numbers.

    def check(self):
        if self._path is not None:
            self._follow_file()
        now = time.monotonic()
        status = self._actors.status()
        logs = self._logs
        self._logs = {s["stream"]: logs.get(s["stream"], StreamLog()) for s in status}
        for s in status:
            self._logs[s["stream"]].update(s, now)

    def _follow_file(self):
        try:
            stat = os.stat(self._path)
            version = stat.st_mtime_ns, stat.st_size, stat.st_ino
            if version == self._read:
                return
            new = Counter(read(self._path, self._flags))
        except (OSError, ValueError) as e:
            if self._warned != reason(e):
                log.warning("%s: %s; goes on as it is", self._path, reason(e))
            self._read, self._warned = None, reason(e)
            return
        self._read, self._warned = version, None
        old = Counter(s["address"] for s in self._actors.status())
        changed = [a for a in old | new if new[a] != old[a]]
        for address in changed:
            if new[address] < old[address]:
                self._actors.remove(address)  # All of them.
                missing = new[address]
            else:
                missing = new[address] - old[address]
            for _ in range(missing):
                self._actors.add(address)
        for a in changed[:MAX_CHANGES]:
            log.info("%s: %s has %d streams, %d before", self._path, a, new[a], old[a])
        if len(changed) > MAX_CHANGES:
            log.info("%s: and so on: %d addresses", self._path, len(changed))


class StreamLog:
    """One line when a stream is lost, one when it is back, however often it tries."""

    def __init__(self):
        self.lost = False  # As was logged last.
        self.reconnects = 0  # Of those that were logged.
        self.quiet_until = 0.0
        self.remind_s = REMIND_S

    def update(self, status, now):
        """status: ActorPool's of this stream."""
        address, reconnects = status["address"], status["reconnects"]
        if self.lost and status["state"] == "running":
            log.info("%s: connected (reconnects: %d)", address, reconnects)
            self.lost = False
            self.quiet_until = now + QUIET_S
        elif reconnects > self.reconnects and now >= self.quiet_until:
            error = last_line(status["last_error"])
            log.warning(
                "%s: no stream (reconnects: %d): %s", address, reconnects, error
            )
            self.remind_s = 2 * self.remind_s if self.lost else REMIND_S
            self.quiet_until = now + self.remind_s
            self.lost = True
        else:
            return
        self.reconnects = reconnects


def last_line(text):
    """The end of a traceback, or whatever else a server sent, fit for a log."""
    lines = text.strip().splitlines() or [""]
    line = lines[-1].strip()[:MAX_ERROR_CHARACTERS]
    return "".join(c if c.isprintable() else "?" for c in line)
