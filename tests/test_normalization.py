"""Running statistics of observations and rewards."""

import itertools
import threading

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import monobeast
import polybeast
from tests import envs
from tests.parallel_envs import Crowd
from tests.programs import main, read_logs, succeeds
from tests.test_agent import batches as acted_batches
from tests.test_agent import collect, make_actor, parse
from torchbeast import checkpoint, environment, ranks
from torchbeast.normalization import (
    LIMIT,
    NormalizedEncoder,
    NormalizedRewards,
    RunningStatistics,
)

OBSERVATIONS = ("--normalize_observations",)
REWARDS = ("--normalize_rewards",)


def batches(seed=0):
    rng = np.random.default_rng(seed)
    return [
        torch.from_numpy(rng.normal(1e6, (1, 1e-3), (n, 2)).astype(np.float64))
        for n in (1, 50, 7, 1000)
    ]


def test_they_are_the_mean_and_variance_of_all_that_came():
    statistics = RunningStatistics((2,))
    for x in batches():
        statistics.update(x)
    everything = torch.cat(batches()).numpy()
    np.testing.assert_allclose(statistics.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(statistics.variance, everything.var(0), rtol=1e-4)
    assert statistics.count == len(everything)


def test_before_anything_came_numbers_stay_as_they_are_but_for_the_limit():
    x = torch.tensor([0.0, -3.0, 1e9])
    normalized = RunningStatistics()(x)
    torch.testing.assert_close(normalized, torch.tensor([0.0, -3.0, LIMIT]))


def test_constant_observations_become_zero_and_not_nan():
    statistics = RunningStatistics((1,))
    statistics.update(torch.full((10, 1), 5.0))
    assert statistics(torch.full((3, 1), 5.0)).eq(0).all()


def test_those_of_two_ranks_are_one(monkeypatch):
    meeting = threading.Barrier(2)
    sent = [None, None]

    class Rank:
        num = 2

        def sum(self, x):
            sent[own.rank] = x.clone()
            meeting.wait()
            x.copy_(sent[0] + sent[1])
            meeting.wait()

    own = threading.local()
    monkeypatch.setattr(ranks, "current", Rank())
    first, second = torch.rand(10, 3), torch.rand(20, 3)
    both, other = RunningStatistics((3,)), RunningStatistics((3,))

    def run(rank, statistics, x):
        own.rank = rank
        statistics.update(x)

    thread = threading.Thread(target=run, args=(1, other, second))
    thread.start()
    run(0, both, first)
    thread.join()
    assert torch.equal(both.variance, other.variance)
    expected = torch.cat([first, second])
    np.testing.assert_allclose(both.mean, expected.mean(0), rtol=1e-6)
    np.testing.assert_allclose(both.variance, expected.var(0, correction=0), rtol=1e-6)


@pytest.mark.parametrize("constant", [123456.789, 1e8 / 3, -1e-3, 3e38, 1e200])
@pytest.mark.parametrize("n", [1, 77, 651])
def test_a_constant_of_any_size_has_no_variance(constant, n):
    statistics = RunningStatistics((1,))
    for _ in range(3):
        x = torch.full((n, 1), constant, dtype=torch.float64)
        statistics.update(x)
        assert 0 <= statistics.variance < 1e-20 * min(constant, 1e100) ** 2
        assert statistics(x).isfinite().all()


def test_the_first_batch_may_be_far_from_zero():
    x = torch.from_numpy(1e8 + np.random.default_rng(1).normal(size=(100, 1)))
    statistics = RunningStatistics((1,))
    statistics.update(x)
    np.testing.assert_allclose(statistics.variance, x.var(0, correction=0), rtol=1e-6)


def test_the_largest_rewards_become_numbers():
    normalized = NormalizedRewards(0.99)
    batch = {
        "reward": torch.full((5, 2), 3e38),
        "done": torch.zeros(5, 2, dtype=torch.bool),
    }
    state = normalized.initial_state(2)
    normalized.update(batch, state)
    assert normalized(batch["reward"]).isfinite().all()


def test_of_nothing_the_variance_is_one():
    statistics = RunningStatistics((2,))
    x, none = torch.full((3, 1, 2), 7.0), torch.zeros(3, 1, dtype=torch.bool)
    statistics.update(x, counted=none)
    assert statistics.count == 0 and not statistics.mean.any()
    assert torch.equal(statistics.variance, torch.ones(2, dtype=torch.float64))


def test_where_an_episode_begins_no_return_is_counted():
    # Episodes of one step, which is rewarded by 1 or -1.
    normalized = NormalizedRewards(0.99)
    done = torch.arange(9)[:, None] % 2 == 0
    reward = torch.tensor([0, 1, 0, -1] * 2 + [0.0])[:, None]
    batch = {"reward": reward, "done": done}
    normalized.update(batch, normalized.initial_state(1))
    assert normalized.statistics.count == 4
    torch.testing.assert_close(normalized(reward), reward)


def test_bools_are_numbers():
    statistics = RunningStatistics((2,))
    x = torch.tensor([[True, False], [False, False]])
    statistics.update(x)
    np.testing.assert_allclose(statistics(x), [[1, 0], [-1, 0]], rtol=1e-6)


def test_only_numbers_are_normalized():
    space = spaces.Dict(
        image=spaces.Box(0, 255, (16, 16, 3), np.uint8),
        pair=spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]),
        bytes=spaces.Box(0, 255, (4,), np.uint8),
    )
    seen = []

    class Encoder(torch.nn.Module):
        out_features = 1

        def forward(self, x):
            seen.append(x)
            return torch.zeros(len(x["bytes"]), 1)

    encoder = NormalizedEncoder(space, Encoder())
    observation = {
        "image": torch.full((5, 16, 16, 3), 7, dtype=torch.uint8),
        "pair": (torch.ones(5, dtype=torch.int64), torch.randn(5, 2) + 50),
        "bytes": torch.arange(20, dtype=torch.uint8).view(5, 4),
    }
    encoder.take_in(encoder.numbers(observation))
    encoder(observation)
    for got, expected in (
        (seen[0]["image"], observation["image"]),
        (seen[0]["pair"][0], observation["pair"][0]),
    ):
        assert got is expected
    for numbers in seen[0]["pair"][1], seen[0]["bytes"]:
        zeros, ones = torch.zeros(numbers.shape[1]), torch.ones(numbers.shape[1])
        torch.testing.assert_close(numbers.mean(0), zeros, rtol=0, atol=1e-4)
        torch.testing.assert_close(numbers.std(0, correction=0), ones)


def test_the_discounted_return_crosses_rollouts_and_ends_with_episodes():
    flags = parse(*REWARDS, "--discounting", 0.5)
    env = environment.Environment([envs.Counter(), envs.Counter()])
    actor, buffers, arrays = make_actor(flags, env)
    rewards, dones, got = [], [], []
    normalized = NormalizedRewards(0.5)
    for _ in range(4):
        actor.rollout(arrays, [0, 1])
        items = [(0, 0), (1, 0)]
        batch, _, _ = monobeast.make_batch(
            buffers, items, torch.device("cpu"), flags.unroll_length
        )
        first = 1 if rewards else 0
        rewards += batch["reward"][first:].tolist()
        dones += batch["done"][first:].tolist()
        got += normalized.returns(batch, batch["core_state"][1])[first:].tolist()
    expected, g = [], np.zeros(2)
    for reward, done in zip(rewards, dones):
        g = np.where(done, 0, np.array(reward) + 0.5 * g)
        expected.append(g)
    assert any(any(done) for done in dones[1:])
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("flag", ["--normalize_rewards", "--reward_clipping=none"])
def test_learned_rewards_are_divided_and_reported_ones_are_not(flag):
    flags = parse(flag)
    env = environment.Environment([envs.Counter() for _ in range(4)])
    actor, batch = collect(flags, env)
    actor.agent.start_learning(torch.device("cpu"))
    before = actor.agent.rewards(batch)
    torch.testing.assert_close(before, batch["reward"][1:])
    actor.agent.learn(batch)
    after = actor.agent.rewards(batch)
    if flag == "--normalize_rewards":
        returns = actor.agent.normalized_rewards.returns(batch, batch["core_state"][1])
        std = returns[1:].std(correction=0)
        torch.testing.assert_close(after, batch["reward"][1:] / std)
    else:
        torch.testing.assert_close(after, before)


def test_rewards_of_which_an_episode_has_one_keep_their_proportions():
    L, B = 400, 32
    rewards = NormalizedRewards(0.99)
    reward = torch.zeros(L + 1, B)
    reward[-1] = 1
    reward[-1, 0] = -3
    done = torch.zeros(L + 1, B, dtype=torch.bool)
    done[0] = True
    batch = {"reward": reward, "done": done}
    rewards.update(batch, rewards.initial_state(B))
    assert 3 * rewards.statistics.scale() > LIMIT
    learned = rewards(torch.tensor([-3.0, 1.0, 0.5, 4.0]))
    expected = torch.tensor([-10, 10 / 3, 10 / 6, 10])
    torch.testing.assert_close(learned, expected)


def test_one_enormous_reward_does_not_hide_the_others():
    rewards = NormalizedRewards(0.0)
    reward = torch.randn(2001, 8)
    reward[5, 5] = 1e6
    batch = {"reward": reward, "done": torch.zeros(2001, 8, dtype=torch.bool)}
    rewards.update(batch, rewards.initial_state(8))
    batch["reward"] = torch.randn(2001, 8)
    for _ in range(10):
        rewards.update(batch, rewards.initial_state(8))
    scale = rewards.statistics.scale().item()
    assert rewards(torch.tensor(1.0)).item() == pytest.approx(scale / 10)


def test_what_acted_on_a_batch_learns_from_it_by_the_same_statistics():
    flags = parse(*OBSERVATIONS)
    env = environment.Environment([envs.Counter() for _ in range(4)])
    actor, batch = collect(flags, env)
    actor.agent.start_learning(torch.device("cpu"))
    outputs, _ = actor.agent.unroll(batch, batch["core_state"])
    torch.testing.assert_close(outputs["policy_logits"][:-1], batch["policy_logits"])
    actor.agent.learn(batch)
    assert actor.agent.net.encoder.statistics[0].count == batch["done"][1:].numel()


class Echo(gymnasium.Env):
    """Shows one number and then three zeros; acts on nothing."""

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.uniform(-1, 1, 1).astype(np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 0.0, self.t == 3, False, {}


@pytest.mark.parametrize("T", [pytest.param(2, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("one_episode", [[], ["--one_episode_rollouts"]])
def test_each_observation_of_an_episode_is_taken_in_once(one_episode, T):
    flags = parse(*OBSERVATIONS, *one_episode, "--unroll_length", T)
    env = environment.Environment([Echo() for _ in range(4)])
    agent = polybeast.Agent(flags, env.observation_space, env.action_space)
    agent.start_learning(torch.device("cpu"))
    acted = acted_batches(*make_actor(flags, env, agent=agent))
    for batch in itertools.islice(acted, 100):
        agent.update_statistics(batch)
    (statistics,) = agent.net.encoder.statistics
    # A quarter of all are first ones, of variance 1 / 3, and the others are 0.
    assert statistics.variance.item() == pytest.approx(1 / 12, rel=0.2)


@pytest.mark.parametrize("T", [pytest.param(2, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("one_episode", [[], ["--one_episode_rollouts"]])
def test_all_observations_but_those_of_agents_that_are_out_are_taken_in(one_episode, T):
    flags = parse(*OBSERVATIONS, *one_episode, "--unroll_length", T)
    env = environment.Environment([Crowd() for _ in range(2)])
    steps, step = [env.initial(0)], env.step
    env.step = lambda action: steps.append(step(action)) or steps[-1]
    agent = polybeast.Agent(flags, env.observation_space, env.action_space)
    agent.start_learning(torch.device("cpu"))
    acted = acted_batches(*make_actor(flags, env, agent=agent))
    for batch in itertools.islice(acted, 100):
        agent.update_statistics(batch)
    there = np.concatenate([x["observation"] for x in steps])
    there = there[there.any(1)]  # The others are zeros.
    (statistics,) = agent.net.encoder.statistics
    # What was last seen is not in a batch yet.
    assert 0 <= len(there) - statistics.count <= env.num_envs * (T + 1)
    np.testing.assert_allclose(statistics.mean, there.mean(0), rtol=0.1)
    np.testing.assert_allclose(statistics.variance, there.var(0), rtol=0.1)


def test_they_are_published_to_actors_and_in_checkpoints():
    flags = parse(*OBSERVATIONS, *REWARDS)
    env = environment.Environment([envs.Counter() for _ in range(4)])
    actor, batch = collect(flags, env)
    agent = actor.agent
    agent.start_learning(torch.device("cpu"))
    agent.learn(batch)
    others = polybeast.Agent(flags, env.observation_space, env.action_space)
    others.start_learning(torch.device("cpu"))
    data = checkpoint.to_bytes(agent.state_dict())
    others.load_state_dict(checkpoint.from_bytes(data))
    largest = agent.normalized_rewards.largest
    assert torch.equal(others.normalized_rewards.largest, largest) and largest > 0
    mean = agent.net.encoder.statistics[0].mean
    assert (mean != 0).any()
    assert torch.equal(others.net.encoder.statistics[0].mean, mean)
    expected = agent.normalized_rewards.statistics.variance
    assert torch.equal(others.normalized_rewards.statistics.variance, expected)
    assert "encoder.statistics.0.mean" in agent.net.state_dict()  # Published.
    older = checkpoint.from_bytes(data)
    del older["normalized_rewards"]["largest"]
    others.load_state_dict(older)


@pytest.mark.parametrize(
    ("agent", "lstm"), [("polybeast", ["--use_lstm"]), ("ppo", []), ("pqn", [])]
)
def test_a_normalized_run_resumes_and_is_tested(agent, lstm, tmp_path):
    args = [
        "--agent", agent, "--env", "CartPole-v1", "--num_actors", 0, *OBSERVATIONS,
        *REWARDS, *lstm, "--savedir", tmp_path, "--xpid", "x", "--batch_size", 4,
        "--envs_per_actor", 4, "--log_interval_steps", 100, "--unroll_length", 10,
    ]  # fmt: skip
    if agent != "polybeast":
        args += ["--num_minibatches", 2]
    for steps in (400, 800):
        succeeds(*args, "--total_steps", steps)
    assert int(read_logs(tmp_path / "x")[-1]["step"]) == 800
    result = main(*args, "--mode", "test", "--num_test_episodes", 1)
    assert result.returncode == 0 and "1 episodes" in result.stdout, result.stderr
