"""DQN with the network of the MinAtar paper (Young and Tian 2019, arXiv 1903.03176).

    python -m monobeast --agent examples.minatar.dqn --no-use_lstm \
        --env examples.minatar.env:MinAtar/Breakout-v1
"""

import r2d2
from examples.minatar.agent import Encoder
from r2d2 import parser  # noqa: F401 (--agent takes the flags from here)


class Agent(r2d2.Agent):
    def make_encoder(self, observation_space):
        return Encoder(observation_space)
