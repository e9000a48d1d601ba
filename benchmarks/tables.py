"""Tables and plots of what is in docs/results.

A document has <!-- table: NAME --> and <!-- end -->, each on a line of its own. What is
between them is made here, the caption, too; without a run nothing is. rliable is not
used for the interquartile mean and its interval (arXiv 2108.13264), because it needs
SciPy, pandas, seaborn and arch, and as many runs of each game.
"""

import datetime
import json
import math
import pathlib
import re
import statistics
import textwrap

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from benchmarks.experiments import (
    AGENTS,
    EXPERIMENTS,
    HUMAN,
    PEERS,
    PICTURES,
    PUBLISHED,
    TABLES,
)
from torchbeast import logs
from torchbeast.messages import BadInput, log
from torchbeast.plot import draw, spread

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LAST = (
    "Mean return of the last 100 training episodes of a run, with actions that explore:"
)
PROTOCOLS = {  # What runs have in common in whose commands these words are.
    "NoFrameskip": "Of Atari: actions are not sticky unless a row says so, and a game "
    "begins with up to 29 no-ops; a lost life ends an episode for learning only; "
    "returns are of whole games.",
    "MinAtar/": "MinAtar is 1.0.15: the last action is repeated with a probability of "
    "0.1, Asterix, Seaquest and SpaceInvaders become more difficult, and -v1 has only "
    "those actions that a game needs.",
}
MARKED = re.compile(r"^(<!-- table: (\S+) -->\n).*?^(<!-- end -->)$", re.M | re.S)


class Curve:
    """A run: its name and record; x, seconds, y: steps, time, mean return of the last
    100 episodes."""

    def __init__(self, name, record):
        self.name, self.record, self.path = name, record, RESULTS / f"{name}.csv"
        rows = logs.read(self.path)
        if any("mean_return" in row for row in rows):
            points = [(row, row["mean_return"]) for row in rows]
        else:  # What torchbeast.plot has thinned.
            points = logs.moving_average(rows, "episode_return")
        triples = [(row["step"], row["seconds"], mean) for row, mean in points]
        self.x, self.seconds, self.y = np.array(triples).T
        self.singles = (), ()  # What torchbeast.plot has dots for.


def read_records():
    """Returns {name of a run: its record}."""
    path = RESULTS / "runs.json"
    return json.loads(path.read_text()) if path.exists() else {}


def read_curves():
    return {name: Curve(name, record) for name, record in read_records().items()}


def runs_of(group, curves):
    """Returns [(experiment, its curves)] of a group. Runs that are not finished count
    where no other run of the experiment is."""
    pairs = []
    for x in EXPERIMENTS.values():
        runs = [curves[run] for run in x.runs() if run in curves]
        if group in x.groups:
            finished = [run for run in runs if run.record["finished"]]
            pairs.append((x, finished or runs))
    return pairs


def number(x):
    digits = 0 if abs(x) >= 99.95 else 1 if abs(x) >= 9.995 else 2
    return f"{x:,.{digits}f}"


def mean_and_error(values):
    mean = number(np.mean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {number(statistics.stdev(values) / len(values) ** 0.5)}"


def table(header, rows, caption, runs):
    """Returns a table, its caption and where its runs are from; "" without a run."""
    if not runs:
        return ""
    first, *others = [f"| {' | '.join(row)} |\n" for row in [header, *rows]]
    for words, protocol in PROTOCOLS.items():
        if any(words in run.record["command"] for run in runs):
            caption += f" {protocol}"
    caption += (
        f" Runs: {len(runs)}, {origin(runs)}; [results/runs.json](results/runs.json) "
        "has the command of each, and the commit if it is known."
    )
    body = f"{first}|{'---|' * len(header)}\n{''.join(others)}"
    return f"\n{body}\n{filled(caption)}\n\n"


def origin(runs):
    """Returns when and where runs were made."""
    records = [run.record for run in runs]
    machines = "; ".join(sorted({record["machine"] for record in records}))
    days = sorted(datetime.date.fromisoformat(record["date"]) for record in records)
    first, last = (f"{day.day} {day:%B %Y}" for day in (days[0], days[-1]))
    if first != last:  # 3 to 5 November 2026.
        month = f" {days[-1]:%B %Y}"
        last = f"{first.removesuffix(month)} to {last}"
    return f"{last}, on {machines}"


def filled(text):
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


# The kinds of tables.


def grid(curves, group, with_aims=False):
    """Environments by agents. with_aims: medians and aims, and cells for what was not
    run."""
    pairs = [(x, runs) for x, runs in runs_of(group, curves) if runs or with_aims]
    agents = dict.fromkeys(x.agent for x, _ in pairs)
    rows = {}
    for x, runs in pairs:
        last = [run.y[-1] for run in runs]
        if with_aims:
            result = f"{number(np.median(last))} {count(runs)}" if runs else "not run"
            cell = f"{result} / {x.aim:,g}"
        else:
            cell = f"{mean_and_error(last)} {count(runs)}"
        row = rows.setdefault(x.env, {"steps": {}})
        row[x.agent] = cell
        row["steps"][x.agent] = x.total_steps
    cells = [
        [env, steps_of(row["steps"]), *(row.get(a, "") for a in agents)]
        for env, row in rows.items()
    ]
    over_seeds = "median" if with_aims else "mean ± standard error"
    caption = f"{LAST} {over_seeds} over seeds (number of seeds)"
    caption += " / aim." if with_aims else "."
    return with_curves(["environment", "steps", *agents], cells, caption, pairs, group)


def steps_of(steps):
    """Returns what most names have, and then who has others. steps: {name: steps}."""
    names = {}
    for name, n in steps.items():
        names.setdefault(n, []).append(name)
    (most, _), *others = sorted(names.items(), key=lambda pair: -len(pair[1]))
    return "; ".join([f"{most:,}", *(f"{', '.join(x)}: {n:,}" for n, x in others)])


def count(runs):
    """Returns how many runs there are, and, of runs that have not finished, how far
    they are."""
    if all(run.record["finished"] for run in runs):
        return f"({len(runs)})"
    return f"({len(runs)}, after {max(run.record['steps'] for run in runs):,})"


def with_curves(header, cells, caption, pairs, group):
    """Returns a table of a group's runs, and its plot."""
    runs = [run for _, of_experiment in pairs for run in of_experiment]
    text = table(header, cells, caption, runs)
    what = (
        "Return over steps: mean over seeds, and a band from the least to the "
        "greatest; of four and more, interquartile mean and range"
    )
    return text and f"{text}![{what}](results/{group}-curves.png)\n\n"


def beside(curves, group, with_missing=False):
    """Experiments beside what is published of their agents, with hours and, of games,
    human-normalised scores. with_missing: also what was not run."""
    pairs = [(x, runs) for x, runs in runs_of(group, curves) if runs or with_missing]
    cells, games = [], {}
    for x, runs in pairs:
        result = hours = "not run"
        if runs:
            last = np.array([run.y[-1] for run in runs])
            result = f"{mean_and_error(last)} {count(runs)}"
            hours = number(np.mean([run.record["seconds"] for run in runs]) / 3600)
            if x.env in HUMAN:
                scores = human_normalised(x.env, last)
                result += f"; {100 * scores.mean():,.0f}%"
                of_agent = games.setdefault(x.agent, {})
                steps, _ = of_agent.get(x.env, (math.inf, None))
                if x.total_steps < steps:
                    of_agent[x.env] = x.total_steps, scores
        published = [p for p in PUBLISHED.get(x.agent, ()) if x.env in p[1]][:1]
        cell = "".join(f"{y[x.env]:,} ({source})" for source, y in published)
        cells.append([x.env, x.agent, f"{x.total_steps:,}", result, hours, cell])
    caption = f"{LAST} mean ± standard error over seeds (number of seeds)"
    caption += "; human-normalised score." if games else "."
    caption += "".join(interquartile_mean(*of_agent) for of_agent in games.items())
    header = ["environment", "agent", "steps", "return", "hours", "published"]
    return with_curves(header, cells, caption, pairs, group)


def interquartile_mean(agent, games):
    """Returns sentences of an agent with more than three games; the second one is about
    those that its peer has, too. games: {game: (steps, human-normalised scores)}, the
    shortest experiment of each."""
    if len(games) <= 3:
        return ""
    steps = steps_of({game: steps for game, (steps, _) in games.items()})
    text = (
        f" {agent}'s interquartile mean of human-normalised scores over {len(games)} "
        f"games (steps: {steps}) is {iqm([ours for _, ours in games.values()])}."
    )
    source, returns = PEERS.get(agent, ("", {}))
    both = [game for game in games if game in returns]
    if len(both) > 3:
        ours = [games[game][1] for game in both]
        theirs = [human_normalised(x, np.array([returns[x]])) for x in both]
        text += (
            f" On the {len(both)} that are published of {source}, it is {iqm(ours)}, "
            f"theirs {middle(theirs):.0f}%."
        )
    return text


def human_normalised(game, returns):
    low, high = HUMAN[game]
    return (returns - low) / (high - low)


def middle(of_games):
    """Returns the interquartile mean, in percent, to which each game counts alike,
    however many its runs."""
    num = 4 * math.lcm(*map(len, of_games))  # A quarter is a whole number of scores.
    scores = np.sort(np.concatenate([x.repeat(num // len(x)) for x in of_games]))
    cut = len(scores) // 4
    return 100 * scores[cut : len(scores) - cut].mean()


def iqm(of_games, num_resamples=2000):
    """Returns the interquartile mean over runs of all games, and its interval by
    stratified bootstrap, as text. of_games: an array of scores for each game. One of a
    single run would have no part in the interval, so there is none."""
    if single := sum(len(scores) == 1 for scores in of_games):
        why = f"{single} of {len(of_games)} games have one run, hence no interval"
        return f"{middle(of_games):.0f}% ({why})"
    random = np.random.RandomState(1)  # Its numbers are the same in any NumPy.
    resampled = [
        middle([random.choice(scores, len(scores)) for scores in of_games])
        for _ in range(num_resamples)
    ]
    low, high = np.percentile(resampled, (2.5, 97.5))
    return f"{middle(of_games):.0f}% (95% interval {low:.0f}% to {high:.0f}%)"


def milestones(curves, rows):
    """When runs first reach returns. rows: {label: (run, returns)}."""
    cells, runs = [], []
    for label, (name, returns) in rows.items():
        if (run := curves.get(name)) is not None:
            texts, runs, minutes = [], [*runs, run], ""
            for x in returns:
                if (run.y >= x).any():
                    i = np.argmax(run.y >= x)
                    texts.append(f"{x:g}: {run.x[i]:,.0f}")
                    minutes = f" ({run.seconds[i] / 60:.1f} minutes)"
            end = f"{number(run.y[-1])} after {run.record['steps']:,}"
            link = f"[{label}](results/{name}.csv)"
            command = f"`{run.record['command']}`"
            cells.append([link, command, "; ".join(texts) + minutes, end])
    header = ["", "command", "return and the step that first reaches it", "at the end"]
    caption = (
        "Returns are means of the last 100 training episodes, with actions that "
        "explore."
    )
    return table(header, cells, caption, runs)


def after(curves, steps, rows):
    """What runs reach after these steps. rows: {label: run}."""
    cells, runs = [], []
    for label, name in rows.items():
        if (run := curves.get(name)) is not None:
            runs.append(run)
            values = [run.y[run.x <= step][-1:] for step in steps]
            cells.append([f"[{label}](results/{name}.csv)", *(
                number(value[0]) if len(value) and step <= run.record["steps"] else ""
                for step, value in zip(steps, values)
            )])  # fmt: skip
    caption = (
        "Mean return of the last 100 training episodes, with actions that explore, "
        "after so many steps; nothing where a run had ended."
    )
    return table(["", *(f"{step:,}" for step in steps)], cells, caption, runs)


def race(curves, steps, rows, name):
    """What runs reach after these steps, and a plot by steps and by hours."""
    text = after(curves, steps, rows)
    return text and f"{text}![Return over steps and hours](results/{name}.png)\n\n"


def passes(curves, names, returns, step=None):
    """When runs first reach returns, and what they have after a step, in a sentence."""
    runs = [curves[name] for name in names if name in curves]
    runs = [run for run in runs if run.record["steps"] >= (step or 0)]

    def between(values):
        ends = (f"{x:,.0f}" for x in (min(values), max(values)))
        return " to ".join(dict.fromkeys(ends))

    parts = []
    for x in returns:
        if runs and all((run.y >= x).any() for run in runs):
            firsts = [np.argmax(run.y >= x) for run in runs]
            part = f"{x} after {between([run.x[i] for run, i in zip(runs, firsts)])}"
            parts.append(f"{part}{'' if parts else ' agent steps'}")
            minutes = [run.seconds[i] / 60 for run, i in zip(runs, firsts)]
    if not parts:
        return ""
    text = f"The mean return of the last 100 games passes {' and '.join(parts)}"
    where = f"{between(minutes)} minutes"
    if step is not None:
        last = [run.y[run.x <= step][-1] for run in runs]
        text += f" ({where}), and is {between(last)} after {step:,}"
        where = f"{len(runs)} runs"
    return f"{filled(f'{text} ({where}; {origin(runs)}).')}\n"


# Documents and plots.


def made(text, curves):
    """Returns a document with its tables as docs/results has them."""

    def between(match):
        if match[2] not in TABLES:
            raise BadInput(f"{match[1].strip()}: expected one of {', '.join(TABLES)}")
        kind, *args = TABLES[match[2]]
        return match[1] + globals()[kind](curves, *args) + match[3]

    return MARKED.sub(between, text)


def write():
    curves = read_curves()
    for path in DOCUMENTS:
        text = made(before := path.read_text(), curves)
        if text != before:
            path.write_text(text)
            log.info("%s", path)
    for kind, *args in TABLES.values():
        if kind in ("grid", "beside"):
            plot(curves, args[0])
        elif kind == "race" and not curves.keys().isdisjoint(args[1].values()):
            plot_race(curves, *args[1:])
    for name, (title, runs_of_label) in PICTURES.items():
        found = {
            label: [curves[name] for name in names if name in curves]
            for label, names in runs_of_label.items()
        }
        if found := {label: runs for label, runs in found.items() if runs}:
            plot_curves(found, title, name)


def plot_curves(curves, title, name):
    """Plots {label: runs of this curve}, as torchbeast.plot does."""
    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    axes = figure.subplots()
    draw(axes, curves)
    axes.set(
        xlabel="agent steps",
        ylabel="return, mean of the last 100 episodes",
        title=title,
    )
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    if sum(map(len, curves.values())) > 1:
        axes.legend(fontsize="small")
    save(figure, name)


def plot_race(curves, rows, name):
    """Plots runs {label: run} by steps and by hours."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    by_steps, by_hours = figure.subplots(1, 2, sharey=True)
    for label, run in rows.items():
        if run in curves:
            by_steps.plot(curves[run].x, curves[run].y, label=label)
            by_hours.plot(curves[run].seconds / 3600, curves[run].y)
    by_steps.set(xlabel="agent steps", ylabel="return")
    by_steps.xaxis.set_major_formatter(EngFormatter(sep=""))
    by_steps.legend(fontsize="small")
    by_hours.set(xlabel="hours")
    for axes in by_steps, by_hours:
        axes.grid(alpha=0.3)
    save(figure, name)


def save(figure, name):
    figure.savefig(RESULTS / f"{name}.png", dpi=100)
    log.info("%s", RESULTS / f"{name}.png")


def plot(curves, group):
    """Plots the runs of a group, in a picture for each environment."""
    envs = {}
    for x, runs in runs_of(group, curves):
        if runs:
            envs.setdefault(x.env, {})[x.agent] = runs
    if not envs:
        return
    num_rows = -(-len(envs) // 3)
    figure = Figure(figsize=(10, 2.6 * num_rows + 0.5), layout="constrained")
    all_axes = figure.subplots(num_rows, 3, squeeze=False).flatten()
    for axes in all_axes:
        axes.axis("off")
    handles = {}
    agents = [a for a in AGENTS if any(a in of_agents for of_agents in envs.values())]
    for axes, (env, of_agents) in zip(all_axes, envs.items()):
        axes.axis("on")
        axes.set_title(env.replace("`", ""), fontsize="medium")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
        for agent, runs in of_agents.items():
            style = dict(color=f"C{agents.index(agent)}")
            x, y, low, high, _ = spread(runs)
            axes.fill_between(x, low, high, alpha=0.2, lw=0, **style)
            [handles[agent]] = axes.plot(x, y, **style)
    lines = [handles[agent] for agent in agents]
    figure.legend(lines, agents, loc="outside lower center", ncols=5)
    save(figure, f"{group}-curves")
