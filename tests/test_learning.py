"""Does it learn? One ability each, to a known return, through the real program."""

import itertools
import signal
import time

import pytest

from tests.programs import ROOT, Program, read_logs, succeeds

PPO = ["--agent", "ppo"]
DQN = ["--agent", "r2d2", "--no-use_lstm"]
PQN = ["--agent", "pqn"]
SAC = ["--agent", "sac"]
# One step makes an episode, so that a policy may change often.
SMALL = ["--unroll_length", 5, "--batch_size", 8, "--entropy_cost", 0.001]
# Environment, flags, the return to reach, steps to reach it in: several times as many
# as are needed mostly, as it is chance when a run finds out what pays.
ABILITIES = {
    "catch": ("tests.envs:torchbeast/Catch-v0", [], 0.9, 300_000),
    "memory": ("tests.envs:torchbeast/Memory-v0", ["--use_lstm"], 0.9, 150_000),
    "cartpole": ("CartPole-v1", [], 400, 500_000),  # The README's.
    "masked": ("tests.envs:torchbeast/Masked-v0", SMALL, 0.72, 100_000),
    "ppo_masked": ("tests.envs:torchbeast/Masked-v0", PPO, 0.72, 100_000),
    "pqn_masked": ("tests.envs:torchbeast/Masked-v0", PQN, 0.72, 100_000),
    "r2d2_masked": (
        "tests.envs:torchbeast/Masked-v0", ["--agent", "r2d2"], 0.7, 50_000
    ),
    # Sampled actions miss the target by their deviation.
    "target": ("tests.envs:torchbeast/Target-v0", SMALL, 0.65, 150_000),
    "mixed": ("tests.envs:torchbeast/Mixed-v0", SMALL, 0.65, 150_000),
    "acrobot": ("Acrobot-v1", [], -100, 300_000),
    "pendulum": ("Pendulum-v1", [], -250, 400_000),
    "ppo_mixed": ("tests.envs:torchbeast/Mixed-v0", PPO, 0.65, 150_000),
    "ppo_cartpole": ("CartPole-v1", PPO, 475, 300_000),
    "ppo_acrobot": ("Acrobot-v1", PPO, -100, 300_000),
    "ppo_pendulum": ("Pendulum-v1", PPO, -250, 400_000),
    "dqn_catch": (
        "tests.envs:torchbeast/Catch-v0", [*DQN, "--exploration_steps", 5000], 0.9,
        50_000,
    ),
    "dqn_cartpole": ("CartPole-v1", DQN, 475, 300_000),
    "dqn_acrobot": ("Acrobot-v1", DQN, -100, 300_000),
    "r2d2_cartpole": ("CartPole-v1", ["--agent", "r2d2"], 475, 300_000),
    "r2d2_acrobot": ("Acrobot-v1", ["--agent", "r2d2"], -110, 300_000),
    "r2d2_memory": (
        "tests.envs:torchbeast/Memory-v0", ["--agent", "r2d2"], 0.8, 200_000
    ),
    "pqn_catch": ("tests.envs:torchbeast/Catch-v0", PQN, 0.9, 100_000),
    "pqn_memory": (
        "tests.envs:torchbeast/Memory-v0", [*PQN, "--use_lstm"], 0.9, 200_000
    ),
    "pqn_cartpole": ("CartPole-v1", PQN, 475, 300_000),
    "pqn_acrobot": ("Acrobot-v1", PQN, -100, 300_000),
    "sac_target": (
        "tests.envs:torchbeast/Target-v0", [*SAC, "--replay_ratio", 64], 0.8, 30_000
    ),
    "sac_pendulum": ("Pendulum-v1", SAC, -200, 60_000),
    "td3_target": (
        "tests.envs:torchbeast/Target-v0",
        ["--agent", "td3", "--replay_ratio", 64], 0.8, 30_000,
    ),
    "td3_pendulum": ("Pendulum-v1", ["--agent", "td3"], -200, 60_000),
    "leaving": ("tests.parallel_envs:Targets", [], 7.5, 150_000),
    "attention": (
        "tests.envs:torchbeast/LongMemory-v0",
        ["--agent", "examples.attention.agent"],
        0.9,
        500_000,
    ),
}  # fmt: skip

# Each agent learns something in every program.
MODES = {
    "catch": ("actors", "serial", "servers"),
    "memory": ("serial", "servers"),
    "masked": ("serial", "servers"),
    "mixed": ("servers",),
    "ppo_mixed": ("actors", "serial", "servers"),
    "dqn_catch": ("actors", "serial", "servers"),
    "r2d2_memory": ("serial", "servers"),
    "pqn_catch": ("actors", "serial", "servers"),
    "pqn_memory": ("serial", "servers"),
    "sac_target": ("actors", "serial", "servers"),
    "td3_target": ("serial", "servers"),
    "attention": ("actors", "servers"),
}
QUICK = [
    ("catch", "servers"),
    ("td3_target", "serial"),
]
SLOW = [
    ("masked", "servers"),
    ("ppo_mixed", "serial"),
    ("dqn_catch", "serial"),
    ("cartpole", "actors"),
    ("memory", "serial"),
    ("pqn_catch", "serial"),
    ("r2d2_masked", "actors"),
    ("sac_target", "serial"),
]


def marks(run, quick=QUICK, slow=SLOW):
    if run in quick:
        return []
    return pytest.mark.slow if run in slow else pytest.mark.long


RUNS = [
    pytest.param(*run, marks=marks(run), id="-".join(run))
    for run in (
        (ability, mode)
        for ability in ABILITIES
        for mode in MODES.get(ability, ("actors",))
    )
]


@pytest.mark.parametrize(("ability", "mode"), RUNS)
def test_learns(ability, mode, tmp_path):
    env, args, goal, steps = ABILITIES[ability]
    if mode == "serial":
        args = [*args, "--num_actors", 0]
    module = "polybeast" if mode == "servers" else "monobeast"
    args = ["--env", env, "--total_steps", steps, "--seed", 1, *args]
    learns(module, args, goal, tmp_path)


KINDS = "number", "discrete", "integers", "binary", "image", "ids"
REPLAY = ["--replay_ratio", 64, "--replay_start", 200]
XOR = {  # Flags, and steps to learn it in.
    "polybeast": (["--discounting", 0], 60_000),
    "ppo": (
        ["--unroll_length", 16, "--batch_size", 16, "--num_minibatches", 4,
         "--learning_rate", 1e-3, "--net", "shallow", "--discounting", 0],
        40_000,
    ),
    "pqn": (["--discounting", 0], 40_000),
    "r2d2": ([*DQN[2:], "--exploration_steps", 3000, "--discounting", 0], 20_000),
    "sac": (
        [*REPLAY, "--learning_rate", 1e-3, "--critic_learning_rate", 1e-2,
         "--target_entropy", -3, "--discounting", 0],
        8000,
    ),
}  # fmt: skip
PAIRS = list(itertools.combinations_with_replacement(KINDS, 2))
# Each kind by the quickest agent, and PPO.
SLOW_XOR = [
    ("ppo", "number", "binary"),
    ("polybeast", "number", "discrete"),
    ("polybeast", "integers", "binary"),
    ("polybeast", "number", "image"),
    ("polybeast", "discrete", "ids"),
    ("polybeast", "image", "ids"),
]


@pytest.mark.parametrize(
    ("agent", "first", "second"),
    [
        pytest.param(*run, marks=marks(run, (), SLOW_XOR))
        for run in ((agent, *pair) for agent in XOR for pair in PAIRS)
    ],
)
def test_entries_of_a_dict_are_learned_from_together(agent, first, second, tmp_path):
    args, steps = XOR[agent]
    args = ["--agent", agent, "--env", "tests.envs:torchbeast/Xor-v0", "--env_args",
            f"first={first}", f"second={second}", f"box={agent == 'sac'}",
            "--num_actors", 0, "--total_steps", steps, "--seed", 1, *args]  # fmt: skip
    learns("monobeast", args, 9, tmp_path)


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
        deadline = time.monotonic() + 1200
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


@pytest.mark.long
def test_crossq_learns_pendulum_in_few_steps(tmp_path):
    """By its preset, but with networks and batches for a few seconds."""
    succeeds("--agent", "sac", "--preset", "crossq", "--env", "Pendulum-v1",
             "--hidden_sizes", 64, 64, "--critic_hidden_sizes", 64, 64,
             "--replay_batch_size", 64, "--replay_ratio", 64, "--seed", 1,
             "--replay_start", 500, "--total_steps", 4400, "--savedir", tmp_path,
             "--log_interval_steps", 200, "--xpid", "x")  # fmt: skip
    rows = [row for row in read_logs(tmp_path / "x") if row["episode_return"]]
    returns = [float(row["episode_return"]) for row in rows if row["episodes"] == "1"]
    assert len(returns) >= 18
    assert sum(returns[:4]) / 4 < -900 and sum(returns[-6:]) / 6 > -350, returns


@pytest.mark.long
def test_memory_cannot_be_solved_without_a_recurrent_network(tmp_path):
    env = ABILITIES["memory"][0]
    succeeds("--env", env, "--total_steps", 60_000, "--num_actors", 0,
             "--savedir", tmp_path, "--xpid", "x")  # fmt: skip
    rows = [row for row in read_logs(tmp_path / "x") if row["episode_return"]]
    assert all(float(row["episode_return"]) < 0.6 for row in rows)
