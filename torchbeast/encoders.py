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

from torchbeast.images import MIN_SIDE, image_shape, is_image, large_image, num_ids
from torchbeast.spaces import children


def make_encoder(
    space,
    net="shallow",
    bfloat16=False,
    numbers="mlp",
    hidden_sizes=None,
    layer_norm=False,
):
    """A module that turns observations of the space [N, ...] into [N, out_features],
    float32.

    net:      what images go through, one of NETS
    bfloat16: images are computed on in this precision; numbers are not, as 1,001 and
              1,003 would be the same number
    numbers:  what numbers go through, one of NUMBERS
    hidden_sizes: of its layers, if not their own
    layer_norm: whether each layer is followed by a LayerNorm
    """
    constants = dict(NUMBERS[numbers])
    if hidden_sizes is not None and constants:
        constants["hidden_sizes"] = hidden_sizes
    encoder = _make_encoder(space, "observation", net, bfloat16, constants)
    initialize(encoder)
    if layer_norm:
        add_layer_norm(encoder)
    else:  # A LayerNorm would divide zeros by their deviation.
        begin_as_identities(encoder)
    return encoder


def _make_encoder(space, name, net, bfloat16, of_numbers):
    entries = children(space)
    if entries:
        encoders = {
            key: _make_encoder(part, f"{name}/{key}", net, bfloat16, of_numbers)
            for key, part in entries
        }
        return NestEncoder(encoders, combine=bool(of_numbers))
    if is_image(space):
        encoder = ImageEncoder(space, net, bfloat16)
        _, (height, width, channels) = image_shape(space)
        ids = f" of {encoder.num_ids:,} ids" if encoder.num_ids else ""
        what = f"image{ids}, height {height}, width {width}, channels {channels}"
    elif isinstance(space, (spaces.Box, spaces.MultiBinary)):
        size, logarithms = math.prod(space.shape), has_large_integers(space)
        encoder = NumbersEncoder(size, logarithms, **of_numbers)
        what = f"numbers, {size}"
        table = len(space.shape) == 2 and min(space.shape) >= MIN_SIDE
        if table and np.issubdtype(space.dtype, np.integer):
            what += f" ({space.shape[0]} x {space.shape[1]}: --observation_layout HWC "
            what += "makes it an image)"
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


def has_large_integers(space):
    """Tells whether the numbers of a Box or MultiBinary are integers that may be so
    large that networks get their logarithms. (Bytes are often declared to be up to 255
    and are 0 or 1: divided by 255, nothing was learned from them.)"""
    if not isinstance(space, spaces.Box) or space.dtype.kind not in "iu":
        return False
    return max(-float(space.low.min()), float(space.high.max())) >= 255


def summary(net, texts=()):
    """Returns a line that names what each encoder of a network encodes, the
    observations of text, which are left out, and the number of parameters."""
    parts = [m.encodes for m in net.modules() if hasattr(m, "encodes")]
    parts = list(dict.fromkeys(parts))  # Policy and value may have one each.
    if texts:
        parts.append(f"without {', '.join(texts)} (text)")
    parts.append(f"{sum(p.numel() for p in net.parameters()):,} parameters")
    return f"network: {', '.join(parts)}"


def large_images(net):
    """Returns [(name, height, width)] of the images that --resize would make faster."""
    found = [
        (getattr(m, "encodes", "the observation").partition(" (")[0], *m.large)
        for m in net.modules()
        if isinstance(m, ImageEncoder) and m.large
    ]
    return list(dict.fromkeys(found))


# A CPU works on so many bytes of observations at a time (96 of Atari's): what is
# computed from them stays in its cache.
SLICE_BYTES = 96 * 4 * 84 * 84
ID_FEATURES = 8  # Each id of an image becomes so many.


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


def to_channels_last(module, device):
    """Moves a module to the device, and its convolutions' weights into an order that is
    twice as fast to train on a CPU. Returns it. (Module.to() refuses what has five
    dimensions.)"""
    module.to(device)
    for x in module.parameters():
        if x.ndim == 4:
            x.data = x.data.contiguous(memory_format=torch.channels_last)
    return module


def begin_as_identities(module):
    """Has residual blocks add nothing at first (Zhang et al., arXiv 1901.09321, section
    3), after initialize(), which zeroes their biases. Else the deep network's first
    values were several times the returns, and its losses on Pong grew to 10^4 to
    10^7."""
    for block in module.modules():
        if isinstance(block, ResidualBlock):
            nn.init.zeros_(block.layers[-1].weight)


def add_layer_norm(module):
    """Puts a LayerNorm behind each convolution, over channels, height and width, and
    behind each linear layer of a module (Ba et al., arXiv 1607.06450)."""
    for name, layer in list(module.named_children()):
        if isinstance(layer, nn.Conv2d):
            norm = nn.GroupNorm(1, layer.out_channels)  # For images of any size.
        elif isinstance(layer, nn.Linear):
            norm = nn.LayerNorm(layer.out_features)
        else:
            add_layer_norm(layer)
            continue
        setattr(module, name, nn.Sequential(layer, norm))


def mlp(*sizes, activation=nn.ReLU):
    """Linear layers from each of these sizes to the next, with activations between
    them."""
    layers = []
    for in_features, out_features in zip(sizes, sizes[1:]):
        layers += [nn.Linear(in_features, out_features), activation()]
    return nn.Sequential(*layers[:-1])


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


def nature_layers(channels, side):
    """The convolutions of DQN (Mnih et al., "Human-level control through deep
    reinforcement learning", Nature 2015); of a side below 36, with kernels and strides
    of half the size."""
    half = 1 if side >= 36 else 2
    return nn.Sequential(
        CenteredConv2d(channels, 32, 8 // half, stride=4 // half),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4 // half, stride=2 // half),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3 if half == 1 else 2),
        nn.ReLU(),
        nn.Flatten(),
    )


def small_layers(channels, side):
    """The convolution of MinAtar's networks (Young and Tian, arXiv 1903.03176): for
    images of so few pixels that each is a thing, on no background."""
    return nn.Sequential(nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten())


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


# The convolutions, and the size of the layer after them.
NETS = {
    "deep": (deep_layers, 256),
    "shallow": (shallow_layers, 256),
    "nature": (nature_layers, 512),
    "small": (small_layers, 128),
}


class ImageEncoder(nn.Module):
    """Encodes images of a Box [N, ...], as image_shape() knows them."""

    def __init__(self, space, net, bfloat16):
        super().__init__()
        if net not in NETS:
            raise ValueError(f"net is {net!r}, expected one of {', '.join(NETS)}")
        layers, self.out_features = NETS[net]
        self.bfloat16 = bfloat16
        self.order, (height, width, channels) = image_shape(space)
        self.large = large_image(space)  # (H, W), if so.
        self.num_ids = num_ids(space)
        if self.num_ids:
            self.embedding = nn.Embedding(self.num_ids, ID_FEATURES)
            channels *= ID_FEATURES
        # Four from the darkest to the brightest. With one, a ball of a few pixels was
        # learned about more slowly.
        size = float(space.high.max()) - float(space.low.min())
        self.scale = 1 / 64 if size == 255 else 4 / size if 0 < size < 1e6 else 1
        self.layers = layers(channels, min(height, width))
        with torch.no_grad():
            x = self._scaled_image(torch.zeros(1, *space.shape))
            features = self.layers(x).shape[1] + channels
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
        if self.num_ids:
            x = self.embedding(x.long().clamp(0, self.num_ids - 1)).flatten(3)
        x = x.permute(0, 3, 1, 2)
        if self.num_ids:
            return x
        # (In place: as three new tensors it was a tenth of an update.)
        x = x.float() if x.dtype != torch.float32 else x.clone()
        return x.mul_(self.scale)

    def forward(self, x):
        if x.device.type != "cpu":
            return self._encode(x)
        num_bytes = x[:1].numel() * x.element_size()
        size = max(1, SLICE_BYTES // max(1, num_bytes))
        return torch.cat([self._encode(part) for part in x.split(size)])

    def _encode(self, x):
        x = self._scaled_image(x)
        brightness = x.mean((2, 3))  # [N, C]; layers that are centered cannot see it.
        with autocast(self.bfloat16, x.device):
            x = torch.cat([self.layers(x), brightness], dim=1)
            return F.relu(self.fc(x)).float()


class NumbersEncoder(nn.Module):
    """An MLP for numbers [N, ...] of any shape and dtype; without layers, the numbers.

    logarithms: of integers, sign(x) * log(1 + |x|)
    factor:     what outputs are multiplied by
    """

    def __init__(
        self,
        in_features,
        logarithms=False,
        hidden_sizes=(),
        activation=nn.ReLU,
        factor=1,
    ):
        super().__init__()
        self.of_logarithms, self.factor = logarithms, factor
        if logarithms:  # Checkpoints of networks without it are refused.
            self.register_buffer("logarithms", torch.ones(()))
        self.out_features = (in_features, *hidden_sizes)[-1]
        self.layers = mlp(in_features, *hidden_sizes, activation=activation)
        if hidden_sizes:
            self.layers.append(activation())

    def forward(self, x):
        x = x.reshape(len(x), -1)
        if self.of_logarithms and not x.is_floating_point():  # It may be normalised.
            x = x.float()
            x = x.sign() * x.abs().log1p()
        x = self.layers(x.float())
        return x if self.factor == 1 else self.factor * x


NUMBERS = {
    # Outputs are of order 10, so that the heads, whose weights move by about the
    # learning rate an update, soon reach returns of order 100. (Without this factor,
    # the value of CartPole was still 30 off after 2,000 updates, and the policy stood
    # still.)
    "mlp": dict(hidden_sizes=(256, 256), factor=10),
    "relu": dict(hidden_sizes=(256, 256)),
    "tanh": dict(hidden_sizes=(64, 64), activation=nn.Tanh),
    "flat": {},  # For networks with layers of their own.
}


class OneHotEncoder(nn.Module):
    """An embedding of integers [N, ...], of which the i-th is one of sizes[i] choices
    that begin at start."""

    def __init__(self, sizes, start):
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
    """Encodes each entry of a dict or tuple of observations, concatenates the results,
    and combines them in a layer as wide as the widest of them.

    Heads are linear: without this layer, policy and value would be sums of a function
    of each entry, which are right about an exclusive-or of two entries half of the
    time. A single entry needs none, nor do networks with layers of their own.

    encoders: {key: encoder}
    """

    def __init__(self, encoders, combine):
        super().__init__()
        self.keys = list(encoders)
        self.encoders = nn.ModuleList(encoders.values())
        sizes = [encoder.out_features for encoder in self.encoders]
        self.combine, self.out_features = nn.Identity(), sum(sizes)
        if combine and len(sizes) > 1:
            self.combine = nn.Sequential(nn.Linear(sum(sizes), max(sizes)), nn.ReLU())
            self.out_features = max(sizes)

    def forward(self, x):
        parts = [encode(x[key]) for key, encode in zip(self.keys, self.encoders)]
        return self.combine(torch.cat(parts, dim=1))


class TwoEncoders(nn.Module):
    """An encoder for the policy and one for the value. Returns both's features [N, F],
    a pair; in eval(), the policy's alone."""

    def __init__(self, policy, value):
        super().__init__()
        self.policy, self.value = policy, value
        self.out_features = policy.out_features

    def forward(self, x):
        return (self.policy(x), self.value(x)) if self.training else self.policy(x)
