"""The steps that environments of every kind give, and the errors of the others."""

import asyncio
import copy
import functools
import sys
import traceback

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import (
    AsyncVectorEnv,
    AutoresetMode,
    SyncVectorEnv,
    VectorEnv,
)

from tests import envs
from torchbeast import environment
from torchbeast.batch import Vector
from torchbeast.calls import EnvironmentRaised
from torchbeast.environment import Environment, first_step, leaves, map_structure
from torchbeast.process import BadInput, log
from torchbeast.seeds import derive_seed
from torchbeast.spaces import BadStep

E = 3
FIELDS = {
    "reward": np.float32,
    "done": np.bool_,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "last_action": np.int64,
    "episode_end": np.bool_,
    "episode_step": np.int32,
    "episode_return": np.float32,
    "training_episode_return": np.float32,
}


def episodes(seed):
    """Random episodes: lists of (reward, terminated, truncated)."""
    rng = np.random.default_rng(seed)
    while True:
        episode = [
            [float(rng.integers(-1000, 1000)), False, False]
            for _ in range(rng.integers(1, 8))
        ]
        episode[-1][1:] = [(True, False), (False, True), (True, True)][rng.integers(3)]
        yield episode


class Script(gymnasium.Env):
    """Plays episodes(seed). Observes (episode, step in it, action that led here).

    Writes every observation into the same array, as some environments do.
    """

    observation_space = spaces.Box(-1, 10**6, (3,), np.int64)
    action_space = spaces.Discrete(10)

    def __init__(self, seed):
        self.script = enumerate(episodes(seed))
        self.observation = np.zeros(3, np.int64)
        self.closed = False

    def reset(self, *, seed=None, options=None):
        self.episode, self.steps = next(self.script)
        self.observation[:] = self.episode, 0, -1
        return self.observation, {}

    def step(self, action):
        t = int(self.observation[1])
        self.observation[1:] = t + 1, action
        return self.observation, *self.steps[t], {}

    def close(self):
        self.closed = True


class Old:
    """The spaces of a package like gym, which need not be installed."""

    class Box:
        def __init__(self, low, high, shape, dtype):
            self.low = np.full(shape, low, dtype)
            self.high = np.full(shape, high, dtype)
            self.shape = shape
            self.dtype = np.dtype(dtype)

    class Discrete:
        def __init__(self, n):
            self.n = n

    class MultiDiscrete:
        def __init__(self, nvec):
            self.nvec = np.array(nvec)

    class MultiBinary:
        def __init__(self, n):
            self.n = n

    class Dict:
        def __init__(self, parts):
            self.spaces = parts

    class Tuple:
        def __init__(self, parts):
            self.spaces = parts

    class Graph:
        def __repr__(self):
            return "Graph(old)"


class OldScript:
    """Script with the old Gym API, and nothing more than it must have."""

    observation_space = Old.Box(-1, 10**6, (3,), np.int64)
    action_space = Old.Discrete(10)

    def __init__(self, seed):
        self.env = Script(seed)

    def reset(self):
        return self.env.reset()[0]

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        if truncated and not terminated:
            info["TimeLimit.truncated"] = True
        elif terminated:
            info["TimeLimit.truncated"] = False
        return observation, reward, terminated or truncated, info


KINDS = {
    "single": lambda: Script(0),
    "list": lambda: [Script(e) for e in range(E)],
    "sync": lambda: SyncVectorEnv([functools.partial(Script, e) for e in range(E)]),
    "async": lambda: AsyncVectorEnv([functools.partial(Script, e) for e in range(E)]),
    "old": lambda: [OldScript(e) for e in range(E)],
    "one_old": lambda: OldScript(0),
    "both": lambda: [Script(0), OldScript(1), Script(2)],
}


@pytest.fixture(params=list(KINDS))
def script(request):
    env = Environment(KINDS[request.param]())
    yield env
    env.close()


def expected_steps(seed, actions):
    """What the steps of episodes(seed) must be, written down one after the other."""
    steps = []
    for k, episode in enumerate(episodes(seed)):
        steps.append(dict.fromkeys(FIELDS, 0) | {"done": 1, "observation": [k, 0, -1]})
        score = 0
        for t, (reward, terminated, truncated) in enumerate(episode, 1):
            if len(steps) > len(actions):
                return steps
            action = actions[len(steps) - 1]
            score += reward
            steps.append(
                {
                    "observation": [k, t, action],
                    "reward": reward,
                    "done": 0,
                    "terminated": terminated,
                    "truncated": truncated and not terminated,
                    "last_action": action,
                    "episode_end": terminated or truncated,
                    "episode_step": t,
                    "episode_return": score,
                    "training_episode_return": score,
                }
            )
        if len(steps) > len(actions):
            return steps


def play(env, actions):
    """All steps for actions [N, E, ...], the initial one first."""
    return [env.initial(0)] + [env.step(action) for action in actions]


def random_actions(env, n, seed=0):
    shape = (n, env.num_envs, *env.action_shape)
    high = env.num_actions if env.action_shape else env.num_actions[0]
    return np.random.default_rng(seed).integers(high, size=shape)


# The steps of an episode and of the one after it.


def test_steps_are_those_of_one_episode_after_the_other(script):
    actions = random_actions(script, 80)
    steps = play(script, actions)
    for e in range(script.num_envs):
        expected = expected_steps(e, actions[:, e])
        assert len(steps) == len(expected) == 81
        for t, (step, row) in enumerate(zip(steps, expected)):
            for name, value in row.items():
                np.testing.assert_array_equal(
                    step[name][e], value, err_msg=f"{name} of step {t} of {e}"
                )
    # The script must have had an episode end in each way.
    assert sum(step["terminated"].sum() for step in steps) > 3
    assert sum(step["truncated"].sum() for step in steps) > 3


def test_fields_have_the_shapes_and_types_that_the_docstring_claims(script):
    for step in play(script, random_actions(script, 20)):
        assert set(step) == {"observation", *FIELDS}
        assert step["observation"].shape == (script.num_envs, 3)
        assert step["observation"].dtype == np.int64
        for name, dtype in FIELDS.items():
            assert step[name].shape == (script.num_envs,), name
            assert step[name].dtype == dtype, name


def test_later_steps_do_not_change_earlier_ones(script):
    actions = random_actions(script, 40)
    action = np.zeros_like(actions[0])
    steps, copies = [script.initial()], []
    for next_action in actions:
        copies.append(copy.deepcopy(steps[-1]))
        action[:] = next_action  # The caller uses one array for all its actions, too.
        steps.append(script.step(action))
    script.initial()
    for before, after in zip(copies, steps):
        for name in before:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def test_first_step_is_done_and_has_no_past():
    step = Environment([envs.Counter(), envs.Counter()]).initial()
    assert step["done"].all()
    for name in FIELDS:
        assert name == "done" or not step[name].any(), name


def test_after_a_last_step_the_action_is_ignored():
    env = Environment([envs.Counter(limit=2), envs.Counter(limit=3)])
    steps = play(env, np.ones((5, 2), int))
    np.testing.assert_array_equal(
        [step["observation"] for step in steps],  # (observations, episodes, step).
        [
            [[0, 0, 0], [0, 0, 0]],
            [[1, 0, 1], [1, 0, 1]],
            [[2, 0, 2], [2, 0, 2]],
            [[3, 1, 0], [3, 0, 3]],
            [[4, 1, 1], [4, 1, 0]],
            [[5, 1, 2], [5, 1, 1]],
        ],
    )
    np.testing.assert_array_equal(
        [step["last_action"] for step in steps],
        [[0, 0], [1, 1], [1, 1], [0, 1], [1, 0], [1, 1]],
    )


@pytest.mark.parametrize("terminate", [False, True])
def test_counter_ends_by_truncation_or_by_termination(terminate):
    env = Environment(envs.Counter(limit=4, terminate=terminate))
    steps = play(env, np.zeros((9, 1), int))
    last = [t in (4, 9) for t in range(10)]
    assert [step["terminated"].item() for step in steps] == [
        terminate and x for x in last
    ]
    assert [step["truncated"].item() for step in steps] == [
        not terminate and x for x in last
    ]
    assert [step["episode_return"].item() for step in steps] == [
        *(0, 1, 3, 6, 10),
        *(0, 1, 3, 6, 10),
    ]


def test_initial_starts_over_in_the_middle_of_an_episode():
    env = Environment([envs.Counter(), envs.Counter(limit=3)])
    play(env, np.ones((3, 2), int))
    step = env.initial()
    assert step["done"].all()
    for name in FIELDS:
        assert name == "done" or not step[name].any(), name
    step = env.step(np.ones(2, int))
    assert not step["done"].any()
    np.testing.assert_array_equal(step["observation"][:, 2], [1, 1])
    np.testing.assert_array_equal(step["episode_return"], [1, 1])
    np.testing.assert_array_equal(step["last_action"], [1, 1])


def test_vector_environment_of_gymnasium_with_its_own_autoreset():
    """CartPole's, in numpy. Compared with the same one, stepped bare."""
    kwargs = {"num_envs": E, "max_episode_steps": 25}
    bare = gymnasium.make_vec("CartPole-v1", **kwargs)
    env = Environment(gymnasium.make_vec("CartPole-v1", **kwargs))
    step = env.initial(7)
    np.testing.assert_array_equal(step["observation"], bare.reset(seed=7)[0])
    was_last, length = np.zeros(E, bool), np.zeros(E)
    ends = {"terminated": 0, "truncated": 0}
    for action in random_actions(env, 200):
        observation, reward, terminated, truncated, _ = bare.step(action)
        step = env.step(action)
        length = np.where(was_last, 0, length + 1)
        np.testing.assert_array_equal(step["observation"], observation)
        np.testing.assert_array_equal(step["done"], was_last)
        np.testing.assert_array_equal(step["reward"], np.where(was_last, 0, 1))
        np.testing.assert_array_equal(step["terminated"], terminated)
        np.testing.assert_array_equal(step["truncated"], truncated & ~terminated)
        np.testing.assert_array_equal(step["episode_end"], terminated | truncated)
        np.testing.assert_array_equal(step["episode_step"], length)
        np.testing.assert_array_equal(step["episode_return"], length)
        np.testing.assert_array_equal(step["training_episode_return"], length)
        np.testing.assert_array_equal(
            step["last_action"], np.where(was_last, 0, action)
        )
        for name, dtype in FIELDS.items():
            assert step[name].shape == (E,) and step[name].dtype == dtype, name
        was_last = terminated | truncated
        for name in ends:
            ends[name] += step[name].sum()
    assert min(ends.values()) > 0, ends
    env.close()
    bare.close()


def test_rewards_are_neither_clipped_nor_summed_in_single_precision():
    class Rich(envs.Counter):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, 2.0**24 if self.t == 1 else 1.0, *rest

    env = Environment(Rich(limit=5))
    steps = play(env, np.zeros((5, 1), int))
    assert steps[1]["reward"] == 2**24
    # In float32, 2**24 + 1 is 2**24.
    assert steps[5]["episode_return"] == steps[5]["training_episode_return"]
    assert steps[5]["episode_return"] == 2**24 + 4


# Episodes that are reported, and longer than those that are trained on.


class Lives(VectorEnv):
    """Games of 6 steps and 2 lives; a life lasts 3 steps. The t-th step pays t.

    As atari_wrappers.py has it: a lost life is a termination after which the game, and
    what it pays, goes on.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space = spaces.Discrete(10)
    single_action_space = spaces.Discrete(2)

    def __init__(self, delays):
        self.num_envs = len(delays)
        self.delays = np.array(delays)  # How many steps environment e is behind.

    def reset(self, *, seed=None, options=None):
        self.t = -self.delays % 7
        return self.t.copy(), {}

    def step(self, actions):
        self.t = (self.t + 1) % 7
        end = self.t == 6
        terminated = (self.t == 3) | end
        truncated = np.zeros(self.num_envs, bool)
        return self.t.copy(), self.t * 1.0, terminated, truncated, {"episode_end": end}


def test_reported_episode_goes_on_where_the_environment_says_that_it_did_not_end():
    env = Environment(Lives([0]))
    steps = play(env, np.ones((8, 1), int))

    def values(name):
        return [step[name].item() for step in steps]

    assert values("observation") == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert values("terminated") == [x in "36" for x in "012345601"]
    assert values("done") == [x in "04" for x in "012345601"]
    assert values("episode_end") == [x in "6" for x in "012345601"]
    assert values("episode_step") == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    # A reward at `done` follows an action that nobody took: only the score has it.
    assert values("reward") == [0, 1, 2, 3, 0, 5, 6, 0, 1]
    assert values("episode_return") == [0, 1, 3, 6, 10, 15, 21, 0, 1]
    assert values("training_episode_return") == [0, 1, 3, 6, 0, 5, 11, 0, 1]
    assert values("last_action") == [0, 1, 1, 1, 0, 1, 1, 0, 1]


def test_reported_episodes_of_one_environment_do_not_touch_those_of_another():
    both = Environment(Lives([0, 4]))
    play(both, np.ones((7, 2), int))
    alone = Environment(Lives([0]))
    play(alone, np.ones((7, 1), int))
    for _ in range(20):
        step, expected = both.step(np.ones(2, int)), alone.step(np.ones(1, int))
        for name in FIELDS:
            assert step[name][0] == expected[name][0], name


class Halves(gymnasium.Env):
    """Training episodes of 2 steps; every other one ends the reported one, too."""

    observation_space = spaces.Discrete(10)
    action_space = spaces.Discrete(2)
    resets = -1

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        self.t = 0
        return self.t, {}

    def step(self, action):
        self.t += 1
        last = self.t == 2
        return self.t, 1.0, last, False, {"episode_end": last and self.resets % 2 == 1}


def test_single_environments_say_so_in_their_info():
    env = Environment([Halves(), Halves()])
    env.initial()
    env.env.envs[1].resets = 1  # The second is half an episode ahead.
    steps = [env.step([1, 1]) for _ in range(11)]
    ends = np.array([step["episode_end"] for step in steps])
    # t: 1 2 0 1 2 0 1 2 0 1 2
    np.testing.assert_array_equal(np.flatnonzero(ends[:, 0]), [4, 10])
    np.testing.assert_array_equal(np.flatnonzero(ends[:, 1]), [1, 7])
    for t, e, score in [(4, 0, 4), (10, 0, 4), (1, 1, 2), (7, 1, 4)]:
        assert steps[t]["episode_return"][e] == score
        assert steps[t]["training_episode_return"][e] == 2
    for step in steps:
        np.testing.assert_array_equal(step["terminated"], step["observation"] == 2)


def test_an_environment_that_says_nothing_ends_as_it_does_next_to_one_that_speaks():
    class Silent(Halves):
        def step(self, action):
            return *super().step(action)[:-1], {}

    env = Environment([Halves(), Silent()])
    steps = play(env, np.ones((2, 2), int))
    np.testing.assert_array_equal(steps[2]["terminated"], [True, True])
    np.testing.assert_array_equal(steps[2]["episode_end"], [False, True])


def test_reward_of_a_reset_counts_nowhere():
    """Gymnasium's functional JAX environments give one, phys2d/CartPole-v1 for one."""

    class PaysAtReset(SyncVectorEnv):
        def step(self, actions):
            observation, reward, *rest = super().step(actions)
            return observation, np.ones_like(reward), *rest

    env = Environment(PaysAtReset([envs.Bandit]))
    for step in play(env, np.zeros((6, 1), int)):
        score = 0 if step["done"] else 1
        assert step["reward"] == score
        assert step["training_episode_return"] == score
        assert step["episode_return"] == score


# Observations and actions.


class Sampler(gymnasium.Env):
    """Samples its observations and keeps them, and keeps the actions it was given."""

    def __init__(self, observation_space, action_space, seed=0, length=3):
        self.observation_space = observation_space
        self.action_space = action_space
        self.seed, self.length = seed, length
        self.observations, self.actions = [], []

    def _sample(self):
        if not self.observations:
            self.observation_space.seed(self.seed)
        self.observations.append(self.observation_space.sample())
        return copy.deepcopy(self.observations[-1])

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        self.actions.append(copy.deepcopy(action))
        return self._sample(), 0.0, self.t == self.length, False, {}


def at(nest, path):
    for key in path:
        nest = nest[key]
    return np.asarray(nest)


OBSERVATION_SPACES = {  # To the paths of their leaves.
    "scalar": (spaces.Box(-1, 1, (), np.float32), [()]),
    "float64": (spaces.Box(-np.inf, np.inf, (5,), np.float64), [()]),
    "image": (spaces.Box(0, 255, (6, 7, 3), np.uint8), [()]),
    "int16": (spaces.Box(-300, 300, (2, 3), np.int16), [()]),
    "bool": (spaces.Box(0, 1, (4,), np.bool_), [()]),
    "rank4": (spaces.Box(0, 1, (2, 1, 2, 2), np.float16), [()]),
    "discrete": (spaces.Discrete(5, start=-2), [()]),
    "multi_discrete": (spaces.MultiDiscrete([3, 9]), [()]),
    "multi_discrete_start": (spaces.MultiDiscrete([3, 9], start=[-1, 4]), [()]),
    "multi_discrete_2d": (spaces.MultiDiscrete([[3, 9], [2, 4]]), [()]),
    "multi_binary": (spaces.MultiBinary(6), [()]),
    "dict": (
        spaces.Dict(
            image=spaces.Box(0, 255, (2, 2), np.uint8), speed=spaces.Box(-1, 1, (1,))
        ),
        [("image",), ("speed",)],
    ),
    "tuple": (
        spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,))]),
        [(0,), (1,)],
    ),
    "nested": (
        spaces.Dict(
            a=spaces.Tuple(
                [
                    spaces.Dict(x=spaces.MultiBinary(3), y=spaces.Discrete(2)),
                    spaces.Box(0, 9, (2,), np.int32),
                ]
            ),
            b=spaces.MultiDiscrete([2, 2]),
        ),
        [("a", 0, "x"), ("a", 0, "y"), ("a", 1), ("b",)],
    ),
}


@pytest.mark.parametrize("name", list(OBSERVATION_SPACES))
def test_observations_are_those_of_the_environments_leaf_by_leaf(name):
    space, paths = OBSERVATION_SPACES[name]
    parts = [Sampler(copy.deepcopy(space), spaces.Discrete(2), e) for e in range(2)]
    env = Environment(parts)
    assert env.observation_space == space
    steps = play(env, np.zeros((8, 2), int))
    expected_names = ["/".join(map(str, ("observation", *path))) for path in paths]
    for t, step in enumerate(steps):
        observation = step["observation"]
        names = [name for name, _ in leaves(observation, "observation")]
        assert names == expected_names
        for path in paths:
            leaf = at(observation, path)
            part = functools.reduce(lambda space, key: space[key], path, space)
            assert leaf.dtype == part.dtype
            expected = np.stack([at(p.observations[t], path) for p in parts])
            assert leaf.shape == expected.shape == (2, *part.shape)
            np.testing.assert_array_equal(leaf, expected)


@pytest.mark.parametrize(
    "space, num_actions, shape, start",
    [
        (spaces.Discrete(4), (4,), (), 0),
        (spaces.Discrete(4, start=-7), (4,), (), -7),
        (spaces.MultiDiscrete([2, 3, 5]), (2, 3, 5), (3,), [0, 0, 0]),
        (spaces.MultiDiscrete([2, 3], start=[10, -1]), (2, 3), (2,), [10, -1]),
        (spaces.MultiDiscrete([6]), (6,), (1,), [0]),
    ],
    ids=str,
)
def test_actions_count_from_zero_and_arrive_as_the_space_has_them(
    space, num_actions, shape, start
):
    parts = [Sampler(spaces.Discrete(2), copy.deepcopy(space), e) for e in range(2)]
    env = Environment(parts)
    assert env.num_actions == num_actions
    assert env.action_shape == shape
    assert env.action_space == space
    actions = random_actions(env, 60)
    steps = play(env, actions)
    taken = [
        (t, action) for t, action in enumerate(actions) if not steps[t + 1]["done"][0]
    ]
    assert 40 <= len(taken) < 60
    for e, part in enumerate(parts):
        expected = [action[e] + np.array(start) for _, action in taken]
        np.testing.assert_array_equal(part.actions, expected)
    assert steps[0]["last_action"].shape == (2, *shape)
    for step, action in zip(steps[1:], actions):
        assert step["last_action"].dtype == np.int64
        expected = np.zeros_like(action) if step["done"][0] else action
        np.testing.assert_array_equal(step["last_action"], expected)


def test_actions_of_other_integer_types_and_lists_are_taken():
    env = Environment([envs.Counter(), envs.Counter()])
    env.initial()
    for action in ([1, 1], np.ones(2, np.uint8), np.ones(2, np.int32)):
        step = env.step(action)
        np.testing.assert_array_equal(step["last_action"], [1, 1])
        assert step["last_action"].dtype == np.int64


# Objects of the old Gym API.


class OldSampler:
    """Sampler with old spaces: a 4-tuple from step, a bare observation from reset."""

    def __init__(self, space, old_space, old_action_space):
        self.env = Sampler(space, None)
        self.observation_space = old_space
        self.action_space = old_action_space
        self.actions = []

    def reset(self):
        return self.env.reset()[0]

    def step(self, action):
        self.actions.append(np.array(action))
        return self.env._sample(), 1.0, False, {}


@pytest.mark.parametrize(
    "space, old_space, paths",
    [
        (spaces.Box(0, 255, (4, 3), np.uint8), Old.Box(0, 255, (4, 3), np.uint8), [()]),
        (spaces.Box(-1, 1, (), np.float64), Old.Box(-1, 1, (), np.float64), [()]),
        (spaces.Discrete(7), Old.Discrete(7), [()]),
        (spaces.MultiDiscrete([3, 9]), Old.MultiDiscrete([3, 9]), [()]),
        (spaces.MultiBinary(5), Old.MultiBinary(5), [()]),
        (
            spaces.Dict(
                a=spaces.Tuple([spaces.Discrete(4), spaces.MultiBinary(2)]),
                b=spaces.Box(-1, 1, (2,), np.float32),
            ),
            Old.Dict(
                {
                    "a": Old.Tuple([Old.Discrete(4), Old.MultiBinary(2)]),
                    "b": Old.Box(-1, 1, (2,), np.float32),
                }
            ),
            [("a", 0), ("a", 1), ("b",)],
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_old_spaces_are_read_by_their_names(space, old_space, paths):
    old = OldSampler(space, old_space, Old.MultiDiscrete([2, 3]))
    env = Environment(old)
    assert env.observation_space == space
    assert env.action_space == spaces.MultiDiscrete([2, 3])
    steps = play(env, np.array([[[1, 2]], [[0, 1]]]))
    np.testing.assert_array_equal(old.actions, [[1, 2], [0, 1]])
    for t, step in enumerate(steps):
        for path in paths:
            leaf, expected = (
                at(step["observation"], path),
                at(old.env.observations[t], path),
            )
            part = functools.reduce(lambda space, key: space[key], path, space)
            assert leaf.dtype == part.dtype
            np.testing.assert_array_equal(leaf, expected[None])


def test_old_discrete_space_with_a_start():
    old = OldScript(0)
    old.action_space = Old.Discrete(3)
    old.action_space.start = 4
    env = Environment(old)
    assert env.num_actions == (3,)
    env.initial()
    assert env.step([2])["observation"][0, 2] == 6


def test_old_environment_is_seeded_rendered_and_closed():
    class Full(OldScript):
        calls = []

        def seed(self, seed=None):
            self.calls.append(("seed", seed))

        def render(self, mode="human"):
            self.calls.append(("render", mode))
            return np.full((2, 2, 3), 7, np.uint8)

        def close(self):
            self.calls.append(("close",))

    env = Environment(Full(0))
    env.initial(5)
    env.initial()
    np.testing.assert_array_equal(env.render(), np.full((2, 2, 3), 7))
    env.close()
    assert Full.calls == [
        ("seed", derive_seed(5, 0)),
        ("render", "rgb_array"),
        ("close",),
    ]


def test_old_environment_may_return_what_gym_0_26_did():
    class Late(OldScript):
        def reset(self):
            return self.env.reset()

        def step(self, action):
            return self.env.step(action)

    late, new = Environment(Late(1)), Environment(Script(1))
    actions = random_actions(new, 40)
    for step, expected in zip(play(late, actions), play(new, actions)):
        for name in expected:
            np.testing.assert_array_equal(step[name], expected[name], err_msg=name)


def test_old_observation_that_is_a_pair_is_not_taken_for_one_with_an_info():
    space = spaces.Tuple([spaces.Discrete(4), spaces.Discrete(4)])
    old_space = Old.Tuple([Old.Discrete(4), Old.Discrete(4)])
    old = OldSampler(space, old_space, Old.Discrete(2))
    observation = Environment(old).initial()["observation"]
    assert [x.item() for x in observation] == list(old.env.observations[0])


def test_environment_of_gym_0_26_is_seeded_by_its_reset():
    class Late(OldScript):
        def reset(self, *, seed=None, options=None):
            self.given = seed
            return self.env.reset()

    late = Late(0)
    Environment(late).initial(5)
    assert late.given == derive_seed(5, 0)


def test_wrapped_environment_of_gym_0_26_is_seeded_by_its_reset():
    class Wrapped(OldScript):
        def reset(self, **kwargs):
            self.given = kwargs
            return self.env.reset()

    wrapped = Wrapped(0)
    Environment(wrapped).initial(5)
    assert wrapped.given == {"seed": derive_seed(5, 0)}


# Errors name the thing.


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,)),
        spaces.MultiBinary(3),
        spaces.Dict(a=spaces.Discrete(2)),
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
    ],
    ids=str,
)
def test_unsupported_action_space_is_named(space):
    with pytest.raises(ValueError, match="action space") as error:
        Environment(Sampler(spaces.Discrete(2), space))
    assert str(space) in str(error.value)


@pytest.mark.parametrize(
    "space, path",
    [
        (spaces.Text(5), "observation"),
        (
            spaces.Dict(a=spaces.Discrete(2), b=spaces.Sequence(spaces.Discrete(2))),
            "observation/b",
        ),
        (
            spaces.Dict(
                a=spaces.Tuple([spaces.Dict(x=spaces.Graph(spaces.Discrete(2), None))])
            ),
            "observation/a/0/x",
        ),
        (spaces.Tuple([spaces.Text(5)]), "observation"),
    ],
    ids=str,
)
def test_unsupported_part_of_an_observation_space_is_named(space, path):
    with pytest.raises(ValueError) as error:
        Environment(Sampler(space, spaces.Discrete(2)))
    assert str(error.value).startswith(f"{path} space ")


class Mission(spaces.Space):
    """Text that is no spaces.Text, like MiniGrid's."""

    def __init__(self):
        super().__init__(dtype=str)

    def __eq__(self, other):
        return isinstance(other, Mission)


def test_entries_of_text_are_left_out_and_named():
    class Talks(envs.Counter):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Dict(
                a=spaces.Text(9),
                b=spaces.Tuple([Mission(), spaces.Discrete(9)]),
                c=spaces.Discrete(9, start=4),
            )

        def _observation(self):
            return {"a": "go", "b": ("there", self.t), "c": 4 + self.t}

    env = Environment([Talks(), Talks()])
    assert env.texts == ["observation/a", "observation/b/0"]
    assert env.observation_space == spaces.Dict(
        b=spaces.Tuple([spaces.Discrete(9)]), c=spaces.Discrete(9, start=4)
    )
    for t, step in enumerate(play(env, np.zeros((3, 2), int))):
        assert [(path, x.tolist()) for path, x in leaves(step["observation"])] == [
            ("b/0", [t, t]),
            ("c", [4 + t, 4 + t]),
        ]
    vector = Environment(SyncVectorEnv([Talks, Talks]))
    assert same(vector.initial(0), env.initial(0))


class Returns(envs.Counter):
    """Returns what it is given in place of what it observes and of its reward."""

    def __init__(self, observation=None, reward=1.0, space=None):
        super().__init__()
        self.observation_space = space or spaces.Box(-9, 9, (2, 2), np.float32)
        self.given = observation, reward

    def _observation(self):
        return np.zeros((2, 2), np.float32) if self.given[0] is None else self.given[0]

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self.given[1], *rest


OBSERVATION = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)


@pytest.mark.parametrize(
    "observation",
    [
        OBSERVATION,
        OBSERVATION.astype(">f4"),
        OBSERVATION.astype(np.float64),
        OBSERVATION.astype(np.int64),
        OBSERVATION.tolist(),
        torch.from_numpy(OBSERVATION),
        OBSERVATION[::-1].copy()[::-1],
        np.asfortranarray(OBSERVATION),
    ],
    ids=lambda x: getattr(x, "dtype", type(x).__name__),
)
@pytest.mark.parametrize("vector", [False, True])
def test_observations_become_arrays_as_the_space_declares_them(observation, vector):
    class Vector(VectorEnv):
        metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        num_envs = 2
        single_observation_space = spaces.Box(-9, 9, (2,), np.dtype(">f4"))
        single_action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return observation, {}

    env = Environment(Vector() if vector else Returns(observation))
    x = env.initial(0)["observation"]
    assert x.dtype == np.float32 and x.dtype.isnative and x.flags.c_contiguous
    np.testing.assert_array_equal(x if vector else x[0], OBSERVATION)


@pytest.mark.parametrize(
    "env, words",
    [
        (
            Returns(np.zeros((2, 3))),
            r"^observation is float64 \[2, 3\], expected float32",
        ),
        (
            Returns(OBSERVATION, space=spaces.Box(0, 255, (2, 2), np.uint8)),
            r"^observation is float32 \[2, 2\], expected uint8",
        ),
        (Returns([[1], [2, 3]]), "^observation cannot be an array"),
        (Returns({"a": 1}), "^observation is object"),
        (
            Returns({"a": 1}, space=spaces.Dict(b=spaces.Discrete(2))),
            "^observation/b is not in the observation, a dict",
        ),
        (
            Returns(
                np.full((2, 2), 300, np.uint16), space=spaces.Box(0, 255, (2, 2), "u1")
            ),
            "^observation has numbers that are no uint8: 300",
        ),
        (
            Returns(3, space=spaces.Discrete(3)),
            r"^observation is \[3\], expected 0 to 2",
        ),
        (
            Returns([1, 4], space=spaces.MultiDiscrete([3, 2], start=[0, 2])),
            r"^observation is \[\[1, 4\]\], expected \[0 2\] to \[2 3\]",
        ),
        (Returns(reward=10**400), "^reward is '1000.*, expected one number"),
        (Returns(reward=None), "^reward is 'None', expected one number"),
        (Returns(reward=np.zeros(2)), r"^reward is '\[0. 0.\]', expected one number"),
        (Returns(reward=float("nan")), "^reward of environment 0 is nan"),
    ],
)
def test_what_is_not_as_the_spaces_declare_is_named(env, words):
    with pytest.raises(BadStep, match=words):
        play(Environment(env), [[0]])


def test_a_first_step_unlike_its_space_is_the_users_mistake():
    with pytest.raises(BadInput, match="^environment Returns: observation is float64"):
        first_step(Environment(Returns(np.zeros(3))))


@pytest.mark.parametrize(
    "method, result, words",
    [
        ("reset", np.zeros(3), r"^reset\(\) returned ndarray, expected \(observation"),
        ("step", (1, 2, 3), r"^step\(\) returned 3 things, expected \(observation"),
    ],
)
def test_results_of_another_form_are_named(monkeypatch, method, result, words):
    monkeypatch.setattr(envs.Counter, method, lambda *args, **kwargs: result)
    with pytest.raises(BadStep, match=words):
        play(Environment(envs.Counter()), [[0]])


class Raises(envs.Counter):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def step(self, action):
        raise self.error


def test_what_an_environment_raises_is_its_own_and_the_last_line_names_the_call():
    env = Environment(Raises(KeyError("x")))
    env.initial()
    with pytest.raises(KeyError) as raised:
        env.step([0])
    assert raised.value is env.env.envs[0].error
    lines = traceback.format_exception(raised.value)
    if sys.version_info >= (3, 11):
        assert lines[-1] == "step() of Raises raised KeyError: 'x'\n"


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError()])
def test_what_is_no_exception_becomes_one(error):
    env = Environment(Raises(error))
    env.initial()
    with pytest.raises(
        EnvironmentRaised, match=r"^step\(\) of Raises raised "
    ) as raised:
        env.step([0])
    assert raised.value.__cause__ is error


def test_what_close_raises_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(envs.Counter, "close", lambda self: raises(OSError("again")))
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    Environment([envs.Counter(), envs.Counter()]).close()
    assert "close() of Counter raised OSError: again" in caplog.text


# What is read of an info, and nothing else.


class Talkative(envs.Counter):
    """Episodes of two steps, with whatever info it is given."""

    def __init__(self, info):
        super().__init__(limit=2)
        self.info = info

    def step(self, action):
        return *super().step(action)[:-1], self.info


@pytest.mark.parametrize(
    "info", [None, {}, {"x": None}, {"x": np.zeros(3)}, {"x": "text"}, {3: object()}]
)
def test_the_rest_of_an_info_is_not_looked_at(info):
    env = Environment([Talkative({"x": 1.0}), Talkative(info), Talkative({"x": "x"})])
    play(env, np.zeros((7, 3), int))
    assert env.take_metrics() == []


@pytest.mark.parametrize("kind", [list, SyncVectorEnv])
def test_metrics_of_an_episode_are_kept_until_they_are_taken(kind):
    parts = [
        {"episode_metrics": {"success": True, "coins": np.int32(3)}},
        {"other": 1},
        {"episode_metrics": {"success": 0.0}},
    ]
    makers = [functools.partial(Talkative, info) for info in parts]
    env = Environment(kind(m() if kind is list else m for m in makers))
    play(env, np.zeros((1, 3), int))
    assert env.take_metrics() == []
    env.step([0, 0, 0])  # The last of their episodes.
    expected = [{"success": 1.0, "coins": 3.0}, {"success": 0.0}]
    assert [m for m in env.take_metrics() if m] == expected
    assert env.take_metrics() == []


@pytest.mark.parametrize(
    "metrics",
    [
        3,
        "text",
        {"x": 10**400},
        {"\udce9": 1},
        {"x": "y"},
        {"x": None},
        {"a b": 1},
        {3.5: [1, 2]},
        {"x": np.nan},
    ],
)
def test_metrics_that_are_no_numbers_are_left_out_and_logged_once(
    metrics, caplog, monkeypatch
):
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    metrics = {**metrics, "good": 1} if isinstance(metrics, dict) else metrics
    env = Environment([Talkative({"episode_metrics": metrics}) for _ in range(2)])
    play(env, np.zeros((8, 2), int))
    assert all(m == {"good": 1.0} for m in env.take_metrics())
    assert caplog.text.count("expected names of finite numbers: left out") == 1


def test_an_object_of_the_old_api_may_return_no_info_and_have_no_signature():
    class Builtin(OldScript):
        reset = property(lambda self: functools.partial(next, iter([np.zeros(3, int)])))

        def step(self, action):
            return np.zeros(3, int), 1.0, True, None

    step = play(Environment(Builtin(0)), [[0]])[1]
    assert step["terminated"] and not step["truncated"]


def test_unsupported_old_space_is_named():
    old = OldScript(0)
    old.observation_space = Old.Dict({"a": Old.Graph()})
    with pytest.raises(ValueError, match=r"Graph\(old\)"):
        Environment(old)


@pytest.mark.parametrize("action", [0, [0], [0, 0, 0], [[0], [0]]], ids=str)
def test_action_of_another_shape_is_refused(action):
    env = Environment([envs.Counter(), envs.Counter()])
    env.initial()
    with pytest.raises(ValueError, match="action has shape") as error:
        env.step(np.array(action))
    assert str(np.shape(action)) in str(error.value)
    assert "(2,)" in str(error.value)


@pytest.mark.parametrize(
    "env, words",
    [([], "no environment"), ([SyncVectorEnv([envs.Catch])], "not in a list")],
)
def test_list_of_anything_but_single_environments_is_refused(env, words):
    with pytest.raises(BadInput, match=words):
        Environment(env)


def test_step_before_initial_is_refused():
    with pytest.raises(RuntimeError, match="before Environment.initial"):
        Environment(envs.Counter()).step([0])


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_vector_environment_with_another_autoreset_is_refused(mode):
    env = SyncVectorEnv([envs.Counter], autoreset_mode=mode)
    with pytest.raises(ValueError, match=f"mode {mode.value}.*NEXT_STEP"):
        Environment(env)


@pytest.mark.parametrize("missing", ["reset", "step", "action_space"])
def test_object_that_is_no_environment_is_refused(missing):
    class Thing:
        pass

    for name in {"reset", "step", "observation_space", "action_space"} - {missing}:
        setattr(Thing, name, None)
    with pytest.raises(ValueError, match=f"Thing is neither .* no {missing}"):
        Environment(Thing())
    with pytest.raises(ValueError, match=f"Thing is neither .* no {missing}"):
        Environment([envs.Counter(), Thing()])


@pytest.mark.parametrize(
    "env_id, close",
    [
        ("CartPole-v7", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("CratPole-v1", "CartPole-v1"),
        ("torchbeast/Cach-v0", "torchbeast/Catch-v0"),
        ("nobody/CartPole-v1", "CartPole-v1"),
    ],
)
def test_unknown_id_comes_with_close_ones(env_id, close):
    with pytest.raises(ValueError, match="did you mean") as error:
        environment.make(env_id)
    message = str(error.value)
    assert repr(env_id) in message
    assert close in message.split("did you mean")[1]
    assert "\n" not in message


def test_unknown_id_that_is_close_to_none_comes_without():
    with pytest.raises(ValueError, match="^unknown environment '0123456789'$"):
        environment.make("0123456789")


def raises(error):
    raise error


@pytest.mark.parametrize(
    "error",
    [
        gymnasium.error.DependencyNotInstalled("needs\n  a thing"),
        ImportError("needs\n  a thing"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_environment_that_cannot_be_made_says_why_in_one_line(monkeypatch, error):
    spec = gymnasium.envs.registration.EnvSpec(
        "Broken-v0", entry_point=lambda **kwargs: raises(error)
    )
    monkeypatch.setitem(gymnasium.registry, "Broken-v0", spec)
    with pytest.raises(ValueError) as raised:
        environment.make("Broken-v0")
    message = "environment 'Broken-v0' cannot be made: "
    assert str(raised.value).startswith(message)
    assert "needs a thing" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_module_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="no_such_module"):
        environment.make("no_such_module:Some-v0")


def test_environment_is_made_with_a_render_mode_only_if_asked_to():
    # Counter has no argument render_mode.
    first, second = environment.make("torchbeast/Counter-v0", num_envs=2)
    assert first.render_mode is None and first is not second
    np.testing.assert_array_equal(first.reset()[0], [0, 0, 0])
    [env] = environment.make("CartPole-v1", render_mode="rgb_array")
    assert env.render_mode == "rgb_array"


@pytest.mark.filterwarnings("ignore:.*out of date")
def test_vector_environment_that_an_id_has_of_its_own_is_used():
    env = Environment(environment.make("CartPole-v0", num_envs=3))
    assert isinstance(env.env, Vector) and env.num_envs == 3
    assert env.env.env.unwrapped.max_episode_steps == 200  # As registered.


# Seeds.


def same(a, b):
    return all(np.array_equal(x, y) for (_, x), (_, y) in zip(leaves(a), leaves(b)))


@pytest.mark.parametrize("make", [envs.Catch, envs.Memory, envs.Bandit])
def test_same_seed_gives_the_same_episodes_and_another_seed_others(make):
    env = Environment([make() for _ in range(4)])
    actions = random_actions(env, 60)
    first, second, other = (
        [env.initial(seed)] + [env.step(action) for action in actions]
        for seed in (3, 3, 100)
    )
    assert all(same(a, b) for a, b in zip(first, second))
    assert not all(same(a, b) for a, b in zip(first, other))


def test_every_environment_has_a_seed_of_its_own():
    class Keeps(envs.Counter):
        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            return super().reset(seed=seed)

    seeds = []
    for stream_seed in range(50):
        Environment([Keeps() for _ in range(16)]).initial(stream_seed)
    assert len(set(seeds)) == 50 * 16


def test_environments_of_one_vector_have_different_seeds():
    env = Environment([envs.Catch() for _ in range(16)])
    balls = env.initial(0)["observation"][:, 0].argmax(axis=1)
    assert len(set(balls)) > 1
    # Each environment has its own, whatever their number.
    alone = Environment([envs.Catch() for _ in range(5)])
    balls_of_5 = alone.initial(0)["observation"][:, 0].argmax(axis=1)
    np.testing.assert_array_equal(balls[:5], balls_of_5)


def test_without_a_seed_episodes_differ():
    env = Environment([envs.Catch() for _ in range(16)])
    first, second = env.initial()["observation"], env.initial()["observation"]
    assert not np.array_equal(first, second)


# What else an Environment tells, and how it ends.


def test_render_gives_the_frame_of_the_first_environment():
    class Painted(envs.Counter):
        metadata = {"render_modes": ["rgb_array"], "render_fps": 12}
        render_mode = "rgb_array"

        def __init__(self, color):
            super().__init__()
            self.color = color

        def render(self):
            return np.full((4, 5, 3), self.color, np.uint8)

    env = Environment([Painted(1), Painted(2)])
    np.testing.assert_array_equal(env.render(), np.full((4, 5, 3), 1, np.uint8))
    assert env.fps == 12
    assert env.frames_per_step == 1
    assert env.num_envs == 2


def test_close_closes_every_environment():
    parts = [Script(0), Script(1)]
    Environment(parts).close()
    assert all(part.closed for part in parts)


# Nests.

NEST = {"a": (1, {"x": 2, "y": (3, 4)}), "b": 5}


def test_leaves_are_in_order_with_their_paths():
    paths = ["a/0", "a/1/x", "a/1/y/0", "a/1/y/1", "b"]
    assert leaves(NEST) == list(zip(paths, [1, 2, 3, 4, 5]))
    assert leaves(NEST, "top")[0] == ("top/a/0", 1)
    assert leaves(7) == [("", 7)]
    assert leaves(7, "top") == [("top", 7)]
    assert leaves({}) == leaves(()) == []


def test_map_structure_keeps_the_structure():
    assert map_structure(lambda x: -x, NEST) == {
        "a": (-1, {"x": -2, "y": (-3, -4)}),
        "b": -5,
    }
    assert map_structure(lambda x: -x, 3) == -3


def test_map_structure_goes_through_several_nests_together():
    tens = map_structure(lambda x: 10 * x, NEST)
    assert map_structure(lambda x, y, z: x + y + z, NEST, tens, tens) == (
        map_structure(lambda x: 21 * x, NEST)
    )
    # By key, not by position.
    assert map_structure(lambda x, y: (x, y), {"a": 1, "b": 2}, {"b": 3, "a": 4}) == {
        "a": (1, 4),
        "b": (2, 3),
    }
