"""An agent of a user. Its network has a BatchNorm, and says if two threads call it at
the same time; its act() and learn() have one output more than polybeast.py's.
"""

import threading

from torch import nn

import polybeast
from polybeast import parser  # noqa: F401 (part of an agent)


class Net(polybeast.Net):
    lock = threading.Lock()

    def forward(self, step, core_state=()):
        alone = not self.training or self.lock.acquire(blocking=False)
        assert alone, "called twice at the same time"
        try:
            return super().forward(step, core_state)
        finally:
            if self.training:
                self.lock.release()


class Agent(polybeast.Agent):
    def make_net(self, observation_space, action_space):
        features = observation_space.shape[0]
        encoder = nn.Sequential(nn.Linear(features, 32), nn.BatchNorm1d(32), nn.ReLU())
        encoder.out_features = 32
        return Net(encoder, action_space)

    def act(self, step, core_state, greedy=False):
        outputs, core_state = super().act(step, core_state, greedy)
        value = step["observation"].sum(-1)  # [1, B]
        return {**outputs, "sum_seen": value}, core_state

    def learn(self, batch):
        # Index t of outputs is of step t.
        expected = batch["observation"][:-1].sum(-1)
        difference = (batch["sum_seen"] - expected).abs().max()
        return {**super().learn(batch), "sum_difference": difference}
