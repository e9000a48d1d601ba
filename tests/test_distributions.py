"""torchbeast/distributions.py, against torch.distributions and numerical integrals."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as td

from torchbeast.distributions import (
    Categorical,
    Gaussian,
    PolicyHead,
    SquashedGaussian,
    make,
)
from torchbeast.messages import BadInput
from torchbeast.nests import leaves
from torchbeast.spaces import Actions

LEADING = (3, 4)
LOW, HIGH = np.float32([-2, 0.5]), np.float32([1, 4])
SPACES = {
    "discrete": spaces.Discrete(5, start=3),
    "multi_discrete": spaces.MultiDiscrete([[2, 5], [3, 2]]),
    "multi_binary": spaces.MultiBinary((2, 3)),
    "box": spaces.Box(-np.inf, np.inf, (2, 3)),
    "number": spaces.Box(-1, 1, ()),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))),
    "dict": spaces.Dict({
        "b": spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(3))),
        "a": spaces.Box(LOW, HIGH),
    }),
}  # fmt: skip
every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


def params_for(distribution, leading=LEADING, **kwargs):
    return torch.randn(*leading, distribution.num_params, **kwargs)


def references(distribution, params):
    """What torch.distributions has for it: a list of independent ones [...], in the
    order of the sample's numbers."""
    if isinstance(distribution, Categorical):
        parts = params.split(distribution.num_choices, -1)
        return [td.Categorical(logits=part) for part in parts]
    means, log_stds = params.chunk(2, -1)
    return [
        td.Normal(mean, log_std.exp())
        for mean, log_std in zip(means.unbind(-1), log_stds.unbind(-1))
    ]


SINGLE = [Categorical([5]), Categorical([2, 5, 3, 2], (2, 2)), Gaussian((2, 3))]


@pytest.mark.parametrize("distribution", SINGLE, ids=["one", "many", "gaussian"])
def test_it_agrees_with_pytorchs(distribution):
    params = params_for(distribution)
    parts = references(distribution, params)
    x = distribution.sample(params)
    assert x.shape == (*LEADING, *distribution.shape)
    numbers = x.reshape(*LEADING, -1).unbind(-1)
    expected = sum(p.log_prob(n) for p, n in zip(parts, numbers))
    torch.testing.assert_close(distribution.log_prob(params, x), expected)
    expected = sum(p.entropy() for p in parts)
    torch.testing.assert_close(distribution.entropy(params), expected)
    modes = torch.stack([p.mode for p in parts], -1)
    assert torch.equal(distribution.mode(params), modes.reshape(x.shape))


@every_space
def test_a_sample_is_like_the_space(space):
    distribution = make(space)
    params = params_for(distribution)
    for x in (distribution.sample(params), distribution.mode(params)):
        assert distribution.log_prob(params, x).shape == LEADING
        assert distribution.entropy(params).shape == LEADING
        one = leaves(distribution.to_action(x))
        for (name, array), (key, expected) in zip(one, leaves(space.sample())):
            assert name == key
            assert array.shape == (*LEADING, *np.shape(expected))
            kind = "f" if array.is_floating_point() else "i"
            assert kind == np.asarray(expected).dtype.kind


@every_space
def test_the_mean_of_minus_log_prob_is_the_entropy(space):
    distribution = make(space)
    params = params_for(distribution, leading=(1,)).expand(100_000, -1)
    log_prob = distribution.log_prob(params, distribution.sample(params))
    error = log_prob.std() / math.sqrt(len(log_prob))
    expected = -distribution.entropy(params[0])
    assert abs(log_prob.mean() - expected) < 5 * error + 1e-5


def test_a_number_has_only_its_own_choices():
    distribution = Categorical([2, 5], (2,))
    params = params_for(distribution, leading=(10_000,))
    x = distribution.sample(params)
    assert x[:, 0].max() == 1 and x[:, 1].max() == 4 and x.min() == 0


def test_whatever_is_drawn_a_choice_is_one_that_is_allowed(monkeypatch):
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)  # Once in 2^24 draws.
    distribution = make(spaces.MultiDiscrete([3, 1]))
    mask = torch.tensor([False, False, True, True])
    params = distribution.masked(torch.randn(4), mask)
    assert distribution.sample(params).tolist() == [2, 0]


# The squashed Gaussian.


def squashed(mean, std, dtype=torch.float64):
    distribution = SquashedGaussian(np.float64([-2.0]), np.float64([3.0]))
    return distribution, torch.tensor([mean, math.log(std)], dtype=dtype)


@pytest.mark.parametrize(("mean", "std"), [(0, 1), (0.7, 0.3), (-1.5, 2), (3, 3)])
def test_a_squashed_gaussians_density_integrates_to_one(mean, std):
    distribution, params = squashed(mean, std)
    x = torch.linspace(mean - 9 * std, mean + 9 * std, 200_001, dtype=torch.float64)
    a = distribution.to_action(x[:, None])[:, 0]
    density = distribution.log_prob(params.expand(len(x), -1), x[:, None]).exp()
    assert a.min() >= -2 and a.max() <= 3
    torch.testing.assert_close(
        torch.trapezoid(density, a),
        torch.ones((), dtype=torch.float64),
        rtol=1e-5,
        atol=0,
    )


def test_a_squashed_gaussian_agrees_with_pytorchs_transform():
    distribution = SquashedGaussian(LOW, HIGH)
    params = params_for(distribution)
    mean, log_std = params.chunk(2, -1)
    scale = torch.tensor((HIGH - LOW) / 2)
    transforms = [
        td.TanhTransform(),
        td.AffineTransform(torch.tensor(LOW) + scale, scale),
    ]
    expected = td.TransformedDistribution(td.Normal(mean, log_std.exp()), transforms)
    x = distribution.sample(params)
    action = distribution.to_action(x)
    torch.testing.assert_close(
        distribution.log_prob(params, x),
        expected.log_prob(action).sum(-1),
        rtol=1e-3,
        atol=1e-3,
    )


def test_far_out_a_squashed_gaussian_has_finite_gradients():
    distribution, params = squashed(40.0, 0.1, torch.float32)
    params.requires_grad_()
    x = distribution.rsample(params)
    loss = distribution.log_prob(params, x)
    loss.backward()
    assert loss.isfinite() and params.grad.isfinite().all()
    assert distribution.to_action(x) == 3


# Gradients.


@pytest.mark.parametrize(
    "distribution", [*SINGLE, SquashedGaussian(LOW, HIGH)], ids=lambda d: str(d.shape)
)
def test_gradients_are_those_of_differences(distribution):
    params = params_for(distribution, (2,), dtype=torch.float64).requires_grad_()
    x = distribution.sample(params)
    assert not x.requires_grad
    torch.autograd.gradcheck(lambda p: distribution.log_prob(p, x), params)
    if not isinstance(distribution, SquashedGaussian):
        torch.autograd.gradcheck(distribution.entropy, params)


def test_a_reparametrised_sample_moves_with_its_parameters():
    distribution = make(SPACES["box"])
    params = params_for(distribution).requires_grad_()
    distribution.rsample(params).sum().backward()
    mean, _ = params.grad.chunk(2, -1)
    assert torch.equal(mean, torch.ones_like(mean))


# What is refused.


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Box(0, 255, (3,), np.uint8),
        spaces.Tuple((spaces.Discrete(2), spaces.Text(5))),
        spaces.Tuple(()),
    ],
    ids=str,
)
def test_another_space_is_named_with_what_is_supported(space):
    with pytest.raises(BadInput, match="is not supported: use Discrete, MultiDiscrete"):
        make(space)


def test_what_is_squashed_needs_bounds():
    for low, high in ((-np.inf, 1), (0, np.inf), (1, 1)):
        with pytest.raises(BadInput, match="expected finite bounds"):
            make(spaces.Box(np.float32([low]), np.float32([high])), squashed=True)


def test_parameters_of_another_number_are_named():
    with pytest.raises(
        ValueError, match=r"params has shape \[3, 4\], expected \[..., 5\]"
    ):
        Categorical([5]).entropy(torch.zeros(3, 4))


def test_a_bounded_gaussian_is_in_units_of_its_bounds():
    space = spaces.Box(
        np.float32([10, -np.inf, 0, -3e38]), np.float32([30, 5, np.inf, 3e38])
    )
    distribution = make(space)
    params = torch.zeros(8).expand(20_000, -1)
    x = distribution.sample(params)
    expected = torch.tensor([20.0, 0, 0, 0])
    assert torch.equal(distribution.mode(params)[0], expected)
    std = torch.tensor([10.0, 1, 1, 1])
    torch.testing.assert_close(x.std(0), std, rtol=0.05, atol=0)
    reference = td.Normal(expected, std)
    torch.testing.assert_close(
        distribution.log_prob(params, x), reference.log_prob(x).sum(-1)
    )
    torch.testing.assert_close(
        distribution.entropy(params[0]), reference.entropy().sum()
    )


def test_the_last_action_of_a_first_step_is_within_bounds_that_leave_out_zero():
    space = spaces.Box(
        np.float32([100, 5, -30, 0]), np.float32([101, np.inf, -15, 1000])
    )
    distribution = make(space)
    numbers = (
        distribution.features(torch.zeros(4)),
        distribution.features(torch.tensor([100.75, 7, -30, 500])),
    )
    assert [x.tolist() for x in numbers] == [[-1, 0, 1, -1], [0.5, 7, -1, 0]]


@every_space
def test_features_are_one_hot_choices_and_numbers_in_units_of_their_bounds(space):
    distribution = make(space)
    space.seed(1)
    env_actions = Actions(space, 3)
    sample = distribution.sample(params_for(distribution))
    for leaf, (_, x) in zip(env_actions.leaves, leaves(sample)):
        if leaf.num_choices is None:  # Last actions are within bounds.
            low, high = map(torch.as_tensor, (leaf.space.low, leaf.space.high))
            x.clamp_(low, high)
    features = distribution.features(sample)
    assert features.shape == (*LEADING, distribution.num_features)
    assert features.dtype == torch.float32
    begin = 0
    for leaf, (_, x) in zip(env_actions.leaves, leaves(sample)):
        if leaf.num_choices is None:
            size = math.prod(leaf.shape)
            part = features[..., begin : begin + size]
            low, high = leaf.space.low.ravel(), leaf.space.high.ravel()
            if np.isfinite(high).all():
                part = (part + 1) / 2 * (high - low) + low
            torch.testing.assert_close(part, x.reshape(part.shape))
            begin += size
            continue
        for number, n in zip(
            x.reshape(*LEADING, -1).unbind(-1), leaf.num_choices.ravel().tolist()
        ):
            part = features[..., begin : begin + n]
            assert torch.equal(part.argmax(-1), number)
            assert torch.equal(part.sum(-1), torch.ones(LEADING))
            begin += n
    assert begin == distribution.num_features


@every_space
@pytest.mark.parametrize("of_state", [False, True])
def test_a_policy_head_has_deviations_of_one_that_depend_on_features_if_wanted(
    space, of_state
):
    distribution = make(space)
    head = PolicyHead(4, distribution, state_dependent_std=of_state)
    torch.nn.init.zeros_(head.bias)
    params = head(torch.randn(5, 4))
    assert params.shape == (5, distribution.num_params)
    log_stds = params[:, distribution.log_stds]
    assert log_stds.any() == (of_state and bool(distribution.log_stds.any()))
    assert params[:, ~distribution.log_stds].all()
    params.sum().backward()
    assert head.bias.grad.all()  # All are learned.
