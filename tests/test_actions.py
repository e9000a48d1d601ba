"""Actions of every kind, from the agent to the environment."""

import copy
from collections import OrderedDict

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import polybeast
from tests.envs import Target
from tests.programs import main, read_logs, succeeds
from tests.test_agent import parse
from tests.test_spaces import Sampler
from torchbeast.environment import Environment
from torchbeast.messages import BadInput
from torchbeast.nests import leaves, map_structure
from torchbeast.old_gym import as_space
from torchbeast.spaces import Actions

LOW = np.array([-1, -np.inf, 0, -np.inf])
HIGH = np.array([1, 0, np.inf, np.inf])
SPACES = {
    "box": spaces.Box(-2, 3, (2, 2)),
    "number": spaces.Box(-1, 1, ()),
    "float64": spaces.Box(LOW, HIGH, dtype=np.float64),
    "float16": spaces.Box(-1, 1, (3,), np.float16),
    "between": spaces.Box(np.array([-0.1, 0.1]), np.full(2, 0.1), None, np.float64),
    "integers": spaces.Box(np.array([-3, 0]), np.array([2, 255]), dtype=np.int16),
    "integer": spaces.Dict(a=spaces.Box(5, 9, (), np.uint8)),
    "far": spaces.Box(2**62, 2**62 + 4, (2,), np.int64),
    "order": spaces.Tuple(
        [spaces.Dict(OrderedDict(b=spaces.Discrete(2), a=spaces.Discrete(3)))]
    ),
    "huge": spaces.Box(-1e300, 1e300, (2,), np.float64),
    "tuple": spaces.Tuple((spaces.Discrete(3, start=5), spaces.Box(-1, 1, (2,)))),
    "dict": spaces.Dict(
        hand=spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([[2], [3]])]),
        arm=spaces.Box(LOW.astype(np.float32), HIGH.astype(np.float32)),
    ),
}
every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


def play(space, num_envs=2, num_steps=40):
    """Returns (the environments, the steps, the agent's actions)."""
    space = copy.deepcopy(space)
    parts = [Sampler(spaces.Discrete(2), space, seed=e) for e in range(num_envs)]
    env = Environment(parts)
    agent = polybeast.Agent(parse(), env.observation_space, env.action_space)
    steps, actions = [env.initial(0)], []
    for _ in range(num_steps):
        step = map_structure(lambda x: torch.from_numpy(x)[None], steps[-1])
        outputs, _ = agent.act(step, ())
        actions.append(map_structure(lambda x: 3 * x[0].numpy(), outputs["action"]))
        for (_, x), leaf in zip(leaves(actions[-1]), env.actions.leaves):
            if leaf.num_choices is not None:
                x //= 3  # Only a Box is left now and then.
        steps.append(env.step(actions[-1]))
    return parts, steps, actions


@every_space
def test_environments_get_actions_of_their_space_whatever_the_agent_does(space):
    parts, steps, actions = play(space)  # A Sampler asserts that they are.
    for e, part in enumerate(parts):
        taken = [a for step, a in zip(steps[1:], actions) if not step["done"][e]]
        assert len(part.actions) == len(taken) == 30
        for got, sent in zip(part.actions, taken):
            pairs = zip(leaves(got), leaves(sent), Actions(space, 1).leaves)
            for (path, x), (_, y), leaf in pairs:
                x, y = np.asarray(x), y[e]
                assert x.dtype == leaf.space.dtype, path
                if leaf.num_choices is None:
                    y = np.clip(y, leaf.space.low, leaf.space.high)
                elif isinstance(leaf.space, spaces.Box):
                    y = y + leaf.space.low
                else:
                    y = y + getattr(leaf.space, "start", 0)
                np.testing.assert_allclose(x, y, rtol=1e-3, err_msg=path)


@every_space
def test_the_last_action_is_the_one_taken_and_zero_where_an_episode_begins(space):
    _, steps, actions = play(space)
    for step, action in zip(steps[1:], actions):
        triples = zip(
            leaves(step["last_action"]), leaves(action), Actions(space, 1).leaves
        )
        for (path, last), (_, sent), leaf in triples:
            assert last.dtype == leaf.dtype, path
            expected = leaf.clip(sent).copy()
            expected[step["done"]] = 0
            np.testing.assert_array_equal(last, expected, err_msg=path)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros(2, np.int64), "action/a is not in the action, a ndarray"),
        ({"b": np.zeros(2)}, "action/a is not in the action, a dict"),
        (
            {"a": np.zeros(2), "b": np.zeros((2, 2))},
            "action/a is float64 [2], expected int64 [2]",
        ),
        (
            {"a": np.zeros(2, int), "b": np.zeros((2, 1))},
            "action/b is float64 [2, 1], expected float32 [2, 2]",
        ),
        (
            {"a": np.array([0, 2]), "b": np.zeros((2, 2))},
            "action/a [0, 2] is out of bounds, expected 0 to less than 2",
        ),
        (
            {"a": np.zeros(2, int), "b": np.full((2, 2), np.nan)},
            "action/b [[nan, nan], [nan, nan]] is out of bounds, expected finite "
            "numbers",
        ),
    ],
)
def test_an_action_that_is_none_is_named(action, message):
    space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (2,)))
    env = Environment([Sampler(spaces.Discrete(2), space) for _ in range(2)])
    env.initial()
    with pytest.raises(ValueError) as error:
        env.step(action)
    assert str(error.value) == message


def test_bytes_that_are_no_action_are_named():
    space = spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,))))
    actions = Actions(space, 1)
    choice, numbers = np.zeros(1, np.int64), np.zeros((1, 2), np.float32)
    good = actions.from_bytes([choice.tobytes(), numbers.tobytes()])
    assert [x.dtype for x in good] == [np.int64, np.float32]
    for data, message in (
        ([choice.tobytes()], "the action has 1 arrays, expected 2"),
        ([choice.tobytes(), b"1234"], "action/1 has 4 bytes, expected 8"),
        ([choice.tobytes(), (numbers + np.nan).tobytes()], "expected finite numbers"),
        (
            [(choice + 2).tobytes(), numbers.tobytes()],
            r"action/0 \[2\] is out of bound",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            actions.from_bytes(data)


def test_numbers_that_a_small_dtype_cannot_hold_become_its_largest():
    actions = Actions(spaces.Box(-np.inf, np.inf, (1,), np.float16), 1)
    given, taken = actions.to_environment(np.array([[1e6]]))
    assert given.dtype == np.float16 and given == taken == np.finfo(np.float16).max


def test_keys_that_are_no_strings_are_refused():
    space = spaces.Dict({1: spaces.Discrete(2)})
    for args in ((spaces.Discrete(2), space), (space, spaces.Discrete(2))):
        with pytest.raises(BadInput, match="space has the key 1, expected strings"):
            Environment(Sampler(*args))


def test_a_vector_environment_gets_its_own_kind_of_actions():
    seen = []

    class Seen(Target):
        def step(self, action):
            seen.append(action.copy())
            return super().step(action)

    env = Environment(gymnasium.vector.SyncVectorEnv([Seen, Seen]))
    env.initial(0)
    step = env.step(np.array([[15.0], [99.0]]))
    np.testing.assert_array_equal(step["last_action"], [[15], [30]])
    np.testing.assert_array_equal(seen, [[15], [30]])


def test_old_gyms_spaces_of_actions_are_taken():
    class Box:
        low, high, shape, dtype = -np.ones(2), np.ones(2), (2,), np.float32

    class Tuple:
        spaces = (Box(),)

    assert as_space(Tuple()) == spaces.Tuple([spaces.Box(-1, 1, (2,))])


@pytest.mark.parametrize("mode", ["serial", "actors", "servers"])
def test_actions_of_mixed_kinds_go_through_whole_programs(mode, tmp_path):
    args = [
        "--env", "tests.envs:torchbeast/Mixed-v0", "--savedir", tmp_path, "--xpid",
        "x", "--unroll_length", 5, "--batch_size", 4,
        "--log_interval_steps", 100,
    ]  # fmt: skip
    size = {"serial": ["--num_actors", 0], "actors": ["--num_actors", 1],
            "servers": ["--num_servers", 1]}[mode]  # fmt: skip
    module = "polybeast" if mode == "servers" else "monobeast"
    succeeds(*args, *size, "--use_lstm", "--total_steps", 400, module=module)
    rows = read_logs(tmp_path / "x")
    assert int(rows[-1]["step"]) >= 400
    result = main(*args, "--mode", "test", "--num_test_episodes", 3, module=module)
    assert result.returncode == 0 and "3 episodes: mean return" in result.stdout
