"""The steps that environments of every kind give, and the errors of the others."""

import copy
import functools

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import (
    AsyncVectorEnv,
    AutoresetMode,
    SyncVectorEnv,
    VectorEnv,
)

from tests import envs
from torchbeast.environment import Environment
from torchbeast.messages import log
from torchbeast.nests import leaves, map_structure

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
    (action,) = env.actions.leaves
    shape = (n, env.num_envs, *action.shape)
    return np.random.default_rng(seed).integers(action.num_choices, size=shape)


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
    assert caplog.text.count("without spaces, commas and quotes: left out") == 1


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
