"""--save_replay: a run that is resumed goes on with what it had seen."""

import argparse
import errno
import os
import re
import sys

import numpy as np
import pytest
import torch

from tests import envs, programs
from tests.programs import main, read_logs, step
from tests.test_replay import B, Stacked, assert_same, one_by_one, rollouts_of, whole
from torchbeast import replay, replay_files
from torchbeast.messages import BadInput


def go_on(credit, directory):
    flags = argparse.Namespace(
        savedir=str(directory.parent),
        xpid=directory.name,
        save_replay=True,
        unroll_length=20,
    )
    replay_files.resume(credit, flags)


def write(ring, directory):
    """Writes a ring. Returns its Credit."""
    credit = replay.Credit(ring, 8.0, 100)
    credit.new, credit.learned, credit.num_before = 7, 50, -3
    replay_files.save(directory / "replay.bin", credit, 700)
    return credit


@pytest.mark.parametrize("make_env", [envs.Catch, Stacked])
@pytest.mark.parametrize("make", [whole, one_by_one])
@pytest.mark.parametrize("num", [2, 5], ids=["half-full", "wrapped"])
def test_a_ring_that_is_read_is_the_one_that_was_written(make_env, make, num, tmp_path):
    args = (4 * B,) if make is whole else (4 * B, 3)
    ring, again = make(*args), make(*args)
    *before, last = rollouts_of(make_env, num + 1)
    for batch in before:
        items = ring.add(batch)
        ring.set_priorities(items, np.random.default_rng(0).random(items.shape))
    credit, other = write(ring, tmp_path), replay.Credit(again, 8.0, 100)
    go_on(other, tmp_path)
    assert other.counters() == credit.counters()
    items = ring.add(last)
    assert again.add(last).tolist() == items.tolist()
    for x in (ring, again):
        x.set_priorities(items, np.full(items.shape, 2.0))
    assert (again.size, again.added) == (ring.size, ring.added)
    everything = np.arange(ring.size * ring.num_starts)
    assert_same(again.read(everything), ring.read(everything))
    for x in (ring, again):
        torch.manual_seed(0)
        x.drawn = x.sample(64, 0.5)
    assert again.drawn[1].tolist() == ring.drawn[1].tolist()
    assert_same(again.drawn[0], ring.drawn[0])
    assert again.age(everything) == ring.age(everything)


def saved(tmp_path, num_rollouts=4 * B):
    """Writes a ring with one batch. Returns (another ring, another batch)."""
    first, last = rollouts_of(envs.Catch, 2)
    ring = whole(4 * B)
    ring.set_priorities(ring.add(first), np.ones((1, B)))
    write(ring, tmp_path)
    return whole(num_rollouts), last


@pytest.mark.parametrize("name", ["whole", "whole_map"])
def test_an_entry_of_an_observation_may_have_any_name(name, tmp_path):
    first, last = rollouts_of(envs.Catch, 2)
    ring, again = whole(4 * B), whole(4 * B)
    for batch in (first, last):
        batch["observation"] = {name: batch["observation"]}
    ring.set_priorities(ring.add(first), np.ones((1, B)))
    write(ring, tmp_path)
    go_on(replay.Credit(again, 8.0, 100), tmp_path)
    for x in (ring, again):
        x.add(last)
    everything = np.arange(ring.size)
    assert_same(again.read(everything), ring.read(everything))


def test_a_ring_of_another_size_is_refused(tmp_path):
    again, _ = saved(tmp_path, 2 * B)
    with pytest.raises(BadInput, match=r"--replay_size \d+, .* is \d+: give \d+"):
        go_on(replay.Credit(again, 8.0, 100), tmp_path)


def test_a_file_of_other_shapes_is_refused(tmp_path):
    again, last = saved(tmp_path)
    go_on(replay.Credit(again, 8.0, 100), tmp_path)
    last["reward"] = last["reward"].double()
    with pytest.raises(BadInput, match="reward/data is <f4 .*, expected float64"):
        again.add(last)


@pytest.mark.parametrize("cut", [10, -10])
def test_a_damaged_file_is_refused(cut, tmp_path):
    again, last = saved(tmp_path)
    path = tmp_path / "replay.bin"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(BadInput, match="replay.bin cannot be gone on with"):
        go_on(replay.Credit(again, 8.0, 0), tmp_path)
        again.add(last)


@pytest.mark.parametrize("ratio", [2.0, 32.0])
def test_another_ratio_counts_from_now_on(ratio, tmp_path):
    again, last = saved(tmp_path)
    credit = replay.Credit(again, ratio, 100)
    go_on(credit, tmp_path)
    again.set_priorities(again.add(last), np.ones((1, B)))
    new = last["done"].shape[1] * 3
    updates = list(credit.updates(last, 3, 1))
    assert len(updates) == int(6 + ratio * new)  # 6 steps were owed.


def test_who_ends_before_the_file_is_read_leaves_it_as_it_is(tmp_path):
    again, _ = saved(tmp_path)
    before = (tmp_path / "replay.bin").read_bytes()
    credit = replay.Credit(again, 8.0, 100)
    go_on(credit, tmp_path)
    replay_files.save(tmp_path / "replay.bin", credit, 701)
    assert (tmp_path / "replay.bin").read_bytes() == before


def test_a_replay_without_a_rollout_is_no_file(tmp_path):
    write(whole(4 * B), tmp_path)
    assert not list(tmp_path.iterdir())


def test_several_learners_are_refused(monkeypatch):
    monkeypatch.setattr(replay_files.ranks.current, "num", 2)
    with pytest.raises(BadInput, match="--save_replay: 2 learners, expected one"):
        replay_files.check(argparse.Namespace(save_replay=True))


def run(path, steps, *args):
    args = ("--num_actors", 0, "--savedir", path, "--xpid", "x", "--seed", 1, *args)
    args += ("--agent", "r2d2", "--env", "CartPole-v1", "--replay_start", 100)
    args += ("--replay_ratio", 2)
    return main(*args, "--total_steps", steps, "--log_interval_steps", 1)


@pytest.mark.slow
def test_the_same_command_goes_on_with_the_replay(tmp_path):
    assert run(tmp_path, 1500, "--save_replay").returncode == 0
    result = run(tmp_path, 3000, "--save_replay")
    assert result.returncode == 0, result.stderr
    assert re.search(r"resuming .*replay.bin: \d+ rollouts", result.stderr)
    assert re.search(r"saving the replay: .*, [\d,]+ bytes", result.stderr)
    assert "the replay is empty" not in result.stderr
    rows = read_logs(tmp_path / "x")
    sizes = [float(row["replay_size"]) for row in rows]
    assert sizes == sorted(sizes) and sizes[-1] > 2000
    ratios = [float(row["replay_ratio"]) for row in rows]
    assert 1.7 < ratios[-1] <= 2


def test_a_full_disk_costs_the_replay_alone(tmp_path, monkeypatch):
    assert run(tmp_path, 600, "--save_replay").returncode == 0
    before = (tmp_path / "x" / "replay.bin").read_bytes()
    fsync = os.fsync

    def full(file):
        if "replay" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    result = run(tmp_path, 1200, "--save_replay")
    assert result.returncode == 0
    assert "the replay is not saved: No space left on device" in result.stderr
    assert step(tmp_path) == 1200
    assert (tmp_path / "x" / "replay.bin").read_bytes() == before
    assert not list((tmp_path / "x").glob("*.tmp"))


@pytest.mark.long
def test_a_benchmark_kills_a_run_twice_and_compares_it_with_a_whole_one(tmp_path):
    command = (
        "--agent r2d2 --no-use_lstm --save_replay --num_actors 0 --env CartPole-v1"
    )
    command += " --total_steps 6000 --log_interval_steps 640 --replay_start 1000"
    args = [*command.split(), "--checkpoint_interval_seconds", 1e-9]
    args = [sys.executable, "-m", "monobeast", *args]
    own = ["--seeds", 1, "--savedir", tmp_path]
    result = programs.run(*own, "--", *args, module="benchmarks.resumed")
    assert result.returncode == 0, result.stderr
    assert len(re.findall("resuming .*killed-1/replay.bin", result.stderr)) == 2
    assert not re.search("resuming .*whole-1", result.stderr)
    table = [line.split(" | ") for line in result.stdout.splitlines()]
    assert [line[0] for line in table[2:]] == [
        "| whole", "| seed 1", "| killed", "| seed 1"
    ]  # fmt: skip
    assert {len(line) for line in table[2:]} == {11}
