"""Does it learn? One ability each, to a known return, through the real program."""

import itertools
import signal
import time

import pytest

from tests.programs import ROOT, Program, main, read_logs

# Environment, flags, the return to reach, steps to reach it in: several times as many
# as are needed mostly, as it is chance when a run finds out what pays.
ABILITIES = {
    "catch": ("tests.envs:torchbeast/Catch-v0", [], 0.9, 300_000),
    "memory": ("tests.envs:torchbeast/Memory-v0", ["--use_lstm"], 0.9, 150_000),
    "cartpole": ("CartPole-v1", [], 400, 500_000),  # The README's.
}


QUICK = [("catch", "servers"), ("memory", "serial")]
RUNS = [
    pytest.param(*run, marks=[] if run in QUICK else pytest.mark.slow, id="-".join(run))
    for run in itertools.product(ABILITIES, ("actors", "serial", "servers"))
]


@pytest.mark.parametrize(("ability", "mode"), RUNS)
def test_learns(ability, mode, tmp_path):
    env, args, goal, steps = ABILITIES[ability]
    if mode == "serial":
        args = [*args, "--num_actors", 0]
    module = "polybeast" if mode == "servers" else "monobeast"
    args = ["--env", env, "--total_steps", steps, "--seed", 1, *args]
    learns(module, args, goal, tmp_path)


@pytest.mark.slow
def test_learns_from_an_image(tmp_path):
    env = "tests.envs:torchbeast/CatchPixels-v0"
    args = ["--env", env, "--total_steps", 300_000, "--seed", 1]
    learns("monobeast", args, 0.9, tmp_path)


def learns(module, args, goal, savedir, cwd=ROOT):
    """Runs the program until the mean return of 100 episodes in a row is above goal.
    Asserts that it comes to that."""
    args = [*args, "--savedir", savedir, "--xpid", "x"]
    with Program(*args, module=module, cwd=cwd) as program:
        program.wait_for("results in")
        best = -float("inf")
        deadline = time.monotonic() + 600
        while program.process.poll() is None and best <= goal:
            assert time.monotonic() < deadline, f"at most {best}"
            time.sleep(0.5)
            best = max(best, last_return(savedir / "x"))
        program.signal(signal.SIGTERM)
        code = program.end()
    assert best > goal, f"exit code {code}, at most {best}:\n{program.output}"


def last_return(directory):
    """The mean of 100 episodes or more. -inf if there are fewer."""
    try:
        rows = read_logs(directory)
    except OSError:
        rows = []
    episodes = total = 0
    for row in reversed(rows):
        if row["episode_return"]:
            episodes += int(row["episodes"])
            total += int(row["episodes"]) * float(row["episode_return"])
        if episodes >= 100:
            return total / episodes
    return -float("inf")


@pytest.mark.slow
def test_memory_cannot_be_solved_without_a_recurrent_network(tmp_path):
    env = ABILITIES["memory"][0]
    result = main("--env", env, "--total_steps", 60_000, "--num_actors", 0,
                  "--savedir", tmp_path, "--xpid", "x")  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = [row for row in read_logs(tmp_path / "x") if row["episode_return"]]
    assert all(float(row["episode_return"]) < 0.6 for row in rows)
