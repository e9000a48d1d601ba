"""A trained agent plays: --mode test and --mode test_render of both scripts."""

import json
import math
import os
import shlex
import sys

import gymnasium
import numpy as np

import experiment
from command_line import log
from environment import BadInput


def render_mode(flags):
    """What the environment is to render. BadInput where it could not be shown."""
    if flags.mode == "test" and flags.video:
        return "rgb_array"
    if flags.mode == "test":
        return None
    displays = ("DISPLAY", "WAYLAND_DISPLAY")
    if sys.platform == "linux" and not any(map(os.environ.get, displays)):
        raise BadInput(
            "--mode test_render needs a display, and neither DISPLAY nor "
            "WAYLAND_DISPLAY is set: use --mode test --video FILE.mp4"
        )
    if flags.video:
        raise BadInput("--video goes with --mode test, not test_render")
    return "human"


def episodes(flags, env, policy):
    """Plays --num_test_episodes whole games, printing each. policy(step) -> action, for
    the one environment of env. Returns the lists of their returns and lengths."""
    video = Video(flags.video, env.fps) if flags.video else None
    returns, lengths = [], []
    try:
        step = env.initial(flags.seed)
        if video is not None:
            env.render()
    except gymnasium.error.DependencyNotInstalled as e:
        raise BadInput(f"environment {flags.env!r} cannot be shown: {e}") from e
    while len(returns) < flags.num_test_episodes:
        if video is not None:
            video.write(env.render())
        step = env.step(policy(step))
        if step["episode_end"][0]:
            returns.append(float(step["episode_return"][0]))
            lengths.append(int(step["episode_step"][0]))
            print(
                f"episode {len(returns)}: return {returns[-1]:g}, {lengths[-1]} steps",
                flush=True,
            )
            if video is not None:
                video.write(env.render())
                video.close()
                video = None
    env.close()
    return returns, lengths


def report(flags, path, trained_steps, returns, lengths):
    """Prints mean and standard error of the returns, writes test.json."""
    mean, error = np.mean(returns), 0.0
    if len(returns) > 1:
        error = np.std(returns, ddof=1) / math.sqrt(len(returns))
    print(
        f"{len(returns)} episodes: mean return {mean:.2f}, standard error {error:.2f}"
    )
    data = {
        "env": flags.env,
        "step": trained_steps,
        "actions": "sampled" if flags.sample_actions else "greedy",
        "seed": flags.seed,
        "mean_return": float(mean),
        "standard_error": float(error),
        "returns": returns,
        "steps": lengths,
    }
    text = json.dumps(data, indent=4) + "\n"
    try:
        experiment.write_atomically(path / "test.json", text.encode())
    except OSError as e:
        log.warning("%s: not written: %s", path / "test.json", e.strerror)


class Video:
    """Frames [H, W, 3] uint8 -> an MP4 file, by OpenCV."""

    def __init__(self, path, fps):
        try:
            import cv2
        except ImportError:
            raise BadInput(
                "--video needs: pip install opencv-python-headless"
            ) from None
        self._cv2 = cv2
        self._path = path
        self._fps = fps
        self._writer = None

    def write(self, frame):
        if self._writer is None:
            height, width = frame.shape[:2]
            self._writer = self._cv2.VideoWriter(
                self._path,
                self._cv2.VideoWriter_fourcc(*"mp4v"),
                self._fps,
                (width, height),
            )
            if not self._writer.isOpened():
                raise BadInput(f"--video {self._path} cannot be written as MP4")
        self._writer.write(self._cv2.cvtColor(frame, self._cv2.COLOR_RGB2BGR))

    def close(self):
        self._writer.release()


def command(flags, module):
    """What the user types to see the agent of this run play."""
    words = [f"python -m {module} --mode test --env", shlex.quote(flags.env)]
    words += ["--xpid", shlex.quote(flags.xpid)]
    if flags.savedir != experiment.parser().get_default("savedir"):
        words += ["--savedir", shlex.quote(flags.savedir)]
    if flags.sticky_actions is not None:
        words.append(f"--sticky_actions {flags.sticky_actions}")
    for name in ("use_lstm", "full_action_space"):
        if getattr(flags, name):
            words.append(f"--{name}")
    if not flags.terminal_on_life_loss:
        words.append("--no-terminal_on_life_loss")
    if getattr(flags, "net", "deep") != "deep":  # PolyBeast's.
        words.append(f"--net {flags.net}")
    return " ".join(words)
