"""Environment steps per second of WarpBeast: environments alone, with inference, and
end to end, beside other ways to run the same environments.

    python -m benchmarks.warp [--device cpu] [--seconds 5] [--rounds 3] [--json FILE]
                              [WarpBeast's flags, such as --compile or --num_epochs 1]

    alone        random actions, drawn beforehand
    inference    the agent acts, and fills rollouts
    end to end   and learns from them: IMPALA, whose ratio is 1 here

On a GPU each is a CUDA graph of T steps. Each number is the median of the rounds, which
measure everything in turns; agent steps are env steps times agents. "loop" is the
reference of tests/warp_references.py, an environment at a time on one core; "monobeast"
is the same environment there, as a user starts it; for CartPole also with Gymnasium's.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time
import traceback

import numpy as np
import torch

import warpbeast
from benchmarks import throughput
from tests import warp_references
from torchbeast import machine, policies
from torchbeast.flags import parse_args
from torchbeast.learner import Learner
from torchbeast.process import keep_freed_memory
from torchbeast.run import Run
from torchbeast.warp import autoreset
from torchbeast.warp.consistency import random_actions

GRID, PLANE = "warp/TagGridWorld", "warp/Tag"
FIVE = ["num_taggers=1", "num_runners=4", "num_nearest=4"]
# Name: (--env, --env_args, --hidden_sizes, environments on a CPU, on a GPU).
CASES = {
    "grid, 5 agents": (GRID, [], [32, 32], 4096, 2000),
    "grid, 1,000 agents": (
        GRID, ["num_taggers=999", "observation=partial"], [32, 32], 20, 2000,
    ),
    "plane, 5 agents": (PLANE, FIVE, [64, 64], 2048, 2000),
    "plane, 110 agents": (PLANE, [], [64, 64], 100, 2000),
    "CartPole": ("warp/CartPole", [], [64, 64], 4096, 4096),
}  # fmt: skip
# Lan et al., figures 3 and 5, one V100, 2,000 environments (of 105 agents: 100).
WARPDRIVE = {
    "grid, 5 agents": {"alone": 9.8e6, "end to end": 1.3e6},
    "grid, 1,000 agents": {"alone": 2.9e6, "end to end": 0.58e6},
    "plane, 5 agents": {"alone": 8.3e6},
    "plane, 110 agents": {"alone": 0.15e6},
}


class Case:
    """One environment in all ways in which it is measured."""

    def __init__(self, name, device, savedir, more):
        self.env_id, self.env_args, sizes, on_cpu, on_gpu = CASES[name]
        self.num_envs = on_gpu if device.type == "cuda" else on_cpu
        argv = ["--env", self.env_id, "--num_envs", str(self.num_envs), "--seed", "1"]
        argv += ["--hidden_sizes", *map(str, sizes), "--learner_device", str(device)]
        argv += ["--savedir", savedir, "--xpid", name, "--total_steps", str(10**12)]
        argv += ["--log_interval_steps", str(10**9), *more]
        if self.env_args:
            argv += ["--env_args", *self.env_args]
        flags = parse_args(warpbeast.program_parser(), argv)
        flags.command = ["warpbeast", *argv]
        self.args = dict(flags.env_args)
        self.env = autoreset.make(self.env_id, **self.args)
        self.num_agents = policies.num_agents(self.env)
        warpbeast.set_defaults(flags, self.num_agents)
        flags.precision, self.T = "float32", flags.unroll_length
        self.envs = autoreset.Environments(self.env, self.num_envs, device)
        self.agent = policies.make_agent(flags, self.env)
        self.several = isinstance(self.agent, policies.Policies)
        acting = self.agent.agents if self.several else {"agent": self.agent}
        specs = warpbeast.first_steps(self.env, acting, flags)
        run = Run(flags)
        run.open()
        self.learner = Learner(flags, run, self.agent, None, device, None)
        self.learner.start()
        self.rollouts = warpbeast.Rollouts(
            flags, self.env, self.num_envs, acting, specs, device
        )
        random = torch.Generator().manual_seed(1)
        self.actions = [random_actions(self.envs, random) for _ in range(self.T)]
        carry, _ = self.envs.begin(self.envs.uniforms())
        self.carry = autoreset.map_structure(torch.clone, carry)
        self.step, self.graph = self.envs.step, None
        if flags.compile:
            self.step = torch.compile(self.step, dynamic=False)

    def steps(self):
        """T steps of random actions."""
        if self.envs.device.type == "cpu":
            return self._steps()
        if self.graph is None:
            self._steps()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._steps()
        self.graph.replay()

    @torch.inference_mode()
    def _steps(self):
        carry = self.carry
        for action in self.actions:
            carry, _, _ = self.step(carry, action, self.envs.uniforms())
        autoreset.map_structure(lambda x, into: into.copy_(x), carry, self.carry)

    def act(self):
        self.agent.net.eval()
        self.rollouts.next()

    def update(self):
        self.act()
        self.agent.net.train()
        batches = self.rollouts.buffers
        if not self.several:
            (batches,) = batches.values()
        metrics = self.rollouts.metrics
        episodes = warpbeast.ended_episodes(self.rollouts.buffers, metrics, self.T)
        self.learner.update(batches, episodes, [self.learner.updates])

    def measure(self, seconds):
        ways = {"alone": self.steps, "inference": self.act, "end to end": self.update}
        result = {}
        for name, fn in ways.items():
            for _ in range(warpbeast.WARM_UP + 2):
                fn()
            synchronize(self.envs.device)
            start, num = time.perf_counter(), 0
            while time.perf_counter() - start < seconds:
                fn()
                synchronize(self.envs.device)
                num += 1
            took = time.perf_counter() - start
            result[name] = num * self.T * self.num_envs / took
        return result

    def loop(self, seconds):
        """The reference, an environment at a time."""
        reference = getattr(warp_references, self.env_id.removeprefix("warp/"))
        reference, random = reference(**self.args), np.random.default_rng(1)
        action = [a[0].cpu().numpy() for a in self.actions]
        state = reference.begin(random.random(self.env.num_uniforms))
        start, num = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            state, _, *over = reference.move(state, action[num % self.T])
            reference.observe(state)
            num += 1
            if (over[0] | over[1]).all():
                state = reference.begin(random.random(self.env.num_uniforms))
        return num / (time.perf_counter() - start)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def monobeast(env_id, env_args, num_agents, seconds):
    """Env steps per second of the program."""
    args = ["--env", env_id, *(["--env_args", *env_args] if env_args else [])]
    result = throughput.measure("monobeast", args, seconds)
    return result["steps_per_second"] / num_agents


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    p.add_argument("--seconds", type=float, default=5)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--json", metavar="FILE")
    flags, more = p.parse_known_args()
    device = torch.ones(1, device=flags.device).device  # With its number.
    torch.set_num_threads(machine.num_cores())
    keep_freed_memory()  # As the program does.
    found = {name: {} for name in flags.cases}
    for _ in range(flags.rounds):
        for name in flags.cases:
            try:
                numbers = of_case(name, device, flags.seconds, more)
            except (Exception, SystemExit):  # One that fails does not cost the others.
                traceback.print_exc()
                continue
            for key, x in numbers.items():
                found[name].setdefault(key, []).append(x)
            print(name, {k: f"{x:,.0f}" for k, x in numbers.items()}, flush=True)
            medians = write(flags, more, device, found)  # So far.
    print(json.dumps(medians, indent=4))


def of_case(name, device, seconds, more):
    """Returns {way: steps per second} of a case."""
    with tempfile.TemporaryDirectory() as savedir:
        case = Case(name, device, savedir, more)
        numbers = case.measure(seconds)
        case.learner.run.close()
        if device.type == "cpu":
            numbers["loop"] = case.loop(seconds)
            args = case.env_id, case.env_args, case.num_agents
            numbers["monobeast"] = monobeast(*args, seconds)
            if name == "CartPole":
                args = "CartPole-v1", [], 1, seconds
                numbers["monobeast, Gymnasium's"] = monobeast(*args)
    return numbers


def write(flags, more, device, found):
    """Writes the file. Returns {case: {way: median}}."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    medians = {
        name: {key: round(statistics.median(x)) for key, x in numbers.items()}
        for name, numbers in found.items()
    }
    sizes = {name: CASES[name][4 if gpu else 3] for name in flags.cases}
    result = dict(cpu=machine.cpu_name(), cores=machine.num_cores(), gpu=gpu)
    result.update(torch=torch.__version__, flags=more, num_envs=sizes)
    result.update(env_steps_per_second=medians, warpdrive_v100=WARPDRIVE)
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps(result, indent=4) + "\n")
    return medians


if __name__ == "__main__":
    main()
