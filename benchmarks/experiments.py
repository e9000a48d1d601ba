"""The experiments of which docs/ has results, and its tables.

benchmarks/results.py runs them. A run is named EXPERIMENT-SEED, and each is

    python -m PROGRAM FLAGS --total_steps N --seed SEED
"""

from typing import NamedTuple


class Experiment(NamedTuple):
    name: str
    groups: tuple
    agent: str  # As tables name it.
    env: str  # As tables name it.
    flags: str  # As one types them.
    total_steps: int
    seeds: tuple
    aim: float | None

    def command(self, seed):
        """Returns the words after `python -m`."""
        numbers = f"--total_steps {self.total_steps} --seed {seed}"
        program = "polybeast" if "PolyBeast" in self.agent else "monobeast"
        program = "benchmarks.sb3" if "Stable" in self.agent else program
        return f"{program} {self.flags} {numbers}".split()

    def runs(self):
        """Returns {name of a run: its seed}."""
        return {f"{self.name}-{seed}": seed for seed in self.seeds}


EXPERIMENTS = {}
AGENTS = {
    "IMPALA": "",
    "PPO": "--agent ppo ",
    "DQN": "--agent r2d2 --no-use_lstm ",
    "R2D2": "--agent r2d2 ",
    "PQN": "--agent pqn ",
    "SAC": "--agent sac ",
    "TD3": "--agent td3 ",
    "Rainbow": "--agent r2d2 --preset rainbow ",
    "DQN, quantiles": "--agent r2d2 --no-use_lstm --quantiles 32 ",
    "DQN, preset": "--agent r2d2 --preset dqn ",
    "R2D2, preset": "--agent r2d2 --preset r2d2 ",
    "PPO, preset": "--agent ppo --preset mujoco ",
    "PPO, Atari's preset": "--agent ppo --preset atari ",
    "A2C": "--preset a2c ",
    "PQN, Atari's preset": "--agent pqn --preset atari ",
    "SAC, preset": "--agent sac --preset mujoco ",
    "CrossQ": "--agent sac --preset crossq ",
    "TD3, preset": "--agent td3 --preset mujoco ",
    "DDPG": "--agent td3 --preset ddpg ",
    "IMPALA, PolyBeast": "--net shallow ",
    "Stable-Baselines3, A2C": "--algorithm a2c ",
    "Stable-Baselines3, PPO": "--algorithm ppo ",
    "IMPALA, LSTM": "--use_lstm ",
    "IMPALA, RND": "--agent examples.rnd.agent ",
}


def declare(name, group, agent, env, flags, total_steps, num_seeds, aim=None):
    """Declares an experiment, or adds a group to it, perhaps with more seeds."""
    seeds = tuple(range(1, num_seeds + 1))
    flags = AGENTS.get(agent, "") + flags
    new = Experiment(name, (group,), agent, env, flags, total_steps, seeds, aim)
    if (old := EXPERIMENTS.get(name)) is not None:
        if old.command(0) != new.command(0):
            raise ValueError(f"{name} is {old.command(0)} and {new.command(0)}")
        groups, seeds = (*old.groups, group), max(old.seeds, seeds)
        new = old._replace(groups=groups, seeds=seeds)
    EXPERIMENTS[name] = new


def atari(game):
    return f"--env {game}NoFrameskip-v4"


def minatar(game):
    return f"--env examples.minatar.env:MinAtar/{game}-v1"


# Every agent with its defaults. Environment, its name here, flags, millions of steps,
# {agent: aim} and, if they differ, millions of steps of agents with a replay.
DOORKEY = "--env examples.rnd.env:torchbeast/MiniGrid-DoorKey-5x5-v0"
MEMORY = "--env tests.envs:torchbeast/Memory-v0 --use_lstm"
MATRIX = [
    ("CartPole-v1", "cartpole", "--env CartPole-v1", 0.3,
     dict(IMPALA=475, PPO=475, DQN=475, R2D2=475, PQN=475)),
    ("Acrobot-v1", "acrobot", "--env Acrobot-v1", 0.3,
     dict(IMPALA=-100, PPO=-100, DQN=-100, R2D2=-110, PQN=-100)),
    ("LunarLander-v3", "lunar", "--env LunarLander-v3", 1,
     dict(IMPALA=200, PPO=220, DQN=200, R2D2=150, PQN=200), 0.3),
    ("LunarLanderContinuous-v3", "llc", "--env LunarLanderContinuous-v3", 1,
     dict(IMPALA=200, PPO=200, SAC=200, TD3=200), 0.1),
    ("Pendulum-v1", "pendulum", "--env Pendulum-v1", 0.4,
     dict(IMPALA=-250, PPO=-250, SAC=-200, TD3=-200), 0.06),
    ("HalfCheetah-v5", "halfcheetah", "--env HalfCheetah-v5", 1,
     dict(IMPALA=1500, PPO=1443, SAC=6000, TD3=5000), 0.2),
    ("Hopper-v5", "hopper", "--env Hopper-v5", 1,
     dict(IMPALA=1500, PPO=2000, SAC=2000, TD3=2000), 0.2),
    ("MinAtar Breakout", "minatar-breakout", minatar("Breakout"), 3,
     dict(IMPALA=12, PPO=12, DQN=15, R2D2=10, PQN=25), 1),
    ("MinAtar SpaceInvaders", "minatar-spaceinvaders", minatar("SpaceInvaders"), 3,
     dict(IMPALA=60, PPO=60, DQN=60, R2D2=40, PQN=100), 1),
    ("MiniGrid-DoorKey-5x5", "doorkey", DOORKEY, 1,
     dict(IMPALA=0.8, PPO=0.8, R2D2=0.8, PQN=0.8)),
    ("Memory-v0 `--use_lstm`", "memory", MEMORY, 0.3,
     dict(IMPALA=0.95, PPO=0.95, R2D2=0.95, PQN=0.95)),
    ("Pong", "pong", atari("Pong"), 1, dict(IMPALA=15, PPO=15, PQN=15)),
    ("Breakout", "breakout", atari("Breakout"), 3, dict(IMPALA=100, PPO=60, PQN=100)),
]  # fmt: skip
WITH_REPLAY = "DQN", "R2D2", "SAC", "TD3"
for env, short, flags, millions, aims, *fewer in MATRIX:
    for agent, aim in aims.items():
        with_replay = agent in WITH_REPLAY
        num_steps = round(1e6 * (fewer[0] if fewer and with_replay else millions))
        name = f"{agent.lower()}-{short}"
        declare(name, "matrix", agent, env, flags, num_steps, 3, aim)

# Environments whose results chose no default, but for PQN's lambda (MountainCar),
# --advantage_learning (MountainCar, CliffWalking, MiniGrid) and --churn_reduction
# (FrozenLake, MiniGrid). Thousands of steps, and of those agents that have a replay;
# agents.
CHOICES, NUMBERS = "IMPALA PPO DQN PQN", "IMPALA PPO SAC TD3"
for env, thousands, with_replay, agents in [
    ("FrozenLake-v1", 100, 100, CHOICES),
    ("CliffWalking-v1", 100, 100, CHOICES),
    ("Taxi-v4", 300, 300, CHOICES),
    ("Blackjack-v1", 100, 100, CHOICES),
    ("MountainCar-v0", 300, 300, CHOICES),
    ("MiniGrid-Empty-8x8-v0", 200, 200, CHOICES),
    ("MountainCarContinuous-v0", 200, 40, NUMBERS),
    ("InvertedPendulum-v5", 200, 20, NUMBERS),
    ("InvertedDoublePendulum-v5", 300, 40, NUMBERS),
    ("Reacher-v5", 300, 50, NUMBERS),
    ("Swimmer-v5", 500, 50, NUMBERS),
    ("BipedalWalker-v3", 1000, 200, NUMBERS),
    ("Walker2d-v5", 1000, 200, NUMBERS),
    ("Ant-v5", 1000, 200, NUMBERS),
]:
    for agent in agents.split():
        num_steps = with_replay if agent in WITH_REPLAY else thousands
        name = f"{agent.lower()}-{env.lower().rpartition('-')[0]}"
        module = "examples.rnd.env:torchbeast/" if "MiniGrid" in env else ""
        declare(name, "others", agent, env, f"--env {module}{env}",
                1000 * num_steps, 1)  # fmt: skip

M = 1_000_000
for agent, group, games, num_steps, num_seeds, prefix, suffix in [
    ("IMPALA", "atari", "Pong", M, 3, "impala", ""),
    ("IMPALA", "atari", "Breakout", 10 * M, 4, "impala", "-10m"),
    ("IMPALA", "atari", "Breakout Qbert Seaquest SpaceInvaders BeamRider Phoenix "
     "NameThisGame BattleZone DoubleDunk", 3 * M, 1, "impala", ""),
    ("PPO", "atari", "Pong", M, 3, "ppo", ""),
    ("PPO", "atari", "Breakout", 3 * M, 1, "ppo", ""),
    ("PQN", "atari", "Pong", M, 3, "pqn", ""),
    ("PQN", "atari", "Breakout SpaceInvaders BeamRider Qbert Phoenix", 3 * M, 1,
     "pqn", ""),
    ("IMPALA", "published", "Pong", 10 * M, 1, "impala", "-10m"),
    ("IMPALA", "published", "BeamRider Qbert Seaquest SpaceInvaders", 5 * M, 1,
     "impala", "-5m"),
    ("IMPALA, PolyBeast", "published", "Breakout", 10 * M, 1, "polybeast", "-10m"),
]:  # fmt: skip
    for game in games.split():
        declare(f"{prefix}-{game.lower()}{suffix}", group, agent, game, atari(game),
                num_steps, num_seeds)  # fmt: skip

for game, num_steps in ("Breakout", 3 * M), ("Qbert", 2 * M):
    for agent in "A2C", "PPO":
        name = f"sb3-{agent.lower()}-{game.lower()}"
        agent = f"Stable-Baselines3, {agent}"
        declare(name, "sb3", agent, game, atari(game), num_steps, 1)
declare("impala-pong-sticky", "atari", "IMPALA", "Pong `--sticky_actions 0.25`",
        f"{atari('Pong')} --sticky_actions 0.25", M, 1)  # fmt: skip

for game in "Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders":
    for agent in "IMPALA", "PPO", "PQN", "DQN", "DQN, quantiles":
        on_policy = agent in ("IMPALA", "PPO", "PQN")
        num_seeds = 3 if on_policy or game in ("Breakout", "SpaceInvaders") else 1
        prefix = agent.lower().replace(", ", "-")
        declare(f"{prefix}-minatar-{game.lower()}", "minatar", agent, f"MinAtar {game}",
                minatar(game), 3 * M if on_policy else M, num_seeds)  # fmt: skip

for agent, robots, num_steps, num_seeds, prefix in [
    ("SAC", "HalfCheetah", 200_000, 3, "sac"),
    ("SAC", "Hopper", 200_000, 1, "sac"),
    ("TD3", "HalfCheetah", 200_000, 3, "td3"),
    ("TD3", "Hopper", 200_000, 1, "td3"),
    ("CrossQ", "HalfCheetah", 200_000, 3, "crossq"),
    ("CrossQ", "Hopper", 200_000, 1, "crossq"),
    ("PPO, preset", "HalfCheetah Hopper Walker2d Ant", M, 3, "ppo-preset"),
]:
    for robot in robots.split():
        declare(f"{prefix}-{robot.lower()}", "mujoco", agent, f"{robot}-v5",
                f"--env {robot}-v5", num_steps, num_seeds)  # fmt: skip

for agent, prefix, env, flags, num_steps in [
    ("A2C", "a2c", "Pong", atari("Pong"), M),
    ("PQN, Atari's preset", "pqn-preset", "Pong", atari("Pong"), M),
    ("PPO, Atari's preset", "ppo-preset", "Pong", atari("Pong"), M),
    ("DQN, preset", "dqn-preset", "Pong", atari("Pong"), M),
    ("Rainbow", "rainbow", "Pong", atari("Pong"), M),
    ("R2D2, preset", "r2d2-preset", "Pong", atari("Pong"), M),
    ("SAC, preset", "sac-preset", "HalfCheetah-v5", "--env HalfCheetah-v5", 200_000),
    ("CrossQ", "crossq", "HalfCheetah-v5", "--env HalfCheetah-v5", 200_000),
    ("TD3, preset", "td3-preset", "HalfCheetah-v5", "--env HalfCheetah-v5", 200_000),
    ("DDPG", "ddpg", "HalfCheetah-v5", "--env HalfCheetah-v5", 200_000),
]:
    name = f"{prefix}-{env.lower().partition('-')[0]}"
    declare(name, "presets", agent, env, flags, num_steps, 1)

for agents, env, num_steps in [
    ("IMPALA, LSTM; R2D2", "tests.envs:torchbeast/LongMemory-v0", 500_000),
    ("IMPALA, LSTM; R2D2", "examples.rnd.env:torchbeast/MiniGrid-MemoryS7-v0", M),
    ("IMPALA; IMPALA, RND", "examples.rnd.env:torchbeast/MiniGrid-DoorKey-8x8-v0", M),
]:
    for agent in agents.split("; "):
        env_name = env.partition("/")[2]
        name = f"{agent.lower().replace(', ', '-')}-{env_name.lower()[:-3]}"
        declare(name, "memory", agent, env_name, f"--env {env}", num_steps, 3)

EXAMPLE = f"{minatar('Breakout')} --num_actors 0"
for name, flags in {
    "minatar-impala": "--agent examples.minatar.agent",
    "minatar-impala-replay": "--agent examples.minatar.agent --replay_fraction 0.5",
    "minatar-dqn": "--agent examples.minatar.dqn --no-use_lstm --exploration_steps "
    "100000 --replay_start 5000 --target_interval 500",
}.items():
    declare(name, "published", "", "MinAtar Breakout", f"{flags} {EXAMPLE}", M, 1)

# {name of a table in a document: (function of benchmarks/tables.py, its arguments)}.
TABLES = {
    "matrix": ("grid", "matrix", True),
    "others": ("grid", "others"),
    "atari": ("beside", "atari"),
    "minatar": ("grid", "minatar"),
    "mujoco": ("beside", "mujoco"),
    "memory": ("grid", "memory"),
    "presets": ("beside", "presets", True),
    "pong": ("passes", ["impala-pong-10m-1"], (0, 15)),
    "breakout": (
        "passes", [f"impala-breakout-10m-{seed}" for seed in (2, 3, 4)], (30, 100),
        6 * M,
    ),
    "first": ("milestones", {
        "Pong": ("impala-pong-10m-1", (0, 10, 15)),
        "Breakout": ("impala-breakout-10m-1", (30, 100, 300)),
        "Breakout, seed 2": ("impala-breakout-10m-2", (30, 100, 250)),
        "Breakout, seed 3": ("impala-breakout-10m-3", (30, 100, 250)),
        "Breakout, seed 4": ("impala-breakout-10m-4", (30, 100, 250)),
    }),
    "games": ("after", range(M, 11 * M, M), {
        "Breakout": "impala-breakout-10m-1",
        "Breakout, seed 2": "impala-breakout-10m-2",
        "Breakout, seed 3": "impala-breakout-10m-3",
        "Breakout, seed 4": "impala-breakout-10m-4",
        "Breakout, PolyBeast": "polybeast-breakout-10m-1",
        "BeamRider": "impala-beamrider-5m-1",
        "Qbert": "impala-qbert-5m-1",
        "Seaquest": "impala-seaquest-5m-1",
        "SpaceInvaders": "impala-spaceinvaders-5m-1",
    }),
    "sb3": ("race", (250_000, 500_000, M, 1_500_000, 2 * M, 3 * M), {
        "MonoBeast, IMPALA, seed 2": "impala-breakout-10m-2",
        "MonoBeast, IMPALA, seed 3": "impala-breakout-10m-3",
        "MonoBeast, IMPALA, seed 4": "impala-breakout-10m-4",
        "Stable-Baselines3, A2C": "sb3-a2c-breakout-1",
        "Stable-Baselines3, PPO": "sb3-ppo-breakout-1",
    }, "breakout-sb3"),
    "sb3-qbert": ("race", (250_000, 500_000, M, 1_500_000, 2 * M), {
        "MonoBeast, IMPALA": "impala-qbert-1",
        "Stable-Baselines3, A2C": "sb3-a2c-qbert-1",
        "Stable-Baselines3, PPO": "sb3-ppo-qbert-1",
    }, "qbert-sb3"),
    "minatar-examples": ("after", (100_000, 500_000, M), {
        "`--agent examples.minatar.dqn`": "minatar-dqn-1",
        "`--agent examples.minatar.agent` (IMPALA)": "minatar-impala-1",
        "IMPALA, `--replay_fraction 0.5`": "minatar-impala-replay-1",
    }),
}  # fmt: skip

# {name of a picture: (its title, {label of a curve: its runs})}.
PICTURES = {
    "pong": ("PongNoFrameskip-v4", {"": ["impala-pong-10m-1"]}),
    "breakout": (
        "BreakoutNoFrameskip-v4",
        {"": [f"impala-breakout-10m-{seed}" for seed in (2, 3, 4)]},
    ),
    "games": ("Atari, IMPALA", {
        game: [f"impala-{game.lower()}-5m-1"]
        for game in ("BeamRider", "Seaquest", "SpaceInvaders")
    }),
    "minatar-examples": ("MinAtar/Breakout-v1", {
        "examples.minatar.dqn": ["minatar-dqn-1"],
        "examples.minatar.agent": ["minatar-impala-1"],
        "examples.minatar.agent --replay_fraction 0.5": ["minatar-impala-replay-1"],
    }),
}  # fmt: skip

# {agent: [(whose returns, {environment: return})]}; the first one that has an
# environment counts. github.com/ray-project/rl-experiments,
# github.com/DLR-RM/rl-baselines3-zoo (benchmark.md), docs.cleanrl.dev,
# github.com/google/dopamine (baselines), github.com/sfujim/TD3,
# github.com/DAVIAN-Robotics/SimbaV2 (runs of CrossQ's authors).
RLLIB = "RLlib, 10,000,000 steps", dict(
    Breakout=385, Qbert=4068, SpaceInvaders=719, BeamRider=2071)  # fmt: skip
ZOO_A2C = "RL Zoo's A2C, 10,000,000 steps", dict(
    Pong=17.3, Breakout=280, Qbert=3882, SpaceInvaders=627, BeamRider=2890,
    Seaquest=1721)  # fmt: skip
ZOO_PPO = "RL Zoo, 10,000,000 steps", dict(
    Pong=21, Breakout=398, Qbert=15627, SpaceInvaders=960, BeamRider=3397,
    Seaquest=1784)  # fmt: skip
DOPAMINE_DQN = "Dopamine's DQN, sticky actions, 2,000,000 steps", dict(
    Phoenix=4347, NameThisGame=5388, BattleZone=17732, DoubleDunk=-19)  # fmt: skip
CLEANRL_PQN = "CleanRL, 10,000,000 steps", dict(
    Pong=20.5, Breakout=385, SpaceInvaders=1325, BeamRider=5753)  # fmt: skip
SAC_V4 = "CrossQ's authors, v4, 300,000 steps", {
    "HalfCheetah-v5": 8593, "Hopper-v5": 2160}  # fmt: skip
TD3_V1 = "its authors, v1, 300,000 steps", {"HalfCheetah-v5": 7697, "Hopper-v5": 2410}
PUBLISHED = {
    "IMPALA": [RLLIB, ZOO_A2C, DOPAMINE_DQN],
    "A2C": [ZOO_A2C],
    "PPO": [ZOO_PPO],
    "PPO, Atari's preset": [ZOO_PPO],
    "PQN": [CLEANRL_PQN],
    "PQN, Atari's preset": [CLEANRL_PQN],
    "DQN, preset": [("RL Zoo, 10,000,000 steps", dict(Pong=20.6))],
    "Rainbow": [("Dopamine, sticky actions, 2,000,000 steps", dict(Pong=10))],
    "SAC": [SAC_V4],
    "SAC, preset": [SAC_V4],
    "CrossQ": [("its authors, v4, 300,000 steps", {
        "HalfCheetah-v5": 10012, "Hopper-v5": 2644})],
    "TD3": [TD3_V1],
    "TD3, preset": [TD3_V1],
    "DDPG": [("CleanRL, v4, 1,000,000 steps", {"HalfCheetah-v5": 10374})],
    "PPO, preset": [("CleanRL, v4, 1,000,000 steps", {
        "HalfCheetah-v5": 1443, "Hopper-v5": 2383, "Walker2d-v5": 2288})],
}  # fmt: skip
# {agent: with whom its interquartile mean is compared, of one protocol}.
PEERS = {"IMPALA": ZOO_A2C, "PQN": ("RL Zoo's PPO, 10,000,000 steps", ZOO_PPO[1])}

# Returns of random play and of humans (github.com/google-deepmind/dqn_zoo).
HUMAN = {
    "BattleZone": (2360, 37187.5),
    "BeamRider": (363.9, 16926.5),
    "Breakout": (1.7, 30.5),
    "DoubleDunk": (-18.6, -16.4),
    "NameThisGame": (2292.3, 8049),
    "Phoenix": (761.4, 7242.6),
    "Pong": (-20.7, 14.6),
    "Qbert": (163.9, 13455),
    "Seaquest": (68.4, 42054.7),
    "SpaceInvaders": (148, 1668.7),
}
