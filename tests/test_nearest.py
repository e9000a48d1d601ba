"""The nearest agents, by PyTorch and by the kernel."""

import os
import subprocess
import sys

import pytest
import torch

from torchbeast.warp import nearest


def agents(num_envs, num_agents, device="cpu", dtype=torch.float32):
    """Returns (places, who is alive); many are as near in the first environment."""
    at = torch.rand(num_envs, num_agents, 2, device=device, dtype=dtype) * 20
    at[0] = at[0].round()
    return at, torch.rand(num_envs, num_agents, device=device) > 0.3


def assert_same(found, expected):
    for x, y in zip(found, expected):
        assert x.dtype == y.dtype and torch.equal(x, y)


def test_the_nearest_agents_are_found_the_first_ones_of_those_as_near():
    at = torch.tensor([[[0.0, 0], [1, 0], [0, 1], [5, 5], [-1, 0], [0, 0]]])
    alive = torch.tensor([[True, True, True, True, False, True]])
    index, there = nearest.nearest(at, alive, 5)
    assert index[0, 0, :4].tolist() == [5, 1, 2, 3]
    assert there[0, 0].tolist() == [True, True, True, True, False]
    assert index[0, 3, 0] in (1, 2) and index[0, 3, :2].tolist() == [1, 2]


def test_the_nearest_agents_are_the_same_a_few_environments_at_a_time(monkeypatch):
    at, alive = agents(20, 30)
    whole = nearest.nearest(at, alive, 7)
    monkeypatch.setattr(nearest, "MAX_PAIRS", 2000)
    assert_same(nearest.nearest(at, alive, 7), whole)


@pytest.mark.slow
@pytest.mark.parametrize("type", ["*fp32", "*fp64"])
@pytest.mark.parametrize("capability", [75, 80, 90])
def test_the_kernel_compiles_for_gpus_that_are_not_here(capability, type):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torchbeast.warp.nearest_kernel import kernel

    types = {"at": type, "alive": "*i1", "index": "*i64", "there": "*i1", "N": "i32"}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {"K": 3, "ROWS": 16, "TILE": 128, "INFINITE": nearest.INFINITE}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": False},
    )
    assert compiled.asm["cubin"] and "fma.rn" not in compiled.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("num_agents", "K"), [(2, 1), (7, 6), (140, 3)])
def test_the_kernel_finds_the_same(num_agents, K, dtype):
    """Triton's interpreter, which needs no GPU, is chosen before the first import."""
    code = f"""
        import torch
        from tests.test_nearest import agents, assert_same, nearest
        at, alive = agents(3, {num_agents}, dtype=torch.{dtype})
        assert_same(nearest.by_kernel(at, alive, {K}), nearest.nearest(at, alive, {K}))
    """
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    code = "\n".join(line.strip() for line in code.splitlines())
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
