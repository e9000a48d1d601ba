"""Elo ratings of what an agent was at some steps of its run, from games beside
training: returns of self-play do not say whether it gets better."""

import math
from collections import defaultdict

import numpy as np

from torchbeast import play, versus

NUM_RIVALS = 3  # Earlier snapshots that a new one plays, beside random play.
MAX_SNAPSHOTS = 32  # Whose weights are kept; then every second one is dropped.
RANDOM = "random"  # Its rating is 0.


class Ratings:
    """Rates snapshots of an agent's weights.

    agent: acts with a snapshot's weights; other: the same for its opponent. They play
    --num_test_episodes games of each pair, by turns on either side.
    """

    def __init__(self, flags, env, agent, other):
        self._flags, self._env, self._agents = flags, env, (agent, other)
        self._weights = {}  # {step: weights}
        self._points = defaultdict(float)  # {(one, the other): points of the first}

    def add(self, step, weights):
        """Plays a new snapshot. Returns (its returns against random play, what else is
        logged: {"eval_rating": its rating})."""
        me, rival = self._agents
        me.net.load_state_dict(weights)
        steps = list(self._weights)
        some = np.linspace(0, len(steps) - 1, min(len(steps), NUM_RIVALS)).round()
        for i in some.astype(int).tolist():
            rival.net.load_state_dict(self._weights[steps[i]])
            policy = play.Policy(rival, self._env, self._flags.test_actions, 1)
            self._play(step, steps[i], policy)
        returns = self._play(step, RANDOM, versus.Random(self._env, self._flags.seed))
        if len(self._weights) == MAX_SNAPSHOTS:
            self._weights = dict(list(self._weights.items())[::2])
        self._weights[step] = weights
        return returns, {"eval_rating": elo(self._points, RANDOM)[step]}

    def _play(self, step, name, player):
        me = play.Policy(self._agents[0], self._env, self._flags.test_actions, 1)
        sides, returns = versus.Sides(self._env, me, player), []
        for own, _ in play.episodes(self._flags, self._env, sides):
            returns.append(own)
            points = (np.sign(own) + 1) / 2  # 1, 1/2 or 0.
            self._points[step, name] += points
            self._points[name, step] += 1 - points
        return returns


def elo(points, anchor):
    """Returns Elo ratings {player: number}: those under which the points {(one, the
    other): of the first one's games} are likeliest, if each pair that met is given one
    more draw, without which who won all games would have no rating. The anchor has 0.

    A player whose rating is 400 more has ten times the other's chance.
    """
    names = sorted({name for pair in points for name in pair}, key=str)
    index = {name: i for i, name in enumerate(names)}
    won = np.zeros((len(names), len(names)))
    for (one, other), x in points.items():
        won[index[one], index[other]] += x + 0.5
    games, ratings = won + won.T, np.zeros(len(names))
    free = np.array([name != anchor for name in names])
    for _ in range(100):  # Newton's method, in steps of at most 1.
        expected = games / (1 + np.exp(ratings - ratings[:, None]))
        slope = (won - expected).sum(1)
        weight = expected * expected.T / np.maximum(games, 1)
        curvature = np.diag(weight.sum(1)) - weight
        change = np.linalg.solve(curvature[free][:, free], slope[free])
        ratings[free] += change / max(1, np.abs(change).max())
        if np.abs(change).max() < 1e-6:
            break
    scale = 400 / math.log(10)
    return {name: float(scale * ratings[i]) for name, i in index.items()}
