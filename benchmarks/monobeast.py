"""Steps per second of MonoBeast, beside what the environment alone does, in one run.

    python benchmarks/monobeast.py [--seconds 60] [--rounds 3] [flags of monobeast]

In turn, --rounds times: the same environments alone, stepped with random actions by as
many processes as there are actors, and the real program, its start not counted. Prints
medians as a table, and as JSON on the last line.
"""

import argparse
import csv
import json
import multiprocessing
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import experiment  # noqa: E402
import monobeast  # noqa: E402

WARM_UP_S = 5


def step_environments(flags, seed, seconds, results):
    """One process's share: steps per second of its environments alone."""
    env = monobeast.create_env(flags, flags.envs_per_actor)
    env.initial(seed)
    rng = np.random.default_rng(seed)
    shape = (env.num_envs, *env.action_shape)
    high = env.num_actions if env.action_shape else env.num_actions[0]
    start = time.monotonic()
    steps = 0
    while (elapsed := time.monotonic() - start) < WARM_UP_S + seconds:
        if elapsed < WARM_UP_S:
            counted_from, steps = time.monotonic(), 0
        env.step(rng.integers(0, high, shape))
        steps += env.num_envs
    results.put(steps / (time.monotonic() - counted_from))


def environment_alone(flags, num_processes, seconds):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=step_environments, args=(flags, i, seconds, results))
        for i in range(num_processes)
    ]
    for process in processes:
        process.start()
    total = sum(results.get() for _ in processes)
    for process in processes:
        process.join()
    return total


def whole_program(args, seconds):
    """Steps per second from the lines of logs.csv after the warm-up, and policy lag."""
    with tempfile.TemporaryDirectory() as savedir:
        command = [sys.executable, "-m", "monobeast", "--savedir", savedir]
        command += ["--xpid", "benchmark", "--disable_checkpoint", *args]
        program = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        path = pathlib.Path(savedir, "benchmark", "logs.csv")
        try:
            while not (rows := read(path)):
                if program.poll() is not None:
                    raise SystemExit(f"ended by itself: {' '.join(command)}")
                time.sleep(0.1)
            first_seconds = float(rows[0]["seconds"]) + WARM_UP_S
            time.sleep(WARM_UP_S + seconds)
            rows = [r for r in read(path) if float(r["seconds"]) >= first_seconds]
        finally:
            program.terminate()
            program.wait()
    first, last = rows[0], rows[-1]
    steps = int(last["step"]) - int(first["step"])
    lag = statistics.mean(float(r["policy_lag"]) for r in rows)
    return steps / (float(last["seconds"]) - float(first["seconds"])), lag


def read(path):
    if not path.exists():
        return []
    with open(path, newline="") as f:
        # The last line may still be being written.
        return [r for r in csv.DictReader(f) if r["rss_mb"]]


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seconds", type=float, default=60)
    p.add_argument("--rounds", type=int, default=3)
    options, args = p.parse_known_args()
    flags = monobeast.parser().parse_args(args)
    monobeast.set_defaults(flags)
    num_processes = max(1, flags.num_actors)
    alone, whole = [], []
    for i in range(options.rounds):
        alone.append(environment_alone(flags, num_processes, options.seconds / 2))
        whole.append(whole_program(args, options.seconds))
        print(f"round {i + 1}: {alone[-1]:,.0f} {whole[-1][0]:,.0f}", file=sys.stderr)
    result = {
        "env": flags.env,
        "environment_steps_per_second": round(statistics.median(alone), 1),
        "monobeast_steps_per_second": round(statistics.median(s for s, _ in whole), 1),
        "policy_lag_updates": round(statistics.median(lag for _, lag in whole), 2),
        "ratio": round(statistics.median(w / a for a, (w, _) in zip(alone, whole)), 3),
        "rounds": [[round(a, 1), round(w, 1)] for a, (w, _) in zip(alone, whole)],
        "seconds": options.seconds,
        "machine": experiment.meta(flags),
    }
    print(f"| {flags.env}, {num_processes} x {flags.envs_per_actor} | steps/s |")
    print("|---|---|")
    print(f"| environments alone | {result['environment_steps_per_second']:,.0f} |")
    print(f"| MonoBeast | {result['monobeast_steps_per_second']:,.0f} |")
    print(f"| ratio, median of {options.rounds} pairs | {result['ratio']:.2f} |")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
