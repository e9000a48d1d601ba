"""V-trace and the losses against slow, obvious versions of the paper's formulas."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical
from torch.testing import assert_close

import vtrace

# T transitions, batch size B, A actions, D of them at once. All different, so that a
# transposed argument has a wrong shape.
T, B, A, D = 4, 3, 5, 2

THRESHOLDS = ("clip_rho_threshold", "clip_pg_rho_threshold", "clip_c_threshold")
RECURSION = ("log_rhos", "discounts", "rewards", "values", "bootstrap_value", "mask")
POLICIES = ("behavior_policy_logits", "target_policy_logits", "actions")
LOSSES = (*POLICIES, *RECURSION[1:])
COSTS = dict(baseline_cost=0.5, entropy_cost=0.01)

fifty_times = settings(max_examples=50, deadline=None)
exactly = functools.partial(assert_close, rtol=0, atol=0)


def example(T=T, B=B, logits_shape=(A,), seed=0, dtype=torch.float64):
    """What V-trace and the losses are of, off-policy, with some masked."""
    generator = torch.Generator().manual_seed(seed)
    random = functools.partial(torch.randn, generator=generator, dtype=dtype)
    uniform = functools.partial(torch.rand, generator=generator, dtype=dtype)

    gammas = torch.tensor([0.0, 0.5, 0.9, 1.0], dtype=dtype)
    actions_shape = (T, B, *logits_shape[:-1])
    return dict(
        behavior_policy_logits=random(T, B, *logits_shape),
        target_policy_logits=random(T, B, *logits_shape),
        actions=torch.randint(logits_shape[-1], actions_shape, generator=generator),
        log_rhos=3 * uniform(T, B) - 1.5,
        discounts=gammas[torch.randint(len(gammas), (T, B), generator=generator)],
        rewards=random(T, B),
        values=random(T, B),
        bootstrap_value=random(B),
        mask=uniform(T, B) < 0.7,
    )


def only(kwargs, *names):
    return {name: kwargs[name] for name in names}


def recursion_inputs(**changes):
    return only(example(), *RECURSION[:-1]) | changes


def loss_inputs(**changes):
    return only(example(), *LOSSES) | COSTS | changes


examples = st.builds(
    example,
    T=st.integers(1, 8),
    B=st.integers(1, 4),
    logits_shape=st.sampled_from([(2,), (5,), (1, 3), (3, 4)]),
    seed=st.integers(0, 2**32),
)
threshold_values = st.sampled_from([None, 0.0, 0.3, 1.0, 2.0])
thresholds = st.fixed_dictionaries(
    dict.fromkeys(THRESHOLDS, threshold_values)
    | {"lambda_": st.sampled_from([0.0, 0.5, 1.0])}
)


# --- The slow, obvious versions. -----------------------------------------------------


def slow_vtrace(
    log_rhos, discounts, rewards, values, bootstrap_value, mask=None, **limits
):
    """Equation (1) of the paper, its sum and product as loops over plain numbers:

    v_s = V(x_s) + sum_{t=s}^{T-1} (prod_{i=s}^{t-1} gamma_i * c_i) * delta_t
    """
    rho_bar, pg_rho_bar, c_bar = (limits.get(name, 1.0) for name in THRESHOLDS)
    lambda_ = limits.get("lambda_", 1.0)
    T, B = log_rhos.shape
    mask = torch.ones(T, B, dtype=torch.bool) if mask is None else mask
    vs, advantages = torch.zeros_like(values), torch.zeros_like(values)

    def clip(rho, threshold):
        return rho if threshold is None else min(threshold, rho)

    for b in range(B):
        gamma = discounts[:, b].tolist()
        r = rewards[:, b].tolist()
        real = mask[:, b].tolist()
        V = [*values[:, b].tolist(), bootstrap_value[b].item()]
        rho = [math.exp(log_rho) for log_rho in log_rhos[:, b].tolist()]

        c, delta = [0.0] * T, [0.0] * T
        for t in range(T):
            if real[t]:
                c[t] = lambda_ * clip(rho[t], c_bar)
                td_error = r[t] + gamma[t] * V[t + 1] - V[t]
                delta[t] = clip(rho[t], rho_bar) * td_error

        v = [0.0] * T + [V[T]]
        for s in range(T):
            v[s] = V[s]
            for t in range(s, T):
                product = 1.0
                for i in range(s, t):
                    product *= gamma[i] * c[i]
                v[s] += product * delta[t]

        for s in range(T):
            vs[s, b] = v[s]
            if real[s]:
                q = v[s + 1]
                if s + 1 < T:
                    q = lambda_ * q + (1 - lambda_) * V[s + 1]
                advantage = r[s] + gamma[s] * q - V[s]
                advantages[s, b] = clip(rho[s], pg_rho_bar) * advantage
    return vs, advantages


def slow_log_prob(logits, action):
    """Of one action under logits [A], or of D of them under logits [D, A]."""
    if logits.ndim == 2:
        return sum(map(slow_log_prob, logits, action))
    return math.log(math.exp(logits[action]) / sum(map(math.exp, logits.tolist())))


def slow_log_probs(logits, actions):  # [T, B]
    rows = [map(slow_log_prob, *row) for row in zip(logits, actions)]
    return torch.tensor([list(row) for row in rows], dtype=logits.dtype)


def slow_mean_or_sum(losses, mask, reduction):
    real = (losses if mask is None else losses[mask]).flatten().tolist()
    result = sum(real) / max(1, len(real)) if reduction == "mean" else sum(real)
    return torch.tensor(result, dtype=losses.dtype)


def loss_weights(like, mask, reduction):
    """The derivative of a loss by what each transition [T, B] adds to it."""
    weights = torch.ones_like(like) if mask is None else mask.to(like.dtype)
    return weights / weights.sum() if reduction == "mean" else weights


def per_transition(x, like):  # [T, B] -> [T, B, 1] or [T, B, 1, 1]
    return x.reshape(*x.shape, *[1] * (like.ndim - x.ndim))


def with_log_probs(kwargs):
    """Softmax policies as compute_losses() takes them, by torch.distributions."""
    kwargs = dict(kwargs)
    actions = kwargs.pop("actions")

    def sum_over_choices(x):  # [T, B] or [T, B, D] -> [T, B]
        return x.flatten(2).sum(-1) if x.ndim > 2 else x

    behavior, target = (
        Categorical(logits=kwargs.pop(f"{name}_policy_logits"))
        for name in ("behavior", "target")
    )
    return kwargs | dict(
        behavior_log_probs=sum_over_choices(behavior.log_prob(actions)),
        target_log_probs=sum_over_choices(target.log_prob(actions)),
        target_entropies=sum_over_choices(target.entropy()),
    )


def compute_losses(**kwargs):
    """IMPALA's losses of softmax policies."""
    return vtrace.compute_losses(**with_log_probs(kwargs))


# --- The targets. --------------------------------------------------------------------


@fifty_times
@given(kwargs=examples, thresholds=thresholds, masked=st.booleans())
def test_targets_are_the_double_sum_of_the_paper(kwargs, thresholds, masked):
    kwargs = only(kwargs, *RECURSION) | thresholds
    kwargs["mask"] = kwargs["mask"] if masked else None
    returns = vtrace.from_importance_weights(**kwargs)
    assert_close(tuple(returns), slow_vtrace(**kwargs))


def test_all_thresholds_and_lambda_are_one_by_default():
    ones = dict.fromkeys((*THRESHOLDS, "lambda_"), 1.0)
    kwargs = only(example(), *RECURSION)
    function = vtrace.from_importance_weights
    exactly(function(**kwargs), function(**kwargs, **ones))
    exactly(compute_losses(**loss_inputs()), compute_losses(**loss_inputs(), **ones))


@fifty_times
@given(kwargs=examples)
def test_on_policy_vs_is_the_discounted_return(kwargs):
    kwargs = only(kwargs, *RECURSION[:-1])
    T, B = kwargs["log_rhos"].shape
    kwargs["log_rhos"] = torch.zeros(T, B, dtype=torch.float64)
    vs, advantages = vtrace.from_importance_weights(**kwargs)
    for s in range(T):
        ret, discount = torch.zeros(B, dtype=torch.float64), 1.0
        for t in range(s, T):
            ret = ret + discount * kwargs["rewards"][t]
            discount = discount * kwargs["discounts"][t]
        ret = ret + discount * kwargs["bootstrap_value"]
        assert_close(vs[s], ret)
        assert_close(advantages[s], ret - kwargs["values"][s])


def test_an_importance_weight_that_overflows_is_clipped():
    kwargs = only(example(dtype=torch.float32), *RECURSION[:-1])
    one, large = torch.zeros(T, B), torch.full((T, B), 1000.0)
    exactly(
        vtrace.from_importance_weights(**kwargs | dict(log_rhos=large)),
        vtrace.from_importance_weights(**kwargs | dict(log_rhos=one)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_keep_shape_and_dtype(dtype):
    kwargs = only(example(dtype=dtype), *RECURSION)
    returns = vtrace.from_importance_weights(**kwargs)
    for name, x in returns._asdict().items():
        assert x.shape == (T, B), name
        assert x.dtype == dtype, name


def test_no_argument_is_written_to():
    kwargs = loss_inputs()
    before = {name: kwargs[name].clone() for name in LOSSES}
    compute_losses(**kwargs)
    exactly(only(kwargs, *before), before)


def test_no_gradient_flows_through_targets():
    kwargs = example()
    for x in kwargs.values():
        x.requires_grad_(x.is_floating_point())
    for returns in (
        vtrace.from_importance_weights(**only(kwargs, *RECURSION)),
        compute_losses(**only(kwargs, *LOSSES), **COSTS).vtrace,
    ):
        assert not returns.vs.requires_grad
        assert not returns.pg_advantages.requires_grad


# --- The two policies. ---------------------------------------------------------------


def test_rho_is_the_target_policy_over_the_behavior_policy():
    """One step, two actions, by hand: mu = (0.8, 0.2), pi = (0.4, 0.6)."""
    mu = torch.tensor([0.8, 0.2], dtype=torch.float64)
    pi = torch.tensor([0.4, 0.6], dtype=torch.float64)
    row = torch.ones(1, 2, dtype=torch.float64)  # Column 0 took action 0, 1 took 1.
    returns = vtrace.compute_losses(
        behavior_log_probs=mu.log()[None],
        target_log_probs=pi.log()[None],
        target_entropies=0 * row,
        discounts=0.9 * row,
        rewards=row,
        values=2 * row,
        bootstrap_value=10 * row[0],
        clip_rho_threshold=None,
        clip_pg_rho_threshold=2.0,
        **COSTS,
    ).vtrace
    # The TD error is 1 + 0.9 * 10 - 2 = 8; rho is 0.4 / 0.8 and 0.6 / 0.2.
    assert_close(returns.vs, torch.tensor([[2 + 0.5 * 8, 2 + 3 * 8]]).double())
    assert_close(returns.pg_advantages, torch.tensor([[0.5 * 8, 2.0 * 8]]).double())


@fifty_times
@given(kwargs=examples, thresholds=thresholds, masked=st.booleans())
def test_the_losses_take_rhos_from_both_log_probabilities(kwargs, thresholds, masked):
    kwargs["mask"] = kwargs["mask"] if masked else None
    rest = only(kwargs, *RECURSION[1:]) | thresholds
    losses = compute_losses(**only(kwargs, *POLICIES), **rest, **COSTS)

    actions = kwargs["actions"]
    log_mu = slow_log_probs(kwargs["behavior_policy_logits"], actions)
    log_pi = slow_log_probs(kwargs["target_policy_logits"], actions)
    expected = vtrace.from_importance_weights(log_rhos=log_pi - log_mu, **rest)
    assert_close(losses.vtrace, expected)


def test_a_padded_impossible_choice_counts_for_nothing():
    """D = 2 choices among 5 and among 3, the latter padded to 5 with logits -1e9."""
    kwargs = loss_inputs(
        **only(example(logits_shape=(D, A), dtype=torch.float32), *POLICIES)
        | only(example(dtype=torch.float32), *RECURSION[1:])
    )
    mu, pi = kwargs["behavior_policy_logits"], kwargs["target_policy_logits"]
    kwargs["actions"][:, :, 1] %= 3
    mu[:, :, 1, 3:] = pi[:, :, 1, 3:] = -1e9
    mu.requires_grad_()
    pi.requires_grad_()
    losses = compute_losses(**kwargs)
    losses.total.backward()
    assert all(loss.isfinite() for loss in losses[:4])
    assert pi.grad.isfinite().all()
    assert pi.grad[:, :, 1, 3:].count_nonzero() == 0
    assert mu.grad is None  # The behavior policy is not learned.


# --- Episode ends. -------------------------------------------------------------------


def halves(kwargs, b, k, bootstrap_value, next_start):
    """Column b of the rollout, cut: transitions [0, k) and [next_start, T)."""

    def cut(start, stop, bootstrap_value):
        half = {
            name: kwargs[name][start:stop, b : b + 1]
            for name in (*POLICIES, "discounts", "rewards", "values")
        }
        return half | dict(bootstrap_value=bootstrap_value)

    first = cut(0, k, bootstrap_value)
    second = cut(next_start, None, kwargs["bootstrap_value"][b : b + 1])
    return [half for half in (first, second) if len(half["rewards"])]


def run(kwargs):
    """The losses, and their total's gradients by the target policy and the values."""
    names = ("target_policy_logits", "values", "bootstrap_value")
    leaves = {name: kwargs[name].clone().requires_grad_() for name in names}
    losses = compute_losses(**kwargs | leaves)
    losses.total.backward()
    assert leaves["bootstrap_value"].grad is None
    return losses, leaves["target_policy_logits"].grad, leaves["values"].grad


def check_is_made_of(halves, kwargs, b, where, thresholds):
    """All of column b's transitions in `where` come out as in the halves alone."""
    kwargs = {name: x if x.ndim == 1 else x[:, b : b + 1] for name, x in kwargs.items()}
    kwargs["bootstrap_value"] = kwargs["bootstrap_value"][b : b + 1]
    options = COSTS | thresholds
    whole, *whole_grads = run(kwargs | options)
    parts, *parts_grads = zip(*[run(half | options) for half in halves])

    for name in ("vs", "pg_advantages"):
        together = torch.cat([getattr(part.vtrace, name) for part in parts])
        assert_close(getattr(whole.vtrace, name)[where], together)
    for whole_grad, part_grads in zip(whole_grads, parts_grads):
        assert_close(whole_grad[where], torch.cat(part_grads))
    for i, name in enumerate(("total", "pg", "baseline", "entropy")):
        assert_close(whole[i], sum(part[i] for part in parts), msg=name)


@fifty_times
@given(kwargs=examples, thresholds=thresholds, terminated=st.booleans(), data=st.data())
def test_an_episode_end_cuts_the_rollout_in_two(kwargs, thresholds, terminated, data):
    """x_k is the last observation of an episode, so transition k to k + 1 is no
    transition. Truncation bootstraps from V(x_k), termination from 0."""
    T, B = kwargs["rewards"].shape
    if T == 1:
        return  # No half is left.
    kwargs = only(kwargs, *LOSSES)
    kwargs["mask"] = torch.ones(T, B, dtype=torch.bool)
    ks = [data.draw(st.integers(0, T - 1), label="k") for _ in range(B)]
    separate = []
    for b, k in enumerate(ks):
        kwargs["mask"][k, b] = False
        last_value = kwargs["values"][k, b : b + 1]
        separate.append(halves(kwargs, b, k, last_value * (not terminated), k + 1))
    # Cut above with the true discount: 0 does here what a bootstrap of 0 does there.
    kwargs["discounts"] = kwargs["discounts"].clone()
    for b, k in enumerate(ks):
        if terminated and k > 0:
            kwargs["discounts"][k - 1, b] = 0.0

    for b, k in enumerate(ks):
        where = [t for t in range(T) if t != k]
        check_is_made_of(separate[b], kwargs, b, where, thresholds)

    returns = compute_losses(**kwargs, **thresholds, **COSTS).vtrace
    for b, k in enumerate(ks):
        exactly(returns.vs[k, b], kwargs["values"][k, b])
        assert returns.pg_advantages[k, b] == 0


@fifty_times
@given(kwargs=examples, thresholds=thresholds, data=st.data())
def test_a_termination_without_a_last_observation_needs_no_mask(
    kwargs, thresholds, data
):
    """Transition k - 1 leads to the next episode's x_k at once, with discount 0."""
    T, B = kwargs["rewards"].shape
    kwargs = only(kwargs, *POLICIES, *RECURSION[1:-1])
    b = data.draw(st.integers(0, B - 1), label="b")
    k = data.draw(st.integers(1, T), label="k")
    zero = torch.zeros(1, dtype=torch.float64)
    separate = halves(kwargs, b, k, zero, k)
    kwargs["discounts"] = kwargs["discounts"].clone()
    kwargs["discounts"][k - 1, b] = 0.0
    check_is_made_of(separate, kwargs, b, slice(None), thresholds)


@fifty_times
@given(
    kwargs=examples,
    thresholds=thresholds,
    reduction=st.sampled_from(vtrace.REDUCTIONS),
    junk=st.sampled_from([-1e30, 1e30, math.inf, math.nan]),
)
def test_what_stands_at_masked_transitions_changes_nothing(
    kwargs, thresholds, reduction, junk
):
    mask = kwargs["mask"]
    junk_kwargs = {name: x.clone() for name, x in kwargs.items()}
    for name in ("rewards", "discounts", "log_rhos"):
        junk_kwargs[name][~mask] = junk
    for name in ("behavior_policy_logits", "target_policy_logits"):
        junk_kwargs[name][~mask] = 100 * junk_kwargs[name][~mask].flip(-1)
    A = kwargs["target_policy_logits"].shape[-1]
    junk_kwargs["actions"][~mask] = A - 1 - kwargs["actions"][~mask]

    exactly(
        vtrace.from_importance_weights(**only(junk_kwargs, *RECURSION), **thresholds),
        vtrace.from_importance_weights(**only(kwargs, *RECURSION), **thresholds),
    )
    options = COSTS | thresholds | dict(reduction=reduction)
    losses, *grads = run(only(kwargs, *LOSSES) | options)
    junk_losses, *junk_grads = run(only(junk_kwargs, *LOSSES) | options)
    exactly(junk_losses[:4], losses[:4])
    exactly(junk_losses.vtrace[:2], losses.vtrace[:2])
    exactly(junk_grads, grads)
    for grad in junk_grads:
        assert grad[~mask].count_nonzero() == 0


@pytest.mark.parametrize("reduction", vtrace.REDUCTIONS)
def test_no_real_transition_at_all_is_a_loss_of_zero(reduction):
    mask = torch.zeros(T, B, dtype=torch.bool)
    losses, *grads = run(loss_inputs(mask=mask, reduction=reduction))
    for x in (*losses[:4], *grads):
        exactly(x, torch.zeros_like(x))


# --- The losses. ---------------------------------------------------------------------


def test_losses_are_summed_by_default():
    kwargs = loss_inputs()
    exactly(compute_losses(**kwargs), compute_losses(**kwargs, reduction="sum"))


@fifty_times
@given(
    kwargs=examples,
    thresholds=thresholds,
    masked=st.booleans(),
    reduction=st.sampled_from(vtrace.REDUCTIONS),
)
def test_the_total_is_the_weighted_sum_of_three_losses(
    kwargs, thresholds, masked, reduction
):
    kwargs = only(kwargs, *LOSSES)
    mask = kwargs["mask"] = kwargs["mask"] if masked else None
    log_rhos = slow_log_probs(kwargs["target_policy_logits"], kwargs["actions"]) - (
        slow_log_probs(kwargs["behavior_policy_logits"], kwargs["actions"])
    )
    recursion = only(kwargs, *RECURSION[1:]) | thresholds
    returns = vtrace.from_importance_weights(log_rhos, **recursion)
    options = dict(baseline_cost=0.7, entropy_cost=0.03, reduction=reduction)
    losses, policy_grad, values_grad = run(kwargs | thresholds | options)

    assert_close(losses.vtrace, returns)
    errors = returns.vs - kwargs["values"]
    policy = kwargs["target_policy_logits"].clone()
    log_probs = slow_log_probs(policy, kwargs["actions"])
    p = policy.softmax(-1)
    entropies = -(p * p.log()).sum(-1, keepdim=True)  # [T, B, (D,) 1]
    expected = (
        slow_mean_or_sum(-log_probs * returns.pg_advantages, mask, reduction),
        slow_mean_or_sum(errors**2 / 2, mask, reduction),
        slow_mean_or_sum(-entropies.flatten(2).sum(-1), mask, reduction),
    )
    assert_close((losses.pg, losses.baseline, losses.entropy), expected)
    pg, baseline, entropy = losses[1:4]
    assert_close(losses.total, pg + 0.7 * baseline + 0.03 * entropy)

    weights = loss_weights(errors, mask, reduction)
    # d log softmax(x)[a] / dx = one_hot(a) - softmax(x)
    one_hot = torch.nn.functional.one_hot(kwargs["actions"], policy.shape[-1])
    # d (sum_a p_a log p_a) / dx = p * (log p + entropy)
    gradient = per_transition(weights * returns.pg_advantages, p) * (p - one_hot)
    gradient += 0.03 * per_transition(weights, p) * p * (p.log() + entropies)
    if weights.isfinite().all():  # Not a mean over nothing.
        assert_close(policy_grad, gradient)
    if weights.isfinite().all():
        assert_close(values_grad, -0.7 * weights * errors)


@fifty_times
@given(kwargs=examples, masked=st.booleans())
def test_a_clipped_ratio_has_the_gradient_of_ppo_where_it_is_at_most_one(
    kwargs, masked
):
    kwargs = only(kwargs, *LOSSES)
    kwargs["mask"] = kwargs["mask"] if masked else None
    costs = dict(baseline_cost=0.0, entropy_cost=0.0, ratio_clipping=0.2)
    kwargs = with_log_probs(kwargs)
    policy = kwargs["target_log_probs"].detach().requires_grad_()
    kwargs["target_log_probs"] = policy
    losses = vtrace.compute_losses(**kwargs, **costs)
    (got,) = torch.autograd.grad(losses.total, policy)

    ratio = (policy - kwargs["behavior_log_probs"]).exp()
    at_most_one = ratio.detach().clamp(max=1)
    advantages = losses.vtrace.pg_advantages / at_most_one
    clipped = ratio.clamp(0.8, 1.2)
    ppo = -torch.min(ratio * advantages, clipped * advantages).sum()
    (expected,) = torch.autograd.grad(ppo, policy)
    assert_close(got, expected * at_most_one / ratio.detach())


# --- A caller's mistakes. ------------------------------------------------------------

floats = {
    "int64": lambda x: x.long(),
    "bool": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
}
ranks = {"rank too low": lambda x: x[0], "rank too high": lambda x: x[None, None]}
one_rank_higher = {"one rank too high": lambda x: x[None]}
sizes = {
    "T too small": lambda x: x[:-1],
    "T is 1": lambda x: x[:1],
    "B too small": lambda x: x[:, :-1],
    "B is 1": lambda x: x[:, :1],
    "B first": lambda x: x.transpose(0, 1),
}
batch_sizes = {"B too small": lambda x: x[:-1], "B is 1": lambda x: x[:1]}
masks = {"float": lambda x: x.float(), "uint8": lambda x: x.byte()}

shapes = ranks | one_rank_higher | sizes
MISTAKES = dict.fromkeys(RECURSION, floats | shapes) | dict(
    bootstrap_value=floats | ranks | one_rank_higher | batch_sizes,
    mask=masks | shapes,
)


def mistakes():
    for name, of_this in MISTAKES.items():
        for what, mistake in of_this.items():
            yield pytest.param(name, mistake, id=f"{name}-{what}")


@pytest.mark.parametrize("name, mistake", list(mistakes()))
def test_a_wrong_rank_shape_or_dtype_is_an_error_that_names_it(name, mistake):
    kwargs = only(example(), *RECURSION)
    vtrace.from_importance_weights(**kwargs)  # Right so far.
    kwargs[name] = mistake(kwargs[name])
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        vtrace.from_importance_weights(**kwargs)


@pytest.mark.parametrize(
    "name", ["behavior_log_probs", "target_log_probs", "target_entropies"]
)
@pytest.mark.parametrize("mistake", [*floats.values(), *sizes.values()])
def test_wrong_log_probabilities_are_an_error_that_names_them(name, mistake):
    kwargs = with_log_probs(only(example(), *LOSSES)) | COSTS
    vtrace.compute_losses(**kwargs)
    kwargs[name] = mistake(kwargs[name])
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        vtrace.compute_losses(**kwargs)


def test_arguments_of_one_wrong_rank_are_an_error_that_names_it():
    kwargs = {name: x[0] for name, x in recursion_inputs().items()}
    with pytest.raises(ValueError, match=r"\blog_rhos has shape"):
        vtrace.from_importance_weights(**kwargs)


def test_more_dimensions_are_computed_on_one_by_one():
    alone = [only(example(seed=i), *RECURSION[:-1]) for i in range(4)]
    expected = [vtrace.from_importance_weights(**kwargs) for kwargs in alone]

    def stack(xs):  # [..., 2, 2]
        return torch.stack(xs, dim=-1).unflatten(-1, (2, 2))

    together = {name: stack([kwargs[name] for kwargs in alone]) for name in alone[0]}
    returns = vtrace.from_importance_weights(**together)
    for x, parts in zip(returns, zip(*expected)):
        torch.testing.assert_close(x, stack(list(parts)))


@pytest.mark.parametrize(
    "name, value",
    [(name, value) for name in THRESHOLDS for value in (-1.0, -1e-9, math.nan)]
    + [("lambda_", value) for value in (-0.1, 1.1, math.inf, math.nan)],
)
def test_a_threshold_out_of_range_is_an_error_that_names_it(name, value):
    kwargs = recursion_inputs()
    with pytest.raises(ValueError, match=rf"\b{name} is "):
        vtrace.from_importance_weights(**kwargs, **{name: value})
    with pytest.raises(ValueError, match=rf"\b{name} is "):
        compute_losses(**loss_inputs(), **{name: value})


@pytest.mark.parametrize("reduction", ["none", "SUM", "", None])
def test_an_unknown_reduction_is_an_error_that_names_it(reduction):
    with pytest.raises(ValueError, match=r"\breduction is "):
        compute_losses(**loss_inputs(), reduction=reduction)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_masked_numbers_that_are_not_finite_leave_the_gradients_alone(junk):
    mask = torch.ones(T, B, dtype=torch.bool)
    mask[1] = False
    gradients = []
    for x in (0.0, junk):
        kwargs = loss_inputs(mask=mask)
        kwargs["rewards"][1] = x
        _, *grads = run(kwargs)
        gradients.append(grads)
    exactly(*gradients)


def test_mixed_precisions_are_refused():
    x = torch.zeros(2, 1)
    with pytest.raises(ValueError, match="rewards"):
        vtrace.from_importance_weights(x, x, x.double(), x, x[-1])
