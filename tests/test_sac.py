"""sac.py, against slow references."""

import copy
import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces

import monobeast
import sac
import td3
from tests import envs, test_agent
from tests.programs import read_logs, succeeds
from tests.test_agent import B, T, batches, make_actor
from torchbeast import environment, ranks
from torchbeast.actors import SharedWeights
from torchbeast.batch_renorm import BatchRenorm
from torchbeast.flags import parse_args
from torchbeast.learner import PublishedWeights
from torchbeast.messages import BadInput
from torchbeast.nests import map_structure

CPU = torch.device("cpu")


class Swing(envs.Target):
    """Target with episodes of four steps, of two numbers in different units."""

    def __init__(self):
        super().__init__()
        low, high = np.array([10, -1], np.float32), np.array([30, 1], np.float32)
        self.action_space = spaces.Dict(
            a=spaces.Box(low, high), b=spaces.Box(0, 1, (2, 2))
        )

    def reset(self, **kwargs):
        self.t = 0
        return super().reset(**kwargs)

    def step(self, action):
        self.t += 1
        reward = float(action["a"][1]) + float(action["b"].sum())
        return self.number, reward, self.t == 4, self.t == 3 and reward > 2, {}


def make_agent(*args, env=Swing, seed=1, module=sac):
    """(agent, an iterator of batches [T + 1, B, ...] that it has acted)."""
    argv = ["--envs_per_actor", B, "--replay_start", 0, "--replay_size", 1000]
    argv += ["--replay_batch_size", 6, "--replay_ratio", 6, "--precision", "float32"]
    flags = test_agent.parse(*argv, *args, agent=module.__name__)
    env = environment.Environment([env() for _ in range(B)])
    torch.manual_seed(seed)
    agent = module.Agent(flags, env.observation_space, env.action_space)
    agent.start_learning(CPU)
    for target, _ in agent.targets[:1]:  # Other critics.
        for parameter in target.parameters():
            parameter.mul_(1.5)
    return agent, batches(*make_actor(flags, env, seed=3, agent=agent))


def sampled(agent, acted, num=6):
    for _ in range(3):
        batch = next(acted)
        items = agent.replay.add(batch)
        agent.replay.set_priorities(items, ~batch["done"][1:])
    return agent.replay.sample(num)[0]


def test_only_real_transitions_are_learned_from():
    agent, acted = make_agent()
    samples = [copy.deepcopy(sampled(agent, acted)) for _ in range(20)]
    for name, some in (("done", False), ("terminated", True), ("truncated", True)):
        assert any(sample[name][1].any() for sample in samples) == some


def test_critics_learn_the_reward_and_the_soft_value_of_what_follows():
    agent, acted = make_agent("--discounting", 0.9)
    batch = sampled(agent, acted)
    agent.log_alpha.data.fill_(-1)
    torch.manual_seed(7)
    _, statistics = agent.critic_loss(batch)
    torch.manual_seed(7)
    now, following = batch["observation"]
    with torch.no_grad():
        params = agent.net(following)
        x = agent.distribution.rsample(params)
        action = agent.distribution.features(agent.distribution.to_action(x))
        values = [critic(following, action) for critic in agent.target_critics]
        log_prob = agent.distribution.log_prob(params, x) + agent.distribution.log_units
        expected = 0.0
        taken = agent.distribution.features(batch["action"])[0]
        for b in range(6):
            soft = min(v[b] for v in values) - np.exp(-1) * log_prob[b]
            left = 0.9 * (not batch["terminated"][1, b])
            target = batch["reward"][1, b] + left * soft
            for critic in agent.critics:
                value = critic(now[b : b + 1], taken[b : b + 1])[0]
                expected += (value - target) ** 2 / 6
    torch.testing.assert_close(
        statistics["critic_loss"], expected, rtol=1e-4, atol=1e-5
    )


def gradients(agent, batch):
    """What the optimizer gets in a gradient step, {name: [gradients]} each time. It
    moves nothing."""
    steps, modules = [], {"net": agent.net, "critics": agent.critics}

    def step():
        grads = {k: [p.grad for p in x.parameters()] for k, x in modules.items()}
        steps.append({**grads, "log_alpha": [agent.log_alpha.grad]})

    agent.optimizer.step = step
    agent.learn_from(batch, True)
    return steps


def test_the_actor_learns_from_critics_and_they_do_not_learn_from_it():
    agent, acted = make_agent("--target_rate", 0)
    batch = sampled(agent, acted)
    torch.manual_seed(7)
    first, second = gradients(agent, batch)
    torch.manual_seed(7)
    for got, loss, module, name in (
        (first, agent.critic_loss, agent.critics, "critics"),
        (second, agent.actor_loss, agent.net, "net"),
    ):
        expected = torch.autograd.grad(loss(batch)[0], list(module.parameters()))
        for x, y in zip(got.pop(name), expected):
            torch.testing.assert_close(x, y)
            assert y.abs().sum() > 0
    assert second.pop("log_alpha") != [None]
    for rest in (first, second):
        assert all(x is None for grads in rest.values() for x in grads)


@pytest.mark.parametrize(("target", "sign"), [(-50, 1), (50, -1)])
def test_entropy_is_worth_less_while_it_is_above_its_target(target, sign):
    agent, acted = make_agent("--target_entropy", target)
    agent.actor_loss(sampled(agent, acted))[0].backward()
    assert torch.sign(agent.log_alpha.grad) == sign


def test_entropy_is_that_of_numbers_in_units_of_their_bounds():
    """A wide policy has nearly the uniform one's, log 2 for each number."""
    agent, _ = make_agent()
    D = agent.distribution.num_features
    assert D == 6 and agent.target_entropy == -6
    params = torch.zeros(20_000, 2 * D)
    params[:, agent.distribution.log_stds] = np.log(0.87)
    agent.net = lambda observation: params
    _, log_prob = agent.sample_action(None)
    assert -log_prob.mean() == pytest.approx(D * np.log(2), abs=0.2)


def test_actions_are_in_their_bounds_and_greedy_ones_always_the_same():
    agent, acted = make_agent()
    batch = next(acted)
    action = batch["action"]
    assert (action["a"][..., 0] >= 10).all() and (action["a"][..., 0] <= 30).all()
    assert (action["b"] >= 0).all() and (action["b"] <= 1).all()
    step = map_structure(lambda x: x[:1], {"observation": batch["observation"]})
    first, second = (agent.act(step, (), greedy=True)[0]["action"] for _ in range(2))
    assert torch.equal(first["a"], second["a"])
    assert not torch.equal(
        agent.act(step, ())[0]["action"]["a"], agent.act(step, ())[0]["action"]["a"]
    )


@pytest.mark.parametrize("module", [sac, td3])
def test_the_replay_holds_the_run_up_to_a_million_steps_of_numbers(module, monkeypatch):
    def size(space, *words):
        flags = monobeast.program_parser(module.__name__).parse_args([*words])
        monobeast.set_defaults(flags)
        module.Agent(flags, space, spaces.Box(-1, 1, (2,)))
        return flags.replay_size

    numbers, image = spaces.Box(-1, 1, (3,)), spaces.Box(0, 255, (84, 84, 4), np.uint8)
    assert size(numbers) == 1_000_000
    for total_steps, expected in (50_000, 100_000), (300_000, 300_000), (10**7, 10**6):
        assert size(numbers, "--total_steps", str(total_steps)) == expected
    assert size(image) == 100_000
    assert size(image, "--replay_size", "700") == 700
    monkeypatch.setattr(ranks.current, "num", 4)  # Each of them gets a fourth.
    assert size(numbers, "--total_steps", "3000000") == 750_000


@pytest.mark.parametrize("module", [sac, td3])
def test_actions_are_uniform_before_anything_is_learned_and_then_the_policys(module):
    agent, acted = make_agent("--replay_start", 3 * B * T, module=module)
    if module is sac:
        agent.net.policy.bias.data[agent.distribution.log_stds] = -5  # Narrow.
    step = {"observation": torch.rand(1, 10_000, 1)}
    for i in range(5):
        action, _ = agent.act(step, ())
        numbers = agent.distribution.features(action["action"]).flatten(0, 1)  # [N, 6]
        if i < 3:  # From -1 to 1.
            expected = torch.full((6,), 3**-0.5)
            torch.testing.assert_close(numbers.std(0), expected, atol=0.01, rtol=0)
            assert (numbers.mean(0).abs() < 0.03).all()
            assert (numbers.abs().max(0).values > 0.999).all()
        else:
            assert (numbers.std(0) < 0.5).all()
        first, second = (agent.act(step, (), greedy=True)[0]["action"] for _ in "12")
        assert torch.equal(first["a"], second["a"])
        agent.learn(next(acted))
    agent.flags.replay_start = 10**6  # As of a resumed run that is to be longer.
    agent.learn(next(acted))
    assert not agent.net.uniform


def test_batches_of_several_updates_are_drawn_together_and_each_is_of_all_shares(
    monkeypatch,
):
    agent, acted = make_agent("--replay_ratio", 1)
    drawn, learned = [], []
    sample, step = agent.replay.sample, agent.gradient_step
    monkeypatch.setattr(
        agent.replay,
        "sample",
        lambda num, batches: drawn.append(batches) or sample(num, 0, batches),
    )
    monkeypatch.setattr(
        agent,
        "gradient_step",
        lambda batch, items: learned.append(items) or step(batch, items),
    )
    new = [0]
    for batch in itertools.islice(acted, 4):
        agent.learn(batch)
        new.append(int((~batch["done"][1:]).sum()))
    due = np.diff(np.cumsum(new) // 6)  # An update learns from 6 steps.
    assert drawn == due.tolist() and len(learned) == due.sum() == 10
    drawable = np.flatnonzero(agent.replay.arrays()["priorities"])
    for items in learned[-due[-1] :]:
        shares = np.searchsorted(drawable, items) * 6 / len(drawable)
        assert (np.abs(shares - np.arange(6) - 0.5) <= 0.75).all()


def test_target_critics_follow_slowly():
    agent, acted = make_agent("--target_rate", 0.1)
    before = copy.deepcopy(list(agent.target_critics.parameters()))
    sampled(agent, acted)
    agent.gradient_step(*next(agent.samples([1])))
    for x, y, z in zip(
        before, agent.target_critics.parameters(), agent.critics.parameters()
    ):
        torch.testing.assert_close(y, 0.9 * x + 0.1 * z)


def test_a_step_is_learned_from_as_often_as_the_ratio_says():
    agent, acted = make_agent()
    for _ in range(4):
        statistics = agent.learn(next(acted))
    assert statistics["replay_ratio"] == 6  # An update of 6 samples for each step.
    assert statistics["replay_size"] == 4 * B * T
    assert {"critic_loss", "actor_loss", "alpha", "entropy"} < set(statistics)


@pytest.mark.parametrize(("module", "last"), [(sac, "critics"), (td3, "target_net")])
def test_a_checkpoint_has_all_that_learns(module, last):
    agent, acted = make_agent(module=module)
    agent.learn(next(acted))
    saved = copy.deepcopy(agent.state_dict())
    other, _ = make_agent(seed=2, module=module)
    other.load_state_dict(saved)
    assert other.gradient_steps == agent.gradient_steps > 0
    if module == sac:
        assert other.log_alpha == agent.log_alpha != 0
    modules = {"net": agent.net, **agent.learned}
    assert {"net", "critics", "target_critics", last} == {*modules}
    for name in modules:
        now, then = (getattr(x, name).parameters() for x in (other, agent))
        assert all(map(torch.equal, now, then))
    del saved[last]
    with pytest.raises(KeyError, match=last):
        other.load_state_dict(saved)


@pytest.mark.parametrize(
    ("space", "match"),
    [
        (spaces.Discrete(3), r"needs an action space of Boxes, .*: use --agent polyb"),
        (spaces.Tuple([spaces.Box(-1, 1), spaces.Discrete(2)]), "needs an action spac"),
        (spaces.Box(-np.inf, np.inf, (2,)), "expected finite bounds"),
    ],
    ids=str,
)
@pytest.mark.parametrize("module", [sac, td3])
def test_other_actions_are_refused_by_name(space, match, module):
    flags = make_agent(module=module)[0].flags
    with pytest.raises(BadInput, match=match):
        module.Agent(flags, spaces.Box(-1, 1, (3,)), space)


@pytest.mark.parametrize("agent", ["sac", "td3"])
def test_a_run_goes_on_with_its_weights_and_an_empty_replay(tmp_path, agent):
    def train(steps):
        result = succeeds("--agent", agent, "--env", "Pendulum-v1", "--num_actors", 0,
                          "--replay_start", 100, "--total_steps", steps, "--xpid", "x",
                          "--replay_ratio", 8, "--savedir", tmp_path)  # fmt: skip
        return result.stderr

    train(1000)
    assert train(2000).count("learning goes on after 100 new steps") == 1
    assert float(read_logs(tmp_path / "x")[-1]["replay_size"]) < 1000


def test_a_gradient_step_moves_actor_critics_and_alpha_at_rates_of_their_own():
    agent, acted = make_agent("--learning_rate", 0.01, "--critic_learning_rate", 0.03)
    sampled(agent, acted)
    net, critics = list(agent.net.parameters()), list(agent.critics.parameters())
    before = [x.detach().clone() for x in (*net, *critics, agent.log_alpha)]
    agent.gradient_step(*next(agent.samples([1])))
    moved = [
        (x.detach() - y).abs().max().item()
        for x, y in zip((*net, *critics, agent.log_alpha), before)
    ]
    # Adam's first step is the learning rate wherever there is a gradient.
    assert moved[: len(net)] == pytest.approx([0.01] * len(net), rel=0.01)
    rest = moved[len(net) :]
    assert rest == pytest.approx([0.03] * len(rest), rel=0.01)


def test_alphas_gradient_is_the_gap_between_entropy_and_its_target():
    agent, acted = make_agent("--target_entropy", -1.5)
    batch = sampled(agent, acted)
    loss, statistics = agent.actor_loss(batch)
    loss.backward()
    gap = statistics["entropy"].item() + 1.5
    assert agent.log_alpha.grad.item() == pytest.approx(gap, rel=1e-4)


# CrossQ.

CROSSQ = ["--preset", "crossq", "--critic_hidden_sizes", 16, 12]


def statistics_of(module):
    return [x for x in module.modules() if isinstance(x, BatchRenorm)]


def make_crossq(*args, **kwargs):
    """An agent whose weights and running statistics are no longer the first ones."""
    agent, acted = make_agent(*CROSSQ, *args, **kwargs)
    for _ in range(4):
        sampled(agent, acted)
        agent.gradient_step(*next(agent.samples([1])))
    return agent, acted


def test_crossq_has_no_target_networks():
    agent, acted = make_crossq()
    assert agent.targets == [] and set(agent.learned) == {"critics"}
    assert not hasattr(agent, "target_critics")
    assert not [name for name in agent.state_dict() if "target" in name]
    assert set(make_agent()[0].learned) == {"critics", "target_critics"}


def test_crossq_normalises_what_each_layer_reads():
    agent, _ = make_agent(*CROSSQ)
    D = agent.distribution.num_features
    for critic in agent.critics:
        assert [len(x.mean) for x in statistics_of(critic)] == [1 + D, 16, 12]
    assert [len(x.mean) for x in statistics_of(agent.net)] == [1, 256, 256]
    assert statistics_of(make_agent()[0].net) == []


def test_crossqs_critics_see_both_steps_in_one_pass():
    agent, acted = make_crossq("--discounting", 0.9)
    batch, critics = sampled(agent, acted), copy.deepcopy(agent.critics)
    torch.manual_seed(7)
    got = agent.critic_loss(batch)[1]["critic_loss"]
    torch.manual_seed(7)
    now, following = batch["observation"]
    taken = agent.distribution.features(batch["action"])[0]
    with torch.no_grad():
        agent.net.eval()
        action, log_prob = agent.sample_action(following)
        agent.net.train()

        def loss(values):  # [(now, following)] of two critics.
            value = torch.minimum(values[0][1], values[1][1])
            value = value - agent.log_alpha.exp() * log_prob
            target = batch["reward"][1] + 0.9 * ~batch["terminated"][1] * value
            return sum((v[0] - target).square().mean() for v in values)

        joint, apart = copy.deepcopy(critics), copy.deepcopy(critics)
        both = torch.cat([now, following]), torch.cat([taken, action])
        expected = loss([critic(*both).chunk(2) for critic in joint])
        other = loss([(c(now, taken), c(following, action)) for c in apart])
    torch.testing.assert_close(got, expected)
    assert abs(other - expected) > 0.01 * expected
    for x, y in zip(agent.critics.buffers(), joint.buffers()):
        torch.testing.assert_close(x, y)


def test_crossqs_statistics_are_of_what_each_network_learns_from():
    """The critics' are not of what the actor would do, the actor's of the steps that it
    learns from, of every third batch."""
    agent, acted = make_agent(*CROSSQ)
    sampled(agent, acted)
    for layer in statistics_of(agent.net):  # Here it has acted in training mode.
        layer.num_updates.zero_()
    for i in range(1, 7):
        agent.gradient_step(*next(agent.samples([1])))
        assert {int(x.num_updates) for x in statistics_of(agent.critics)} == {i}
        assert {int(x.num_updates) for x in statistics_of(agent.net)} == {i // 3}
        assert all(x.training for x in (*agent.net.modules(), *agent.critics.modules()))


def test_crossqs_actor_and_alpha_learn_in_every_third_step():
    agent, acted = make_agent(*CROSSQ)
    for i in range(1, 7):
        sampled(agent, acted)
        before = copy.deepcopy([*agent.net.parameters(), agent.log_alpha])
        critics = copy.deepcopy(list(agent.critics.parameters()))
        agent.gradient_step(*next(agent.samples([1])))
        now = [*agent.net.parameters(), agent.log_alpha]
        moved = [not torch.equal(x, y) for x, y in zip(before, now)]
        assert moved == [i % 3 == 0] * len(now)
        moved = [
            not torch.equal(x, y) for x, y in zip(critics, agent.critics.parameters())
        ]
        assert any(moved)


@pytest.mark.parametrize("weights", [SharedWeights, PublishedWeights])
def test_whoever_acts_gets_the_running_statistics(weights):
    agent, acted = make_crossq()
    published = weights(agent.net, *[CPU] * (weights is PublishedWeights))
    other, _ = make_agent(*CROSSQ, seed=2)
    step = {"observation": torch.rand(1, 10, 1)}
    for version in (1, 2):
        sampled(agent, acted)
        for _ in range(3):
            agent.gradient_step(*next(agent.samples([1])))
        published.publish(agent.net, version)
        published.fetch(other.net)
        agent.net.eval(), other.net.eval()
        x, y = (a.act(step, (), greedy=True)[0]["action"]["a"] for a in (agent, other))
        assert torch.equal(x, y)
        agent.net.train()
        for x, y in zip(statistics_of(agent.net), statistics_of(other.net)):
            assert torch.equal(x.mean, y.mean) and x.num_updates == y.num_updates > 0


def test_crossqs_constants():
    agent, _ = make_agent("--preset", "crossq")
    rates = [(g["lr"], *g["betas"]) for g in agent.optimizer.param_groups]
    assert rates == [(1e-3, 0.5, 0.999)] * 2 + [(1e-3, 0.9, 0.999)]
    assert agent.log_alpha == 0
    flags = parse_args(monobeast.program_parser("sac"), ["--preset", "crossq"])
    assert (flags.replay_start, flags.replay_batch_size) == (5000, 256)
    assert flags.replay_ratio == 256  # A gradient step for each step.


def test_crossqs_ranks_agree_on_all_running_statistics(monkeypatch):
    agent, acted = make_agent(*CROSSQ)
    sampled(agent, acted)
    averaged = []
    monkeypatch.setattr(sac, "average_over_ranks", lambda *x: averaged.append(x))
    agent.gradient_step(*next(agent.samples([1])))
    assert averaged == [(agent.net, agent.critics)]
