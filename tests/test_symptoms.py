"""What is said of a run whose rewards are clipped, or whose loss explodes."""

import argparse
import logging
import re

import numpy as np
import pytest
import torch

from tests import envs
from tests.programs import args, succeeds
from torchbeast.messages import log
from torchbeast.symptoms import (
    GROWTH,
    MIN_LOSSES,
    NUM_REWARDS,
    Symptoms,
    clips_rewards,
)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO)
    log.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records]
    log.removeHandler(caplog.handler)


def symptoms(reward_clipping="abs_one", normalize_rewards=False):
    return Symptoms(argparse.Namespace(flags=argparse.Namespace(**locals())))


def see_rewards(watch, rewards):
    """Updates of 4 rewards each. The first one of a batch was in the batch before."""
    for part in np.reshape(rewards, (-1, 4)):
        batch = {"reward": torch.tensor([99.0, *part])[:, None]}
        seen = watch.of_rewards(batch)
        watch.see({}, None if seen is None else seen.tolist())


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        (NUM_REWARDS * [1.0], None),
        (NUM_REWARDS * [-5.0], r"^100 %.*largest is 5:.*--reward_clipping none"),
        (60 * [-20.0] + 40 * [1.0], "^60 %.*largest is 20"),
        (40 * [-20.0] + 60 * [1.0], None),
        (2000 * [0.0] + NUM_REWARDS * [7.0], "^100 %"),  # They are rare.
        ((NUM_REWARDS - 4) * [7.0], None),  # Too few.
        (NUM_REWARDS * [1.0] + NUM_REWARDS * [7.0], None),  # Not the first ones.
    ],
)
def test_most_rewards_are_clipped(rewards, words, lines):
    watch = symptoms()
    see_rewards(watch, rewards)
    if words is None:
        assert not lines()
    else:
        see_rewards(watch, NUM_REWARDS * [7.0])
        [line] = lines()  # Once.
        assert re.search(words, line)


@pytest.mark.parametrize(
    "flags", [dict(reward_clipping="none"), dict(normalize_rewards=True)]
)
def test_rewards_that_are_not_clipped_are_not_looked_at(flags, lines):
    watch = symptoms(**flags)
    assert watch.of_rewards({"reward": torch.ones(3, 2)}) is None
    see_rewards(watch, NUM_REWARDS * [7.0])
    assert not lines()
    # Nor are those of several policies.
    assert symptoms().of_rewards({"tagger": {}, "runner": {}}) is None


@pytest.mark.parametrize(("of_runner", "clips"), [("none", False), ("abs_one", True)])
def test_several_policies_clip_rewards_if_all_do(of_runner, clips):
    def of(clipping):
        return argparse.Namespace(flags=argparse.Namespace(reward_clipping=clipping))

    agents = {"tagger": of("abs_one"), "runner": of(of_runner)}
    assert clips_rewards(argparse.Namespace(agents=agents)) is clips


def see_losses(watch, losses):
    for x in losses:
        watch.see({"total_loss": x, "grad_norm": 1e30})


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (200 * [3.0] + [2.9e6], None),
        (200 * [3.0] + [-3.1e6, 5e6], r"^total_loss is 3.1e\+06, and was 3:"),
        (200 * [1e-9] + 200 * [1e3], None),  # No rewards, then some.
        (200 * [0.0] + [1.1e6], "and was 1:"),
        (20 * [3.0, -2.0, 1e5] + [3.1e6], "and was 3:"),  # With some very large.
        (list(2.0 ** np.arange(0, 40, 0.1)), "^total_loss"),  # Little by little.
        (100 * [1e5] + 200 * [2.0] + [2.1e6], "and was 2:"),
        ([1.3e7] + 50 * [2e3], None),
        ((MIN_LOSSES - 1) * [1.0] + [2 * GROWTH], None),  # So few say nothing.
    ],
)
def test_a_loss_is_a_million_times_what_it_was(losses, words, lines):
    watch = symptoms()
    see_losses(watch, losses)
    if words is None:
        assert not lines()
    else:
        [line] = lines()  # Once.
        assert re.search(words, line)


class Explodes(envs.Bandit):
    """Pays 5, and after some steps a trillion."""

    steps = 0

    def step(self, action):
        Explodes.steps += 1
        observation, _, *rest = super().step(action)
        return observation, 5.0 if Explodes.steps < 1500 else 1e12, *rest


@pytest.mark.slow
def test_a_run_says_both(savedir, monkeypatch):
    monkeypatch.setattr(envs, "Bandit", Explodes)
    Explodes.steps = 0
    env = "tests.envs:torchbeast/Bandit-v0"
    serial = "--num_actors", 0
    flags = *serial, "--reward_clipping", "abs_one"
    result = succeeds(*args("monobeast", savedir, *flags, env=env, steps=2000))
    assert result.stderr.count("% of the rewards that are not 0 are clipped") == 1
    assert "and was" not in result.stderr
    Explodes.steps = 0
    flags = *serial, "--reward_clipping", "none"
    words = args("monobeast", savedir / "2", *flags, env=env, steps=4000)
    result = succeeds(*words)
    assert "rewards that are not 0" not in result.stderr
    assert len(re.findall("loss is .* and was", result.stderr)) == 1
