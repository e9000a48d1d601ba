"""PolyBeast: its functions, and the real program with real servers."""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import pytest
import torch

import encoders
import environment
import learner
import monobeast
import polybeast
import polybeast_env
from command_line import SIGNALS
from environment import map_structure
from experiment import STAGES, Stop, load_checkpoint
from libtorchbeast import AsyncError, ClosedBatchingQueue, DynamicBatcher
from tests.programs import Program, read_logs, run
from tests.test_polybeast_env import COUNTER, free_port, servers

CARTPOLE = ["--env", "CartPole-v1"]
PIXELS = ["--env", "tests.envs:torchbeast/CatchPixels-v0"]
SMALL = [*CARTPOLE, "--num_servers", 2, "--envs_per_server", 2]


def directories():
    """The temporary directories of programs that run, or left theirs behind."""
    return {d for d in os.listdir(tempfile.gettempdir()) if d.startswith("torchbeast-")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A savedir with run "x" of 4,000 steps."""
    savedir = tmp_path_factory.mktemp("savedir")
    before = directories()
    result = run(*SMALL, "--savedir", savedir, "--xpid", "x", "--total_steps", 4000,
                 module="polybeast")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert directories() == before
    return savedir


def batch_for(env, net, T=5, B=3):
    """A made-up batch, as learn() takes it."""
    torch.manual_seed(2)
    step = map_structure(torch.as_tensor, env.initial(seed=0))
    batch = map_structure(
        lambda x: x.new_zeros(T + 1, B, *x.shape[1:]).random_(0, 2), step
    )
    batch["observation"] = torch.randn(batch["observation"].shape)
    batch["policy_logits"] = torch.randn(T, B, 2)
    batch["action"] = torch.randint(2, (T, B))
    batch["core_state"] = net.initial_state(B)
    return batch


@pytest.mark.parametrize("lstm", [[], ["--use_lstm"]])
def test_both_variants_compute_the_same_loss_and_gradients(lstm):
    env = environment.Environment([gymnasium.make("CartPole-v1")])
    results = []
    for script in (monobeast, polybeast):
        flags = script.parser().parse_args([*CARTPOLE, *lstm])
        torch.manual_seed(1)
        net = script.create_net(flags, env)
        optimizer, scheduler = learner.create_optimizer(flags, net)
        batch = batch_for(env, net)
        stats = script.learn(flags, net, optimizer, scheduler, batch)
        gradients = {name: p.grad for name, p in net.named_parameters()}
        results.append((stats, gradients, net.state_dict()))
    for one, other in zip(*results):
        assert list(one) == list(other)
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


def images():
    space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    return {"observation_space": space, "num_actions": (6,), "action_shape": ()}


def test_the_shallow_network_is_monobeasts():
    shallow = polybeast.Net(**images(), deep=False).state_dict()
    expected = monobeast.Net(**images()).state_dict()
    assert {k: x.shape for k, x in shallow.items()} == {
        k: x.shape for k, x in expected.items()
    }


def test_the_deep_network_is_the_papers():
    """IMPALA, figure 3: 15 convolutional layers, then 256 units."""
    net = polybeast.Net(**images())
    convolutions = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [c.out_channels for c in convolutions] == 5 * [16] + 10 * [32]
    assert (
        net.encoder.fc.in_features == 32 * 11 * 11 and net.encoder.out_features == 256
    )
    step = {
        "observation": torch.randint(256, (2, 3, 4, 84, 84), dtype=torch.uint8),
        "reward": torch.zeros(2, 3),
        "done": torch.zeros(2, 3, dtype=torch.bool),
        "last_action": torch.zeros(2, 3, dtype=torch.int64),
    }
    outputs, _ = net(step)
    assert outputs["policy_logits"].shape == (2, 3, 6)
    assert outputs["baseline"].shape == (2, 3)


def test_a_run_ends_at_its_last_step_with_logs_and_a_checkpoint(trained):
    flags = polybeast.parser().parse_args(list(map(str, SMALL)))
    env = environment.Environment([gymnasium.make("CartPole-v1")])
    net = polybeast.create_net(flags, env)
    checkpoint = load_checkpoint(trained / "x" / "model.tar", flags, net)
    assert checkpoint["step"] == 4000
    rows = read_logs(trained / "x")
    assert int(rows[-1]["step"]) == 4000
    assert all(np.isfinite(float(row["total_loss"])) for row in rows)
    assert any(int(row["episodes"]) for row in rows)
    # A rollout is begun with the newest weights, or with some before.
    assert all(0 <= float(row["policy_lag"]) < 100 for row in rows)


@pytest.mark.parametrize("module", ["polybeast", "monobeast"])
def test_either_script_tests_the_checkpoint(trained, module):
    result = run(*CARTPOLE, "--mode", "test", "--savedir", trained, "--xpid", "x",
                 "--num_test_episodes", 2, module=module)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "step 4000" in result.stdout and "2 episodes: mean return" in result.stdout


@pytest.mark.parametrize("module", ["polybeast", "monobeast"])
def test_images_are_trained_on_in_bfloat16_where_the_cpu_has_it(module, tmp_path):
    result = run(*PIXELS, "--savedir", tmp_path, "--total_steps", 1000, "--xpid", "x",
                 "--learner_device", "cpu", module=module)  # fmt: skip
    assert result.returncode == 0, result.stderr
    cpu = torch.device("cpu")
    expected = "bfloat16" if encoders.has_bfloat16(cpu) else "float32"
    meta = json.loads((tmp_path / "x" / "meta.json").read_text())
    assert meta["flags"]["precision"] == expected
    assert f"{expected}; results in" in result.stderr


def test_a_compiled_network_in_bfloat16_trains(tmp_path):
    args = ["--net", "shallow", "--compile", "--precision", "bfloat16"]
    result = run(*PIXELS, *args, "--savedir", tmp_path, "--total_steps", 1000,
                 "--xpid", "x", module="polybeast")  # fmt: skip
    assert result.returncode == 0, result.stderr
    losses = [float(row["total_loss"]) for row in read_logs(tmp_path / "x")]
    assert losses and np.isfinite(losses).all()


def test_the_end_tells_where_the_time_went(tmp_path):
    result = run(*SMALL, "--savedir", tmp_path, "--total_steps", 3000, "--xpid", "x",
                 module="polybeast")  # fmt: skip
    for stage in (stage for stages in STAGES for stage in stages):
        assert re.search(rf"{stage} \d+ %", result.stderr), stage
    assert re.search(r"of \d+ cores were busy; bottleneck: \w+.*--", result.stderr)
    for row in read_logs(tmp_path / "x")[1:]:
        for stages in STAGES:
            assert sum(float(row[name]) for name in stages) == pytest.approx(
                1, abs=0.01
            )


def test_the_same_command_resumes(tmp_path):
    args = [*SMALL, "--savedir", tmp_path, "--xpid", "x"]
    for steps in (2000, 4000):
        result = run(*args, "--total_steps", steps, module="polybeast")
        assert result.returncode == 0, result.stderr
    assert "resuming" in result.stderr and "at step 2000" in result.stderr
    assert [int(row["step"]) for row in read_logs(tmp_path / "x")][-1] == 4000


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_saves_and_ends_everything(signum, tmp_path):
    before = directories()
    args = [*SMALL, "--savedir", tmp_path, "--xpid", "x"]
    with Program(*args, module="polybeast") as program:
        program.wait_for("step ")
        program.signal(signum)
        assert program.end() == 128 + signum
    assert (tmp_path / "x" / "model.tar").exists()
    assert f"stopped by {signum.name}" in program.output
    assert "Traceback" not in program.output
    assert directories() == before


def test_a_signal_before_the_first_update_ends_the_run_in_order(tmp_path):
    args = [*SMALL, "--savedir", tmp_path, "--batch_size", 1000, "--unroll_length", 99]
    with Program(*args, module="polybeast") as program:
        program.wait_for("connected")
        program.signal(signal.SIGINT)
        assert program.end() == 130
    assert "Traceback" not in program.output and "step 0 of" in program.output


def test_reward_that_is_not_a_number_costs_a_stream_and_not_the_run(tmp_path):
    env = "tests.faulty_envs:NaNReward-v0"  # After 300 steps.
    args = ["--env", env, "--num_servers", 2, "--envs_per_server", 2]
    args += ["--savedir", tmp_path, "--xpid", "x", "--total_steps", 4000]
    result = run(*args, module="polybeast")
    assert result.returncode == 0, result.stderr
    assert re.search(
        r"no stream.*reward of environment [01] is nan", result.stderr, re.IGNORECASE
    )
    losses = [float(row["total_loss"]) for row in read_logs(tmp_path / "x")]
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("weight", [1.0, math.nan])
def test_what_makes_the_network_overflow_costs_a_stream_and_bad_weights_the_run(weight):
    flags = polybeast.parser().parse_args(CARTPOLE)
    env = polybeast_env.create_env(flags, 1)
    net = polybeast.create_net(flags, env)
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(weight)
    device = torch.device("cpu")
    weights = learner.PublishedWeights(net, device)
    batcher = DynamicBatcher(1)
    with ThreadPoolExecutor(2) as pool, contextlib.closing(batcher):
        serving = pool.submit(polybeast.inference, batcher, net, weights, device)
        step = map_structure(lambda x: np.asarray(x)[None], env.initial(seed=0))
        step["observation"] = np.full_like(step["observation"], 3e38)
        asked = pool.submit(batcher.compute, (step, net.initial_state(1)))
        if math.isnan(weight):
            with pytest.raises(Stop, match="policy_logits are not finite"):
                serving.result(10)
            batcher.close()
            with pytest.raises((AsyncError, ClosedBatchingQueue)):
                asked.result(10)
        else:
            with pytest.raises(AsyncError, match="policy_logits are not finite"):
                asked.result(10)
            step["observation"][:] = 0
            batcher.compute((step, net.initial_state(1)))
            batcher.close()
            serving.result(10)


def test_a_server_is_replaced_when_its_directory_was_tidied_up(tmp_path):
    before = directories()
    args = [*SMALL, "--savedir", tmp_path, "--xpid", "x", "--log_interval_steps", 200]
    with Program(*args, module="polybeast") as program:
        program.wait_for("step ")
        [directory] = directories() - before
        shutil.rmtree(os.path.join(tempfile.gettempdir(), directory))
        for _ in range(2):
            program.wait_for(": connected (reconnects")
        program.signal(signal.SIGINT)
        assert program.end() == 130
    assert directories() == before


def test_a_killed_server_is_replaced_and_training_goes_on(tmp_path):
    args = [*SMALL, "--savedir", tmp_path, "--xpid", "x", "--log_interval_steps", 200]
    with Program(*args, module="polybeast") as program:
        program.wait_for("connected")
        program.wait_for("step ")
        os.kill(program.workers()[0], signal.SIGKILL)
        program.wait_for("ended (exit code -9), started again")
        program.wait_for("connected")
        before = int(read_logs(tmp_path / "x")[-1]["step"])
        program.wait_for("step ")
        program.wait_for("step ")
        program.signal(signal.SIGINT)
        assert program.end() == 130
    assert int(read_logs(tmp_path / "x")[-1]["step"]) > before


def test_servers_do_not_load_pytorch(tmp_path):
    with Program(*SMALL, "--savedir", tmp_path, module="polybeast") as program:
        program.wait_for("connected")
        processes = [program.process.pid, *program.workers()]
        maps = [pathlib.Path(f"/proc/{pid}/maps").read_text() for pid in processes]
        assert ["libtorch_cpu" in text for text in maps] == [True, False, False]
        program.signal(signal.SIGINT)
        assert program.end() == 130


def test_servers_of_others_are_used_over_tcp(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    flags = ["--num_servers", 1, "--envs_per_server", 4, "--address", address]
    with servers(*flags, env="CartPole-v1") as program:
        result = run(*CARTPOLE, "--server_addresses", f"{address}, {address}",
                     "--total_steps", 4000, "--savedir", tmp_path,
                     module="polybeast")  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert "2 streams" in result.stderr
        program.wait_for("disconnected after")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--connect_timeout_seconds", 1], 1, "no environment server could be reached"),
        (["--env", COUNTER], 1, "the observation space differs: the learner has Box"),
        (["--env", "CartPoel-v1"], 2, "CartPole-v1"),
        (["--video", "x.mp4"], 2, "--video goes with --mode test"),
        (["--net", "huge"], 2, "--net"),
        (["--server_addresses", ""], 2, "--server_addresses"),
        (["--learner_device", "cuda:99"], 2, "--learner_device cuda:99"),
        (["--learner_device", "cuda:256"], 2, "--learner_device cuda:256"),
        (["--actor_device", "gpu"], 2, "--actor_device gpu: expected cpu, cuda or"),
    ],
)
def test_what_cannot_work_is_one_line(args, code, message, tmp_path):
    address = f"127.0.0.1:{free_port()}"
    flags = ["--num_servers", 1, "--envs_per_server", 1, "--address", address]
    if message.startswith("no environment"):
        flags[-1] = f"127.0.0.1:{free_port()}"
    with servers(*flags, env="CartPole-v1"):
        result = run(*CARTPOLE, "--server_addresses", address, "--savedir", tmp_path,
                     "--connect_timeout_seconds", 3, *args,
                     module="polybeast")  # fmt: skip
    assert result.returncode == code, result.stderr
    assert any(message in line for line in result.stderr.splitlines())
    assert "Traceback" not in result.stderr
