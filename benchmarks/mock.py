"""An agent with nothing to do: a linear network, for observations of Atari's size
(28 KB) from an environment that costs nothing. What is left is moving data.

    python -m polybeast --agent benchmarks.mock --env tests.envs:torchbeast/Mock-v0
"""

import math

from torch import nn

import polybeast
from polybeast import parser  # noqa: F401 (part of an agent)
from torchbeast import gradients


class Net(nn.Module):
    """Linear in every 21st pixel of uint8 [T, B, 84, 84, 4]."""

    def __init__(self, num_actions):
        super().__init__()
        self.layer = nn.Linear(4 * 4 * 4, num_actions + 1)

    def initial_state(self, batch_size):
        return ()

    def forward(self, step, core_state=()):
        x = step["observation"][:, :, ::21, ::21].float().flatten(2) / 255
        outputs = self.layer(x)
        return {"policy_logits": outputs[..., 1:], "baseline": outputs[..., 0]}, ()


class Agent(polybeast.Agent):
    def make_net(self, observation_space, action_space):
        return Net(int(action_space.n))

    def start_learning(self, device):
        gradients.SLICE_BYTES = math.inf  # What this network makes of a batch is small.
        super().start_learning(device)
