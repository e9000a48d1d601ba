"""What PolyBeast's learner does about its streams while it trains: it follows a file of
servers' addresses, and logs which streams fail and come back.
"""

import contextlib
import json
import math
import os
import re
import time
from collections import Counter
from urllib.parse import unquote

from torchbeast import ranks
from torchbeast.environment import MAX_METRICS, NAME
from torchbeast.messages import REMIND_S, BadInput, Stop, Throttle, log
from torchbeast.remote.addresses import NO_SERVER, read, reason
from torchbeast.remote.sources import usable

MAX_FAILURES = 8  # Each stream's, before any has delivered a rollout: 13 s.
MAX_CHANGES = 10  # Changes of the file that are logged one by one.
MAX_ERROR_CHARACTERS = 1000
BAD_INPUT = (
    f"{BadInput.__module__}.{BadInput.__name__}: "  # A traceback's last line begins so.
)
MAX_HOSTS = 1000  # That are logged by their names.
QUIET_S = 10  # At most one line per failing stream in this time.


def run(actors):
    """Runs the streams of an ActorPool until they are stopped. Raises Stop if they
    cannot go on."""
    try:
        actors.run()
    except RuntimeError as e:
        raise Stop(str(e), save=False) from e


class Streams:
    """Watches the streams of an ActorPool, and the program's own servers. check() has
    to be called once a second.

    With --server_addresses @FILE, the pool gets the addresses that are written into the
    file, as often as they stand there, and loses those that are taken out. Nothing
    changes as long as the file cannot be read, is empty, holds something that is not an
    address or may not be connected to, or has more addresses than files may be opened
    for.
    """

    def __init__(self, actors, flags, environment, servers=None):
        self._actors = actors
        self._servers = servers
        self._flags = flags
        self._environments = [environment]  # And those that were warned of.
        text = flags.server_addresses or ""
        self._path = text[1:] if text.startswith("@") else None
        self._read = None  # What tells whether the file has changed since.
        self._warned = None  # The reason that was logged last.
        self._logs = {}  # By the streams' numbers.
        self._guests = Guests() if flags.listen is not None else None

    def check(self):
        """Follows the file, and logs which streams are lost or back. Raises Stop if all
        have always failed, or if an own server cannot serve the environment."""
        if self._path is not None:
            self._follow_file()
        now = time.monotonic()
        all_streams = self._actors.status()
        if self._servers is not None:
            rollouts_of = {s["address"]: s["rollouts"] for s in all_streams}
            self._servers.restart_ended(rollouts_of)
        self._check_environments(all_streams)
        status = [s for s in all_streams if not s["dialed_in"]]
        if self._flags.server_addresses is None:
            for line in (last_line(s["last_error"]) for s in status):
                if line.startswith(BAD_INPUT):
                    raise Stop(line.removeprefix(BAD_INPUT), exit_code=2)
        if status and self._actors.rollouts()["delivered"] == 0:
            self._check_first(status)
        if self._guests is not None:
            self._guests.update(all_streams, self._actors.take_departed(), now)
        logs = self._logs
        self._logs = {s["stream"]: logs.get(s["stream"], StreamLog()) for s in status}
        for s in status:
            self._logs[s["stream"]].update(s, now)

    def _check_environments(self, status):
        """Warns of environments whose spaces are the learner's, but not their name or
        arguments."""
        for s in status:
            name = s["environment"]
            if name and name not in self._environments and len(self._environments) < 10:
                log.warning(
                    "%s steps %.300s, the learner was told of %.300s: both are learned "
                    "from",
                    unquote(s["address"]),
                    name,
                    self._environments[0],
                )
                self._environments.append(name)

    def _check_first(self, status):
        """Raises Stop if no stream will ever deliver anything."""
        for s in status:
            if NO_SERVER in s["last_error"]:
                what = f"--server_addresses {s['address']}: {NO_SERVER}"
                raise Stop(what, exit_code=2, save=False)
        failures = min(s["failures"] for s in status)
        if failures >= MAX_FAILURES and self._guests is None:
            raise Stop(
                f"no rollout was delivered, each stream failed {MAX_FAILURES} times: "
                f"{last_line(status[0]['last_error'])}",
                save=False,
            )

    def describe(self):
        """Says how many streams there are."""
        status = self._actors.status()
        running = sum(s["state"] == "running" for s in status)
        if not status:
            return "no host has dialed in"
        return f"{running} of {len(status)} streams are connected"

    def take_metrics(self):
        """Returns the episodes' metrics since the last call."""
        return decode_metrics(self._actors.take_metrics())

    @contextlib.contextmanager
    def reporting(self, learner):
        """A context for a learner's work. Other ranks are told why it has no rollouts;
        at its end is logged what became of all rollouts."""
        ranks.current.describe = self.describe
        updates_before = learner.updates
        try:
            yield
        finally:
            updates = learner.updates - updates_before
            rollouts = self._actors.rollouts()
            log.info(
                "rollouts: %d delivered, %d learned from (%d begun, %d lost with their "
                "streams, %d unfinished at the end)",
                rollouts["delivered"],
                updates * learner.batch_size,
                rollouts["begun"],
                rollouts["lost"],
                rollouts["ended"],
            )

    def _follow_file(self):
        try:
            stat = os.stat(self._path)
            version = stat.st_mtime_ns, stat.st_size, stat.st_ino
            if version == self._read:
                return
            new = Counter(usable(read(f"@{self._path}"), self._flags))
        except (OSError, ValueError) as e:
            self._warn(f"{reason(e)}; goes on as it is")
            return
        status = self._actors.status()
        old = Counter(s["address"] for s in status if not s["dialed_in"])
        changed = [a for a in old | new if new[a] != old[a]]
        try:
            for address in changed:
                self._follow(address, old[address], new[address])
        except RuntimeError as e:  # There can be no more threads now.
            self._warn(f"{e}; goes on with fewer streams")
            return
        self._read, self._warned = version, None
        for a in changed[:MAX_CHANGES]:
            log.info("%s: %s has %d streams, %d before", self._path, a, new[a], old[a])
        if len(changed) > MAX_CHANGES:
            log.info("%s: and so on: %d addresses", self._path, len(changed))

    def _follow(self, address, old, new):
        """Has as many streams to an address as the file says."""
        if new < old:
            self._actors.remove(address)  # All of them.
            old = 0
        for _ in range(new - old):
            self._actors.add(address)

    def _warn(self, text):
        """Tells once why the file could not be followed, which is tried again."""
        if self._warned != text:
            log.warning("%s: %s", self._path, text)
        self._read, self._warned = None, text


class Guests:
    """Logs which hosts have dialed in, and why their streams end."""

    def __init__(self):
        # {host: (streams as was logged last, when it was, time until the next line)}
        self.hosts = {}
        self.errors = Throttle()
        self.alone_since = time.monotonic()

    def update(self, status, departed, now):
        """Logs what has changed. status, departed: the ActorPool's of all streams, and
        of those that have ended since the last call."""
        count = Counter(
            host_of(s) for s in status if s["dialed_in"] and s["state"] == "running"
        )
        new = [host for host in count if host not in self.hosts]
        for host in new[max(0, MAX_HOSTS - len(self.hosts)) :]:
            count["others"] += count.pop(host)
        for host in count.keys() | self.hosts.keys():
            before, logged_at, wait_s = self.hosts.get(host, (0, -math.inf, QUIET_S))
            calm = now > logged_at + 2 * REMIND_S
            if count[host] != before and now > logged_at + wait_s:
                log.info("host %s: %d streams, %d before", host, count[host], before)
                # Ever more rarely, where streams come and go all the time.
                wait_s = QUIET_S if calm else min(REMIND_S, 2 * wait_s)
                self.hosts[host] = count[host], now, wait_s
            elif count[host] == before == 0 and calm:
                del self.hosts[host]
        for s in departed:
            error = last_line(s["last_error"])
            if error != "the host is gone":
                number, due = self.errors.count(host_of(s), error, now)
                if due:
                    log.warning(
                        "host %s: no stream (%d so far): %s", host_of(s), number, error
                    )
        if status:
            self.alone_since = now
        elif now > self.alone_since + REMIND_S:
            if self.errors.count("nobody", "no host", now)[1]:
                log.warning("no host has dialed in")


def host_of(status):
    return unquote(status["address"].rpartition(":")[0]) or "here"  # %5B::1%5D


def decode_metrics(texts):
    """Returns the metrics of episodes, {name: number} each, that servers sent as JSON.
    Leaves out what is something else: the other side may be anybody."""
    result = []
    for text in texts:
        try:
            metrics = json.loads(text)
            result.append(
                {
                    name: float(x)
                    for name, x in list(metrics.items())[:MAX_METRICS]
                    if re.fullmatch(NAME, name) and math.isfinite(x)
                }
            )
        except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
            pass
    return result


class StreamLog:
    """Logs one line when a stream is lost and one when it is back, however often the
    stream tries."""

    def __init__(self):
        self.lost = False  # As was logged last.
        self.reconnects = 0  # As many were logged.
        self.quiet_until = 0.0
        self.remind_s = REMIND_S

    def update(self, status, now):
        """Logs what has changed. status: the ActorPool's, of this stream."""
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
    """Returns the last line of a traceback, or of whatever a server sent, fit for a
    log."""
    lines = text.strip().splitlines() or [""]
    line = lines[-1].strip()[:MAX_ERROR_CHARACTERS]
    return "".join(c if c.isprintable() else "?" for c in line)
