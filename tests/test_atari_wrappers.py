"""Both implementations of the Atari preprocessing, against each other and ale-py."""

import copy

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

import atari_wrappers
from atari_wrappers import AtariEpisodes, is_atari, make_python, make_vector
from torchbeast.environment import Environment

ale_py = pytest.importorskip("ale_py")
pytest.importorskip("cv2")

PONG, BREAKOUT, SEAQUEST = (
    f"{game}NoFrameskip-v4" for game in ("Pong", "Breakout", "Seaquest")
)
FREEWAY = "FreewayNoFrameskip-v4"  # Without FIRE.


def make_vector_of_one(env_id, **kwargs):
    return make_vector(env_id, 1, **kwargs)


def make_single(env_id, **kwargs):
    return make_python(env_id, 1, **kwargs)


both = pytest.mark.parametrize(
    "make", [make_vector_of_one, make_single], ids=["vector", "single"]
)


def random_actions(env, n, seed=0):
    high = env.single_action_space.n
    return np.random.default_rng(seed).integers(high, size=(n, env.num_envs))


def play(env, actions, seed=0):
    """[(observation, reward, terminated, truncated, info)] from the reset on."""
    E = env.num_envs
    observation, info = env.reset(seed=seed)
    zeros = np.zeros(E, bool)
    return [(observation, np.zeros(E), zeros, zeros, info)] + [
        env.step(action) for action in actions
    ]


def assert_same_frames(vector, single, num_steps, seed=0):
    """Steps both with the same random actions; returns what happened, counted.

    No-ops at the start of a game are random: `single` is told to make those that
    `vector` has made, at each of its resets. In the step that it truncates, ale-py
    leaves the last screen out of the newest frame: that one is not compared.
    """

    def reset_single():
        noops = info["episode_frame_number"].item()
        observation, single_info = single.reset(options={"noops": noops})
        np.testing.assert_array_equal(single_info["episode_frame_number"], noops)
        return observation

    counts = {"ended": 0, "truncated": 0, "lost": 0, "paid": 0}
    observation, info = vector.reset(seed=seed)
    np.testing.assert_array_equal(observation, reset_single())
    over = False
    for t, action in enumerate(random_actions(vector, num_steps, seed)):
        observation, *ends, info = vector.step(action)
        if over:
            expected = reset_single()
            # Nothing is paid and nothing ends at a reset.
            np.testing.assert_array_equal(ends, np.zeros((3, 1)))
        else:
            expected, *expected_ends, expected_info = single.step(action)
            np.testing.assert_array_equal(ends, expected_ends, err_msg=f"step {t}")
            for name in ("lives", "episode_frame_number"):
                np.testing.assert_array_equal(info[name], expected_info[name])
            if "episode_end" in info:
                np.testing.assert_array_equal(
                    info["episode_end"], expected_info["episode_end"]
                )
        reward, terminated, truncated = (x.item() for x in ends)
        frames = np.s_[:, :-1] if truncated else np.s_[:]
        np.testing.assert_array_equal(
            observation[frames], expected[frames], err_msg=f"step {t}"
        )
        over = expected_info["episode_end"].item() and not over
        counts["ended"] += over
        counts["truncated"] += truncated
        counts["lost"] += terminated and not over
        counts["paid"] += reward != 0
    vector.close()
    single.close()
    return counts


@pytest.mark.parametrize(
    "env_id",
    [
        BREAKOUT,
        pytest.param(PONG, marks=pytest.mark.slow),
        pytest.param(SEAQUEST, marks=pytest.mark.slow),
    ],
)
def test_both_give_the_same_frames_rewards_and_ends(env_id):
    counts = assert_same_frames(make_vector(env_id, 1), make_single(env_id), 2000)
    assert counts["ended"] >= 2 and counts["paid"] > 5, counts
    assert (counts["lost"] > 5) == (env_id != PONG), counts


def test_both_give_the_same_on_all_actions_without_life_loss():
    kwargs = {"full_action_space": True, "terminal_on_life_loss": False}
    vector = make_vector(SEAQUEST, 1, **kwargs)
    counts = assert_same_frames(vector, make_single(SEAQUEST, **kwargs), 500, seed=1)
    assert counts["ended"] >= 1 and counts["lost"] == 0, counts


@pytest.mark.parametrize(
    "game, env_id, num_steps", [("breakout", BREAKOUT, 400), ("freeway", FREEWAY, 150)]
)
def test_single_gives_what_ale_py_gives_bare(game, env_id, num_steps):
    bare = ale_py.AtariVectorEnv(game, 1, reward_clipping=False)
    single = make_single(env_id, terminal_on_life_loss=False)
    assert bare.single_action_space == single.single_action_space
    counts = assert_same_frames(bare, single, num_steps)
    assert (counts["ended"] >= 1) == (game == "breakout"), counts


def test_vector_gives_what_ale_py_gives_bare():
    bare = ale_py.AtariVectorEnv("breakout", 2, reward_clipping=False)
    env = make_vector(BREAKOUT, 2, terminal_on_life_loss=False)
    actions = random_actions(env, 200)
    for step, expected in zip(play(env, actions, 5), play(bare, actions, 5)):
        for x, y in zip(step[:4], expected[:4]):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("make", [make_vector, make_python])
def test_games_of_one_vector_are_independent(make):
    env = make(BREAKOUT, 3)
    actions = random_actions(env, 80)
    steps = play(env, actions, seed=5)
    for e in range(3):
        alone = play(make(BREAKOUT, 1), actions[:, [e]], seed=5 + e)
        for step, expected in zip(steps, alone):
            for x, y in zip(step[:4], expected[:4]):
                np.testing.assert_array_equal(x[[e]], y)
    lost = np.array([step[2] for step in steps])
    assert lost.any(axis=0).all() and not (lost == lost[:, :1]).all()


# The truncation of very long games.


@pytest.mark.parametrize("env_id", [PONG, SEAQUEST])
def test_both_truncate_at_the_same_frame(env_id, monkeypatch):
    monkeypatch.setattr(atari_wrappers, "MAX_FRAMES", 200)
    counts = assert_same_frames(make_vector(env_id, 1), make_single(env_id), 250)
    assert counts["truncated"] >= 4, counts


@both
def test_truncation_ends_the_reported_episode_after_max_frames(make, monkeypatch):
    monkeypatch.setattr(atari_wrappers, "MAX_FRAMES", 200)
    env = Environment(make(PONG))
    steps = [env.initial(0)] + [env.step([0]) for _ in range(103)]
    expected = [t in (50, 101) for t in range(104)]
    assert [step["truncated"].item() for step in steps] == expected
    assert [step["episode_end"].item() for step in steps] == expected
    assert not any(step["terminated"].item() for step in steps)
    assert [t for t in range(104) if steps[t]["done"]] == [0, 51, 102]
    assert [steps[t]["episode_step"].item() for t in (50, 51, 101)] == [50, 0, 50]


def test_games_are_cut_off_after_half_an_hour_of_play():
    assert atari_wrappers.MAX_FRAMES == 30 * 60 * 60  # 60 frames per second.


# Lost lives.


@both
def test_lost_life_terminates_and_the_game_goes_on(make):
    env = make(BREAKOUT)
    # The score, counted from all that the game paid.
    score, life_score, lives, num_steps, over, was_last = 0, 0, 5, 0, False, False
    lost = ended = differ = 0
    environment = Environment(Tee(env))
    environment.initial(3)
    for action in random_actions(env, 700, seed=3):
        step = environment.step(action)
        _, reward, terminated, truncated, info = environment.env.env.last
        if over:
            score, num_steps, lives = 0, 0, 5
        else:
            num_steps += 1
        score += reward.item()
        life_score = 0 if was_last else life_score + reward.item()
        life_lost = info["lives"].item() < lives
        lives = info["lives"].item()
        over = lives == 0
        was_last = over or life_lost
        assert step["terminated"].item() == terminated.item() == was_last
        assert step["episode_end"].item() == over
        assert not step["truncated"].item()
        assert step["episode_step"].item() == num_steps
        assert step["episode_return"].item() == score
        assert step["training_episode_return"].item() == life_score
        lost += was_last and not over
        ended += over
        differ += over and score > life_score
    assert ended >= 2 and lost >= 4 * ended and differ >= 1
    env.close()


class Tee(VectorWrapper):
    """Keeps what the last step returned."""

    frames_per_step = 4

    def step(self, actions):
        self.last = super().step(actions)
        return self.last


@pytest.mark.parametrize("full_action_space", [False, True])
@both
def test_agent_that_does_nothing_loses_all_its_lives(make, full_action_space):
    """Breakout waits for FIRE before each life, forever."""
    env = make(BREAKOUT, full_action_space=full_action_space)
    steps = play(env, np.zeros((300, 1), int))
    lives = [info["lives"].item() for *_, info in steps]
    assert [x for x, y in zip(lives, lives[1:]) if x != y][:5] == [5, 4, 3, 2, 1]
    lost = [t for t, (_, _, terminated, *_) in enumerate(steps) if terminated.item()]
    ends = [t for t, (*_, info) in enumerate(steps) if info.get("episode_end", False)]
    assert lost[4] == ends[0] and len(ends) >= 1


@both
def test_without_life_loss_only_the_end_of_a_game_terminates(make):
    env = make(BREAKOUT, terminal_on_life_loss=False)
    steps = play(env, random_actions(env, 500))
    terminated = np.array([step[2].item() for step in steps])
    lives = np.array([info["lives"].item() for *_, info in steps])
    np.testing.assert_array_equal(terminated, lives == 0)
    assert terminated.sum() >= 1
    assert set(lives) == {0, 1, 2, 3, 4, 5}
    for *_, info in steps[1:]:
        np.testing.assert_array_equal(info["episode_end"], info["lives"] == 0)


class Game(VectorEnv):
    """Games of 3 lives of given lengths; keeps the actions. Autoresets. Pays 1."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space = spaces.Discrete(2)
    single_action_space = spaces.Discrete(6)

    def __init__(self, lengths, limit=100):
        self.num_envs = len(lengths)
        self.lengths = np.array(lengths)
        self.limit = limit
        self.actions = []

    def reset(self, *, seed=None, options=None):
        self.t = np.zeros(self.num_envs, int)
        self.over = np.zeros(self.num_envs, bool)
        self.lives = np.full(self.num_envs, 3)
        return self.t * 0, {"lives": self.lives}

    def step(self, actions):
        self.actions.append(actions.tolist())
        self.t = np.where(self.over, 0, self.t + 1)
        self.lives[:] = 3 - self.t // self.lengths  # In place, and not a copy.
        terminated = self.lives == 0
        truncated = self.t == self.limit
        reward = np.where(self.over, 0.0, 1.0)
        self.over = terminated | truncated
        return self.t * 0, reward, terminated, truncated, {"lives": self.lives}


MEANINGS = ["NOOP", "UP", "FIRE", "LEFT"]


def test_step_after_a_lost_life_presses_fire_where_it_was_lost():
    game = Game([2, 3])
    env = Environment(AtariEpisodes(game, MEANINGS, True))
    env.initial()
    steps = [env.step([5, 4]) for _ in range(11)]
    fire, (a, b) = 2, (5, 4)
    # Lives end after steps 2, 4, 6 of the first game, and 3, 6, 9 of the second; after
    # the third, an autoreset follows, to which the game's own action goes.
    expected = [
        [a, a, fire, a, fire, a, a, a, a, fire, a],
        [b, b, b, fire, b, b, fire, b, b, b, b],
    ]
    np.testing.assert_array_equal(np.array(game.actions).T, expected)
    terminated = np.array([step["terminated"] for step in steps]).T
    ends = np.array([step["episode_end"] for step in steps]).T
    done = np.array([step["done"] for step in steps]).T
    taken = np.array([step["last_action"] for step in steps]).T
    for e, (lost, end) in enumerate([([2, 4, 6, 9, 11], [6]), ([3, 6, 9], [9])]):
        np.testing.assert_array_equal(np.flatnonzero(terminated[e]) + 1, lost)
        np.testing.assert_array_equal(np.flatnonzero(ends[e]) + 1, end)
        np.testing.assert_array_equal(done[e, 1:], terminated[e, :-1])
        # To the agent, FIRE is no action of anybody's.
        np.testing.assert_array_equal(taken[e], np.where(done[e], 0, (a, b)[e]))
    scores = [step["episode_return"][0].item() for step in steps]
    assert scores == [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]
    training = [step["training_episode_return"][0].item() for step in steps]
    assert training == [1, 2, 0, 1, 0, 1, 0, 1, 2, 0, 1]


def test_life_may_be_lost_in_the_first_step_of_a_game():
    game = Game([1])
    steps = play(AtariEpisodes(game, MEANINGS, True), np.full((5, 1), 1))
    assert [step[2].item() for step in steps] == [t in (1, 2, 3, 5) for t in range(6)]
    assert game.actions == [[1], [2], [2], [1], [1]]


def test_game_without_fire_does_nothing_after_a_lost_life():
    game = Game([2])
    env = AtariEpisodes(game, ["NOOP", "UP"], True)
    play(env, np.full((5, 1), 1))
    assert game.actions == [[1], [1], [0], [1], [0]]


def test_no_action_is_replaced_without_life_loss():
    game = Game([2])
    env = AtariEpisodes(game, MEANINGS, False)
    steps = play(env, np.full((5, 1), 1))
    assert game.actions == [[1]] * 5
    assert not any(step[2].item() for step in steps)


def test_actions_of_the_caller_are_not_written_to():
    env = AtariEpisodes(Game([1]), MEANINGS, True)
    action = np.array([1])
    play(env, [action] * 3)
    assert action == [1]


def test_truncated_game_does_not_press_fire_when_it_starts_again():
    game = Game([4], limit=4)  # The life is lost in the very step that is cut off.
    env = AtariEpisodes(game, MEANINGS, True)
    steps = play(env, np.full((6, 1), 1))
    assert game.actions == [[1]] * 6
    assert [step[3].item() for step in steps] == [t == 4 for t in range(7)]
    assert [bool(step[4].get("episode_end")) for step in steps] == [
        t == 4 for t in range(7)
    ]


def test_reset_forgets_a_lost_life():
    game = Game([2])
    env = AtariEpisodes(game, MEANINGS, True)
    play(env, np.full((2, 1), 1))
    play(env, np.full((2, 1), 1))
    assert game.actions == [[1]] * 4


# Options.


def same_frames(a, b):
    return all(np.array_equal(x[0], y[0]) for x, y in zip(a, b))


@both
def test_sticky_actions_change_the_game_and_none_is_what_the_id_says(make):
    def frames(env_id, **kwargs):
        env = make(env_id, noop_max=1, **kwargs)
        return play(env, random_actions(env, 40))

    plain = frames("BreakoutNoFrameskip-v4", sticky_actions=0.0)
    sticky = frames("BreakoutNoFrameskip-v4", sticky_actions=0.25)
    assert not same_frames(plain, sticky)
    assert same_frames(plain, frames("BreakoutNoFrameskip-v4"))
    assert same_frames(sticky, frames("ALE/Breakout-v5"))
    assert same_frames(plain, frames("ALE/Breakout-v5", sticky_actions=0.0))


@both
@pytest.mark.parametrize(
    "env_id, num_actions", [(PONG, 6), (BREAKOUT, 4), (SEAQUEST, 18), (FREEWAY, 3)]
)
def test_action_space_is_minimal_or_has_18_actions(make, env_id, num_actions):
    assert Environment(make(env_id)).action_space.n == num_actions
    assert Environment(make(env_id, full_action_space=True)).action_space.n == 18


@both
@pytest.mark.parametrize("env_id, fire", [(PONG, 1), (FREEWAY, 0)])
def test_games_start_with_fire_and_a_random_number_of_no_ops(make, env_id, fire):
    def starts(n, **kwargs):
        env = make(env_id, **kwargs)
        seeds = [0] + [None] * (n - 1)  # A reset with a seed takes much longer.
        return {
            env.reset(seed=seed)[1]["episode_frame_number"].item() for seed in seeds
        }

    numbers = starts(20)
    assert len(numbers) > 10
    assert fire <= min(numbers) <= max(numbers) < atari_wrappers.NOOP_MAX == 30
    assert starts(3, noop_max=1) == {fire}
    assert max(starts(15, noop_max=4)) == 3


@both
def test_same_seed_gives_the_same_game_and_another_seed_another(make):
    env = make(BREAKOUT, sticky_actions=0.25)

    def frames(seed):
        return play(env, random_actions(env, 40), seed)

    assert same_frames(frames(1), frames(1))
    assert not same_frames(frames(1), frames(2))


# Observations.


@both
def test_observation_is_a_stack_of_four_frames_oldest_first(make):
    env = make(BREAKOUT)
    assert env.single_observation_space == spaces.Box(0, 255, (4, 84, 84), np.uint8)
    steps = play(env, random_actions(env, 400))
    starts, changes = 0, 0
    for (before, *_, info), (after, *_) in zip([(None, {})] + steps, steps):
        assert after.shape == (1, 4, 84, 84) and after.dtype == np.uint8
        if before is None or info.get("episode_end", False):
            assert not after[0, :3].any() and after[0, 3].any()
            starts += 1
        else:  # After a lost life, too: the game goes on.
            np.testing.assert_array_equal(after[0, :3], before[0, 1:])
            changes += not np.array_equal(after[0, 3], before[0, 3])
    assert starts >= 2 and changes > 200


@both
def test_later_steps_do_not_change_the_frames_of_earlier_ones(make):
    env = Environment(make(BREAKOUT))
    steps, copies = [], []
    for action in [None, *random_actions(env.env.env, 200)]:
        steps.append(env.initial(0) if action is None else env.step(action))
        copies.append(copy.deepcopy(steps[-1]))
    env.initial()
    for before, after in zip(copies, steps):
        for name in before:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)


@both
def test_rewards_are_not_clipped(make):
    env = make(SEAQUEST)
    rewards = {step[1].item() for step in play(env, random_actions(env, 400))}
    assert 20 in rewards


def test_frame_is_the_maximum_of_two_made_small_by_area():
    """Against the screens of the game itself, every fourth and the one before it."""
    import cv2

    game = gymnasium.make(
        SEAQUEST, frameskip=1, obs_type="grayscale", disable_env_checker=True
    )
    env = make_single(SEAQUEST, noop_max=1)
    env.reset(options={"noops": 1})
    game.reset()
    game.step(1)
    for action in random_actions(env, 40):
        screens = [game.step(action.item())[0] for _ in range(4)]
        expected = cv2.resize(
            np.maximum(*screens[2:]), (84, 84), interpolation=cv2.INTER_AREA
        )
        np.testing.assert_array_equal(env.step(action)[0][0, -1], expected)


# What else there is to know of a game.


@both
def test_environment_knows_the_frames_of_a_step(make):
    assert Environment(make(PONG)).frames_per_step == 4


@both
def test_fps_is_that_of_an_atari_2600(make):
    assert Environment(make(PONG)).fps == 60 / 4


def test_single_renders_the_screen_of_the_game():
    env = Environment(make_single(PONG, render_mode="rgb_array"))
    env.initial(0)
    env.step([0])
    frame = env.render()
    assert frame.shape == (210, 160, 3) and frame.dtype == np.uint8 and frame.any()
    env.close()


def test_is_atari_is_true_for_games_on_pixels():
    for env_id in (PONG, "Pong-v4", "ALE/Pong-v5", f"ale_py:{PONG}"):
        assert is_atari(env_id), env_id


@pytest.mark.parametrize("obs_type, expected", [("ram", False), ("rgb", True)])
def test_is_atari_is_false_for_games_on_ram(monkeypatch, obs_type, expected):
    spec = gymnasium.envs.registration.EnvSpec(
        f"Pong-{obs_type}-v4",
        entry_point="ale_py.env:AtariEnv",
        kwargs={"game": "pong", "obs_type": obs_type},
    )
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    assert is_atari(spec.id) == expected


@pytest.mark.parametrize("env_id", ["CartPole-v1", "NoSuchThing-v0", "Pong", ""])
def test_is_atari_is_false_for_other_environments(env_id):
    assert not is_atari(env_id)


@pytest.mark.parametrize("env_id", [PONG, "ALE/Pong-v5"])
def test_atari_without_ale_py_says_what_to_install(monkeypatch, env_id):
    monkeypatch.setattr(atari_wrappers, "ale_py", None)
    monkeypatch.delitem(gymnasium.registry, env_id)
    with pytest.raises(ValueError, match=f"{env_id}.*pip install ale-py"):
        is_atari(env_id)
    assert not is_atari("CartPole-v1")
