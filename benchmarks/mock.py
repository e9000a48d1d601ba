"""PolyBeast with nothing to do but move data: an environment that costs nothing, with
observations of Atari's size (28 KB), and a linear network.

    python benchmarks/mock.py [flags of polybeast]
"""

import pathlib
import sys

import gymnasium
import numpy as np
from gymnasium import spaces
from torch import nn

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import polybeast  # noqa: E402


class Mock(gymnasium.Env):
    """Episodes of 1,000 steps, each the same observation."""

    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(6)
    observation = np.zeros((4, 84, 84), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation, {}

    def step(self, action):
        self.t += 1
        return self.observation, 0.0, False, self.t == 1000, {}


if "Mock-v0" not in gymnasium.registry:  # This file is imported, too.
    gymnasium.register("Mock-v0", Mock)


class Net(nn.Module):
    """uint8 [T, B, 4, 84, 84] -> logits and baseline, linear."""

    def __init__(self, *_):
        super().__init__()
        self.layer = nn.Linear(4 * 84 * 84, 7)
        nn.init.zeros_(self.layer.weight)

    def initial_state(self, batch_size):
        return ()

    def forward(self, step, core_state=()):
        x = self.layer(step["observation"].flatten(2).float() / 255)  # [T, B, 7]
        return {"policy_logits": x[..., :6], "baseline": x[..., 6]}, core_state


if __name__ == "__main__":
    polybeast.Net = Net
    sys.exit(polybeast.main(["--env", "benchmarks.mock:Mock-v0", *sys.argv[1:]]))
