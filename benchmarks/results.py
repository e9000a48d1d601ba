"""Runs the experiments of benchmarks/experiments.py, and makes documents' tables and
plots of them.

    python benchmarks/results.py --list
    python benchmarks/results.py --run impala-pong 'pqn-*' --slots 2
    python benchmarks/results.py --collect
    python benchmarks/results.py --make

--run goes on where it stopped. --collect copies the curves of runs, finished or not, to
docs/results/, from which alone --make makes everything (benchmarks/tables.py). A
PATTERN is the name of an experiment, of a run (EXPERIMENT-SEED), of an environment
(pong), of a group or of an agent's part of it (matrix/PPO), with * and ? as in a shell.
"""

import argparse
import csv
import fnmatch
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import tables  # noqa: E402
from benchmarks.experiments import EXPERIMENTS  # noqa: E402
from torchbeast import launch, logs  # noqa: E402
from torchbeast.combinations import difference  # noqa: E402
from torchbeast.flags import Parser, number, path, run_command  # noqa: E402
from torchbeast.messages import BadInput, log  # noqa: E402

NUM_ROWS = 200  # A curve has at most so many.
# Flags on which results do not depend.
IGNORED = "--savedir", "--xpid", "--keep_checkpoints", "--checkpoint_interval_seconds"


def parser():
    p = Parser(
        prog="results",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # fmt: off
    g = p.add_mutually_exclusive_group(required=True)
    g.add_argument("--list", nargs="*", metavar="PATTERN",
                   help="print how far each run is, and on which commit it began")
    g.add_argument("--run", nargs="+", metavar="PATTERN",
                   help="train what is missing of these")
    g.add_argument("--collect", nargs="*", metavar="PATTERN",
                   help="copy curves of runs to docs/results")
    g.add_argument("--make", action="store_true",
                   help="make tables and plots from docs/results")
    p.add_argument("--slots", type=number(int, 1), default=1, metavar="N",
                   help="runs at a time, each on its share of the cores "
                   "(default: %(default)s)")
    p.add_argument("--savedir", type=path, default="~/logs/torchbeast/results",
                   metavar="DIR", help="directory of the runs (default: %(default)s)")
    p.add_argument("--again", action="store_true",
                   help="run also what docs/results has finished runs of")
    # fmt: on
    return p


def selected(patterns):
    """Yields (name of a run, its experiment, its seed); of no pattern, of all runs."""
    used = set()
    for experiment in EXPERIMENTS.values():
        for run, seed in experiment.runs().items():
            of_agent = (f"{x}/{experiment.agent}" for x in experiment.groups)
            env = experiment.env.partition(" `")[0]
            of_env = env, env.lower()
            names = experiment.name, run, *of_env, *experiment.groups, *of_agent
            found = {p for p in patterns or "*" if fnmatch.filter(names, p)}
            used |= found
            if found:
                yield run, experiment, seed
    for pattern in {*patterns} - used:
        raise BadInput(f"{pattern!r} is no experiment, run, environment or group")


def read(directory, experiment, seed):
    """Returns the record and the curve's rows of the run in a directory, (None, []) if
    there is none. Raises BadInput if it is another experiment's."""
    try:
        meta = json.loads((directory / "meta.json").read_text())
        log_rows = logs.read(directory / "logs.csv")
    except OSError:
        return None, []
    ignored = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in IGNORED:
        ignored.add_argument(flag)
    _, command = ignored.parse_known_args(meta["flags"]["command"])
    if other := difference(["", *command], ["", *experiment.command(seed)]):
        raise BadInput(f"{directory}: its command {other}")
    episodes = 0
    for row in log_rows:
        episodes += int(row.get("episodes", 0))
        row["so far"] = episodes
    rows = [
        dict(step=int(row["step"]), seconds=round(row["seconds"]),
             episodes=row["so far"], mean_return=f"{mean:.5g}")
        for row, mean in logs.moving_average(log_rows, "episode_return")
    ]  # fmt: skip
    size = -(-len(rows) // NUM_ROWS) or 1
    git = [x["git"] or {} for x in (*meta.get("earlier_sessions", []), meta)]
    num, precision = meta["num_cores"], meta["flags"]["precision"]
    machine = f"{num} core{'s' if num > 1 else ''} of {meta['cpu']}"
    machine += ", bfloat16" * (precision == "bfloat16")
    interval = meta["flags"]["log_interval_steps"]
    last = log_rows[-1] if log_rows else dict(step=0, seconds=0)
    record = dict(
        command=" ".join(["python -m", *experiment.command(seed)]),
        commit=git[0].get("commit"),  # On which it began.
        dirty=any(x.get("dirty", True) for x in git),
        date=meta["date"][:10],
        machine=f"{machine}, {meta['gpu']}" if meta["gpu"] else machine,
        steps=int(last["step"]),
        seconds=round(last["seconds"]),
        # The last row is less than an interval before the end.
        finished=experiment.total_steps - last["step"] < interval,
    )
    return record, rows[::-1][::size][::-1]


def changed_files(commit, experiment):
    """Returns which of the files that the experiment depends on are not as in the
    commit. Raises OSError if the commit is unknown."""
    program, *words = experiment.command(1)
    value = dict(zip(words, words[1:]))
    modules = [program, value.get("--agent", "polybeast"), "polybeast_env", "vtrace"]
    modules += [value["--env"].split(":")[0]] if ":" in value["--env"] else []
    modules += ["atari_wrappers"] if "NoFrameskip" in value["--env"] else []
    files = ["torchbeast", *(f"{name.replace('.', '/')}.py" for name in modules)]
    files += [":!torchbeast/launch.py", ":!torchbeast/plot.py", ":!torchbeast/warp"]
    files += [":!torchbeast/remote"] if program == "monobeast" else []
    files = ["benchmarks/sb3.py"] if program == "benchmarks.sb3" else files
    command = ["git", "-C", ROOT, "diff", "--name-only", f"{commit}", "HEAD", "--"]
    result = subprocess.run([*command, *files], capture_output=True, text=True)
    if result.returncode != 0:
        raise OSError(result.stderr)
    return result.stdout.split()


def describe(record, experiment):
    text = f"{record['steps']:,} steps{', finished' if record['finished'] else ''}"
    text += f", {record['date']}, commit {(record['commit'] or 'unknown')[:7]}"
    try:
        changed = changed_files(record["commit"], experiment)
    except OSError:
        return f"{text}, not in this repository" if record["commit"] else text
    text += ", which had changes" if record["dirty"] else ""
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{text}, changed since: {' '.join(changed[:3])}{more}" if changed else text


def list_runs(patterns, savedir):
    collected, before = tables.read_records(), None
    for name, experiment, seed in selected(patterns):
        if experiment != before:
            print(f"{experiment.name}: {' '.join(experiment.command('SEED'))}")
        before = experiment
        try:
            here, _ = read(savedir / name, experiment, seed)
        except BadInput as e:
            print(f"    {e}")
            continue
        for record, where in (here, savedir), (collected.get(name), "docs/results"):
            if record is not None:
                print(f"    {name}: {describe(record, experiment)}; {where}")
        if here is None and name not in collected:
            print(f"    {name}: not run")


def run(patterns, savedir, slots, again):
    collected, jobs = tables.read_records(), []
    for name, experiment, seed in selected(patterns):
        if again or not collected.get(name, {}).get("finished"):
            words = [sys.executable, "-m", *experiment.command(seed)]
            words += [f"--savedir={savedir}", f"--xpid={name}"]
            jobs.append(launch.Job(name, words))
    if not jobs:
        log.info("docs/results has all of them")
        return 0
    flags = argparse.Namespace(slots=slots, gpus=None)
    return launch.run_all(jobs, launch.make_slots(flags))


def collect(patterns, savedir):
    """Copies what is finished and not of a day before that in docs/results, and what is
    not finished if docs/results has nothing that is, and no more of it."""

    def worth(record):
        finished = record["finished"]
        return finished, record["date"] if finished else "", record["steps"]

    records = tables.read_records()
    for name, experiment, seed in list(selected(patterns)):  # May raise at its end.
        try:
            record, rows = read(savedir / name, experiment, seed)
        except BadInput as e:
            log.warning("%s", e)
            continue
        if record is not None and not rows:
            log.warning("%s: no episode ended", name)
        known = records.get(name, {})
        if not rows or known == record or known and worth(known) > worth(record):
            continue
        records[name] = record
        with open(tables.RESULTS / f"{name}.csv", "w", newline="") as f:
            writer = csv.DictWriter(f, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        log.info("%s: %s", name, describe(record, experiment))
    text = json.dumps(dict(sorted(records.items())), indent=1)
    (tables.RESULTS / "runs.json").write_text(f"{text}\n")


def main(argv=None):
    flags = parser().parse_args(argv)
    savedir = pathlib.Path(flags.savedir)
    os.chdir(ROOT)  # Where programs, agents and environments are found.
    if flags.run:
        return run(flags.run, savedir, flags.slots, flags.again)
    if flags.make:
        tables.write()
    elif flags.list is not None:
        list_runs(flags.list, savedir)
    else:
        collect(flags.collect, savedir)
    return 0


if __name__ == "__main__":
    sys.exit(run_command("results", main))
