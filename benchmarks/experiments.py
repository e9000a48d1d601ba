"""The experiments whose results docs/ has: which commands, seeds and aims.

benchmarks/results.py runs them. A run is named EXPERIMENT-SEED, and each is

    python -m PROGRAM FLAGS --total_steps N --seed SEED
"""

import shlex
from typing import NamedTuple


class Experiment(NamedTuple):
    name: str
    groups: tuple
    agent: str  # As tables name it.
    env: str  # As tables name it.
    flags: str  # As one types them.
    total_steps: int
    seeds: tuple
    aim: float | None = None
    program: str = "monobeast"
    published: str = ""  # What others reached.

    def command(self, seed):
        """Returns the words after `python -m`."""
        flags = shlex.split(self.flags)
        numbers = ["--total_steps", str(self.total_steps), "--seed", str(seed)]
        return [self.program, *flags, *numbers]

    def runs(self):
        """Returns {name of a run: its seed}."""
        return {f"{self.name}-{seed}": seed for seed in self.seeds}


AGENTS = {
    "IMPALA": "",
    "PPO": "--agent ppo",
    "DQN": "--agent r2d2 --no-use_lstm",
    "R2D2": "--agent r2d2",
    "PQN": "--agent pqn",
    "SAC": "--agent sac",
    "TD3": "--agent td3",
    "Rainbow": "--agent r2d2 --preset rainbow",
}
EXPERIMENTS = {}


def declare(name, group, agent, env, flags, total_steps, num_seeds, *aim, **kwargs):
    """Declares an experiment, or adds a group to one that is there, which then has as
    many seeds as the larger of its groups asks for."""
    seeds = tuple(range(1, num_seeds + 1))
    flags = " ".join(filter(None, [AGENTS.get(agent, ""), flags]))
    new = Experiment(name, (group,), agent, env, flags, total_steps, seeds, *aim,
                     **kwargs)  # fmt: skip
    if (old := EXPERIMENTS.get(name)) is not None:
        changed = dict(groups=old.groups + new.groups, seeds=max(old.seeds, new.seeds))
        if new._replace(aim=old.aim, **changed) != old._replace(**changed):
            raise ValueError(f"{name} is declared twice: {old}, {new}")
        new = old._replace(**changed)
    EXPERIMENTS[name] = new


def atari(game):
    return f"--env {game}NoFrameskip-v4"


def minatar(game):
    return f"--env examples.minatar.env:MinAtar/{game}-v1"


DOORKEY = "--env examples.rnd.env:torchbeast/MiniGrid-DoorKey-5x5-v0"
MEMORY = "--env tests.envs:torchbeast/Memory-v0 --use_lstm"
# Environment, its part of names, flags, steps, {agent: aim} and, where they differ, the
# steps of agents with a replay.
MATRIX = [
    ("CartPole-v1", "cartpole", "--env CartPole-v1", 300_000,
     dict(IMPALA=475, PPO=475, DQN=475, R2D2=475, PQN=475)),
    ("Acrobot-v1", "acrobot", "--env Acrobot-v1", 300_000,
     dict(IMPALA=-100, PPO=-100, DQN=-100, R2D2=-110, PQN=-100)),
    ("LunarLander-v3", "lunar", "--env LunarLander-v3", 1_000_000,
     dict(IMPALA=200, PPO=220, DQN=200, R2D2=150, PQN=200), 300_000),
    ("LunarLanderContinuous-v3", "llc", "--env LunarLanderContinuous-v3", 1_000_000,
     dict(IMPALA=200, PPO=200, SAC=200, TD3=200), 100_000),
    ("Pendulum-v1", "pendulum", "--env Pendulum-v1", 400_000,
     dict(IMPALA=-250, PPO=-250, SAC=-200, TD3=-200), 60_000),
    ("HalfCheetah-v5", "halfcheetah", "--env HalfCheetah-v5", 1_000_000,
     dict(IMPALA=1500, PPO=2500, SAC=6000, TD3=5000), 200_000),
    ("Hopper-v5", "hopper", "--env Hopper-v5", 1_000_000,
     dict(IMPALA=1500, PPO=2000, SAC=2000, TD3=2000), 200_000),
    ("MinAtar Breakout", "minatar-breakout", minatar("Breakout"), 3_000_000,
     dict(IMPALA=12, PPO=12, DQN=15, R2D2=10, PQN=25), 1_000_000),
    ("MinAtar SpaceInvaders", "minatar-spaceinvaders", minatar("SpaceInvaders"),
     3_000_000, dict(IMPALA=60, PPO=60, DQN=60, R2D2=40, PQN=100), 1_000_000),
    ("MiniGrid-DoorKey-5x5", "doorkey", DOORKEY, 1_000_000,
     dict(IMPALA=0.8, PPO=0.8, R2D2=0.8, PQN=0.8)),
    ("Memory", "memory", MEMORY, 300_000,
     dict(IMPALA=0.95, PPO=0.95, R2D2=0.95, PQN=0.95)),
    ("Pong", "pong", atari("Pong"), 1_000_000, dict(IMPALA=15, PPO=15, PQN=15)),
    ("Breakout", "breakout", atari("Breakout"), 3_000_000,
     dict(IMPALA=100, PPO=60, PQN=100)),
]  # fmt: skip
WITH_REPLAY = "DQN", "R2D2", "SAC", "TD3"
for env, short, flags, steps, aims, *fewer in MATRIX:
    for agent, aim in aims.items():
        total_steps = fewer[0] if fewer and agent in WITH_REPLAY else steps
        name = f"{agent.lower()}-{short}"
        declare(name, "matrix", agent, env, flags, total_steps, 3, aim)
        if short in ("doorkey", "memory"):
            declare(name, short, agent, env, flags, total_steps, 3)

M = 1_000_000
for agent, game, num_steps, num_seeds in [
    ("IMPALA", "Pong", M, 3),
    ("PPO", "Pong", M, 2),
    *[("IMPALA", game, 3 * M, 1) for game in (
        "Qbert", "Seaquest", "SpaceInvaders", "BeamRider", "Phoenix", "NameThisGame",
        "BattleZone", "DoubleDunk")],
    *[("PQN", game, 3 * M, 1) for game in (
        "Breakout", "SpaceInvaders", "BeamRider", "Qbert", "Phoenix")],
    ("PPO", "Breakout", 3 * M, 1),
    ("Rainbow", "Pong", M, 1),
]:  # fmt: skip
    name = f"{agent.lower()}-{game.lower()}"
    declare(name, "atari", agent, game, atari(game), num_steps, num_seeds)
declare("impala-breakout-10m", "atari", "IMPALA", "Breakout", atari("Breakout"),
        10 * M, 2)  # fmt: skip
declare("dqn-preset-pong", "atari", "DQN preset", "Pong",
        f"--agent r2d2 --preset dqn {atari('Pong')}", M, 1)  # fmt: skip

for game in "Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders":
    for agent, num_steps, num_seeds in [
        ("IMPALA", 3 * M, 3), ("PPO", 3 * M, 3), ("PQN", 3 * M, 3),
        ("DQN", M, 1), ("Rainbow", M, 1),
    ]:  # fmt: skip
        declare(f"{agent.lower()}-minatar-{game.lower()}", "minatar", agent,
                f"MinAtar {game}", minatar(game), num_steps, num_seeds)  # fmt: skip

for agent in "SAC", "TD3":
    for env, num_seeds in ("HalfCheetah", 3), ("Hopper", 1):
        declare(f"{agent.lower()}-{env.lower()}", "mujoco", agent, f"{env}-v5",
                f"--env {env}-v5", 200_000, num_seeds)  # fmt: skip
