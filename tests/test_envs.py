"""The environments of tests/envs.py: each tests its ability, and no other."""

import pathlib
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from tests import envs
from torchbeast.environment import Environment, make

NAMES = ["Catch", "CatchPixels", "Memory", "Bandit", "Counter", "Mock"]


@pytest.mark.parametrize("name", NAMES)
def test_small_environments_follow_the_api(name):
    env = gymnasium.make(f"torchbeast/{name}-v0")
    assert env.spec.entry_point == f"tests.envs:{name}"
    check_env(env.unwrapped, skip_render_check=True)


def test_small_environments_are_made_without_pytest_and_registered_twice():
    program = f"NAMES = {NAMES}"
    program += """
import importlib, warnings, gymnasium
warnings.simplefilter("error")
for name in NAMES:
    env = gymnasium.make(f"tests.envs:torchbeast/{name}-v0")
    env.reset(seed=0)
    env.step(0)
import tests.envs
importlib.reload(tests.envs)
gymnasium.make("torchbeast/Catch-v0")
"""
    root = pathlib.Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)


def test_ball_of_catch_falls_and_the_paddle_moves():
    env = envs.Catch()
    for seed in range(10):
        board, _ = env.reset(seed=seed)
        column, paddle = board[0].argmax(), 2
        for row in range(1, 10):
            action = int(env.np_random.integers(3))
            paddle = min(max(paddle + action - 1, 0), 4)
            board, reward, last, truncated, _ = env.step(action)
            expected = np.zeros((10, 5), np.float32)
            expected[row, column] = expected[9, paddle] = 1
            np.testing.assert_array_equal(board, expected)
            assert last == (row == 9) and not truncated
            assert reward == (0 if not last else 1 if paddle == column else -1)


def test_pixels_of_catch_show_its_board():
    env, pixels = envs.Catch(), envs.CatchPixels()
    board, _ = env.reset(seed=1)
    image, _ = pixels.reset(seed=1)
    for _ in range(9):
        assert set(np.unique(image)) == {0, 255}
        np.testing.assert_array_equal(image[4::8, 4::8, 0] / 255, board)
        np.testing.assert_array_equal(image[::8, 7::8, 0] / 255, board)
        board, image = env.step(2)[0], pixels.step(2)[0]


def test_catch_can_be_won_from_every_column():
    env, won = envs.Catch(), set()
    for seed in range(40):
        board, _ = env.reset(seed=seed)
        column, last = board[0].argmax(), False
        while not last:
            paddle = board[-1].argmax() if board[:-1].any() else column
            board, reward, last, _, _ = env.step(1 + np.sign(column - paddle))
        assert reward == 1
        won.add(int(column))
    assert won == set(range(5))


@pytest.mark.parametrize("delay", [0, 2, 5])
def test_memory_is_solved_by_who_remembers(delay):
    env, cues = envs.Memory(delay), set()
    for seed in range(10):
        observation, _ = env.reset(seed=seed)
        assert observation.tolist() in ([1, 0, 0], [0, 1, 0])
        cue = observation.argmax()
        for t in range(delay + 1):
            observation, reward, last, _, _ = env.step(0)
            assert reward == 0 and not last
            assert observation.tolist() == [0, 0, float(t == delay)]
        observation, reward, last, _, _ = env.step(cue)
        assert reward == 1 and last and not observation.any()
        cues.add(int(cue))
    assert cues == {0, 1}


def test_no_policy_of_observation_and_last_action_gains_anything_in_memory():
    """All of them: 4 observations, 2 last actions, so 2**8 deterministic policies."""
    seeds = {}
    env = envs.Memory()
    for seed in range(10):
        env.reset(seed=seed)
        seeds[env.cue] = seed
    returns = []
    for policy in range(2**8):
        total = 0
        for cue in (0, 1):
            observation, _ = env.reset(seed=seeds[cue])
            last, action = False, 0
            while not last:
                seen = int(observation @ [1, 2, 3])
                action = policy >> (2 * seen + action) & 1
                observation, reward, last, _, _ = env.step(action)
                total += reward
        returns.append(total / 2)
    assert max(returns) == 0


@pytest.mark.parametrize("nested", [False, True])
def test_bandit_pays_one_arm_of_each_context(nested):
    env, arms = envs.Bandit(n=4, nested=nested), {}
    for seed in range(60):
        observation, _ = env.reset(seed=seed)
        assert observation in env.observation_space
        context = observation["context"] if nested else observation
        arm = seed % 4
        _, reward, last, truncated, _ = env.step(arm)
        assert last and not truncated
        arms.setdefault(context, {})[arm] = reward
    assert len(arms) == 4
    for context, rewards in arms.items():
        assert rewards == {arm: float(arm == (context + 1) % 4) for arm in range(4)}


def test_mock_is_the_same_one_by_one_and_in_step():
    steps = []
    for env in (
        make("torchbeast/Mock-v0", 3),
        [gymnasium.make("torchbeast/Mock-v0") for _ in range(3)],
    ):
        env = Environment(env)
        steps.append([env.initial(0)])
        steps[-1] += [env.step([0, 1, 2]) for _ in range(2 * envs.Mock.length + 5)]
    for one, other in zip(*steps):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)
