"""A trained agent plays: --mode test and --mode test_render of every program."""

import json
import math
import os
import shlex

import gymnasium
import numpy as np
import torch

from torchbeast import checkpoint, run, seeds
from torchbeast.environment import BadInput, map_structure
from torchbeast.files import write_atomically
from torchbeast.flags import make_agent
from torchbeast.process import log


def modes(train, create_env):
    """Returns what run_program() takes: {--mode: a function of the flags}."""

    def play(flags):
        return test(flags, create_env)

    return {"train": train, "test": play, "test_render": play}


def test(flags, create_env):
    """Plays whole games with the weights of a checkpoint. Returns the exit code."""
    mode = render_mode(flags)
    path = run.run_path(flags)
    flags.seed = seeds.set_seed(flags.seed)
    env = create_env(flags, 1, mode)
    agent = make_agent(flags, env)
    agent.net.eval()
    saved = checkpoint.read(path / "model.tar", flags)
    checkpoint.load_agent_state(agent, saved, path / "model.tar")
    print(f"{path / 'model.tar'}: step {saved['step']}")
    core_state = agent.initial_state(1)

    def policy(step):
        nonlocal core_state  # The agent itself forgets it where an episode begins.
        step = map_structure(lambda x: torch.as_tensor(x)[None], step)
        outputs, core_state = agent.act(step, core_state, not flags.sample_actions)
        return outputs["action"][0].numpy()

    returns, lengths = episodes(flags, env, policy)
    report(flags, path, saved["step"], returns, lengths)
    return 0


def render_mode(flags):
    """Returns what the environment is to render. Raises BadInput where that cannot be
    shown."""
    if flags.mode == "test" and flags.video:
        return "rgb_array"
    if flags.mode == "test":
        return None
    displays = ("DISPLAY", "WAYLAND_DISPLAY")
    if not any(map(os.environ.get, displays)):
        raise BadInput(
            "--mode test_render needs a display, and neither DISPLAY nor "
            "WAYLAND_DISPLAY is set: use --mode test --video FILE.mp4"
        )
    return "human"


def episodes(flags, env, policy):
    """Plays --num_test_episodes whole games, and prints a line for each. Returns the
    lists of their returns and lengths.

    policy: a function of a step that returns an action for the one environment of env.
    """
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
    """Prints mean and standard error of the returns, and writes test.json."""
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
        write_atomically(path / "test.json", text.encode())
    except OSError as e:
        log.warning("%s: not written: %s", path / "test.json", e.strerror)


class Video:
    """Writes frames [H, W, 3] uint8 into an MP4 file, by OpenCV."""

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


def command(flags):
    """Returns the command that lets the agent of this run play."""
    program, *words = flags.command
    if not any(word.split("=")[0] == "--xpid" for word in words):
        words += ["--xpid", flags.xpid]
    return f"python -m {program} {shlex.join([*words, '--mode', 'test'])}"
