"""PolyBeast with nothing to do but move data: an environment that costs nothing, with
observations of Atari's size (28 KB), and a linear network.

    python -m benchmarks.mock [flags of polybeast]
"""

import math
import sys

from torch import nn

import learner
import polybeast


class Net(nn.Module):
    """Linear in every 21st pixel of uint8 [T, B, 84, 84, 4]."""

    def __init__(self, observation_space, num_actions, *_):
        super().__init__()
        self.layer = nn.Linear(4 * 4 * 4, num_actions[0] + 1)

    def initial_state(self, batch_size):
        return ()

    def forward(self, step, core_state=()):
        x = step["observation"][:, :, ::21, ::21].float().flatten(2) / 255
        outputs = self.layer(x)
        return {"policy_logits": outputs[..., 1:], "baseline": outputs[..., 0]}, ()


if __name__ == "__main__":
    polybeast.Net = Net
    learner.SLICE_BYTES = math.inf  # What this network makes of a batch is small.
    args = ["--env", "tests.envs:torchbeast/Mock-v0", "--precision", "float32"]
    sys.exit(polybeast.main([*args, *sys.argv[1:]]))
