"""Environments of PettingZoo's Parallel API, written by hand, and faults of theirs.

A fault's docstring is what a program says of it, a regular expression. PettingZoo is
not needed: ParallelEnv is a set of names.
"""

import functools

import numpy as np
from gymnasium import spaces


class Masked:
    """The spaces of agents that observe num_seen numbers and have five choices.

    masks: what has masks of actions: "observation", "info" or None
    """

    @functools.cache  # noqa: B019
    def observation_space(self, agent):
        seen = spaces.Box(-1, 10**6, (self.num_seen,), np.float32)
        if self.masks == "observation":
            mask = spaces.MultiBinary(5)
            return spaces.Dict({"seen": seen, "action_mask": mask})
        return seen

    @functools.cache  # noqa: B019
    def action_space(self, agent):
        return spaces.Discrete(5)


class Crowd(Masked):
    """Random episodes of agents that join late, return, die, are cut off, or have no
    step at all; after 8 steps all that are left are cut off. An agent observes
    (episode, step, which agent it is, its last action). An action that is not allowed
    raises; so do actions of agents that are not there.
    """

    metadata = {"name": "crowd_v0", "render_modes": ["rgb_array"], "render_fps": 5}
    possible_agents = ["ann", "bob", "cem", "dan"]
    num_seen = 4

    def __init__(self, masks=None, render_mode=None, p_end=0.15):
        self.masks, self.render_mode, self.p_end = masks, render_mode, p_end
        self.rng, self.episode, self.agents = np.random.default_rng(), -1, []

    @property
    def unwrapped(self):
        return self

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.episode += 1
        self.t, self.ended = 0, set()
        self.agents = [a for a in self.possible_agents if self.rng.random() < 0.6]
        self.agents = self.agents or self.possible_agents[:1]
        self.allowed = {}
        return self.observe(dict.fromkeys(self.agents, -1))

    def step(self, actions):
        assert set(actions) == set(self.agents), (actions, self.agents)
        for agent, action in actions.items():
            assert self.masks is None or self.allowed[agent][action], (agent, action)
        self.t += 1
        rewards, terminations, truncations = {}, {}, {}
        for agent in self.agents:
            end, way = self.rng.random() < self.p_end, self.rng.integers(3)
            rewards[agent] = float(self.rng.integers(-1000, 1000))
            terminations[agent] = bool(end and way < 2)
            truncations[agent] = bool(end and way > 0) or self.t == 8
            if terminations[agent] or truncations[agent]:
                self.ended.add(agent)
        left = [a for a in self.agents if a not in self.ended]
        for agent in self.possible_agents:
            absent = agent not in (*self.agents, *self.ended)
            if left and absent and self.rng.random() < 0.2:
                left.append(agent)
                rewards[agent] = 0.0
                terminations[agent] = truncations[agent] = False
        seen = {**dict.fromkeys(left, -1), **actions}
        self.agents = left[::-1]  # In any order.
        observations, infos = self.observe(seen)
        return observations, rewards, terminations, truncations, infos

    def observe(self, last_actions):
        """Returns (observations, infos) of these agents."""
        observations, infos = {}, {"common": {"any": "thing"}}
        for agent, action in last_actions.items():
            i = self.possible_agents.index(agent)
            x = np.array([self.episode, self.t, i, action], np.float32)
            mask = self.rng.integers(2, size=5, dtype=np.int8)
            mask[self.rng.integers(5)] = 1
            self.allowed[agent] = mask
            infos[agent] = {}
            if agent in self.ended:
                infos[agent] = {"episode_metrics": {"age": float(self.t)}}
                mask = mask * (self.t % 2)  # That of no action, or of some.
            elif self.masks == "info":
                infos[agent]["action_mask"] = mask
            if self.masks == "observation":
                x = {"seen": x, "action_mask": mask}
            observations[agent] = x
        return observations, infos

    def render(self):
        return np.full((32, 48, 3), 40 * self.t % 255, np.uint8)

    def close(self):
        self.agents = None


class Pair(Crowd):
    possible_agents = ["ann", "bob"]


class Targets(Crowd):
    """Each agent sees which of three actions is right: it pays 1, another one ends the
    agent's episode. All are cut off after 8 steps."""

    possible_agents = ["x", "y", "z"]

    @functools.cache  # noqa: B019
    def observation_space(self, agent):
        return spaces.Discrete(3)

    @functools.cache  # noqa: B019
    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.agents = 0, list(self.possible_agents)
        return self.observe(self.agents)

    def step(self, actions):
        self.t += 1
        before, right = self.agents, self.right
        wrong = {a: x != right[a] for a, x in actions.items()}
        self.agents = [a for a in before if not wrong[a] and self.t < 8]
        observations, infos = self.observe(before)
        rewards = {a: float(not wrong[a]) for a in before}
        truncations = dict.fromkeys(before, self.t == 8)
        return observations, rewards, wrong, truncations, infos

    def observe(self, agents):
        self.right = {a: int(self.rng.integers(3)) for a in agents}
        return self.right, {a: {} for a in agents}


class Mixed(Crowd):
    """Two agents with masked choices and one that moves anywhere, for 6 steps. It keeps
    what it was given and what it returned."""

    possible_agents = ["red_0", "blue", "red_1"]

    @functools.cache  # noqa: B019
    def observation_space(self, agent):
        if agent == "blue":
            return spaces.Box(-9, 9, (2,), np.float32)
        seen = spaces.Box(-9, 9, (3,), np.float32)
        return spaces.Dict({"seen": seen, "action_mask": spaces.MultiBinary(4)})

    @functools.cache  # noqa: B019
    def action_space(self, agent):
        if agent == "blue":
            return spaces.Box(-2, 2, (2,), np.float32)
        return spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.agents, self.given = 0, list(self.possible_agents), None
        return self.observe(), {}

    def step(self, actions):
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), (agent, action)
            assert agent == "blue" or self.shown[agent]["action_mask"][action]
        self.t, self.given = self.t + 1, actions
        before = self.agents
        self.agents = [a for a in before if self.t < (4 if a == "red_1" else 6)]
        ends = {a: a not in self.agents for a in before}
        rewards = {a: float(self.rng.random()) for a in before}
        shown = {a: x for a, x in self.observe().items() if a in before}
        return shown, rewards, ends, dict.fromkeys(before, False), {}

    def observe(self):
        self.shown = {"blue": self.rng.random(2, np.float32)}
        for agent in ("red_0", "red_1"):
            mask = self.rng.integers(2, size=4, dtype=np.int8)
            mask[self.rng.integers(4)] = 1
            seen = self.rng.random(3, np.float32)
            self.shown[agent] = {"seen": seen, "action_mask": mask}
        return self.shown


class Gone(Crowd):
    """Two agents, of whom the second is never there."""

    possible_agents = ["here", "gone"]

    def reset(self, seed=None, options=None):
        super().reset(seed)
        self.agents = ["here"]
        return self.observe({"here": -1})

    def step(self, actions):
        result = super().step(actions)
        self.agents = [a for a in self.agents if a == "here"]
        return result


class Steady(Crowd):
    """All agents are there for 8 steps, each paid 1. Faults change its steps."""

    def __init__(self, **kwargs):
        super().__init__(p_end=0, **kwargs)

    def reset(self, seed=None, options=None):
        super().reset(seed)
        self.agents = list(self.possible_agents)
        return self.observe(dict.fromkeys(self.agents, -1))

    def step(self, actions):
        observations, rewards, *others = super().step(actions)
        step = observations, dict.fromkeys(rewards, 1.0), *others
        if self.t == 3:
            self.fault(*step)
        return step

    def fault(self, observations, rewards, terminations, truncations, infos):
        pass


# Faults that are seen before anything starts.


class NoNames(Steady):
    """environment crowd_v0 has possible_agents \\[\\], expected the names of all ag"""

    possible_agents = []


class EqualNames(Steady):
    """environment crowd_v0 has possible_agents \\['a', 'b', 'a'\\], expected"""

    possible_agents = ["a", "b", "a"]


class OtherSpaces(Steady):
    """environment crowd_v0: agent 'cem' has the space Discrete.4., expected Discrete.5.
    , as 'ann' had: they have one policy .--policies NAME=PATTERN,... makes several."""

    def action_space(self, agent):
        return spaces.Discrete(4 if agent == "cem" else 5)


# Faults of a step.


class SpacesChange(Steady):
    """environment crowd_v0: agent 'ann' has the space Box.*4.*, expected Box.*, as"""

    def observation_space(self, agent):
        high = 10**6 if self.episode < 1 else 10**5
        return spaces.Box(-1, high, (4,), np.float32)


class NoReward(Steady):
    """agent 'bob' of environment 1 is not in rewards"""

    def fault(self, observations, rewards, terminations, truncations, infos):
        del rewards["bob"]


class NoTermination(Steady):
    """agent 'bob' of environment 1 is not in terminations"""

    def fault(self, observations, rewards, terminations, truncations, infos):
        del terminations["bob"]


class NoObservation(Steady):
    """agent 'dan' of environment 1 is not in observations"""

    def fault(self, observations, rewards, terminations, truncations, infos):
        del observations["dan"]


class Stranger(Steady):
    """rewards of environment 1 has \\['ann', .*, 'zoe'\\], expected a dict of ag"""

    def fault(self, observations, rewards, terminations, truncations, infos):
        rewards["zoe"] = 1.0


class StrangerInAgents(Steady):
    """environment 1 has agents \\['zoe'\\], expected some of possible_agents"""

    def fault(self, observations, rewards, terminations, truncations, infos):
        self.agents = ["zoe"]


class RewardList(Steady):
    """rewards of environment 1 has list, expected a dict of agents of .'ann', 'bob'"""

    def step(self, actions):
        observations, rewards, *others = super().step(actions)
        return observations, list(rewards.values()), *others


class NaNReward(Steady):
    """agent 'ann' of environment 1: rewards is nan"""

    def fault(self, observations, rewards, terminations, truncations, infos):
        rewards["ann"] = float("nan")


class NaNObservation(Steady):
    """agent 'cem' of environment 1: observation is nan"""

    def fault(self, observations, rewards, terminations, truncations, infos):
        observations["cem"][2] = np.nan


class OtherShape(Steady):
    """agent 'cem' of environment 1: observation is float32 .3., expected float32 .4."""

    def fault(self, observations, rewards, terminations, truncations, infos):
        observations["cem"] = observations["cem"][:3]


class LeavesWithoutEnd(Steady):
    """agent 'ann' of environment 1 has left env.agents, and is neither terminated"""

    def fault(self, observations, rewards, terminations, truncations, infos):
        self.agents.remove("ann")


class StaysAfterItsEnd(Steady):
    """agent 'ann' of environment 1 is in env.agents after its last step"""

    def fault(self, observations, rewards, terminations, truncations, infos):
        terminations["ann"] = True


class Revives(Steady):
    """agent 'ann' of environment 1 is in env.agents after its last step"""

    def fault(self, observations, rewards, terminations, truncations, infos):
        terminations["ann"] = True
        self.agents.remove("ann")
        self.ended.add("ann")

    def step(self, actions):
        result = super().step(actions)
        if self.t == 5:
            self.agents.append("ann")
        return result


class PaysTheDead(Revives):
    """agent 'ann' of environment 1 has reward 3.0 at a step at which it was not in"""

    def step(self, actions):
        result = Steady.step(self, actions)
        if self.t == 5:
            result[1]["ann"] = 3.0
        return result


class AllowsNothing(Steady):
    """info/action_mask of agent 'bob' of environment 1 allows no action: .0, 0"""

    def __init__(self):
        super().__init__(masks="info")

    def fault(self, observations, rewards, terminations, truncations, infos):
        infos["bob"]["action_mask"][:] = 0


class ForgetsAMask(AllowsNothing):
    """agent 'bob' of environment 1: info/action_mask is not in the info"""

    def fault(self, observations, rewards, terminations, truncations, infos):
        infos["bob"] = {}


class BeginsWithoutAgents(Steady):
    """environment 1 has no agents after reset"""

    def reset(self, seed=None, options=None):
        result = super().reset(seed)
        self.agents = []
        return result


BEFORE = [NoNames, EqualNames, OtherSpaces]
AT_A_STEP = [
    SpacesChange,
    NoReward,
    NoTermination,
    NoObservation,
    Stranger,
    StrangerInAgents,
    RewardList,
    NaNReward,
    NaNObservation,
    OtherShape,
    LeavesWithoutEnd,
    StaysAfterItsEnd,
    Revives,
    PaysTheDead,
    AllowsNothing,
    ForgetsAMask,
    BeginsWithoutAgents,
]


def parallel_env(**kwargs):
    return Crowd(**kwargs)
