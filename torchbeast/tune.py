"""Searches for the values of a program's flags with which it learns best, by Optuna.

    python -m torchbeast.tune --trials 20 --slots 2 --learning_rate log:1e-4:1e-2 \\
        --num_epochs 1:4 --net shallow,deep -- python -m monobeast --env Breakout-v5

trains 20 runs, two at a time. What is before `--` is searched: log:LOW:HIGH, LOW:HIGH
(integers, if both are), or choices A,B,C; on,off of a flag that takes no value. What is
after it is the command of every run. A run's objective is the mean return of all
episodes that end in the last fifth of --total_steps: episode_return in its logs.csv. At
each twentieth, a run is pruned if the best such mean that it has had is below the
median of complete runs there. The same command again goes on where this one stopped.
"""

import argparse
import contextlib
import math
import os
import pathlib
import re
import shlex
import signal
import sys
import time

from torchbeast import files, logs
from torchbeast.combinations import (
    check_flags,
    difference,
    flag_words,
    parse_values,
    split_varied,
)
from torchbeast.flags import Parser, number, run_command
from torchbeast.launch import Job, make_slots, run_all, run_flags, slots_parser
from torchbeast.messages import BadInput, log
from torchbeast.plot import Figure

try:
    import optuna
except ImportError:
    optuna = None

NUM_REPORTS = 20  # A trial reports so often, to be pruned.
WINDOW = 4  # Reports' intervals in an objective.
LOOK_S = 1
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


def parser():
    p = Parser(
        prog="tune",
        usage="%(prog)s --trials N [--slots N] [--gpus GPU,...] --FLAG ... -- COMMAND",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[slots_parser()],
    )
    p.add_argument("--trials", type=number(int, 1, 10_000), metavar="N", required=True,
                   help="runs in all, those of earlier commands included")  # fmt: skip
    return p


def parse_range(flag, text):
    """Returns the distribution that a text stands for."""
    kinds = optuna.distributions
    if not (match := re.fullmatch(f"(log:)?({NUMBER}):({NUMBER})", text)):
        if text.startswith("log:"):
            raise BadInput(f"{flag} {text}: expected log:LOW:HIGH, such as log:1e-4:1")
        return kinds.CategoricalDistribution(parse_values(flag, text))
    integers = all(re.fullmatch(r"[+-]?\d+", x) for x in match.groups()[1:])
    low, high = map(int if integers else float, match.groups()[1:])
    is_log = match[1] is not None
    if not low < high < math.inf or (is_log and low <= 0):
        expected = "0 < LOW < HIGH" if is_log else "LOW < HIGH"
        raise BadInput(f"{flag} {text}: expected {expected}")
    kind = kinds.IntDistribution if integers else kinds.FloatDistribution
    return kind(low, high, log=is_log)


def as_text(x):
    return f"{x:.4g}" if isinstance(x, float) else str(x)


class Study:
    """Optuna's study and its directory, <savedir>/<name>. Raises BadInput if another
    process has it, or if its trials are of another command."""

    def __init__(self, flags, ranges, command):
        self.ranges, self.command = ranges, command
        known_flags = run_flags(command)
        self.name = known_flags.xpid or "tune"
        self.distributions = {x: parse_range(x, text) for x, text in ranges.items()}
        self.choices = {  # Texts of each flag, which the program checks.
            flag: getattr(x, "choices", None) or ranges[flag].split(":")[-2:]
            for flag, x in self.distributions.items()
        }
        self.known = check_flags(self.choices, command)
        self.path = pathlib.Path(known_flags.savedir, self.name)
        with self.naming_its_path():
            self._open(flags.trials)
            self.trials = [Trial(self, i) for i in range(flags.trials)]

    @contextlib.contextmanager
    def naming_its_path(self):
        """Raises BadInput, which names the study, for OSError: the disk may be full."""
        try:
            yield
        except BrokenPipeError:
            raise  # Of who reads the output.
        except OSError as e:
            raise BadInput(f"{self.path}: {e.strerror or e}") from e

    def _open(self, num_trials):
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = files.lock(self.path / "lock")
            cut_half_line(self.path / "trials.journal")
            backend = optuna.storages.journal.JournalFileBackend(
                os.fspath(self.path / "trials.journal")
            )
        except files.Locked as e:
            raise BadInput(f"{self.path} is being tuned by {e}") from e
        self.optuna = optuna.create_study(
            study_name=self.name,
            storage=optuna.storages.JournalStorage(backend),
            sampler=optuna.samplers.TPESampler(
                n_startup_trials=min(10, max(2, num_trials // 4))
            ),
            pruner=optuna.pruners.MedianPruner(n_warmup_steps=WINDOW),
            direction="maximize",
            load_if_exists=True,
        )
        words = [*self.command, *(f"{k}={x}" for k, x in self.ranges.items())]
        before = self.optuna.user_attrs.get("command", words)
        if changed := difference(before, words):
            what = f"{self.path} is of another command, which {changed}"
            raise BadInput(f"{what}: give this one a name by --xpid")
        self.optuna.set_user_attr("command", words)
        self.known_trials = self.optuna.get_trials(deepcopy=False)

    def words(self, values, name):
        """Returns the command of a trial."""
        words = [
            word
            for flag, x in values.items()
            for word in flag_words(flag, str(x), self.choices[flag], self.known)
        ]
        return [*self.command, *words, f"--xpid={name}"]


def cut_half_line(path):
    """Cuts a file back to its whole lines: a full disk leaves half of the last one."""
    with open(path, "ab+") as f:
        f.seek(0)
        f.truncate(f.read().rfind(b"\n") + 1)


class Trial(Job):
    """A run whose flags the study chooses when the run starts."""

    STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}

    def __init__(self, study, i):
        name = f"{study.name},trial={i}"
        self.study, self.pruned, self._looked_at, self._reported = study, False, 0, 0
        self.trial = self.frozen = None
        command = study.command
        if i < len(study.known_trials):
            self.frozen = study.known_trials[i]
            self.trial = optuna.trial.Trial(study.optuna, self.frozen._trial_id)
            self._reported = max(self.frozen.intermediate_values, default=0)
            if not self.frozen.state.is_finished():
                for flag, x in study.distributions.items():
                    self.trial._suggest(flag, x)  # It was killed before, perhaps.
            command = study.words(self.trial.params, name)
        super().__init__(name, command)
        if self.trial is None and self.path.exists():
            what = f"{self.path} is there, but no trial of {study.path}"
            raise BadInput(f"{what}: give this command a name by --xpid")

    def _look_for_earlier_one(self):
        if self.frozen is None:
            return
        if self.frozen.state.is_finished():
            self.state = self.STATES[self.frozen.state.name]
            self.note = self.frozen.user_attrs.get("line", "")
            return
        super()._look_for_earlier_one()
        if self.state == "complete":
            self._tell()

    def start(self, cores, gpu):
        if self.trial is None:
            self.trial = self.study.optuna.ask(self.study.distributions)
            self.command = self.study.words(self.trial.params, self.name)
        super().start(cores, gpu)

    def has_ended(self, signum):
        if not super().has_ended(signal.SIGTERM if self.pruned else signum):
            if not signum and not self.pruned:
                self._consider_pruning()
            return False
        if self.pruned and self.state == "stopped":
            self.state = "pruned"
        self._tell()
        return True

    def _consider_pruning(self):
        if time.monotonic() < self._looked_at + LOOK_S:
            return
        self._looked_at = time.monotonic()
        self.look()
        if self._report() and self.trial.should_prune():
            self.pruned, self.state = True, "ends"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)

    def _report(self):
        """Reports the twentieths that the run has reached. Returns whether any is
        new."""
        total, before = self.flags.total_steps, self._reported
        reached = min(NUM_REPORTS, NUM_REPORTS * self.step // total)
        if reached <= before:  # Less, after it was resumed.
            return False
        self._reported = reached
        rows = logs.read_if_there(self.path / "logs.csv")
        for i in range(before + 1, self._reported + 1):
            ends = [j * total / NUM_REPORTS for j in (i - WINDOW, i)]
            if (mean := logs.mean_return(rows, *ends)) is not None:
                self.trial.report(mean, i)
        return True

    def _tell(self):
        """Tells the study how the run has ended. One that was stopped goes on later."""
        value = None
        self._report()
        if self.state in ("ended", "complete"):
            begin = self.flags.total_steps * (1 - WINDOW / NUM_REPORTS)
            rows = logs.read_if_there(self.path / "logs.csv")
            if (value := logs.mean_return(rows, begin)) is None:
                self.state = "failed"
                self.note = "no episode has ended in the last fifth of its steps"
        if self.state == "stopped":
            return
        kinds = optuna.trial.TrialState
        states = {"pruned": kinds.PRUNED, "failed": kinds.FAIL}
        if self.state == "failed":
            self.trial.set_user_attr("line", self.note)
        self.study.optuna.tell(self.trial, value, state=states.get(self.state))
        if value is not None:
            self.note = f"objective {value:.2f}"


def report(study):
    """Prints a table of the trials that have ended, the best first, and the command of
    the best, and plots them."""
    trials = [t for t in study.optuna.get_trials() if t.state.is_finished()]
    trials.sort(key=lambda t: -math.inf if t.value is None else t.value, reverse=True)
    names = [flag[2:] for flag in study.ranges]
    lines = [["trial", "state", "objective", *names, ""], ["---"] * (len(names) + 4)]
    for t in trials:
        value = "" if t.value is None else f"{t.value:.2f}"
        words = [as_text(t.params[flag]) for flag in study.ranges]
        line = t.user_attrs.get("line", "")
        lines.append([str(t.number), Trial.STATES[t.state.name], value, *words, line])
    for line in lines:
        print("|", " | ".join(line), "|")
    complete = [t for t in trials if t.state.name == "COMPLETE"]
    if not complete:
        log.info("no trial is complete; the same command goes on")
        return
    picture = study.path / "trials.png"
    figure = plot(study, [t for t in trials if t.value is not None])
    try:
        figure.savefig(picture, dpi=120)
        log.info("%s: the objective over trials and flags", picture)
    except OSError as e:
        log.warning("%s: %s", picture, e.strerror)
    best = complete[0]
    words = study.words(best.params, f"{study.name},trial={best.number}")
    print(f"trial {best.number} is the best: {shlex.join(words)}", flush=True)


def plot(study, trials):
    names = ["trial", *study.ranges]
    figure = Figure(figsize=(3.5 * len(names), 3.2), layout="constrained")
    axes = figure.subplots(1, len(names), sharey=True)
    for name, ax in zip(names, axes):
        kind = study.distributions.get(name)
        choices = getattr(kind, "choices", None)
        for state, style in ("COMPLETE", {}), ("PRUNED", {"mfc": "none"}):
            some = [t for t in trials if t.state.name == state]
            x = [t.params.get(name, t.number) for t in some]
            x = [choices.index(value) for value in x] if choices else x
            label = Trial.STATES[state]  # A pruned trial shows its last mean return.
            ax.plot(x, [t.value for t in some], "o", color="C0", label=label, **style)
        if choices:
            ax.set_xticks(range(len(choices)), choices)
        ax.set(xlabel=name, xscale="log" if getattr(kind, "log", False) else "linear")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("objective")
    axes[0].locator_params("x", integer=True)
    axes[0].legend(fontsize="small")
    return figure


def tune(argv):
    split = argv.index("--") if "--" in argv else len(argv)
    flags, words = parser().parse_known_args(argv[:split])
    if optuna is None:
        raise BadInput("torchbeast.tune needs: pip install optuna")
    if not (command := argv[split + 1 :]):
        raise BadInput("expected -- and a command, such as -- python -m monobeast")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    slots = make_slots(flags)
    study = Study(flags, split_varied(words), command)
    try:
        with study.naming_its_path():
            return run_all(study.trials, slots)
    finally:
        report(study)


if __name__ == "__main__":
    sys.exit(run_command("tune", lambda: tune(sys.argv[1:])))
