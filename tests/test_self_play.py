"""Self-play with a pool of past policies: --opponents."""

import re
from collections import Counter

import numpy as np
import pytest
import torch

from tests import envs, parallel_envs, turn_envs
from tests.programs import args, load, poly_first, read_logs, refusal, succeeds
from tests.test_agent import T, make_actor, parse
from torchbeast import environment, export, policies, seats
from torchbeast.checkpoint import check_agent_state
from torchbeast.messages import BadInput, log
from torchbeast.nests import leaves, map_structure

CPU = torch.device("cpu")


def make_env(cls=turn_envs.Two, E=2, opponents=3, **kwargs):
    made = [cls(**kwargs) for _ in range(E)]
    return environment.Environment(made, opponents=opponents)


def made_batches(num, *flags, cls=turn_envs.Two, opponents=3):
    """(agent, batches): what an actor fills in self-play."""
    flags = parse("--opponents", opponents, "--envs_per_actor", 2, *flags)
    env = make_env(cls, opponents=opponents)
    torch.manual_seed(0)
    agent = policies.make_agent(flags, env)
    agent.net.eval()
    actor, buffers, arrays = make_actor(flags, env, 3, agent)
    free, made = list(range(len(buffers["reward"][0]))), []

    def take(n, least=None):
        return [free.pop(0) for _ in range(n)]

    for items in actor.rollouts(arrays, take, Weights()):
        indices = [index for index, _ in items]
        made.append(map_structure(lambda x, i=indices: x[:, i].clone(), buffers))
        free += indices
        if len(made) == num:
            agent.net.train()
            return agent, made


class Weights:
    def fetch(self, net, version):
        return 0


def same(nest, other):
    pairs = zip(leaves(nest), leaves(other))
    return all(torch.equal(x, y) for (_, x), (_, y) in pairs)


def copy(net):
    return map_structure(torch.clone, dict(net.state_dict()))


# Who plays.


def test_the_learner_has_each_side_once_in_two_games_and_the_pool_is_drawn_from():
    drawn = seats.Seats(["a", "b"], 1, "game", opponents=3)
    drawn.seed(1)
    sides, first, slots = Counter(), Counter(), Counter()
    for i in range(4000):
        drawn.draw(0)
        assert sorted(drawn.rows[0]) == ["a", "b"] and drawn.numbers[0] == 0
        sides[drawn.rows[0][0]] += 1
        first[drawn.rows[0][0]] += i % 2  # A game's own turns are not the sides'.
        slots[int(drawn.numbers[1])] += 1
        assert abs(sides["a"] - sides["b"]) == (i + 1) % 2
    assert abs(first["a"] - first["b"]) < 200
    assert slots.keys() == {0, 1, 2, 3}
    assert abs(slots[0] - 4000 * seats.AGAINST_ITSELF) < 150
    past = [slots[i] for i in (1, 2, 3)]
    assert max(past) - min(past) < 120


def test_against_itself_alone_there_is_one_policy_and_sides_change():
    env = make_env(opponents=0)
    seen, step = set(), env.initial(1)
    assert "policy" not in step and env.policies == {}
    for _ in range(200):
        seen.add(tuple(env.env.seats.rows[0]))
        step = env.step(env.some_action())
    assert len(seen) == 2


@pytest.mark.parametrize("cls", [turn_envs.Two, parallel_envs.Pair])
def test_steps_are_those_of_agents_that_stay_in_their_places(cls):
    E = 3
    found, plain = make_env(cls, E), make_env(cls, E, opponents=None)
    step, expected = found.initial(4), plain.initial(4)
    names, rng, swapped = cls.possible_agents, np.random.default_rng(0), 0
    for _ in range(300):
        rows = [e * 2 + names.index(a) for e in range(E)
                for a in found.env.seats.rows[e]]  # fmt: skip
        moves = ~step["waits"] if "waits" in step else step["reward"] == step["reward"]
        for name in ("observation", "reward", "done", "terminated", "truncated",
                     "last_action", "episode_end", "episode_step", "episode_return",
                     "training_episode_return"):  # fmt: skip
            x, y = step[name][moves], expected[name][rows][moves]
            if name == "observation" or not step["done"].all():
                np.testing.assert_array_equal(x, y, name)
        action = rng.integers(5, size=2 * E)
        theirs = np.zeros_like(action)
        theirs[rows] = action
        before = [list(x) for x in found.env.seats.rows]
        step, expected = found.step(action), plain.step(theirs)
        swapped += before != found.env.seats.rows
    assert swapped > 10


def test_the_same_seed_draws_the_same_players():
    drawn = []
    for _ in range(2):
        env = make_env()
        steps = [env.initial(3), *(env.step(env.some_action()) for _ in range(100))]
        drawn.append(np.array([step["policy"] for step in steps]))
    assert (drawn[0] == drawn[1]).all() and len(np.unique(drawn[0])) > 2


# Learning.


@pytest.mark.parametrize("flags", [[], ["--use_lstm"]])
def test_past_policies_change_at_snapshots_alone(flags):
    agent, made = made_batches(20, *flags, "--opponent_interval", 2 * T * 8)
    agent.start_learning(CPU)
    past = [agent.agents[name].net for name in agent.frozen]
    first = copy(agent.learner.net)
    assert all(same(copy(net), first) for net in past)
    assert not any(p.requires_grad for net in past for p in net.parameters())
    replaced = []
    for batch in made:
        before, num = [copy(net) for net in past], agent._num_snapshots()
        statistics = agent.learn(batch)
        assert ("total_loss" in statistics) == bool((batch["policy"] == 0).any())
        changed = [i for i, (x, net) in enumerate(zip(before, past))
                   if not same(x, copy(net))]  # fmt: skip
        assert len(changed) == agent._num_snapshots() - num
        for i in changed:
            assert same(copy(past[i]), copy(agent.learner.net))
        replaced += changed
    assert len(replaced) >= 4
    following = [(i + 1) % 3 for i in replaced[:-1]]
    assert replaced[1:] == following  # The oldest, each time.


def test_past_policies_have_nothing_to_learn_with(monkeypatch):
    lines = []
    monkeypatch.setattr(log, "warning", lines.append)
    flags = parse("--opponents", 2, "--total_steps", 2000, agent="r2d2")
    made = [policies.make_agent(flags, make_env(opponents=2)) for _ in range(2)]
    for agent in made:
        agent.start_learning(CPU)
    assert len([x for x in lines if "copies of the target" in x]) == 2
    agent, other = made
    state = agent.state_dict()
    assert state["past1"].keys() == {"model"} and "target" in state["learner"]
    check_agent_state(agent)
    other.load_state_dict(state)
    assert same(copy(other.net), copy(agent.net))


def test_what_the_past_does_is_not_learned_from(monkeypatch):
    monkeypatch.setattr(seats, "AGAINST_ITSELF", 0.5)
    agent, made = made_batches(60)
    batch = map_structure(lambda *xs: torch.cat(xs, 1), *made)
    assert (batch["policy"] > 0).any()
    [own] = agent.split(batch).values()
    rows = (batch["policy"] == 0).any(0)
    theirs = batch["policy"][:, rows] > 0
    assert own["done"].shape == theirs.shape and theirs.any()
    assert own["done"][theirs].all() and not own["reward"][theirs].any()
    assert torch.equal(own["done"][~theirs], batch["done"][:, rows][~theirs])
    assert torch.equal(own["reward"][~theirs], batch["reward"][:, rows][~theirs])


def test_returns_are_the_learners_and_apart_those_of_the_past(monkeypatch):
    monkeypatch.setattr(seats, "AGAINST_ITSELF", 0.3)
    agent, made = made_batches(12)
    for batch in made:
        found = agent.ended_episodes(batch, T)
        end, past = batch["episode_end"][1:], batch["policy"][1:] > 0
        returns = batch["episode_return"][1:]
        for name, which in ("episode_return", ~past), ("episode/opponent_return", past):
            own = end & which
            torch.testing.assert_close(
                found[name], torch.stack([returns[own].sum(), own.sum()])
            )


# Bad input.


@pytest.mark.parametrize(
    ("cls", "more", "message"),
    [
        (turn_envs.Table, {}, "table_v0 has the agents .'ann', 'bob', 'cem'., exp"),
        (turn_envs.Two, {"policies": "a=*"}, "do not go together"),
        (envs.Counter, {}, "--opponents: .* is no environment of PettingZoo's"),
    ],
)
def test_what_is_no_game_of_two_is_refused(cls, more, message):
    with pytest.raises(BadInput, match=message):
        environment.Environment([cls()], opponents=1, **more)


def test_an_interval_has_an_update_or_more(savedir):
    flags = args("monobeast", savedir, "--opponents", 2, "--opponent_interval", 39,
                 env="tests.turn_envs:Two")  # fmt: skip
    assert re.search("39: expected at least the 40 steps of an upd", refusal(*flags))


def test_past_policies_have_no_flags_of_their_own(savedir):
    flags = args("monobeast", savedir, "--opponents", 2, "--freeze", "past1",
                 env="tests.turn_envs:Two")  # fmt: skip
    assert "has one policy, whose flags are the program's own" in refusal(*flags)


# The programs.


@poly_first
def test_a_pool_is_learned_against_and_resumed(module, savedir):
    run = args(module, savedir, "--opponents", 2, "--opponent_interval", 200,
               "--log_interval_steps", 100, env="tests.turn_envs:Answer",
               steps=600)  # fmt: skip
    succeeds(*run, module=module)
    saved = load(savedir)["agent"]
    assert saved.keys() == {"learner", "past1", "past2"}
    assert not same(saved["past1"]["model"], saved["past2"]["model"])
    rows = read_logs(savedir / "x")
    assert any(row["episode/opponent_return"] for row in rows)
    assert rows[-1]["total_loss"]
    out = savedir / "agent.pt2"
    assert export.main(["--savedir", str(savedir), "--out", str(out)]) == 0
    assert out.stat().st_size > 0  # The learner alone.
    result = succeeds(*run, "--total_steps", 680, module=module)
    assert "resuming" in result.stderr
    then = load(savedir)["agent"]
    for name in ("past1", "past2"):
        assert same(then[name]["model"], saved[name]["model"])
    assert not same(then["learner"]["model"], saved["learner"]["model"])


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param("ppo", marks=pytest.mark.slow),
        pytest.param("r2d2", marks=pytest.mark.long),
        pytest.param("pqn", marks=pytest.mark.long),
    ],
)
def test_each_agent_plays_against_its_past(savedir, agent):
    others = {"r2d2": ["--replay_start", 100, "--replay_size", 1000]}
    flags = args("monobeast", savedir, "--opponents", 2, "--opponent_interval", 200,
                 "--agent", agent, "--batch_size", 4, "--use_lstm",
                 *others.get(agent, ["--num_minibatches", 1]),
                 env="tests.turn_envs:Two", steps=1200)  # fmt: skip
    succeeds(*flags)
