"""Environments of PettingZoo's AEC API, written by hand, and faults of theirs.

A fault's docstring is what a program says of it, a regular expression. PettingZoo is
not needed: AECEnv is a set of names.
"""

import functools
import time

import numpy as np
from gymnasium import spaces

from tests.parallel_envs import Masked


class Table(Masked):
    """Random games by turns: any agent may be next, also the same again, and each turn
    pays everybody. Agents die or are cut off, some before their first turn, and join
    late; after 12 turns all that are left are cut off. An agent observes (seed % 1000,
    game, turn, which agent it is, its last action). An action that is not allowed
    raises.
    """

    metadata = {"name": "table_v0", "render_modes": ["rgb_array"], "render_fps": 5}
    possible_agents = ["ann", "bob", "cem"]
    num_turns, num_seen = 12, 5

    def __init__(self, masks=None, render_mode=None, p_end=0.05):
        self.masks, self.render_mode, self.p_end = masks, render_mode, p_end
        self.rng, self.agents = np.random.default_rng(), []
        self.seed, self.game = 0, -1

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng, self.seed, self.game = (
                np.random.default_rng(seed),
                seed % 1000,
                -1,
            )
        self.game, self.turn = self.game + 1, 0
        self.left, self.last_actions = set(), {}
        self.agents, self.paid, self.terminations, self.truncations = [], {}, {}, {}
        first = self.rng.permutation(self.possible_agents)
        for agent in first[: 1 + self.rng.integers(len(first))]:
            self.join(str(agent))
        self.choose()

    def join(self, agent):
        self.agents.append(agent)
        self.paid[agent], self.last_actions[agent] = 0.0, -1
        self.terminations[agent] = self.truncations[agent] = False

    def ended(self, agent):
        return self.terminations[agent] or self.truncations[agent]

    def choose(self):
        """The dead are first; of the others those with low numbers come more often."""
        ended = [a for a in self.agents if self.ended(a)]
        if self.agents:
            among = ended or sorted(self.agents, key=self.possible_agents.index)
            self.agent_selection = among[int(len(among) * self.rng.random() ** 2)]
            self.mask = self.rng.integers(2, size=5, dtype=np.int8)
            self.mask[self.rng.integers(5)] = 1

    def last(self, observe=True):
        agent = self.agent_selection
        i, action = self.possible_agents.index(agent), self.last_actions[agent]
        x = np.array([self.seed, self.game, self.turn, i, action], np.float32)
        mask, info = self.mask, {}
        if self.ended(agent):
            info["episode_metrics"] = {"age": float(self.turn)}
            mask = 0 * mask
        if self.masks == "observation":
            x = {"seen": x, "action_mask": mask}
        elif self.masks == "info" and not self.ended(agent):
            info["action_mask"] = mask
        ends = self.terminations[agent], self.truncations[agent]
        return x, self.paid[agent], *ends, info

    def step(self, action):
        agent = self.agent_selection
        if self.ended(agent):
            assert action is None
            self.agents.remove(agent)
            self.left.add(agent)
        else:
            assert self.masks is None or self.mask[action], (agent, action)
            self.take_turn(agent, action)
        self.choose()

    def take_turn(self, agent, action):
        self.turn += 1
        self.paid[agent], self.last_actions[agent] = 0.0, action
        for a in self.agents:
            self.paid[a] += float(self.rng.integers(-1000, 1000))
            end, way = self.rng.random() < self.p_end, self.rng.integers(3)
            self.terminations[a] = bool(end and way < 2)
            self.truncations[a] = bool(end and way > 0) or self.turn == self.num_turns
        for a in self.possible_agents:
            absent = a not in (*self.agents, *self.left)
            if absent and not self.ended(agent) and self.rng.random() < 0.2:
                self.join(a)

    def agent_iter(self, max_iter=2**63):
        while self.agents:
            yield self.agent_selection

    def render(self):
        return np.full((32, 48, 3), 20 * self.turn % 255, np.uint8)

    def close(self):
        self.agents = None


class Two(Table):
    possible_agents = ["ann", "bob"]


class Last(Table):
    """Of eight agents the last one leaves every 40 turns, until two are left, who play
    on without end."""

    possible_agents = list("abcdefgh")

    def reset(self, seed=None, options=None):
        super().reset(seed)
        for agent in self.possible_agents:
            if agent not in self.agents:
                self.join(agent)

    def choose(self):
        super().choose()
        if not self.ended(self.agent_selection):
            self.agent_selection = self.agents[self.turn % len(self.agents)]

    def take_turn(self, agent, action):
        self.turn += 1
        if self.turn % 40 == 0 and len(self.agents) > 2:
            self.terminations[max(self.agents)] = True


class Answer(Two):
    """By strict turns: each agent sees which of three actions is right. What it earns,
    1 or 0, is paid when it is the other's turn, so that it comes with its own next."""

    num_turns = 10

    @functools.cache  # noqa: B019
    def observation_space(self, agent):
        return spaces.Discrete(3)

    @functools.cache  # noqa: B019
    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        super().reset(seed)
        self.agents, self.earned = [], 0
        for agent in self.possible_agents:
            self.join(agent)
        self.choose()

    def choose(self):
        self.right = int(self.rng.integers(3))
        if self.agents:
            self.agent_selection = self.agents[self.turn % len(self.agents)]

    def last(self, observe=True):
        _, *others, info = super().last()
        return self.right, *others, info

    @property
    def mask(self):
        return np.ones(3)

    def take_turn(self, agent, action):
        self.turn += 1
        self.paid[agent] = 0.0
        for other in set(self.agents) - {agent}:
            self.paid[other] += self.earned
        self.earned = float(action == self.right)
        for a in self.agents:
            self.truncations[a] = self.turn == self.num_turns


class Duel(Answer):
    """Each takes a number, 0 to 2; the higher one wins 1, the lower one loses 1."""

    def take_turn(self, agent, action):
        self.turn += 1
        self.last_actions[agent] = int(action)
        if self.turn == 2:
            ann, bob = self.possible_agents
            won = np.sign(self.last_actions[ann] - self.last_actions[bob])
            self.paid = {ann: float(won), bob: -float(won)}
            self.terminations = {ann: True, bob: True}


class Fold(Duel):
    """Who takes 0 at once loses: the other one has no turn."""

    def take_turn(self, agent, action):
        super().take_turn(agent, action)
        if self.turn == 1 and action == 0:
            self.paid = {"ann": -1.0, "bob": 1.0}
            self.terminations = {"ann": True, "bob": True}


class Unlike(Answer):
    """By strict turns: ann has three choices, of which a mask forbids some, bob two."""

    @functools.cache  # noqa: B019
    def observation_space(self, agent):
        return spaces.Discrete(3 if agent == "ann" else 2)

    @functools.cache  # noqa: B019
    def action_space(self, agent):
        return spaces.Discrete(3 if agent == "ann" else 2)

    def choose(self):
        super().choose()
        if self.agents and self.agent_selection == "bob":
            self.right %= 2

    def last(self, observe=True):
        x, *others, info = super().last()
        if self.agent_selection == "ann":
            info = {**info, "action_mask": np.arange(3) == x}
        return x, *others, info

    def take_turn(self, agent, action):
        assert agent == "bob" or action == self.right
        super().take_turn(agent, action)


class Steady(Two):
    """Both are there for 12 turns. Faults change what happens at the third one."""

    def __init__(self, **kwargs):
        super().__init__(p_end=0, **kwargs)

    def reset(self, seed=None, options=None):
        super().reset(seed)
        for agent in set(self.possible_agents) - set(self.agents):
            self.join(agent)

    def choose(self):
        super().choose()
        if self.agents and self.turn < self.num_turns:
            self.agent_selection = self.possible_agents[self.turn % 2]

    @property
    def now(self):
        return self.turn == 3  # It is bob's turn.


# Faults.


class RaisesInLast(Steady):
    r"""last\(\) of table_v0, agent 'bob' of environment 1 raised KeyError"""

    def last(self, observe=True):
        return {}["bob"] if self.now else super().last()


class RaisesInStep(Steady):
    r"""step\(\) of table_v0, agent 'bob' of environment 1 raised ValueError: no such"""

    def step(self, action):
        if self.now:
            raise ValueError("no such move")
        super().step(action)


class TooFew(Steady):
    r"""agent 'bob' of environment 1: last\(\) returned 4 things, expected \(observat"""

    def last(self, observe=True):
        return super().last()[: 4 if self.now else 5]


class NaNReward(Steady):
    """agent 'bob' of environment 1: reward is nan"""

    def last(self, observe=True):
        x, reward, *others = super().last()
        return x, np.nan if self.now else reward, *others


class OtherShape(Steady):
    """agent 'bob' of environment 1: observation is float32 .3., expected float32 .5."""

    def last(self, observe=True):
        x, *others = super().last()
        return x[: 3 if self.now else 5], *others


class Stranger(Steady):
    r"""environment 1 has agents \['ann', 'bob', 'zoe'\], expected some of possible_a"""

    def choose(self):
        super().choose()
        if self.now:
            self.agents = [*self.possible_agents, "zoe"]


class TurnOfAStranger(Steady):
    r"""environment 1 gives the turn to 'zoe', expected one of env.agents \['"""

    def choose(self):
        super().choose()
        if self.now:
            self.agent_selection = "zoe"


class LeavesWithoutATurn(Steady):
    """agent 'ann' of environment 1 has left env.agents without a last turn, at which"""

    def choose(self):
        super().choose()
        if self.now:
            self.agents = ["bob"]


class StaysAfterItsEnd(Steady):
    """agent 'bob' of environment 1 is in env.agents after its last turn"""

    def last(self, observe=True):
        x, reward, *_, info = super().last()
        return x, reward, self.now, False, info

    def step(self, action):
        if not self.now:
            super().step(action)


class NobodyBegins(Steady):
    r"""environment 1 has no agent that can act after reset\(\)"""

    def reset(self, seed=None, options=None):
        super().reset(seed)
        self.agents = []


class AllowsNothing(Steady):
    """info/action_mask of agent 'bob' of environment 1 allows no action: .0, 0"""

    def __init__(self):
        super().__init__(masks="info")

    def choose(self):
        super().choose()
        if self.now:
            self.mask[:] = 0


class ForgetsAMask(AllowsNothing):
    """agent 'bob' of environment 1: info/action_mask is not in the info"""

    def last(self, observe=True):
        *others, info = super().last()
        return *others, {} if self.now else info


FAULTS = [
    RaisesInLast,
    RaisesInStep,
    TooFew,
    NaNReward,
    OtherShape,
    Stranger,
    TurnOfAStranger,
    LeavesWithoutATurn,
    StaysAfterItsEnd,
    NobodyBegins,
    AllowsNothing,
    ForgetsAMask,
]


class HangsInLast(Steady):
    r"""did not answer for 1 s .*: last\(\) of table_v0, agent 'bob' of environment 0"""

    def last(self, observe=True):
        if self.now and self.game == 15:
            time.sleep(1000)
        return super().last()


def env(**kwargs):
    return Table(**kwargs)
