"""What needs a GPU. pytest does not find it by itself: see benchmarks/gpu.sh. Slow are
tests of whole runs.
"""

import warnings

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

import monobeast
import polybeast
import warpbeast
from benchmarks import limit
from tests import (
    test_graphs,
    test_learner,
    test_nearest,
    test_pretended_gpu,
    test_warp,
    test_warpbeast,
    warp_references,
)
from tests.programs import Program, load, read_logs, run, wait_for_steps
from torchbeast import devices, graphs, ranks
from torchbeast.learner import Learner, PublishedWeights
from torchbeast.warp import consistency, nearest

CUDA = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    """In TF32, convolutions of the deep network would be 11 % off. Runs choose it."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def update(device, *args):
    """Statistics and gradients of one update, as float32 on the CPU. Without args it
    computes in float32: an agent chooses by the machine."""
    args = "--precision", "float32", *args
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
            print(f"{name}: {error:.1e}")
            # A centered convolution's gradient has the background's part taken away.
            assert error < (1e-4 if name != "encoder.layers.0.weight" else 2e-3), name


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


@pytest.mark.parametrize("args", [(), ("--use_lstm",)], ids=str)
def test_who_acts_in_a_graph_does_so_for_batches_of_any_size(args, tmp_path):
    test_graphs.compare_acting(tmp_path, *args)


WAITS = [case for case in test_pretended_gpu.BUDGETS if case.split()[0] != "polybeast"]


@pytest.mark.parametrize("case", WAITS)
def test_an_update_keeps_to_its_budget_of_waits(case, tmp_path, monkeypatch):
    """Those for streams and events, which are meant, PyTorch does not tell."""
    program, *args = case.split()
    program = {x.__name__: x for x in (monobeast, warpbeast)}[program]
    flags = test_pretended_gpu.flags_of(program, tmp_path, *args, updates=10)
    update, found = Learner.update, {}

    def counting(self, *args):
        if self.updates < 9:
            return update(self, *args)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            with torch.profiler.profile() as profile:
                update(self, *args)
            torch.cuda.set_sync_debug_mode("default")
        found["waits"] = [x for x in caught if "synchronizing" in str(x.message)]
        found["launches"] = sum(
            x.count
            for x in profile.key_averages()
            if x.key.startswith(
                ("cudaLaunch", "cuLaunch", "cudaMem", "cudaGraphLaunch")
            )
        )

    monkeypatch.setattr(Learner, "update", counting)
    assert program.train(flags) == 0
    waits, launches = test_pretended_gpu.BUDGETS[case][1]
    num = len(found["waits"])
    print(f"{case}: {num} of {waits} waits, {found['launches']} of {launches} launches")
    assert num <= waits, [str(x) for x in found["waits"]]


@pytest.mark.slow
def test_updates_take_no_more_and_no_more_memory():
    args = ["--env", "CartPole-v1", "--num_epochs", "1", "--cuda_graphs"]
    update = limit.update_stage(limit.parse("polybeast", args))

    def used():
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved(), psutil.Process().memory_info().rss

    # In the middle between two captures.
    for num in (graphs.MAX_REPLAYS * 5 // 2, 4 * graphs.MAX_REPLAYS):
        before = used()
        for _ in range(num):
            update()
    on_gpu, on_host = (y - x for x, y in zip(before, used()))
    print(f"{num} updates: {on_gpu} bytes more on the GPU, {on_host} of the process")
    assert on_gpu == 0 and on_host < 30e6


def test_ranks_sum_by_nccl():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    group = ranks.Ranks(num=2)
    group._nccl = dist.new_group(backend="nccl")
    group.seconds["reduction"] = 0
    for n in range(10):
        x = torch.full([10**6], n, device=CUDA, dtype=torch.float32)
        group.sum(x)
        assert (x == n).all()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_may_share_a_gpu(tmp_path):
    args = ["--env", "CartPole-v1", "--total_steps", 20_000, "--xpid", "x"]
    result = run(*args, "--savedir", tmp_path, module="polybeast", ranks=2)
    assert result.returncode == 0, result.stderr
    assert "ranks share a GPU" in result.stderr
    assert int(read_logs(tmp_path / "x")[-1]["step"]) >= 20_000


@pytest.mark.slow
@pytest.mark.parametrize("module", ["monobeast", "polybeast", "warpbeast"])
def test_a_killed_run_on_the_gpu_goes_on(module, tmp_path):
    env = "warp/Catch" if module == "warpbeast" else "CartPole-v1"
    args = ["--env", env, "--savedir", tmp_path, "--xpid", "x", "--cuda_graphs",
            "--checkpoint_interval_seconds", 2, "--total_steps", 10**8]  # fmt: skip
    with Program(*args, module=module) as program:
        wait_for_steps(tmp_path, 10_000)
        model = tmp_path / "x" / "model.tar"
        while not model.exists() or load(tmp_path)["step"] == 0:
            wait_for_steps(tmp_path, 1)
        program.process.kill()
        program.end()
    saved = load(tmp_path)["step"]
    assert saved > 0
    with Program(*args, module=module) as program:
        program.wait_for(f"at step {saved}")
        wait_for_steps(tmp_path, 10_000)


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
        ["--precision", "bfloat16", "--no-cuda_graphs"],
        ["--compile"],
        ["--actor_device", "cpu"],
        ["--learner_device", "cpu", "--actor_device", "cuda"],
        ["--use_lstm"],
    ],
    ids=lambda args: " ".join(map(str, args)),
)
def test_a_run_on_the_gpu_trains(args, tmp_path):
    args = [*args, "--env", "PongNoFrameskip-v4", "--total_steps", 8000, "--xpid", "x"]
    result = run(*args, "--savedir", tmp_path, module="polybeast")
    assert result.returncode == 0, result.stderr
    rows = read_logs(tmp_path / "x")
    assert int(rows[-1]["step"]) >= 8000
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
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    args = ["--env", "tests.faulty_envs:HugeReward-v0", "--reward_clipping", "none"]
    result = run(*args, "--savedir", tmp_path, "--xpid", "x", module="polybeast")
    assert result.returncode == 1
    found = "is nan", "is not finite"  # By who learns, or by who acts.
    assert any(x in result.stderr for x in found), result.stderr
    assert "Traceback" not in result.stderr


def test_defaults_use_the_gpu_for_both():
    flags = polybeast.program_parser().parse_args([])
    polybeast.set_defaults(flags)
    assert flags.learner_device == flags.actor_device == "cuda"


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
            ["--env", "warp/Catch", "--learner_device", "cuda:1"],
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
