"""The nearest of many agents, for environments on the device."""

import torch

MAX_PAIRS = 2**24  # At a time, without a kernel.
INFINITE = 0x7F800000  # Its bits in float32.
MAX_AGENTS = 128  # More of them are for the kernel.


def nearest(at, alive, K):
    """Finds the K agents that are nearest to each, without itself and those that are
    not alive. Of those as near, the first ones.

    at [E, N, 2]: places, of floating point numbers; alive [E, N] bool

    Returns (indices [E, N, K] int64, the nearest first; which of them there are,
    [E, N, K] bool).
    """
    if at.is_cuda and at.shape[1] > MAX_AGENTS:
        return by_kernel(at, alive, K)
    parts = max(1, at.shape[0] * at.shape[1] ** 2 // MAX_PAIRS)
    pairs = zip(at.tensor_split(parts), alive.tensor_split(parts))
    found = torch.cat([_smallest(*pair, K) for pair in pairs])
    return found & 0xFFFFFFFF, found >> 32 < INFINITE


def _smallest(at, alive, K):
    """Returns [E, N, K] int64, numbers in the order of distance and index: the bits of
    floats above 0 are in the floats' own order."""
    x, y = at.unbind(-1)
    own = torch.arange(at.shape[1], device=at.device)
    far = (x[:, :, None] - x[:, None]).square()  # [E, N, N]
    far = far + (y[:, :, None] - y[:, None]).square()
    none = (own == own[:, None]) | ~alive[:, None]
    order = far.float().masked_fill(none, torch.inf).view(torch.int32)
    return ((order.long() << 32) + own).topk(K, largest=False).values


def by_kernel(at, alive, K):
    """The same by a kernel of Triton, which keeps no distances."""
    from torchbeast.warp.nearest_kernel import kernel  # Not everybody has Triton.

    E, N, _ = at.shape
    index = torch.empty(E, N, K, dtype=torch.int64, device=at.device)
    there = torch.empty(E, N, K, dtype=torch.bool, device=at.device)
    rows = 16
    # Without fusion squares are rounded as PyTorch rounds them.
    kernel[(E * -(-N // rows),)](
        at.contiguous(), alive.contiguous(), index, there, N,
        K=K, ROWS=rows, TILE=128, INFINITE=INFINITE, enable_fp_fusion=False,
    )  # fmt: skip
    return index, there
