"""td3.py, against slow references. What it shares with sac.py is tested there."""

import copy

import pytest
import torch

import monobeast
import td3
from tests import test_sac
from tests.test_sac import sampled
from torchbeast.flags import parse_args

T, B = test_sac.T, test_sac.B
DDPG = ["--num_critics", 1, "--target_noise", 0, "--policy_delay", 1]


def make_agent(*args, **kwargs):
    agent, acted = test_sac.make_agent(*args, module=td3, **kwargs)
    for parameter in agent.target_net.parameters():  # Another one.
        parameter.mul_(0.7)
    return agent, acted


@pytest.mark.parametrize("args", [[], ["--target_noise_clipping", 0.05], DDPG])
def test_critics_learn_the_reward_and_the_smallest_value_of_what_follows(args):
    agent, acted = make_agent("--discounting", 0.9, *args)
    flags, batch = agent.flags, sampled(agent, acted)
    torch.manual_seed(7)
    _, statistics = agent.critic_loss(batch)
    torch.manual_seed(7)
    noise = flags.target_noise * torch.randn(6, 6)  # Samples, numbers of an action.
    now, following = batch["observation"]
    taken = agent.distribution.features(batch["action"])[0]
    assert len(agent.critics) == (1 if args == DDPG else 2)
    expected = 0.0
    with torch.no_grad():
        action = agent.target_net.layers(following.float()).tanh()
        for b in range(6):
            limit = flags.target_noise_clipping
            a = (action[b] + noise[b].clip(-limit, limit)).clip(-1, 1)[None]
            values = [c(following[b : b + 1], a)[0] for c in agent.target_critics]
            left = 0.9 * (not batch["terminated"][1, b])
            target = batch["reward"][1, b] + left * min(values)
            for critic in agent.critics:
                value = critic(now[b : b + 1], taken[b : b + 1])[0]
                expected += (value - target) ** 2 / 6
    torch.testing.assert_close(
        statistics["critic_loss"], expected, rtol=1e-4, atol=1e-5
    )


def test_the_actor_learns_what_the_first_critic_likes():
    agent, acted = make_agent()
    batch = sampled(agent, acted)
    loss, _ = agent.actor_loss(batch)
    now = batch["observation"][0]
    value = agent.critics[0](now, agent.net.features(now)).mean()
    got = torch.autograd.grad(loss, list(agent.net.parameters()))
    for x, y in zip(got, torch.autograd.grad(value, list(agent.net.parameters()))):
        torch.testing.assert_close(x, -y)
        assert y.abs().sum() > 0


def test_the_actor_and_all_targets_wait_for_the_critics():
    agent, acted = make_agent("--policy_delay", 3, "--target_rate", 0.1)
    sampled(agent, acted)
    names = "net", "critics", "target_net", "target_critics"
    for i in range(1, 7):
        before = {x: copy.deepcopy(getattr(agent, x).state_dict()) for x in names}
        statistics = agent.gradient_step(*next(agent.samples([1])))
        now = {x: getattr(agent, x).state_dict() for x in names}
        moved = {
            x: any(not torch.equal(y, before[x][k]) for k, y in now[x].items())
            for x in names
        }
        assert moved == dict.fromkeys(names, i % 3 == 0) | {"critics": True}
        assert ("actor_loss" in statistics) == (i % 3 == 0)
        for target, module in (("target_net", "net"), ("target_critics", "critics")):
            if i % 3 == 0:
                for k, y in now[target].items():
                    if y.is_floating_point():
                        expected = 0.9 * before[target][k] + 0.1 * now[module][k]
                        torch.testing.assert_close(y, expected)


def test_noise_is_added_to_actions_in_training_alone():
    agent, _ = make_agent("--exploration_noise", 0.3)
    agent.net.uniform.fill_(False)
    agent.net.layers[-1].weight.data.zero_()
    agent.net.layers[-1].bias.data[:] = torch.tensor([0, 0, 0, 0, 3.0, -3.0])
    step = {"observation": torch.rand(1, 20_000, 1)}

    def features(outputs):
        return agent.distribution.features(outputs[0]["action"])[0]

    noisy = features(agent.act(step, ()))
    torch.testing.assert_close(
        noisy.std(0)[:4], torch.full((4,), 0.3), atol=0.02, rtol=0
    )
    assert noisy.abs().max() <= 1 and (noisy[:, 4:].abs() > 0.9999).float().mean() > 0.4
    for outputs in (agent.act(step, (), greedy=True), agent.act_in_test(step, ())):
        expected = agent.net.layers[-1].bias.tanh().expand(20_000, 6)
        torch.testing.assert_close(features(outputs), expected)


def test_ddpg_is_a_preset():
    flags = parse_args(monobeast.program_parser("td3"), ["--preset", "ddpg"])
    assert (flags.num_critics, flags.target_noise, flags.policy_delay) == (1, 0, 1)
