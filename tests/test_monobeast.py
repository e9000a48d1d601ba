"""The parts of MonoBeast, in this process: networks, rollouts, weights, one update."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import actors
import environment
import experiment
import learner
import monobeast
from environment import leaves, map_structure
from tests import envs  # noqa: F401 (registers them)
from tests.faulty_envs import Nested

T, B = 5, 4
CPU = torch.device("cpu")


def parse(*args):
    flags = monobeast.parser().parse_args(
        ["--unroll_length", str(T), "--batch_size", str(B), "--num_actors", "0"]
        + [str(a) for a in args]
    )
    monobeast.set_defaults(flags)
    return flags


def make_actor(flags, env, seed=0):
    torch.manual_seed(seed)
    model = monobeast.create_net(flags, env)
    specs = monobeast.rollout_specs(flags, env, model)
    buffers = actors.create_buffers(specs, flags.num_buffers)
    arrays = map_structure(lambda x: x.numpy(), buffers)
    return monobeast.Actor(flags, env, model, seed), buffers, arrays


def collect(flags, env, seed=0):
    """(actor, batch): one batch of rollouts by the actor's own network."""
    actor, buffers, arrays = make_actor(flags, env, seed)
    actor.rollout(arrays, list(range(env.num_envs)))
    items = [(i, 0) for i in range(env.num_envs)]
    batch, episodes, versions = monobeast.make_batch(buffers, items, CPU)
    return actor, batch


def nested(num_envs=B):
    return environment.Environment([Nested() for _ in range(num_envs)])


# Networks.


@pytest.mark.parametrize("use_lstm", [[], ["--use_lstm"]])
@pytest.mark.parametrize(
    "observation_space",
    [
        spaces.Box(0, 255, (4, 84, 84), np.uint8),
        spaces.Box(0, 255, (96, 96, 3), np.uint8),
        spaces.Box(0, 255, (7, 7, 3), np.uint8),
        spaces.Box(-1, 1, (), np.float64),
        spaces.Box(0, 9, (2, 3, 4, 5), np.uint16),
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
        spaces.MultiBinary([2, 3]),
        Nested.observation_space,
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "action_space", [spaces.Discrete(6), spaces.MultiDiscrete([2, 5, 3])], ids=str
)
def test_net_takes_any_space_and_ends_in_logits_and_baseline(
    observation_space, action_space, use_lstm
):
    class Env(gymnasium.Env):
        def reset(self, *, seed=None, options=None):
            return observation_space.sample(), {}

        def step(self, action):
            assert action_space.contains(action)
            return observation_space.sample(), 1.0, False, False, {}

    Env.observation_space, Env.action_space = observation_space, action_space
    env = environment.Environment([Env() for _ in range(B)])
    flags = parse(*use_lstm, "--envs_per_actor", B)
    actor, batch = collect(flags, env)
    outputs, core_state = actor.model(batch, batch["core_state"])
    heads = (6,) if action_space == spaces.Discrete(6) else (3, 5)
    assert outputs["policy_logits"].shape == (T + 1, B, *heads)
    assert outputs["policy_logits"].dtype == torch.float32
    assert outputs["baseline"].shape == (T + 1, B)
    assert len(core_state) == (2 if use_lstm else 0)
    optimizer, scheduler = learner.create_optimizer(flags, actor.model)
    stats = monobeast.learn(flags, actor.model, optimizer, scheduler, batch)
    assert all(torch.isfinite(x) for x in stats.values())


def test_impossible_choices_of_an_action_are_never_taken():
    flags = parse("--envs_per_actor", B)
    _, batch = collect(flags, nested())
    assert batch["action"].shape == (T, B, 2)
    assert (batch["action"] < torch.tensor([2, 5])).all()
    probabilities = batch["policy_logits"].softmax(-1)
    assert (probabilities[..., 0, 2:] == 0).all()


def test_everything_that_is_not_a_weight_moves_with_the_net():
    flags = parse("--envs_per_actor", B)
    net = monobeast.create_net(flags, nested()).to("meta")
    step = map_structure(torch.as_tensor, nested().initial())
    step = map_structure(lambda x: x[None].to("meta"), step)
    assert net(step)[0]["baseline"].device.type == "meta"


def test_lstm_forgets_at_the_first_step_of_an_episode():
    flags = parse("--use_lstm")
    env = environment.Environment([gymnasium.make("CartPole-v1") for _ in range(B)])
    actor, batch = collect(flags, env)
    batch["done"][:] = False
    batch["done"][3, 0] = True
    states = [tuple(torch.randn_like(s) for s in batch["core_state"]) for _ in range(2)]
    a, b = (actor.model(batch, state)[0]["baseline"] for state in states)
    torch.testing.assert_close(a[3:, 0], b[3:, 0])
    assert (a[:3, 0] != b[:3, 0]).all() and (a[:, 1:] != b[:, 1:]).all()


# Rollouts.


@pytest.mark.parametrize("use_lstm", [[], ["--use_lstm"]])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_rollouts_are_contiguous_and_overlap_by_one_step(num_envs, use_lstm):
    env = environment.Environment(
        [gymnasium.make("torchbeast/Counter-v0") for _ in range(num_envs)]
    )
    flags = parse("--envs_per_actor", num_envs, *use_lstm)
    actor, buffers, arrays = make_actor(flags, env)
    rollouts = []
    for k in range(8):
        indices = [(k * num_envs + e) % flags.num_buffers for e in range(num_envs)]
        actor.rollout(arrays, indices)
        rollouts.append(map_structure(lambda x, i=indices: x[:, i].clone(), buffers))
    assert rollouts[0]["done"][0].all()
    for before, after in zip(rollouts, rollouts[1:]):
        for (name, x), (_, y) in zip(leaves(before), leaves(after)):
            if not name.startswith(("core_state", "action", "policy_logits")):
                torch.testing.assert_close(x[-1], y[0], msg=name, equal_nan=True)
    for rollout in rollouts:
        first = rollout["done"][1:]
        taken = rollout["action"].masked_fill(first, 0)
        torch.testing.assert_close(rollout["last_action"][1:], taken)
        last = rollout["terminated"] | rollout["truncated"]
        torch.testing.assert_close(last[:-1], first)
        # The behaviour policy's logits are those of the network on these very steps,
        # from this very state.
        outputs, _ = actor.model(rollout, rollout["core_state"])
        torch.testing.assert_close(
            outputs["policy_logits"][:-1], rollout["policy_logits"]
        )
        assert (rollout["episode_step"][~rollout["done"]] > 0).all()
    assert torch.cat([r["done"][1:] for r in rollouts]).any()


def test_batch_takes_the_asked_rollouts_in_time_major_order():
    buffers = {"x": torch.arange(24).view(3, 8), "core_state": ()}
    buffers.update(
        {k: torch.zeros(3, 8, dtype=torch.bool) for k in
         ("episode_end", "terminated", "truncated")},
        episode_return=torch.arange(24.0).view(3, 8),
        episode_step=torch.arange(24).view(3, 8),
        training_episode_return=torch.arange(24.0).view(3, 8),
    )  # fmt: skip
    buffers["episode_end"][0, 5] = True  # Counted with the rollout before.
    buffers["episode_end"][2, 5] = True
    buffers["truncated"][1, 2] = True
    batch, episodes, versions = monobeast.make_batch(buffers, [(5, 7), (2, 8)], CPU)
    assert batch["x"].tolist() == [[5, 2], [13, 10], [21, 18]]
    assert episodes == {
        "episode_return": [21.0],
        "episode_step": [21],
        "training_episode_return": [10.0],
    }
    assert versions == [7, 8]


# Weights.


def test_readers_of_shared_weights_never_see_two_versions_mixed():
    import threading

    model = torch.nn.Linear(300, 300)
    weights = actors.SharedWeights(model)

    def write():
        for version in range(1, 300):
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(version)
            weights.publish(model, version)

    writer = threading.Thread(target=write)
    writer.start()
    reader, seen = torch.nn.Linear(300, 300), []
    have = None
    while writer.is_alive() or have != 299:
        have = weights.fetch(reader, have)
        if have:
            values = torch.cat([p.flatten() for p in reader.parameters()]).unique()
            assert values.tolist() == [have]
            seen.append(have)
    writer.join()
    assert seen == sorted(seen)


# One update.


def test_learn_ignores_what_stands_at_transitions_that_are_not_real():
    env = environment.Environment(
        [gymnasium.make("torchbeast/Counter-v0") for _ in range(B)]
    )
    flags = parse("--unroll_length", 40, "--reward_clipping", "none")
    actor, batch = collect(flags, env)
    fake = batch["done"][1:]
    assert fake.any() and not fake.all()
    gradients = []
    for change in (False, True):
        if change:
            batch["action"][fake] = 1 - batch["action"][fake]
            batch["policy_logits"][fake] += torch.tensor([3.0, -3.0])
        actor.model.zero_grad()
        optimizer = torch.optim.SGD(actor.model.parameters(), 0)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        monobeast.learn(flags, actor.model, optimizer, scheduler, batch)
        gradients.append([p.grad.clone() for p in actor.model.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b)


def test_first_updates_are_no_longer_than_later_ones():
    flags = parse("--learning_rate", 0.01, "--epsilon", 1e-8, "--total_steps", 10**9)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer, scheduler = learner.create_optimizer(flags, model)
    for _ in range(300):  # The same gradient each time: every step has the same length.
        before = model.weight.item()
        model.weight.grad = torch.tensor([[5.0]])
        optimizer.step()
        scheduler.step()
        assert before - model.weight.item() == pytest.approx(0.01, rel=1e-3)


def test_learning_rate_falls_to_zero_at_the_last_step():
    flags = parse("--total_steps", T * B * 100)
    optimizer, scheduler = learner.create_optimizer(flags, torch.nn.Linear(1, 1))
    rates = []
    for _ in range(110):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates[98] > 0 and rates[99] == rates[109] == 0
    assert rates[50:] == sorted(rates[50:], reverse=True)


def test_checkpoint_round_trip_restores_weights_counters_and_random_numbers(tmp_path):
    flags = parse("--savedir", tmp_path, "--xpid", "x")
    model = torch.nn.Linear(3, 3)
    rng = experiment.get_rng_state()
    expected = (torch.rand(3).tolist(), np.random.rand(3).tolist())
    path = tmp_path / "model.tar"
    checkpoint = dict(model=model.state_dict(), flags=vars(flags), rng=rng, step=7)
    experiment.save_checkpoint(path, checkpoint)
    other = torch.nn.Linear(3, 3)
    loaded = experiment.load_checkpoint(path, flags, other)
    experiment.set_rng_state(loaded["rng"])
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist()) == expected
    torch.testing.assert_close(other.weight, model.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["model.tar"]
