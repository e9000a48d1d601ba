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

OBSERVATION = spaces.Box(0, 255, (4, 84, 84), np.uint8)
ACTION = spaces.Discrete(6)


class Mock(gymnasium.Env):
    """One endless episode."""

    observation_space, action_space = OBSERVATION, ACTION
    observation = np.zeros((4, 84, 84), np.uint8)

    def reset(self, *, seed=None, options=None):
        return self.observation, {}

    def step(self, action):
        return self.observation, 0.0, False, False, {}


class MockVector(gymnasium.vector.VectorEnv):
    """E of them."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
    single_observation_space, single_action_space = OBSERVATION, ACTION

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.observation = np.zeros((num_envs, 4, 84, 84), np.uint8)
        self.zeros = np.zeros(num_envs)

    def reset(self, *, seed=None, options=None):
        return self.observation, {}

    def step(self, action):
        never = self.zeros.astype(bool)
        return self.observation, self.zeros, never, never, {}


if "Mock-v0" not in gymnasium.registry:  # This file is imported, too.
    gymnasium.register("Mock-v0", Mock, vector_entry_point=MockVector)


class Net(nn.Module):
    """uint8 [T, B, 4, 84, 84] -> logits and baseline, linear in the newest frame."""

    def __init__(self, *_):
        super().__init__()
        self.layer = nn.Linear(84 * 84, 7)
        nn.init.zeros_(self.layer.weight)

    def initial_state(self, batch_size):
        return ()

    def forward(self, step, core_state=()):
        frame = step["observation"][:, :, -1].flatten(2)  # [T, B, 84 * 84]
        x = self.layer(frame.float())  # [T, B, 7]
        return {"policy_logits": x[..., :6], "baseline": x[..., 6]}, core_state


if __name__ == "__main__":
    polybeast.Net = Net
    sys.exit(polybeast.main(["--env", "benchmarks.mock:Mock-v0", *sys.argv[1:]]))
