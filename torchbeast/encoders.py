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
    encoder = _make_encoder(space, deep, bfloat16, "observation")
    initialize(encoder)
    return encoder


def _make_encoder(space, deep, bfloat16, name):
    if isinstance(space, spaces.Dict):
        return NestEncoder(space.spaces, deep, bfloat16, name)
    if isinstance(space, spaces.Tuple):
        return NestEncoder(dict(enumerate(space.spaces)), deep, bfloat16, name)
    if is_image(space):
        encoder = ImageEncoder(space, deep_layers if deep else shallow_layers, bfloat16)
        what = f"image, {' x '.join(map(str, space.shape))}"
    elif isinstance(space, (spaces.Box, spaces.MultiBinary)):
        scale = 255 if space.dtype == np.uint8 else 1
        encoder = VectorEncoder(math.prod(space.shape), scale)
        what = f"numbers, {math.prod(space.shape)}"
    elif isinstance(space, spaces.Discrete):
        encoder = OneHotEncoder([int(space.n)], space.start)
        what = f"1 of {space.n}"
    elif isinstance(space, spaces.MultiDiscrete):
        start = torch.as_tensor(space.start.ravel())
        encoder = OneHotEncoder([int(n) for n in space.nvec.ravel()], start)
        what = f"integers, {math.prod(space.shape)}"
    else:
        raise ValueError(f"there is no encoder for observation space {space}")
    encoder.encodes = f"{name} ({what})"
    return encoder


def summary(net, texts=()):
    """Returns a line that names what each encoder of a network encodes, the
    observations of text, which are left out, and the number of parameters."""
    parts = [m.encodes for m in net.modules() if hasattr(m, "encodes")]
    if texts:
        parts.append(f"without {', '.join(texts)} (text)")
    parts.append(f"{sum(p.numel() for p in net.parameters()):,} parameters")
    return f"network: {', '.join(parts)}"


MIN_IMAGE_SIDE = 10  # Smaller ones are vectors: convolutions have nothing to halve.


def image_shape(space):
    """Returns (order, (H, W, C)) if the space is an image or a stack of images, else
    None. order: the dimensions of an observation that are H and W, then those that
    together are C.

    Images are [H, W], [H, W, C], [C, H, W], or stacks of the last two, [K, ...], of any
    dtype, with sides of 10 or more. [H, W] must have bounds: without, it is a table.
    """
    if not isinstance(space, spaces.Box):
        return None
    shape = space.shape
    if len(shape) == 2 and space.is_bounded():
        order = (0, 1)
    elif len(shape) == 3:
        order = (0, 1, 2) if shape[2] < shape[0] else (1, 2, 0)
    elif len(shape) == 4:
        order = (1, 2, 0, 3) if shape[3] < shape[1] else (2, 3, 0, 1)
    else:
        return None
    height, width, *channels = (shape[i] for i in order)
    if min(height, width) < MIN_IMAGE_SIDE:
        return None
    return order, (height, width, math.prod(channels))


def is_image(space):
    return image_shape(space) is not None


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


class CenteredConv2d(nn.Conv2d):
    """A convolution by the weights less each filter's mean over height and width, so
    that a flat background of any brightness and colour becomes the bias alone.

    Otherwise the background, which is most of an image, decides each filter's output,
    and each update moves all weights of a filter the same way to move that output.
    """

    def forward(self, x):
        weight = self.weight - self.weight.mean((2, 3), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


def shallow_layers(channels, side):
    """The convolutions of IMPALA's figure 3, left; half of their size and stride for
    images with a side of less than 20."""
    half = 1 if side >= 20 else 2
    return nn.Sequential(
        CenteredConv2d(channels, 16, 8 // half, stride=4 // half),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4 // half, stride=2 // half),
        nn.ReLU(),
        nn.Flatten(),
    )


def deep_layers(channels, side):
    """The convolutions of IMPALA's figure 3, right: three sections of two residual
    blocks."""
    layers = []
    for width in (16, 32, 32):
        convolution = nn.Conv2d if layers else CenteredConv2d
        layers += [
            convolution(channels, width, 3, padding=1),
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
    """Encodes images of a Box [N, ...], as image_shape() knows them, by the IMPALA
    paper's layers."""

    def __init__(self, space, layers=shallow_layers, bfloat16=False):
        super().__init__()
        self.bfloat16 = bfloat16
        self.order, (height, width, channels) = image_shape(space)
        # Four from the darkest to the brightest. With one, a ball of a few pixels was
        # learned about more slowly.
        self.scale = 1
        if space.dtype == np.uint8:
            self.scale = 1 / 64
        elif 0 < (size := float(space.high.max()) - float(space.low.min())) < 1e6:
            self.scale = 4 / size
        self.layers = layers(channels, min(height, width))
        with torch.no_grad():
            x = self._scaled_image(torch.zeros(1, *space.shape))
            features = self.layers(x).shape[1] + channels
        self.out_features = 256
        self.fc = nn.Linear(features, self.out_features)

    def _scaled_image(self, x):
        """Observations [N, ...] as floats [N, C, H, W] in channels-last order."""
        if self.order == (1, 2, 0):
            # The convolutions take their channels last, too. As bytes it is a quarter
            # of the work, and done once, not in the backward pass again. (On a CPU
            # stack() is faster than contiguous(), by a tenth of all the network does.)
            x = torch.stack(x.unbind(1), dim=-1)
        elif self.order != (0, 1, 2):
            x = x.permute(0, *(1 + i for i in self.order))
            x = x.reshape(*x.shape[:3], -1)  # [N, H, W, C]
        x = x.permute(0, 3, 1, 2)
        # (In place: as three new tensors it was a tenth of an update.)
        x = x.float() if x.dtype != torch.float32 else x.clone()
        return x.mul_(self.scale)

    def forward(self, x):
        x = self._scaled_image(x)
        brightness = x.mean((2, 3))  # [N, C]; layers that are centered cannot see it.
        with autocast(self.bfloat16, x.device):
            x = torch.cat([self.layers(x), brightness], dim=1)
            return F.relu(self.fc(x)).float()


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

    def __init__(self, parts, deep, bfloat16, name):
        super().__init__()
        self.keys = list(parts)
        self.encoders = nn.ModuleList(
            [
                _make_encoder(space, deep, bfloat16, f"{name}/{key}")
                for key, space in parts.items()
            ]
        )
        self.out_features = sum(e.out_features for e in self.encoders)

    def forward(self, x):
        parts = [encode(x[key]) for key, encode in zip(self.keys, self.encoders)]
        return torch.cat(parts, dim=1)
