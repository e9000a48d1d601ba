"""ppo.py, against slow references."""

import copy
import signal

import pytest
import torch
from gymnasium import spaces
from torch import nn

import monobeast
import polybeast_env
import ppo
from tests import envs, test_agent
from tests.programs import read_logs, refusal, succeeds
from tests.test_agent import make_actor
from torchbeast import environment, minibatches
from torchbeast.flags import parse_args
from torchbeast.messages import Stop
from torchbeast.nests import map_structure
from torchbeast.process import Signals

T, B = 7, 4
CPU = torch.device("cpu")


def parse(*args):
    argv = ["--unroll_length", T, "--num_minibatches", 4, "--envs_per_actor", B]
    argv += ["--reward_clipping", "none", "--precision", "float32"]
    return test_agent.parse(*argv, *args, agent="ppo")


def collect(*args, env=envs.Memory):
    """(agent, batch [T + 1, B, ...] that its own network has acted)."""
    flags = parse(*args)
    env = environment.Environment([env() for _ in range(B)])
    torch.manual_seed(1)
    agent = ppo.Agent(flags, env.observation_space, env.action_space)
    nn.init.normal_(agent.net.policy.weight)  # Not uniform.
    _, buffers, arrays = make_actor(flags, env, agent=agent)
    actor = monobeast.Actor(flags, env, agent, 5)
    for _ in range(3):
        actor.rollout(arrays, list(range(B)))
    batch, _, _ = monobeast.make_batch(buffers, [(i, 0) for i in range(B)], CPU, T)
    agent.start_learning(CPU)
    return agent, batch


def values_of(agent, batch):
    with torch.no_grad():
        outputs, _ = agent.unroll(batch, batch["core_state"])
    return outputs["baseline"]


def advantages(agent, batch):
    """[T, B] by the definition. An episode that is cut off is bootstrapped."""
    gamma, lambda_ = agent.flags.discounting, agent.flags.gae_lambda
    v, result = values_of(agent, batch), torch.zeros(T, B)
    for b in range(B):
        following = 0.0
        for t in reversed(range(T)):
            if batch["done"][t + 1, b]:  # From a last observation to a first one.
                following = 0.0
                continue
            left = gamma * (not batch["terminated"][t + 1, b])
            delta = batch["reward"][t + 1, b] + left * v[t + 1, b] - v[t, b]
            following = result[t, b] = delta + left * lambda_ * following
    return result


class Cut(envs.Memory):
    """Memory, of which half of the episodes are cut off at the first step."""

    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        cut = self.t == 1 and self.cue == 1
        return observation, reward, terminated, cut and not terminated, info


@pytest.mark.parametrize("args", [[], ["--use_lstm"]])
def test_advantages_and_targets_are_those_of_the_definition(args):
    agent, batch = collect(*args, env=Cut)
    assert batch["truncated"][1:].any() and batch["terminated"][1:].any()
    expected, real = advantages(agent, batch), ~batch["done"][1:]
    assert not real.all()
    data, _ = agent.prepare(batch)
    target = (values_of(agent, batch)[:-1] + expected).reshape_as(data["target"])
    torch.testing.assert_close(data["target"], target)
    normal = (expected - expected[real].mean()) / expected[real].std(correction=0)
    got = data["advantage"].reshape(T, B)
    torch.testing.assert_close(got[real], normal[real], rtol=1e-4, atol=1e-4)
    assert torch.equal(data["real"].reshape(T, B), real)


def test_of_old_rollouts_the_values_are_those_of_the_policy_that_learns():
    agent, batch = collect()
    before, _ = agent.prepare(batch)
    batch["policy_logits"] = batch["policy_logits"].flip(-1)  # Another one acted.
    after, _ = agent.prepare(batch)
    assert not torch.allclose(before["target"], after["target"])


def test_a_weight_is_the_start_of_the_updates_probability_over_that_of_who_acted():
    agent, batch = collect()
    acted = torch.tensor([[0.2, 0.8]]).log()
    batch["policy_logits"][:] = acted  # Another one.
    data, _ = agent.prepare(batch)
    outputs, _ = agent.net(data, data["core_state"])
    start = torch.softmax(outputs["policy_logits"][0], -1)
    for i, action in enumerate(batch["action"].flatten().tolist()):
        expected = start[i, action] / (0.2, 0.8)[action]
        torch.testing.assert_close(data["weight"][0, i], expected)
    batch["policy_logits"][..., 0], batch["policy_logits"][..., 1] = -50, 50
    data, _ = agent.prepare(batch)
    zeros = batch["action"].flatten() == 0
    assert data["weight"][0, zeros].allclose(torch.tensor(float(ppo.MAX_WEIGHT)))


@pytest.mark.parametrize("old", [False, True])
def test_the_loss_clips_around_the_start_of_the_update_and_weights_who_acted(old):
    """Its gradient is checked after the policy has changed: a ratio to the policy
    itself would be 1 and never clipped. Where no rollout is old, it is PPO's."""
    agent, batch = collect("--entropy_cost", 0, "--baseline_cost", 0)
    start = batch["policy_logits"].clone()
    if old:
        batch["policy_logits"] += torch.randn_like(start)
    data, _ = agent.prepare(batch)
    with torch.no_grad():
        for parameter in agent.net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    outputs, _ = agent.net(data, data["core_state"])
    loss, statistics = agent.loss(data, outputs)

    acted = torch.log_softmax(batch["policy_logits"], -1).flatten(0, 1)
    start = torch.log_softmax(start, -1).flatten(0, 1)
    now = torch.log_softmax(outputs["policy_logits"][0], -1)
    chosen = batch["action"].reshape(-1, 1)
    expected, num, num_clipped = 0.0, 0, 0
    for i in range(T * B):
        if not data["real"][0, i]:
            continue
        pi, prox, beta = (x[i, chosen[i]].exp().squeeze() for x in (now, start, acted))
        advantage, ratio = data["advantage"][0, i], pi / prox
        clipped = ratio.clamp(0.8, 1.2)
        gain = torch.min(pi / beta * advantage, clipped * prox / beta * advantage)
        expected = expected - gain
        num_clipped += int(ratio != clipped)
        num += 1
    expected = expected / num
    assert 0 < num_clipped < num
    torch.testing.assert_close(loss, expected)
    assert statistics["clip_fraction"].item() == pytest.approx(num_clipped / num)
    assert statistics["kl"] > 0.01
    weights = list(agent.net.policy.parameters())
    for got, want in zip(
        torch.autograd.grad(loss, weights, retain_graph=True),
        torch.autograd.grad(expected, weights),
    ):
        assert want.abs().max() > 1e-4
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("args", [[], ["--use_lstm"]])
def test_at_first_the_ratio_is_one(args):
    agent, batch = collect(*args)
    data, _ = agent.prepare(batch)
    outputs, _ = agent.net(data, data["core_state"])
    _, statistics = agent.loss(data, outputs)
    assert abs(statistics["kl"]) < 1e-6 and statistics["clip_fraction"] == 0


def test_the_value_may_be_clipped():
    agent, batch = collect("--value_clipping", "--clipping", 0.1)
    data, _ = agent.prepare(batch)
    outputs, _ = agent.net(data, data["core_state"])
    moved = {**outputs, "baseline": data["value"] + 1}
    _, statistics = agent.loss(data, moved)
    errors = torch.max(
        (data["value"] + 1 - data["target"]).square(),
        (data["value"] + 0.1 - data["target"]).square(),
    )
    expected = 0.5 * errors[data["real"]].mean()
    torch.testing.assert_close(statistics["baseline_loss"], expected)


@pytest.mark.parametrize(
    ("args", "shape"), [([], (1, T * B)), (["--use_lstm"], (T, B))], ids=str
)
def test_each_epoch_has_each_step_once_and_whole_rollouts_for_an_lstm(args, shape):
    agent, batch = collect(*args)
    data, _ = agent.prepare(batch)
    assert data["real"].shape == shape
    data["number"] = torch.arange(T * B).view(shape)
    parts = [minibatches.take(data, columns) for columns in minibatches.draw(data, 4)]
    assert len(parts) == agent.flags.num_minibatches == 4
    assert all(len(part["number"]) == shape[0] for part in parts)
    together = torch.cat([part["number"].flatten() for part in parts])
    assert sorted(together.tolist()) == list(range(T * B))
    assert together.tolist() != list(range(T * B))
    for part in parts:
        for x in ("reward", "advantage", "action"):
            picked = data[x].flatten(0, 1)[part["number"].flatten()]
            assert torch.equal(part[x].flatten(0, 1), picked)


def test_a_batch_is_learned_from_in_epochs_of_minibatches():
    args = "--num_epochs", 3, "--num_minibatches", 2, "--learning_rate", 2.5e-4
    agent, batch = collect(*args)
    steps = []
    agent.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    before = copy.deepcopy(agent.net.state_dict())
    agent.flags.total_steps = 4 * T * B
    statistics = agent.learn(batch)
    assert len(steps) == 6
    assert statistics["learning_rate"] == 2.5e-4
    assert any((before[k] != x).any() for k, x in agent.net.state_dict().items())
    assert agent.step == T * B and agent.updates == 1
    assert agent.learn(batch)["learning_rate"] == pytest.approx(0.75 * 2.5e-4)
    assert all(torch.as_tensor(x).isfinite() for x in statistics.values())


def test_a_signal_ends_an_update_before_its_next_gradient_step(monkeypatch):
    agent, batch = collect("--num_epochs", 3)
    step = agent.clip_and_step
    steps = []

    def signalled(statistics):
        steps.append(signal.raise_signal(signal.SIGTERM))
        return step(statistics)

    monkeypatch.setattr(agent, "clip_and_step", signalled)
    with Signals(), pytest.raises(Stop, match="SIGTERM"):
        agent.learn(batch)
    assert len(steps) == 1


def test_what_does_not_lead_from_an_action_is_not_learned_from():
    agent, batch = collect()
    fake = batch["done"][1:]
    assert fake.any()
    data, _ = agent.prepare(batch)
    outputs, _ = agent.net(data, data["core_state"])
    loss, _ = agent.loss(data, outputs)
    batch["action"][fake] = 1 - batch["action"][fake]
    batch["reward"][1:][fake] = 1e6
    data, _ = agent.prepare(batch)
    again, _ = agent.loss(data, outputs)
    torch.testing.assert_close(loss, again)


def test_a_batch_without_a_real_transition_changes_nothing_to_nan():
    agent, batch = collect()
    batch["done"][:] = True
    agent.learn(batch)
    assert all(x.isfinite().all() for x in agent.net.parameters())


def test_advantages_far_from_zero_are_normalized():
    agent, batch = collect()
    batch["terminated"][1:] = ~batch["done"][1:]
    batch["reward"] = 1e5 + torch.randn(T + 1, B)
    data, _ = agent.prepare(batch)
    got = data["advantage"][data["real"]]
    torch.testing.assert_close(got.std(correction=0), torch.ones(()), rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--use_lstm", "--batch_size", 8], "16: a batch has 8 rollouts (a minibatch"),
        (["--unroll_length", 5, "--batch_size", 3], "16: a batch has 15 steps"),
    ],
)
def test_more_minibatches_than_a_batch_has_parts_are_refused(flags, error, tmp_path):
    args = ["--agent", "ppo", "--env", "CartPole-v1", "--num_actors", 0]
    line = refusal(*args, *flags, "--savedir", tmp_path)
    assert f"--num_minibatches {error}" in line


def test_presets_are_defaults_that_flags_override(tmp_path):
    flags = parse_args(
        monobeast.program_parser("ppo"),
        ["--agent", "ppo", "--preset", "mujoco", "--clipping", "0.3"],
    )
    assert (flags.unroll_length, flags.batch_size) == (2048, 1)
    assert flags.normalize_rewards and flags.clipping == 0.3
    assert not hasattr(flags, "num_servers")
    args = ["--agent", "ppo", "--env", "tests.envs:torchbeast/CatchPixels-v0",
            "--savedir", tmp_path, "--xpid", "x"]  # fmt: skip
    small = ["--preset", "atari", "--net", "shallow", "--unroll_length", 5,
             "--num_actors", 0, "--total_steps", 80]  # fmt: skip
    succeeds(*args, *small, "--log_interval_steps", 40)
    assert float(read_logs(tmp_path / "x")[0]["learning_rate"]) == 2.5e-4
    # A test takes the checkpoint's flags, not the preset's.
    succeeds(*args[2:], "--mode", "test", "--num_test_episodes", 1)


NUMBERS, IMAGE = spaces.Box(-1, 1, (3,)), spaces.Box(0, 255, (40, 40, 3), "uint8")


def net_and_step(space, *options):
    """(net, a step [1, B, ...] with random observations)."""
    space.seed(1)
    observation = torch.stack([torch.from_numpy(space.sample()) for _ in range(B)])
    step = {
        "observation": observation[None], "reward": torch.zeros(1, B),
        "done": torch.zeros(1, B, dtype=torch.bool),
        "last_action": torch.zeros(1, B, 2),
    }  # fmt: skip
    return ppo.Agent(parse(*options), space, spaces.Box(-1, 1, (2,))).net, step


@pytest.mark.parametrize(
    "space, options, shared",
    [(NUMBERS, [], False), (NUMBERS, ["--use_lstm"], True), (IMAGE, [], True)],
)
def test_policy_and_value_share_an_encoder_of_images_or_before_an_lstm(
    space, options, shared
):
    net, step = net_and_step(space, *options)
    outputs, _ = net(step, net.initial_state(B))
    outputs["baseline"].sum().backward()
    moved = {
        name: bool(x.grad is not None and x.grad.abs().sum() > 0)
        for name, x in net.named_parameters()
    }
    assert moved["baseline.weight"] and not moved["policy.weight"]
    encoder = {name: x for name, x in moved.items() if name.startswith("encoder.")}
    assert encoder == {name: shared or "policy" not in name for name in encoder}


@pytest.mark.parametrize("space", [NUMBERS, IMAGE])
def test_a_network_that_acts_has_the_same_policy_and_no_values(space):
    net, step = net_and_step(space, "--normalize_observations")
    nn.init.normal_(net.policy.weight)
    learning, _ = net(step)
    acting, _ = net.eval()(step)
    assert list(acting) == ["policy_logits"]
    assert torch.allclose(acting["policy_logits"], learning["policy_logits"])


def test_deviations_are_numbers_of_their_own():
    flags = parse()
    env = polybeast_env.create_env(
        polybeast_env.environment_parser().parse_args(["--env", "Pendulum-v1"]), 2
    )
    agent = ppo.Agent(flags, env.observation_space, env.action_space)
    step = map_structure(lambda x: torch.from_numpy(x)[None], env.initial(1))
    outputs, _ = agent.net(step)
    log_stds = outputs["policy_logits"][..., 1]
    assert log_stds.eq(0).all()
    nn.init.normal_(agent.net.policy.weight)
    outputs, _ = agent.net(step)
    assert outputs["policy_logits"][..., 1].eq(0).all()
    assert outputs["policy_logits"][..., 0].std() > 0
