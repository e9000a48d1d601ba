"""A run: its directory (docs/reliability.md has its files), its logs, its counters."""

import contextlib
import json
import math
import os
import pathlib
import re
import secrets
import time
from collections import deque

from torchbeast import (
    checkpoint,
    files,
    machine,
    ranks,
    replay_files,
    seeds,
    stages,
    torchrun,
)
from torchbeast.display import Display
from torchbeast.environment import NAME
from torchbeast.flags import UNCOMPARED, command_line, words_of
from torchbeast.log_writer import COLUMNS, LogWriter
from torchbeast.messages import BadInput, Stop, log, setup_logging


class Run:
    """A run's directory, logs, checkpoint, counters and display.

    Of several learners all count, and rank 0 has directory, logs, checkpoint and
    display; the others have a log of their own.

    A Run is not thread-safe: only the thread that updates may call its methods, and one
    that runs after that has ended.
    """

    def __init__(self, flags, frames_per_step=1, num_agents=1):
        self.flags = flags
        self.num_agents = num_agents  # That make a step of an environment together.
        self.step = 0
        self.updates = 0
        self.episodes = 0
        self.seconds = 0.0  # In the sessions before this one.
        self.returns = deque(maxlen=100)
        self.frames_per_step = frames_per_step
        self.stage_seconds = dict  # Called for seconds so far: see stages.STAGES.
        self.take_metrics = list  # See Environment.take_metrics().
        self._best = -math.inf  # Mean return of best.tar.
        self._saved_step = None  # The step of model.tar.
        self._checkpoint = self._lock = self._log = None
        self.display = None
        self.shown = "loss", math.nan  # A statistic.
        self._started = None
        self._own = {}  # {name: (sum, count)} since the learners put them together.
        self._sums = {}  # Since the line before, of all learners.
        self._own_returns = []  # Since then: (sum, number) of each update.
        self.path = run_path(flags)
        self.checkpoint_path = self.path / "model.tar"
        rank = ranks.current.rank
        self._out_path = self.path / (f"out.rank{rank}.log" if rank > 0 else "out.log")

    def open(self):
        """Creates the directory for this process alone, and reads the checkpoint in it.

        Raises BadInput if the directory cannot be written to, if another process trains
        this run, or if the checkpoint is of another run.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._out_path.open("a").close()
            if ranks.current.rank > 0:
                setup_logging(self._out_path, ranks.current.rank)
                return
            # Before the checkpoint is read: nobody else writes another one after that.
            self._lock = files.lock(self.path / "lock")
            # Of a process that was killed while it saved.
            for name in "model.tar", "best.tar", "replay.bin":
                (self.path / f"{name}.tmp").unlink(missing_ok=True)
            if self.checkpoint_path.exists():
                if self.flags.disable_checkpoint:
                    raise BadInput(
                        f"--disable_checkpoint: --xpid {self.flags.xpid} has one, "
                        f"{self.checkpoint_path}: use another --xpid"
                    )
                self._checkpoint = checkpoint.read(self.checkpoint_path, self.flags)
            (self.path / "logs.csv").open("a").close()
        except files.Locked as e:
            raise BadInput(f"--xpid {self.flags.xpid} is being trained by {e}") from e
        except OSError as e:
            message = f"{e.filename or self.path}: {e.strerror}"
            raise BadInput(f"--savedir {self.path.parent}: {message}") from e
        setup_logging(self._out_path)

    def restore(self, agent):
        """Gives its part of the checkpoint to the agent, which has started learning,
        and takes the counters and random numbers. Without a checkpoint does nothing.
        Other ranks' agents become as rank 0's. Raises BadInput if something does not
        fit."""
        if self._checkpoint is not None:
            self._restore(agent)
        if ranks.current.num > 1:
            data = ranks.current.broadcast(checkpoint.to_bytes(self._state(agent)))
            if ranks.current.rank > 0:
                saved = checkpoint.from_bytes(data)
                checkpoint.load_agent_state(agent, saved, "of rank 0")
                self._take_counters(saved)
                seeds.set_seed(
                    seeds.derive_seed(self.flags.seed, self.step, ranks.current.rank)
                )

    def _restore(self, agent):
        saved, self._checkpoint = self._checkpoint, None
        changed = self._changed_flags(saved["flags"])
        try:
            checkpoint.load_agent_state(agent, saved, self.checkpoint_path)
        except BadInput as e:
            raise BadInput(f"{e}; flags: {changed}" if changed else str(e)) from e
        if changed:
            log.info("flags that differ from the checkpoint's: %s", changed)
        try:
            self._take_counters(saved)
            self._saved_step = self.step
            seeds.set_rng_state(saved["rng"])
        except Exception as e:
            raise checkpoint.not_a_checkpoint(self.checkpoint_path, e) from e
        log.info("resuming %s at step %d", self.checkpoint_path, self.step)

    def _take_counters(self, saved):
        self.step, self.updates = saved["step"], saved["updates"]
        self.episodes, self.seconds = saved["episodes"], saved["seconds"]
        self.returns.extend(saved["returns"])
        self._best = saved.get("best", -math.inf)
        self._sums = {name: tuple(x) for name, x in saved.get("sums", {}).items()}

    def _changed_flags(self, before):
        """Returns a text with the flags that are not those of the checkpoint. (One that
        it does not have came with a change of the code, and may change the run.)"""
        now = machine.plain(vars(self.flags))
        names = now.keys() - UNCOMPARED
        if [*now.get("command", ())][:1] != [*before.get("command", ())][:1]:
            names &= before.keys()  # Another program has other flags.
        return ", ".join(
            f"{_words(name, now[name])} (before: "
            f"{_words(name, before[name]) if name in before else 'no such flag'})"
            for name in sorted(names)
            if now[name] != before.get(name)
        )

    @contextlib.contextmanager
    def disk_errors(self):
        """A context in which an error of the disk ends the run with one line."""
        try:
            yield
        except OSError as e:
            message = f"{os.fsdecode(e.filename or self.path)}: {e.strerror}"
            raise Stop(f"{message}; {self.last_checkpoint()}", save=False) from e

    def start(self):
        """Writes meta.json, opens the logs for appending, starts the clock."""
        self._started = self._saved_at = self._row_at = time.monotonic()
        self._row_step = self.step
        self._row_stages = self.stage_seconds()
        self._processor_seconds = sum(os.times()[:4])
        if ranks.current.rank > 0:
            return
        with self.disk_errors():
            if self._saved_step is None:
                self._keep_aside()
            self._write_meta()
            self._log = LogWriter(self.path, self.step, self.flags.track)
        files.link(self.path, "latest")
        if chosen := getattr(self.flags, "chosen", None):
            log.info("defaults for %s: %s", self.flags.env, words_of(chosen))
        if not self.flags.disable_checkpoint:
            log.info("to resume: %s", command_line(self.flags))
        self.display = Display(self)

    def _keep_aside(self):
        """Moves the logs of an attempt that left no checkpoint to a directory of their
        own."""
        names = [path.name for path in self.path.glob("events.out.*")]
        # These are of a directory that somebody else keeps there, if of anything.
        names += [n for n in ("meta.json", "best.tar") if (self.path / n).exists()]
        if not names and (self.path / "logs.csv").stat().st_size == 0:
            return
        number = 1
        while (aside := self.path / f"attempt-{number}").exists():
            number += 1
        aside.mkdir()
        for name in [*names, "logs.csv"]:
            (self.path / name).rename(aside / name)
        (self.path / "logs.csv").touch()
        log.info(
            "this run was begun before, and goes on from no checkpoint: it begins "
            "anew, %s has the logs of that attempt",
            aside,
        )

    def _write_meta(self):
        path = self.path / "meta.json"
        sessions, number = [], secrets.token_hex(4)
        try:
            earlier = json.loads(path.read_text())
            sessions = [*earlier.pop("earlier_sessions", []), earlier]
            number = earlier.get("id", number)
        except FileNotFoundError:
            pass
        except (ValueError, AttributeError, TypeError) as e:
            log.warning("%s is written anew: %s", path, e)
        data = dict(
            machine.meta(self.flags),
            id=number,  # By which trackers know the run.
            ranks=ranks.current.hosts,
            first_step=self.step,
            earlier_sessions=sessions,
        )
        files.write_atomically(path, json.dumps(data, indent=4).encode() + b"\n")

    def busy_cores(self):
        """The number of this machine's cores that this process, and its children that
        have ended, kept busy on average since start(). (The children's own start counts
        too, hence min().)"""
        used = sum(os.times()[:4]) - self._processor_seconds
        return min(machine.num_cores(), used / (time.monotonic() - self._started))

    @property
    def elapsed(self):
        """The seconds of training, those of the run's earlier sessions included."""
        now = time.monotonic()
        return self.seconds + now - (now if self._started is None else self._started)

    def update(self, num_steps, statistics, episodes, policy_lag, faulty=None):
        """Counts one update and logs it.

        statistics: {name: number}, what the agent's learn() returned; the first one is
        shown. episodes: {name: (sum, number)}, see rollouts.ended_episodes(). faulty:
        Ranks.faulty of this update.
        Raises Stop if a statistic is not finite, or has the name of a run's column.
        """
        self.step += num_steps
        self.updates += 1
        for name, x in statistics.items():
            if name in COLUMNS or not re.fullmatch(NAME, name):
                raise Stop(
                    f"learn() returned the statistic {name!r}, expected a name without "
                    "spaces, commas and quotes that the run does not log itself",
                    save=False,
                )
            if not math.isfinite(x):
                where = f"step {self.step} (update {self.updates})"
                if faulty is not None and faulty.any():
                    numbers = map(str, faulty.nonzero().flatten().tolist())
                    where += f" on rank {', '.join(numbers)}"
                raise Stop(
                    f"{name} is {x} at {where}; {self.last_checkpoint()}", save=False
                )
            self._add(name, x)
        self._add("policy_lag", policy_lag)
        for name, (total, count) in episodes.items():
            self._add(name, total, count)
        for metrics in self.take_metrics():
            for name, x in metrics.items():
                self._add(f"episode/{name}", x)
        self._count(*episodes["episode_return"])
        self._own_returns.append(episodes["episode_return"])
        self.shown = next(iter(statistics.items()), self.shown)
        if self._row_is_due():
            self._write_row()
        if self.display is not None:
            self.display.update()

    def add_evaluation(self, numbers):
        """Logs what episodes beside training led to, {name: number}."""
        for name, x in numbers.items():
            self._add(name, x)

    def _add(self, name, x, num=1):
        total, count = self._own.get(name, (0.0, 0))
        if num > 0:
            self._own[name] = (total + x, count + int(num))

    def _count(self, total, num):
        num = int(num)
        self.returns.extend([total / max(1, num)] * min(num, self.returns.maxlen))
        self.episodes += num

    def _put_together(self):
        """Adds up what the learners have counted since they did this last. Returns
        their stages' seconds, added up."""
        own = ranks.current.rank, self._own, self._own_returns, self.stage_seconds()
        seconds = {}
        for rank, sums, returns, stage_seconds in ranks.current.all_gather(own):
            for name, (total, count) in sums.items():
                before = self._sums.get(name, (0.0, 0))
                self._sums[name] = (before[0] + total, before[1] + count)
            for name, s in stage_seconds.items():
                seconds[name] = seconds.get(name, 0) + s
            if rank != ranks.current.rank:
                for total, num in returns:
                    self._count(total, num)
        self._own, self._own_returns = {}, []
        return seconds

    def _row_is_due(self):
        interval, row = self.flags.log_interval_steps, self._row_step
        finished = self.step >= self.flags.total_steps
        return self.step // interval > row // interval or finished and self.step > row

    def _write_row(self):
        stage_seconds = self._put_together()
        if ranks.current.rank == 0:
            self._write(stage_seconds)
        self._sums, self._row_step = {}, self.step

    def _write(self, stage_seconds):
        now = time.monotonic()
        row = dict.fromkeys(COLUMNS)
        row.update((name, total / count) for name, (total, count) in self._sums.items())
        row.update(
            step=self.step,
            frames=self.step * self.frames_per_step,
            seconds=round(self.elapsed, 2),
            sps=round((self.step - self._row_step) / max(now - self._row_at, 1e-9), 1),
            updates=self.updates,
            episodes=self._sums.get("episode_return", (0, 0))[1],
            rss_mb=machine.rss_mb(),
        )
        row.update(stages.shares(stage_seconds, self._row_stages))
        self._row_at, self._row_stages = now, stage_seconds
        with self.disk_errors():
            self._log.write(row)

    def save(self, agent):
        """Writes model.tar, atomically: the agent, the counters, the flags, the random
        numbers."""
        if self._row_is_due():  # A rank was lost while it was to be written.
            self._write_row()
        else:
            self._put_together()
        if self.flags.disable_checkpoint or ranks.current.rank > 0:
            return
        saved = self._state(agent)
        mean = sum(self.returns) / max(1, len(self.returns))
        best = len(self.returns) == self.returns.maxlen and mean > self._best
        saved["best"] = mean if best else self._best
        with self.disk_errors():
            num = self.flags.keep_checkpoints - 1
            if num > 0 and self._saved_step not in (None, self.step):
                checkpoint.keep(self.checkpoint_path, self._saved_step, num)
            if best:
                checkpoint.write(self.path / "best.tar", saved)
            checkpoint.write(self.checkpoint_path, saved)
        credit = getattr(agent, "credit", None)  # Several policies have none.
        if credit is not None and self.flags.save_replay:
            replay_files.save(self.path / "replay.bin", credit, self.step)
        self._best = saved["best"]
        self._saved_at, self._saved_step = time.monotonic(), self.step

    def _state(self, agent):
        return dict(
            agent=agent.state_dict(),
            flags=machine.plain(vars(self.flags)),
            step=self.step,
            updates=self.updates,
            episodes=self.episodes,
            seconds=self.elapsed,
            returns=list(self.returns),
            best=self._best,
            sums={k: (float(x), int(num)) for k, (x, num) in self._sums.items()},
            rng=seeds.get_rng_state(),
        )

    def note(self, text):
        """Adds a text to out.log that is printed otherwise."""
        with contextlib.suppress(OSError), open(self._out_path, "a") as f:
            f.write(text)

    def save_is_due(self):
        interval = self.flags.checkpoint_interval_seconds
        return time.monotonic() - self._saved_at > interval

    def last_checkpoint(self):
        if self.flags.disable_checkpoint or not self.checkpoint_path.exists():
            return "no checkpoint was written"
        return f"the last checkpoint is {self.checkpoint_path}"

    def close(self, exit_code=0):
        """Closes what start() opened, whatever state the disk is in. exit_code: the
        program's."""
        if self.display is not None:
            self.display.close()
        if self._log is not None:
            self._log.close(exit_code)
        if self._lock is not None:
            self._lock.close()


def run_path(flags) -> pathlib.Path:
    """Returns <savedir>/<xpid>. If flags.xpid is not given, sets it: to the time for a
    new run, to the newest run's name for a test."""
    savedir = pathlib.Path(flags.savedir)
    if flags.xpid is None:
        if flags.mode != "train":
            try:
                path = (savedir / "latest").resolve()
            except (OSError, RuntimeError) as e:  # A loop of links.
                raise BadInput(f"--savedir {savedir}: {e}") from e
            flags.xpid = path.name
            return path
        flags.xpid = torchrun.new_xpid()
    # Python makes surrogates of bytes that are no text.
    surrogates = re.search("[\ud800-\udfff]", flags.xpid)
    if flags.xpid in ("", ".", "..", "latest") or "/" in flags.xpid or surrogates:
        raise BadInput(f"--xpid {flags.xpid!r} cannot be the name of a run")
    return savedir / flags.xpid


def checkpoint_path(flags) -> pathlib.Path:
    """Returns the path of the checkpoint that --mode test plays."""
    return pathlib.Path(flags.checkpoint or run_path(flags) / "model.tar")


def _words(name, x):
    return f"no --{name}" if x is None else words_of({name: x})
