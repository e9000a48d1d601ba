"""Environments that test one ability each, small enough to solve in seconds.

    torchbeast/Catch-v0     credit over ten steps, from a board
    torchbeast/CatchPixels-v0   the same, from an image
    torchbeast/Memory-v0    recurrent state: no network without one beats a return of 0
    torchbeast/LongMemory-v0   the same, for sixteen steps
    torchbeast/Bandit-v0    an action that depends on what is seen, and nothing else
    torchbeast/Target-v0    a continuous action that depends on what is seen
    torchbeast/Xor-v0       an action that depends on two entries of a Dict together
    torchbeast/Mixed-v0     an action of a choice and of a number that depends on it
    torchbeast/Masked-v0    the best arm of those that a mask allows
    torchbeast/Counter-v0   none, it counts: for tests of what happens to steps
    torchbeast/Mock-v0      none, it costs nothing: for tests of everything around it

Importing this module registers them; gymnasium.make("tests.envs:torchbeast/Catch-v0")
imports it.
"""

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv


class Catch(gymnasium.Env):
    """A ball falls down a board; the paddle on the bottom row must be under it.

    The observation is the board, float32 [rows, columns]: 1 at the ball and at the
    paddle. Actions: 0 left, 1 stay, 2 right. The ball moves down a row with every
    step, so an episode has rows - 1; its last reward is 1 or -1, every other is 0.
    """

    def __init__(self, rows=10, columns=5):
        self.observation_space = spaces.Box(0, 1, (rows, columns), np.float32)
        self.action_space = spaces.Discrete(3)
        self.rows = rows
        self.columns = columns

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row = 0
        self.column = int(self.np_random.integers(self.columns))
        self.paddle = self.columns // 2
        return self._board(), {}

    def step(self, action):
        self.row += 1
        self.paddle = min(max(self.paddle + int(action) - 1, 0), self.columns - 1)
        last = self.row == self.rows - 1
        reward = (1.0 if self.paddle == self.column else -1.0) if last else 0.0
        return self._board(), reward, last, False, {}

    def _board(self):
        board = np.zeros((self.rows, self.columns), np.float32)
        board[self.row, self.column] = 1
        board[-1, self.paddle] = 1
        return board


class CatchPixels(Catch):
    """Catch as an image, uint8 [80, 40, 1]: 8 x 8 pixels of 255 are a 1."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (80, 40, 1), np.uint8)

    def _board(self):
        board = super()._board().astype(np.uint8)
        return 255 * np.kron(board, np.ones((8, 8), np.uint8))[..., None]


class Memory(gymnasium.Env):
    """Remember a cue for `delay` blank steps, then act on it.

    The observation is float32 [3]: (1, 0, 0) or (0, 1, 0) is the cue, shown once;
    (0, 0, 0) a blank; (0, 0, 1) asks for the cue as an action, which pays 1 or -1.

    Until asked, the agent must press 0: 1 ends the episode with -1. Without this rule
    a network that sees its own last action (as ours do) needs no recurrent state: it
    presses the cue until it is asked, and reads it off its last action.

    The delay is short so that a test learns it in seconds.
    """

    def __init__(self, delay=2):
        self.observation_space = spaces.Box(0, 1, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.delay = delay

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.cue = int(self.np_random.integers(2))
        return self._observation(self.cue), {}

    def step(self, action):
        self.t += 1
        if self.t <= self.delay + 1 and int(action) == 0:
            asked = self.t == self.delay + 1
            return self._observation(2 if asked else None), 0.0, False, False, {}
        right = self.t == self.delay + 2 and int(action) == self.cue
        return self._observation(None), 1.0 if right else -1.0, True, False, {}

    def _observation(self, index):
        observation = np.zeros(3, np.float32)
        if index is not None:
            observation[index] = 1
        return observation


class Bandit(gymnasium.Env):
    """One step: the right arm of n is the one after the context, and pays 1.

    The observation is the context, Discrete(n); with nested=True it is a Dict of the
    context and a distractor, float32 [2].
    """

    def __init__(self, n=4, nested=False):
        context = spaces.Discrete(n)
        distractor = spaces.Box(0, 1, (2,), np.float32)
        self.observation_space = (
            spaces.Dict({"context": context, "distractor": distractor})
            if nested
            else context
        )
        self.action_space = spaces.Discrete(n)
        self.n = n
        self.nested = nested

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.context = int(self.np_random.integers(self.n))
        return self._observation(), {}

    def step(self, action):
        right = int(action) == (self.context + 1) % self.n
        return self._observation(), float(right), True, False, {}

    def _observation(self):
        if not self.nested:
            return self.context
        distractor = self.np_random.random(2, np.float32)
        return {"context": self.context, "distractor": distractor}


class Masked(gymnasium.Env):
    """One step: arm 0 pays 1, and is there half of the time; arm 1 pays 0.5, and is
    there always; three others pay nothing, and come and go. The observation shows
    nothing of it but by its mask. An arm that is not there raises.

    where: what has the mask, "observation" or "info"
    """

    def __init__(self, where="observation"):
        self.where = where
        nothing = spaces.Box(0, 1, (2,), np.float32)
        self.observation_space = nothing
        if where == "observation":
            masks = {"action_mask": spaces.MultiBinary(5)}
            self.observation_space = spaces.Dict({"nothing": nothing, **masks})
        self.action_space = spaces.Discrete(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.mask = self.np_random.integers(2, size=5, dtype=np.int8)
        self.mask[1] = 1
        return self._result()

    def step(self, action):
        if not self.mask[action]:
            raise RuntimeError(f"arm {action} is not there: {self.mask}")
        self.mask = np.zeros(5, np.int8)  # The game is over.
        observation, info = self._result()
        return observation, (1.0, 0.5, 0, 0, 0)[action], True, False, info

    def _result(self):
        nothing = np.ones(2, np.float32)
        if self.where == "info":
            return nothing, {"action_mask": self.mask}
        return {"nothing": nothing, "action_mask": self.mask}, {}


class Target(gymnasium.Env):
    """One step: hit the number that is seen, float32 [1] in -1 to 1, by an action in
    bounds of its own, Box(10, 30), of which 20 + 10 * number hits it. The return is 1
    less the distance of the number that was hit."""

    def __init__(self):
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Box(10, 30, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.number, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        hit = (float(action[0]) - 20) / 10
        return self.number, 1 - abs(hit - float(self.number[0])), True, False, {}


class Mixed(Target):
    """Target, and a choice: 1 if the number is positive, else 0. The action is a Tuple
    of Discrete(2) and Dict(force=Box). A wrong choice pays 0."""

    def __init__(self):
        super().__init__()
        force = spaces.Dict(force=self.action_space)
        self.action_space = spaces.Tuple((spaces.Discrete(2), force))

    def step(self, action):
        assert self.action_space.contains(action), action
        choice, force = action
        hit = (float(force["force"][0]) - 20) / 10
        right = int(choice) == int(self.number[0] > 0)
        reward = 1 - abs(hit - float(self.number[0])) if right else 0.0
        return self.number, reward, True, False, {}


class Xor(gymnasium.Env):
    """Each of ten steps shows two bits, each in an entry of its own of a Dict, and pays
    1 for an action that is their exclusive-or, else 0. What depends on either entry
    alone, or on a sum of two such parts, is right half of the time.

    first, second: what shows a bit: number, discrete, integers, binary, image or ids
    box:           the action is a number from -1 to 1, of which the sign counts; the
                   reward is as much as it is on the right side
    """

    def __init__(self, first="number", second="number", box=False):
        self.kinds = first, second
        self.box = box
        parts = [
            {
                "number": spaces.Box(-1, 1, (1,), np.float32),
                "discrete": spaces.Discrete(4, start=1),
                "integers": spaces.MultiDiscrete([3, 4]),
                "binary": spaces.MultiBinary(3),
                "image": spaces.Box(0, 255, (12, 10, 3), np.uint8),
                "ids": spaces.Box(0, 5976, (20, 21), np.int16),
            }[kind]
            for kind in self.kinds
        ]
        self.observation_space = spaces.Dict(first=parts[0], second=parts[1])
        self.action_space = spaces.Discrete(2)
        if box:
            self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observation(), {}

    def step(self, action):
        right = self.bits[0] != self.bits[1]
        reward = float(int(action if not self.box else action[0] > 0) == right)
        if self.box:
            reward = 0.5 + 0.5 * float(action[0]) * (1 if right else -1)
        self.t += 1
        return self._observation(), reward, self.t == 10, False, {}

    def _observation(self):
        self.bits = self.np_random.integers(2, size=2)
        keys = ("first", "second")
        return {k: self._show(*x) for k, *x in zip(keys, self.kinds, self.bits)}

    def _show(self, kind, bit):
        if kind == "number":
            return np.array([2 * bit - 1], np.float32)
        if kind == "discrete":
            return np.int64(1 + 2 * bit)
        if kind == "integers":
            return np.array([1 + bit, 3 * bit])
        if kind == "binary":
            return np.array([1, bit, 0], np.int8)
        if kind == "image":  # A spot on the left or on the right.
            image = np.full((12, 10, 3), 50, np.uint8)
            image[4:7, 1 + 5 * bit : 4 + 5 * bit] = 200
            return image
        ids = np.full((20, 21), 2359, np.int16)
        ids[5:13, 8:16] = 2380 + bit  # One of two that follow each other.
        return ids


class Counter(gymnasium.Env):
    """Counts, whatever the action. The t-th step of an episode pays t.

    The observation is int64 [3]: the number of observations since construction before
    this one, the number of episodes before this one, the step in the episode. So two
    steps that follow each other differ by 1 in the first number, also from a last
    observation to the first of the next episode.

    After `limit` steps the episode is truncated; with terminate=True, terminated.
    """

    def __init__(self, limit=5, terminate=False):
        high = np.iinfo(np.int64).max
        self.observation_space = spaces.Box(0, high, (3,), np.int64)
        self.action_space = spaces.Discrete(2)
        self.limit = limit
        self.terminate = terminate
        self.total = -1
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total += 1
        self.episode += 1
        self.t = 0
        return self._observation(), {}

    def step(self, action):
        self.total += 1
        self.t += 1
        last = self.t >= self.limit
        terminated, truncated = last and self.terminate, last and not self.terminate
        return self._observation(), float(self.t), terminated, truncated, {}

    def _observation(self):
        return np.array([self.total, self.episode, self.t], np.int64)


class Mock(gymnasium.Env):
    """Atari's observations, uint8 [84, 84, 4], all of them the same; 6 actions, reward
    0, episodes of 1,000 steps."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = spaces.Discrete(6)
    length = 1000

    def __init__(self):
        self.observation = np.random.default_rng(1).integers(
            256, size=(84, 84, 4), dtype=np.uint8
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation.copy(), {}

    def step(self, action):
        self.t += 1
        return self.observation.copy(), 0.0, self.t == self.length, False, {}


class MockVector(VectorEnv):
    """Many of them, in step."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs=1):
        self.num_envs = num_envs
        self.single_observation_space = Mock.observation_space
        self.single_action_space = Mock.action_space
        self.observation = np.stack(num_envs * [Mock().observation])

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observation, {}

    def step(self, actions):
        self.t = (self.t + 1) % (Mock.length + 1)  # After the last comes the first.
        zeros = np.zeros(self.num_envs)
        last = np.full(self.num_envs, self.t == Mock.length)
        return self.observation, zeros, last, np.zeros_like(last), {}


for _name in (
    "Catch", "CatchPixels", "Memory", "Bandit", "Masked", "Target", "Mixed", "Xor",
    "Counter",
):  # fmt: skip
    if f"torchbeast/{_name}-v0" not in gymnasium.registry:
        gymnasium.register(
            f"torchbeast/{_name}-v0",
            f"tests.envs:{_name}",
            nondeterministic=_name == "Counter",  # A reset doesn't undo its count.
        )
if "torchbeast/LongMemory-v0" not in gymnasium.registry:
    gymnasium.register(
        "torchbeast/LongMemory-v0", "tests.envs:Memory", kwargs={"delay": 15}
    )
if "torchbeast/Mock-v0" not in gymnasium.registry:
    gymnasium.register(
        "torchbeast/Mock-v0",
        "tests.envs:Mock",
        vector_entry_point="tests.envs:MockVector",
    )
