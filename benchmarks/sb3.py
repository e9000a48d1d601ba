"""Trains a Stable-Baselines3 agent: on Atari with the settings that RL Zoo publishes,
elsewhere with its own defaults (PPO's are CleanRL's for MuJoCo).

    pip install stable-baselines3==2.9.2 -c requirements.txt
    python -m benchmarks.sb3 --algorithm a2c --env BreakoutNoFrameskip-v4

A yardstick: nothing imports it. The run's directory has meta.json and logs.csv as
torchbeast.plot reads them, with a line for each step that ends games; steps are agent
steps of four frames. The same command again goes on, on Atari, where it last saved.
"""

import argparse
import csv
import json
import pathlib
import statistics
import sys
import time

import gymnasium
import torch

from torchbeast import logs, machine

SAVE_EVERY_S = 300  # Atari's command goes on from there.
SCHEDULE_STEPS = 10_000_000  # PPO's rates fall to 0 there; a run may end before.
NUMBERS = "ppo", "sac", "td3"


def is_atari(env_id):
    return "NoFrameskip" in env_id


def parser():
    p = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    p.add_argument("--algorithm", choices=("a2c", "ppo", "sac", "td3"), required=True)
    p.add_argument("--env", required=True)
    p.add_argument("--total_steps", type=int, default=3_000_000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--num_threads", type=int, default=1)
    p.add_argument("--savedir", type=pathlib.Path, default="~/logs/sb3")
    p.add_argument("--xpid", help="default: ALGORITHM-ENV-SEED")
    return p


def make_model(algorithm, env_id, seed, saved):
    """On Atari RL Zoo's hyperparams/a2c.yml and ppo.yml."""
    import stable_baselines3 as sb3
    from stable_baselines3.common import env_util, vec_env
    from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike

    if not is_atari(env_id):
        envs = env_util.make_vec_env(env_id, 1, seed)
        if algorithm == "ppo":
            return sb3.PPO("MlpPolicy", vec_env.VecNormalize(envs), seed=seed)
        return {"sac": sb3.SAC, "td3": sb3.TD3}[algorithm]("MlpPolicy", envs, seed=seed)
    import ale_py

    gymnasium.register_envs(ale_py)
    envs = env_util.make_atari_env(env_id, 16 if algorithm == "a2c" else 8, seed)
    envs = vec_env.VecFrameStack(envs, 4)
    if saved.exists():
        return {"a2c": sb3.A2C, "ppo": sb3.PPO}[algorithm].load(saved, envs)
    if algorithm == "a2c":
        optimizer = dict(optimizer_class=RMSpropTFLike, optimizer_kwargs=dict(eps=1e-5))
        return sb3.A2C(
            "CnnPolicy",
            envs,
            ent_coef=0.01,
            vf_coef=0.25,
            policy_kwargs=optimizer,
            seed=seed,
        )
    return sb3.PPO(
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


def game_log(file, seconds, total_steps, saved):
    """Returns what Stable-Baselines3 calls after each step: it writes a line for the
    games that have ended, saves now and then, and ends the run after a number of steps.

    seconds: how long sessions before this one took.
    """
    writer = csv.writer(file)
    began_at = time.monotonic() - seconds
    saved_at = time.monotonic()

    def after_step(names, _):
        nonlocal saved_at
        model, now = names["self"], time.monotonic()
        games = [info["episode"] for info in names["infos"] if "episode" in info]
        if games:
            means = [statistics.fmean(game[key] for game in games) for key in "rl"]
            elapsed = round(now - began_at, 1)
            writer.writerow((model.num_timesteps, elapsed, len(games), *means))
        if now - saved_at > SAVE_EVERY_S:
            saved_at = now
            model.save(saved)
        return model.num_timesteps < total_steps

    return after_step


def main():
    p = parser()
    flags = p.parse_args()
    if flags.algorithm not in (("a2c", "ppo") if is_atari(flags.env) else NUMBERS):
        p.error(f"--algorithm {flags.algorithm}: there are no settings for {flags.env}")
    torch.set_num_threads(flags.num_threads)
    name = flags.xpid or f"{flags.algorithm}-{flags.env}-{flags.seed}"
    out = flags.savedir.expanduser() / name
    out.mkdir(parents=True, exist_ok=True)
    saved, path = out / "model.zip", out / "logs.csv"
    model, seconds = make_model(flags.algorithm, flags.env, flags.seed, saved), 0
    goes_on = model.num_timesteps > 0
    if goes_on:
        rows = [r for r in logs.read(path) if r["step"] <= model.num_timesteps]
        seconds = rows[-1]["seconds"] if rows else 0
    else:
        flags.command = ["benchmarks.sb3", *sys.argv[1:]]
        flags.precision, flags.log_interval_steps = "float32", 10_000
        meta = json.dumps(machine.meta(flags), indent=1)
        (out / "meta.json").write_text(f"{meta}\n")
        path.write_text("step,seconds,episodes,episode_return,episode_step\n")
    with open(path, "a", newline="", buffering=1) as file:
        model.learn(
            SCHEDULE_STEPS - model.num_timesteps,
            callback=game_log(file, seconds, flags.total_steps, saved),
            reset_num_timesteps=not goes_on,
        )


if __name__ == "__main__":
    main()
