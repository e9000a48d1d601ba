"""Games of two beside training and after it: ratings, and --opponent."""

import builtins
import math
import types

import numpy as np
import pytest

from examples import connect_four
from tests import turn_envs
from tests.programs import args, both, read_logs, refusal, succeeds
from torchbeast import environment, play, ratings, versus
from torchbeast.messages import BadInput

ENV = "tests.turn_envs:Duel"


def make_env(cls=turn_envs.Duel, **kwargs):
    return environment.Environment([cls(**kwargs)], opponents=0)


def played(env, me, other, num=200):
    """(returns, whether I was the first of the agents) of games."""
    flags = types.SimpleNamespace(video=None, seed=0, num_test_episodes=num)
    returns, first = [], []
    for own, _ in play.episodes(flags, env, versus.Sides(env, me, other)):
        returns.append(own)
        first.append(env.env.seats.rows[0][0] == env.env.agents[0])
    return np.array(returns), np.array(first)


def choosing(number):
    return lambda step: np.array([number])


# Players.


def test_each_side_is_played_by_its_own_player_whatever_its_place():
    env = make_env()
    returns, first = played(env, choosing(2), choosing(0))
    assert (returns == 1).all()  # The higher number wins a duel.
    assert 60 < first.sum() < 140
    returns, _ = played(env, choosing(0), choosing(1))
    assert (returns == -1).all()


def test_a_game_that_ends_before_the_judged_agents_turn_counts():
    returns, first = played(make_env(turn_envs.Fold), choosing(2), choosing(0), 20)
    assert (returns == 1).all() and 0 < first.sum() < 20
    returns, _ = played(make_env(turn_envs.Fold), choosing(0), choosing(2), 20)
    assert (returns == -1).all()


def test_a_random_player_takes_each_allowed_action_equally_often():
    env = make_env()
    env.initial(0)
    player = versus.Random(env, 1)
    mask = np.array([[True, False, True]])
    taken = [player({"action_mask": mask})[0] for _ in range(1000)]
    assert set(taken) == {0, 2} and abs(taken.count(0) - 500) < 70
    taken = [player({})[0] for _ in range(1500)]
    assert all(abs(taken.count(i) - 500) < 100 for i in range(3))


def test_a_person_is_shown_the_board_and_asked_until_the_action_is_legal(
    monkeypatch, capsys
):
    env = make_env()
    env.initial(0)
    answers = iter(["x", "1", "", "2"])
    monkeypatch.setattr(builtins, "input", lambda _: next(answers))
    player = versus.find(env, "human", 0, None)
    planes = np.zeros((2, 3, 2), np.int8)
    planes[0, 1] = 1, 0
    planes[1, 2] = 0, 1
    step = {"observation": {"observation": planes[None]},
            "action_mask": np.array([[True, False, True]])}  # fmt: skip
    assert player(step).tolist() == [2]
    text = capsys.readouterr().out
    assert ". X .\n. . O" in text and "one of [0, 2]" in text
    assert text.count("expected one of") == 3
    monkeypatch.setattr(builtins, "input", lambda _: (_ for _ in ()).throw(EOFError))
    with pytest.raises(KeyboardInterrupt):
        player(step)


def test_a_function_of_a_module_is_an_opponent():
    env = make_env()
    player = versus.find(env, "tests.test_versus:highest", 0, None)
    returns, _ = played(env, choosing(1), player, 20)
    assert (returns == -1).all()
    for name in ("tests.test_versus:nothing", "nowhere.at.all:f"):
        with pytest.raises(BadInput, match=f"--opponent {name}: "):
            versus.find(env, name, 0, None)


def highest(observation, legal, random):
    assert observation.shape == () and legal == [0, 1, 2]
    return legal[-1]


@pytest.mark.parametrize(("name", "given"), [("too_high", "3"), ("between", "1.5")])
def test_a_function_that_returns_no_legal_action_is_named(name, given):
    env = make_env()
    name = f"tests.test_versus:{name}"
    player = versus.find(env, name, 0, None)
    expected = rf"--opponent {name} returned {given}, expected one of \[0, 1, 2\]"
    with pytest.raises(BadInput, match=expected):
        played(env, choosing(1), player, 1)


def too_high(observation, legal, random):
    return 3


def between(observation, legal, random):
    return 1.5


def board(*lines):
    planes = np.zeros((6, 7, 2), np.int8)
    for i, line in enumerate(lines, 6 - len(lines)):
        for j, x in enumerate(line):
            if x != ".":
                planes[i, j, "XO".index(x)] = 1
    return {"observation": planes}


@pytest.mark.parametrize(
    ("lines", "column"),
    [
        (["XXX...."], 3),
        (["OOO....", "XXX.O.."], 3),
        ([".X.....", ".X.....", ".X..OO."], 1),
        (["...O...", "..OXX..", ".OXXO.."], None),
        (["....X..", "..XOO..", ".XOXO..", "XOOXX.."], 3),
        ([".OOO..X"], (0, 4)),
        (["OO.O...", "XX.OX.."], None),
    ],
)
def test_lookahead_wins_if_it_can_and_blocks_if_it_must(lines, column):
    for seed in range(20):
        random = np.random.default_rng(seed)
        x = connect_four.lookahead(board(*lines), list(range(7)), random)
        columns = column if isinstance(column, tuple) else (column,)
        assert column is None or x in columns


# Ratings.


def test_ratings_are_those_under_which_the_results_are_likeliest():
    true = {"random": 0, 1: 200, 2: 450, 3: 400}
    points = {}
    for one in true:
        for other in true:
            if one != other:
                chance = 1 / (1 + 10 ** ((true[other] - true[one]) / 400))
                points[one, other] = 1e6 * chance
    found = ratings.elo(points, "random")
    assert found == pytest.approx(true, abs=0.1)


def test_who_wins_all_games_has_a_rating_all_the_same():
    found = ratings.elo({(1, "random"): 10, ("random", 1): 0}, "random")
    assert found["random"] == 0
    assert found[1] == pytest.approx(400 * math.log10(10.5 / 0.5), abs=0.1)
    wins = {(1, "random"): 10, ("random", 1): 0, (2, 1): 10, (1, 2): 0}
    found = ratings.elo(wins, "random")
    assert found[2] == pytest.approx(2 * found[1], abs=0.1)


def test_snapshots_that_play_better_have_higher_ratings(monkeypatch):
    monkeypatch.setattr(ratings, "MAX_SNAPSHOTS", 4)
    env, flags = make_env(), types.SimpleNamespace(
        video=None, seed=0, num_test_episodes=20, test_actions=None
    )  # fmt: skip
    rated = ratings.Ratings(flags, env, Fixed(), Fixed())
    found = []
    for step, number in enumerate((0, 1, 1, 2, 2, 2)):
        returns, more = rated.add(step, number)
        assert len(returns) == 20
        found.append(more["eval_rating"])
        assert len(rated._weights) <= 4 and 0 in rated._weights
    assert found[0] < 0 < found[3] and found[0] < found[1] < found[5]
    assert abs(found[1] - found[2]) < 150


class Fixed:
    """An agent whose weights are the number of the action that it takes."""

    def __init__(self):
        self.net = self

    def load_state_dict(self, weights):
        self.number = weights

    def initial_state(self, batch_size):
        return ()

    def act(self, step, core_state, greedy=False):
        return {"action": 0 * step["reward"].long() + self.number}, core_state

    act_in_test = act


# The programs.


@pytest.mark.long
@both
def test_ratings_are_logged_and_opponents_are_played(module, savedir):
    run = args(module, savedir, "--opponents", 2, "--opponent_interval", 400,
               "--eval_interval_steps", 400, "--num_test_episodes", 4,
               "--log_interval_steps", 40, env=ENV, steps=20_000)  # fmt: skip
    succeeds(*run, module=module)
    rows = read_logs(savedir / "x")
    rated = [row for row in rows if row.get("eval_rating")]
    assert rated and all(-1 <= float(row["eval_return"]) <= 1 for row in rated)
    test = "--savedir", savedir, "--mode", "test", "--num_test_episodes", 20
    own = savedir / "x" / "model.tar"
    for opponent in ("random", own, "tests.test_versus:highest"):
        result = succeeds(*test, "--opponent", opponent, module=module)
        assert "mean return_as_ann" in result.stdout
    succeeds(*test, module=module)  # Against itself.


@pytest.mark.slow
def test_a_run_without_opponents_plays_against_one_too(savedir):
    succeeds(*args("monobeast", savedir, env=ENV, steps=400))
    test = "--savedir", savedir, "--mode", "test", "--opponent"
    result = succeeds(*test, "random")
    assert "mean return_as_bob" in result.stdout
    assert "no checkpoint at" in refusal(*test, savedir / "nothing.tar")


@pytest.mark.slow
def test_the_example_plays_connect_four_against_itself(savedir):
    pytest.importorskip("pettingzoo.classic.connect_four_v3")
    flags = args("monobeast", savedir, "--opponents", 1, "--agent",
                 "examples.connect_four", "--batch_size", 4, "--num_minibatches", 1,
                 env="pettingzoo.classic.connect_four_v3", steps=400)  # fmt: skip
    succeeds(*flags)
    test = "--savedir", savedir, "--mode", "test", "--num_test_episodes", 4
    succeeds(*test, "--opponent", "examples.connect_four:lookahead")


def test_an_opponent_is_for_tests_of_games_of_two(savedir):
    flags = args("monobeast", savedir, "--opponent", "random", env=ENV)
    assert "--opponent goes with --mode test" in refusal(*flags)
