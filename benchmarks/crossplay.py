"""Trained policies against random ones: how often runners are tagged.

    python -m benchmarks.crossplay RUN [RUN ...] [--num_envs 2000] [--json FILE]

RUN is the directory of a run of warpbeast in an environment with two policies and a
metric, such as warp/Tag with `tagged`. Each policy is played as it was trained, with
sampled actions, and at random: four combinations for each run, then their means over
the runs with the largest difference from the mean.
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


def load(path):
    """Returns (environment, Policies with trained weights)."""
    saved = checkpoint.load(path / "model.tar")
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
    for name in trained:
        is_trained[env.policies[name]] = True
    totals, plays = {}, torch.ones(num_envs, dtype=torch.bool)

    def choose(x, y):
        shape = (1, -1, *[1] * (x.ndim - 2))
        return torch.where(is_trained.view(shape), x, y)

    while plays.any():
        rows = map_structure(lambda x: x.flatten(0, 1)[None], step)
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


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("runs", nargs="+", metavar="RUN", type=pathlib.Path)
    p.add_argument("--num_envs", type=int, default=2000)
    p.add_argument("--json", metavar="FILE", type=pathlib.Path)
    flags = p.parse_args()
    found = {}
    for path in flags.runs:
        env, agent = load(path)
        names = list(env.policies)
        for how in itertools.product((False, True), repeat=len(names)):
            set_seed(1)
            trained = [name for name, x in zip(names, how) if x]
            means = play(env, agent, trained, flags.num_envs)
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
    if flags.json:
        flags.json.write_text(json.dumps(result, indent=4) + "\n")


if __name__ == "__main__":
    main()
