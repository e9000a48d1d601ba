"""What observations and actions become, and the errors of spaces and steps."""

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
    AutoresetMode,
    SyncVectorEnv,
    VectorEnv,
)

from tests import envs
from tests.test_environment import play, random_actions, same
from tests.test_make import raises
from torchbeast import hints
from torchbeast.calls import EnvironmentRaised
from torchbeast.environment import Environment, first_step
from torchbeast.messages import BadInput, log
from torchbeast.nests import leaves
from torchbeast.spaces import BadStep


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
    "space, num_choices, start",
    [
        (spaces.Discrete(4), 4, 0),
        (spaces.Discrete(4, start=-7), 4, -7),
        (spaces.MultiDiscrete([2, 3, 5]), [2, 3, 5], [0, 0, 0]),
        (spaces.MultiDiscrete([2, 3], start=[10, -1]), [2, 3], [10, -1]),
        (spaces.MultiDiscrete([6]), [6], [0]),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), [[2, 3], [4, 5]], 0),
        (spaces.MultiBinary(3), [2, 2, 2], 0),
        (spaces.MultiBinary((2, 2)), [[2, 2], [2, 2]], 0),
    ],
    ids=str,
)
def test_actions_count_from_zero_and_arrive_as_the_space_has_them(
    space, num_choices, start
):
    parts = [Sampler(spaces.Discrete(2), copy.deepcopy(space), e) for e in range(2)]
    env = Environment(parts)
    assert env.actions.leaves[0].num_choices.tolist() == num_choices
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
    assert steps[0]["last_action"].shape == (2, *np.shape(num_choices))
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


# Errors name the thing.


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Box(0, 2**16, (2,), np.int32),
        spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
        spaces.Box(2**63, 2**63 + 4, (2,), np.uint64),
        spaces.Box(0, 1, (2, 0)),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Tuple([]),
    ],
    ids=str,
)
@pytest.mark.parametrize("nest", [lambda s: s, lambda s: spaces.Dict(a=s)])
def test_unsupported_action_space_is_named(space, nest):
    with pytest.raises(BadInput, match="is not supported: use Discrete") as error:
        Environment(Sampler(spaces.Discrete(2), nest(space)))
    assert f"action space {space} " in str(error.value)


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
            r"observation is float64 \[2, 3\], expected float32",
        ),
        (
            Returns(OBSERVATION, space=spaces.Box(0, 255, (2, 2), np.uint8)),
            r"observation is float32 \[2, 2\], expected uint8",
        ),
        (Returns([[1], [2, 3]]), "observation cannot be an array"),
        (Returns({"a": 1}), "observation is object"),
        (
            Returns({"a": 1}, space=spaces.Dict(b=spaces.Discrete(2))),
            "observation/b is not in the observation, a dict",
        ),
        (
            Returns(
                np.full((2, 2), 300, np.uint16), space=spaces.Box(0, 255, (2, 2), "u1")
            ),
            "observation has numbers that are no uint8: 300",
        ),
        (
            Returns(np.array([-200, 3]), space=spaces.Box(-100, 100, (2,), np.int8)),
            "observation has numbers that are no int8: -200",
        ),
        (
            Returns(3, space=spaces.Discrete(3)),
            r"observation is \[3\], expected 0 to 2",
        ),
        (
            Returns([1, 4], space=spaces.MultiDiscrete([3, 2], start=[0, 2])),
            r"observation is \[\[1, 4\]\], expected \[0 2\] to \[2 3\]",
        ),
        (Returns(reward=10**400), "reward is '1000.*, expected one number"),
        (Returns(reward=None), "reward is 'None', expected one number"),
        (Returns(reward=np.zeros(2)), r"reward is '\[0. 0.\]', expected one number"),
        (Returns(reward=float("nan")), "reward of environment 0 is nan"),
        (
            Returns(reward=1e39),
            r"reward of environment 0 is 1e\+39, expected a finite float32",
        ),
        (
            Returns([0.0, -1e300], space=spaces.Box(-np.inf, np.inf, (2,), np.float64)),
            r"observation of environment 0 is -1e\+300, expected a finite float32",
        ),
    ],
)
def test_what_is_not_as_the_spaces_declare_is_named(env, words):
    with pytest.raises(BadStep, match=f"^environment Returns: {words}"):
        play(Environment(env), [[0]])


def test_a_first_step_unlike_its_space_is_the_users_mistake():
    with pytest.raises(BadInput, match="^environment Returns: observation is float64"):
        first_step(Environment(Returns(np.zeros(3))))


@pytest.mark.parametrize(
    "method, result, words",
    [
        ("reset", np.zeros(3), r"reset\(\) returned ndarray, expected \(observation"),
        ("step", (1, 2, 3), r"step\(\) returned 3 things, expected \(observation"),
    ],
)
def test_results_of_another_form_are_named(monkeypatch, method, result, words):
    monkeypatch.setattr(envs.Counter, method, lambda *args, **kwargs: result)
    with pytest.raises(BadStep, match=f"^environment Counter: {words}"):
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


@pytest.mark.parametrize(
    "error", [SystemExit(0), asyncio.CancelledError(), StopIteration()]
)
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


def test_numbers_beyond_a_declared_box_are_told_of_but_not_what_rounding_does():
    box = spaces.Box(0, 1, (2, 2), np.float32)
    space = spaces.Dict({"image": box, "far": spaces.Box(-np.inf, np.inf, (1,))})
    x = {"image": np.full((3, 2, 2), 1.0000001), "far": np.full((3, 1), 1e30)}
    assert list(hints.outside(space, x)) == []
    x["image"][1, 0, 0] = 255
    [line] = hints.outside(space, x)
    assert line == (
        "observation/image has numbers from 1 to 255, its space declares 0 to 1"
    )
