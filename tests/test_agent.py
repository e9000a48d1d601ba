"""The default agent and the parts of MonoBeast, in this process: networks, rollouts,
weights, one update.
"""

import copy
import functools
import itertools
import multiprocessing
import os
import threading
import time
import types
from collections import deque

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import monobeast
import polybeast
import r2d2
from tests import envs
from tests.faulty_envs import Nested
from tests.parallel_envs import Crowd
from tests.programs import read_logs, succeeds
from torchbeast import actors, checkpoint, environment, rollouts, seeds
from torchbeast.encoders import make_encoder
from torchbeast.flags import parse_args
from torchbeast.messages import BadInput, Stop
from torchbeast.nests import leaves, map_structure
from torchbeast.networks import LSTM, ActorCritic

R2D2 = functools.partial(r2d2.Net, num_quantiles=1, rescaled=False)
T, B = 5, 4
CPU = torch.device("cpu")


def parse(*args, agent="polybeast"):
    size = ["--unroll_length", T, "--batch_size", B, "--num_actors", 0]
    argv = [str(a) for a in ["--agent", agent, *size, *args]]
    flags = parse_args(monobeast.program_parser(agent), argv)
    monobeast.set_defaults(flags)
    return flags


def make_agent(flags, env):
    return polybeast.Agent(flags, env.observation_space, env.action_space)


def make_actor(flags, env, seed=0, agent=None):
    torch.manual_seed(seed)
    agent = agent or make_agent(flags, env)
    num = monobeast.num_buffers(flags, env.num_agents)
    specs = rollouts.specs(agent, env.initial(0), flags)
    buffers = actors.create_buffers(specs, num)
    arrays = map_structure(lambda x: x.numpy(), buffers)
    return monobeast.Actor(flags, env, agent, seed), buffers, arrays


def batches(actor, buffers, arrays, weights=None):
    """Yields what the actor fills, without end, as batches [T + 1, B, ...]."""
    free = list(range(actor.env.num_envs))

    def take(n):
        assert 0 < n <= len(free)
        return [free.pop(0) for _ in range(n)]

    weights = weights or actors.SharedWeights(actor.agent.net)
    for items in actor.rollouts(arrays, take, weights):
        indices = [index for index, _ in items]
        yield map_structure(lambda x, i=indices: x[:, i].clone(), buffers)
        free += indices


def collect(flags, env, seed=0):
    """(actor, batch): one batch of rollouts by the actor's own network."""
    actor, buffers, arrays = make_actor(flags, env, seed)
    actor.rollout(arrays, list(range(env.num_envs)))
    items = [(i, 0) for i in range(env.num_envs)]
    batch, episodes, versions = monobeast.make_batch(buffers, items, CPU, T)
    return actor, batch


def nested(num_envs=B):
    return environment.Environment([Nested() for _ in range(num_envs)])


# Networks.


@pytest.mark.parametrize("use_lstm", [[], ["--use_lstm"]])
@pytest.mark.parametrize(
    ("observation_space", "action_space", "num_logits"),
    [
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6), 6),
        (spaces.Box(0, 255, (96, 96, 3), np.uint8), spaces.Discrete(6), 6),
        (spaces.Box(0, 255, (7, 7, 3), np.uint8), spaces.MultiDiscrete([2, 5, 3]), 10),
        (spaces.Box(-1, 1, (), np.float64), spaces.MultiDiscrete([2, 5, 3]), 10),
        (
            spaces.Box(0, 9, (2, 3, 4, 5), np.uint16),
            spaces.MultiDiscrete([[2, 5], [3, 2]], start=[[1, 0], [-1, 3]]),
            12,
        ),
        (spaces.Discrete(5, start=-2), spaces.MultiBinary((2, 3)), 12),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), spaces.Discrete(6), 6),
        (spaces.MultiBinary([2, 3]), spaces.Discrete(6), 6),
        (Nested.observation_space, spaces.MultiDiscrete([2, 5, 3]), 10),
    ],
    ids=str,
)
def test_net_takes_any_space_and_ends_in_logits_and_baseline(
    observation_space, action_space, num_logits, use_lstm
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
    outputs, core_state = actor.agent.net(batch, batch["core_state"])
    assert outputs["policy_logits"].shape == (T + 1, B, num_logits)
    assert outputs["policy_logits"].dtype == torch.float32
    assert outputs["baseline"].shape == (T + 1, B)
    assert len(core_state) == (2 if use_lstm else 0)
    actor.agent.start_learning(CPU)
    stats = actor.agent.learn(batch)
    assert all(np.isfinite(float(x)) for x in stats.values())


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("net", [ActorCritic, R2D2])
def test_a_network_grows_with_the_number_of_actions_not_with_its_square(net, use_lstm):
    def parameters(num_actions):
        encoder = make_encoder(spaces.Box(-1, 1, (3,)))
        made = net(encoder, spaces.Discrete(num_actions), use_lstm=use_lstm)
        step = {
            "observation": torch.zeros(1, 2, 3),
            "reward": torch.zeros(1, 2),
            "done": torch.zeros(1, 2, dtype=torch.bool),
            "last_action": torch.tensor([[0, num_actions - 1]]),
        }
        outputs, _ = made(step, made.initial_state(2))
        outputs = next(iter(outputs.values()))
        assert not torch.equal(outputs[:, 0], outputs[:, 1])  # It reads the action.
        return sum(x.numel() for x in made.parameters())

    more = parameters(2000) - parameters(1000)
    assert more <= 1000 * (257 + 256 + 257)  # Of each action, what reads and makes it.


def test_impossible_choices_of_an_action_are_never_taken():
    flags = parse("--envs_per_actor", B)
    _, batch = collect(flags, nested())
    assert batch["action"].shape == (T, B, 2)
    assert (batch["action"] < torch.tensor([2, 5])).all()


def test_everything_that_is_not_a_weight_moves_with_the_net():
    flags = parse("--envs_per_actor", B, "--precision", "float32")
    net = make_agent(flags, nested()).net.to("meta")
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
    a, b = (actor.agent.net(batch, state)[0]["baseline"] for state in states)
    torch.testing.assert_close(a[3:, 0], b[3:, 0])
    assert (a[:3, 0] != b[:3, 0]).all() and (a[:, 1:] != b[:, 1:]).all()


def test_lstm_over_a_rollout_is_its_cell_step_by_step():
    lstm, done = LSTM(3, 7), torch.rand(T, B) < 0.3
    x = torch.randn(T, B, 3, requires_grad=True)
    state = torch.randn(1, B, 7), torch.randn(1, B, 7)
    h, c = (s[0] for s in state)
    outputs = []
    for x_t, done_t in zip(x, done):
        keep = (~done_t)[:, None].float()
        h, c = lstm(x_t, (keep * h, keep * c))
        outputs.append(h)
    of_cells, unrolled = torch.stack(outputs), lstm.unroll(x, done, state)
    torch.testing.assert_close(unrolled, (of_cells, (h[None], c[None])))
    torch.testing.assert_close(
        *(
            torch.autograd.grad(out.square().sum(), (x, *lstm.parameters()))
            for out in (unrolled[0], of_cells)
        )
    )


# Rollouts.


@pytest.mark.parametrize("burn_in", [0, 2, 2 * T])
@pytest.mark.parametrize("use_lstm", [[], ["--use_lstm"]])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_rollouts_are_contiguous_and_overlap(num_envs, use_lstm, burn_in, monkeypatch):
    monkeypatch.setattr(polybeast.Agent, "burn_in", burn_in, raising=False)
    env = environment.Environment(
        [gymnasium.make("torchbeast/Counter-v0") for _ in range(num_envs)]
    )
    flags = parse("--envs_per_actor", num_envs, *use_lstm)
    actor, buffers, arrays = make_actor(flags, env)
    rollouts = []
    for k in range(8):
        num = buffers["done"].shape[1]
        indices = [(k * num_envs + e) % num for e in range(num_envs)]
        actor.rollout(arrays, indices)
        rollouts.append(map_structure(lambda x, i=indices: x[:, i].clone(), buffers))
    assert rollouts[0]["done"][0].all()
    for before, after in zip(rollouts, rollouts[1:]):
        for (name, x), (_, y) in zip(leaves(before), leaves(after)):
            if name.startswith(("action", "policy_logits")):
                torch.testing.assert_close(x[T:], y[:burn_in], msg=name)
            elif not name.startswith("core_state"):
                torch.testing.assert_close(x[T:], y[: burn_in + 1], msg=name)
    for rollout in rollouts:
        first = rollout["done"][1:]
        taken = rollout["action"].masked_fill(first, 0)
        torch.testing.assert_close(rollout["last_action"][1:], taken)
        last = rollout["terminated"] | rollout["truncated"]
        torch.testing.assert_close(last[:-1], first)
        # The behaviour policy's logits are those of the network on these very steps,
        # from this very state.
        outputs, _ = actor.agent.net(rollout, rollout["core_state"])
        torch.testing.assert_close(
            outputs["policy_logits"][:-1], rollout["policy_logits"]
        )
        assert (rollout["episode_step"][~rollout["done"]] > 0).all()
    assert torch.cat([r["done"][1:] for r in rollouts]).any()


@pytest.mark.parametrize("burn_in", [0, 2])
@pytest.mark.parametrize("indices", [[0, 1], [1, 0]], ids=["a slice", "a list"])
def test_a_rollout_goes_on_though_the_buffers_before_are_anothers(indices, burn_in):
    env = environment.Environment([envs.Counter() for _ in range(2)])
    actor, buffers, arrays = make_actor(parse("--envs_per_actor", 2), env)
    actor.burn_in = burn_in
    actor.core_states = deque(actor.core_states, maxlen=burn_in + 1)
    arrays = map_structure(lambda x: np.concatenate([x, x[:burn_in]]), arrays)
    actor.rollout(arrays, indices)
    K, before = burn_in + 1, arrays["observation"][T:, indices].copy()
    arrays["observation"][:] = -1  # As another actor would fill them.
    actor.rollout(arrays, [2, 3])
    np.testing.assert_array_equal(arrays["observation"][:K, [2, 3]], before)


@pytest.mark.parametrize(
    ("args", "buffers"),
    [([], {}), (["--one_episode_rollouts"], {}), ([], {"waits": None})],
)
def test_actors_get_free_buffers_by_turns(args, buffers):
    class Connection:
        def __init__(self):
            self.got = []

        def send(self, indices):
            self.got.append(indices)

    buffers = {"done": torch.zeros(1, 8), **buffers}
    flags = parse(*args)
    processes = actors.ActorProcesses(None, flags, 2, 0, buffers, None, None)
    members = [
        types.SimpleNamespace(index=i, connection=Connection(), held=set())
        for i in range(3)
    ]
    processes._actors = list(members)
    processes.free([])
    for _ in range(30):  # A slow learner: two buffers come back at a time.
        actor = next(x for x in processes._actors if len(x.held) >= 2)
        full = list(actor.held)[:2]
        actor.held.difference_update(full)
        processes.free(full)
    counts = [sum(map(len, actor.connection.got)) for actor in members]
    assert min(counts) > 0.7 * max(counts), counts
    # In few messages: who still starts reads none, and a pipe has little room.
    assert all(len(actor.connection.got) < 30 for actor in members)
    assert len(members[0].connection.got[0]) > 2


@pytest.fixture
def actor(monkeypatch):
    """An actor whose process does nothing, and the list of those that were killed."""
    ours, theirs = multiprocessing.Pipe()
    killed, waits = [], []

    def kill(process):
        killed.append(process)
        theirs.close()

    process = types.SimpleNamespace(
        pid=1,
        exitcode=-9,
        is_alive=lambda: True,
        join=lambda timeout=0: waits.append(timeout),
    )
    monkeypatch.setattr(actors, "kill_group", kill)
    long_ago = time.monotonic() - 10_000
    return types.SimpleNamespace(
        index=0, process=process, connection=ours, held=set(), ready=False,
        started_at=long_ago, killed=killed, waits=waits,
    )  # fmt: skip


def actor_processes(actor, *args):
    buffers = {"done": torch.zeros(1, 8)}
    processes = actors.ActorProcesses(None, parse(*args), 2, 0, buffers, None, None)
    processes._actors = [actor]
    return processes


@pytest.mark.survives("environment-hangs")
def test_an_actor_that_hangs_while_it_starts_is_killed(actor):
    processes = actor_processes(actor, "--max_actor_restarts", 0)
    with pytest.raises(Stop, match="actor 0 died after 0 restarts"):
        processes.run()
    assert actor.killed


@pytest.mark.parametrize("ready", [True, False])
def test_only_actors_that_still_import_are_not_waited_for(ready, actor):
    actor.ready = ready
    with actor_processes(actor):
        pass
    assert (actor.waits[0] > 10) is ready


def test_buffers_that_shared_memory_has_no_room_for_are_refused():
    env = environment.Environment([envs.Counter()])
    agent = make_agent(flags := parse(), env)
    specs = rollouts.specs(agent, env.initial(0), flags)
    with pytest.raises(BadInput, match="bytes of shared memory, /dev/shm has"):
        actors.check_limits(flags, 2_000_000_000, specs, agent.net)


def one_episode_rollouts(steps, e, unroll_length):
    """[(begin, end)] of row e's rollouts by the definition: they end with their
    episode, or after T steps, and have no step of an agent that is out."""
    begin, result = None, []
    for t in range(len(steps)):
        if steps[t]["done"][e]:
            begin = t
        elif begin is None:
            pass
        elif steps[t]["terminated"][e] or steps[t]["truncated"][e]:
            result.append((begin, t))
            begin = None
        elif t - begin == unroll_length:
            result.append((begin, t))
            begin = t
    return result


@pytest.mark.parametrize(
    ("make_env", "use_lstm"),
    [
        (lambda: gymnasium.make("CartPole-v1"), []),
        (lambda: gymnasium.make("CartPole-v1"), ["--use_lstm"]),
        (Crowd, ["--use_lstm"]),  # Its agents leave and join.
    ],
)
def test_rollouts_of_one_episode_are_padded_and_masked(make_env, use_lstm):
    flags = parse("--envs_per_actor", 3, "--one_episode_rollouts", *use_lstm)
    env = environment.Environment([make_env() for _ in range(3)])
    actor, buffers, arrays = make_actor(flags, env)
    steps, states, step = [actor.step], [actor.core_states[-1]], env.step
    env.step = lambda action: steps.append(step(action)) or steps[-1]
    act = actor.agent.act

    def remember(step, core_state):
        outputs, core_state = act(step, core_state)
        states.append(core_state)
        return outputs, core_state

    actor.agent.act = remember
    got = []
    for batch in batches(actor, buffers, arrays):
        for b in range(batch["done"].shape[1]):
            got.append(map_structure(lambda x, b=b: x[:, b : b + 1], batch))
        if len(steps) > 60:
            break
    expected = [
        (end, e, begin)
        for e in range(env.num_envs)
        for begin, end in one_episode_rollouts(steps, e, T)
    ]
    assert len(got) == len(expected) and len({e - b for e, _, b in expected}) > 2
    for rollout, (end, e, begin) in zip(got, sorted(expected)):
        n = end - begin
        for name in steps[0]:
            real = np.stack([s[name][e] for s in steps[begin : end + 1]])
            np.testing.assert_array_equal(rollout[name][: n + 1, 0], real)
        assert rollout["mask"][:, 0].tolist() == [True] * (n + 1) + [False] * (T - n)
        assert rollout["done"][n + 1 :].all() and not rollout["done"][1 : n + 1].any()
        for name in ("reward", "terminated", "truncated", "episode_end"):
            assert not rollout[name][n + 1 :].any()
        for x, y in zip(rollout["core_state"], states[begin]):
            torch.testing.assert_close(x[:, 0], y[:, e])
        outputs, _ = actor.agent.net(rollout, rollout["core_state"])
        torch.testing.assert_close(
            outputs["policy_logits"][:n], rollout["policy_logits"][:n]
        )
        assert (rollout["policy_logits"][n:] == rollout["policy_logits"][n - 1]).all()


def test_padding_is_learned_from_by_nobody():
    flags = parse("--one_episode_rollouts")
    env = environment.Environment([gymnasium.make("CartPole-v1") for _ in range(B)])
    actor, buffers, arrays = make_actor(flags, env)
    for batch in batches(actor, buffers, arrays):
        if not batch["mask"].all():
            break
    outputs, _ = actor.agent.net(batch, batch["core_state"])
    loss, _ = actor.agent.loss(batch, outputs)
    gradient = torch.autograd.grad(loss, outputs["policy_logits"])[0].abs().sum(-1)
    real = batch["mask"][1:] & ~batch["done"][1:]
    assert real.any() and not real.all()
    assert torch.equal(gradient[:-1] > 0, real)


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
    batch, episodes, versions = monobeast.make_batch(buffers, [(5, 7), (2, 8)], CPU, 2)
    assert batch["x"].tolist() == [[5, 2], [13, 10], [21, 18]]
    assert {name: x.tolist() for name, x in episodes.items()} == {
        "episode_return": [21, 1],
        "episode_step": [21, 1],
        "training_episode_return": [10, 1],
    }
    assert versions == [7, 8]


# Weights.


def test_readers_of_shared_weights_never_see_two_versions_mixed():
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
    args = "--unroll_length", 40, "--reward_clipping", "none", "--num_epochs", 1
    flags = parse(*args)
    actor, batch = collect(flags, env)
    fake = batch["done"][1:]
    assert fake.any() and not fake.all()
    actor.agent.start_learning(CPU)
    weights = copy.deepcopy(actor.agent.net.state_dict())
    gradients = []
    for change in (False, True):
        if change:
            batch["action"][fake] = 1 - batch["action"][fake]
            batch["policy_logits"][fake] += torch.tensor([3.0, -3.0])
        actor.agent.net.load_state_dict(weights)
        actor.agent.learn(batch)
        gradients.append([p.grad for p in actor.agent.net.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b)


class OneWeight(polybeast.Agent):
    """Learns from the gradient 5, whatever the batch."""

    def make_net(self, observation_space, action_space):
        class Weight(nn.Linear):
            def forward(self, step, core_state):
                return {}, ()

        return Weight(1, 1, bias=False)

    def loss(self, *_):
        return 5 * self.net.weight.sum(), {}


BATCH = {
    "observation": torch.zeros(T + 1, B),
    "reward": torch.zeros(T + 1, B),
    "done": torch.zeros(T + 1, B, dtype=torch.bool),
    "core_state": (),
}


def test_first_updates_are_no_longer_than_later_ones():
    flags = parse(
        "--reward_clipping", "none", "--learning_rate", 0.01, "--epsilon", 1e-8,
        "--total_steps", 10**9, "--num_epochs", 1,
    )  # fmt: skip
    agent = OneWeight(flags, None, spaces.Discrete(2))
    agent.start_learning(CPU)
    for _ in range(300):  # The same gradient each time: every step has the same length.
        before = agent.net.weight.item()
        agent.learn(BATCH)
        assert before - agent.net.weight.item() == pytest.approx(0.01, rel=1e-3)


def test_learning_rate_falls_to_zero_at_the_last_step():
    flags = parse("--reward_clipping", "none", "--total_steps", T * B * 100)
    agent = OneWeight(flags, None, spaces.Discrete(2))
    agent.start_learning(CPU)
    rates = [agent.learn(BATCH)["learning_rate"] for _ in range(110)]
    assert rates[99] > 0 and rates[100] == rates[109] == 0
    assert rates[50:] == sorted(rates[50:], reverse=True)


def test_gradients_are_clipped_and_their_norm_before_that_is_logged():
    flags = parse("--reward_clipping", "none", "--grad_norm_clipping", 2)
    agent = OneWeight(flags, None, spaces.Discrete(2))
    agent.start_learning(CPU)
    assert agent.learn(BATCH)["grad_norm"] == pytest.approx(5)
    assert agent.net.weight.grad.item() == pytest.approx(2, rel=1e-4)


def test_what_an_agent_saves_another_one_loads_and_learns_on_alike():
    flags = parse("--use_lstm")
    env = nested()
    actor, batch = collect(flags, env)
    one = actor.agent
    one.start_learning(CPU)
    one.learn(batch)
    other = make_agent(flags, env)
    other.start_learning(CPU)
    other.load_state_dict(one.state_dict())
    stats, expected = other.learn(batch), one.learn(batch)
    assert list(stats) == list(expected)
    for name in stats:
        torch.testing.assert_close(stats[name], expected[name], rtol=0, atol=0)
    actor = make_agent(flags, env)  # It does not learn, and needs the weights only.
    actor.load_state_dict({"model": one.state_dict()["model"]})
    for a, b in zip(actor.net.parameters(), one.net.parameters()):
        assert torch.equal(a, b)
    with pytest.raises(KeyError, match="optimizer"):
        other.load_state_dict({"model": one.state_dict()["model"]})


# A2C.


def test_the_preset_a2c_learns_from_the_policy_that_acted_and_by_a2cs_loss(tmp_path):
    args = ["--preset", "a2c", "--env", "CartPole-v1"]
    flags = parse_args(monobeast.program_parser(), args)
    monobeast.set_defaults(flags)
    flags.precision, B, T = "float32", flags.batch_size, flags.unroll_length
    env = environment.Environment([gymnasium.make("CartPole-v1") for _ in range(B)])
    _, buffers, arrays = actor = make_actor(flags, env)
    # By the third batch, episodes have ended.
    batch = next(itertools.islice(batches(*actor), 2, None))
    agent = actor[0].agent
    outputs, _ = agent.net(batch, batch["core_state"])
    _, statistics = agent.loss(batch, outputs)
    returns, value = [], outputs["baseline"][-1]
    for t in reversed(range(T)):
        value = batch["reward"][t + 1] + 0.99 * ~batch["terminated"][t + 1] * value
        returns.insert(0, value)
        # Nothing leads from a last observation to a first one: its value is its own.
        value = torch.where(batch["done"][t + 1], outputs["baseline"][t], value)
        returns[0] = value
    advantages = torch.stack(returns).detach() - outputs["baseline"][:-1]
    log_prob = outputs["policy_logits"][:-1].log_softmax(-1)
    log_prob = log_prob.gather(-1, batch["action"][..., None])[..., 0]
    pg_loss = -(log_prob * advantages.detach()).sum() / (~batch["done"][1:]).sum()
    torch.testing.assert_close(statistics["pg_loss"], pg_loss)
    succeeds(*args, "--total_steps", 800, "--savedir", tmp_path, "--xpid", "x",
             "--log_interval_steps", 80)  # fmt: skip
    assert {row["policy_lag"] for row in read_logs(tmp_path / "x")} == {"0.0"}


# Checkpoints.


def test_a_checkpoint_holds_what_an_agent_says_and_random_numbers(tmp_path):
    flags = parse("--savedir", tmp_path, "--xpid", "x")
    net = nn.Linear(3, 3)
    rng = seeds.get_rng_state()
    expected = (torch.rand(3).tolist(), np.random.rand(3).tolist())
    path = tmp_path / "model.tar"
    saved = dict(agent={"net": net.state_dict()}, flags=vars(flags), rng=rng, step=7)
    checkpoint.write(path, saved)
    loaded = checkpoint.read(path, flags)
    seeds.set_rng_state(loaded["rng"])
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist()) == expected
    other = nn.Linear(3, 3)
    checkpoint.load_weights(other, loaded["agent"]["net"])
    torch.testing.assert_close(other.weight, net.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["model.tar"]


@pytest.mark.parametrize("links", [True, False])
def test_the_newest_checkpoints_are_kept_though_the_clock_was_set_back(
    links, tmp_path, monkeypatch
):
    def no_links(*_):
        raise PermissionError

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    path, now = tmp_path / "model.tar", time.time()
    for step in range(1, 6):
        path.unlink(missing_ok=True)
        path.write_text(str(step))
        at = now + step - (3600 if step > 2 else 0)
        os.utime(path, (at, at))
        checkpoint.keep(path, step, 2)
        names = [f"model-{i:012d}.tar" for i in (step - 1, step) if i > 0]
        assert sorted(p.name for p in tmp_path.glob("model-*")) == names
        assert (tmp_path / names[-1]).read_text() == str(step)


@pytest.mark.survives("checkpoint-does-not-fit")
@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Linear(3, 2), r"weight is \(3, 3\) in the .* \(2, 3\) in the network"),
        (nn.Linear(3, 3, bias=False), r"bias is \(3,\) in the .* not there in the net"),
        (nn.Sequential(nn.Linear(3, 3)), r"0.weight is not there in the checkpoint"),
    ],
)
def test_weights_of_another_network_are_refused_by_the_first_difference(net, message):
    with pytest.raises(checkpoint.OtherNetwork, match=message):
        checkpoint.load_weights(net, nn.Linear(3, 3).state_dict())
