"""What a replay costs: ours, torchrl's and a ring of NumPy arrays, in turns.

    pip install --no-deps --target DIR torchrl tensordict orjson pyvers \
        importlib_metadata cloudpickle zipp
    PYTHONPATH=DIR python benchmarks/replay.py [--seconds 3] [--rounds 3] [--json FILE]

Two shapes of samples, of Atari's stacked images [4, 84, 84] uint8:

    dqn     128 transitions of two steps
    r2d2    64 rollouts of 120 steps and one more, with the state of an LSTM of 256

and three operations: to add rollouts, to draw a batch in proportion to priorities, and
to change the priorities of a batch. Each number is how often a second, the median of
the rounds; to add counts steps. torchrl's buffer keeps stacked images, as it gets them,
and in "frames" only the newest of each stack, which it does not stack again. The ring
draws uniformly and has no priorities; neither has torchrl's buffer where its sum tree,
which is built for one version of torch, cannot be loaded. Without torchrl its rows are
left out.
"""

import argparse
import json
import os
import statistics
import time

import numpy as np
import torch

from torchbeast.machine import cpu_name
from torchbeast.nests import map_structure
from torchbeast.process import keep_freed_memory
from torchbeast.replay import Replay

CPU = torch.device("cpu")
SHAPES = {"dqn": (20, 128, 1), "r2d2": (120, 64, None)}  # T, samples, steps of one.
NUM_ROLLOUTS = {"dqn": 500, "r2d2": 100}
B = 4  # Rollouts that are added at a time.


def make_rollouts(T):
    """A batch as the learner gets it, [T + 1, B, ...]."""
    frames = torch.randint(255, (T + 4, B, 84, 84), dtype=torch.uint8)
    flags = torch.zeros(T + 1, B, dtype=torch.bool)
    return {
        "observation": frames.unfold(0, 4, 1).movedim(-1, 2).contiguous(),
        "reward": torch.rand(T + 1, B),
        "done": flags,
        "terminated": flags.clone(),
        "last_action": torch.randint(6, (T + 1, B)),
        "action": torch.randint(6, (T, B)),
        "core_state": (torch.zeros(1, B, 256), torch.zeros(1, B, 256)),
    }


class Ours:
    def __init__(self, T, num_rollouts, num, steps):
        starts, length = (1, T + 1) if steps is None else (T, steps + 1)
        self.replay = Replay(num_rollouts, starts, length, CPU)
        self.num = num

    def add(self, rollouts):
        items = self.replay.add(rollouts)
        self.replay.set_priorities(items, np.ones(items.shape))

    def sample(self):
        batch, self.items = self.replay.sample(self.num, 0.5)
        return batch

    def update(self, priorities):
        self.replay.set_priorities(self.items, priorities)


class Ring:
    """Rollouts side by side, of which np.take makes a batch."""

    def __init__(self, T, num_rollouts, num, steps):
        self.T, self.num_rollouts, self.num, self.steps = T, num_rollouts, num, steps
        self.data, self.at = None, 0

    def add(self, rollouts):
        rollouts = map_structure(lambda x: x.numpy(), rollouts)
        if self.data is None:
            self.data = map_structure(
                lambda x: np.zeros((len(x), self.num_rollouts, *x.shape[2:]), x.dtype),
                rollouts,
            )

        def write(x, data):
            data[:, self.at : self.at + B] = x

        map_structure(write, rollouts, self.data)
        self.at = (self.at + B) % self.num_rollouts

    def sample(self):
        slots = np.random.randint(self.num_rollouts, size=self.num)
        if self.steps is None:
            return map_structure(lambda x: np.take(x, slots, 1), self.data)
        starts = np.random.randint(self.T - self.steps, size=self.num)
        times = starts + np.arange(self.steps + 1)[:, None]

        def read(x):
            flat = (times[: len(x)] * self.num_rollouts + slots).reshape(-1)
            taken = np.take(x.reshape(-1, *x.shape[2:]), flat, 0)
            return taken.reshape(len(times), self.num, *x.shape[2:])

        data = {k: x for k, x in self.data.items() if k != "core_state"}
        return map_structure(read, data)

    update = None


class Torchrl:
    """A sample is an item: a rollout, or a transition with both of its steps."""

    frames = False

    def __init__(self, T, num_rollouts, num, steps):
        from torchrl.data import (
            LazyTensorStorage,
            TensorDictPrioritizedReplayBuffer,
            TensorDictReplayBuffer,
        )

        self.T, self.num, self.steps = T, num, steps
        size = num_rollouts * (1 if steps is None else T)
        kwargs = dict(storage=LazyTensorStorage(size), batch_size=num)
        try:
            self.buffer = TensorDictPrioritizedReplayBuffer(alpha=1, beta=0.5, **kwargs)
        except RuntimeError:  # Its sum tree is built for another torch.
            self.buffer, self.update = TensorDictReplayBuffer(**kwargs), None

    def add(self, rollouts):
        from tensordict import TensorDict

        rollouts = dict(rollouts)
        if self.frames:
            rollouts["observation"] = rollouts["observation"][:, :, -1]
        state = rollouts.pop("core_state")
        if self.steps is None:
            entries = {k: x.transpose(0, 1) for k, x in rollouts.items()}
            entries.update({f"state{i}": x[0] for i, x in enumerate(state)})
            size = B
        else:
            entries = {}
            for name, x in rollouts.items():
                entries[name] = x[: self.T].flatten(0, 1)
                if len(x) > self.T:
                    entries[f"next_{name}"] = x[1:].flatten(0, 1)
            size = self.T * B
        self.buffer.extend(TensorDict(entries, [size]))

    def sample(self):
        self.batch = self.buffer.sample()
        return self.batch

    def update(self, priorities):
        self.buffer.update_priority(self.batch["index"], torch.as_tensor(priorities))


class TorchrlFrames(Torchrl):
    frames = True


def rate(fn, seconds):
    fn()
    count, start = 0, time.perf_counter()
    while (now := time.perf_counter()) < start + seconds:
        fn()
        count += 1
    return count / (now - start)


def measure(replay, T, num, seconds, rollouts):
    numbers = {"add": rate(lambda: replay.add(rollouts), seconds) * T * B}
    numbers["sample"] = rate(replay.sample, seconds)
    if replay.update is not None:
        priorities = np.random.rand(num)
        numbers["update"] = rate(lambda: replay.update(priorities), seconds)
    return numbers


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--seconds", type=float, default=3.0)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--json")
    flags = p.parse_args()
    keep_freed_memory()  # As the learner does.
    kinds = {"ours": Ours, "NumPy ring": Ring}
    try:
        import torchrl

        kinds.update({f"torchrl {torchrl.__version__}": Torchrl})
        kinds["torchrl, frames"] = TorchrlFrames
    except ImportError:
        print("torchrl is not installed: without it")
    print(f"{cpu_name()}, {torch.get_num_threads()} threads; a second:")
    results = {}
    for shape, (T, num, steps) in SHAPES.items():
        rollouts = make_rollouts(T)
        replays = {}
        for name, kind in kinds.items():
            replays[name] = kind(T, NUM_ROLLOUTS[shape], num, steps)
            for _ in range(NUM_ROLLOUTS[shape] // B):
                replays[name].add(rollouts)
        rounds = {name: [] for name in kinds}
        for _ in range(flags.rounds):
            for name, replay in replays.items():
                numbers = measure(replay, T, num, flags.seconds, rollouts)
                rounds[name].append(numbers)
        for name, all_numbers in rounds.items():
            medians = {
                k: statistics.median(x[k] for x in all_numbers) for k in all_numbers[0]
            }
            results[f"{shape}: {name}"] = medians
            text = "  ".join(f"{k} {x:>10,.1f}" for k, x in medians.items())
            print(f"{shape:5} {name:18} {text}", flush=True)
    if flags.json:
        with open(flags.json, "w") as f:
            cpus = {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0))}
            json.dump({**cpus, "per_second": results}, f, indent=4)


if __name__ == "__main__":
    main()
