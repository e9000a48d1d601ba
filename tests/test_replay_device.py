"""A replay in the memory of a GPU that is not there."""

import numpy as np
import pytest
import torch

import monobeast
from tests.test_agent import batches, make_actor, parse
from tests.test_graphs import assert_near, train
from tests.test_pretended_gpu import ON_GPU, PIXELS, flags_of, gpus  # noqa: F401
from tests.test_replay import B, Stacked, T, assert_same, noise
from torchbeast import environment
from torchbeast.messages import BadInput
from torchbeast.nests import map_structure
from torchbeast.replay import Replay

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def to(device, nest):
    return map_structure(lambda x: x.to(device), nest)


def rings(batch_of, num, *size):
    """A ring in host memory and one on the GPU with the same rollouts, and the numbers
    of their samples."""
    host, there = Replay(*size, CPU), Replay(*size, GPU, True)
    for _, batch in zip(range(num), batch_of):
        items = host.add(batch)
        assert (there.add(to(GPU, batch)) == items).all()
        for ring in (host, there):
            ring.set_priorities(items, 1 + items)
    return host, there, np.arange(host.size * size[1])


@pytest.mark.parametrize("size", [(7, 1, T + 1), (7, T, 3)])
@pytest.mark.parametrize("padding", ["zero", "reset"])
def test_a_replay_on_the_gpu_has_the_same_samples(padding, size, gpus):  # noqa: F811
    env = environment.Environment([Stacked(padding) for _ in range(B)])
    batch_of = batches(*make_actor(parse("--unroll_length", T), env))
    host, there, items = rings(batch_of, 9, *size)
    assert there._store._tensors["observation"]._data.device == GPU
    expected = host.read(items)
    assert_same(to(CPU, there.read(items)), expected)
    torch.manual_seed(1)
    batch, items = host.sample(5, 0.5)
    batch = map_structure(torch.clone, batch)
    torch.manual_seed(1)
    again, same = there.sample(5, 0.5)
    assert (items == same).all()
    assert_same(to(CPU, again), batch)


def test_stacks_that_have_not_moved_on_are_kept_on_the_gpu_too(gpus):  # noqa: F811
    first, second = noise(2)
    frames = torch.randint(255, (T + 4, B, 8, 8), dtype=torch.uint8)
    first["observation"] = frames.unfold(0, 4, 1).movedim(-1, 2).contiguous()
    host, there, items = rings([first, second], 2, 2 * B, 1, T + 1)
    assert there._store._tensors["observation"]._num_whole > 0
    assert_same(to(CPU, there.read(items)), host.read(items))


def test_samples_of_a_replay_on_the_gpu_are_not_waited_for(gpus):  # noqa: F811
    env = environment.Environment([Stacked("zero") for _ in range(B)])
    batch_of = batches(*make_actor(parse("--unroll_length", T), env))
    _, there, _ = rings(batch_of, 3, 7, T, 3)
    torch.cuda.synchronize()
    gpus.waits.clear()
    there.sample(5, 0.5)
    assert not gpus.waits


CASES = [
    "monobeast r2d2 CartPole-v1 --burn_in 2",
    pytest.param(f"monobeast r2d2 {PIXELS} --no-use_lstm", marks=pytest.mark.slow),
    pytest.param("monobeast sac Pendulum-v1", marks=pytest.mark.slow),
    pytest.param("warpbeast td3 warp/Pendulum", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_its_replay_on_the_gpu_learns_the_same(case, gpus, tmp_path):  # noqa: F811
    case = f"{case} --replay_ratio 1"
    expected = train(case, tmp_path / "host", 2)
    there = train(f"{case} {ON_GPU}", tmp_path / "there", 2)
    assert there.keys() == expected.keys()
    for name, x in expected.items():
        assert_near(name, x, there[name])


def test_too_large_a_replay_for_the_gpu_is_refused(gpus, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 10**9))
    with pytest.raises(BadInput, match="need [0-9,]* bytes of cuda:0's memory, 8,000"):
        train("monobeast sac Pendulum-v1 --replay_device cuda", tmp_path, 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--replay_device", "cuda:1"],
            "--replay_device cuda:1: expected cpu or",
        ),
        (
            ["--replay_device", "cuda", "--learner_device", "cpu"],
            "--replay_device cuda: expected cpu or the learner's device, cpu",
        ),
        (
            ["--replay_device", "cuda:0", "--save_replay"],
            "--save_replay: expected --replay_device cpu",
        ),
    ],
)
def test_where_the_replay_cannot_be_is_refused(args, message, gpus, tmp_path):  # noqa: F811
    flags = flags_of(monobeast, tmp_path, "sac", "Pendulum-v1", *args, updates=1)
    with pytest.raises(BadInput, match=message):
        monobeast.train(flags)
