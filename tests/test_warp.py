"""Environments on the device: what they do, beside references, and how they step."""

import argparse
import inspect
import math
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces

import warp_envs
from tests import warp_references
from torchbeast import environment
from torchbeast.messages import BadInput
from torchbeast.nests import leaves, map_structure
from torchbeast.warp import autoreset, consistency
from torchbeast.warp.check import check
from torchbeast.warp.host import HostEnvironment

CPU = torch.device("cpu")
SMALL_TAG = dict(num_taggers=3, num_runners=5, size=4.0, max_steps=40, num_nearest=4,
                 tagging_distance=0.06, edge_cost=0.2, tagger_skill=0.9)  # fmt: skip
ENVS = {
    "CartPole": ("CartPole", {}),
    "MountainCar": ("MountainCar", {}),
    "Acrobot": ("Acrobot", {}),
    "Pendulum": ("Pendulum", {}),
    "Catch": ("Catch", {}),
    "grid": ("TagGridWorld", dict(size=4, max_steps=30)),
    "partial grid": ("TagGridWorld", dict(size=4, observation="partial")),
    "fixed grid": ("TagGridWorld", dict(size=6, random_starts=False)),
    "levels": ("Tag", SMALL_TAG),
    "numbers": ("Tag", {**SMALL_TAG, "actions": "numbers"}),
}


def make(name, **kwargs):
    return autoreset.make(f"warp/{name}", **kwargs)


@pytest.mark.parametrize("case", ENVS)
def test_an_environment_is_its_reference(case):
    name, args = ENVS[case]
    env, reference = make(name, **args), getattr(warp_references, name)(**args)
    check(env)
    consistency.compare(env, reference, num_envs=3, num_steps=60)


def constants():
    """(case, name, index or None) of all numbers that an environment is made of."""
    for case in ("CartPole", "MountainCar", "Acrobot", "Pendulum", "Catch", "grid",
                 "levels"):  # fmt: skip
        name, args = ENVS[case]
        env = make(name, **args)
        of_class = dict(inspect.getmembers(type(env)))
        for key, x in {**of_class, **vars(env)}.items():
            if key.startswith("_") or key in ("num_uniforms", "num_agents"):
                continue
            numbers = x if isinstance(x, tuple) else (x,)
            for i, y in enumerate(numbers):
                if type(y) in (int, float):
                    yield case, key, i if isinstance(x, tuple) else None
            if torch.is_tensor(x) and x.is_floating_point():
                yield case, key, None


@pytest.mark.parametrize(("case", "key", "index"), list(constants()))
def test_a_constant_that_is_1_percent_off_is_found(case, key, index):
    name, args = ENVS[case]
    env, reference = make(name, **args), getattr(warp_references, name)(**args)

    def off(x):
        return x + 1 if type(x) is int else 1.01 * x

    if key == "max_steps":
        env.max_steps = reference.max_steps = 20
    x = getattr(env, key)
    if index is not None:
        x = tuple(off(y) if i == index else y for i, y in enumerate(x))
    setattr(env, key, x if index is not None else off(x))
    with pytest.raises((consistency.Mismatch, RuntimeError, IndexError)):
        for seed in range(10):  # Some matter rarely.
            consistency.compare_steps(env, reference, 32, 50, seed, torch.float64, CPU)


class OtherCartPole(warp_references.CartPole):
    def __init__(self):
        super().__init__()
        self.env.gravity = 9.7


def test_the_first_difference_is_named():
    env, reference = make("CartPole"), warp_references.CartPole()
    env.gravity = 9.9
    expected = r"move\(\): state/x differs at step 0, environment 0, agent 0: "
    with pytest.raises(consistency.Mismatch, match=expected):
        consistency.compare(env, reference)


def test_the_command_compares(capsys):
    args = ["warp/CartPole", "tests.warp_references:CartPole", "--num_steps", "5"]
    assert consistency.main(args) == 0
    assert "are the same" in capsys.readouterr().out
    args[1] = "tests.test_warp:OtherCartPole"
    assert consistency.main(args) == 1
    assert "move(): state/x differs at step 0, env" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["warp/Nothing", "tests.warp_references:CartPole"], "unknown environment"),
        (["warp/CartPole", "tests.warp_references"], "expected MODULE:CLASS"),
        (["warp/CartPole", ":X"], "reference ':X', expected MODULE:CLASS"),
        (["warp/CartPole", "tests.warp_references:Tag", "--env_args", "x=1"], "no arg"),
        (["warp/CartPole", "a:B", "--device", "foo"], "--device foo: expected cpu"),
    ],
)
def test_bad_input_of_the_command_is_one_line(args, error, capsys):
    assert consistency.main(args) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert error in line


def reference_with(change):
    """CartPole's, whose move() returns what change() makes of its reward."""

    class Changed(warp_references.CartPole):
        def move(self, state, action):
            state, reward, *flags = super().move(state, action)
            return state, change(reward), *flags

    return Changed()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda reward: reward * np.nan, "of the reference np.float64\\(nan\\)"),
        (lambda reward: np.random.rand(1), "returns two results: 1"),
    ],
)
def test_references_that_are_wrong_everywhere_are_found(change, error):
    with pytest.raises(consistency.Mismatch, match=error):
        consistency.compare(make("CartPole"), reference_with(change), 2, 20)


def test_fields_that_are_mostly_on_thresholds_are_found():
    class Edge(warp_references.CartPole):
        def move(self, state, action):
            state, _, *flags = super().move(state, action)
            bits = state["x"][0, 0].tobytes()  # Another one for any rounding.
            return state, np.array([float(sum(bits))]), *flags

    with pytest.raises(consistency.Mismatch, match="reward is on thresholds"):
        consistency.compare(make("CartPole"), Edge(), 2, 20)


# Steps.


class Nested(warp_envs.CartPole):
    """Its observations are a dict, in another order than the space's."""

    observation_space = spaces.Dict(
        {name: spaces.Box(-9, 9, (4,)) for name in ("b", "a")}
    )

    def observe(self, state):
        return {"b": state["x"], "a": state["x"]}


def test_entries_of_observations_may_be_in_any_order():
    check(Nested())


class Infinite(warp_envs.CartPole):
    name = "Infinite"

    def move(self, state, action):
        late = state["t"] > 0  # The first move is made before a run begins.
        state, reward, *flags = super().move(state, action)
        return state, torch.where(late, math.inf, reward), *flags


def test_rewards_that_are_not_finite_are_refused_in_the_other_programs():
    host = HostEnvironment(Infinite(), 2)
    host.initial(1)
    host.step(np.ones(2, np.int64))
    with pytest.raises(environment.BadStep, match="reward of environment 0 is inf"):
        host.step(np.ones(2, np.int64))


def test_an_environment_may_have_attributes_of_any_name():
    class Own(warp_envs.CartPole):
        name, out, same_step = "own", False, 7

    def create_env(flags, num_envs, *args):
        return HostEnvironment(Own(), num_envs)

    env, _ = environment.probe(create_env, argparse.Namespace(env="own"), 2)
    assert not env.all_out()


class Leaving:
    """Three agents, the i-th of which leaves at step i + 1; the last one is cut off."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Discrete(4)
    policies = {"first": slice(0, 2), "last": slice(2, 3)}
    num_uniforms = 1
    leaves_at = torch.arange(1, 4)

    def begin(self, u):
        return {"t": torch.zeros_like(u, dtype=torch.int64), "u": u[:, 0]}

    def move(self, state, action):
        t = state["t"] + 1
        left = t >= self.leaves_at
        cut_off = left & (self.leaves_at == 3)
        reward = (t + 10 * action).float()
        return {"t": t, "u": state["u"]}, reward, left & ~cut_off, cut_off

    def observe(self, state):
        x = torch.stack([state["t"][:, 0].float(), state["u"]], -1)
        return x[:, None].expand(len(x), 3, 2)

    def metrics(self, state):
        return {"length": state["t"][:, 0].float()}


def steps_of(env, num_envs, num_steps):
    """The steps [T, E, N, ...] of an environment whose actions are all 1, as arrays."""
    envs = autoreset.Environments(env, num_envs, CPU)
    carry, step = envs.begin(envs.uniforms())
    action = autoreset.no_action(env, num_envs, envs.num_agents, CPU) + 1
    steps, metrics = [step], []
    for _ in range(num_steps):
        carry, step, totals = envs.step(carry, action, envs.uniforms())
        steps.append(step)
        metrics.append({k: x.tolist() for k, x in totals.items()})
    return map_structure(lambda *x: torch.stack(x).numpy(), *steps), metrics


def test_agents_that_leave_are_done_until_the_next_episode():
    steps, metrics = steps_of(Leaving(), 2, 8)
    one = {name: x[:, 1].astype(float) for name, x in steps.items()}  # [T, N, ...]
    episode = {
        "done": [[1, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 0]],
        "terminated": [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0]],
        "truncated": [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]],
        "reward": [[0, 0, 0], [11, 11, 11], [0, 12, 12], [0, 0, 13]],
        "last_action": [[0, 0, 0], [1, 1, 1], [0, 1, 1], [0, 0, 1]],
        "episode_step": [[0, 0, 0], [1, 1, 1], [0, 2, 2], [0, 0, 3]],
        "episode_return": [[0, 0, 0], [11, 11, 11], [0, 23, 23], [0, 0, 36]],
    }
    for name, expected in episode.items():
        np.testing.assert_array_equal(one[name][:4], expected, name)
        np.testing.assert_array_equal(one[name][4:8], expected, name)
    np.testing.assert_array_equal(one["observation"][:5, 0, 0], [0, 1, 2, 3, 0])
    np.testing.assert_array_equal(
        one["episode_end"], one["terminated"] + one["truncated"]
    )
    assert one["observation"][0, 0, 1] != one["observation"][4, 0, 1]  # Another start.
    assert metrics[2]["length"] == [6, 2] and metrics[3]["length"] == [0, 0]


def test_each_environment_begins_anew_by_itself():
    steps, _ = steps_of(make("CartPole"), 50, 100)
    last = steps["terminated"] | steps["truncated"]
    np.testing.assert_array_equal(steps["done"][1:], last[:-1])
    assert (steps["observation"][steps["done"]] ** 2 < 0.05**2 + 1e-6).all()
    lengths = steps["episode_step"][last]
    assert len(set(lengths.tolist())) > 2
    np.testing.assert_array_equal(steps["episode_return"][last], lengths)


def test_the_other_programs_see_a_row_for_each_agent():
    host = HostEnvironment(make_leaving(), 2)
    assert (host.num_envs, host.num_agents) == (6, 3)
    first = host.initial(7)
    assert first["observation"].shape == (6, 2) and first["done"].all()
    steps = [host.step(np.ones(6, np.int64)) for _ in range(3)]
    assert steps[0]["terminated"].tolist() == [True, False, False] * 2
    assert steps[2]["truncated"].tolist() == [False, False, True] * 2
    assert host.take_metrics() == 2 * [{"length": 3.0}]  # Of each episode.
    again = HostEnvironment(make_leaving(), 2).initial(7)
    other = HostEnvironment(make_leaving(), 2).initial(8)
    assert (again["observation"] == first["observation"]).all()
    assert (other["observation"] != first["observation"]).any()
    with pytest.raises(ValueError, match="out of bounds"):
        host.step(np.full(6, 4))


def make_leaving():
    env = Leaving()
    env.name = "Leaving"
    return env


def test_numbers_are_clipped_to_the_bounds_of_actions():
    env = make("Pendulum")
    envs = autoreset.Environments(env, 3, CPU)
    u = envs.uniforms()
    carry, _ = envs.begin(u)
    one, _, _ = envs.step(carry, torch.full((3, 1, 1), 9.0), u)
    other, _, _ = envs.step(carry, torch.full((3, 1, 1), 2.0), u)
    assert torch.equal(one["state"]["speed"], other["state"]["speed"])


def test_random_actions_lie_within_bounds_of_one_side():
    low, high = np.float32([5, -np.inf, -3]), np.float32([np.inf, -5, np.inf])
    env = argparse.Namespace(action_space=spaces.Box(low, high))
    envs = argparse.Namespace(
        env=env, num_envs=50, num_agents=1, dtype=torch.float64, device=CPU
    )
    random = torch.Generator().manual_seed(0)
    x = consistency.random_actions(envs, random).numpy()
    assert ((low <= x) & (x <= high)).all() and (np.ptp(x, axis=0) > 1).all()


@pytest.mark.long
@pytest.mark.parametrize("case", ["CartPole", "grid", "levels"])
def test_compiled_environments_are_the_same(case):
    name, args = ENVS[case]
    envs = autoreset.Environments(make(name, **args), 16, CPU)
    compiled = torch.compile(envs.step, dynamic=False)
    carry, _ = envs.begin(envs.uniforms())
    other = carry
    for _ in range(50):
        u, action = (
            envs.uniforms(),
            autoreset.no_action(envs.env, 16, envs.num_agents, CPU),
        )
        action = torch.randint_like(action, 2)
        carry, step, _ = envs.step(carry, action, u)
        other, expected, _ = compiled(other, action, u)
        for (path, x), (_, y) in zip(leaves(step), leaves(expected)):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4, msg=path)


# Environments that are wrong.


class Broken:
    def __init__(self):
        self.x = {}["wind"]


def in_place(env, state, action):
    state["t"] += 1
    return Leaving.move(env, state, action)


def looks(env, state, action):
    if (action > 5).any():
        action = action * 0
    return Leaving.move(env, state, action)


def elsewhere(env, u):
    return {"t": torch.zeros(len(u), 1, dtype=torch.int64), "u": u[:, 0]}


def copies(env, u):
    return {"t": u.to("cpu", torch.int64), "u": u[:, 0]}


def of_double(env, state, action):
    state, reward, *flags = Leaving.move(env, state, action)
    return state, reward.double(), *flags


def loses_a_state(env, state, action):
    state, *others = Leaving.move(env, state, action)
    return {"t": state["t"]}, *others


def adds_a_state(env, state, action):
    state, *others = Leaving.move(env, state, action)
    return {**state, "v": state["u"]}, *others


def knows_no_y(env, state, action):
    return state["y"]


def draws(env, u):
    return Leaving.begin(env, torch.rand(u.shape, device=u.device))


def counts(env, state, action):
    env.count = getattr(env, "count", 0) + 1
    state, reward, *flags = Leaving.move(env, state, action)
    return state, reward + env.count, *flags


def in_the_dict(env, state, action):
    state["t"] = state["t"] + 1
    return Leaving.move(env, state, action)


def in_the_dict_too(env, state):
    state["seen"] = state["t"]
    return Leaving.observe(env, state)


def exits(env, state, action):
    sys.exit(3)


def pays_nothing_known(env, state, action):
    state, reward, *flags = Leaving.move(env, state, action)
    return state, reward * math.nan, *flags


@pytest.mark.parametrize(
    ("name", "function", "error"),
    [
        ("move", in_place, r"move\(\) changes its argument state/t"),
        ("move", looks, "a GPU would wait"),
        ("move", of_double, r"float64 \[3, 3\] as reward, expected float32"),
        ("move", loses_a_state, r"move\(\) returned nothing as 'u', begin\(\) float32"),
        ("move", adds_a_state, r"returned float32 \[3\] as 'v', begin\(\) nothing"),
        (
            "move",
            knows_no_y,
            r"move\(\) raised KeyError: 'y' \(.*/test_warp.py, li",
        ),
        ("move", counts, r"returned two results .*, reward: take what is random"),
        ("move", in_the_dict, r"move\(\) changes its argument state/t: expected a new"),
        ("move", exits, r"move\(\) raised SystemExit: 3"),
        ("move", pays_nothing_known, r"a reward that is not finite"),
        ("observe", in_the_dict_too, r"observe\(\) changes its argument state/seen"),
        ("move", lambda env, s, a: s, r"else than \(state, reward"),
        ("begin", lambda env, u: u, "expected a dict of tensors"),
        ("begin", elsewhere, "tensors on another device .*: use device=u.device"),
        ("begin", copies, "tensors on another device .*: use device=u.device"),
        ("begin", lambda env, u: {"t": u[0]}, r"a dict of tensors \[3, ...\]"),
        (
            "begin",
            draws,
            r"begin\(\) returned two results for the same arguments, state/u",
        ),
        ("observe", lambda env, s: s["t"], r"expected observation float32 \[3, 3, 2\]"),
        ("observe", lambda env, s: {"x": s["t"]}, "observation/x int64 .*, expected"),
        ("observe", lambda env, s: (s["t"], s["t"]), "expected"),
        ("observe", lambda env, s: Leaving.observe(env, s) / 0, "observe.*: .* is "),
        ("metrics", lambda env, s: {"x": s["t"]}, r"'x', expected \[3\]"),
        ("metrics", lambda env, s: {"a b": s["u"]}, "the name 'a b', expected letters"),
        ("metrics", lambda env, s: {"last_return": s["u"]}, "logged of each policy"),
        ("metrics", lambda env, s: s["u"], r"returned float32 \[3\], expected a dict"),
    ],
)
def test_a_wrong_environment_is_named_with_its_function(name, function, error):
    wrong = type("Wrong", (Leaving,), {name: function})()
    with pytest.raises(BadInput, match=f"environment Wrong: .*{error}"):
        check(wrong)


TEXT = spaces.Dict(text=spaces.Text(3), x=spaces.Box(0, 1))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("policies", {"a": slice(1, 3)}, "expected a slice from 0 on"),
        ("policies", {"a": slice(0, 2), "b": slice(1, 3)}, "expected a slice from 2"),
        ("policies", {"a": slice(None, None)}, "expected a slice from 0"),
        ("policies", {"a": 3}, r"policies\['a'\] is 3, expected a slice"),
        ("policies", [slice(0, 3)], "expected {name: slice of the agents}"),
        ("policies", {"a.b": slice(0, 3)}, "policy 'a.b': expected a word"),
        ("policies", {"jäger": slice(0, 3)}, "policy 'jäger': expected a word of ASC"),
        ("policies", {"keys": slice(0, 3)}, "PyTorch has another use for this name"),
        ("num_uniforms", -1, "num_uniforms is -1, expected a whole number, 0 or more"),
        (
            "num_uniforms",
            1.0,
            "num_uniforms is 1.0, expected a whole number, 0 or more",
        ),
        ("observation_space", TEXT, "observation/text is text, expected numbers"),
        ("observation_space", None, "expected a space of Gymnasium"),
        ("action_space", spaces.Discrete(4, start=1), "choices that begin at 0"),
        ("action_space", spaces.Box(0, 9, dtype=int), "is not supported"),
    ],
)
def test_a_wrong_attribute_is_named(name, value, error):
    wrong = type("Wrong", (Leaving,), {name: value})()
    with pytest.raises(BadInput, match=f"environment Wrong: .*{error}"):
        check(wrong)


def test_an_environment_without_a_function_is_named():
    without = {k: x for k, x in vars(Leaving).items() if k in ("begin", "move")}
    with pytest.raises(BadInput, match="Wrong: it has no observation_space"):
        check(type("Wrong", (), without)())


@pytest.mark.parametrize(
    ("env_id", "args", "error"),
    [
        ("warp/CartPol", {}, "warp_envs has warp/CartPole, warp/MountainCar"),
        ("tests.nothing:warp/X", {}, "No module named 'tests.nothing'"),
        ("tests.test_warp:warp/Broken", {}, r"KeyError: 'wind' \(.*/test_warp.py, li"),
        ("warp/Tag", {"speed": 1}, "unexpected keyword argument 'speed'"),
        (
            "warp/Tag",
            {"actions": "none"},
            "actions is 'none', expected levels, numbers",
        ),
        ("warp/Tag", {"levels": 1}, "levels is 1, expected an integer, 2 or more"),
        ("warp/Tag", {"num_nearest": 110}, "num_nearest is 110, .* 1 to 109"),
        ("warp/Tag", {"size": "big"}, "size is 'big', expected a number"),
        ("warp/Tag", {"size": np.inf}, "size is inf"),
        ("warp/TagGridWorld", {"size": 2.5}, "size is 2.5, expected an integer, 1 or"),
        (
            "warp/TagGridWorld",
            {"max_steps": True},
            "max_steps is True, expected an int",
        ),
        (
            "warp/TagGridWorld",
            {"random_starts": 2},
            "random_starts is 2, expected a b",
        ),
    ],
)
def test_what_cannot_be_made_is_named(env_id, args, error):
    with pytest.raises(BadInput, match=error):
        autoreset.make(env_id, **args)


def test_arguments_of_an_environment_are_pythons_values_or_texts():
    values = [environment.argument(f"x={text}")[1] for text in ("1", "1e-3", "True",
              "(1, 2)", "full", "a=b", "")]  # fmt: skip
    assert values == [1, 1e-3, True, (1, 2), "full", "a=b", ""]
