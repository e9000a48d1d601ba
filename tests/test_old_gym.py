"""Objects of the old Gym API."""

import collections
import functools
import sys
from types import ModuleType, SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tests.test_environment import Old, OldScript, Script, play, random_actions
from tests.test_spaces import Sampler, at
from torchbeast.environment import Environment, make
from torchbeast.messages import BadInput
from torchbeast.old_gym import OldGym, as_space
from torchbeast.seeds import derive_seed


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
    assert env.action_space.n == 3
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


def test_old_environment_may_render_in_one_mode_only():
    class Frames(OldScript):
        def render(self):
            return np.full((2, 2, 3), 7, np.uint8)

    env = Environment(Frames(0))
    env.initial()
    np.testing.assert_array_equal(env.render(), np.full((2, 2, 3), 7))


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

    class Wrapped(OldScript):
        def reset(self, **kwargs):
            self.given = kwargs["seed"]
            return self.env.reset()

    class Remembers(Late):
        seed = 7

    for env in Late(0), Wrapped(0), Remembers(0):
        Environment(env).initial(5)
        assert env.given == derive_seed(5, 0)


def test_an_object_of_the_old_api_may_return_no_info_and_have_no_signature():
    class Builtin(OldScript):
        reset = property(lambda self: functools.partial(next, iter([np.zeros(3, int)])))

        def step(self, action):
            return np.zeros(3, int), 1.0, True, None

    step = play(Environment(Builtin(0)), [[0]])[1]
    assert step["terminated"] and not step["truncated"]


def test_an_old_box_may_be_called_box_space():
    """Crafter's are, where there is no gym."""
    names = "low", "high", "shape", "dtype"
    box = collections.namedtuple("BoxSpace", names)(0, 255, (8, 8, 3), np.uint8)
    assert as_space(box) == spaces.Box(0, 255, (8, 8, 3), np.uint8)
    assert as_space(collections.namedtuple("DiscreteSpace", "n")(4)).n == 4


def test_unsupported_old_space_is_named():
    old = OldScript(0)
    old.observation_space = Old.Dict({"a": Old.Graph()})
    with pytest.raises(ValueError, match=r"Graph\(old\)"):
        Environment(old)


def test_an_environment_of_pettingzoo_is_named():
    """Its spaces are methods."""

    class Pistonball:
        possible_agents = ["piston_0", "piston_1"]
        reset = step = observation_space = action_space = None

    with pytest.raises(BadInput, match="environment Pistonball: it is PettingZoo's"):
        OldGym(Pistonball())
    with pytest.raises(BadInput, match="environment Pistonball: it is PettingZoo's"):
        Environment([OldScript(0), Pistonball()])


@pytest.fixture
def registry():
    before = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


@pytest.mark.parametrize("old", ["env_specs", None])
def test_one_that_the_old_gym_has_says_how_to_register_it(old, monkeypatch):
    gym, ids = ModuleType("gym"), {"Crafted-v1": None}
    gym.envs = SimpleNamespace(registry=SimpleNamespace(env_specs=ids) if old else ids)
    monkeypatch.setitem(sys.modules, "gym", gym)
    with pytest.raises(BadInput, match="of the old Gym API: register a function that"):
        make("tests.envs:Crafted-v1")
    with pytest.raises(BadInput, match="json registers none like it$"):
        make("json:Nothing-v7")


def test_a_registered_one_says_how_to_register_it(registry):
    gymnasium.register("Old-v0", entry_point=lambda: OldScript(0))
    with pytest.raises(BadInput, match="of the old Gym API: register a function that"):
        make("Old-v0")
    gymnasium.register("Wrapped-v0", entry_point=lambda: OldGym(OldScript(0)))
    assert play(Environment(make("Wrapped-v0")), [[0]])[1]["reward"].shape == (1,)
