"""The kernel of nearest.py. Needs Triton, which comes with PyTorch for CUDA."""

import triton
import triton.language as tl

MAX = tl.constexpr(2**63 - 1)


@triton.jit
def kernel(
    at,
    alive,
    index,
    there,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    INFINITE: tl.constexpr,
):
    """A program finds the K nearest of ROWS agents: each by a pass over all others, a
    tile at a time, for the smallest number above the one before."""
    parts = tl.cdiv(N, ROWS)
    env = (tl.program_id(0) // parts).to(tl.int64)
    at, alive = at + env * N * 2, alive + env * N
    index, there = index + env * N * K, there + env * N * K
    row = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    is_row = row < N
    x = tl.load(at + 2 * row, mask=is_row, other=0)[:, None]
    y = tl.load(at + 2 * row + 1, mask=is_row, other=0)[:, None]
    last = tl.full([ROWS], -1, tl.int64)
    for k in range(K):
        best = tl.full([ROWS], MAX, tl.int64)
        for start in range(0, N, TILE):
            other = start + tl.arange(0, TILE)
            is_other = other < N
            dx = x - tl.load(at + 2 * other, mask=is_other, other=0)[None]
            dy = y - tl.load(at + 2 * other + 1, mask=is_other, other=0)[None]
            here = tl.load(alive + other, mask=is_other, other=0)
            none = (row[:, None] == other[None]) | (here[None] == 0)
            far = (dx * dx + dy * dy).to(tl.float32)
            order = tl.where(none, INFINITE, far.to(tl.int32, bitcast=True))
            key = (order.to(tl.int64) << 32) + other[None]
            key = tl.where(is_other[None] & (key > last[:, None]), key, MAX)
            best = tl.minimum(best, tl.min(key, 1))
        tl.store(index + row * K + k, best & 0xFFFFFFFF, mask=is_row)
        tl.store(there + row * K + k, (best >> 32) < INFINITE, mask=is_row)
        last = best
