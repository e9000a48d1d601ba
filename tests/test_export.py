"""An agent as one file: it acts as the agent does, without this repository."""

import errno
import os
import re
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.programs import ROOT, main, succeeds
from tests.test_agent import parse
from tests.test_masks import AGENTS
from torchbeast import environment, export
from torchbeast.agents import what_networks_read
from torchbeast.flags import run_command
from torchbeast.nests import leaves, map_structure
from torchbeast.play import Policy
from torchbeast.policies import make_agent

PLAY = {"LSTM": ("--use_lstm",), "PPO": ("--agent", "ppo", "--normalize_observations")}


def train(path, *args, env="CartPole-v1", steps=400):
    args = ("--savedir", path, "--xpid", "x", "--env", env, "--num_actors", 0, *args)
    succeeds(*args, "--total_steps", steps, "--seed", 1)


def write(path, name):
    words = ["--savedir", path, "--xpid", "x", "--out", path / name]
    flags = export.parser().parse_args(list(map(str, words)))
    return run_command("export", lambda: export.export(flags))


class SameStart(gymnasium.Wrapper):
    """Begins as env.reset(seed=1) does."""

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=1)


def actions_of_agent(path):
    flags = export.parser().parse_args(["--out", "x", "--savedir", str(path)])
    flags.xpid = "x"
    agent, *_ = export.load(flags)
    env = environment.Environment(SameStart(gymnasium.make("CartPole-v1")))
    policy, actions = Policy(agent, env, "greedy"), []
    step = env.initial(0)
    while not step["episode_end"].all():
        actions.append(policy(step))
        step = env.step(actions[-1])
    return [int(x.item()) for x in actions], float(step["episode_return"].item())


def scripts():
    """The scripts of docs/experiments.md, by the kind of file that they read."""
    text = (ROOT / "docs" / "experiments.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    kinds = ("pt2", "onnx")
    return {kind: x for kind in kinds for x in blocks if f'"agent.{kind}"' in x}


def play(path, kind):
    """Runs the script without the repository. Returns (actions, score)."""
    (path / "play.py").write_text(scripts()[kind])
    words = [sys.executable, "-I", "play.py"]
    out = subprocess.run(words, cwd=path, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    *actions, _, score = out.stdout.split()
    return list(map(int, actions)), float(score)


@pytest.mark.parametrize("agent", ["LSTM", pytest.param("PPO", marks=pytest.mark.slow)])
def test_the_script_plays_a_whole_game_as_the_agent_does(agent, tmp_path):
    train(tmp_path, *PLAY[agent])
    assert write(tmp_path, "agent.pt2") == 0
    assert "torchbeast" not in scripts()["pt2"]
    assert play(tmp_path, "pt2") == actions_of_agent(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("agent", PLAY)
def test_onnx_plays_a_whole_game_as_the_agent_does(agent, tmp_path):
    train(tmp_path, *PLAY[agent])
    assert write(tmp_path, "agent.onnx") == 0
    assert play(tmp_path, "onnx") == actions_of_agent(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_every_agent_with_choices_is_written_with_its_masks(agent, tmp_path):
    train(tmp_path, *AGENTS[agent], env="tests.envs:torchbeast/Masked-v0", steps=200)
    assert write(tmp_path, "agent.pt2") == 0
    program = torch.export.load(tmp_path / "agent.pt2")
    (step, core_state), _ = program.example_inputs
    for i in range(5):
        step["action_mask"] = torch.arange(5)[None] == i
        action, core_state = program.module()(step, core_state)
        assert action.tolist() == [i]


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["sac", "td3"])
def test_agents_with_numbers_are_written(agent, tmp_path):
    train(tmp_path, "--agent", agent, env="Pendulum-v1")
    assert write(tmp_path, "agent.pt2") == 0
    program = torch.export.load(tmp_path / "agent.pt2")
    action, _ = program.module()(*program.example_inputs[0])
    assert action.shape == (1, 1) and np.abs(action.numpy()).max() <= 2


class Shifted(gymnasium.Env):
    """Three steps an episode; choices that do not begin at 0, and numbers that are
    small."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Tuple(
        (
            spaces.Discrete(3, start=5),
            spaces.Box(-0.01, 0.01, (2,), np.float32),
            spaces.Box(-0.007, 0.007, (2,), np.float64),  # float32 is beyond.
            spaces.Dict(gear=spaces.Box(-4, -2, (), np.int8)),
        )
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.random(3, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        return self.np_random.random(3, np.float32), 1.0, self.steps == 3, False, {}


def test_actions_are_those_that_the_environment_takes():
    env = environment.Environment(Shifted())
    flags = parse("--env", "x", "--use_lstm")
    agent = make_agent(flags, env)
    agent.net.eval()
    torch.manual_seed(1)
    for x in agent.net.parameters():  # Actions that are beyond the bounds, and differ.
        torch.nn.init.normal_(x)
    policy, acting = Policy(agent, env, "greedy"), export.Acting(agent, env.actions)
    step, state, given = env.initial(1), agent.initial_state(1), env.actions.zeros()
    seen, beyond = set(), False
    for _ in range(9):
        own = {**what_networks_read(step), "last_action": given}
        with torch.no_grad():
            given, state = acting(map_structure(torch.as_tensor, own), state)
        action = policy(step)
        expected, _ = env.actions.to_environment(action)
        for (name, x), (_, y) in zip(leaves(given), leaves(expected)):
            np.testing.assert_array_equal(x, y, name)
        seen.add(str(given))
        beyond = beyond or np.abs(action[2]).max() > 0.007
        step = env.step(action)
    assert len(seen) > 1 and beyond


# Small checkpoints.

TESTED = "--mode", "test", "--num_test_episodes", 5, "--greedy", "--seed", 1


def played(*args, module="monobeast"):
    """The returns of five games."""
    result = succeeds(*TESTED, *args, module=module)
    return re.findall(r": return ([-0-9.]+), ", result.stdout)


@pytest.mark.parametrize("agent", PLAY)
def test_a_small_checkpoint_plays_with_the_weights_of_the_large_one(agent, tmp_path):
    train(tmp_path, *PLAY[agent])
    assert write(tmp_path, "small.tar") == 0
    large, small = tmp_path / "x/model.tar", tmp_path / "small.tar"
    assert small.stat().st_size < large.stat().st_size / 3
    state = torch.load(small, weights_only=True)
    assert str(tmp_path) not in str(state["flags"])
    dtypes = {x.dtype for x in state["agent"]["model"].values()}
    assert dtypes <= {torch.float16, torch.float64} and torch.float16 in dtypes
    whole = torch.load(large, weights_only=True)["agent"]["model"]
    for name, x in state["agent"]["model"].items():
        torch.testing.assert_close(x.to(whole[name]), whole[name], rtol=1e-3, atol=1e-7)
    assert len(played("--checkpoint", small)) == 5


def test_a_small_checkpoint_has_all_policies_of_warpbeast(tmp_path):
    flags = "--env", "warp/Catch", "--num_envs", 4, "--total_steps", 400
    flags += "--savedir", tmp_path, "--xpid", "x", "--seed", 1
    assert main(*flags, module="warpbeast").returncode == 0
    assert write(tmp_path, "small.tar") == 0
    files = tmp_path / "small.tar", tmp_path / "x/model.tar"
    small, large = (played("--checkpoint", x, module="warpbeast") for x in files)
    assert small == large


def test_of_self_play_the_agent_is_written_without_its_past_policies(tmp_path):
    train(tmp_path, "--opponents", 2, "--batch_size", 1, "--opponent_interval", 20,
          env="tests.turn_envs:Duel", steps=200)  # fmt: skip
    for name in ("small.tar", "agent.pt2"):
        assert write(tmp_path, name) == 0
    small, large = tmp_path / "small.tar", tmp_path / "x/model.tar"
    assert set(torch.load(small, weights_only=True)["agent"]) == {"model"}
    assert played("--checkpoint", small) == played("--checkpoint", large)


def test_a_small_checkpoint_does_not_resume(tmp_path, capsys):
    train(tmp_path)
    assert write(tmp_path, "small.tar") == 0
    (tmp_path / "small.tar").rename(tmp_path / "x/model.tar")
    words = "--savedir", tmp_path, "--xpid", "x", "--env", "CartPole-v1"
    result = main(*words, "--num_actors", 0)
    assert result.returncode == 2 and "lacks the agent's 'optimizer'" in result.stderr


def test_weights_that_float16_cannot_hold_stay_as_they_are():
    large, small = torch.tensor([1.0, 1e6]), torch.tensor([1.0, 0.1])
    count = torch.tensor(1e9, dtype=torch.float64)
    state = {"model": {"large": large, "small": small, "count": count}, "step": 1}
    written = export.weights(state)["model"]
    assert written["large"] is large and written["count"] is count
    assert written["small"].dtype == torch.float16


@pytest.mark.long
def test_a_trained_agent_plays_as_well_from_a_small_checkpoint(tmp_path):
    train(tmp_path, env="tests.envs:torchbeast/Catch-v0", steps=60_000)
    assert write(tmp_path, "small.tar") == 0
    assert (tmp_path / "small.tar").stat().st_size < 200_000
    assert played("--checkpoint", tmp_path / "small.tar") == ["1"] * 5


def test_another_kind_of_file_is_refused(tmp_path, capsys):
    assert write(tmp_path, "agent.zip") == 2
    assert (
        "agent.zip: expected a name that ends in .pt2, .onnx or .tar"
        in capsys.readouterr().err
    )


def test_a_folder_that_is_not_there_is_named_before_any_work(tmp_path, capsys):
    out = tmp_path / "typo" / "agent.pt2"
    assert export.main(["--out", str(out), "--savedir", str(tmp_path)]) == 2
    message = f"--out {out}: there is no directory {out.parent}"
    assert message in capsys.readouterr().err


def test_a_disk_that_is_full_is_one_line(tmp_path, monkeypatch, capsys):
    def write_small(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export, "find", lambda flags: [None])
    monkeypatch.setattr(export, "write_small", write_small)
    assert export.main(["--out", str(tmp_path / "agent.tar")]) == 2
    assert "agent.tar: OSError: [Errno 28] No space left" in capsys.readouterr().err


def test_a_run_that_is_not_there_is_named(tmp_path, capsys):
    assert write(tmp_path, "agent.pt2") == 2
    path = tmp_path / "x" / "model.tar"
    assert f"no checkpoint at {path}" in capsys.readouterr().err


def test_a_program_of_a_users_own_that_is_not_there_is_named(tmp_path, capsys):
    path = tmp_path / "x" / "model.tar"
    path.parent.mkdir()
    flags = {"command": ["my_beast"], "agent": "polybeast", "env": "CartPole-v1"}
    torch.save({"agent": {}, "flags": flags, "step": 1}, path)
    assert write(tmp_path, "agent.pt2") == 2
    line = "the program that trained it, my_beast: No module named 'my_beast'"
    assert line in capsys.readouterr().err


def test_a_small_checkpoint_does_not_take_the_place_of_the_large_one(tmp_path, capsys):
    train(tmp_path)
    before = (tmp_path / "x/model.tar").read_bytes()
    assert write(tmp_path, "x/model.tar") == 2
    assert "model.tar: expected another file than" in capsys.readouterr().err
    assert (tmp_path / "x/model.tar").read_bytes() == before
