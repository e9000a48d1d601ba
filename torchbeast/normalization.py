"""Running statistics, by which observations and rewards are normalised.

They are part of the network's or the agent's state: in checkpoints, and the same for
actors, learner and tests. An agent updates them once for each new batch, after it has
learned: so a batch is seen by the statistics it was acted with, and what is replayed by
today's.
"""

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from torchbeast import ranks
from torchbeast.images import has_images, is_image
from torchbeast.spaces import children
from vtrace import discounted_sums

LIMIT = 10  # Standard deviations. What is further from the mean counts as so far.
EPSILON = 1e-8  # Added to a variance.
LARGEST = 1e100  # Its square is a number.
LEAST = 1e-300  # A count that is as good as none.
# Bounds between these are of numbers in units that networks do not like, such as
# pixels. (Larger ones are mostly none.)
LARGE_BOUNDS = 100, 1e6


class RunningStatistics(nn.Module):
    """The mean and variance, of this shape, of all x so far: mean 0 and variance 1 at
    first."""

    def __init__(self, shape=(), device=None):
        super().__init__()
        kwargs = dict(dtype=torch.float64, device=device)
        self.register_buffer("count", torch.zeros((), **kwargs))
        self.register_buffer("mean", torch.zeros(shape, **kwargs))
        self.register_buffer("variance", torch.ones(shape, **kwargs))

    @torch.no_grad()
    def update(self, x, counted=None):
        """Takes in x [N, *shape], with those of all ranks; of x [T, B, *shape] those
        that are counted [T, B] bool. (A GPU would wait for x[counted].)"""
        dims = list(range(x.dim() - self.mean.dim()))
        if counted is not None:
            counted = counted.reshape(*counted.shape, *(1 for _ in self.mean.shape))

        def sum_of(x):
            return (x if counted is None else torch.where(counted, x, 0)).sum(dims)

        difference = x.double().clamp(-LARGEST, LARGEST) - self.mean
        n = sum_of(torch.ones_like(difference))
        n, first = sum_of_ranks(torch.stack([n, sum_of(difference)]))
        shift = first / n.clamp(min=1)
        second = sum_of_ranks(sum_of((difference - shift).square()))
        # Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
        # computing sample variances" (1979).
        count = self.count.clamp(min=LEAST)  # While none is counted, variance stays 1.
        total = count + n
        squares = self.variance * count + second
        squares += shift.square() * count * n / total
        self.mean.add_(shift * n / total)
        self.variance.copy_(squares / total)
        self.count.add_(n.max())

    def scale(self):
        return (self.variance + EPSILON).rsqrt()

    def forward(self, x):
        """Returns x [N, *shape] normalised, float32."""
        difference = torch.add(x, self.mean, alpha=-1)  # x may be bools.
        return (difference * self.scale()).clamp(-LIMIT, LIMIT).float()


def sum_of_ranks(x):
    ranks.current.sum(flat := x.reshape(-1).contiguous())
    return flat.view_as(x)


class NormalizedEncoder(nn.Module):
    """An encoder of normalised observations. Images and choices stay as they are.

    statistics: another one's, to share.
    """

    def __init__(self, space, encoder, statistics=None):
        super().__init__()
        self.encoder = encoder
        self.out_features = encoder.out_features
        self._normalized = are_numbers(space)
        if statistics is None:
            parts = self.numbers(space)
            statistics = nn.ModuleList(RunningStatistics(x.shape) for x in parts)
        self.statistics = statistics

    def forward(self, observation):
        statistics = iter(self.statistics)
        return self.encoder(self._map(lambda x: next(statistics)(x), observation))

    def numbers(self, observation):
        """Returns the parts of observations that are normalised."""
        parts = []
        self._map(parts.append, observation)
        return tuple(parts)

    def take_in(self, numbers, counted=None):
        """Takes in numbers(), as RunningStatistics.update() does."""
        for statistics, x in zip(self.statistics, numbers, strict=True):
            statistics.update(x, counted)

    def _map(self, fn, observation):
        return self._walk(fn, self._normalized, observation)

    def _walk(self, fn, normalized, x):
        if not isinstance(normalized, dict):
            return fn(x) if normalized else x
        result = {key: self._walk(fn, part, x[key]) for key, part in normalized.items()}
        return result if isinstance(x, (dict, spaces.Dict)) else tuple(result.values())


def are_numbers(space):
    """Tells whether observations of a space are normalised: bool, or of each part in a
    dict. (Compilers of networks cannot tell from arrays, as a space has.)"""
    entries = children(space)
    if entries is None:
        return isinstance(space, spaces.Box) and not is_image(space)
    return {key: are_numbers(part) for key, part in entries}


def real_numbers(space):
    """Returns the Boxes of real numbers, no images, in a space."""
    entries = children(space)
    if entries is not None:
        return [x for _, part in entries for x in real_numbers(part)]
    return [space] if are_numbers(space) and space.dtype.kind == "f" else []


def has_numbers(space):
    """Tells whether agents but R2D2 normalise the observations of a space by default:
    it has no images, or real numbers beside them. (Integers beside an image may be
    codes, such as letters'.)"""
    return not has_images(space) or bool(real_numbers(space))


def has_large_numbers(space):
    """Tells whether a space has real numbers that may be large, for R2D2. (Networks get
    the logarithms of integers that may be.)"""
    least, none = LARGE_BOUNDS
    bounds = [np.abs([x.low, x.high]) for x in real_numbers(space)]
    return any(((least < x) & (x < none)).any() for x in bounds)


class NormalizedRewards(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return
    g_t = r_t + discount * g_{t-1}, 0 where an episode begins (Engstrom et al.,
    "Implementation Matters in Deep Policy Gradients", arXiv 2005.12729).

    Where an episode of many steps has one reward, that is many standard deviations. So
    that none is more than 10, and all keep their proportions, all are divided by what
    the largest one so far needs, if that is more, but by no more than ten standard
    deviations: one reward of a million must not hide the others.

    g crosses rollouts in the agent's core_state. most: what rewards are multiplied by
    at the most.
    """

    def __init__(self, discount, most=math.inf):
        super().__init__()
        self.discount, self.most = discount, most
        self.statistics = RunningStatistics()
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def initial_state(self, batch_size):
        # In double precision, as rewards may be anything.
        return torch.zeros(1, batch_size, dtype=torch.float64)

    def returns(self, step, state):
        """Returns g [T, B] of steps [T, B, ...], after the state [1, B]."""
        reward = step["reward"].double()  # 0 where an episode begins.
        decays = self.discount * (~step["done"]).double()
        first = reward[:1] + decays[:1] * state
        if len(reward) == 1:  # While acting.
            return first
        # Backwards, as the sums of vtrace.py go.
        x = torch.cat([first, reward[1:]]).flip(0)
        return discounted_sums(x, decays.flip(0)).flip(0)

    def update(self, batch, state):
        """Takes in a batch [T + 1, B, ...]. Its first step was in the one before. That
        which begins an episode is no transition."""
        returns = self.returns(batch, state)[1:]
        self.statistics.update(returns, ~batch["done"][1:])
        largest = ranks.current.max(batch["reward"].abs().max().double())
        self.largest.copy_(torch.maximum(self.largest, largest))

    def forward(self, rewards):
        scale = self.statistics.scale()
        if self.most < math.inf:
            scale = scale.clamp(max=self.most)
        scale = (LIMIT / self.largest).clamp(scale / LIMIT, scale)
        return (rewards * scale).clamp(-LIMIT, LIMIT).float()
