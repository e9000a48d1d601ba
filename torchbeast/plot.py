"""Plots runs, and keeps a thin copy of the log of a single one.

    python -m torchbeast.plot ~/logs/torchbeast/learning_rate=* --out rates.png

Runs that differ only in their seed are one curve: the mean of up to three runs, with a
band from the least to the greatest; of four and more the interquartile mean
(arXiv 2108.13264), with a band from the first to the third quartile. A curve ends where
the shortest of its runs ends. A single run has a line, and a dot for each line of its
logs.csv; beside its picture comes a .csv of about 500 lines, each the mean over the
lines of logs.csv that it stands for.
"""

import argparse
import csv
import difflib
import json
import os
import pathlib
import sys
import textwrap

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from torchbeast import logs
from torchbeast.flags import UNCOMPARED, Parser, run_command
from torchbeast.messages import BadInput, log

LEADING = "agent", "preset", "env"  # Defaults of other flags follow from these.


def parser():
    p = Parser(
        prog="plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # fmt: off
    p.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN",
                   help="directory of a run")
    p.add_argument("--out", type=pathlib.Path, default="plot.png", metavar="FILE",
                   help="picture to write, .png or .svg (default: %(default)s)")
    p.add_argument("--column", default="episode_return", metavar="NAME",
                   help="column of logs.csv (default: %(default)s)")
    p.add_argument("--by", choices=("steps", "hours"), default="steps",
                   help="horizontal axis (default: %(default)s)")
    p.add_argument("--curves", metavar="FLAG,...", help="flags of which each value has "
                   "a curve (default: all but the seed)")
    p.add_argument("--title", help="title (default: the environment)")
    # fmt: on
    return p


class RunLog:
    """What there is of a run: rows, flags {name: value}, points x and y."""

    def __init__(self, path, column, by):
        self.path = path
        try:
            self.rows = logs.read(path / "logs.csv")
        except OSError as e:
            raise BadInput(f"{path} is not the directory of a run: {e}") from e
        try:
            flags = json.loads((path / "meta.json").read_text())["flags"]
            self.flags = {k: str(x) for k, x in flags.items() if k not in UNCOMPARED}
            self.chosen = {*flags.get("chosen", ())}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self.flags, self.chosen = {}, set()  # Another program's.
        self.x, self.y = self.singles = self._points(column, by, average=False)
        if logs.is_of_episodes(column):
            self.x, self.y = self._points(column, by, average=True)

    def _points(self, column, by, average):
        pairs = [(row, row[column]) for row in self.rows if column in row]
        if average:
            pairs = logs.moving_average(self.rows, column)
        step = "eval_step" if column.startswith("eval_") else "step"
        if by == "hours":
            points = [(r["seconds"] / 3600, y) for r, y in pairs if "seconds" in r]
        else:
            points = [(row.get(step, row["step"]), y) for row, y in pairs]
        return np.array(points).reshape(-1, 2).T


def group(runs, names=None):
    """Returns {label: runs of this curve}. The label names the flags in which the
    curves differ, but not those that follow from agent, preset and environment, nor, if
    the others tell the curves apart, those that nobody gave.

    names: of the flags whose values have a curve each, instead of all.
    """
    found = sorted({name for run in runs for name in run.flags})
    if unknown := [name for name in names or () if name not in found]:
        raise BadInput(f"--curves {unknown[0]}: the runs have no such flag")

    def values(run, names):
        if not run.flags:
            return run.path.name
        pairs = [(name, value(run, name)) for name in names]
        return ", ".join(f"{name}={x}" for name, x in pairs if x is not None)

    def value(run, name):  # An agent without presets has no such flag.
        return run.flags.get(name, "None" if name == "preset" else None)

    def differ(runs):
        return {n for n in found if len({value(run, n) for run in runs}) > 1}

    known, asked = [run for run in runs if run.flags], names or ()
    if names is None:
        alike = {}  # Runs of the same agent, preset and environment.
        for run in known:
            alike.setdefault(values(run, LEADING), []).append(run)
        of_some = set().union(*map(differ, alike.values()))
        names = sorted(differ(known) & (of_some | {*LEADING}))
    curves = {}
    for run in runs:
        curves.setdefault(values(run, names), []).append(run)
    # Flags that only some programs have, or had, and those that nobody gave, make long
    # labels.
    common = [n for n in names if all(n in run.flags for run in known)]
    given = {n for run in known for n in run.flags.keys() - run.chosen}
    common = [n for n in common if n in given or n in asked]
    short = [values(of_curve[0], common) for of_curve in curves.values()]
    return dict(zip(short, curves.values())) if len({*short}) == len(short) else curves


def spread(runs):
    """Returns x, the middle of the runs, low and high of their band, and its name."""
    start, end = max(run.x[0] for run in runs), min(run.x[-1] for run in runs)
    x = np.linspace(start, max(start, end), 500)
    ys = np.sort([np.interp(x, run.x, run.y) for run in runs], axis=0)  # [runs, x]
    if len(runs) < 4:
        return x, ys.mean(0), ys[0], ys[-1], f"mean of {len(runs)} runs, min to max"
    cut = len(runs) // 4
    middle = ys[cut : len(runs) - cut].mean(0)
    what = f"interquartile mean and range of {len(runs)} runs"
    return x, middle, *np.percentile(ys, (25, 75), axis=0), what


def draw(axes, curves):
    for i, (label, runs) in enumerate(curves.items()):
        style = dict(color=f"C{i % 10}", linestyle=("-", "--", ":", "-.")[i // 10 % 4])
        if len(runs) == 1:
            [run] = runs
            text = label or run.path.name
            axes.plot(run.x, run.y, **style)
            if len(curves) == 1:
                axes.plot(*run.singles, ".", ms=1, alpha=0.3, color=style["color"])
        else:
            x, middle, low, high, what = spread(runs)
            text = f"{label}, {what}" if label else what
            axes.fill_between(x, low, high, alpha=0.2, lw=0, color=style["color"])
            axes.plot(x, middle, **style)
            short, long = (f(runs, key=lambda run: run.x[-1]) for f in (min, max))
            if short.x[-1] < 0.95 * long.x[-1]:
                log.info("%s: the curve ends with %s", label or text, short.path)
        axes.lines[-1].set_label(textwrap.fill(text.replace("$", r"\$"), 70))


def tell_last(curves, column):
    """Logs what the runs of each curve end with, their mean and its standard error."""
    for label, runs in curves.items():
        last, num = [run.y[-1] for run in runs], len(runs)
        text, who = f"{column} {np.mean(last):,.2f}", runs[0].path.name
        if num > 1:
            text += f" ± {np.std(last, ddof=1) / num**0.5:,.2f}"
            who = f"{num} runs"
        log.info("%s: %s", ", ".join(filter(None, (label, who))), text)


def plot(flags):
    if flags.out.suffix not in (".png", ".svg"):
        raise BadInput(f"--out {flags.out}: expected a name that ends in .png or .svg")
    if flags.out.stem == "logs":  # Of one run, a .csv comes beside it.
        raise BadInput(f"--out {flags.out}: logs.csv is a run's: expected another name")
    paths = dict.fromkeys(map(os.path.realpath, flags.runs))  # Once with `latest`.
    runs = [RunLog(pathlib.Path(path), flags.column, flags.by) for path in paths]
    if not any(len(run.x) for run in runs):
        columns = {name for run in runs for row in run.rows for name in row}
        if flags.column in columns:
            raise BadInput(f"no run has the column seconds: --by {flags.by}")
        close = difflib.get_close_matches(flags.column, columns, n=1)
        hint = "".join(f"; did you mean {name}?" for name in close)
        raise BadInput(f"no run has the column {flags.column}{hint}")
    for run in runs:
        if len(run.x) == 0:
            log.warning("%s has no %s yet", run.path, flags.column)
    runs = [run for run in runs if len(run.x)]
    curves = group(runs, flags.curves and flags.curves.split(","))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    draw(axes, curves)
    tell_last(curves, flags.column)
    name = flags.column.replace("_", " ")
    if logs.is_of_episodes(flags.column):
        name += ", mean of the last 100 episodes"
    envs = {run.flags.get("env", "") for run in runs}
    title = envs.pop() if flags.title is None and len(envs) == 1 else flags.title or ""
    axes.set(
        xlabel="agent steps" if flags.by == "steps" else "hours of training",
        ylabel=name,
        title=title,
    )
    if flags.by == "steps":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    if len(runs) > 1:
        axes.legend(fontsize="small")
    try:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(flags.out, dpi=120)
        if len(runs) == 1:
            with open(runs[0].path / "logs.csv", newline="", errors="replace") as f:
                columns = next(csv.reader(f))
            with open(flags.out.with_suffix(".csv"), "w", newline="") as f:
                writer = csv.DictWriter(f, columns)
                writer.writeheader()
                writer.writerows(logs.thin(runs[0].rows, columns))
    except OSError as e:
        raise BadInput(f"--out {flags.out}: {e.strerror}") from e
    log.info("%s", flags.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_command("plot", lambda: plot(parser().parse_args())))
