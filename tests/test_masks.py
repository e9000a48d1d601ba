"""Masks of actions: from environments to both policies, and no illegal action back."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests import envs, test_warp
from tests.programs import main, succeeds
from torchbeast import distributions, environment, machine, masks, targets
from torchbeast.messages import BadInput
from torchbeast.spaces import Actions, BadStep

PARTS = spaces.Dict(
    {
        "x": spaces.Box(-1, 1, (2,)),
        "y": spaces.MultiDiscrete([2, 3]),
        "z": spaces.Discrete(2),
    }
)
ALL = [0, 1, 1, 0, 1, 1, 0]  # y's numbers, then z's.
NESTED = {"x": None, "y": (np.array([0, 1]), np.array([1, 0, 1])), "z": [1, 0]}
FLAT_Y = {"x": None, "y": np.array([0, 1, 1, 0, 1], bool), "z": np.array([1.0, 0.0])}


def taken(mask, space=PARTS):
    x = masks.Masks(Actions(space, 1), 1, False)
    x.take(None, {"action_mask": mask}, 0)
    return x.of_step(np.zeros(1, bool))


@pytest.mark.parametrize("mask", [np.array(ALL, np.int8), NESTED, FLAT_Y])
def test_a_mask_is_nested_like_the_action_or_has_all_choices(mask):
    assert taken(mask).astype(int).tolist() == [ALL]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones(6), r"info/action_mask is float64 \[6\], expected numbers \[7\]"),
        (np.array(["1"] * 7), r"info/action_mask is <U1 \[7\], expected"),
        ({"y": np.ones(5)}, "info/action_mask/z is not in the info"),
        ({**NESTED, "z": [1, 1, 1]}, r"info/action_mask/z is int64 \[3\], .* \[2\]"),
        ({**NESTED, "y": np.array([0, 0, 1, 0, 1])}, "of environment 0 allows no act"),
    ],
)
def test_what_is_no_mask_is_named(mask, message):
    with pytest.raises(BadStep, match=message):
        taken(mask)


class Nested(gymnasium.Env):
    """An environment with a mask of its own, of four numbers of two choices each."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Dict(
        {"x": spaces.Tuple([spaces.Discrete(2)] * 2), "y": spaces.MultiDiscrete([2, 2])}
    )

    def __init__(self, mask):
        self.mask = np.reshape(mask, (2, 2, 2))

    def reset(self, *, seed=None, options=None):
        x, y = map(tuple, self.mask)
        return np.zeros(1, np.float32), {"action_mask": {"x": x, "y": y}}


def test_masks_that_a_vector_environment_has_nested_are_each_environments_own():
    given = [[1, 0, 1, 1, 1, 1, 0, 1], [0, 1, 1, 1, 1, 0, 1, 1]]
    fns = [lambda m=mask: Nested(m) for mask in given]
    for env in (SyncVectorEnv(fns), [make() for make in fns]):
        step = environment.Environment(env).initial(0)
        assert step["action_mask"].astype(int).tolist() == given


def make(where, vector):
    if vector:
        return SyncVectorEnv([lambda: envs.Masked(where)] * 3)
    return [envs.Masked(where) for _ in range(3)]


@pytest.mark.parametrize("vector", [False, True], ids=["single", "vector"])
@pytest.mark.parametrize("where", ["observation", "info"])
def test_a_mask_is_a_field_of_the_step_and_not_of_the_observation(where, vector):
    env = environment.Environment(make(where, vector))
    step = env.initial(0)
    assert step["action_mask"].shape == (3, 5) and step["action_mask"].dtype == bool
    assert step["action_mask"][:, 1].all() and not step["action_mask"].all()
    assert "action_mask" not in str(env.observation_space)
    at = {"terminated": [], "done": []}
    for _ in range(20):
        step = env.step(env.some_action())
        for name, found in at.items():
            found += step["action_mask"][step[name]].tolist()
    # The masks of last observations are all zeros here: no action is taken there.
    assert np.all(at["terminated"]) and not np.all(at["done"])


def test_an_action_outside_of_its_mask_does_not_reach_the_environment():
    env = environment.Environment(make("info", False))
    step = env.initial(0)
    with pytest.raises(ValueError, match=r"action \[\d\] of environment 0 is outside"):
        env.step((~step["action_mask"]).argmax(1))


def test_a_vector_that_resets_within_the_step_has_no_masks():
    same_step = SyncVectorEnv(
        [lambda: envs.Masked("info")], autoreset_mode=AutoresetMode.SAME_STEP
    )
    env = environment.Environment(same_step)
    with pytest.raises(BadInput, match="action_mask .* expected NEXT_STEP"):
        env.initial(0)


def test_an_action_mask_of_boxes_alone_is_an_observation_like_others():
    space = spaces.Dict({"action_mask": spaces.MultiBinary(2)})
    assert not masks.in_observation(space, Actions(spaces.Box(-1, 1, (2,)), 1))


def params_and_mask(space, num=500):
    torch.manual_seed(0)
    distribution = distributions.make(space)
    params = torch.randn(num, distribution.num_params, requires_grad=True)
    sizes = masks.sizes(Actions(space, 1))
    parts = [torch.rand(num, n) < 0.5 for n in sizes]
    for part in parts:
        part[torch.arange(num), torch.randint(part.shape[1], (num,))] = True
    return distribution, params, torch.cat(parts, 1)


@pytest.mark.parametrize("space", [spaces.Discrete(4), PARTS])
def test_masked_policies_are_renormalised_over_what_is_allowed(space):
    distribution, params, mask = params_and_mask(space)
    masked = distribution.masked(params, mask)
    x = distribution.sample(masked)
    log_prob, entropy = distribution.log_prob(masked, x), distribution.entropy(masked)
    sizes = masks.sizes(Actions(space, 1))
    logits, expected, expected_entropy = params, 0, 0
    if not isinstance(x, dict):
        flat = x[:, None]
    else:
        flat = torch.cat([x["y"], x["z"][:, None]], 1)
        logits = params[:, 4:]
        part = distribution.parts["x"]
        expected = part.log_prob(params[:, :4], x["x"])
        expected_entropy = part.entropy(params[:, :4])
    pairs = zip(logits.split(sizes, 1), mask.split(sizes, 1), flat.unbind(1))
    for logit, allowed, chosen in pairs:
        assert allowed[torch.arange(len(chosen)), chosen].all()
        p = torch.where(allowed, logit.exp(), 0)
        p = p / p.sum(1, keepdim=True)
        expected = expected + p[torch.arange(len(chosen)), chosen].log()
        expected_entropy = expected_entropy - torch.xlogy(p, p).sum(1)
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    (log_prob.sum() + entropy.sum()).backward()
    gradient = params.grad[:, -mask.shape[1] :]
    assert (gradient[~mask] == 0).all() and gradient.isfinite().all()


def test_importance_weights_are_ratios_of_masked_policies():
    distribution, params, mask = params_and_mask(spaces.Discrete(4), 6)
    behavior = distribution.masked(torch.randn(6, 4), mask)
    target = distribution.masked(params, mask)
    action = distribution.sample(behavior)
    log_rhos = distribution.log_prob(target, action) - (
        distribution.log_prob(behavior, action)
    )
    p, mu = (torch.where(mask, y, -torch.inf).softmax(1) for y in (params, behavior))
    i = torch.arange(6)
    torch.testing.assert_close(log_rhos, (p / mu)[i, action].log())


def test_random_actions_of_q_learning_are_uniform_over_what_is_allowed():
    q = torch.tensor([distributions.IMPOSSIBLE, 1.0, distributions.IMPOSSIBLE, 0.0])
    q = q.expand(1, 20_000, 4)
    action = targets.epsilon_greedy(q, torch.ones(1, 20_000))["action"]
    counts = action.flatten().bincount(minlength=4).tolist()
    assert counts[0] == counts[2] == 0 and 9_000 < counts[1] < 11_000


def test_a_mask_that_is_not_in_the_first_info_is_refused():
    actions = Actions(spaces.Discrete(3), 1)
    late = masks.Masks(actions, 1, False)
    late.take(0.0, {}, 0)
    late.take(0.0, {"other": 1}, 0)
    with pytest.raises(BadStep, match="info/action_mask is not in the first info"):
        late.take(0.0, {"action_mask": np.ones(3, np.int8)}, 0)


AGENTS = {
    "impala": (),
    "lstm": ("--use_lstm",),
    "ppo": ("--agent", "ppo"),
    "pqn": ("--agent", "pqn"),
    "dqn": ("--agent", "r2d2", "--no-use_lstm", "--replay_start", 100),
    "rainbow": ("--agent", "r2d2", "--quantiles", 4, "--replay_start", 100),
}


@pytest.mark.parametrize("agent", AGENTS)
def test_no_agent_takes_an_action_that_is_not_allowed(agent, tmp_path):
    args = ("--savedir", tmp_path, "--xpid", "x", "--num_actors", 0, "--env")
    args += ("tests.envs:torchbeast/Masked-v0", *AGENTS[agent])
    succeeds(*args, "--total_steps", 600)
    succeeds(*args, "--mode", "test", "--num_test_episodes", 5)


class MaskedWarp(test_warp.Leaving):
    """For --env tests.test_masks:warp/MaskedWarp: of its two actions the first is
    allowed at even steps, the second at steps that are a multiple of three, and any of
    them where none would be. Who takes another one gets a reward that ends the run."""

    policies = {"agent": slice(0, 3)}
    action_space = spaces.Discrete(2)

    def mask(self, state):
        t = state["t"]
        allowed = torch.stack([t % 2 == 0, t % 3 == 0], -1).expand(-1, 3, -1)
        return allowed | ~allowed.any(2, keepdim=True)

    def move(self, state, action):
        allowed = self.mask(state).take_along_dim(action[..., None], 2).squeeze(2)
        state, reward, *flags = super().move(state, action)
        return state, torch.where(allowed, reward, torch.nan), *flags


class NoneAllowed(test_warp.Leaving):
    policies = {"agent": slice(0, 3)}

    def mask(self, state):
        return (state["t"] < 2)[..., None].expand(-1, 3, 4)


class OddMask(MaskedWarp):
    def mask(self, state):
        return super().mask(state)[..., :1]


@pytest.fixture
def one_core(monkeypatch):
    monkeypatch.setattr(machine, "_num_cores", 1)  # Other tests have the others.


def warp(name, tmp_path, *args, module="warpbeast"):
    args = ("--env", f"tests.test_masks:warp/{name}", "--num_envs", 8, *args)
    return main(*args, "--savedir", tmp_path, "--xpid", "x", module=module)


@pytest.mark.parametrize("agent", [(), ("--agent", "pqn")], ids=["impala", "pqn"])
def test_environments_on_the_device_have_masks_by_a_function(agent, tmp_path, one_core):
    result = warp("MaskedWarp", tmp_path, *agent, "--total_steps", 2000)
    assert result.returncode == 0, result.stderr
    result = warp("MaskedWarp", tmp_path, *agent, "--mode", "test")
    assert result.returncode == 0, result.stderr


def test_a_mask_on_the_device_that_allows_nothing_ends_the_run(tmp_path):
    result = warp("NoneAllowed", tmp_path, "--total_steps", 2000)
    assert result.returncode == 1
    assert "an action_mask of agent allows no action" in result.stderr


def test_a_mask_on_the_device_of_another_shape_is_refused(tmp_path):
    result = warp("OddMask", tmp_path)
    assert result.returncode == 2
    assert "mask() returned bool [3, 3, 1], expected bool [3, 3, 2]" in result.stderr
