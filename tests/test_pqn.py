"""pqn.py, against slow references. What it shares with r2d2.py is tested there."""

import types

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import monobeast
import pqn
from tests import envs, test_agent
from tests.programs import read_logs, refusal, succeeds
from tests.test_agent import batches, make_actor
from torchbeast import encoders, environment, minibatches, ranks
from torchbeast.flags import parse_args
from torchbeast.messages import BadInput

T, B = 7, 4
CPU = torch.device("cpu")
ATARI, OTHER = "PongNoFrameskip-v4", "CartPole-v1"
IMAGE = spaces.Box(0, 255, (84, 84, 4), np.uint8)
SMALL_IMAGE = spaces.Dict({"board": spaces.Box(0, 1, (10, 10, 4), bool)})
NUMBERS = spaces.Box(-1, 1, (3,), np.float32)
GRID = spaces.MultiBinary((7, 7, 20))


def parse(*args):
    argv = ["--unroll_length", T, "--envs_per_actor", B, "--num_minibatches", 2]
    return test_agent.parse(*argv, "--precision", "float32", *args, agent="pqn")


def collect(*args, env=envs.Memory):
    """(agent, the second batch [T + 1, B, ...] that it has acted)."""
    flags = parse(*args)
    env = environment.Environment([env() for _ in range(B)])
    torch.manual_seed(1)
    agent = pqn.Agent(flags, env.observation_space, env.action_space)
    for parameter in agent.net.parameters():  # Blanks have values, too.
        nn.init.normal_(parameter, std=0.3)
    acted = batches(*make_actor(flags, env, seed=3, agent=agent))
    agent.start_learning(CPU)
    next(acted)
    return agent, next(acted)


@pytest.mark.parametrize("lstm", [(), ("--use_lstm",)])
def test_rewards_are_divided_by_the_deviation_of_returns(lstm):
    """A value moves by about as much in each gradient step, whatever their size."""
    args = "--normalize_rewards", *lstm
    agent, batch = collect(*args, env=lambda: envs.Counter(limit=50))
    _, returned = batch["core_state"][0]
    assert returned.any()  # The returns that were under way.
    agent.learn(batch)
    returns = agent.normalized_rewards.returns(batch, returned)[1:]
    expected = batch["reward"][1:] / returns.std(correction=0)
    torch.testing.assert_close(agent.rewards(batch), expected.float())


def test_rewards_of_returns_below_one_stay_as_they_are():
    """Made larger, CatchPixels' took 44,000 steps for 33,000 (docs/notebook.md)."""
    agent, batch = collect("--normalize_rewards")
    agent.learn(batch)
    assert 0 < agent.normalized_rewards.statistics.variance < 1
    assert torch.equal(agent.rewards(batch), batch["reward"][1:])


def test_ataris_rewards_are_clipped_and_no_others():
    for env, args, clipped, normalized in (
        (ATARI, [], True, False),
        (OTHER, [], False, True),
        (OTHER, ["--reward_clipping", "abs_one"], True, False),
        (ATARI, ["--normalize_rewards"], False, True),
    ):
        flags = parse("--env", env, *args)
        pqn.Agent(flags, IMAGE, spaces.Discrete(2))
        assert (flags.reward_clipping == "abs_one") == clipped
        assert flags.normalize_rewards == normalized


# Targets.


def slow_targets(rewards, terminated, done, q, gamma, lambda_):
    """Q(lambda) by its definition, as a mixture of n-step returns."""
    num, rows = rewards.shape
    result = torch.zeros(num, rows, dtype=q.dtype)
    for b in range(rows):
        for t in range(num):
            if done[t + 1, b]:
                continue  # No action led there: there is no target.
            target, reward, weight, left, i = 0.0, 0.0, 1.0, 1.0, t
            while True:
                reward += left * rewards[i, b]
                left *= gamma * (not terminated[i + 1, b])
                i += 1
                n_step = reward + left * q[i, b].max()
                if i == num or done[i + 1, b]:  # The last n-step return has the rest.
                    target += weight * n_step
                    break
                target += weight * (1 - lambda_) * n_step
                weight *= lambda_
            result[t, b] = target
    return result


@pytest.mark.parametrize("lambda_", [0, 0.65, 1])
def test_targets_are_those_of_a_slow_loop(lambda_):
    torch.manual_seed(1)
    steps, gamma = 30, 0.9
    rewards = torch.randn(steps, B, dtype=torch.float64)
    q = torch.randn(steps + 1, B, 3, dtype=torch.float64)
    last = torch.rand(steps + 1, B) < 0.2  # An episode's last step.
    terminated = last & (torch.rand(steps + 1, B) < 0.5)
    done = torch.cat([torch.zeros(1, B, dtype=torch.bool), last[:-1]])
    assert (last & ~terminated)[1:-1].any() and terminated[1:-1].any()
    real, discounts = ~done[1:], gamma * (~terminated[1:]).double()
    got = pqn.lambda_targets(rewards, discounts, real, q, lambda_)
    expected = slow_targets(rewards, terminated, done, q, gamma, lambda_)
    torch.testing.assert_close(got[real], expected[real])


def test_what_follows_a_truncation_counts_with_its_value_and_after_a_termination_not():
    rewards = torch.tensor([[1.0, 1], [2, 2], [9, 9], [4, 4]])
    real = torch.tensor([[True, True], [True, True], [False, False], [True, True]])
    discounts = torch.tensor([[0.5, 0.5], [0.5, 0], [0.5, 0.5], [0.5, 0.5]])
    q = torch.tensor([10.0, 20, 30, 40, 50])[:, None, None] * torch.tensor([1.0, -1])
    targets = pqn.lambda_targets(rewards, discounts, real, q.repeat(1, 2, 1), 1.0)
    truncated, terminated = targets.unbind(1)
    assert truncated[real[:, 0]].tolist() == [1 + 0.5 * (2 + 0.5 * 30), 2 + 15, 4 + 25]
    assert terminated[real[:, 0]].tolist() == [1 + 0.5 * 2, 2, 4 + 25]


@pytest.mark.parametrize("args", [[], ["--use_lstm"]])
@pytest.mark.parametrize("env", [envs.Memory, envs.Counter])
def test_a_batch_is_learned_from_with_the_networks_own_targets(env, args):
    """Memory's episodes terminate, Counter's are truncated. Advantage learning lowers
    the targets of what is not the best action."""
    args = [*args, "--discounting", 0.9, "--q_lambda", 0.7]
    args += ["--advantage_learning", 0.5]
    agent, batch = collect(*args, "--reward_clipping", "abs_one", env=env)
    with torch.no_grad():
        q = agent.net(batch, batch["core_state"][0])[0]["q"]
    rewards = batch["reward"][1:].clamp(-1, 1)
    expected = slow_targets(rewards, batch["terminated"], batch["done"], q, 0.9, 0.7)
    gap = q[:-1].max(-1).values - q[:-1].gather(-1, batch["action"][..., None])[..., 0]
    assert gap.any()
    expected = expected - 0.5 * gap
    data = agent.prepare(batch)
    real = ~batch["done"][1:]
    got = data["target"].view(T, B)
    torch.testing.assert_close(got[real], expected[real])
    assert torch.equal(data["real"].view(T, B), real) and not real.all()
    shape = (T, B) if args[0] == "--use_lstm" else (1, T * B)
    assert data["target"].shape == data["action"].shape == shape


# Learning.


def loss_of(agent, batch):
    data = agent.prepare(batch)
    outputs, _ = agent.net(data, data["core_state"])
    return agent.loss(data, outputs)[0]


@pytest.mark.parametrize("args", [[], ["--use_lstm"]])
def test_a_gradient_step_is_that_of_the_mean_square(args):
    agent, batch = collect(*args)
    data = agent.prepare(batch)
    with torch.no_grad():
        q = agent.net(batch, batch["core_state"][0])[0]["q"]
    q = q[:-1].gather(-1, batch["action"][..., None])[..., 0]
    errors = (q.view_as(data["target"]) - data["target"])[data["real"]]
    outputs, _ = agent.net(data, data["core_state"])
    loss, statistics = agent.loss(data, outputs)
    torch.testing.assert_close(loss.detach(), errors.square().mean())
    torch.testing.assert_close(statistics["td_error"].detach(), errors.abs().mean())
    parameters = list(agent.net.parameters())
    expected = torch.autograd.grad(loss, parameters)
    norm = torch.cat([x.flatten() for x in expected]).norm()
    agent.flags.grad_norm_clipping = float(norm) / 2
    statistics = minibatches.gradient_step(agent, data)
    assert statistics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    for parameter, gradient in zip(parameters, expected):
        torch.testing.assert_close(parameter.grad, gradient / 2, rtol=1e-3, atol=1e-6)


class FourActions(envs.Memory):
    def __init__(self):
        super().__init__()
        self.action_space = spaces.Discrete(4)


@pytest.mark.parametrize("args", [[], ["--use_lstm"]])
def test_changes_of_the_values_of_other_actions_are_a_part_of_the_loss(args):
    agent, batch = collect(*args, "--churn_reduction", 0.5, env=FourActions)
    data = agent.prepare(batch)
    with torch.no_grad():
        q = agent.net(data, data["core_state"])[0]["q"]
    torch.testing.assert_close(data["q"], q)
    moved = q + torch.tensor([0.1, -0.2, 0.3, -0.4])
    loss = agent.loss(data, {"q": moved})[0]
    expected = []
    for index in map(tuple, data["real"].nonzero().tolist()):
        action = data["action"][index]
        others = moved[index] - q[index]
        others[action] = 0
        error = moved[index][action] - data["target"][index]
        expected.append(error**2 + 0.5 * (others**2).sum())
    torch.testing.assert_close(loss, torch.stack(expected).mean())


def test_what_does_not_lead_from_an_action_is_not_learned_from():
    agent, batch = collect()
    fake = batch["done"][1:]
    assert fake.any()
    loss = loss_of(agent, batch)
    batch["action"][fake] = 1 - batch["action"][fake]
    batch["reward"][1:][fake] = 1e6
    torch.testing.assert_close(loss, loss_of(agent, batch))


def test_targets_stay_the_same_over_the_epochs():
    agent, batch = collect("--num_epochs", 3)
    seen, loss = [], agent.loss
    agent.loss = lambda part, x: seen.append(part["target"]) or loss(part, x)
    expected = agent.prepare(batch)["target"].flatten().sort().values
    before = [x.clone() for x in agent.net.parameters()]
    statistics = agent.learn(batch)
    assert any((x != y).any() for x, y in zip(before, agent.net.parameters()))
    assert len(seen) == 6
    for i in (0, 2, 4):
        epoch = torch.cat([x.flatten() for x in seen[i : i + 2]])
        assert torch.equal(epoch.sort().values, expected)
    assert list(statistics)[0] == "total_loss" and agent.updates == 1
    assert all(torch.as_tensor(x).isfinite() for x in statistics.values())


@pytest.mark.parametrize(
    ("args", "shape"), [([], (1, T * B)), (["--use_lstm"], (T, B))], ids=str
)
def test_minibatches_have_whole_rollouts_with_their_state_for_an_lstm(args, shape):
    agent, batch = collect(*args)
    data = agent.prepare(batch)
    data["number"] = torch.arange(T * B).view(shape)
    parts = [minibatches.take(data, columns) for columns in minibatches.draw(data, 2)]
    assert [len(part["number"]) for part in parts] == [shape[0]] * 2
    together = torch.cat([part["number"].flatten() for part in parts])
    assert sorted(together.tolist()) == list(range(T * B))
    for part in parts if args else ():
        for x, y in zip(part["core_state"], batch["core_state"][0]):
            assert torch.equal(x, y[:, part["number"][0]]) and x.abs().sum() > 0


def test_exploration_and_the_learning_rate_fall_with_the_steps():
    args = ["--total_steps", 40 * T * B, "--learning_rate", 0.1]
    agent, batch = collect(*args)
    assert agent.flags.exploration_steps == 20 * T * B
    for i in range(1, 6):
        statistics = agent.learn(batch)
        assert statistics["learning_rate"] == pytest.approx(0.1 * (1 - (i - 1) / 40))
        left = max(0, 1 - i / 20)
        assert statistics["exploration"] == pytest.approx(left)
        assert agent.net.exploration == statistics["exploration"]


# Networks and defaults.


@pytest.mark.parametrize("space", [IMAGE, SMALL_IMAGE, NUMBERS], ids=str)
@pytest.mark.parametrize("net", encoders.NETS)
def test_each_layer_of_the_encoder_is_normalised(space, net):
    agent = pqn.Agent(parse("--net", net), space, spaces.Discrete(3))
    observation = {
        name: torch.as_tensor(np.stack([part.sample() for _ in range(5)]))
        for name, part in (space.items() if space is SMALL_IMAGE else [("", space)])
    }
    observation = observation.get("", observation)
    with torch.no_grad():
        before = agent.net.encoder(observation)
        layers = [
            x
            for x in agent.net.encoder.modules()
            if isinstance(x, (nn.Conv2d, nn.Linear))
        ]
        assert len(layers) > 1
        for layer in layers:
            layer.weight.mul_(100)
            layer.bias.mul_(100)
    after = agent.net.encoder(observation)
    if net != "deep":  # Whose blocks add to what came before.
        torch.testing.assert_close(after, before, rtol=1e-2, atol=1e-2)
    assert after.abs().max() < 20


def flags_of(env, space, *args):
    flags = parse_args(monobeast.program_parser("pqn"), ["--env", env, *args])
    flags.precision = "float32"
    pqn.Agent(flags, space, spaces.Discrete(2))
    return flags


def test_defaults_are_those_of_the_kind_of_environment():
    atari, small, numbers = (
        flags_of(*x) for x in ((ATARI, IMAGE), (OTHER, SMALL_IMAGE), (OTHER, NUMBERS))
    )
    assert (atari.net, small.net) == ("nature", "small")
    both = flags_of(OTHER, spaces.Dict(board=SMALL_IMAGE, eye=IMAGE))
    assert (both.net, both.num_minibatches) == ("nature", 4)
    assert atari.reward_clipping == "abs_one"
    assert small.reward_clipping == numbers.reward_clipping == "none"
    assert (atari.num_minibatches, small.num_minibatches) == (4, 16)
    assert atari.learning_rate == 2.5e-4
    held = {
        0: (
            *(IMAGE, SMALL_IMAGE, NUMBERS, spaces.Discrete(16)),
            spaces.Dict(grid=GRID, eye=IMAGE),
            spaces.Dict(grid=GRID, speed=NUMBERS),
        ),
        1: (
            *(GRID, spaces.Box(0, 9, (9,), int)),
            spaces.Dict(compass=spaces.Discrete(4), grid=GRID),  # MiniGrid's.
        ),
    }
    for weight, kinds in held.items():
        for space in kinds:
            assert flags_of(OTHER, space).churn_reduction == weight, space
    for alpha, kinds in {
        0: (IMAGE, SMALL_IMAGE, spaces.Discrete(16), spaces.Dict(grid=GRID, eye=IMAGE)),
        0.9: (NUMBERS, GRID, spaces.Dict(compass=spaces.Discrete(4), grid=GRID)),
    }.items():
        for space in kinds:
            assert flags_of(OTHER, space).advantage_learning == alpha, space
    for steps, exploring in (1e7, 1e6), (300_000, 50_000), (100, 50):
        flags = flags_of(OTHER, NUMBERS, "--total_steps", f"{steps:.0f}")
        assert flags.exploration_steps == exploring
    assert flags_of(OTHER, NUMBERS, "--batch_size", "256").num_minibatches == 32
    recurrent = flags_of(OTHER, NUMBERS, "--use_lstm")
    assert recurrent.num_minibatches <= recurrent.batch_size


def test_a_flag_that_is_given_wins():
    flags = flags_of(ATARI, IMAGE, "--net", "deep", "--q_lambda", "0")
    assert (flags.net, flags.q_lambda) == ("deep", 0)
    assert "net" not in flags.chosen and flags.chosen["learning_rate"] == 2.5e-4


def test_values_are_near_0_at_first():
    agent = pqn.Agent(parse(), NUMBERS, spaces.Discrete(3))
    x = agent.net.encoder(torch.rand(64, 3))
    assert 0 < agent.net.heads(x)["q"].abs().max() < 0.5


# Bad input, presets, programs.


def test_actions_that_are_not_discrete_are_refused_by_the_agents_name():
    with pytest.raises(BadInput, match="--agent pqn needs a Discrete action space"):
        pqn.Agent(parse(), NUMBERS, spaces.Box(-1, 1, (2,)))


def test_more_minibatches_than_a_batch_has_rollouts_are_refused(tmp_path):
    args = ["--agent", "pqn", "--env", OTHER, "--num_actors", 0, "--use_lstm"]
    line = refusal(*args, "--num_minibatches", 33, "--savedir", tmp_path)
    assert "--num_minibatches 33: a batch has 32 rollouts" in line


@pytest.mark.parametrize("args", [[], ["--use_lstm", "--preset", "atari"]])
def test_a_run_trains_resumes_and_is_tested(tmp_path, args):
    args = ["--agent", "pqn", "--env", OTHER, *args, "--num_actors", 0, "--xpid", "x",
            "--unroll_length", 10, "--savedir", tmp_path]  # fmt: skip
    for steps in (320, 640):
        succeeds(*args, "--total_steps", steps, "--log_interval_steps", 1)
    rows = read_logs(tmp_path / "x")
    assert int(rows[-1]["step"]) == 640 and float(rows[-1]["total_loss"]) > 0
    assert {row["policy_lag"] for row in rows} == {"0.0"}
    succeeds("--savedir", tmp_path, "--mode", "test", "--num_test_episodes", 1)


@pytest.mark.parametrize("args", [[], ["--use_lstm"]])
def test_several_learners_make_as_many_gradient_steps_as_one(args, monkeypatch):
    one = flags_of(OTHER, NUMBERS, *args)
    halves = types.SimpleNamespace(share=lambda batch_size: batch_size // 2)
    monkeypatch.setattr(ranks, "current", halves)
    assert flags_of(OTHER, NUMBERS, *args).num_minibatches == one.num_minibatches
