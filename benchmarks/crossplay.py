"""Trained policies against random ones, or past ones: how often runners are tagged.

    python -m benchmarks.crossplay RUN [RUN ...] [--num_envs 2000] [--json FILE]
    python -m benchmarks.crossplay RUN --snapshots 5

RUN is the directory of a run of warpbeast in an environment with two policies and a
metric, such as warp/Tag with `tagged`. Each policy is played as it was trained, with
sampled actions, and at random: four combinations for each run, then their means over
the runs with the largest difference from the mean. With --snapshots N, each policy is
that of N of the checkpoints that the run has kept (--keep_checkpoints), from its
beginning to its end: N x N combinations.
"""

import argparse
import itertools
import json
import pathlib
import statistics

import torch

from torchbeast import checkpoint
from torchbeast.nests import map_structure
from torchbeast.policies import Policies
from torchbeast.seeds import set_seed
from torchbeast.warp import autoreset
from torchbeast.warp.consistency import random_actions


def load(path, other=None):
    """Returns (environment, Policies with the weights of a checkpoint). other: the
    checkpoint of the last policy, if it is not the same."""
    saved = checkpoint.load(path)
    if other is not None:
        last = list(saved["agent"])[-1]
        saved["agent"][last] = checkpoint.load(other)["agent"][last]
    flags = argparse.Namespace(**saved["flags"])
    env = autoreset.make(flags.env, **dict(flags.env_args))
    agent = Policies(flags, env)
    agent.net.eval()
    checkpoint.load_agent_state(agent, saved, path)
    return env, agent


@torch.inference_mode()
def play(env, agent, trained, num_envs):
    """Returns the means {metric: number} over the first episode of each of num_envs
    environments. trained: names of the policies that are not random."""
    envs = autoreset.Environments(env, num_envs, torch.device("cpu"))
    random = torch.Generator().manual_seed(1)
    carry, step = envs.begin(envs.uniforms())
    core_state = agent.initial_state(num_envs * envs.num_agents)
    is_trained = torch.zeros(envs.num_agents, dtype=torch.bool)
    numbers = torch.zeros(envs.num_agents, dtype=torch.int64)
    for number, (name, part) in enumerate(env.policies.items()):
        is_trained[part], numbers[part] = name in trained, number
    totals, plays = {}, torch.ones(num_envs, dtype=torch.bool)

    def choose(x, y):
        shape = (1, -1, *[1] * (x.ndim - 2))
        return torch.where(is_trained.view(shape), x, y)

    while plays.any():
        rows = map_structure(lambda x: x.flatten(0, 1)[None], step)
        rows["policy"] = numbers.repeat(num_envs)[None]
        outputs, core_state = agent.act(rows, core_state)
        action = map_structure(
            lambda x: x[0].unflatten(0, (num_envs, -1)), outputs["action"]
        )
        action = map_structure(choose, action, random_actions(envs, random))
        carry, step, _ = envs.step(carry, action, envs.uniforms())
        over = carry["out"].all(1) & plays
        for name, x in env.metrics(carry["state"]).items():
            totals[name] = totals.get(name, 0) + float(x[over].sum())
        plays &= ~over
    return {name: x / num_envs for name, x in totals.items()}


def snapshots(run, num):
    """Returns {steps: file} of some of a run's checkpoints, the last one, too."""
    paths = [*run.glob("model-*.tar"), run / "model.tar"]
    kept = sorted((checkpoint.load(path)["step"], path) for path in paths)
    return dict(kept[round(i * (len(kept) - 1) / (num - 1))] for i in range(num))


def play_snapshots(run, num, num_envs):
    """Prints what each snapshot of the first policy reaches against each of the second.
    Returns {text: number}."""
    found, kept = {}, snapshots(run, num)
    for (n, first), (m, second) in itertools.product(kept.items(), repeat=2):
        env, agent = load(first, second)
        set_seed(1)
        a, b = env.policies
        for metric, x in play(env, agent, [a, b], num_envs).items():
            what = f"{a} after {n:,} steps, {b} after {m:,}: {metric}"
            found[what] = x
            print(f"{what} {x:.3f}", flush=True)
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("runs", nargs="+", metavar="RUN", type=pathlib.Path)
    p.add_argument("--num_envs", type=int, default=2000)
    p.add_argument("--snapshots", type=int, metavar="N")
    p.add_argument("--json", metavar="FILE", type=pathlib.Path)
    flags = p.parse_args()
    if flags.snapshots is not None:
        if flags.snapshots < 2 or len(flags.runs) != 1:
            p.error("--snapshots: expected one run, and N of 2 or more")
        result = play_snapshots(flags.runs[0], flags.snapshots, flags.num_envs)
    else:
        result = play_random(flags.runs, flags.num_envs)
    if flags.json:
        flags.json.write_text(json.dumps(result, indent=4) + "\n")


def play_random(runs, num_envs):
    """Prints what trained and random policies reach. Returns {text: numbers}."""
    found = {}
    for path in runs:
        env, agent = load(path / "model.tar")
        names = list(env.policies)
        for how in itertools.product((False, True), repeat=len(names)):
            set_seed(1)
            trained = [name for name, x in zip(names, how) if x]
            means = play(env, agent, trained, num_envs)
            who = ", ".join(
                f"{'trained' if x else 'random'} {n}" for n, x in zip(names, how)
            )
            for metric, x in means.items():
                found.setdefault(who, {}).setdefault(metric, []).append(x)
            print(path, who, means, flush=True)
    result = {}
    for who, metrics in found.items():
        for metric, xs in metrics.items():
            mean = statistics.mean(xs)
            spread = max(abs(x - mean) for x in xs)
            result[f"{who}: {metric}"] = {"mean": mean, "spread": spread, "runs": xs}
            print(f"{who}: {metric} {mean:.3f} +- {spread:.3f}")
    return result


if __name__ == "__main__":
    main()
