"""PolyBeast: its functions, and the real program with real servers."""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import signal
import stat
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import pytest
import torch

import polybeast
import polybeast_env
from libtorchbeast import AsyncError, ClosedBatchingQueue, DynamicBatcher
from tests.programs import (
    CALM,
    SERIAL,
    Program,
    args,
    both,
    load,
    main,
    read_logs,
    refusal,
    succeeds,
    wait_for_steps,
)
from tests.test_polybeast_env import COUNTER, free_port, servers
from torchbeast import devices, files, learner
from torchbeast.flags import parse_args
from torchbeast.messages import Stop
from torchbeast.nests import map_structure
from torchbeast.remote import sources
from torchbeast.stages import STAGES

CARTPOLE = ["--env", "CartPole-v1"]
PIXELS = "tests.envs:torchbeast/CatchPixels-v0"
LOG = ("--log_interval_steps", 40)  # A line for every update.


def directories():
    """The temporary directories of programs that run, or left theirs behind."""
    return {d for d in os.listdir(tempfile.gettempdir()) if d.startswith(files.SOCKETS)}


def small_run(savedir, *others, **kwargs):
    return args("polybeast", savedir, *others, **kwargs)


def make_agent(*flags, observation_space=None):
    flags = polybeast.program_parser().parse_args([*CARTPOLE, *flags])
    env = polybeast_env.create_env(flags, 1)
    space = env.observation_space if observation_space is None else observation_space
    return polybeast.Agent(flags, space, env.action_space), env


@pytest.mark.parametrize("net", ["deep", "shallow"])
def test_the_networks_are_the_papers(net):
    """IMPALA, figure 3: 15 convolutional layers, or 2; then 256 units. Each channel's
    brightness is added."""
    space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    net_, features, channels = {
        "deep": ("deep", 32 * 11 * 11, 5 * [16] + 10 * [32]),
        "shallow": ("shallow", 32 * 9 * 9, [16, 32]),
    }[net]
    net = make_agent("--net", net_, observation_space=space)[0].net
    convolutions = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [c.out_channels for c in convolutions] == channels
    assert net.encoder.fc.in_features == features + 4
    assert net.encoder.out_features == 256
    step = {
        "observation": torch.randint(256, (2, 3, 4, 84, 84), dtype=torch.uint8),
        "reward": torch.zeros(2, 3),
        "done": torch.zeros(2, 3, dtype=torch.bool),
        "last_action": torch.zeros(2, 3, dtype=torch.int64),
    }
    outputs, _ = net(step)
    assert outputs["policy_logits"].shape == (2, 3, 2)
    assert outputs["baseline"].shape == (2, 3)


# A whole run.


def test_a_run_ends_at_its_last_step_with_logs_and_a_checkpoint(savedir):
    before = directories()
    result = succeeds(*small_run(savedir, "--log_interval_steps", 200, steps=2000),
                      module="polybeast")  # fmt: skip
    assert directories() == before
    assert load(savedir)["step"] == 2000
    rows = read_logs(savedir / "x")
    assert int(rows[-1]["step"]) == 2000
    assert all(np.isfinite(float(row["total_loss"])) for row in rows)
    assert any(int(row["episodes"]) for row in rows)
    # A rollout is begun with the newest weights, or with some before.
    assert all(0 <= float(row["policy_lag"]) < 100 for row in rows)
    # Where the time went: in every row, and at the end.
    alone = {who: {*names} - {"vote", "reduction"} for who, names in STAGES.items()}
    for row in rows:
        for stages in alone.values():
            shares = [float(row[name]) for name in stages]
            assert sum(shares) == pytest.approx(1, abs=0.01)
    for stage in (stage for stages in alone.values() for stage in stages):
        assert re.search(rf"{stage} \d+ %", result.stderr), stage
    assert re.search(r"of \d+ cores were busy; bottleneck: \w+", result.stderr)


@pytest.mark.parametrize("tester", ["polybeast", "monobeast"])
@both
def test_either_program_tests_the_others_checkpoint(trained, module, tester):
    flags = ("--mode", "test", "--num_test_episodes", 2)
    result = succeeds(*args(tester, trained, *flags, "--net", "deep"), module=tester)
    assert "step 400" in result.stdout and "2 episodes: mean return" in result.stdout


@both
def test_the_same_command_resumes(trained, module):
    serial = SERIAL if module == "monobeast" else ()
    flags = args(module, trained, *serial, *LOG, steps=600)
    result = succeeds(*flags, module=module)
    assert "resuming" in result.stderr and "at step 400" in result.stderr
    steps = [int(row["step"]) for row in read_logs(trained / "x")]
    assert steps == [400, 440, 480, 520, 560, 600]


@both
def test_images_are_trained_on_in_bfloat16_where_the_cpu_has_it(module, savedir):
    serial = SERIAL if module == "monobeast" else ()
    shallow = ("--net", "shallow", "--learner_device", "cpu")  # Not the deep one.
    flags = args(module, savedir, *shallow, *serial, env=PIXELS, steps=40)
    result = succeeds(*flags, module=module)
    cpu = torch.device("cpu")
    expected = "bfloat16" if devices.has_bfloat16(cpu) else "float32"
    meta = json.loads((savedir / "x" / "meta.json").read_text())
    assert meta["flags"]["precision"] == expected
    assert f"{expected}; results in" in result.stderr


@pytest.mark.long
def test_a_compiled_network_in_bfloat16_trains(savedir):
    flags = ["--net", "shallow", "--compile", "--precision", "bfloat16", *LOG]
    succeeds(*small_run(savedir, *flags, env=PIXELS, steps=400),
             module="polybeast")  # fmt: skip
    losses = [float(row["total_loss"]) for row in read_logs(savedir / "x")]
    assert len(losses) == 10 and np.isfinite(losses).all()


# Signals, and servers that end.


@pytest.mark.survives("signal")
@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_ends_everything(signum, savedir):
    before = directories()
    with Program(*small_run(savedir, *LOG), module="polybeast") as program:
        wait_for_steps(savedir, 40)
        if signum == signal.SIGTERM:
            program.signal(signum)
        else:  # A terminal sends it to all processes.
            os.killpg(program.process.pid, signum)
        assert program.end() == 128 + signum
    assert load(savedir)["step"] == int(read_logs(savedir / "x")[-1]["step"]) > 0
    assert f"stopped by {signum.name}" in program.output
    for word in ("Traceback", "started again"):
        assert word not in program.output
    assert directories() == before


@pytest.mark.slow
@pytest.mark.survives("signal-while-waiting")
def test_a_signal_before_the_first_update_ends_the_run_in_order(savedir):
    flags = ("--batch_size", 1000, "--unroll_length", 99)
    with Program(*small_run(savedir, *flags), module="polybeast") as program:
        program.wait_for("connected")
        program.stop()
    assert "Traceback" not in program.output and "step 0 of" in program.output


@pytest.mark.slow
@pytest.mark.survives("server-killed", "socket-directory-deleted")
def test_a_server_is_replaced_that_is_killed_or_whose_directory_is_tidied_away(
    savedir,
):
    """And the sockets are private, and no server has loaded PyTorch."""
    before = directories()
    flags = small_run(savedir, "--num_servers", 2, *LOG, env=CALM)
    with Program(*flags, module="polybeast") as program:
        wait_for_steps(savedir, 40)
        processes = [program.process.pid, *program.workers()]
        maps = [pathlib.Path(f"/proc/{pid}/maps").read_text() for pid in processes]
        assert ["libtorch_cpu" in text for text in maps] == [True, False, False]
        os.kill(program.workers()[0], signal.SIGKILL)
        program.wait_for("ended (exit code -9), started again")
        program.wait_for(": connected (reconnects")
        [directory] = directories() - before
        directory = pathlib.Path(tempfile.gettempdir(), directory)
        assert sum(map(pathlib.Path.is_socket, directory.iterdir())) == 2
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        shutil.rmtree(directory)
        for _ in range(2):
            program.wait_for(": connected (reconnects")
        wait_for_steps(savedir, 400)
        program.stop()
    assert directories() == before
    steps = [int(row["step"]) for row in read_logs(savedir / "x")]
    assert steps == list(range(40, steps[-1] + 1, 40))


def test_a_start_leaves_finished_runs_in_the_temporary_directory():
    directory = pathlib.Path(tempfile.mkdtemp(prefix="torchbeast-"))
    flags = small_run(directory.parent, "--xpid", directory.name, steps=40)
    assert main(*flags, module="polybeast").returncode == 0
    before = sorted(p.name for p in directory.iterdir())
    assert {"lock", "model.tar", "logs.csv"} <= set(before)
    with contextlib.ExitStack() as stack:
        files.socket_directory(stack)
    assert sorted(p.name for p in directory.iterdir()) == before


@pytest.mark.long
def test_a_stream_may_have_a_thousand_environments_and_more(savedir):
    flags = ("--num_servers", 1, "--envs_per_server", 1500, "--unroll_length", 2)
    result = succeeds(*small_run(savedir, *flags, steps=6000), module="polybeast")
    assert "no stream" not in result.stderr and load(savedir)["step"] == 6000


# Environments that go wrong.


@pytest.mark.survives("environment-raises", "environment-nan")
@pytest.mark.survives("observation-shape-changes")
def test_what_goes_wrong_in_an_environment_costs_a_stream_and_not_the_run(savedir):
    """Each of these goes wrong after 300 steps."""
    errors = {
        "Raises": "RuntimeError: the ball went through the floor",
        "NaNReward": "reward of environment [01] is nan",
        "WrongShape": r"observation is float32 \[4\], expected float32 \[3\]",
    }
    with contextlib.ExitStack() as stack:
        addresses = []
        for name in errors:
            addresses.append(f"127.0.0.1:{free_port()}")
            flags = ["--num_servers", 1, "--envs_per_server", 2]
            flags += ["--address", addresses[-1]]
            stack.enter_context(servers(*flags, env=f"tests.faulty_envs:{name}-v0"))
        flags = ["--server_addresses", ",".join(addresses), *LOG]
        env = "tests.faulty_envs:Base-v0"
        result = main(*small_run(savedir, *flags, env=env, steps=8000),
                      module="polybeast")  # fmt: skip
    assert result.returncode == 0, result.stderr
    for address, error in zip(addresses, errors.values()):
        line = rf"{address}: no stream.*{error}"
        assert re.search(line, result.stderr, re.IGNORECASE), error
    losses = [float(row["total_loss"]) for row in read_logs(savedir / "x")]
    assert len(losses) == 200 and np.isfinite(losses).all()


@pytest.mark.survives("network-overflows")
@pytest.mark.parametrize("weight", [1.0, math.nan])
def test_what_makes_the_network_overflow_costs_a_stream_and_bad_weights_the_run(weight):
    # Normalised observations are bounded, and so is tanh.
    agent, env = make_agent("--no-normalize_observations", "--numbers_net", "mlp")
    with torch.no_grad():
        for p in agent.net.parameters():
            p.fill_(weight)
    device = torch.device("cpu")
    weights = learner.PublishedWeights(agent.net, device)
    batcher = DynamicBatcher(1)
    with ThreadPoolExecutor(2) as pool, contextlib.closing(batcher):
        serving = pool.submit(polybeast.inference, batcher, agent, weights, device)
        step = map_structure(lambda x: np.asarray(x)[None], env.initial(seed=0))
        step["observation"] = np.full_like(step["observation"], 3e38)
        asked = pool.submit(batcher.compute, (step, agent.initial_state(1)))
        if math.isnan(weight):
            with pytest.raises(Stop, match="policy_logits is not finite"):
                serving.result(10)
            batcher.close()
            with pytest.raises((AsyncError, ClosedBatchingQueue)):
                asked.result(10)
        else:
            with pytest.raises(AsyncError, match="policy_logits is not finite"):
                asked.result(10)
            step["observation"][:] = 0
            batcher.compute((step, agent.initial_state(1)))
            batcher.close()
            serving.result(10)


# Servers of others.


def test_servers_of_others_are_used_over_tcp(savedir):
    address = f"127.0.0.1:{free_port()}"
    flags = ["--num_servers", 1, "--envs_per_server", 4, "--address", address]
    with servers(*flags, env="CartPole-v1") as program:
        flags = ("--server_addresses", f"{address}, {address}")
        result = succeeds(*small_run(savedir, *flags, steps=2000), module="polybeast")
        assert "2 streams" in result.stderr
        program.wait_for("disconnected after")


@pytest.mark.survives("no-server", "other-environment")
def test_a_learner_that_no_server_serves_says_why_in_one_line(savedir):
    other, nobody = (f"127.0.0.1:{free_port()}" for _ in range(2))
    flags = ["--num_servers", 1, "--envs_per_server", 1, "--address", other]
    with servers(*flags, env=COUNTER):
        for address, message in (
            (other, "the observation space differs: the learner has Box"),
            (nobody, "no environment server could be reached"),
        ):
            flags = ("--server_addresses", address, "--connect_timeout_seconds", 1)
            result = main(*small_run(savedir, *flags), module="polybeast")
            assert result.returncode == 1, result.stderr
            assert any(message in line for line in result.stderr.splitlines())
            assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env", "CartPoel-v1"], "CartPole-v1"),
        (["--video", "x.mp4"], "--video goes with --mode test"),
        (["--serveraddresses", "a:1"], "did you mean --server_addresses?"),
        (["--net", "huge"], "--net"),
        (["--server_addresses", ""], "--server_addresses"),
        (
            ["--server_addresses", "a:1", "--num_servers", 4],
            "--num_servers is of servers of this program's own",
        ),
        (["--learner_device", "cuda:99"], "--learner_device cuda:99"),
        (["--learner_device", "cuda:256"], "--learner_device cuda:256"),
        (["--actor_device", "gpu"], "--actor_device gpu: expected cpu, cuda or"),
    ],
)
def test_bad_input_is_one_line(flags, message, savedir):
    assert message in refusal(*small_run(savedir, *flags), module="polybeast")
    assert not savedir.exists()


@pytest.mark.parametrize(
    "agent", [["sac"], ["pqn", "--preset", "atari"], ["ppo", "--preset", "mujoco"]]
)
def test_servers_of_others_go_with_an_agents_own_number_of_servers(agent):
    flags = ["--agent", *agent, "--env", "Pendulum-v1", "--server_addresses", "a:1"]
    flags = parse_args(polybeast.program_parser(agent[0]), flags)
    sources.set_defaults(flags)
    assert flags.num_servers > 0


@pytest.mark.slow
def test_an_environment_that_is_alone_in_its_process_is_learned_from_elsewhere(savedir):
    address, env = f"127.0.0.1:{free_port()}", "tests.hostile_envs:OneAProcess-v0"
    with servers("--num_servers", 1, "--envs_per_server", 1, "--address", address,
                 env=env):  # fmt: skip
        flags = small_run(savedir, "--server_addresses", address, env=env, steps=400)
        result = main(*flags, "--envs_per_server", 1, module="polybeast")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_run_is_saved_before_its_servers_have_ended(tmp_path):
    """One that does not end is killed after ten seconds, which a batch system may not
    have."""
    with Program(*small_run(tmp_path, *LOG), module="polybeast") as program:
        wait_for_steps(tmp_path, 40)
        servers = program.workers()
        for pid in servers:
            os.kill(pid, signal.SIGSTOP)
        program.signal(signal.SIGTERM)
        program.wait_for("stopped by SIGTERM")
        deadline = time.monotonic() + 60
        while not (tmp_path / "x" / "model.tar").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert set(servers) <= set(program.workers())
        assert program.end() == 128 + signal.SIGTERM
