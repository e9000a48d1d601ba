"""r2d2.py, against slow references."""

import copy
import itertools
import os
import signal
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import monobeast
import r2d2
from tests import envs, test_agent
from tests.programs import (
    SMALL,
    Program,
    main,
    poly_first,
    read_logs,
    run,
    wait_for_steps,
)
from tests.test_agent import batches, make_actor
from torchbeast import environment, q_learning
from torchbeast.flags import parse_args
from torchbeast.messages import BadInput, log
from torchbeast.nests import map_structure
from torchbeast.play import Policy
from torchbeast.targets import n_step_returns, quantile_loss, rescale, unscale

T, B, K = 7, 4, 3
CPU = torch.device("cpu")
DQN = ["--no-use_lstm"]


def parse(*args):
    argv = ["--unroll_length", T, "--envs_per_actor", B, "--burn_in", K]
    argv += ["--replay_start", 0, "--replay_size", 1000, "--replay_batch_size", 6]
    argv += ["--reward_clipping", "none"]  # The default environment is Atari's.
    return test_agent.parse(*argv, "--precision", "float32", *args, agent="r2d2")


def make_agent(*args, env=envs.Memory, seed=1):
    """(agent, an iterator of batches [K + T + 1, B, ...] that it has acted)."""
    flags = parse(*args)
    env = environment.Environment([env() for _ in range(B)])
    torch.manual_seed(seed)
    agent = r2d2.Agent(flags, env.observation_space, env.action_space)
    agent.start_learning(CPU)
    for net in (agent.net, agent.target_net):  # Two different ones.
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.1)
    return agent, batches(*make_actor(flags, env, seed=3, agent=agent))


# Targets.


@pytest.mark.parametrize("n", [1, 3, 5, 20])
def test_n_step_targets_are_those_of_a_slow_loop(n):
    torch.manual_seed(n)
    steps, gamma = 30, 0.9
    rewards, values = torch.randn(2, steps + 1, B, dtype=torch.float64)
    rewards = rewards[:-1]
    last = torch.rand(steps, B) < 0.2  # An episode's last step.
    terminated = last & (torch.rand(steps, B) < 0.5)
    done = torch.zeros(steps + 1, B, dtype=torch.bool)
    done[1:][1:] = last[:-1]  # last[t] is about step t + 1.
    real = ~done[1:]
    discounts = gamma * (~terminated).double()
    returns, left, ends = n_step_returns(rewards, discounts, real, n)
    got = returns + left * values.gather(0, ends)
    for b in range(B):
        for t in range(steps):
            if done[t + 1, b]:
                continue  # No action led there: there is no target.
            target, weight, i = 0.0, 1.0, t
            while i < min(t + n, steps):
                target += weight * rewards[i, b]
                weight *= gamma * (not terminated[i, b])
                i += 1
                if last[i - 1, b]:
                    break
            target += weight * values[i, b]
            torch.testing.assert_close(got[t, b], target)


def test_rescaling_is_undone_by_its_inverse():
    x = torch.tensor([-1e4, -20, -0.5, 0, 1e-3, 3, 400, 1e6], dtype=torch.float64)
    torch.testing.assert_close(unscale(rescale(x)), x)
    torch.testing.assert_close(rescale(torch.tensor([3.0])), torch.tensor([1.003]))
    x = torch.tensor([-1e-3, 1e-6, 1e-4, 0.1, 3, 1e4])  # float32 keeps its digits.
    torch.testing.assert_close(unscale(rescale(x)), x, rtol=1e-5, atol=0)


def slow_errors(agent, batch):
    """[T, B, N, N] by the definition: the target network's quantiles of the action
    whose mean the network prefers, less the network's own."""
    flags, K, N = agent.flags, agent.burn_in, agent.flags.quantiles
    with torch.no_grad():
        q, target_q = (
            net(batch, batch["core_state"][0])[0]["quantiles"]
            for net in (agent.net, agent.target_net)
        )
    returns = unscale(q) if flags.value_rescaling else q
    result = torch.zeros(T, B, N, N)
    for b in range(B):
        for t in range(K, K + T):
            if batch["done"][t + 1, b]:
                continue
            reward, weight, i = 0.0, 1.0, t
            while i < min(t + flags.n_step, K + T) and (
                i == t or not batch["done"][i + 1, b]
            ):
                i += 1
                reward += weight * batch["reward"][i, b]
                weight *= flags.discounting * (not batch["terminated"][i, b])
            best = max(range(q.shape[2]), key=lambda a: returns[i, b, a].sum())
            for j in range(N):
                value = target_q[i, b, best, j]
                if flags.value_rescaling:
                    target = rescale(reward + weight * unscale(value))
                else:
                    target = reward + weight * value
                for k in range(N):
                    own = q[t, b, batch["action"][t, b], k]
                    result[t - K, b, j, k] = target - own
    return result


@pytest.mark.parametrize("rescaling", [["--no-value_rescaling"], ["--value_rescaling"]])
@pytest.mark.parametrize("quantiles", [1, 3])
@pytest.mark.parametrize("args", [[], DQN])
@pytest.mark.parametrize("env", [envs.Memory, envs.Counter])
def test_errors_are_those_of_a_slow_loop(env, args, quantiles, rescaling):
    args = [*args, *rescaling, "--n_step", 3, "--quantiles", quantiles]
    agent, acted = make_agent(*args, env=env)
    next(acted)
    batch = next(acted)
    errors, real, _ = agent.td_errors(batch)
    torch.testing.assert_close(errors, slow_errors(agent, batch))
    assert torch.equal(real, ~batch["done"][agent.burn_in + 1 :])
    assert not real.all() and (errors[real] != 0).all()


@pytest.mark.parametrize("N", [2, 5])
def test_the_loss_of_quantiles_is_that_of_a_slow_loop(N):
    torch.manual_seed(N)
    errors = 2 * torch.randn(T, B, N, N)
    got = quantile_loss(errors)
    for t, b in np.ndindex(T, B):
        expected = 0.0
        for i in range(N):
            for j in range(N):
                u = errors[t, b, j, i].item()
                huber = u**2 / 2 if abs(u) < 1 else abs(u) - 0.5
                level = (i + 0.5) / N
                expected += (1 - level if u < 0 else level) * 2 * huber / N
        assert got[t, b].item() == pytest.approx(expected, rel=1e-4)


def test_the_quantiles_of_a_return_are_learned():
    """-10 comes three times as often as 10. One quantile is the mean."""
    returns = torch.tensor([-10.0, -10.0, -10.0, 10.0]).repeat(16)[:, None]
    for N, expected in ((4, [-10, -10, -10, 10]), (1, [-5])):
        quantiles = torch.zeros(N, requires_grad=True)
        optimizer = torch.optim.Adam([quantiles], 0.1)
        for _ in range(400):
            errors = (returns - quantiles).view(64, 1, 1, N).expand(-1, -1, N, -1)
            optimizer.zero_grad()
            quantile_loss(errors).mean().backward()
            optimizer.step()
        expected = torch.tensor(expected).float()
        torch.testing.assert_close(quantiles.detach(), expected, atol=1, rtol=0)


@pytest.mark.parametrize("quantiles", [1, 2])
def test_the_best_action_has_the_largest_mean_of_returns_that_are_not_rescaled(
    quantiles,
):
    agent, _ = make_agent("--value_rescaling", "--quantiles", quantiles)
    returns = torch.tensor([[9.0, 9.0], [22.0, 0.0]])  # Rescaled, the first is larger.
    assert rescale(returns).mean(-1).argmax() == 0
    assert agent.net.mean(rescale(returns)[:, :quantiles]).argmax() == 1


@pytest.mark.parametrize("args", [[], DQN, [*DQN, "--quantiles", 3]])
def test_samples_have_the_errors_they_had_as_new_rollouts(args):
    agent, acted = make_agent(*args, "--n_step", 3)
    expected = {}
    for _ in range(3):
        batch = next(acted)
        items = agent.replay.add(batch)
        with torch.no_grad():
            errors, real, _ = agent.td_errors(batch)
        errors = errors.mean((2, 3))
        agent.replay.set_priorities(items, agent.priorities(errors, real))
        by_item = errors.reshape(items.shape[0], -1, B)  # DQN's items are steps.
        for i, b in np.ndindex(items.shape):
            expected[items[i, b]] = by_item[i, :, b]
    batch, items = agent.replay.sample(16)
    errors = agent.td_errors(batch, sampled=True)[0].mean((2, 3))
    for b, item in enumerate(items):
        torch.testing.assert_close(errors[:, b], expected[item], atol=1e-5, rtol=1e-4)


def test_a_rollouts_priority_is_of_its_largest_and_its_mean_error():
    agent, _ = make_agent("--priority_exponent", 2)
    errors = torch.tensor([[1.0, 0, 0], [-3, 2, 0]])
    real = torch.tensor([[True, False, False], [True, True, False]])
    expected = [(0.9 * 3 + 0.1 * 2) ** 2, 2**2, 0]
    np.testing.assert_allclose(agent.priorities(errors, real), expected, rtol=1e-5)


# Burn-in.


def test_the_state_after_the_burn_in_is_that_of_a_full_unroll():
    agent, acted = make_agent()
    before = after = next(acted)
    for _ in range(3):
        before, after = after, next(acted)
        whole = map_structure(
            lambda x, y: torch.cat([x, y[K + 1 :]]),
            {k: before[k] for k in ("observation", "reward", "done", "last_action")},
            after,
        )
        with torch.no_grad():
            expected, _ = agent.net(whole, before["core_state"][0])
            steps = {k: after[k] for k in whole}
            got = agent.values(agent.net, steps, after["core_state"][0])
        torch.testing.assert_close(got, expected["quantiles"][K + T :])


def test_no_gradient_comes_from_the_burn_in():
    agent, acted = make_agent()
    next(acted)
    batch = next(acted)
    batch["observation"].requires_grad_()
    errors, _, _ = agent.td_errors(batch)
    errors.square().sum().backward()
    gradient = batch["observation"].grad.abs().flatten(2).sum(2)  # [K + T + 1, B]
    assert (gradient[:K] == 0).all()
    assert (gradient[K : K + T].sum(1) > 0).all()
    assert (gradient[-1] == 0).all()  # Nor from targets.


def test_observations_of_the_burn_in_are_counted_in_the_rollout_before_alone():
    agent, acted = make_agent("--normalize_observations")
    for batch in itertools.islice(acted, 3):
        agent.update_statistics(batch)
    (statistics,) = agent.net.encoder.statistics
    assert statistics.count == 3 * T * B


# Learning.


@pytest.mark.parametrize("args", [[], DQN])
def test_values_are_near_0_at_first(args):
    space = spaces.Box(-1, 1, (200,), np.float32)
    agent = r2d2.Agent(parse(*args), space, spaces.Discrete(3))
    step, state = shares_of(agent, envs=64)
    outputs, _ = agent.net({**step, "observation": torch.rand(1, 64, 200)}, state[0])
    assert 0 < outputs["q"].abs().max() < 0.5


def test_a_learner_learns_as_often_as_the_ratio_says_and_copies_its_target():
    # Rollouts of 7 steps, 6 in a gradient step: one for each 21 steps, a copy for 63.
    agent, acted = make_agent("--replay_ratio", 2, "--target_interval", 63)
    steps = 0
    for i in range(1, 9):
        before = [x.clone() for x in agent.target_net.parameters()]
        statistics = agent.learn(next(acted))
        assert agent.gradient_steps == i * B * 2 // 6  # Rollouts new and learned from.
        copied = agent.gradient_steps // 3 > steps // 3
        steps = agent.gradient_steps
        same = all(map(torch.equal, agent.target_net.parameters(), before))
        assert same != copied
    assert statistics["replay_ratio"] == pytest.approx(2, rel=0.1)
    assert statistics["replay_size"] == 8 * B * T
    assert {"total_loss", "td_error", "q", "grad_norm", "replay_age"} < set(statistics)


@pytest.mark.parametrize("args", [[], DQN])
def test_a_gradient_step_is_that_of_the_weighted_mean_of_squared_errors(args):
    agent, acted = make_agent(*args)
    for parameter in (*agent.net.parameters(), *agent.target_net.parameters()):
        parameter.data *= 0.5
    for _ in range(3):
        agent.replay.set_priorities(items := agent.replay.add(next(acted)), 1 + items)
    batch, items = agent.replay.sample(6, 0.7)
    batch["reward"] *= torch.tensor([0, 9, 0, 9, 0, 9])
    assert batch["importance"].min() < 0.95
    agent.replay.sample = lambda num, beta: (batch, items)
    errors, real, q = agent.td_errors(batch, sampled=True)
    errors = errors.mean((2, 3))
    losses = errors.square() / 2 * batch["importance"]
    parameters = list(agent.net.parameters())
    expected = torch.autograd.grad(losses.mean(), parameters)
    norm = torch.cat([g.flatten() for g in expected]).norm()
    agent.flags.grad_norm_clipping = float(norm) / 2
    statistics = agent.gradient_step()
    assert statistics["total_loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    for name, x in ("td_error", errors.abs()), ("q", q):
        assert statistics[name] == pytest.approx(x[real].mean().item(), rel=1e-4)
    assert statistics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for parameter, gradient in zip(parameters, expected):
        torch.testing.assert_close(parameter.grad, gradient / 2, rtol=1e-3, atol=1e-6)
    got = agent.replay.arrays()["priorities"][items]
    expected = agent.priorities(errors.detach(), real).reshape(-1)
    last = dict(zip(items, expected))  # An item may be there twice.
    np.testing.assert_allclose(got, [last[item] for item in items], rtol=1e-4)


def test_the_optimizer_has_the_flags_constants_and_the_rate_falls_linearly():
    args = "--learning_rate", 0.02, "--epsilon", 0.3, "--total_steps", 4 * B * T
    agent, acted = make_agent(*args)
    (group,) = agent.optimizer.param_groups
    for share in (1, 0.75, 0.5, 0.25, 0):
        statistics = agent.learn(next(acted))
        assert group["lr"] == statistics["learning_rate"] == pytest.approx(0.02 * share)
    assert group["eps"] == 0.3


@pytest.mark.slow
def test_padding_of_rollouts_of_one_episode_counts_for_neither_side_of_the_ratio():
    flags = parse("--one_episode_rollouts", "--burn_in", 0, "--unroll_length", 40,
                  "--replay_ratio", 1, "--replay_size", 100_000)  # fmt: skip
    env = environment.Environment([envs.Counter() for _ in range(B)])  # 5 steps each.
    agent = r2d2.Agent(flags, env.observation_space, env.action_space)
    agent.start_learning(CPU)
    new = learned = 0
    sample = agent.replay.sample

    def counted(*args):
        nonlocal learned
        batch, items = sample(*args)
        learned += int(batch["mask"][1:].sum())
        return batch, items

    agent.replay.sample = counted
    for batch in itertools.islice(batches(*make_actor(flags, env, agent=agent)), 60):
        new += int(batch["mask"][1:].sum())
        statistics = agent.learn(batch)
    assert learned / new == pytest.approx(statistics["replay_ratio"])
    assert 1 - 6 * 40 / new < learned / new <= 1


def test_errors_without_end_give_priorities_that_can_be_added_up():
    agent, _ = make_agent(*DQN, "--priority_exponent", 10)
    errors = torch.tensor([[1e38, float("inf"), float("nan"), 1.0]])
    priorities = agent.priorities(errors, torch.ones(1, 4, dtype=torch.bool))
    assert np.isfinite(priorities.sum() * 1e6)


def test_nothing_is_learned_before_there_is_enough():
    agent, acted = make_agent("--replay_start", 3 * B * T)
    for _ in range(2):
        statistics = agent.learn(next(acted))
        assert agent.gradient_steps == 0 and "total_loss" not in statistics
    agent.learn(next(acted))
    assert agent.gradient_steps > 0


def test_a_checkpoint_has_the_target_network_too():
    agent, acted = make_agent()
    agent.learn(next(acted))
    saved = copy.deepcopy(agent.state_dict())
    other, _ = make_agent(seed=2)
    other.load_state_dict(saved)
    for ours, theirs in ((agent.net, other.net), (agent.target_net, other.target_net)):
        for x, y in zip(ours.state_dict().values(), theirs.state_dict().values()):
            assert torch.equal(x, y)
    assert other.gradient_steps == agent.gradient_steps > 0
    assert other.replay.size == 0
    del saved["target"]
    with pytest.raises(KeyError, match="target"):
        other.load_state_dict(saved)


def test_the_correction_for_priorities_rises_to_its_last_value_over_the_run():
    agent, _ = make_agent("--importance_exponent", 0.4, 1, "--total_steps", 100)
    agent.replay.sample = mock.Mock(side_effect=InterruptedError)
    for agent.step, expected in ((0, 0.4), (50, 0.7), (100, 1), (500, 1)):
        with pytest.raises(InterruptedError):
            agent.gradient_step()
        assert agent.replay.sample.call_args.args[1] == pytest.approx(expected)


# Exploration.


def shares_of(agent, num_steps=1, envs=4000, done=True):
    step = {
        "observation": torch.zeros(1, envs, 3),
        "reward": torch.zeros(1, envs),
        "done": torch.full((1, envs), done),
        "last_action": torch.zeros(1, envs, dtype=torch.int64),
    }
    return step, agent.initial_state(envs)


def test_each_episode_has_its_own_share_of_random_actions():
    agent, _ = make_agent("--exploration", 0.01, 0.1)
    agent.net.exploration.zero_()
    step, state = shares_of(agent)
    _, (_, share) = agent.act(step, state)
    logs = share.log10()
    assert -2 <= logs.min() < -1.99 and -1.01 < logs.max() <= -0.999
    assert logs.mean() == pytest.approx(-1.5, abs=0.05)  # Log-uniform.
    _, (_, again) = agent.act({**step, "done": ~step["done"]}, (state[0], share))
    assert torch.equal(again, share)  # For the whole episode.


@pytest.mark.parametrize("left", [1.0, 0.5, 0.0])
def test_random_actions_are_as_many_as_the_schedule_says(left):
    agent, _ = make_agent("--exploration", 0.2, 0.2)
    agent.net.exploration.fill_(left)
    step, state = shares_of(agent)
    best = agent.act(step, state, greedy=True)[0]["action"]
    assert (best == best[0, 0]).all()
    action = agent.act(step, state)[0]["action"]
    others = (action != best).float().mean()
    # Half of the random actions, of two, are the best one.
    assert others == pytest.approx((0.2 + 0.8 * left) / 2, abs=0.03)


def test_tests_have_a_few_random_actions_however_many_training_has(monkeypatch):
    agent, _ = make_agent()
    step, state = shares_of(agent, envs=20_000)
    best = agent.act(step, state, greedy=True)[0]["action"]
    assert q_learning.TEST_EPSILON == 0.001
    for epsilon in (q_learning.TEST_EPSILON, 0.5):
        monkeypatch.setattr(q_learning, "TEST_EPSILON", epsilon)
        others = (agent.act_in_test(step, state)[0]["action"] != best).float().mean()
        assert others == pytest.approx(epsilon / 2, abs=0.02) and others > 0


def test_sampled_actions_are_those_of_training():
    agent, _ = make_agent("--exploration", 0.5, 0.5, "--exploration_steps", 0)
    step, state = shares_of(agent, envs=2000)
    best = agent.act(step, state, greedy=True)[0]["action"][0]
    step = map_structure(lambda x: x[0], step)
    shares = {}
    for actions in (None, "sampled", "greedy"):
        policy = Policy(agent, None, actions, num_rows=2000)
        shares[actions] = (torch.from_numpy(policy(step)) != best).float().mean()
    assert shares["greedy"] == 0 and shares[None] < 0.01
    assert shares["sampled"] == pytest.approx(0.25, abs=0.05)


def test_exploration_falls_with_the_steps():
    agent, acted = make_agent("--exploration_steps", 4 * B * T)
    for i in range(1, 6):
        agent.learn(next(acted))
        assert agent.net.exploration == pytest.approx(max(0, 1 - i / 4))


def test_steps_without_learning_do_not_end_exploration():
    agent, acted = make_agent("--exploration_steps", 4 * B * T)
    agent.step += 10 * B * T  # As those of a frozen policy are counted.
    agent.learn(next(acted))
    assert agent.net.exploration == 0.75


def test_a_run_that_goes_on_for_longer_does_not_explore_anew():
    agent, acted = make_agent("--exploration_steps", 4 * B * T)
    for _ in range(3):
        agent.learn(next(acted))
    longer, _ = make_agent("--exploration_steps", 400 * B * T)
    longer.load_state_dict(agent.state_dict())
    assert longer.explore_less() == pytest.approx(0.25 - 1 / 400)


def test_a_run_that_goes_on_with_larger_batches_goes_on_exploring():
    agent, acted = make_agent("--exploration_steps", 100 * B * T)
    agent.learn(next(acted))
    other, _ = make_agent("--exploration_steps", 100 * B * T)
    other.flags.batch_size *= 10
    other.load_state_dict(agent.state_dict())
    assert other.explore_less() == pytest.approx(0.99 - 0.1)


# Bad input, presets, programs.


@pytest.mark.parametrize(
    "space", [spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3])], ids=str
)
def test_actions_that_are_not_discrete_are_refused_by_name(space):
    match = "needs a Discrete action space, .*: use --agent polybeast or ppo$"
    with pytest.raises(BadInput, match=match):
        r2d2.Agent(parse(), spaces.Box(-1, 1, (3,)), space)


def test_a_replay_smaller_than_its_start_is_one_line(tmp_path):
    result = main("--agent", "r2d2", "--env", "CartPole-v1", "--num_actors", 0,
                  "--replay_size", 500, "--savedir", tmp_path)  # fmt: skip
    assert result.returncode == 2
    assert "--replay_size 500 is too small: expected 1000 or more" in result.stderr


@pytest.mark.parametrize(
    "args",
    [[], DQN, *(["--preset", name] for name in r2d2.PRESETS)],
    ids=["r2d2", "dqn", *(f"preset {name}" for name in r2d2.PRESETS)],
)
def test_a_run_of_the_default_length_makes_many_gradient_steps_and_copies(args):
    """By the real flags and the real Credit, without the gradient steps."""
    flags = parse_args(monobeast.program_parser("r2d2"), args)
    monobeast.set_defaults(flags)
    env = environment.Environment([envs.Memory()])
    agent = r2d2.Agent(flags, env.observation_space, env.action_space)
    agent.start_learning(CPU)
    T, B = flags.unroll_length, 1000  # Fewer and larger batches, to be quick.
    num_starts = agent.replay.num_starts
    agent.credit.ring = SimpleNamespace(
        drawable=True, num_starts=num_starts, num_new=num_starts * B
    )
    batch = {"done": torch.zeros(T + 1, B, dtype=torch.bool)}
    num = sum(
        len(list(agent.credit.updates(batch, T, agent.num_learned)))
        for _ in range(flags.total_steps // (T * B))
    )
    assert num > 50_000 and num // agent.copy_interval > 1000


@pytest.mark.parametrize(("steps", "says"), [(170_000, False), (150_000, True)])
def test_a_run_with_few_copies_says_so_in_a_line(steps, says, monkeypatch):
    lines = []
    monkeypatch.setattr(log, "warning", lines.append)
    args = ["--total_steps", steps, "--replay_start", 1000, "--target_interval", 1600]
    make_agent(*DQN, *args)
    what = "copies of the target network in 150,000 steps: 93, expected 100 or more"
    expected = [line for line in lines if line.startswith(what)]
    assert len(lines) == len(expected) == says


@pytest.mark.parametrize(
    "few, remedies",
    [
        (["--target_interval", 1600], ["--target_interval"]),
        (["--replay_ratio", 0.001], ["--replay_batch_size", "--replay_ratio"]),
    ],
)
def test_what_is_said_of_few_copies_makes_more_of_them(few, remedies, monkeypatch):
    """A copy needs a gradient step, and --target_interval agent steps."""
    lines = []
    monkeypatch.setattr(log, "warning", lines.append)
    args = [*DQN, "--total_steps", 150_000, "--replay_start", 1000, *few]

    def num(*more):
        make_agent(*args, *more)
        return int(lines[-1].partition("steps: ")[2].partition(",")[0])

    tried = {"--target_interval": 1550, "--replay_batch_size": 5, "--replay_ratio": 9}
    if few[0] == "--replay_ratio":
        tried["--replay_ratio"] = 0.002
    before = num()
    line = lines[-1]
    for name, value in tried.items():
        assert (name in line) == (name in remedies) == (num(name, value) > before)


@pytest.mark.parametrize(
    "steps, exploring", [(1000, 500), (300_000, 10_000), (3e6, 1e5)]
)
def test_exploration_takes_a_thirtieth_of_a_run_or_10000_steps(steps, exploring):
    flags = parse("--total_steps", round(steps))
    r2d2.Agent(flags, spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
    assert flags.exploration_steps == exploring


@pytest.mark.parametrize(
    "args, says",
    [
        (["--exploration_steps", 9000], "--exploration_steps 9,000: the run, of 8,000"),
        (
            ["--replay_start", 8000],
            "--replay_start 8,000: the run, of 8,000 steps, ends",
        ),
    ],
)
def test_a_run_that_ends_before_something_is_over_says_so(args, says, monkeypatch):
    lines = []
    monkeypatch.setattr(log, "warning", lines.append)
    make_agent("--total_steps", 8000, "--replay_size", 9000, *args)
    assert len([line for line in lines if line.startswith(says)]) == 1


@pytest.mark.parametrize(
    "args",
    [
        pytest.param([], marks=pytest.mark.long),
        pytest.param(DQN, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_resumed_with_an_empty_replay_and_says_so(tmp_path, args):
    def train(steps):
        return main("--agent", "r2d2", "--env", "CartPole-v1", "--num_actors", 0,
                    "--replay_start", 200, "--total_steps", steps, "--xpid", "x",
                    "--savedir", tmp_path, *args)  # fmt: skip

    assert train(2000).returncode == 0
    result = train(4000)
    assert result.returncode == 0, result.stderr
    assert "replay is empty: learning goes on after 200 new steps" in result.stderr
    rows = read_logs(tmp_path / "x")
    assert max(float(row["replay_size"]) for row in rows) < 2500
    assert float(rows[-1]["total_loss"]) > 0


def ratio_of(savedir):
    rows = [row for row in read_logs(savedir / "x") if row["total_loss"]]
    return float(rows[-1]["replay_ratio"]), rows


@pytest.mark.long
@pytest.mark.parametrize(
    ("env", "ratio"),
    [
        pytest.param("CartPole-v1", 16, id="slow learner"),
        pytest.param("tests.faulty_envs:Quick-v0", 1, id="slow actors"),
    ],
)
def test_a_program_keeps_the_ratio_and_survives_a_killed_actor(tmp_path, env, ratio):
    args = ["--agent", "r2d2", *DQN, "--env", env, "--num_actors", 2, "--xpid", "x"]
    args += ["--envs_per_actor", 4, "--replay_ratio", ratio, "--replay_start", 500]
    args += ["--total_steps", 4000, "--batch_size", 2, "--savedir", tmp_path]
    with Program(*args) as program:
        wait_for_steps(tmp_path, 1000)
        os.kill(program.workers()[0], signal.SIGKILL)
        program.wait_for("is restarted")
        assert program.end() == 0
    measured, rows = ratio_of(tmp_path)
    assert measured == pytest.approx(ratio, rel=0.01)
    assert all(float(row["replay_age"]) > 0 for row in rows)


@pytest.mark.slow
@poly_first
def test_a_signal_does_not_wait_for_all_gradient_steps_that_are_due(tmp_path, module):
    args = ["--agent", "r2d2", *DQN, "--env", "CartPole-v1", "--xpid", "x", "--savedir"]
    args += [tmp_path, "--replay_ratio", 10**6, "--log_interval_steps", 40]
    with Program(*args, *SMALL[module], module=module) as program:
        wait_for_steps(tmp_path, 480)  # The batch after 1,000 steps does not end.
        time.sleep(2)
        program.stop()
    assert "stopped by SIGINT" in program.output
    assert (tmp_path / "x" / "model.tar").exists()


@pytest.mark.long
@pytest.mark.parametrize("agent", [["r2d2"], ["sac"]])
def test_several_learners_learn_the_same_from_replays_of_their_own(tmp_path, agent):
    env = "Pendulum-v1" if agent == ["sac"] else "CartPole-v1"
    args = ["--agent", *agent, "--env", env, "--num_actors", 0, "--xpid", "x"]
    args += ["--replay_ratio", 4, "--replay_start", 500, "--replay_batch_size", 32]
    args += ["--total_steps", 4000, "--savedir", tmp_path, "--batch_size", 2]
    result = run(*args, "--envs_per_actor", 2, ranks=2)
    assert result.returncode == 0, result.stderr
    rows = [row for row in read_logs(tmp_path / "x") if row["replay_age"]]
    assert float(rows[-1]["replay_ratio"]) == pytest.approx(4, rel=0.05)
    assert "2 learners on 1 hosts: each has 1 of 2 rollouts" in result.stderr


@pytest.mark.long
def test_memory_longer_than_the_burn_in_needs_the_stored_state(tmp_path):
    """A cue before the burn-in is known from the recurrent state alone."""
    (tmp_path / "forgets.py").write_text("""
import r2d2
from r2d2 import parser
from torchbeast.nests import map_structure

class Agent(r2d2.Agent):
    def td_errors(self, batch, sampled=False):
        state = map_structure(lambda x: 0 * x, batch["core_state"])
        return super().td_errors({**batch, "core_state": state}, sampled)
""")
    args = ["--env", "tests.envs:torchbeast/Memory-v0", "--num_actors", 0]
    args += ["--seed", 1, "--total_steps", 40_000, "--savedir", tmp_path]
    args += ["--unroll_length", 1, "--burn_in", 1, "--replay_batch_size", 256]
    args += ["--batch_size", 32, "--replay_ratio", 4]
    best = {}
    for agent in ("r2d2", "forgets"):
        result = run(
            "--agent", agent, *args, "--xpid", agent,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        rows = [row for row in read_logs(tmp_path / agent) if row["episode_return"]]
        best[agent] = np.mean([float(row["episode_return"]) for row in rows[-10:]])
    assert best["r2d2"] > 0.6 > 0.3 > best["forgets"], best
