"""Reads what runs have written. No torch in here."""

import contextlib
import csv
import math
import os
from collections import deque

# Columns of which a row that stands for others has the last value, not the mean.
LAST = ("step", "frames", "seconds", "updates", "rss_mb")
MAX_LINE = 2**17  # Longer than 1000 names, and as long as csv takes.


def read(path, last_bytes=None):
    """Returns the rows of logs.csv as dicts of floats, without fields that are empty or
    not finite, in order of the steps: rows of a later session take the place of those
    that an earlier session did not save. Skips what is not a row, or half a row.

    last_bytes: read only these at the end of the file.
    """
    with open(path, "rb") as f:
        header = f.readline()
        start, end = f.tell(), f.seek(0, os.SEEK_END)
        if last_bytes is None or end - last_bytes <= start:
            f.seek(start)
        else:
            f.seek(end - last_bytes - 1)
            f.readline()  # The end of a row, or of the line break before one.
        text = (header + f.read()).decode(errors="replace")
    rows = []
    for line in reader(text.splitlines()):
        try:
            row = {name: float(x) for name, x in line.items() if x != ""}
            row = {name: x for name, x in row.items() if math.isfinite(x)}
            step = row["step"]
        except (KeyError, TypeError, ValueError):
            continue
        while rows and rows[-1]["step"] >= step:
            rows.pop()
        rows.append(row)
    return rows


def reader(lines):
    """Returns a csv.DictReader of those lines that may be rows."""
    lines = (line.replace("\0", "") for line in lines if len(line) < MAX_LINE)
    return csv.DictReader(lines, quoting=csv.QUOTE_NONE)


def read_if_there(path):
    """Returns the rows of logs.csv, [] while there is no such file."""
    with contextlib.suppress(OSError):
        return read(path)
    return []


def is_of_episodes(name):
    """Tells whether a column has means over the episodes that ended."""
    return name.startswith(("episode_", "episode/"))


def moving_average(rows, name):
    """Returns [(row, mean of a column over about the last 100 episodes)]."""
    recent, points = [], []
    for row in rows:
        if name in row:
            recent += [row[name]] * min(100, max(1, int(row.get("episodes", 1))))
            del recent[:-100]
        if recent:
            points.append((row, sum(recent) / len(recent)))
    return points


def mean_return(rows, begin, end=math.inf):
    """Returns the mean return of the episodes in rows of steps in (begin, end], or
    None."""
    rows = [r for r in rows if "episode_return" in r and begin < r["step"] <= end]
    num = sum(row.get("episodes", 1) for row in rows)
    total = sum(row["episode_return"] * row.get("episodes", 1) for row in rows)
    return total / num if num else None


def thin(rows, columns, num_lines=500):
    """Yields about num_lines rows, means over the rows that they stand for."""
    size = -(-len(rows) // num_lines)
    for i in range(0, len(rows), size):
        part = rows[i : i + size]
        line = {}
        for name in columns:
            values = [(r[name], r) for r in part if name in r]
            if name in LAST and values:
                line[name] = values[-1][0]
            elif name == "episodes":
                line[name] = sum(x for x, _ in values)
            elif values:
                # Means over episodes weigh as many episodes as they are of.
                by_episode = is_of_episodes(name)
                # At least 1: metrics may be there before their episode is counted.
                weights = [
                    max(1, r.get("episodes", 1)) if by_episode else 1 for _, r in values
                ]
                total = sum(x * w for (x, _), w in zip(values, weights))
                line[name] = float(f"{total / sum(weights):.6g}")
        yield line


def last_line(path, condition):
    """Returns the last line of a file for which the condition holds, "" without one."""
    with contextlib.suppress(OSError), open(path, errors="replace") as f:
        for line in deque(filter(condition, f), maxlen=1):
            return line
    return ""
