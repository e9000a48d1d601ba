"""Trains a Stable-Baselines3 agent: on Atari with the settings that RL Zoo publishes,
elsewhere with its own defaults (PPO's are CleanRL's for MuJoCo).

    python -m venv /tmp/sb3
    /tmp/sb3/bin/pip install torch==2.13.0 stable-baselines3==2.9.2 ale-py \\
        opencv-python-headless mujoco==3.17.0 imageio packaging
    /tmp/sb3/bin/python benchmarks/sb3.py --algorithm a2c --steps 3000000 \\
        --env BreakoutNoFrameskip-v4 --out ~/logs/sb3/a2c

A yardstick for docs/learning.md, in an environment of its own; nothing imports it.
logs.csv in the directory --out has a line for each game, as torchbeast.plot reads it;
steps are agent steps of four frames.
"""

import argparse
import csv
import pathlib
import time

import ale_py
import gymnasium
import torch
from stable_baselines3 import A2C, PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

SAVE_EVERY_S = 300  # Atari's command goes on from there; seconds begin anew.
SCHEDULE_STEPS = 10_000_000  # PPO's rates fall to 0 there; --steps may end it before.
NUMBERS = "ppo", "sac", "td3"


def is_atari(env_id):
    return "NoFrameskip" in env_id


def make_model(algorithm, env_id, seed, saved):
    """On Atari RL Zoo's hyperparams/a2c.yml and ppo.yml."""
    if not is_atari(env_id):
        envs = make_vec_env(env_id, 1, seed)
        if algorithm == "ppo":
            return PPO("MlpPolicy", VecNormalize(envs), seed=seed)
        return {"sac": SAC, "td3": TD3}[algorithm]("MlpPolicy", envs, seed=seed)
    envs = make_atari_env(env_id, 16 if algorithm == "a2c" else 8, seed)
    envs = VecFrameStack(envs, 4)
    if saved.exists():
        return {"a2c": A2C, "ppo": PPO}[algorithm].load(saved, envs)
    if algorithm == "a2c":
        optimizer = dict(optimizer_class=RMSpropTFLike, optimizer_kwargs=dict(eps=1e-5))
        return A2C(
            "CnnPolicy",
            envs,
            ent_coef=0.01,
            vf_coef=0.25,
            policy_kwargs=optimizer,
            seed=seed,
        )
    return PPO(
        "CnnPolicy",
        envs,
        n_steps=128,
        n_epochs=4,
        batch_size=256,
        learning_rate=lambda left: left * 2.5e-4,
        clip_range=lambda left: left * 0.1,
        vf_coef=0.5,
        ent_coef=0.01,
        seed=seed,
    )


class GameLog(BaseCallback):
    """Writes a line for each game, saves now and then, and ends the run after a number
    of steps."""

    def __init__(self, file, steps, saved):
        super().__init__()
        self.writer = csv.writer(file)
        columns = ("step", "seconds", "episodes", "episode_return", "episode_step")
        if file.tell() == 0:
            self.writer.writerow(columns)
        self.steps = steps
        self.saved = saved
        self.begin = self.saved_at = time.monotonic()

    def _on_step(self):
        seconds = round(time.monotonic() - self.begin, 1)
        for info in self.locals["infos"]:
            if "episode" in info:
                game = info["episode"]
                self.writer.writerow(
                    (self.num_timesteps, seconds, 1, game["r"], game["l"])
                )
        if time.monotonic() - self.saved_at > SAVE_EVERY_S:
            self.saved_at = time.monotonic()
            self.model.save(self.saved)
        return self.num_timesteps < self.steps


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--algorithm", choices=("a2c", "ppo", "sac", "td3"), required=True)
    p.add_argument("--env", default="BreakoutNoFrameskip-v4")
    p.add_argument("--steps", type=int, default=3_000_000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--num_threads", type=int, default=1)
    p.add_argument("--out", type=pathlib.Path, required=True)
    flags = p.parse_args()
    if flags.algorithm not in (("a2c", "ppo") if is_atari(flags.env) else NUMBERS):
        p.error(f"--algorithm {flags.algorithm}: there are no settings for {flags.env}")
    torch.set_num_threads(flags.num_threads)
    gymnasium.register_envs(ale_py)
    out = flags.out.expanduser()
    out.mkdir(parents=True, exist_ok=True)
    saved = out / "model.zip"
    with open(out / "logs.csv", "a", newline="", buffering=1) as file:
        model = make_model(flags.algorithm, flags.env, flags.seed, saved)
        model.learn(
            SCHEDULE_STEPS - model.num_timesteps,
            callback=GameLog(file, flags.steps, saved),
            reset_num_timesteps=not saved.exists(),
        )


if __name__ == "__main__":
    main()
