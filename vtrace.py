"""V-trace targets, the three losses of IMPALA, and their sum.

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
Actor-Learner Architectures", arXiv 1802.01561: section 4.1 (V-trace), section 4.2
(the losses), remark 1 (the recursion), remark 2 (lambda), table D.1 (constants).

Everything is time-major. T is the number of transitions, B the batch size. Index s is
about the action taken on observation x_s: rewards[s] and discounts[s] belong to the
transition from x_s to x_{s+1}, and x_T is the observation that bootstrap_value is the
value of.

compute_losses() takes log-probabilities, or log-densities, so actions may be of any
kind (torchbeast/distributions.py has policies over them).

`mask` is False where a transition is not real because x_s was the last observation of
an episode and x_{s+1} is the first of the next: no delta, no trace, no loss there.
An episode that ended at x_{s+1} has discounts[s] = 0 (terminated), or is bootstrapped
from V(x_{s+1}) (truncated), which needs no argument at all.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

REDUCTIONS = ("sum", "mean")


class VTraceReturns(NamedTuple):
    vs: Tensor  # [T, B] value targets v_s.
    pg_advantages: Tensor  # [T, B] advantage_s of from_importance_weights().


class Losses(NamedTuple):
    total: Tensor  # [] pg + baseline_cost * baseline + entropy_cost * entropy.
    pg: Tensor  # []
    baseline: Tensor  # [] without its cost.
    entropy: Tensor  # [] without its cost: minus the policy's entropy.
    vtrace: VTraceReturns


@torch.no_grad()
def from_importance_weights(
    log_rhos: Tensor,  # [T, B, ...] log pi(a|x) - log mu(a|x).
    discounts: Tensor,  # [T, B, ...] gamma, or 0 where it terminated at x_{s+1}.
    rewards: Tensor,  # [T, B, ...]
    values: Tensor,  # [T, B, ...] V(x_s).
    bootstrap_value: Tensor,  # [B, ...] V(x_T).
    mask: Tensor | None = None,  # [T, B, ...] bool, False: not a real transition.
    clip_rho_threshold: float | None = 1.0,  # rho-bar. None: no clipping.
    clip_pg_rho_threshold: float | None = 1.0,  # rho-bar of the advantages.
    clip_c_threshold: float | None = 1.0,  # c-bar.
    lambda_: float = 1.0,  # Remark 2: c_s is multiplied by it.
) -> VTraceReturns:
    """Off-policy corrected value targets and policy gradient advantages. Dimensions
    after B may be anything, for example agents, or heads of the network.

    Equation (1) of the paper, in its recursive form (remark 1):

        v_s - V(x_s) = delta_s + gamma_s * c_s * (v_{s+1} - V(x_{s+1}))
        delta_s      = min(rho_bar, rho_s) * (r_s + gamma_s * V(x_{s+1}) - V(x_s))
        c_s          = lambda * min(c_bar, rho_s)
        advantage_s  = min(pg_rho_bar, rho_s) * (r_s + gamma_s * q_{s+1} - V(x_s))
        q_s          = lambda * v_s + (1 - lambda) * V(x_s)

    with v_T = V(x_T). In the paper lambda is 1, and q is v. (Where pi is mu, these are
    GAE's advantages, arXiv 1506.02438.) Where mask is False, v_s = V(x_s) and the
    advantage is 0, so that step s - 1 is bootstrapped from V(x_s) itself.

    No gradient flows through the result: both fields are targets. With c_bar above 1
    or None, products of c over many steps may overflow.

    Raises ValueError, naming the argument, for a wrong rank, shape or dtype.
    """
    _check_float("log_rhos", log_rhos)
    if log_rhos.ndim < 2:
        shape = tuple(log_rhos.shape)
        raise ValueError(f"log_rhos has shape {shape}, expected [T, B, ...]")
    for name, x in dict(discounts=discounts, rewards=rewards, values=values).items():
        _check_like(name, x, log_rhos, "log_rhos")
    _check_like("bootstrap_value", bootstrap_value, log_rhos[-1], "log_rhos[-1]")
    mask = _check_mask(mask, log_rhos)
    for name, threshold in dict(
        clip_rho_threshold=clip_rho_threshold,
        clip_pg_rho_threshold=clip_pg_rho_threshold,
        clip_c_threshold=clip_c_threshold,
    ).items():
        if threshold is not None and not threshold >= 0:
            raise ValueError(f"{name} is {threshold}, expected a number >= 0 or None")
    if not 0 <= lambda_ <= 1:
        raise ValueError(f"lambda_ is {lambda_}, expected a number in [0, 1]")

    rhos = torch.exp(log_rhos)
    cs = lambda_ * _clip(rhos, clip_c_threshold)
    next_values = torch.cat([values[1:], bootstrap_value[None]])  # [T, B, ...]
    td_errors = rewards + discounts * next_values - values
    deltas = _where(mask, _clip(rhos, clip_rho_threshold) * td_errors)
    decays = _where(mask, discounts * cs)

    # v_s - V(x_s) = delta_s + decay_s * (v_{s+1} - V(x_{s+1})).
    vs = values + discounted_sums(deltas, decays)

    next_qs = torch.cat([values[1:].lerp(vs[1:], lambda_), bootstrap_value[None]])
    advantages = _clip(rhos, clip_pg_rho_threshold) * (
        rewards + discounts * next_qs - values
    )
    return VTraceReturns(vs=vs, pg_advantages=_where(mask, advantages))


def discounted_sums(x: Tensor, decays: Tensor) -> Tensor:
    """Returns y_s = x_s + decay_s * y_{s+1}, all [T, ...]; y_T is 0."""
    # A scan: each round doubles the number of steps whose terms are in y_s. It takes
    # log2(T) rounds over [T, ...]; a loop takes T rounds of several kernels each.
    y, k = x, 1
    while k < len(x):
        y = torch.cat([y[:-k] + decays[: len(x) - k] * y[k:], y[-k:]])
        decays = decays[:-k] * decays[k:]  # Each is now over 2 * k whole steps.
        k *= 2
    return y


def compute_losses(
    behavior_log_probs: Tensor,  # [T, B] log mu(a|x)
    target_log_probs: Tensor,  # [T, B] log pi(a|x)
    target_entropies: Tensor,  # [T, B] of pi
    discounts: Tensor,  # [T, B]
    rewards: Tensor,  # [T, B]
    values: Tensor,  # [T, B]
    bootstrap_value: Tensor,  # [B]
    mask: Tensor | None = None,  # [T, B] bool
    *,
    baseline_cost: float,
    entropy_cost: float,
    reduction: str = "sum",
    ratio_clipping: float = 0.0,  # PPO's epsilon. 0: none.
    **thresholds: Any,  # from_importance_weights() has them.
) -> Losses:
    """IMPALA's loss for any policy: V-trace, the three losses, and their sum.

    With ratio_clipping an advantage is 0 where PPO's objective is flat (equation (7) of
    arXiv 1707.06347): a positive one if pi / mu > 1 + epsilon, a negative one if it is
    below 1 - epsilon.
    """
    _check_float("target_log_probs", target_log_probs)
    for name, x in dict(
        behavior_log_probs=behavior_log_probs, target_entropies=target_entropies
    ).items():
        _check_like(name, x, target_log_probs, "target_log_probs")
    log_rhos = target_log_probs.detach() - behavior_log_probs.detach()
    returns = from_importance_weights(
        log_rhos, discounts, rewards, values, bootstrap_value, mask, **thresholds
    )
    advantages = returns.pg_advantages
    if ratio_clipping > 0:
        change = (log_rhos.exp() - 1) * advantages.sign()
        advantages = _where(change <= ratio_clipping, advantages)
    pg_loss = reduce(-target_log_probs * advantages, mask, reduction)
    errors = _where(mask, returns.vs - values)
    baseline_loss = reduce(0.5 * errors.square(), mask, reduction)
    entropy_loss = reduce(-target_entropies, mask, reduction)
    total = pg_loss + baseline_cost * baseline_loss + entropy_cost * entropy_loss
    return Losses(total, pg_loss, baseline_loss, entropy_loss, returns)


def _clip(x: Tensor, threshold: float | None) -> Tensor:
    return x if threshold is None else x.clamp(max=threshold)


def _where(mask: Tensor | None, x: Tensor) -> Tensor:
    # Not a product: 0 * inf is NaN, and masked targets may be anything. For the same
    # reason targets are masked before they are combined with what has a gradient.
    return x if mask is None else torch.where(mask, x, 0.0)


def reduce(loss: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    """Returns the sum or the mean of a loss [T, B] where the mask [T, B] is True, or
    everywhere without one. For a mean in an agent's loss() the mask is to be
    ~batch["done"][1:], by which slices and ranks are weighted. Raises ValueError if the
    mask is not bool or of another shape, or the reduction is neither "sum" nor
    "mean"."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {REDUCTIONS}")
    mask = _check_mask(mask, loss)
    total = _where(mask, loss).sum()
    if reduction == "sum":
        return total
    return total / (loss.numel() if mask is None else mask.sum().clamp(min=1))


def _check_float(name: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"{name} has dtype {x.dtype}, expected a floating point one")


def _check_like(name: str, x: Tensor, like: Tensor, like_name: str) -> None:
    _check_float(name, x)
    if x.shape != like.shape or x.dtype != like.dtype:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}, "
            f"{like_name} {tuple(like.shape)} and {like.dtype}"
        )


def _check_mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}, expected torch.bool")
    if mask is not None and mask.shape != like.shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, expected {tuple(like.shape)}"
        )
    return mask
