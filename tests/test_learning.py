"""Does it learn? One ability each, to a known return, through the real program."""

import pytest

from tests.programs import read_logs, run

# Environment, flags, the return to reach, steps to reach it in.
ABILITIES = {
    "catch": ("tests.envs:torchbeast/Catch-v0", [], 0.9, 200_000),
    "memory": ("tests.envs:torchbeast/Memory-v0", ["--use_lstm"], 0.9, 60_000),
    "cartpole": ("CartPole-v1", [], 400, 300_000),
}


@pytest.mark.parametrize("mode", ["actors", "serial", "servers"])
@pytest.mark.parametrize("ability", ABILITIES)
def test_learns(ability, mode, tmp_path):
    env, args, goal, steps = ABILITIES[ability]
    if mode == "serial":
        args = [*args, "--num_actors", 0]
    module = "polybeast" if mode == "servers" else "monobeast"
    args = ["--env", env, "--total_steps", steps, "--seed", 1, *args]
    args += ["--savedir", tmp_path, "--xpid", "x"]
    result = run(*args, module=module, timeout_s=600)
    assert result.returncode == 0, result.stderr
    assert best_tenth(read_logs(tmp_path / "x")) >= goal


def best_tenth(rows):
    """The mean return of the run's best tenth. Not of its last: runs still swing then,
    and by how much depends on how the machine rounds."""
    rows = [row for row in rows if row["episode_return"]]
    n = max(1, len(rows) // 10)
    means = []
    for i in range(len(rows) - n + 1):
        episodes = [int(row["episodes"]) for row in rows[i : i + n]]
        returns = [float(row["episode_return"]) for row in rows[i : i + n]]
        total = sum(mean * count for mean, count in zip(returns, episodes))
        means.append(total / sum(episodes))
    return max(means)


def test_memory_cannot_be_solved_without_a_recurrent_network(tmp_path):
    env, _, _, steps = ABILITIES["memory"]
    result = run("--env", env, "--total_steps", steps, "--num_actors", 0,
                 "--savedir", tmp_path, "--xpid", "x")  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = [row for row in read_logs(tmp_path / "x") if row["episode_return"]]
    assert all(float(row["episode_return"]) < 0.6 for row in rows)
