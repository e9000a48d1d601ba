"""A run: its directory, its logs, its counters.

<savedir>/<xpid>/
    meta.json      flags, command, git commit, host, CPU, GPU, versions
    logs.csv       a line every --log_interval_steps; columns: COLUMNS, and whatever
                   the agent's learn() returns
    events.out.*   the same for TensorBoard
    out.log        what was printed
    lock           held by the process that trains
    model.tar      the last checkpoint
    test.json      what --mode test found
<savedir>/latest   the newest run
"""

import contextlib
import csv
import datetime
import json
import math
import os
import pathlib
import re
import time
from collections import deque

from torchbeast import checkpoint, files, machine, seeds, stages
from torchbeast.display import Display
from torchbeast.environment import BadInput
from torchbeast.process import Stop, log, setup_logging

# Of logs.csv and TensorBoard. The agent's statistics are means over the updates since
# the line before.
COLUMNS = {
    "step": "agent steps learned from (T * B an update)",
    "frames": "frames of the game: step times the environment's frame skip",
    "seconds": "seconds of training so far, earlier sessions of the run included",
    "sps": "steps per second since the line before",
    "updates": "gradient steps so far",
    "episodes": "reported episodes that ended since the line before",
    "episode_return": "mean return of these episodes, unclipped; empty without one",
    "episode_step": "mean length of these episodes in agent steps",
    "training_episode_return": "mean return of the training episodes that ended; on "
    "Atari each life is one",
    "policy_lag": "updates between the weights a rollout began with and those it is "
    "learned by, mean",
    "environment_wait": "share of a stream's time (PolyBeast) in which its server "
    "stepped, or messages were on their way",
    "inference_queue": "share in which the stream waited for an inference thread",
    "inference": "share in which the network was evaluated",
    "rollout_queue": "share in which the stream waited for the learner",
    "learner_wait": "share of the learner's time in which it waited for a batch",
    "update": "share of the learner's time in which it learned",
    "rss_mb": "resident memory of the learner process, MiB",
}


class Run:
    """A run's directory, logs, checkpoint, counters and display.

    A Run is not thread-safe: only who holds the learner's lock may call its methods.
    """

    def __init__(self, flags, frames_per_step=1):
        self.flags = flags
        self.step = 0
        self.updates = 0
        self.episodes = 0
        self.seconds = 0.0  # Of the sessions before this one.
        self.returns = deque(maxlen=100)
        self.frames_per_step = frames_per_step
        self.stage_seconds = dict  # Called for seconds so far: see stages.STAGES.
        self._checkpoint = self._lock = self._csv = self._tensorboard = None
        self.display = None
        self.path = run_path(flags)
        self.checkpoint_path = self.path / "model.tar"

    def open(self):
        """Creates the directory for this process alone, and reads the checkpoint in it.

        Raises BadInput if the directory cannot be written to, if another process trains
        this run, or if the checkpoint is of another run.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Before the checkpoint is read: nobody else writes another one after that.
            self._lock = files.lock(self.path / "lock")
            if self.checkpoint_path.exists() and not self.flags.disable_checkpoint:
                self._checkpoint = checkpoint.read(self.checkpoint_path, self.flags)
            for name in ("out.log", "logs.csv"):
                (self.path / name).open("a").close()
        except files.Locked as e:
            raise BadInput(f"--xpid {self.flags.xpid} is being trained by {e}") from e
        except OSError as e:
            message = f"{e.filename or self.path}: {e.strerror}"
            raise BadInput(f"--savedir {self.path.parent}: {message}") from e
        link = self.path.parent / f".latest-{os.getpid()}"
        try:
            link.symlink_to(self.path.name)
            os.replace(link, self.path.parent / "latest")
        except OSError as e:  # No symlinks here, or `latest` is the user's own.
            link.unlink(missing_ok=True)
            log.warning("no link %s: %s", self.path.parent / "latest", e.strerror)
        setup_logging(self.path / "out.log")

    def restore(self, agent):
        """Gives its part of the checkpoint to the agent, which has started learning,
        and takes the counters and random numbers. Does nothing without a checkpoint.
        Raises BadInput if something does not fit."""
        if self._checkpoint is None:
            return
        saved, self._checkpoint = self._checkpoint, None
        checkpoint.load_agent_state(agent, saved, self.checkpoint_path)
        try:
            self.step, self.updates = saved["step"], saved["updates"]
            self.episodes, self.seconds = saved["episodes"], saved["seconds"]
            self.returns.extend(saved["returns"])
            seeds.set_rng_state(saved["rng"])
        except Exception as e:
            raise checkpoint.not_a_checkpoint(self.checkpoint_path, e) from e
        log.info("resuming %s at step %d", self.checkpoint_path, self.step)

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
        from torch.utils.tensorboard import SummaryWriter  # Slow to import.

        self._started = self._saved_at = self._row_at = time.monotonic()
        self._row_step = self.step
        self._row_stages = self.stage_seconds()
        self._processor_seconds = machine.processor_seconds()
        self._sums = {}
        with self.disk_errors():
            self._write_meta()
            self._open_log(self.step or math.inf)
            self._tensorboard = SummaryWriter(self.path, purge_step=self.step or None)
        self.display = Display(self)

    def _open_log(self, step=math.inf, new_columns=()):
        """Cuts logs.csv back to the rows up to a step, adds columns, and opens it."""
        if self._csv is not None:
            self._csv.close()
        path = self.path / "logs.csv"
        columns = files.cut_log(path, step, new_columns)
        self._csv = open(path, "a", newline="", buffering=1)
        self._log = csv.DictWriter(self._csv, columns)

    def _write_meta(self):
        path = self.path / "meta.json"
        sessions = []
        try:
            earlier = json.loads(path.read_text())
            sessions = [*earlier.pop("earlier_sessions", []), earlier]
        except FileNotFoundError:
            pass
        except (ValueError, AttributeError, TypeError) as e:
            log.warning("%s is written anew: %s", path, e)
        data = dict(
            machine.meta(self.flags), first_step=self.step, earlier_sessions=sessions
        )
        files.write_atomically(path, json.dumps(data, indent=4).encode() + b"\n")

    def busy_cores(self):
        """The number of this machine's cores that this process, and its children that
        have ended, kept busy on average since start(). (The children's own start counts
        too, hence min().)"""
        used = machine.processor_seconds() - self._processor_seconds
        return min(machine.num_cores(), used / (time.monotonic() - self._started))

    @property
    def elapsed(self):
        """The seconds of training, those of the run's earlier sessions included."""
        return self.seconds + time.monotonic() - self._started

    def update(self, num_steps, statistics, episodes, policy_lag):
        """Counts one update and logs it.

        statistics: {name: number}, what the agent's learn() returned; the first one is
        shown as the loss. episodes: dict of lists, `episode_return`, `episode_step` and
        `training_episode_return`.
        Raises Stop if a statistic is not finite, or has the name of a run's column.
        """
        self.step += num_steps
        self.updates += 1
        for name, x in statistics.items():
            if name in COLUMNS or not re.fullmatch(r"[^\s,\"]+", name):
                raise Stop(
                    f"learn() returned the statistic {name!r}, expected a name without "
                    "spaces, commas and quotes that the run does not log itself",
                    save=False,
                )
            if not math.isfinite(x):
                raise Stop(
                    f"{name} is {x} at step {self.step} (update {self.updates}); "
                    f"{self.last_checkpoint()}",
                    save=False,
                )
            self._add(name, x)
        self._add("policy_lag", policy_lag)
        for name, xs in episodes.items():
            for x in xs:
                self._add(name, x)
        self.returns.extend(episodes["episode_return"])
        self.episodes += len(episodes["episode_return"])
        self.loss = next(iter(statistics.values()), math.nan)
        interval = self.flags.log_interval_steps
        if self.step // interval > self._row_step // interval:
            self._write_row()
        self.display.update()

    def _add(self, name, x):
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + x, count + 1)

    def _write_row(self):
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
            rss_mb=round(machine.rss_mb(), 1),
        )
        stage_seconds = self.stage_seconds()
        row.update(stages.shares(stage_seconds, self._row_stages))
        self._sums, self._row_stages = {}, stage_seconds
        self._row_at, self._row_step = now, self.step
        with self.disk_errors():
            if new := [name for name in row if name not in self._log.fieldnames]:
                self._open_log(new_columns=new)
            self._log.writerow(row)
            for name, x in row.items():
                if name != "step" and x is not None:
                    self._tensorboard.add_scalar(name, x, self.step)

    def save(self, agent):
        """Writes model.tar, atomically: the agent, the counters, the flags, the random
        numbers."""
        if self.flags.disable_checkpoint:
            return
        saved = dict(
            agent=agent.state_dict(),
            flags=machine.plain(vars(self.flags)),
            step=self.step,
            updates=self.updates,
            episodes=self.episodes,
            seconds=self.elapsed,
            returns=list(self.returns),
            rng=seeds.get_rng_state(),
        )
        with self.disk_errors():
            checkpoint.write(self.checkpoint_path, saved)
        self._saved_at = time.monotonic()

    def save_is_due(self):
        interval = self.flags.checkpoint_interval_seconds
        return time.monotonic() - self._saved_at > interval

    def last_checkpoint(self):
        if self.flags.disable_checkpoint or not self.checkpoint_path.exists():
            return "no checkpoint was written"
        return f"the last checkpoint is {self.checkpoint_path}"

    def close(self):
        """Closes what start() opened, whatever state the disk is in."""
        if self.display is not None:
            self.display.close()
        for file in (self._tensorboard, self._csv, self._lock):
            if file is not None:
                try:
                    file.close()
                except OSError as e:
                    log.error("%s: %s", self.path, e.strerror)


def run_path(flags) -> pathlib.Path:
    """Returns <savedir>/<xpid>. If flags.xpid is not given, sets it: to the time for a
    new run, to the newest run's name for a test."""
    try:
        savedir = pathlib.Path(flags.savedir).expanduser()
    except RuntimeError as e:  # ~nobody
        raise BadInput(f"--savedir {flags.savedir}: {e}") from e
    if flags.xpid is None:
        if flags.mode != "train":
            path = (savedir / "latest").resolve()
            flags.xpid = path.name
            return path
        now = datetime.datetime.now()
        flags.xpid = f"torchbeast-{now:%Y%m%d-%H%M%S}-{os.getpid()}"
    surrogates = re.search("[\ud800-\udfff]", flags.xpid)  # Of bytes that are no text.
    if flags.xpid in ("", ".", "..", "latest") or "/" in flags.xpid or surrogates:
        raise BadInput(f"--xpid {flags.xpid!r} cannot be the name of a run")
    return savedir / flags.xpid
