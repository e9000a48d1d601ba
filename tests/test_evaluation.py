"""Episodes beside training."""

import os
import signal
import time

import pytest
import torch

import monobeast
import polybeast_env
from tests.programs import Program, args, mono_first, read_logs, wait_for_steps
from torchbeast.environment import probe
from torchbeast.evaluation import Evaluator
from torchbeast.messages import log
from torchbeast.policies import make_agent

CATCH = "tests.envs:torchbeast/Catch-v0"


def make(create_env=polybeast_env.create_env, env=CATCH, args=()):
    """(flags, agent, Evaluator)"""
    flags = monobeast.program_parser().parse_args(
        ["--env", env, "--eval_interval_steps", "100", "--num_test_episodes", "3",
         "--seed", "1", "--precision", "float32", *args]
    )  # fmt: skip
    agent = make_agent(flags, probe(polybeast_env.create_env, flags, 1)[0])
    return flags, agent, Evaluator(create_env, flags, step=0)


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def result_of(evaluator):
    results = []

    def arrived():
        results.append(evaluator.take())
        return results[-1] is not None

    wait_for(arrived)
    return results[-1]


def test_the_weights_that_were_offered_play():
    _, agent, evaluator = make(args=["--greedy"])
    try:
        with torch.no_grad():
            for step, action in ((100, 0), (200, 2)):
                agent.net.policy.weight.zero_()
                agent.net.policy.bias.zero_()
                agent.net.policy.bias[action] = 1  # Least of it is chance.
                evaluator.offer(step, agent.net)
                result = result_of(evaluator)
                assert result["eval_return"] in (-1, -1 / 3, 1 / 3, 1)
                assert result["eval_step"] == step
    finally:
        evaluator.close()


def test_each_has_games_of_its_own():
    _, agent, evaluator = make(env="CartPole-v1", args=["--greedy"])
    found = []
    try:
        for step in (100, 200, 300):
            evaluator.offer(step, agent.net)
            found.append(result_of(evaluator)["eval_return"])
        assert len(set(found)) > 1
    finally:
        evaluator.close()


@pytest.mark.parametrize("args", [[], ["--sample_actions"], ["--greedy"]])
def test_a_policy_is_sampled_unless_greedy_actions_are_asked_for(args):
    env = "tests.envs:torchbeast/Memory-v0"
    _, agent, evaluator = make(env=env, args=["--num_test_episodes", "60", *args])
    try:
        with torch.no_grad():
            agent.net.policy.weight.zero_()
            # Action 0 waits for the question, and is right half the time; 1 loses.
            agent.net.policy.bias[:] = torch.tensor([0.01, 0])
        evaluator.offer(100, agent.net)
        mean = result_of(evaluator)["eval_return"]
        assert (mean > -0.6) == (args == ["--greedy"])
    finally:
        evaluator.close()


def test_nothing_is_sent_before_the_interval_or_while_it_plays(monkeypatch):
    _, agent, evaluator = make()
    sent = []
    monkeypatch.setattr(evaluator, "_send", sent.append)
    try:
        for step in (0, 60, 99):
            evaluator.offer(step, agent.net)
        assert not sent
        for step in (101, 201, 301):
            evaluator.offer(step, agent.net)
        wait_for(lambda: len(sent) == 1)
        assert evaluator.take() is None
    finally:
        evaluator.close()


@pytest.fixture
def logged(monkeypatch):
    """Lines that were logged as errors."""
    lines = []
    monkeypatch.setattr(log, "error", lambda text, *args: lines.append(text % args))
    return lines


def raises(flags, num_envs, *args):
    raise RuntimeError("no such display")


@pytest.mark.survives("evaluation-dies")
def test_what_goes_wrong_in_it_is_logged_and_ends_the_evaluation_alone(logged):
    _, agent, evaluator = make(raises)
    wait_for(lambda: evaluator.take() or logged)
    assert "evaluation ends: " in logged[0] and "no such display" in logged[0]
    evaluator.offer(100, agent.net)
    assert evaluator.take() is None and len(logged) == 1
    evaluator.close()


@pytest.mark.survives("evaluation-dies")
def test_a_killed_one_is_noticed(logged):
    _, agent, evaluator = make()
    os.kill(evaluator._process.pid, signal.SIGKILL)
    wait_for(lambda: evaluator.take() or logged)
    assert logged == ["evaluation ends: its process has ended, exit code -9"]
    evaluator.offer(100, agent.net)
    evaluator.close()


def forks(flags, num_envs, *args):
    if os.fork() == 0:
        time.sleep(60)
    os._exit(5)


@pytest.mark.survives("evaluation-dies")
def test_a_dead_one_is_noticed_although_its_environment_forked(logged):
    _, _, evaluator = make(forks)
    wait_for(lambda: evaluator.take() or logged)
    assert logged == ["evaluation ends: its process has ended, exit code 5"]


def test_it_ends_when_the_learner_is_gone():
    _, _, evaluator = make()
    evaluator._connection.close()
    evaluator._process.join(timeout=60)
    assert evaluator._process.exitcode == -signal.SIGKILL


@pytest.mark.slow
@mono_first
def test_runs_log_it_and_leave_no_process(module, tmp_path):
    options = "--eval_interval_steps", 500, "--num_test_episodes", 2
    options += "--log_interval_steps", 500
    with Program(*args(module, tmp_path, *options, env=CATCH), module=module) as run:
        run.wait_for("2 episodes, mean return")
        wait_for_steps(tmp_path, 1000)
        run.stop(signal.SIGTERM)
    rows = [row for row in read_logs(tmp_path / "x") if row["eval_return"]]
    assert rows and all(-1 <= float(row["eval_return"]) <= 1 for row in rows)
    assert all(float(row["eval_step"]) <= float(row["step"]) for row in rows)
