"""Other people's environments, in both programs: each trains, or ends with one line and
the right exit code; and no process is left."""

import argparse
import functools
import os
import re
import time

import numpy as np
import pytest
import torch

from tests import hostile_envs
from tests.faulty_envs import Base
from tests.programs import ROOT, args, cmdline, main, marked, run
from torchbeast import calls
from torchbeast.environment import Environment
from torchbeast.remote import servers

PROGRAMS = {
    "monobeast": ("--max_actor_restarts", 3),
    "polybeast": (),
}
# What they do to a process, and exceptions, is not for that of the tests.
ALONE = {"ChangesDirectory", "ConfiguresLogging", "ExitsInConstructor", "RaisesInReset"}
ALONE |= {"LeavesAThread", "LeavesATimer", "SetsDefaults"}
ALONE |= {"ClosesFiles", "ClosesStreams"}
# CI tests one in four environments in each program, make test-long the rest.
CASES = [
    pytest.param(
        env,
        module,
        marks=pytest.mark.slow if (i + j) % 4 == 2 else pytest.mark.long,
        id=f"{env.__name__}-{module}",
    )
    for i, env in enumerate(hostile_envs.ENVIRONMENTS)
    for j, module in enumerate(PROGRAMS)
]


@pytest.mark.survives(
    "environment-always-fails",
    "environment-exits",
    "environment-starts-processes",
    "environment-changes-process",
    "environment-raises-in-close",
)
@pytest.mark.parametrize(("env", "module"), CASES)
def test_it_trains_or_is_one_line_and_nothing_is_left(
    env, module, tmp_path, monkeypatch
):
    monkeypatch.setenv("MARK", str(tmp_path))
    monkeypatch.setattr(servers, "MAX_FAILURES", 2)  # Waits 3 s, not 31.
    env_id = f"tests.hostile_envs:{env.__name__}-v0"
    start = main
    savedir = tmp_path / "logs"
    if env.__name__ in ALONE:
        python_path = {**os.environ, "PYTHONPATH": str(ROOT)}
        start = functools.partial(run, cwd=tmp_path, env=python_path)
        savedir = "logs"  # Where it was started, whatever the environment does.
    flags = args(module, savedir, *PROGRAMS[module], env=env_id, steps=800)
    result = start(*flags, module=module)
    deadline = time.monotonic() + 20  # The killed take their time on a busy machine.
    while (left := marked(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, [cmdline(pid) for pid in left]
    if env.__doc__ is None:
        assert result.returncode == 0, result.stderr
        last = result.stderr.splitlines()[-2:]  # Behind it, what was left behind.
        assert any("test it: python -m" in line for line in last)
        assert (tmp_path / "logs" / "x" / "model.tar").exists()
        return
    assert result.returncode in (1, 2), result.stderr
    assert re.search(env.__doc__, result.stderr), result.stderr
    if result.returncode == 2:  # Gymnasium may warn of the same before.
        assert "Traceback" not in result.stderr
        assert len(re.findall(env.__doc__, result.stderr)) == 1 or re.search(
            env.__doc__, result.stderr.splitlines()[-1]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["SetsDefaults", "ClosesFiles", "ClosesStreams", "RestartsAChild"]
)
def test_it_trains_in_the_learners_own_thread(name, tmp_path):
    env = f"tests.hostile_envs:{name}-v0"
    flags = args("monobeast", "logs", "--num_actors", 0, env=env, steps=800)
    result = run(*flags, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    log = (tmp_path / "logs" / "x" / "out.log").read_text().splitlines()
    assert sum("test it: python -m" in line for line in log) == 1
    if name != "ClosesStreams":
        assert "test it: python -m" in result.stderr
    assert "Traceback" not in result.stderr


class Seeds(Base):
    """Sets torch's seed, and notes random numbers of its own."""

    drawn = []

    def __init__(self, seed=None):
        self.seed = seed

    def reset(self, *, seed=None, options=None):
        if self.seed is not None:
            torch.manual_seed(self.seed)
        self.drawn.append(float(torch.rand(())))
        return super().reset(seed=seed)


@pytest.mark.parametrize("seed", [None, 0])
def test_its_seeds_are_not_the_agents(seed, monkeypatch):
    monkeypatch.setattr(Seeds, "drawn", [])
    torch.manual_seed(7)
    expected = torch.rand(5)

    def create_env(*args):
        if seed is not None:
            torch.manual_seed(seed)
        return Environment([Seeds(seed), Seeds(seed)])

    monkeypatch.setattr(calls, "_random", None)
    torch.manual_seed(7)
    env = calls.create(create_env, argparse.Namespace(env="Seeds"), 2)
    env.initial(1)
    for _ in range(11):  # A whole episode, and the first step of the next.
        env.step(np.zeros(2, np.int64))
    agents = torch.rand(5)
    assert torch.equal(agents, expected) and not {*agents.tolist()} & {*Seeds.drawn}
    assert len(Seeds.drawn) == 4 and len(set(Seeds.drawn)) == (1 if seed == 0 else 4)


def test_contexts_of_its_random_numbers_may_be_in_each_other():
    before = torch.get_rng_state()
    with calls.random_of_environments():
        with calls.random_of_environments():
            torch.manual_seed(0)
            drawn = torch.rand(())
        assert torch.rand(()) != drawn
    assert torch.equal(torch.get_rng_state(), before)
