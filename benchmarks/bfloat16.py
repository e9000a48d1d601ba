"""PolyBeast with --precision bfloat16 as hardware computes it, where there is none.

    python -m benchmarks.bfloat16 [flags of polybeast]

Convolutions and linear layers are float32's, of operands rounded to bfloat16, and their
results are rounded. CPUs and GPUs with bfloat16 do the same: they add up in float32, in
which the products are exact. So does PyTorch's emulation, but it takes several times as
long. This is for comparing learning curves, not speed.
"""

import sys

import torch
import torch.nn.functional as F

import polybeast


def rounded(operation):
    """The operation, of (input, weight, bias, ...), that rounds as autocast does."""

    def compute(*tensors_and_options):
        if not torch.is_autocast_enabled("cpu"):
            return operation(*tensors_and_options)
        with torch.autocast("cpu", enabled=False):
            args = [
                # Both ways: the gradients are rounded by the same casts.
                x.bfloat16().float() if isinstance(x, torch.Tensor) else x
                for x in tensors_and_options
            ]
            return operation(*args).bfloat16()

    return compute


if __name__ == "__main__":
    F.conv2d, F.linear = rounded(F.conv2d), rounded(F.linear)
    sys.exit(polybeast.main(["--precision", "bfloat16", *sys.argv[1:]]))
