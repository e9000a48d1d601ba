"""docs/fork.md, followed line by line, in a copy of the repository."""

import os
import pathlib
import re
import subprocess
import sys
import types

import gymnasium
import pytest
import torch

from tests import envs, test_graphs, test_ppo
from tests.programs import ROOT, read_logs
from tests.test_pretended_gpu import gpus  # noqa: F401
from torchbeast.environment import Environment, make


@pytest.fixture
def copy(repository):
    """A copy of the repository, with the edit of the document beside its files."""
    [diff] = blocks()["diff"]
    (repository / "edit.diff").write_text(diff)
    return repository


def follow(copy, script):
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-ec", script],
        cwd=copy,
        env={**os.environ, "HOME": str(copy.parent), "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def blocks():
    """The document's blocks of code, {language: [text]}."""
    found = {kind: [] for kind in ("bash", "diff", "python")}
    text = (ROOT / "docs/fork.md").read_text()
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.S | re.M):
        found[kind].append(block)
    return found


@pytest.fixture
def run_block(monkeypatch):
    """Runs the block of Python that has a word, with modules {name: attributes} in
    place of those that are not installed here."""

    def run(word, **modules):
        for name, attributes in modules.items():
            module = types.ModuleType(name)
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, name, module)
        [block] = [b for b in blocks()["python"] if word in b]
        made = {}
        exec(block, made)
        return made

    before = dict(gymnasium.registry)
    yield run
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def test_the_wrapper_of_time_limits_leaves_an_end_what_it_is(run_block):
    class Basic(envs.Counter):
        """Reports both at its limit."""

        def step(self, action):
            observation, reward, _, truncated, info = super().step(action)
            return observation, reward, truncated or action == 1, truncated, info

    gymnasium.register("VizdoomBasic-v1", Basic)
    run_block("class Limit", vizdoom={}, **{"vizdoom.gymnasium_wrapper": {}})
    env = Environment(make("Basic-v0", 1))
    env.initial()
    steps = [env.step([x]) for x in (0, 0, 0, 0, 0, 0, 0, 1)]  # One is a reset.
    ends = [(s["terminated"].item(), s["truncated"].item()) for s in steps]
    assert ends == [*4 * [(False, False)], (False, True), *2 * [(False, False)], (1, 0)]


def test_the_edit_of_fork_md_fits_what_it_edits(copy):
    follow(copy, "git apply --check edit.diff")


def test_what_prepare_adds_is_in_the_minibatches_of_ppo(run_block):
    made = run_block("def prepare")
    for args in ([], ["--use_lstm"]):
        agent, batch = test_ppo.collect(*args)
        agent.__class__ = made["Agent"]
        data, _ = agent.prepare(batch)
        expected = batch["reward"][1:].flatten()
        assert torch.equal(data["next_reward"].flatten(), expected)
        assert expected.any()
        agent.learn(batch)


def test_the_edit_of_fork_md_may_be_captured_as_a_graph(gpus, tmp_path, monkeypatch):  # noqa: F811
    (tmp_path / "polybeast.py").write_text((ROOT / "polybeast.py").read_text())
    (tmp_path / "edit.diff").write_text(blocks()["diff"][0])
    subprocess.run(["git", "apply", "edit.diff"], cwd=tmp_path, check=True)
    (tmp_path / "polybeast.py").rename(tmp_path / "my_edit.py")
    monkeypatch.syspath_prepend(tmp_path)
    test_graphs.train("monobeast my_edit CartPole-v1", tmp_path, 2)


@pytest.mark.long
def test_whoever_follows_fork_md_gets_what_it_says(copy):
    found = blocks()
    agent, a2c, env, *_, wrapper, bonus = found["python"]
    setup, edited, own_agent, own_a2c, own_env, wrapped = found["bash"]
    assert "make setup" in setup

    def columns():
        latest = copy.parent / "logs" / "torchbeast" / "latest"
        return read_logs(latest)[0].keys()

    follow(copy, "git apply edit.diff")
    follow(copy, edited)
    assert "logit_loss" in columns()
    follow(copy, "git apply -R edit.diff")

    (copy / "my_agent.py").write_text(agent)
    assert "episodes: mean return" in follow(copy, own_agent)
    assert "prediction_loss" in columns()

    (copy / "my_a2c.py").write_text(a2c)
    follow(copy, own_a2c)
    assert {"pg_loss", "grad_norm"} <= columns()

    (copy / "my_env.py").write_text(env)
    assert follow(copy, own_env).count("return 1, ") == 10  # All of them.

    (copy / "my_env.py").write_text(f"{env}\n\n{wrapper}")
    (copy / "my_agent.py").write_text(f"{agent}\n{bonus}")
    follow(copy, wrapped)
