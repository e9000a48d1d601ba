"""IMPALA with the network of the MinAtar paper (Young and Tian 2019, arXiv 1903.03176).

    python -m monobeast --agent examples.minatar.agent \
        --env examples.minatar.env:MinAtar/Breakout-v1
"""

from torch import nn

import polybeast
from polybeast import parser  # noqa: F401 (--agent takes the flags from here)
from torchbeast.encoders import initialize


class Encoder(nn.Module):
    """Maps boards [N, H, W, C] of zeros and ones to [N, 128]."""

    def __init__(self, space):
        super().__init__()
        height, width, channels = space.shape
        self.out_features = 128
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * (height - 2) * (width - 2), self.out_features),
            nn.ReLU(),
        )
        initialize(self)

    def forward(self, boards):
        return self.layers(boards.permute(0, 3, 1, 2).float())


class Agent(polybeast.Agent):
    def make_encoder(self, observation_space):
        return Encoder(observation_space)
