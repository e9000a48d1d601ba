"""What needs a GPU. pytest does not find it by itself: see benchmarks/gpu.sh. Slow are
tests of whole runs.
"""

import numpy as np
import pytest
import torch

import polybeast
from tests import (
    test_graphs,
    test_learner,
    test_nearest,
    test_warp,
    test_warpbeast,
    warp_references,
)
from tests.programs import read_logs, run
from torchbeast import devices
from torchbeast.learner import PublishedWeights
from torchbeast.warp import consistency, nearest

CUDA = torch.device("cuda:0")
# As in programs. In TF32, convolutions of the deep network would be 11 % off.
torch.backends.cudnn.allow_tf32 = False


def update(device, *args):
    """Statistics and gradients of one update, as float32 on the CPU."""
    stats, gradients = test_learner.learn(*args, device=device)
    return tuple(
        {name: x.float().cpu() for name, x in part.items()}
        for part in (stats, gradients)
    )


@pytest.mark.parametrize("args", [[], ["--use_lstm"], ["--net", "deep"]])
def test_an_update_on_the_gpu_equals_one_on_the_cpu(args):
    for one, other in zip(update("cpu", *args), update("cuda", *args)):
        for name in one:
            error = (one[name] - other[name]).norm() / one[name].norm()
            assert error < 0.01, name


def test_bfloat16_on_the_gpu_changes_losses_by_a_few_percent_at_most():
    one, _ = update("cuda")
    other, _ = update("cuda", "--precision", "bfloat16")
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "case",
    [
        test_graphs.QUICK,
        *(pytest.param(x, marks=pytest.mark.slow) for x in test_graphs.CASES),
        f"monobeast polybeast {test_graphs.PIXELS} --precision bfloat16",
    ],
)
def test_gradient_steps_in_graphs_are_those_that_are_launched_one_by_one(
    case, tmp_path, monkeypatch
):
    if any(name in case for name in ("r2d2", "sac", "td3")):
        case = f"{case} {test_graphs.ON_GPU}"
    test_graphs.compare(case, 6, tmp_path, monkeypatch, equal=False)


def test_weights_published_while_others_fetch_are_whole():
    model = torch.nn.Linear(2000, 2000).to(CUDA)
    torch.nn.init.zeros_(model.weight)
    published, have = PublishedWeights(model, CUDA), None
    reader = torch.nn.Linear(2000, 2000).to(CUDA)
    with devices.own_stream(CUDA):
        for version in range(1, 200):
            with torch.cuda.stream(torch.cuda.default_stream(CUDA)), torch.no_grad():
                model.weight.fill_(version)
                published.publish(model, version)
            have = published.fetch(reader, have)
            assert have in (version - 1, version)
            assert reader.weight.min().item() == reader.weight.max().item() == have


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--precision", "float32"],
        ["--precision", "bfloat16"],
        ["--compile"],
        ["--actor_device", "cpu"],
        ["--learner_device", "cpu", "--actor_device", "cuda"],
        ["--use_lstm", "--num_inference_threads", 3, "--num_learner_threads", 3],
    ],
    ids=lambda args: " ".join(map(str, args)),
)
def test_a_run_on_the_gpu_trains(args, tmp_path):
    args = [*args, "--env", "PongNoFrameskip-v4", "--total_steps", 8000, "--xpid", "x"]
    result = run(*args, "--savedir", tmp_path, module="polybeast")
    assert result.returncode == 0, result.stderr
    rows = read_logs(tmp_path / "x")
    assert int(rows[-1]["step"]) == 8000
    assert all(np.isfinite(float(row["total_loss"])) for row in rows)


@pytest.mark.slow
def test_monobeast_learns_on_the_gpu(tmp_path):
    args = ["--env", "CartPole-v1", "--total_steps", 100_000, "--xpid", "x"]
    result = run(*args, "--savedir", tmp_path)
    assert result.returncode == 0, result.stderr
    rows = [r for r in read_logs(tmp_path / "x") if r["episode_return"]]
    assert max(float(row["episode_return"]) for row in rows) > 100


def test_a_batch_is_on_the_device_when_to_device_returns():
    batch = {"x": torch.arange(10**7).pin_memory(), "core_state": ()}
    moved = devices.to_device(batch, CUDA)
    torch.testing.assert_close(moved["x"].cpu(), batch["x"])
    back = devices.to_host(moved, CUDA)
    torch.testing.assert_close(back["x"], batch["x"])


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_at_the_next_update(tmp_path):
    args = ["--env", "tests.faulty_envs:HugeReward-v0", "--reward_clipping", "none"]
    result = run(*args, "--savedir", tmp_path, "--xpid", "x", module="polybeast")
    assert result.returncode == 1
    assert "is nan" in result.stderr and "Traceback" not in result.stderr


def test_defaults_use_the_gpu_for_both():
    flags = polybeast.program_parser().parse_args([])
    polybeast.set_defaults(flags)
    assert flags.learner_device == flags.actor_device == "cuda"
    assert flags.num_learner_threads == flags.num_inference_threads == 2


# WarpBeast.


@pytest.mark.parametrize("case", test_warp.ENVS)
def test_an_environment_on_the_gpu_is_its_reference(case):
    name, args = test_warp.ENVS[case]
    env, reference = test_warp.make(name, **args), getattr(warp_references, name)
    consistency.compare(env, reference(**args), 3, 40, device=CUDA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_agents", [110, 140, 1000])
def test_the_nearest_agents_on_the_gpu_are_those_on_the_cpu(num_agents, dtype):
    at, alive = test_nearest.agents(20, num_agents, dtype=dtype)
    expected = nearest.nearest(at, alive, 10)
    found = nearest.nearest(at.to(CUDA), alive.to(CUDA), 10)
    test_nearest.assert_same([x.cpu() for x in found], expected)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("test_rollouts_go_on_where_the_one_before_ended", [[]]),
        ("test_rollouts_go_on_where_the_one_before_ended", [["--use_lstm"]]),
        ("test_the_recurrent_state_is_that_of_the_first_step", [2]),
        ("test_a_rollout_is_what_the_agent_does_step_by_step", []),
    ],
)
def test_captured_rollouts_are_right(name, args, monkeypatch):
    monkeypatch.setattr(test_warpbeast, "DEVICE", CUDA)
    getattr(test_warpbeast, name)(*args)


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ["--env", "warp/Catch"],
        pytest.param(
            ["--env", "warp/Catch", "--device", "cuda:1"],
            marks=pytest.mark.skipif("torch.cuda.device_count() < 2"),
        ),
        ["--env", "warp/Catch", "--compile"],
        ["--env", "warp/Catch", "--use_lstm", "--normalize_observations"],
        ["--env", "warp/Tag", "--agent", "ppo"],
        ["--env", "warp/CartPole", "--agent", "r2d2", "--replay_start", 1000],
        ["--env", "warp/CartPole", "--agent", "pqn", "--use_lstm"],
        ["--env", "warp/Pendulum", "--agent", "sac", "--replay_start", 1000],
    ],
    ids=lambda args: " ".join(map(str, args)),
)
def test_warpbeast_trains_on_the_gpu(args, tmp_path):
    args = [*args, "--total_steps", 100_000, "--num_envs", 32, "--xpid", "x"]
    result = run(*args, "--savedir", tmp_path, module="warpbeast")
    assert result.returncode == 0, result.stderr
    assert int(read_logs(tmp_path / "x")[-1]["step"]) >= 100_000
