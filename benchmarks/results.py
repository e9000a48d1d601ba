"""Runs the experiments of benchmarks/experiments.py, and makes what documents show of
them.

    python benchmarks/results.py --list
    python benchmarks/results.py --run impala-pong 'pqn-*' --slots 2
    python benchmarks/results.py --collect
    python benchmarks/results.py --make

--run goes on where it stopped. --collect copies the curves of finished and of stopped
runs into docs/results/, from which alone --make writes plots, and the tables between
<!-- table: NAME --> and <!-- end --> in docs/*.md. A PATTERN is the name of an
experiment, of a run (EXPERIMENT-SEED) or of a group, with * and ? as in a shell.
"""

import argparse
import collections
import csv
import fnmatch
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import benchmarks.tables as tables  # noqa: E402
from benchmarks.experiments import EXPERIMENTS  # noqa: E402
from torchbeast import launch, logs  # noqa: E402
from torchbeast.flags import Parser, number, path, run_command  # noqa: E402
from torchbeast.messages import BadInput, log  # noqa: E402

COLUMNS = ("step", "seconds", "episodes", "mean_return")
NUM_ROWS = 200  # Of a curve, at most.


def parser():
    p = Parser(
        prog="results",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # fmt: off
    g = p.add_mutually_exclusive_group(required=True)
    g.add_argument("--list", nargs="*", metavar="PATTERN",
                   help="print how far each run is, and on which commit it ran")
    g.add_argument("--run", nargs="+", metavar="PATTERN",
                   help="train what is missing of these")
    g.add_argument("--collect", nargs="*", metavar="PATTERN",
                   help="copy curves of runs into docs/results")
    g.add_argument("--make", action="store_true",
                   help="make plots and tables from docs/results")
    p.add_argument("--slots", type=number(int, 1), default=1, metavar="N",
                   help="runs at a time, each on its share of the cores "
                   "(default: %(default)s)")
    p.add_argument("--savedir", type=path, default="~/logs/torchbeast/results",
                   metavar="DIR", help="directory of the runs (default: %(default)s)")
    p.add_argument("--again", action="store_true",
                   help="train also what docs/results has finished runs of")
    # fmt: on
    return p


def selected(patterns):
    """Returns {name of a run: (its experiment, its seed)}; of no pattern, of all."""
    runs = {}
    for pattern in patterns or ["*"]:
        found = {
            run: (x, seed)
            for x in EXPERIMENTS.values()
            for run, seed in x.runs().items()
            if any(fnmatch.fnmatchcase(n, pattern) for n in (x.name, run, *x.groups))
        }
        if not found:
            raise BadInput(f"{pattern!r} is no experiment, run or group")
        runs.update(found)
    return runs


# What a run's directory holds.


def without(words, *flags):
    """Returns the words of a command without these flags and their values."""
    words = [part for word in words for part in word.split("=", 1)]
    for flag in flags:
        while flag in words:
            i = words.index(flag)
            del words[i : i + 2]
    return words


def read(path, experiment, seed):
    """Returns what docs/results/runs.json says of the run in a directory, and the rows
    of its curve. Raises BadInput if it is another experiment's; OSError if it is
    none."""
    meta = json.loads((path / "meta.json").read_text())
    command = without(meta["flags"]["command"], "--savedir", "--xpid")
    declared = experiment.command(seed)
    if sorted(command) != sorted(without(declared)):
        raise BadInput(
            f"{path}: its command is {' '.join(command)}, expected {' '.join(declared)}"
        )
    log_rows, episodes = logs.read(path / "logs.csv"), 0
    for row in log_rows:
        episodes += int(row.get("episodes", 0))
        row["episodes so far"] = episodes
    rows = [
        dict(step=int(row["step"]), seconds=round(row["seconds"]),
             episodes=row["episodes so far"], mean_return=f"{mean:.5g}")
        for row, mean in logs.moving_average(log_rows, "episode_return")
    ]  # fmt: skip
    size = -(-len(rows) // NUM_ROWS) or 1
    last = log_rows[-1] if log_rows else {"step": 0, "seconds": 0}
    interval = meta["flags"]["log_interval_steps"]
    sessions = [*meta.get("earlier_sessions", []), meta]
    commits = [s["git"] and s["git"]["commit"] for s in sessions]
    record = {
        "command": " ".join(["python -m", *declared]),
        "date": meta["date"][:10],
        "commit": commits[-1],
        "earlier_commits": sorted({*filter(None, commits)} - {commits[-1]}),
        "dirty": any(s["git"] and s["git"]["dirty"] for s in sessions),
        "machine": machine(meta),
        "steps": int(last["step"]),
        "seconds": round(last["seconds"]),
        "episodes": episodes,
        # The last row of a log is less than an interval before the end.
        "finished": last["step"] > meta["flags"]["total_steps"] - interval,
    }
    return record, rows[::-1][::size][::-1]


def machine(meta):
    num = meta["num_cores"]
    text = f"{num} core{'s' if num > 1 else ''} of {meta['cpu']}"
    return f"{text}, {meta['gpu']}" if meta["gpu"] else text


def changed_files(record, experiment):
    """Returns which of the files that the run depends on are others now than in its
    commit. None: it is not known."""
    words = experiment.command(1)
    agent = words[words.index("--agent") + 1] if "--agent" in words else "polybeast"
    files = [f"{words[0]}.py", f"{agent.replace('.', '/')}.py", "polybeast_env.py"]
    files += ["torchbeast", "vtrace.py"] if agent == "polybeast" else ["torchbeast"]
    if "NoFrameskip" in experiment.flags:
        files.append("atari_wrappers.py")
    if "--env examples." in experiment.flags:
        files.append(experiment.flags.split("--env ")[1].split(":")[0].replace(".", "/")
                     + ".py")  # fmt: skip
    others = [":!torchbeast/launch.py", ":!torchbeast/plot.py", ":!torchbeast/warp"]
    if words[0] == "monobeast":
        others.append(":!torchbeast/remote")
    command = ["git", "-C", ROOT, "diff", "--name-only", f"{record['commit']}", "HEAD"]
    result = subprocess.run(
        [*command, "--", *files, *others], capture_output=True, text=True
    )
    return result.stdout.split() if result.returncode == 0 else None


# Commands.


def list_runs(patterns, savedir):
    collected = tables.read_records()
    by_experiment = collections.defaultdict(dict)
    for run, (experiment, seed) in selected(patterns).items():
        by_experiment[experiment][run] = seed
    for experiment, runs in by_experiment.items():
        aim = "" if experiment.aim is None else f", aim {experiment.aim:,g}"
        print(f"{experiment.name}: {' '.join(experiment.command('SEED'))}{aim}")
        for run, seed in runs.items():
            found = {"docs/results": collected[run]} if run in collected else {}
            try:
                found[savedir / run], _ = read(savedir / run, experiment, seed)
            except OSError:
                pass
            except BadInput as e:
                print(f"    {run}: {e}")
            for where, record in found.items():
                print(f"    {run}: {describe(record, experiment)}; {where}")
            if not found:
                print(f"    {run}: not run")


def describe(record, experiment):
    state = "finished" if record["finished"] else "not finished"
    text = f"{record['steps']:,} steps, {state}, {record['date']}"
    if record["commit"] is None:
        return f"{text}, commit unknown"
    changed = changed_files(record, experiment)
    text += f", {record['commit'][:7]}{' and changes' if record['dirty'] else ''}"
    if changed is None:
        return f"{text}, which is not in this repository"
    if len(changed) > 4:
        changed[3:] = [f"{len(changed) - 3} more"]
    return f"{text}, changed since: {', '.join(changed)}" if changed else text


def run(patterns, savedir, slots, again):
    collected = tables.read_records()
    jobs = []
    for name, (experiment, seed) in selected(patterns).items():
        if experiment.program not in ("monobeast", "polybeast"):
            raise BadInput(f"{experiment.name}: {experiment.program} says how to run it")
        if not again and collected.get(name, {}).get("finished"):
            log.info("%s is in docs/results", name)
            continue
        words = [sys.executable, "-m", *experiment.command(seed)]
        words += ["--savedir", str(savedir), "--xpid", name]
        jobs.append(launch.Job(name, words))
    slots = launch.make_slots(argparse.Namespace(slots=slots, gpus=None))
    return launch.run_all(jobs, slots) if jobs else 0


def collect(patterns, savedir):
    records = tables.read_records()
    for name, (experiment, seed) in selected(patterns).items():
        try:
            record, rows = read(savedir / name, experiment, seed)
        except OSError:
            continue
        except BadInput as e:
            log.warning("%s", e)
            continue
        if not rows or worth(record) <= worth(records.get(name)):
            continue
        records[name] = record
        with open(tables.RESULTS / f"{name}.csv", "w", newline="") as f:
            writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        log.info("%s: %s", name, describe(record, experiment))
    text = json.dumps(dict(sorted(records.items())), indent=1)
    tables.RECORDS.write_text(text + "\n")


def worth(record):
    """What is finished is worth more than what is not, then what is newer, if it is
    finished, then what is longer."""
    if record is None:
        return (False, "", 0)
    finished = record["finished"]
    return (finished, record["date"] if finished else "", record["steps"])


def main(argv=None):
    flags = parser().parse_args(argv)
    savedir = pathlib.Path(flags.savedir)
    if flags.run:
        return run(flags.run, savedir, flags.slots, flags.again)
    if flags.make:
        tables.write()
    elif flags.collect is not None:
        collect(flags.collect, savedir)
    else:
        list_runs(flags.list, savedir)
    return 0


if __name__ == "__main__":
    sys.exit(run_command("results", main))
