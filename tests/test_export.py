"""An agent as one file: it acts as the agent does, without this repository."""

import re
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch

from tests.programs import ROOT, main
from tests.test_masks import AGENTS
from torchbeast import environment, export
from torchbeast.flags import run_command
from torchbeast.play import Policy

PLAY = {"LSTM": ("--use_lstm",), "PPO": ("--agent", "ppo", "--normalize_observations")}


def train(path, *args, env="CartPole-v1", steps=400):
    args = ("--savedir", path, "--xpid", "x", "--env", env, "--num_actors", 0, *args)
    result = main(*args, "--total_steps", steps, "--seed", 1)
    assert result.returncode == 0, result.stderr


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
    agent, _, _ = export.load(flags)
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
    out = subprocess.run(words, cwd=path, capture_output=True, text=True, timeout=120)
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


def test_another_kind_of_file_is_refused(tmp_path, capsys):
    assert write(tmp_path, "agent.zip") == 2
    assert "agent.zip: expected a name that ends in .pt2" in capsys.readouterr().err


def test_a_run_that_is_not_there_is_named(tmp_path, capsys):
    assert write(tmp_path, "agent.pt2") == 2
    path = tmp_path / "x" / "model.tar"
    assert f"no checkpoint at {path}" in capsys.readouterr().err
