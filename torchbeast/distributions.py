"""Probability distributions over actions.

    distribution = make(action_space)
    x = distribution.sample(params)  # params: [..., distribution.num_params]
    log_prob = distribution.log_prob(params, x)  # [...]

The parameters are what a network returns; a distribution holds none itself. "..." are
any leading dimensions, such as [T, B]. A sample x is a nest of tensors like the space:
int64 [..., *shape] for Discrete, MultiDiscrete and MultiBinary, counted from 0; float32
[..., *shape] for Box; a tuple or dict of samples for Tuple and Dict.

Learning needs x. The environment takes to_action(x), clipped to its Box. A network may
read features(action) [..., num_features] of the last action.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from torchbeast.messages import BadInput
from torchbeast.spaces import children, unsupported_actions

IMPOSSIBLE = -1e9  # The logit of a choice that a number does not have.
NO_BOUND = 1e6  # Environments write all kinds of large numbers for infinity.


def make(space, squashed=False):
    """Returns the distribution over a space's actions.

    squashed: makes a SquashedGaussian for a Box, which needs finite bounds, instead of
    a Gaussian. Raises BadInput if the space is not supported.
    """
    entries = children(space)
    if entries:
        parts = {key: make(part, squashed) for key, part in entries}
        return Product(parts, isinstance(space, spaces.Dict))
    if isinstance(space, spaces.Discrete):
        return Categorical([int(space.n)])
    if isinstance(space, spaces.MultiDiscrete):
        return Categorical(space.nvec.ravel().tolist(), space.shape)
    if isinstance(space, spaces.MultiBinary):
        return Categorical([2] * math.prod(space.shape), space.shape)
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        if not squashed:
            return Gaussian(space.shape, space.low, space.high)
        if np.isfinite(space.high - space.low).all() and (space.low < space.high).all():
            return SquashedGaussian(space.low, space.high)
        raise BadInput(
            f"action space {space}: expected finite bounds, the lower ones below the "
            "upper ones; --agent polybeast and ppo need none"
        )
    raise unsupported_actions(space)


class PolicyHead(nn.Linear):
    """A linear layer from features to the parameters of a distribution.

    The deviations of Gaussians are 1 at first. They are learned numbers that no feature
    changes, unless state_dependent_std is true.
    """

    def __init__(self, in_features, distribution, state_dependent_std=False):
        super().__init__(in_features, distribution.num_params)
        free = None  # [P, 1] bool, which parameters no feature changes.
        if distribution.log_stds.any() and not state_dependent_std:
            free = distribution.log_stds[:, None]
        self.register_buffer("free", free, persistent=False)

    def forward(self, x):
        weight = self.weight
        if self.free is not None:
            weight = weight.masked_fill(self.free, 0)
        return F.linear(x, weight, self.bias)


class Distribution:
    """num_params:   P, how many numbers a network has to return for it
    num_features: how many a network may read of an action
    log_stds:     [P] bool, which parameters are logarithms of standard deviations
    """

    num_params: int
    num_features: int
    log_stds: torch.Tensor
    num_masked = 0  # C, how many choices masks tell of.
    log_units: float = 0.0

    def sample(self, params):
        """Draws x for each of params [..., P]. No gradient flows to params."""
        raise NotImplementedError

    def mode(self, params):
        """Returns the most probable x; of a SquashedGaussian, its median."""
        raise NotImplementedError

    def log_prob(self, params, x):
        """Returns the logarithm [...] of the probability, or density, of each x."""
        raise NotImplementedError

    def entropy(self, params):
        """Returns the entropy [...], of densities the differential one."""
        raise NotImplementedError

    def masked(self, params, mask):
        """Returns params [..., P] without a chance for the choices that a mask [..., C]
        bool (torchbeast/masks.py) leaves out, and without a gradient to theirs."""
        return params

    def to_action(self, x):
        """Returns the action that x stands for."""
        return x

    def features(self, action):
        """Returns the action as float32 [..., num_features]: choices one-hot, numbers
        of a bounded Box from -1 to 1."""
        raise NotImplementedError

    def _check(self, params):
        if params.shape[-1] != self.num_params:
            raise ValueError(
                f"params has shape {list(params.shape)}, expected "
                f"[..., {self.num_params}]"
            )

    def _shaped(self, x):
        return x.reshape(*x.shape[:-1], *self.shape)


def flat(x, shape):
    """Returns x [..., *shape] as [..., D]."""
    return x.reshape(*x.shape[: x.ndim - len(shape)], -1)


class Categorical(Distribution):
    """D independent numbers, each with a number of choices of its own. The parameters
    are their logits, one after the other.

    num_choices: [D]
    shape: of a sample, with D numbers
    """

    def __init__(self, num_choices, shape=()):
        self.num_choices = list(num_choices)
        self.shape = tuple(shape)
        self.num_params = self.num_features = self.num_masked = sum(num_choices)
        self.log_stds = torch.zeros(self.num_params, dtype=torch.bool)

    def sample(self, params):
        logits = self._logits(params.detach())
        # The largest logit plus a number of Gumbel's distribution, which is not -inf:
        # that is less than what is impossible. (torch.multinomial would wait for a
        # GPU.)
        uniform = torch.rand_like(logits).clamp_(min=torch.finfo(logits.dtype).tiny)
        gumbel = uniform.log_().neg_().log_().neg_()
        return self._shaped((logits + gumbel).argmax(-1))

    def masked(self, params, mask):
        return params.masked_fill(~mask, IMPOSSIBLE)

    def mode(self, params):
        return self._shaped(self._logits(params).argmax(-1))

    def log_prob(self, params, x):
        log_probs = self._log_probs(params)  # [..., D, A]
        x = flat(x, self.shape)[..., None]
        return log_probs.gather(-1, x.long()).flatten(-2).sum(-1)

    def entropy(self, params):
        log_probs = self._log_probs(params)
        return -(log_probs.exp() * log_probs).flatten(-2).sum(-1)

    def features(self, action):
        pairs = zip(flat(action, self.shape).unbind(-1), self.num_choices)
        return torch.cat([F.one_hot(x, n) for x, n in pairs], -1).float()

    def _log_probs(self, params):
        return F.log_softmax(self._logits(params), dim=-1)

    def _logits(self, params):
        """[..., D, A], where A is the largest number of choices."""
        self._check(params)
        A = max(self.num_choices)
        if A * len(self.num_choices) == self.num_params:  # All have as many.
            return params.unflatten(-1, (-1, A))
        parts = [
            F.pad(part, (0, A - n), value=IMPOSSIBLE)
            for part, n in zip(params.split(self.num_choices, -1), self.num_choices)
        ]
        return torch.stack(parts, -2)


class Gaussian(Distribution):
    """Independent normal distributions. The parameters are the D means, then the D
    logarithms of the standard deviations. Of a number with finite bounds these are in
    units of half their distance, from their middle: 0 and 1 fit any bounds.

    shape:     of a sample, with D numbers
    low, high: arrays of this shape, may be infinite
    """

    no_bound = NO_BOUND

    def __init__(self, shape, low=-np.inf, high=np.inf):
        self.shape = tuple(shape)
        self.num_features = math.prod(self.shape)
        self.num_params = 2 * self.num_features
        self.log_stds = torch.arange(self.num_params) >= self.num_features
        low, high = (np.broadcast_to(x, shape).astype(float) for x in (low, high))
        with np.errstate(invalid="ignore"):
            middle, scale = (low + high) / 2, (high - low) / 2
        bounded = (scale > 0) & (scale < self.no_bound)
        middle, scale = np.where(bounded, middle, 0), np.where(bounded, scale, 1)
        most = np.where(bounded, 1, np.inf)  # In these units.
        units = torch.as_tensor(np.stack([middle, scale, most]), dtype=torch.float32)
        self._units = units.reshape(3, -1)
        self._has_zero = bool((np.abs(middle) <= most * scale).all())
        # Adding it gives log_prob() of the number in units of its bounds.
        self.log_units = float(np.log(scale).sum())
        self._has_units = bool((middle != 0).any() or (scale != 1).any())

    def sample(self, params):
        return self.rsample(params.detach())

    def rsample(self, params):
        """As sample(), but with a gradient to params (the reparametrisation trick)."""
        mean, log_std = self._split(params)
        return self._shaped(mean + log_std.exp() * torch.randn_like(mean))

    def mode(self, params):
        return self._shaped(self._split(params)[0])

    def log_prob(self, params, x):
        mean, log_std = self._split(params)
        z = (flat(x, self.shape) - mean) / log_std.exp()
        return -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, params):
        _, log_std = self._split(params)
        return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def features(self, action):
        middle, scale, most = self.units(action)
        x = (flat(action, self.shape) - middle) / scale
        # The last action of an episode's first step is 0, outside of some bounds.
        return x if self._has_zero else x.clamp(-most, most)

    def units(self, x):
        """Returns the middle [D] and half the distance [D] of the bounds, 0 and 1 where
        there are none, and the bound in these units [D], 1 or inf, on the device of x.
        """
        if self._units.device != x.device:
            with torch.inference_mode(False):  # Gradients may flow by them later.
                self._units = self._units.to(x.device)
        return self._units.unbind()

    def _split(self, params):
        self._check(params)
        mean, log_std = params.chunk(2, -1)
        if self._has_units:
            middle, scale, _ = self.units(params)
            mean, log_std = middle + scale * mean, log_std + scale.log()
        return mean, log_std


class SquashedGaussian(Gaussian):
    """The distribution of a = low + (high - low) * (tanh(x) + 1) / 2 for a Gaussian x
    (Haarnoja et al., "Soft Actor-Critic", arXiv 1801.01290, appendix C).

    A sample is x, because tanh cannot be inverted where it saturates. log_prob() is
    that of a.
    """

    no_bound = np.inf

    def __init__(self, low, high):
        super().__init__(low.shape, low, high)
        self._has_units = False  # Whether x has units.

    def uniform(self, params):
        """Draws x for each of params, such that actions are uniform in their bounds."""
        u = 2 * torch.rand_like(params.chunk(2, -1)[0]) - 1
        return self._shaped(torch.atanh(u.clamp(-0.999999, 0.999999)))

    def to_action(self, x):
        middle, scale, _ = self.units(x)
        return self._shaped(middle + scale * torch.tanh(flat(x, self.shape)))

    def log_prob(self, params, x):
        return super().log_prob(params, x) - self._log_slope(flat(x, self.shape)).sum(
            -1
        )

    def entropy(self, params):
        raise NotImplementedError("it has no closed form: take -log_prob() of samples")

    def _log_slope(self, x):
        """log |da/dx| [..., D] of x [..., D]: 1 - tanh(x)^2 = 4 / (e^x + e^-x)^2."""
        log_slope = 2 * (math.log(2) - x - F.softplus(-2 * x))
        return log_slope + self.units(x)[1].log()


class Product(Distribution):
    """Independent distributions, one for each entry of a Tuple or Dict.

    parts: {key: Distribution}, of a Tuple by number
    """

    def __init__(self, parts, is_dict):
        self.parts = parts
        self.is_dict = is_dict
        self.num_params = sum(part.num_params for part in parts.values())
        self.num_features = sum(part.num_features for part in parts.values())
        self.log_stds = torch.cat([part.log_stds for part in parts.values()])
        self.log_units = sum(part.log_units for part in parts.values())
        self.num_masked = sum(part.num_masked for part in parts.values())

    def sample(self, params):
        return self._nest(p.sample(x) for p, x in self._split(params))

    def rsample(self, params):
        return self._nest(p.rsample(x) for p, x in self._split(params))

    def masked(self, params, mask):
        masks = mask.split([part.num_masked for part in self.parts.values()], -1)
        parts = zip(self._split(params), masks)
        return torch.cat([p.masked(x, m) for (p, x), m in parts], -1)

    def mode(self, params):
        return self._nest(p.mode(x) for p, x in self._split(params))

    def uniform(self, params):
        return self._nest(p.uniform(x) for p, x in self._split(params))

    def log_prob(self, params, x):
        split = self._split(params)
        return sum(p.log_prob(y, x[key]) for key, (p, y) in zip(self.parts, split))

    def entropy(self, params):
        return sum(p.entropy(x) for p, x in self._split(params))

    def to_action(self, x):
        return self._nest(p.to_action(x[key]) for key, p in self.parts.items())

    def features(self, action):
        parts = self.parts.items()
        return torch.cat([p.features(action[key]) for key, p in parts], -1)

    def _split(self, params):
        self._check(params)
        sizes = [part.num_params for part in self.parts.values()]
        return list(zip(self.parts.values(), params.split(sizes, -1)))

    def _nest(self, xs):
        return dict(zip(self.parts, xs)) if self.is_dict else tuple(xs)
