"""Runs that are killed twice and resumed, beside runs that are not.

    python -m benchmarks.resumed --seeds 1 2 3 --savedir DIR -- python -m monobeast \\
        --agent r2d2 --no-use_lstm --save_replay --total_steps 300000

trains each seed as whole-SEED and as killed-SEED, which gets SIGKILL after a third and
after two thirds of --total_steps, and is started again. Prints the mean returns of all
episodes in each tenth of the steps, as a table. The same command goes on where it
stopped, and Ctrl-C ends it with the run that it has started.
"""

import argparse
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

from torchbeast import logs

TENTHS = 10


def last_step(path):
    rows = logs.read_if_there(path / "logs.csv")
    return rows[-1]["step"] if rows else 0


def train(command, path, kill_at):
    """Trains to the end, and kills the run once it has made kill_at steps."""
    for until in (*kill_at, None):
        if until is not None and last_step(path) > until:
            continue
        process = subprocess.Popen(command, start_new_session=True)
        try:
            while until is not None and process.poll() is None:
                if last_step(path) > until:
                    os.killpg(process.pid, signal.SIGKILL)
                time.sleep(0.5)
            code = process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
        if code not in (0, -signal.SIGKILL):
            sys.exit(f"{path.name}: exit code {code}")


def returns(path, total_steps):
    """Yields the mean return of the episodes in each tenth."""
    rows = logs.read_if_there(path / "logs.csv")
    for i in range(TENTHS):
        begin, end = i * total_steps / TENTHS, (i + 1) * total_steps / TENTHS
        yield logs.mean_return(rows, begin, end) or 0.0


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    p.add_argument("--savedir", type=pathlib.Path, required=True)
    p.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    flags = p.parse_args()
    if "--total_steps" not in (command := flags.command[1:]):
        p.error("expected -- and a command with --total_steps")
    total_steps = int(command[command.index("--total_steps") + 1])
    found = {"whole": [], "killed": []}
    for seed in flags.seeds:
        for kind in found:
            path = flags.savedir / f"{kind}-{seed}"
            kill_at = (total_steps // 3, 2 * total_steps // 3) * (kind == "killed")
            own = ["--seed", seed, "--savedir", flags.savedir, "--xpid", path.name]
            train([*command, *map(str, own)], path, kill_at)
            found[kind].append(list(returns(path, total_steps)))
    steps = [(i + 1) * total_steps // TENTHS for i in range(TENTHS)]
    print("| steps | " + " | ".join(f"{n:,}" for n in steps) + " |")
    print("|---" * (TENTHS + 1) + "|")
    for kind, of_seeds in found.items():
        means = map(statistics.mean, zip(*of_seeds))
        print(f"| {kind} | " + " | ".join(f"{x:.1f}" for x in means) + " |")
        for seed, values in zip(flags.seeds, of_seeds):
            print(f"| seed {seed} | " + " | ".join(f"{x:.1f}" for x in values) + " |")


if __name__ == "__main__":
    main()
