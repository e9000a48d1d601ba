"""WarpBeast, the program: training, testing and resuming, with one policy and more."""

import functools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces

import polybeast_env
import warpbeast
from tests import test_warp
from tests.programs import ROOT, load, main, read_logs, refusal, run, succeeds
from torchbeast import machine, policies, rollouts, seeds
from torchbeast.flags import parse_args
from torchbeast.nests import leaves, map_structure
from torchbeast.warp import autoreset

DEVICE = torch.device("cpu")  # Another one in tests/cuda.py.
GRID = ("--env", "warp/TagGridWorld", "--env_args", "size=4", "num_taggers=2")
T = 6


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    monkeypatch.setattr(machine, "_num_cores", 1)  # Other tests have the others.


class Leaving(test_warp.Leaving):
    """For --env tests.test_warpbeast:warp/Leaving."""


class Overflowing(test_warp.Leaving):
    """Its observations become infinite."""

    policies = {"agent": slice(0, 3)}

    def observe(self, state):
        return super().observe(state) * 1e38 ** state["t"][:, :, None]


class Infinite(test_warp.Infinite):
    """Its rewards are infinite, but for the first."""


class Bounded(test_warp.Leaving):
    """With another kind of action, of which the reward is the largest at 0.5."""

    action_space = spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "y": spaces.Discrete(2)})
    policies = {"agent": slice(0, 3)}

    def move(self, state, action):
        state, _, *flags = super().move(state, action["y"])
        return state, -(action["x"] - 0.5).square().sum(-1), *flags


def warp_run(savedir, *others, steps=400):
    sizes = () if "sac" in others else ("--hidden_sizes", 16)
    return ("--savedir", savedir, "--xpid", "x", "--num_envs", 4, *sizes,
            "--unroll_length", 10, "--log_interval_steps", 1, "--total_steps", steps,
            *others)  # fmt: skip


def start(savedir, *others, **kwargs):
    result = succeeds(*warp_run(savedir, *others, **kwargs), module="warpbeast")
    return result


def weights(savedir, policy):
    return load(savedir)["agent"][policy]["model"]


@pytest.mark.parametrize("agent", ["polybeast", "ppo", "pqn", "r2d2"])
def test_a_run_trains_resumes_and_is_tested(tmp_path, agent):
    args = ["--agent", agent, "--env", "warp/Catch"]
    if agent == "r2d2":
        args += ["--replay_start", 100, "--replay_size", 1000, "--burn_in", 3]
    start(tmp_path, *args)
    rows = read_logs(tmp_path / "x")
    assert [int(row["step"]) for row in rows] == list(range(40, 401, 40))
    assert any(row["episode_return"] for row in rows)
    assert {row["policy_lag"] for row in rows} == {"0.0"}
    result = start(tmp_path, *args, steps=480)
    assert "resuming" in result.stderr and "at step 400" in result.stderr
    assert [int(row["step"]) for row in read_logs(tmp_path / "x")][-1] == 480
    for module in "warpbeast", "monobeast":
        test = succeeds("--savedir", tmp_path, "--mode", "test", module=module)
        assert "10 episodes: mean return" in test.stdout


@pytest.mark.slow
def test_sac_learns_from_numbers(tmp_path):
    start(tmp_path, "--env", "warp/Pendulum", "--agent", "sac", "--replay_start", 100)
    assert float(read_logs(tmp_path / "x")[-1]["critic_loss"]) > 0


def test_each_policy_is_an_agent_with_flags_of_its_own(tmp_path):
    args = [*GRID, "--learning_rate", 0.001, "--tagger.learning_rate", 0.01]
    args += ["--num_epochs", 1, "--tagger.reward_clipping", "none"]
    args += ["--runner.reward_clipping", "none"]
    args += ["--runner.use_lstm", "--runner.entropy_cost=0.5"]
    lines = start(tmp_path, *args, steps=1200).stderr
    assert "are clipped" not in lines
    rows = read_logs(tmp_path / "x")
    assert len(rows) == 10 and [int(row["step"]) for row in rows][:2] == [120, 240]
    of_taggers = float(rows[1]["tagger/learning_rate"])
    of_runners = float(rows[1]["runner/learning_rate"])
    assert of_taggers == pytest.approx(10 * of_runners)
    agent = load(tmp_path)["agent"]
    assert agent["tagger"]["step"] == 800 and agent["runner"]["step"] == 400
    assert any(name.startswith("core") for name in weights(tmp_path, "runner"))
    assert not any(name.startswith("core") for name in weights(tmp_path, "tagger"))
    ended = [row for row in rows if row["episode_return"]]
    for row in ended:
        mean = 2 * float(row["episode/tagger_return"])
        mean = (mean + float(row["episode/runner_return"])) / 3
        assert float(row["episode_return"]) == pytest.approx(mean, rel=1e-4)
        assert 0 <= float(row["episode/tagged"]) <= 1
    assert ended
    video = tmp_path / "x.mp4"
    test = ["--savedir", tmp_path, "--mode", "test", "--num_test_episodes", 3]
    result = succeeds(*test, "--video", video, module="warpbeast")
    assert "mean tagged" in result.stdout and video.stat().st_size > 1000


@pytest.mark.parametrize(
    ("preset", "agent"), [("warpdrive", "polybeast"), ("two_policies", "ppo")]
)
def test_warpdrives_run_has_one_policy_of_all_agents(tmp_path, preset, agent):
    flags = parse_args(
        warpbeast.program_parser(agent), ["--preset", preset, "--agent", agent]
    )
    env = polybeast_env.create_warp_env(flags)
    one = preset == "warpdrive"
    assert list(env.policies) == (["shared"] if one else ["tagger", "runner"])
    args = ["--preset", preset, "--agent", agent, "--num_envs", 2, "--hidden_sizes", 8]
    succeeds(*args, "--total_steps", 2000, "--log_interval_steps", 1, "--savedir",
             tmp_path, "--xpid", "x", module="warpbeast")  # fmt: skip
    rows = read_logs(tmp_path / "x")
    assert [int(row["step"]) for row in rows] == [1000, 2000]  # 5 agents, 100 steps.
    assert ("total_loss" in rows[0]) == one == ("tagger/total_loss" not in rows[0])
    assert {row["policy_lag"] for row in rows} == {"0.0"}


def test_a_frozen_policy_does_not_learn(tmp_path):
    start(tmp_path, *GRID)
    before = {name: weights(tmp_path, name) for name in ("tagger", "runner")}
    start(tmp_path, *GRID, "--freeze", "tagger", steps=800)
    for policy, is_frozen in (("tagger", True), ("runner", False)):
        after = weights(tmp_path, policy)
        same = [torch.equal(x, after[name]) for name, x in before[policy].items()]
        assert all(same) if is_frozen else not any(same)
    assert not read_logs(tmp_path / "x")[-1]["tagger/total_loss"]


@pytest.mark.slow
def test_past_and_random_policies_are_played_against_each_other(tmp_path):
    start(tmp_path, *GRID, "--keep_checkpoints", 9, "--checkpoint_interval_seconds",
          0.01, steps=2000)  # fmt: skip
    run_dir = tmp_path / "x"
    for flags, num in (([], 4), (["--snapshots", "2"], 4)):
        command = [sys.executable, "-m", "benchmarks.crossplay", run_dir, *flags]
        command += ["--num_envs", "20", "--json", tmp_path / "found.json"]
        subprocess.run(command, cwd=ROOT, check=True)
        found = json.loads((tmp_path / "found.json").read_text())
        assert len(found) == num
    assert (
        list(found)[-1].startswith("tagger after 2,0") and 0 <= found.popitem()[1] <= 1
    )


def test_nested_actions_are_learned(tmp_path):
    start(tmp_path, "--env", "tests.test_warpbeast:warp/Bounded", "--agent", "ppo",
          "--num_minibatches", 2)  # fmt: skip


@pytest.mark.slow
def test_the_other_programs_train_in_the_same_environments(tmp_path):
    for module in "monobeast", "polybeast":
        flags = ["--num_actors", 1] if module == "monobeast" else ["--num_servers", 1]
        args = [*GRID, *flags, "--savedir", tmp_path, "--xpid", module]
        succeeds(*args, "--total_steps", 400, module=module)


def test_the_same_seed_gives_the_same_run(tmp_path):
    runs = []
    for name in ("a", "b"):
        start(tmp_path / name, *GRID, "--seed", 5)
        rows = read_logs(tmp_path / name / "x")
        runs.append([(row["step"], row["runner/total_loss"]) for row in rows])
    assert runs[0] == runs[1]


# Rollouts.


def make_rollouts(*args, env=None, num_envs=3):
    argv = [*map(str, args), "--unroll_length", str(T), "--hidden_sizes", "8"]
    agent = "r2d2" if "r2d2" in args else "polybeast"
    flags = parse_args(warpbeast.program_parser(agent), argv)
    env = env or test_warp.make_leaving()
    flags.command, flags.batch_size = ["warpbeast", *argv], 3 * num_envs
    seeds.set_seed(3)
    agent = policies.make_agent(flags, env)
    acting = getattr(agent, "agents", dict.fromkeys(env.policies, agent))
    agent.net.eval()
    specs = warpbeast.first_steps(env, acting, flags)
    agent.net.to(DEVICE)
    return warpbeast.Rollouts(flags, env, num_envs, acting, specs, DEVICE)


def copies(acting, num):
    result = []
    for _ in range(num):
        acting.next()
        result.append(map_structure(torch.clone, acting.buffers))
    return result


def test_compiled_rollouts_are_the_same_and_are_compiled_once(monkeypatch):
    args = ["--agent", "r2d2", "--burn_in", 3]
    expected = copies(make_rollouts(*args), 3)
    compiled = functools.partial(torch.compile, backend="aot_eager")  # Fast to compile.
    monkeypatch.setattr(torch, "compile", compiled)
    torch._dynamo.reset()  # It remembers other tests.
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = copies(make_rollouts(*args, "--compile"), 3)
    for one, other in zip(expected, got, strict=True):
        for (path, x), (_, y) in zip(leaves(one), leaves(other), strict=True):
            torch.testing.assert_close(y, x, msg=path)


@pytest.mark.parametrize("lstm", [[], ["--use_lstm"]])
def test_rollouts_go_on_where_the_one_before_ended(lstm):
    batches = copies(make_rollouts(*lstm), 6)
    for policy in ("first", "last"):
        for one, next_one in zip(batches, batches[1:]):
            one, next_one = one[policy], next_one[policy]
            for name, x in one.items():
                if name in ("action", "policy_logits", "core_state"):
                    continue
                assert torch.equal(x[-1], next_one[name][0]), name
        whole = {
            name: torch.cat([b[policy][name][1:] for b in batches])
            for name in ("done", "episode_step", "terminated", "truncated")
        }
        last = whole["terminated"] | whole["truncated"]
        assert whole["done"][1:][last[:-1]].all()
        step = torch.where(whole["done"][1:], 0, whole["episode_step"][:-1] + 1)
        assert torch.equal(whole["episode_step"][1:], step)


@pytest.mark.parametrize("burn_in", [0, 2, T + 3])
def test_the_recurrent_state_is_that_of_the_first_step(burn_in):
    env = autoreset.make("warp/CartPole")
    greedy = ["--exploration", 0, 0, "--exploration_steps", 0]
    args = ["--agent", "r2d2", "--burn_in", burn_in, *greedy]
    acting = make_rollouts(*args, env=env)
    [agent] = acting.agents.values()
    for batch in copies(acting, 6):
        (batch,) = batch.values()
        assert len(batch["done"]) == burn_in + T + 1
        assert len(batch["action"]) == burn_in + T
        core_state, _ = batch["core_state"]
        step = {name: batch[name] for name in acting.fields}
        with torch.no_grad():
            outputs, _ = agent.net(step, core_state)
        assert (batch["action"] == outputs["q"][:-1].argmax(-1)).all()


def test_a_rollout_is_what_the_agent_does_step_by_step():
    acting = make_rollouts("--use_lstm")
    batches = copies(acting, 6)
    for policy, agent in acting.agents.items():
        for batch in batches:
            step = {name: batch[policy][name] for name in acting.fields}
            with torch.no_grad():
                outputs, _ = agent.unroll(step, batch[policy]["core_state"])
            torch.testing.assert_close(
                outputs["policy_logits"][:-1], batch[policy]["policy_logits"]
            )
            moved, done = (batch[policy][k][1:] for k in ("last_action", "done"))
            assert torch.equal(moved[~done], batch[policy]["action"][~done])


def test_steps_of_agents_that_have_left_are_not_new():
    for batches in copies(make_rollouts(), 3):
        batch = batches["first"]  # One of its two agents leaves at step 1, one at 2.
        t = batch["observation"][..., 0]
        expected = t <= torch.tensor([1, 2]).repeat(3)
        assert not expected.all()
        expected[-1] = False  # It is the next rollout's first one.
        assert torch.equal(rollouts.new(batch), expected)


def test_episodes_are_counted_once():
    acting = make_rollouts()
    counts = []
    for _ in range(3):
        metrics = acting.next()
        episodes = warpbeast.ended_episodes(acting.buffers, metrics, T)
        counts.append({name: x.tolist() for name, x in episodes.items()})
    # With the first one of the next, episodes have 4 steps: of 18, the agents' last
    # ones are in 5, 5 and 4, in each of 3 environments.
    assert sum(x["episode_return"][1] for x in counts) == 3 * (5 + 5 + 4)
    assert sum(x["episode/length"][1] for x in counts) == 12
    assert sum(x["episode/last_return"][1] for x in counts) == 12


# Bad input.


def test_a_game_of_tensors_is_not_shown_on_a_screen(tmp_path, monkeypatch):
    start(tmp_path, "--env", "warp/Catch", steps=40)
    monkeypatch.setenv("DISPLAY", ":0")
    args = ("--savedir", tmp_path, "--mode", "test_render")
    assert "use --mode test --video" in refusal(*args, module="warpbeast")


def test_polybeast_counts_the_agents_of_a_stream(tmp_path):
    args = ("--env", "warp/TagGridWorld", "--envs_per_server", 1000, "--num_servers", 1)
    line = refusal(*args, "--savedir", tmp_path, module="polybeast")
    assert "at most 4,096 agents, these environments have 5 each" in line


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--env", "CartPole-v1"], "--env CartPole-v1: expected an environment on the"),
        (["--env", "warp/Tagg"], "unknown environment 'warp/Tagg'"),
        (["--batch_size", 3], "--batch_size: a batch has a rollout of each agent"),
        (["--env", "warp/Tag", "--agent", "r2d2"], "needs a Discrete action space"),
        ([*GRID, "--hunter.learning_rate", 1], "has no policy 'hunter', it has tagger"),
        ([*GRID, "--tagger.num_envs", 1], "policy tagger: --num_envs: expected a flag"),
        (
            [*GRID, "--tagger.alpha", "x"],
            "policy tagger: error: argument --alpha: 'x' is",
        ),
        ([*GRID, "--freeze", "all"], "has no policy 'all'"),
        ([*GRID, "--agent", "r2d2", "--runner.no-use_lstm"], "the same --burn_in and"),
        (["--agent.learning_rate", 1], "has one policy, whose flags are the program's"),
        (["--learner_device", "cuda:77"], "--learner_device cuda:77: "),
        (["--one_episode_rollouts"], "expected monobeast or polybeast"),
        (["--env_args", "speed=3"], "cannot be made"),
        (["--env_args", "speed"], "'speed', expected NAME=VALUE"),
    ],
)
def test_bad_input_is_one_line(tmp_path, args, error):
    line = refusal(*args, "--savedir", tmp_path, module="warpbeast")
    assert error in line
    assert not list(tmp_path.iterdir())


def test_what_an_agent_refuses_is_said_of_its_policy(tmp_path):
    args = warp_run(tmp_path, *GRID, "--agent", "ppo", "--runner.num_minibatches", 99)
    line = refusal(*args, module="warpbeast")
    assert "policy runner: --num_minibatches 99: a batch has 40 steps" in line


def test_what_does_not_fit_is_refused_with_its_bytes(tmp_path):
    args = ("--env", "warp/TagGridWorld", "--env_args", "num_taggers=1000")
    line = refusal(*args, "--num_envs", 2000, "--savedir", tmp_path, module="warpbeast")
    assert "the rollouts need " in line and "smaller --num_envs" in line


@pytest.mark.parametrize(
    ("env", "field"), [("Overflowing", "observation"), ("Infinite", "reward")]
)
def test_what_is_not_finite_is_named(env, field, tmp_path):
    args = ("--env", f"tests.test_warpbeast:warp/{env}")
    result = main(*warp_run(tmp_path, *args), module="warpbeast")
    assert result.returncode == 1
    assert f"warp/{env}: a number in the {field} of agent is not fini" in result.stderr


@pytest.mark.long
def test_several_learners_share_the_environments(tmp_path):
    args = warp_run(tmp_path, *GRID, "--num_envs", 8, steps=2400)
    result = run(*args, module="warpbeast", ranks=2)
    assert result.returncode == 0, result.stderr
    rows = read_logs(tmp_path / "x")
    assert [int(row["step"]) for row in rows] == list(range(240, 2401, 240))


# Learning.


def mean_of_last(savedir):
    """The mean return in the last tenth of a run."""
    rows = [r for r in read_logs(savedir / "x") if r["episode_return"]]
    return np.mean([float(r["episode_return"]) for r in rows[-(len(rows) // 10) :]])


PPO = "--agent ppo --num_minibatches 4 --num_envs 64"
LEARNED = [  # Environment, flags, steps, return.
    ("Catch", "--num_envs 16", 200_000, 0.9),
    ("Catch", "--agent ppo --num_envs 64", 150_000, 0.9),
    ("CartPole", "--num_envs 64 --discounting 0.98", 2_000_000, 450),
    (
        "CartPole",
        f"{PPO} --discounting 0.98 --gae_lambda 0.8 --learning_rate 1e-3",
        500_000,
        475,
    ),
    ("Acrobot", PPO, 1_000_000, -100),
    (
        "MountainCar",
        f"{PPO} --normalize_observations --normalize_rewards --learning_rate 1e-3 "
        "--entropy_cost 0 --gae_lambda 0.98",
        1_500_000,
        -120,
    ),
    (
        "Pendulum",
        "--num_envs 64 --normalize_rewards --discounting 0.9 --entropy_cost 0",
        1_500_000,
        -230,
    ),
]


@pytest.mark.parametrize(
    ("env", "flags", "steps", "expected"),
    [
        pytest.param(
            *x, marks=pytest.mark.slow if x == LEARNED[1] else pytest.mark.long
        )
        for x in LEARNED
    ],
)
def test_it_learns(tmp_path, env, flags, steps, expected):
    """The returns are of sampled actions; the mode's are higher."""
    args = ["--env", f"warp/{env}", *flags.split(), "--seed", 1, "--savedir", tmp_path]
    args += ["--xpid", "x", "--total_steps", steps, "--hidden_sizes", 64, 64]
    succeeds(*args, module="warpbeast")
    assert mean_of_last(tmp_path) > expected


@pytest.mark.long
def test_whoever_follows_warp_md_gets_what_it_says(tmp_path):
    text = (ROOT / "docs/warp.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    (tmp_path / "drift.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    args = ["--env", "drift:warp/Drift", "--agent", "ppo", "--total_steps", "300000"]
    args += ["--savedir", str(tmp_path)]
    core = str(min(os.sched_getaffinity(0)))  # Threads of two would wait for others.
    result = subprocess.run(
        ["taskset", "-c", core, sys.executable, "-m", "warpbeast", *args],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    rows = [r for r in read_logs(tmp_path / "latest") if r["episode_return"]]
    returns = [float(row["episode_return"]) for row in rows]
    assert np.mean(returns[-10:]) > np.mean(returns[:10]) + 10
