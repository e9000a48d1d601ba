"""IMPALA with an encoder for NetHack's map, status line and message line.

    python -m monobeast --agent examples.nethack.agent \
        --env examples.nethack.env:torchbeast/NetHackScore-v0
"""

import torch
from torch import nn

import polybeast
from polybeast import parser  # noqa: F401 (--agent takes the flags from here)
from torchbeast.encoders import initialize
from torchbeast.messages import BadInput


class Encoder(nn.Module):
    """Maps glyphs [N, 21, 79], blstats [N, 27] and message [N, 256] to [N, 384]."""

    def __init__(self, space):
        super().__init__()
        height, width = space["glyphs"].shape
        self.glyph_embedding = nn.Embedding(int(space["glyphs"].high.max()) + 1, 8)
        self.map = nn.Sequential(
            nn.Conv2d(8, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * -(-height // 4) * -(-width // 4), 256),
            nn.ReLU(),
        )
        self.blstats = nn.Sequential(
            nn.Linear(space["blstats"].shape[0], 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
        )
        self.character_embedding = nn.Embedding(256, 8)
        self.message = nn.Sequential(nn.Conv1d(8, 64, 5, stride=2), nn.ReLU())
        self.out_features = 256 + 64 + 64
        initialize(self)

    def forward(self, observation):
        glyphs = self.glyph_embedding(observation["glyphs"].long())  # [N, H, W, C]
        blstats = observation["blstats"].float()  # Hit points, gold, turns, ...
        message = self.character_embedding(observation["message"].long())  # [N, 256, C]
        parts = [
            self.map(glyphs.permute(0, 3, 1, 2)),
            self.blstats(blstats.sign() * blstats.abs().log1p()),
            self.message(message.transpose(1, 2)).amax(2),
        ]
        return torch.cat(parts, dim=1)


class Agent(polybeast.Agent):
    def make_encoder(self, observation_space):
        if self.flags.normalize_observations:
            raise BadInput(
                "--normalize_observations: this agent's encoder reads characters"
            )
        return Encoder(observation_space)
