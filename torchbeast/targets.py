"""Targets of Q-values."""

import torch


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

        def later(x, k=k):  # Of k transitions later; beyond the end, 0.
            return torch.cat([x[k:], torch.zeros_like(x[:k])])

        going = going & later(real)
        returns = torch.where(going, returns + left * later(rewards), returns)
        left = torch.where(going, left * later(discounts), left)
        ends += going
    return returns, left, ends


def rescale(x, epsilon=1e-3):
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x (Pohlen et al., arXiv
    1805.11593)."""
    return x / ((x.abs() + 1).sqrt() + 1) + epsilon * x  # Exact near 0, too.


def unscale(x, epsilon=1e-3):
    """The inverse of rescale(). It is sign(x) (s^2 - 1) with the paper's s, written as
    (s - 1) (s + 1), which keeps its digits near 0 in float32, too."""
    root = (1 + 4 * epsilon * (x.abs() + 1 + epsilon)).sqrt()
    part = 2 * x / (root + 1 + 2 * epsilon)
    return part * (part.abs() + 2)
