"""Batch renormalisation (Ioffe, "Batch Renormalization", arXiv 1702.03275).

N is the number of samples in a batch, F that of features.
"""

import torch
import torch.nn.functional as F
from torch import nn

from torchbeast import ranks

# CrossQ's constants (Bhatt et al., arXiv 1902.05605).
MOMENTUM = 0.99  # Part of the running statistics that stays in an update.
EPSILON = 1e-3  # Added to a variance.
R_MAX, D_MAX = 3, 5
WARM_UP = 100_000  # Updates in which it is plain BatchNorm.


class BatchRenorm(nn.Module):
    """Normalises features x [N, F] by the statistics of their batch, corrected towards
    the running ones, which are those that evaluation normalises by:

        y = weight * ((x - mean_B) / std_B * r + d) + bias
        r = clip(std_B / std, 1 / R_MAX, R_MAX)
        d = clip((mean_B - mean) / std, -D_MAX, D_MAX)

    No gradient flows through r and d. As long as the clips do nothing, training and
    evaluation compute the same function of x.
    """

    def __init__(self, num_features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("variance", torch.ones(num_features))
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        weight, bias = self.weight, self.bias
        if not self.training:
            return F.batch_norm(x, self.mean, self.variance, weight, bias, eps=EPSILON)
        r, d = self.correction(x)
        # Not F.batch_norm(), which refuses a single sample.
        weight, bias = weight * r, bias + weight * d
        return torch.native_batch_norm(x, weight, bias, None, None, True, 0, EPSILON)[0]

    @torch.no_grad()
    def correction(self, x):
        """Returns (r, d) [F] for a batch, and takes it into the running statistics."""
        mean = x.mean(0)
        variance = (x - mean).square_().mean(0)  # Many times as fast as var_mean().
        std = (self.variance + EPSILON).sqrt()
        r = ((variance + EPSILON).sqrt() / std).clamp(1 / R_MAX, R_MAX)
        d = ((mean - self.mean) / std).clamp(-D_MAX, D_MAX)
        warm = self.num_updates >= WARM_UP
        self.mean.lerp_(mean, 1 - MOMENTUM)
        self.variance.lerp_(variance, 1 - MOMENTUM)
        self.num_updates += 1
        return torch.where(warm, r, 1), torch.where(warm, d, 0)


def add_batch_renorm(layers):
    """Returns linear layers and activations with a BatchRenorm in front of them all and
    one behind each activation."""
    size = layers[0].in_features
    result = [BatchRenorm(size)]
    for layer in layers:
        result.append(layer)
        if isinstance(layer, nn.Linear):
            size = layer.out_features
        else:
            result.append(BatchRenorm(size))
    return nn.Sequential(*result)


@torch.no_grad()
def average_over_ranks(*modules):
    """Replaces running statistics by their means over all ranks. Each rank normalises
    its share of a batch by that share's statistics; evaluation is the same on all."""
    if ranks.current.num == 1:
        return
    layers = [x for m in modules for x in m.modules() if isinstance(x, BatchRenorm)]
    statistics = [x for layer in layers for x in (layer.mean, layer.variance)]
    ranks.current.sum(flat := torch.cat(statistics))
    sums = flat.split([len(x) for x in statistics])
    for x, total in zip(statistics, sums):
        x.copy_(total / ranks.current.num)
