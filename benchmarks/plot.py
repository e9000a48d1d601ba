"""Plots runs, and keeps a thin copy of their logs.

    python benchmarks/plot.py ~/logs/torchbeast/latest --out docs/results/pong

writes pong.png (return over steps; one line per run, in one color if they have one of
--labels) and, for a single run, pong.csv: about 500 lines, each the mean over the lines
of logs.csv that it stands for.
"""

import argparse
import csv
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAST = ("step", "frames", "seconds", "updates", "rss_mb")


def read(path):
    """Rows as dicts of floats, without the empty fields; in order of the steps, later
    sessions of a run taking the place of what an earlier one did not save."""
    with open(path, newline="") as f:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(f)]
    kept = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def thin(rows, columns, num_lines=500):
    size = -(-len(rows) // num_lines)
    for i in range(0, len(rows), size):
        part = rows[i : i + size]
        line = {}
        for name in columns:
            values = [(r[name], r) for r in part if name in r]
            if name in LAST:
                line[name] = values[-1][0]
            elif name == "episodes":
                line[name] = sum(x for x, _ in values)
            elif values:
                # Means over episodes weigh as many episodes as they are of.
                by_episode = name.startswith(("episode_", "episode/"))
                weights = [r["episodes"] if by_episode else 1 for _, r in values]
                total = sum(x * w for (x, _), w in zip(values, weights))
                line[name] = round(total / sum(weights), 4)
        yield line


def moving_average(rows, name, num_episodes=100):
    """[(step, mean of a column over about the last num_episodes episodes)]"""
    recent, points = [], []
    for row in rows:
        if name in row:
            recent += [row[name]] * max(1, int(row["episodes"]))
            del recent[:-num_episodes]
        if recent:
            points.append((row["step"], sum(recent) / len(recent)))
    return points


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("runs", nargs="+", type=pathlib.Path, help="directories of runs")
    p.add_argument("--out", required=True, type=pathlib.Path, help="without suffix")
    p.add_argument("--column", default="episode_return", help="of logs.csv")
    p.add_argument("--title", default="")
    p.add_argument("--labels", nargs="*", default=[])
    flags = p.parse_args()
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    colors = {}
    for i, run in enumerate(flags.runs):
        path = run / "logs.csv"
        if not path.is_file():
            p.error(f"{path} is not there: expected the directory of a run")
        rows = read(path)
        label = flags.labels[i] if i < len(flags.labels) else run.resolve().name
        name = flags.column
        single = [(r["step"], r[name]) for r in rows if name in r]
        if not single:
            p.error(f"{path} has no {name} yet")
        by_episode = name.startswith("episode")
        points = moving_average(rows, name) if by_episode else single
        color = colors.get(label, f"C{len(colors)}")
        shown = f"_{label}" if label in colors else label  # Once in the legend.
        colors[label] = color
        axes.plot(*zip(*points), label=shown, color=color)
        if len(flags.runs) == 1:
            axes.plot(*zip(*single), ".", ms=1, alpha=0.3, color=color)
    axes.set(
        xlabel="agent steps",
        ylabel=f"{flags.column.replace('_', ' ')}, mean of the last 100"
        if flags.column.startswith("episode")
        else flags.column,
        title=flags.title,
    )
    axes.grid(alpha=0.3)
    if len(flags.runs) > 1:
        axes.legend()
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(f"{flags.out}.png", dpi=120)
    if len(flags.runs) == 1:
        with open(flags.runs[0] / "logs.csv", newline="") as f:
            columns = next(csv.reader(f))
        with open(f"{flags.out}.csv", "w", newline="") as f:
            writer = csv.DictWriter(f, columns)
            writer.writeheader()
            writer.writerows(thin(rows, columns))


if __name__ == "__main__":
    main()
