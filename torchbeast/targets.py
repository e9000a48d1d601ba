"""What Q-learning does with values: actions, targets, priorities."""

import torch
import torch.nn.functional as F

from torchbeast.distributions import IMPOSSIBLE
from torchbeast.messages import log

MIN_COPIES = 100
EPSILON = 1e-3  # Of rescaled values.
ETA = 0.9  # A rollout's priority: its largest error, and the rest its mean error.


def epsilon_greedy(q, epsilon):
    """Returns {"action": [T, B]}: random ones with probability epsilon [T, B], else
    those of the largest values q [T, B, A]. None is IMPOSSIBLE."""
    action = q.argmax(-1)
    random = torch.rand_like(q).masked_fill(q == IMPOSSIBLE, -1).argmax(-1)
    action = torch.where(torch.rand_like(epsilon) < epsilon, random, action)
    return {"action": action}


def n_step_returns(rewards, discounts, real, n):
    """Sums up the rewards of n transitions, or of fewer where an episode or the rollout
    ends before.

    rewards, discounts, real [T, B]: of the transition from step t to step t + 1;
    discounts are 0 where it terminated, real is False if no action led there.
    Returns (returns, discounts, ends) [T, B]: the target of step t is
    returns + discounts * V(step ends).
    """
    T = len(rewards)
    ends = torch.arange(T, device=rewards.device)[:, None].repeat(1, rewards.shape[1])
    returns, left = torch.zeros_like(rewards), torch.ones_like(rewards)
    going = torch.ones_like(real)
    for k in range(min(n, T)):

        def later(x, k=k):  # x, k transitions later; 0 beyond the end.
            return torch.cat([x[k:], torch.zeros_like(x[:k])])

        going = going & later(real)
        returns = torch.where(going, returns + left * later(rewards), returns)
        left = torch.where(going, left * later(discounts), left)
        ends += going
    return returns, left, ends


def rescale(x):
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + EPSILON x (Pohlen et al., arXiv
    1805.11593)."""
    return x / ((x.abs() + 1).sqrt() + 1) + EPSILON * x  # Exact near 0, too.


def unscale(x):
    """The inverse of rescale(). It is sign(x) (s^2 - 1) with the paper's s, written as
    (s - 1) (s + 1), which keeps its digits near 0 in float32, too."""
    root = (1 + 4 * EPSILON * (x.abs() + 1 + EPSILON)).sqrt()
    part = 2 * x / (root + 1 + 2 * EPSILON)
    return part * (part.abs() + 2)


def of_actions(values, action):
    """Returns values [T, B, ...] of actions [T, B], of all values [T, B, A, ...]."""
    index = action.view(*action.shape, *[1] * (values.ndim - 2))
    return values.take_along_dim(index, 2).squeeze(2)


def quantile_loss(errors):
    """Returns the losses [T, B] of quantile regression by Huber's loss (Dabney et al.,
    arXiv 1710.10044), twice. For N = 1 it is half of the squared error: what is learned
    is then the mean, which Huber's loss misses where errors are large and not
    symmetric.

    errors [T, B, N, N]: errors[..., j, i] is the j-th target less the i-th quantile,
    whose level is (i + 1/2) / N.
    """
    N = errors.shape[-1]
    if N == 1:
        return errors.square()[..., 0, 0] / 2
    levels = (torch.arange(N, device=errors.device) + 0.5) / N
    weights = (levels - (errors < 0).float()).abs()
    losses = F.huber_loss(errors, torch.zeros_like(errors), reduction="none")
    return (2 * weights * losses).mean(2).sum(2)


def copy_interval(flags, num_learned):
    """Returns --target_interval in gradient steps, of which each learns from
    num_learned steps. Says so if the run copies its network to the target network only
    a few times: each copy carries values back by n steps alone."""
    rate = flags.replay_ratio / num_learned  # Gradient steps of an agent step.
    interval = max(1, round(flags.target_interval * rate))
    num = int(max(0, flags.total_steps - flags.replay_start) * rate) // interval
    if num < MIN_COPIES:
        remedy = "a smaller --target_interval"
        if interval == 1:  # There are no more copies than gradient steps.
            remedy = "a smaller --replay_batch_size, a larger --replay_ratio"
        log.warning(
            f"copies of the target network in {flags.total_steps:,} steps: {num}, "
            f"expected {MIN_COPIES} or more: use {remedy}, or more --total_steps"
        )
    return interval


def priorities(errors, real, exponent, of_rollouts):
    """Returns the priorities of samples with these errors [T, B]: of rollouts
    [B] or, if each step is one, [T, B]. Those without a real transition have 0."""
    errors = errors.abs().nan_to_num().clamp(max=1e30).double()  # The loss tells.
    if of_rollouts:
        mean = errors.sum(0) / real.sum(0).clamp(min=1)
        errors, real = ETA * errors.max(0).values + (1 - ETA) * mean, real.any(0)
    return torch.where(real, (errors + 1e-6) ** exponent, 0)
