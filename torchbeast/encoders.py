"""Encoders: any observation space to a feature vector.

To encode a kind of observation differently, edit _make_encoder().
"""

import contextlib
import math

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn


def make_encoder(space, deep=False, bfloat16=False):
    """A module that turns observations of the space [N, ...] into [N, out_features],
    float32.

    deep:     images go through the deep network of the IMPALA paper, not the shallow
    bfloat16: images are computed on in this precision; numbers are not, as 1,001 and
              1,003 would be the same number
    """
    encoder = _make_encoder(space, deep, bfloat16)
    initialize(encoder)
    return encoder


def _make_encoder(space, deep, bfloat16):
    if isinstance(space, spaces.Dict):
        return NestEncoder(space.spaces, deep, bfloat16)
    if isinstance(space, spaces.Tuple):
        return NestEncoder(dict(enumerate(space.spaces)), deep, bfloat16)
    if isinstance(space, spaces.Box):
        if is_image(space):
            layers = deep_layers if deep else shallow_layers
            return ImageEncoder(space.shape, channels_last(space), layers, bfloat16)
        scale = 255 if space.dtype == np.uint8 else 1
        return VectorEncoder(math.prod(space.shape), scale)
    if isinstance(space, spaces.MultiBinary):
        return VectorEncoder(math.prod(space.shape))
    if isinstance(space, spaces.Discrete):
        return OneHotEncoder([int(space.n)], space.start)
    if isinstance(space, spaces.MultiDiscrete):
        start = torch.as_tensor(space.start.ravel())
        return OneHotEncoder([int(n) for n in space.nvec.ravel()], start)
    raise ValueError(f"there is no encoder for observation space {space}")


def is_image(space):
    """Tells whether the space is an image, or a stack of images, that is large enough
    for convolutions to halve it a few times."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8:
        return False
    if len(space.shape) != 3:
        return False
    return min(space.shape[:2] if channels_last(space) else space.shape[1:]) >= 20


def channels_last(space):
    """Tells whether an image's shape is [H, W, C], not [C, H, W]."""
    return space.shape[2] < space.shape[0]


def has_images(space):
    """Tells whether an observation of the space is an image, or holds one."""
    if isinstance(space, spaces.Dict):
        return any(map(has_images, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return any(map(has_images, space.spaces))
    return is_image(space)


def autocast(bfloat16, device):
    """A context in which arithmetic is bfloat16, if `bfloat16` is true. Weights stay
    float32."""
    if not bfloat16:
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def initialize(module, gain=2**0.5):
    """Gives convolutions and linear layers orthogonal weights and zero biases. With
    PyTorch's own the signal faded from layer to layer, and values were learned late."""
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.orthogonal_(layer.weight, gain)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def shallow_layers(channels):
    """The convolutions of IMPALA's figure 3, left."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.Flatten(),
    )


def deep_layers(channels):
    """The convolutions of IMPALA's figure 3, right: three sections of two residual
    blocks."""
    layers = []
    for width in (16, 32, 32):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
            ResidualBlock(width),
            ResidualBlock(width),
        ]
        channels = width
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten())


class ResidualBlock(nn.Module):
    """Maps [N, channels, H, W] to the same shape."""

    def __init__(self, channels):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x):
        return x + self.layers(x)


class ImageEncoder(nn.Module):
    """Encodes uint8 images [N, C, H, W], or [N, H, W, C], by the IMPALA paper's
    layers."""

    def __init__(
        self, shape, channels_last=False, layers=shallow_layers, bfloat16=False
    ):
        super().__init__()
        self.bfloat16 = bfloat16
        self.channels_last = channels_last
        self.layers = layers(shape[2] if channels_last else shape[0])
        with torch.no_grad():
            features = self._convolve(torch.zeros(1, *shape)).shape[1]
        self.out_features = 256
        self.fc = nn.Linear(features, self.out_features)

    def _convolve(self, x):
        if not self.channels_last:
            # The convolutions take their channels last, too. As bytes it is a quarter
            # of the work, and done once, not in the backward pass again. (On a CPU
            # stack() is faster than contiguous(), by a tenth of all the network does.)
            x = torch.stack(x.unbind(1), dim=-1)
        x = x.permute(0, 3, 1, 2)
        # From -2 to 2. Between 0 and 1 a ball of a few pixels is lost in the
        # background: the value of Pong was learned four times slower.
        # (In place: as three new tensors it was a tenth of an update.)
        return self.layers(x.float().mul_(1 / 64).sub_(2))

    def forward(self, x):
        with autocast(self.bfloat16, x.device):
            return F.relu(self.fc(self._convolve(x))).float()


class VectorEncoder(nn.Module):
    """An MLP for numbers [N, ...] of any shape and dtype, divided by scale.

    Its outputs are of order 10, so that the heads, whose weights move by about the
    learning rate an update, soon reach returns of order 100. (Without this factor, the
    value of CartPole was still 30 off after 2,000 updates, and the policy stood still.)
    """

    def __init__(self, in_features, scale=1):
        super().__init__()
        self.scale = scale
        self.out_features = 256
        self.layers = nn.Sequential(
            nn.Linear(in_features, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
        )

    def forward(self, x):
        return 10 * self.layers(x.reshape(len(x), -1).float() / self.scale)


class OneHotEncoder(nn.Module):
    """An embedding of integers [N, ...], of which the i-th is one of sizes[i] choices
    that begin at start."""

    def __init__(self, sizes, start=0):
        super().__init__()
        self.sizes = sizes
        # A buffer, to be moved along; derived from the space, so not saved.
        self.register_buffer("start", torch.as_tensor(start), persistent=False)
        self.out_features = 64
        self.layer = nn.Linear(sum(sizes), self.out_features)

    def forward(self, x):
        x = x.reshape(len(x), -1).long() - self.start
        one_hot = [F.one_hot(i, n) for i, n in zip(x.unbind(1), self.sizes)]
        return F.relu(self.layer(torch.cat(one_hot, dim=1).float()))


class NestEncoder(nn.Module):
    """Encodes each entry of a dict or tuple of observations, and concatenates the
    results."""

    def __init__(self, parts, deep=False, bfloat16=False):
        super().__init__()
        self.keys = list(parts)
        self.encoders = nn.ModuleList(
            [_make_encoder(space, deep, bfloat16) for space in parts.values()]
        )
        self.out_features = sum(e.out_features for e in self.encoders)

    def forward(self, x):
        parts = [encode(x[key]) for key, encode in zip(self.keys, self.encoders)]
        return torch.cat(parts, dim=1)
