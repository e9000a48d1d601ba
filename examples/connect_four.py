"""PettingZoo's connect four: PPO with convolutions for its board, which plays against
itself, and an opponent that looks one move ahead.

python -m monobeast --agent examples.connect_four --opponents 0 \\
    --env pettingzoo.classic.connect_four_v3 --num_actors 2 --envs_per_actor 16
python -m monobeast --mode test --greedy --opponent examples.connect_four:lookahead
"""

import numpy as np
import torch
from torch import nn

import ppo
from torchbeast.encoders import initialize
from torchbeast.networks import ActorCritic

NUM_CHANNELS, NUM_FEATURES = 32, 128


class Board(nn.Module):
    """Pieces [N, 6, 7, 2], of who acts and of the other one, to features. What makes
    four in a row is the same everywhere on the board."""

    out_features = NUM_FEATURES

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 2 * NUM_CHANNELS, 4, padding=3), nn.ReLU(),
            nn.Conv2d(2 * NUM_CHANNELS, NUM_CHANNELS, 3), nn.ReLU(),
            nn.Conv2d(NUM_CHANNELS, NUM_CHANNELS, 3, padding=1), nn.ReLU(),
            nn.Flatten(),
            nn.Linear(7 * 8 * NUM_CHANNELS, NUM_FEATURES), nn.ReLU(),
        )  # fmt: skip
        initialize(self)

    def forward(self, observation):
        pieces = observation["observation"].to(torch.float32)
        return self.layers(pieces.movedim(-1, 1))


def parser():
    p = ppo.parser()
    p.set_defaults(batch_size=64, num_epochs=2, num_minibatches=8, discounting=1)
    p.set_defaults(total_steps=2_000_000)
    return p


class Agent(ppo.Agent):
    def defaults(self, observation_space, action_space):
        # With less exploration it lost more games (docs/multi-agent.md).
        return super().defaults(observation_space, action_space) | dict(
            normalize_observations=False, normalize_rewards=False,
            learning_rate=1e-3, entropy_cost=0.06, gae_lambda=0.95,
        )  # fmt: skip

    def make_net(self, observation_space, action_space):
        lstm = self.flags.use_lstm
        return ActorCritic(Board(), action_space, lstm, feedback=lstm)


DIRECTIONS = (0, 1), (1, 0), (1, 1), (1, -1)


def lookahead(observation, legal, random):
    """Wins if it can, else prevents that the other one wins, else moves at random.

    observation: {"observation": [6, 7, 2]}, its own pieces and the other's; legal: the
    columns that are not full. Returns a column.
    """
    pieces = np.asarray(observation["observation"])
    for player in (0, 1):
        for column in legal:
            if wins(pieces, player, column):
                return column
    return int(random.choice(legal))


def wins(pieces, player, column):
    """Tells whether a player's piece that falls into the column makes four in a row."""
    row = int((pieces[:, column].sum(-1) == 0).sum()) - 1  # Row 0 is at the top.
    own = pieces[..., player] > 0

    def num(down, right):
        """The player's pieces in a row beside the new one, in a direction."""
        i, j, n = row + down, column + right, 0
        while 0 <= i < own.shape[0] and 0 <= j < own.shape[1] and own[i, j]:
            i, j, n = i + down, j + right, n + 1
        return n

    return any(num(i, j) + num(-i, -j) >= 3 for i, j in DIRECTIONS)
