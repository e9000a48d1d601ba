"""Environments that go wrong in one way each, for the tests that drive the programs.

--env tests.faulty_envs:Raises-v0 (Gymnasium's syntax: import the module, then make).
"""

import sys
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Base(gymnasium.Env):
    """Episodes of 10 steps, reward 1 each. Goes wrong at the 300th step."""

    observation_space = spaces.Box(0, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)
    num_steps = 0
    t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation(), {}

    def step(self, action):
        self.t += 1
        self.num_steps += 1
        return self.observation(), self.reward(), self.t == 10, False, {}

    def observation(self):
        return np.full(3, self.t / 10, np.float32)

    def reward(self):
        return 1.0


class Raises(Base):
    def reward(self):
        if self.num_steps == 300:
            raise RuntimeError("the ball went through the floor")
        return 1.0


class Quick(Base):
    """Works: a step takes 5 ms."""

    seconds = 0.005

    def reward(self):
        time.sleep(self.seconds)
        return 1.0


class Slow(Quick):
    seconds = 0.05


class Late(Quick):
    """Takes some seconds for its first reset, and a while for a step."""

    seconds = 0.2

    def reset(self, *, seed=None, options=None):
        time.sleep(0 if self.num_steps else 3.5)
        return super().reset(seed=seed)


class LosesItsServer(Base):
    def reward(self):
        if self.num_steps == 300:
            raise ConnectionResetError("the game server hung up")
        return 1.0


class NaNReward(Base):
    def reward(self):
        return float("nan") if self.num_steps >= 300 else 1.0


class WrongShape(Base):
    def observation(self):
        return np.zeros(4 if self.num_steps >= 300 else 3, np.float32)


class HugeReward(Base):
    """Finite, but its square is not."""

    def reward(self):
        return 3e38 if self.num_steps >= 300 else 1.0


class Stuck(Base):
    def reward(self):
        if self.num_steps == 300:
            print("sleeps for an hour", file=sys.stderr, flush=True)
            time.sleep(3600)
        return 1.0


class Flaky(Quick):
    """Raises, and hangs for a minute, at random: once in 5,000 and in 50,000 steps."""

    seconds = 0.01

    def step(self, action):
        if self.np_random.random() < 1 / 5000:
            raise RuntimeError("the ball went through the floor")
        if self.np_random.random() < 1 / 50000:
            time.sleep(60)
        return super().step(action)


class Table(Base):
    action_space = spaces.MultiDiscrete([[2, 3], [4, 5]])  # Its repr has two lines.


class Text(Base):
    observation_space = spaces.Text(10)


class Seeds(Base):
    """Observes its seed, and raises at its 15th step."""

    observation_space = spaces.Box(0, 2**31, (1,), np.int64)

    def reset(self, *, seed=None, options=None):
        self.seed = self.seed if seed is None else seed
        return super().reset(seed=seed)

    def observation(self):
        return np.array([self.seed])

    def reward(self):
        if self.num_steps == 15:
            raise RuntimeError("the ball went through the floor")
        return 1.0


class Metrics(Base):
    """Works: every other episode is a success; all are 10 deep."""

    def step(self, action):
        *result, _ = super().step(action)
        success = self.num_steps % 20 == 10
        metrics = {"success": success, "depth": np.float32(self.t)}
        return *result, {"episode_metrics": metrics}


class Nested(Base):
    """Works: nested observations of every supported kind, two numbers for an action."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (24, 24, 3), np.uint8),
        inventory=spaces.Tuple([spaces.Discrete(4, start=1), spaces.MultiBinary(5)]),
        cards=spaces.MultiDiscrete([3, 7]),
        speed=spaces.Box(-np.inf, np.inf, (), np.float64),
    )
    action_space = spaces.MultiDiscrete([2, 5])

    def observation(self):
        return self.observation_space.sample()


for _env in (
    Base,
    Raises,
    Quick,
    Slow,
    Late,
    LosesItsServer,
    NaNReward,
    WrongShape,
    HugeReward,
    Stuck,
    Flaky,
    Table,
    Text,
    Seeds,
    Metrics,
    Nested,
):
    gymnasium.register(f"{_env.__name__}-v0", entry_point=_env)
