"""Does it learn? One ability each, to a known return, through the real program."""

import pytest

from tests.programs import read_logs, run

# Environment, flags, the return to reach, steps to reach it in.
ABILITIES = {
    "catch": ("tests.envs:torchbeast/Catch-v0", [], 0.9, 200_000),
    "memory": ("tests.envs:torchbeast/Memory-v0", ["--use_lstm"], 0.9, 60_000),
    "cartpole": ("CartPole-v1", [], 400, 300_000),
}


@pytest.mark.parametrize("mode", ["actors", "serial"])
@pytest.mark.parametrize("ability", ABILITIES)
def test_learns(ability, mode, tmp_path):
    env, args, goal, steps = ABILITIES[ability]
    if mode == "serial":
        args = [*args, "--num_actors", 0]
    args = ["--env", env, "--total_steps", steps, "--seed", 1, *args]
    result = run("--savedir", tmp_path, "--xpid", "x", *args, timeout_s=600)
    assert result.returncode == 0, result.stderr
    rows = [row for row in read_logs(tmp_path / "x") if row["episode_return"]]
    last = rows[-len(rows) // 20 :]  # The last twentieth of the run.
    episodes = sum(int(row["episodes"]) for row in last)
    total = sum(float(row["episode_return"]) * int(row["episodes"]) for row in last)
    assert total / episodes >= goal


def test_memory_cannot_be_solved_without_a_recurrent_network(tmp_path):
    env, _, _, steps = ABILITIES["memory"]
    result = run("--env", env, "--total_steps", steps, "--num_actors", 0,
                 "--savedir", tmp_path, "--xpid", "x")  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = [row for row in read_logs(tmp_path / "x") if row["episode_return"]]
    assert all(float(row["episode_return"]) < 0.6 for row in rows)
