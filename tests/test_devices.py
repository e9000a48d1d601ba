"""What a program computes on, where there are GPUs of several kinds, or none."""

import warnings
from argparse import Namespace

import numpy as np
import pytest
import torch
from gymnasium import spaces

import polybeast
from tests.programs import refusal
from torchbeast import devices, machine, ranks
from torchbeast.flags import parse_args
from torchbeast.messages import BadInput

IMAGE = spaces.Box(0, 255, (84, 84, 4), np.uint8)
NUMBERS = spaces.Box(-np.inf, np.inf, (3,))


def test_a_gpu_whose_driver_is_too_old_is_refused_in_one_line(monkeypatch):
    def is_available():
        warnings.warn("The driver is too old (found 11040).\nMore.", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    expected = "--learner_device cpu does without it: The driver is too old .*11040.*$"
    with pytest.raises(BadInput, match=expected):
        devices.set_defaults(Namespace(learner_device=None, cuda_graphs=None))
    devices.set_defaults(Namespace(learner_device="cpu", cuda_graphs=None))


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_learner_is_on_a_gpu_of_any_kind_by_default(kind, monkeypatch):
    monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: True)
    chosen = Namespace(learner_device=None, cuda_graphs=None)
    devices.set_defaults(chosen)
    assert chosen.learner_device == kind and chosen.cuda_graphs == (kind == "cuda")


@pytest.mark.parametrize(
    ("args", "batch_size", "num_envs"),
    [
        ([], 8, 256),
        (["--batch_size", "64"], 64, 512),
        (["--preset", "a2c"], 16, 16),
        (["--agent", "examples.rnd.agent"], 8, 256),  # It extends IMPALA.
        (["--agent", "r2d2"], 4, 32),
        (["--learner_device", "cpu"], 4, 32),
    ],
)
def test_a_gpu_gets_more_images_at_a_time(args, batch_size, num_envs, monkeypatch):
    monkeypatch.setattr(machine, "_num_cores", 16)
    agent = args[1] if "--agent" in args else "polybeast"
    args = ["--learner_device", "cuda", *args]
    for space, expected in ((IMAGE, (batch_size, num_envs)), (NUMBERS, (4, 32))):
        flags = parse_args(polybeast.program_parser(agent), args)
        flags.command = ["polybeast", *args]
        polybeast.set_defaults(flags, 1, space)
        found = flags.batch_size, flags.num_servers * flags.envs_per_server
        if space is IMAGE or not args[2:]:
            assert found == expected


@pytest.mark.parametrize(
    "limit, expected",
    [("750000 100000", 8), ("50000 100000", 1), ("max 100000", 16), (None, 16)],
)
def test_a_container_has_as_many_cores_as_it_has_time_of(
    limit, expected, monkeypatch, tmp_path
):
    monkeypatch.setattr(machine, "own_cores", lambda: {*range(16)})
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    if limit is not None:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    monkeypatch.setattr(machine, "_num_cores", None)
    assert machine.num_cores() == expected
    shares = machine.core_shares(num := min(2, expected))
    assert [len(share) for share in shares] == num * [expected // num]
    assert len(set.union(*shares)) == expected // num * num


def test_files_that_a_container_has_cached_are_available_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    stat = "anon 600000\nfile 300000\ninactive_anon 1\ninactive_file 200000\n"
    for name, text in ("max", "1000000\n"), ("current", "900000\n"), ("stat", stat):
        (tmp_path / f"memory.{name}").write_text(text)
    assert machine.available_memory_bytes() == 300_000


def test_a_gpu_that_pytorch_has_no_kernels_for_is_refused_in_one_line(monkeypatch):
    def ones(*args, **kwargs):
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with ...")

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(BadInput) as e:
        devices.get_device(Namespace(learner_device="cuda:1"), "learner_device")
    expected = "--learner_device cuda:1: CUDA error: no kernel image is available"
    assert str(e.value) == expected


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (
            "mps",
            "--learner_device mps: statistics are float64, which MPS does not have",
        ),
        ("gpu", "--learner_device gpu: expected cpu, cuda or xpu, or cuda:N or xpu:N"),
        ("xpu", "--learner_device xpu: "),
    ],
)
def test_a_device_that_cannot_be_used_is_refused_in_one_line(device, expected):
    assert expected in refusal("--learner_device", device)


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_convolutions_have_the_precision_that_is_named(precision, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "float32")
    image, numbers = spaces.Box(0, 255, (84, 84, 3), np.uint8), spaces.Box(0, 1, (3,))
    devices.choose_precision(Namespace(precision=precision), image)
    assert torch.backends.cudnn.allow_tf32 == (precision == "tf32")
    auto = Namespace(precision="auto", learner_device="cuda")  # Another policy's.
    devices.choose_precision(auto, numbers)
    assert torch.backends.cudnn.allow_tf32 == (precision == "tf32")


def test_what_is_read_of_a_lazy_dict_is_found():
    sent = []

    def negate(_, x):
        sent.append(x)
        return -x

    for read in (
        lambda x: {"a": x["a"], "b": x["b"]},
        lambda x: {**x},
        lambda x: dict(x),
        lambda x: dict(x.items()),
        lambda x: dict(zip(x, x.values())),
        lambda x: {"a": x.get("a"), "b": x.get("b", 3)},
        lambda x: {"a": x.pop("a"), "b": x.setdefault("b", 3)},
        lambda x: x.copy(),
        lambda x: x | {},
        lambda x: {} | x,
        lambda x: {name: x[name] for name in reversed(x)},
    ):
        sent.clear()
        assert read(devices.Lazy({"a": 1, "b": 2}, negate)) == {"a": -1, "b": -2}
        assert sorted(sent) == [1, 2]
    lazy = devices.Lazy({"a": 1, "b": 2}, negate)
    sent.clear()
    assert lazy["a"] == -1 and lazy.get("c") is None and sent == [1]


@pytest.mark.parametrize(
    "given, num_ranks, cores",
    [(None, 1, 2), ("1", 1, 1), ("3", 1, 3), ("64", 1, 4), ("x", 1, 2), ("1", 2, 2)],
)
def test_an_update_has_the_threads_that_openmp_is_told_but_not_torchruns(
    given, num_ranks, cores, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(ranks.current, "num", num_ranks)
    monkeypatch.setattr(devices, "num_cores", lambda: 4)
    flags = Namespace()
    agent = Namespace(observation_space=spaces.Box(0, 1, (3,)))
    monkeypatch.setattr(devices, "synchronous", lambda flags: False)
    assert devices.num_update_cores(0.5, agent, flags) == cores
