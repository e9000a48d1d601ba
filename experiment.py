"""What every run has, whichever script it is: shared flags, the run's directory, its
logs, checkpoint and resume, the progress display.

    <savedir>/<xpid>/
        meta.json      flags, command, git commit, host, CPU, GPU, versions
        logs.csv       one line per --log_interval_steps; columns: see COLUMNS
        events.out.*   the same for TensorBoard
        out.log        what was printed
        lock           held by the process that trains
        model.tar      the last checkpoint
        test.json      what --mode test found
    <savedir>/latest   the newest run
"""

import argparse
import contextlib
import csv
import datetime
import io
import json
import logging
import math
import os
import pathlib
import platform
import random
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections import deque

import numpy as np
import torch

import files
import vtrace
from command_line import (
    environment_parser,
    handle_signals,
    log,
    number,
    setup_logging,
)
from environment import BadInput
from files import cut_log, write_atomically

COLUMNS = {
    "step": "agent steps learned from (T * B an update)",
    "frames": "frames of the game: step times the environment's frame skip",
    "seconds": "of training so far, earlier sessions of the run included",
    "sps": "steps per second since the line before",
    "updates": "gradient steps so far",
    "episodes": "reported episodes that ended since the line before",
    "episode_return": "their mean return, unclipped; empty if there was none",
    "episode_step": "their mean length in agent steps",
    "training_episode_return": "mean return of the training episodes that ended: on "
    "Atari one life",
    "total_loss": "pg_loss + baseline_cost * baseline_loss + entropy_cost * entropy_"
    "loss; like all losses the mean over the updates since the line before",
    "pg_loss": "policy gradient loss",
    "baseline_loss": "value loss, without its cost",
    "entropy_loss": "minus the policy's entropy, without its cost",
    "policy_lag": "updates between the weights a rollout began with and those it is "
    "learned by, mean",
    "learning_rate": "at the line's last update",
    "grad_norm": "before clipping, mean",
    "environment_wait": "share of a stream's time (PolyBeast): servers step, and the "
    "network between",
    "inference_queue": "the same: no inference thread was free",
    "inference": "the same: the network was evaluated",
    "rollout_queue": "the same: the learner was behind",
    "learner_wait": "share of the learner's time: it waited for a batch",
    "update": "the same: it learned",
    "rss_mb": "resident memory of the learner process, MiB",
}


# Flags.


def parser() -> argparse.ArgumentParser:
    """The flags both scripts have, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False, parents=[environment_parser()])

    # fmt: off
    g = p.add_argument_group("run")
    g.add_argument("--mode", default="train", choices=("train", "test", "test_render"))
    g.add_argument("--xpid", metavar="NAME", help="name of the run: the same name "
                   "again resumes it (default: from the time; for tests, the newest)")
    g.add_argument("--savedir", metavar="DIR", default="~/logs/torchbeast",
                   help="where runs are kept (default: %(default)s)")
    g.add_argument("--seed", type=number(int, 0, 2**31 - 1), metavar="N",
                   help="of weights, actions, environments (default: the system's)")
    g.add_argument("--disable_checkpoint", action="store_true",
                   help="neither read nor write model.tar")
    g.add_argument("--checkpoint_interval_seconds", type=number(float, above=0),
                   default=600, metavar="S", help="(default: %(default)s)")
    g.add_argument("--log_interval_steps", type=number(int, 1), default=1000,
                   metavar="N", help="of logs.csv (default: %(default)s)")

    g = p.add_argument_group("training")
    g.add_argument("--total_steps", type=number(int, 1), default=10_000_000,
                   metavar="N", help="agent steps to train for (default: %(default)s)")
    g.add_argument("--batch_size", type=number(int, 1), default=4, metavar="B",
                   help="rollouts in a learner batch (default: %(default)s)")
    g.add_argument("--unroll_length", type=number(int, 1), default=20, metavar="T",
                   help="steps in a rollout (default: %(default)s)")
    g.add_argument("--num_learner_threads", "--num_threads", type=number(int, 1),
                   metavar="N", help="one assembles a batch, and has it on the GPU, "
                   "while another updates (default: 2 with a GPU, else 1)")
    g.add_argument("--learner_device", metavar="DEVICE",
                   help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    g.add_argument("--use_lstm", action="store_true", help="a recurrent network")
    g.add_argument("--precision", default="auto",
                   choices=("auto", "float32", "bfloat16"),
                   help="of what the encoder does with images; the rest is always "
                   "float32 (default: auto, bfloat16 in training if there are images "
                   "and all devices have it, else float32)")
    g.add_argument("--compile", action="store_true",
                   help="compile the learner's network, for GPUs: slower to start")

    g = p.add_argument_group("loss")
    g.add_argument("--entropy_cost", type=number(float, 0), default=0.01, metavar="X",
                   help="(default: %(default)s)")
    g.add_argument("--baseline_cost", type=number(float, 0), default=0.5, metavar="X",
                   help="(default: %(default)s)")
    g.add_argument("--discounting", type=number(float, 0, 1), default=0.99,
                   metavar="GAMMA", help="(default: %(default)s)")
    g.add_argument("--reward_clipping", default="abs_one", choices=("abs_one", "none"),
                   help="of what is learned from, never of what is reported "
                   "(default: %(default)s)")
    g.add_argument("--loss_reduction", default="sum", choices=vtrace.REDUCTIONS,
                   help="over T and B (default: %(default)s)")

    g = p.add_argument_group("optimizer (RMSProp)")
    g.add_argument("--learning_rate", type=number(float, above=0), default=2.5e-4,
                   metavar="X", help="falls linearly to 0 at --total_steps "
                   "(default: %(default)s)")
    g.add_argument("--alpha", type=number(float, 0, 0.9999), default=0.99,
                   metavar="X", help="smoothing (default: %(default)s)")
    g.add_argument("--momentum", type=number(float, 0), default=0.0, metavar="X",
                   help="(default: %(default)s)")
    g.add_argument("--epsilon", type=number(float, above=0), default=1e-5, metavar="X",
                   help="(default: %(default)s)")
    g.add_argument("--grad_norm_clipping", type=number(float, above=0), default=40.0,
                   metavar="X", help="largest gradient norm (default: %(default)s)")

    g = p.add_argument_group("test")
    g.add_argument("--num_test_episodes", type=number(int, 1), default=10, metavar="N",
                   help="whole games to play (default: %(default)s)")
    g.add_argument("--sample_actions", action="store_true",
                   help="sample from the policy (default: its most probable action)")
    g.add_argument("--video", metavar="FILE.mp4", help="record the first episode")
    # fmt: on
    return p


def set_defaults(flags):
    """Fills in the shared flags whose defaults depend on the machine."""
    if flags.learner_device is None:
        flags.learner_device = "cuda" if torch.cuda.is_available() else "cpu"
    if flags.num_learner_threads is None:
        flags.num_learner_threads = 1 if flags.learner_device == "cpu" else 2


def get_device(flags, flag):
    """The torch.device that a flag names. BadInput if it cannot be used."""
    name = getattr(flags, flag)
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", name):
        raise BadInput(f"--{flag} {name}: expected cpu, cuda or cuda:N")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as e:  # Without CUDA: AssertionError.
        raise BadInput(f"--{flag} {name}: {str(e).splitlines()[0]}") from e
    return device


# The run.


class Stop(Exception):
    """Ends the run early, with a message for the user and an exit code."""

    def __init__(self, message, exit_code=1, save=True):
        super().__init__(message)
        self.exit_code = exit_code
        self.save = save  # Whether the state is worth a checkpoint.


class Run:
    """One run: its directory, logs, checkpoint, counters and display.

    Not thread-safe: its methods are for whoever holds the learner's lock.
    """

    def __init__(self, flags, frames_per_step=1):
        self.flags = flags
        self.step = 0
        self.updates = 0
        self.episodes = 0
        self.seconds = 0.0  # Of the sessions before this one.
        self.returns = deque(maxlen=100)
        self.frames_per_step = frames_per_step
        self.stage_seconds = dict  # Called for seconds so far, by stage: see STAGES.
        self.display = self._csv = self._tensorboard = self._lock = None
        self.path = run_path(flags)
        self.checkpoint_path = self.path / "model.tar"

    def open(self, model):
        """Creates the directory, for this process alone. Returns the checkpoint to
        resume from, its weights loaded into model; or None.

        BadInput if it cannot be written to, if another process trains this run, or if
        there is a checkpoint that does not fit.
        """
        checkpoint = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Before the checkpoint is read: nobody else writes another one after that.
            self._lock = files.lock(self.path / "lock")
            if self.checkpoint_path.exists() and not self.flags.disable_checkpoint:
                checkpoint = load_checkpoint(self.checkpoint_path, self.flags, model)
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
        return checkpoint

    @contextlib.contextmanager
    def disk_errors(self):
        """What the disk refuses ends the run, in one line."""
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
        self._processor_seconds = processor_seconds()
        self._sums = {}
        with self.disk_errors():
            self._write_meta()
            path = self.path / "logs.csv"
            # A run that was begun with other columns keeps them.
            columns = cut_log(path, self.step or math.inf)
            self._csv = open(path, "a", newline="", buffering=1)
            self._writer = csv.DictWriter(
                self._csv, columns or COLUMNS, extrasaction="ignore"
            )
            if columns is None:
                self._writer.writeheader()
            self._tensorboard = SummaryWriter(self.path, purge_step=self.step or None)
        self.display = Display(self)

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
        data = dict(meta(self.flags), first_step=self.step, earlier_sessions=sessions)
        write_atomically(path, json.dumps(data, indent=4).encode() + b"\n")

    def busy_cores(self):
        """Of this machine's, by this process and by those children that have ended, on
        average since start(). (Children's own start counts, too: hence min().)"""
        used = processor_seconds() - self._processor_seconds
        return min(num_cores(), used / (time.monotonic() - self._started))

    @property
    def elapsed(self):
        """Seconds of training, earlier sessions of the run included."""
        return self.seconds + time.monotonic() - self._started

    def update(self, num_steps, losses, episodes, policy_lag, learning_rate):
        """Counts one update and logs it.

        losses: dict of floats, those of COLUMNS. episodes: dict of lists,
        `episode_return`, `episode_step` and `training_episode_return`.
        Raises Stop if a loss or the gradient is not finite.
        """
        self.step += num_steps
        self.updates += 1
        for name, x in losses.items():
            if name not in COLUMNS:
                raise Stop(
                    f"learn() returned the statistic {name!r}, expected one of "
                    "experiment.COLUMNS: say there what it is",
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
        self.learning_rate = learning_rate
        self.loss = losses["total_loss"]
        interval = self.flags.log_interval_steps
        if self.step // interval > self._row_step // interval:
            self._write_row()
        self.display.update()

    def _add(self, name, x):
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + x, count + 1)

    def _write_row(self):
        now = time.monotonic()
        row = {name: total / count for name, (total, count) in self._sums.items()}
        row.update(
            step=self.step,
            frames=self.step * self.frames_per_step,
            seconds=round(self.elapsed, 2),
            sps=round((self.step - self._row_step) / max(now - self._row_at, 1e-9), 1),
            updates=self.updates,
            episodes=self._sums.get("episode_return", (0, 0))[1],
            learning_rate=self.learning_rate,
            rss_mb=round(rss_mb(), 1),
        )
        stages = self.stage_seconds()
        row.update(stage_shares(stages, self._row_stages))
        self._sums, self._row_stages = {}, stages
        self._row_at, self._row_step = now, self.step
        with self.disk_errors():
            self._writer.writerow(row)
            for name, x in row.items():
                if name != "step":
                    self._tensorboard.add_scalar(name, x, self.step)

    def save(self, **state):
        """Writes model.tar: state, the counters, the flags, the RNGs. Atomic."""
        if self.flags.disable_checkpoint:
            return
        checkpoint = dict(
            state,
            flags=vars(self.flags),
            step=self.step,
            updates=self.updates,
            episodes=self.episodes,
            seconds=self.elapsed,
            returns=list(self.returns),
            rng=get_rng_state(),
        )
        with self.disk_errors():
            save_checkpoint(self.checkpoint_path, checkpoint)
        self._saved_at = time.monotonic()

    def save_is_due(self):
        interval = self.flags.checkpoint_interval_seconds
        return time.monotonic() - self._saved_at > interval

    def restore(self, checkpoint):
        """Takes the counters and RNGs of a checkpoint."""
        self.step = checkpoint["step"]
        self.updates = checkpoint["updates"]
        self.episodes = checkpoint["episodes"]
        self.seconds = checkpoint["seconds"]
        self.returns.extend(checkpoint["returns"])
        set_rng_state(checkpoint["rng"])

    def last_checkpoint(self):
        if self.flags.disable_checkpoint or not self.checkpoint_path.exists():
            return "no checkpoint was written"
        return f"the last checkpoint is {self.checkpoint_path}"

    def close(self):
        """Whatever start() got done, and whatever state the disk is in."""
        if self.display is not None:
            self.display.close()
        for file in (self._tensorboard, self._csv, self._lock):
            if file is not None:
                try:
                    file.close()
                except OSError as e:
                    log.error("%s: %s", self.path, e.strerror)


STAGES = (  # Those of a stream; those of the learner.
    ("environment_wait", "inference_queue", "inference", "rollout_queue"),
    ("learner_wait", "update"),
)


def stage_shares(seconds, before=None):
    """Of the time between two calls of Run.stage_seconds, each stage's share."""
    shares = {}
    for group in STAGES:
        spent = {
            name: seconds[name] - (before or {}).get(name, 0)
            for name in group
            if name in seconds
        }
        total = sum(spent.values())
        if total > 0:
            shares.update({name: round(s / total, 3) for name, s in spent.items()})
    return shares


def run_path(flags) -> pathlib.Path:
    """<savedir>/<xpid>. Sets flags.xpid if it is not given: to the time for a new run,
    to the newest run's for a test."""
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


# Checkpoints.


def save_checkpoint(path, checkpoint):
    """Atomic: the old file, or the whole new one. OSError if the disk is full."""
    # Through memory: torch's own writer hides the reason of a failed write.
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    write_atomically(path, buffer.getbuffer())


def load_checkpoint(path, flags, model) -> dict:
    """Reads a checkpoint and loads its weights into model.

    Nothing in the file is executed (weights_only=True). BadInput, naming the first
    mismatch, if it is of another environment or network, or not a checkpoint.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        env, _ = checkpoint["flags"]["env"], int(checkpoint["step"])
        weights = dict(checkpoint["model"])
        theirs = {name: tuple(x.shape) for name, x in weights.items()}
    except FileNotFoundError:
        raise BadInput(f"no checkpoint at {path}") from None
    except Exception as e:  # Whatever a damaged or hostile file leads to.
        raise not_a_checkpoint(path, e) from e
    if env != flags.env:
        raise BadInput(f"checkpoint {path} is of --env {env}, not {flags.env}")
    ours = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise BadInput(
                f"checkpoint {path} is of another network: {name} is "
                f"{theirs.get(name, 'not there')} in the checkpoint, "
                f"{ours.get(name, 'not there')} in the network of this command"
            )
    model.load_state_dict(weights)
    return checkpoint


def not_a_checkpoint(path, error):
    reason = [line for line in str(error).splitlines() if line.strip()][:1]
    return BadInput(
        f"{path} is not a checkpoint that can be read: "
        f"{type(error).__name__}: {''.join(reason)}"
    )


def get_rng_state():
    """Of torch, NumPy and Python, in types that weights_only=True reads."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": (name, torch.from_numpy(keys.copy()), position, has_gauss, gauss),
        "python": random.getstate(),
    }


def set_rng_state(state):
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    random.setstate(state["python"])


def set_seed(seed):
    """Seeds torch, NumPy and Python; returns the seed, drawn if it was None."""
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0]) & 0x7FFFFFFF
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def derive_seed(*numbers) -> int:
    """A seed that differs whenever one of the numbers does."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) & 0x7FFFFFFF


# What is known of the machine.


def meta(flags) -> dict:
    packages = ("torch", "numpy", "gymnasium", "ale-py", "opencv-python-headless")
    import importlib.metadata as metadata

    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.argv],
        "flags": vars(flags),
        "git": git_state(),
        "host": platform.node(),
        "os": platform.platform(),
        "cpu": cpu_name(),
        "num_cores": num_cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions,
    }


def git_state():
    def git(*args):
        return subprocess.run(
            ["git", "-C", os.path.dirname(os.path.abspath(__file__)), *args],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "-s"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_name():
    try:
        for line in open("/proc/cpuinfo"):
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def num_cores() -> int:
    """The cores this process may use, not those the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_seconds() -> float:
    """Of this process and its children that have ended."""
    times = os.times()
    return sum(times[:4])


def rss_mb() -> float:
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:  # Not Linux: the peak is what there is, in KiB or (macOS) bytes.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)


# What the user sees.


class Display:
    """On a terminal one live line; in a pipe a log line every few seconds."""

    INTERVAL_S = 5

    def __init__(self, run):
        self.run = run
        self._live = None
        self._line_at = time.monotonic()
        self._recent = deque([(self._line_at, run.step)], maxlen=20)
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._live = Progress(
                BarColumn(bar_width=20),
                TextColumn("{task.fields[text]}"),
                console=Console(stderr=True),
            )
            self._task = self._live.add_task(
                "", total=run.flags.total_steps, completed=run.step, text="starting"
            )
            self._live.start()
            self._move_log_lines()

    def _move_log_lines(self):
        """rich replaces sys.stderr to print log lines above the live line."""
        for handler in log.handlers:
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)

    def update(self):
        now = time.monotonic()
        if now - self._line_at < (0.5 if self._live else self.INTERVAL_S):
            return
        self._line_at = now
        self._recent.append((now, self.run.step))
        if self._live:
            with contextlib.suppress(OSError):  # The terminal is closed.
                self._live.update(self._task, completed=self.run.step, text=self.text())
        else:
            log.info("%s", self.text())

    def text(self):
        run = self.run
        (t0, s0), (t1, s1) = self._recent[0], self._recent[-1]
        sps = (s1 - s0) / (t1 - t0) if t1 > t0 else 0.0
        left = run.flags.total_steps - run.step
        seconds = left / sps if sps else math.inf
        eta = datetime.timedelta(seconds=int(seconds)) if seconds < 1e9 else "?"
        mean = f"{sum(run.returns) / len(run.returns):.1f}" if run.returns else "-"
        return (
            f"step {run.step:,} of {run.flags.total_steps:,}  {sps:,.0f} steps/s  "
            f"ETA {eta}  return {mean}  loss {run.loss:.3g}"
        )

    def close(self):
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None
            self._move_log_lines()


class Signals:
    """SIGNALS make check() raise Stop; the second one quits at once, but for SIGHUP.

    on_second is called in the signal handler: it must end the children, and not block.
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
