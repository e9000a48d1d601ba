"""Without --async, acting waits for each update: no rollout is old."""

import os
import signal

import pytest

import monobeast
from tests.programs import (
    CALM,
    Program,
    main,
    read_logs,
    refusal,
    rollouts,
    succeeds,
    wait_for_steps,
)
from tests.test_polybeast_env import free_port
from tests.test_polybeast_faults import serve
from torchbeast import machine, ranks
from torchbeast.flags import parse_args
from torchbeast.messages import BadInput

PPO = ["--agent", "ppo", "--num_minibatches", 2, "--num_epochs", 1]
SMALL = ["--env", "CartPole-v1", "--batch_size", 8, "--unroll_length", 5,
         "--log_interval_steps", 40, "--xpid", "x"]  # fmt: skip
# Flags of two actors or servers; the last one wants its value.
TWO = {
    "monobeast": ["--num_actors", 2, "--envs_per_actor"],
    "polybeast": ["--num_servers", 2, "--envs_per_server"],
}


def lags(savedir):
    return {float(row["policy_lag"]) for row in read_logs(savedir / "x")}


@pytest.mark.parametrize(
    ("module", "args"),
    [("monobeast", [1, *PPO]), ("polybeast", [4, "--no-async"])],
)  # Environments of each: four of their rollouts are in a batch, or one.
def test_the_policy_that_learns_has_acted(tmp_path, module, args):
    args = [*SMALL, *TWO[module], *args, "--savedir", tmp_path]
    succeeds(*args, "--total_steps", 1200, module=module)
    rows = read_logs(tmp_path / "x")
    assert len(rows) == 30 and lags(tmp_path) == {0}


def test_with_async_rollouts_are_older(tmp_path):
    args = [*SMALL, *TWO["monobeast"], 4, *PPO, "--async", "--savedir", tmp_path]
    succeeds(*args, "--total_steps", 1200)
    assert max(lags(tmp_path)) > 0


@pytest.mark.slow
@pytest.mark.survives("actor-killed")
def test_a_killed_actor_holds_no_batch_up(tmp_path):
    args = [*SMALL, *TWO["monobeast"], 1, *PPO, "--savedir", tmp_path]
    with Program(*args, "--total_steps", 10**8) as program:
        for _ in range(3):
            wait_for_steps(tmp_path, 400)
            os.kill(program.workers()[0], signal.SIGKILL)
            program.wait_for("is restarted")
        wait_for_steps(tmp_path, 400)
        program.stop()
    assert lags(tmp_path) == {0}


@pytest.mark.long
@pytest.mark.survives("server-killed")
def test_a_server_killed_in_mid_rollout_holds_no_batch_up(tmp_path):
    """Its rollouts are the other one's to make, and it is taken up again."""
    one, two = (f"127.0.0.1:{free_port()}" for _ in range(2))
    args = [*SMALL[2:], *PPO, "--unroll_length", 40, "--savedir", tmp_path]
    args += ["--server_addresses", f"{one},{two}", "--env", CALM]
    args += ["--total_steps", 10**8]
    with serve(one, env=CALM), Program(*args, module="polybeast") as learner:
        for _ in range(2):  # It is back the second time.
            with serve(two, env=CALM) as server:
                wait_for_steps(tmp_path, 640)
                server.signal_all(signal.SIGKILL)
                learner.wait_for(f"{two}: no stream")
                wait_for_steps(tmp_path, 640)
        learner.stop()
        assert rollouts(learner.output)["lost with their stream"] > 0
    assert lags(tmp_path) == {0}


def test_hosts_whose_streams_do_not_divide_a_batch_hold_none_up(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    args = [*SMALL, *PPO, "--server_addresses", address, "--savedir", tmp_path]
    with serve(address, num_envs=3):
        result = main(*args, "--total_steps", 800, module="polybeast")
    assert result.returncode == 0, result.stderr
    assert max(lags(tmp_path)) <= 1


def test_own_servers_that_do_not_divide_a_batch_are_refused(tmp_path):
    args = [*SMALL, *PPO, *TWO["polybeast"], 3, "--savedir", tmp_path]
    line = refusal(*args, module="polybeast")
    assert all(x in line for x in ("8 rollouts", "(--envs_per_server)", "--async"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--envs_per_actor", 5], ["--batch_size", "8", "5", "--async"]),
        (["--envs_per_actor", 16], ["--batch_size", "8", "16", "--async"]),
        (["--one_episode_rollouts"], ["--one_episode_rollouts", "--async"]),
    ],
)
def test_what_cannot_be_waited_for_is_refused(tmp_path, args, words):
    line = refusal(*SMALL, *PPO, *args, "--savedir", tmp_path)
    assert all(word in line for word in words), line


def test_actors_that_no_batch_has_rollouts_for_are_not_started(tmp_path):
    flags = [*SMALL, *PPO, "--num_actors", 3, "--envs_per_actor", 4]
    result = succeeds(*flags, "--total_steps", 40, "--savedir", tmp_path)
    assert "2 actors fill a batch" in result.stderr
    assert "2 actors of 4 environments" in result.stderr


@pytest.mark.parametrize("num_actors", [None, 0, 3])
@pytest.mark.parametrize("batch_size", [1, 7, 8, 32, 48, 1000])
def test_by_default_a_batch_has_rollouts_of_all_environments(
    monkeypatch, batch_size, num_actors
):
    args = ["--batch_size", str(batch_size)]
    if num_actors is not None:
        args += ["--num_actors", str(num_actors)]
    for num_cores in 1, 2, 3, 12, 64:
        monkeypatch.setattr(machine, "_num_cores", num_cores)
        flags = parse_args(monobeast.program_parser("ppo"), args)
        monobeast.set_defaults(flags)
        assert batch_size % flags.envs_per_actor == 0
        assert flags.num_actors <= max(num_cores, num_actors or 0)
        assert flags.envs_per_actor <= max(1, 32 // max(1, flags.num_actors))
        if num_actors is None:
            assert batch_size % (flags.num_actors * flags.envs_per_actor) == 0
        flags = parse_args(monobeast.program_parser(), args)  # IMPALA.
        monobeast.set_defaults(flags)
        expected = num_cores if num_actors is None else num_actors
        assert flags.num_actors == expected
        assert flags.envs_per_actor == max(1, 32 // max(1, expected))


@pytest.mark.parametrize("agent", ["ppo", "polybeast"])
@pytest.mark.parametrize("num_agents", [2, 3, 5, 20, 33])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_by_default_environments_have_32_agents_that_fill_batches_together(
    monkeypatch, agent, num_agents, num_ranks
):
    monkeypatch.setattr(ranks.current, "num", num_ranks)
    for num_cores in 1, 2, 12:
        monkeypatch.setattr(machine, "_num_cores", num_cores)
        flags = parse_args(monobeast.program_parser(agent), [])
        before = flags.batch_size
        monobeast.set_defaults(flags, num_agents)
        in_actor = flags.envs_per_actor * num_agents
        assert flags.envs_per_actor == 1 or flags.num_actors * in_actor <= 32
        if agent == "ppo":
            assert before <= flags.batch_size < before + 4 * num_agents * num_ranks
            share = ranks.current.share(flags.batch_size)
            assert share % (flags.num_actors * in_actor) == 0
        else:
            assert flags.batch_size == before


def test_a_batch_size_that_is_given_is_not_rounded():
    flags = parse_args(monobeast.program_parser("ppo"), ["--batch_size", "32"])
    flags.command = ["monobeast", "--batch_size", "32"]
    monobeast.set_defaults(flags, 3)
    with pytest.raises(BadInput, match="32 rollouts are no multiple of those that"):
        monobeast.num_buffers(flags, 3)
