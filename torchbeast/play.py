"""A trained agent plays: --mode test and --mode test_render of every program."""

import copy
import datetime
import functools
import json
import math
import os
import re

import gymnasium
import numpy as np
import torch

from torchbeast import checkpoint, rollouts, run, seeds, versus
from torchbeast.calls import create, tell_slow
from torchbeast.environment import first_step
from torchbeast.files import locked_directory, write_atomically
from torchbeast.flags import agent_parser
from torchbeast.messages import BadInput, first_line, log
from torchbeast.nests import map_structure
from torchbeast.policies import make_judged, state_of_judged
from torchbeast.tracking import Trackers


def test(flags, create_env):
    """Plays whole games with the weights of a checkpoint. Returns the exit code."""
    mode = render_mode(flags)
    if not has_display():  # pygame would print an error, and MuJoCo's films raise one.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        if mode is not None:
            os.environ.setdefault("MUJOCO_GL", "egl")
    path = run.checkpoint_path(flags)
    flags.seed = seeds.set_seed(flags.seed)
    if flags.opponent is not None and flags.opponents is None:
        flags.opponents = 0  # The agent changes sides.
    env = create(create_env, flags, 1, mode, flags.seed)
    modes = (getattr(env.env, "metadata", None) or {}).get("render_modes") or ()
    if flags.opponent == "human" and mode is None and "ansi" in modes:
        env.close()
        env = create(create_env, flags, 1, "ansi", flags.seed)
    agent, saved = load(flags, env, path)
    print(f"{path}: step {saved['step']}", flush=True)
    policy = Policy(agent, env, flags.test_actions)
    if flags.opponent is not None:
        policy = against(flags, env, agent)
    returns, lengths = [], []
    told = tell_slow(0 if flags.opponent == "human" else math.inf)
    try:
        for episode_return, length in episodes(flags, env, policy):
            told.set()  # The first one has ended.
            returns.append(episode_return)
            lengths.append(length)
            print(
                f"episode {len(returns)}: return {episode_return:g}, {length} steps",
                flush=True,
            )
    finally:  # After Ctrl-C, too.
        told.set()
        env.close()
        if returns:
            report(flags, path, saved["step"], returns, lengths, env.take_metrics())
    if flags.video:
        try:
            trackers = Trackers(flags.track, path.parent, saved["step"])
            trackers.call("video", flags.video, saved["step"])
            trackers.finish(0)
        except OSError as e:
            log.warning("--track: %s", e)
    return 0


def load(flags, env, path):
    """Returns (the agent of the checkpoint at path, the checkpoint)."""
    saved = checkpoint.read(path, flags)
    agent = make_judged(flags, env)
    agent.net.eval()
    state = state_of_judged(env, saved["agent"])
    checkpoint.load_agent_state(agent, saved | {"agent": state}, path)
    return agent, saved


def against(flags, env, agent):
    """Returns the agent and its --opponent as one policy."""

    def of_checkpoint(path):
        own, saved = copy.copy(flags), checkpoint.load(path)["flags"]
        names = {action.dest for action in agent_parser(flags.agent)._actions}
        vars(own).update({k: x for k, x in saved.items() if k in names})
        other, _ = load(own, env, path)
        return Policy(other, env, flags.test_actions, 1)

    other = versus.find(env, flags.opponent, flags.seed, of_checkpoint)
    return versus.Sides(env, Policy(agent, env, flags.test_actions, 1), other)


class Policy:
    """An agent as a function from an environment's steps to actions. num_rows: of a
    step, those of all agents if it is not given.

    actions: "greedy"; "sampled", as in training; or None, as the agent is judged
    """

    def __init__(self, agent, env, actions=None, num_rows=None):
        self.act = {
            None: agent.act_in_test,
            "sampled": agent.act,
            "greedy": functools.partial(agent.act, greedy=True),
        }[actions]
        self.core_state = agent.initial_state(num_rows or env.num_envs)

    def __call__(self, step):
        # The agent itself forgets core_state where an episode begins.
        step = map_structure(lambda x: torch.as_tensor(x)[None], step)
        outputs, self.core_state = rollouts.act(self.act, step, self.core_state)
        return map_structure(lambda x: x[0].numpy(), outputs["action"])


def has_display():
    return any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


def render_mode(flags):
    """Returns what the environment is to render. Raises BadInput where that cannot be
    shown."""
    if flags.mode == "test" and flags.video:
        return "rgb_array"
    if flags.mode == "test":
        return None
    if not has_display():
        raise BadInput(
            "--mode test_render needs a display, and neither DISPLAY nor "
            "WAYLAND_DISPLAY is set: use --mode test --video FILE.mp4"
        )
    return "human"


def episodes(flags, env, policy):
    """Plays --num_test_episodes whole games. Yields each one's return, the mean of its
    agents' if there are several, or in self-play the first row's, and length, that of
    the agent with most steps.

    policy: a function of a step that returns an action for the one environment of env.
    """
    video = Video(flags.video, env.fps) if flags.video else None
    try:
        step = first_step(env, flags.seed)
        if video is not None:
            video.write(first_frame(env, flags))
    except gymnasium.error.DependencyNotInstalled as e:
        raise BadInput(f"environment {flags.env!r} cannot be shown: {e}") from e
    for _ in range(flags.num_test_episodes):
        returns, length = np.full(env.num_envs, np.nan), 0
        while np.isnan(returns).any():
            if (returns == returns).any() and env.all_out():
                break  # The others were not there.
            step = env.step(policy(step))
            if video is not None:
                video.write(env.render())
            end = step["episode_end"]
            returns[end] = step["episode_return"][end]
            length = max(length, *step["episode_step"][end].tolist(), 0)
        if video is not None:
            video.close()
            video = None
        if env.opponents is not None:  # The judged agent's.
            returns = returns[:1]
            env.add_metrics({f"return_as_{env.env.seats.rows[0][0]}": returns[0]})
        for name, rows in env.policies.items() if len(env.policies) > 1 else ():
            if (own := returns[rows])[own == own].size:
                env.add_metrics({f"{name}_return": np.nanmean(own)})
        yield float(np.nanmean(returns)), length


def first_frame(env, flags):
    """Returns what render() returns. Raises BadInput if it raises."""
    try:
        return env.render()
    except Exception as e:
        what = f"environment {flags.env!r} cannot be shown: {first_line(e)}"
        raise BadInput(what) from e


def report(flags, path, trained_steps, returns, lengths, metrics):
    """Adds mean and standard error of the returns, and the means of the episodes'
    metrics, to test.json, beside the checkpoint at path, and prints them."""
    names = {name: None for m in metrics for name in m}
    means = {n: float(np.mean([m[n] for m in metrics if n in m])) for n in names}
    mean, error = np.mean(returns), 0.0
    if len(returns) > 1:
        error = np.std(returns, ddof=1) / math.sqrt(len(returns))
    data = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "checkpoint": path.name,
        "env": flags.env,
        "step": trained_steps,
        "actions": flags.test_actions or "default",
        "opponent": flags.opponent,
        "seed": flags.seed,
        "mean_return": float(mean),
        "standard_error": float(error),
        "returns": returns,
        "steps": lengths,
        "metrics": means,
    }
    results = path.with_name("test.json")
    try:
        with locked_directory(path.parent):  # Other tests may end at the same time.
            before = json.loads(results.read_text()) if results.exists() else []
            if not all(isinstance(x, dict) and "mean_return" in x for x in before):
                raise ValueError("not of tests")
            text = json.dumps([*before, data], indent=4) + "\n"
            write_atomically(results, text.encode())
    except OSError as e:
        log.warning("%s: not written: %s", results, e.strerror)
    except (ValueError, TypeError):
        log.warning("%s: not written: something else than results is there", results)
    print(
        f"{len(returns)} episodes: mean return {mean:.2f}, standard error {error:.2f}"
        + "".join(f", mean {name} {x:.4g}" for name, x in means.items())
    )


class Video:
    """Writes frames [H, W, 3] uint8 into an MP4 file, by OpenCV."""

    def __init__(self, path, fps):
        try:
            import cv2
        except ImportError:
            raise BadInput(
                "--video needs: pip install opencv-python-headless"
            ) from None
        if not path.endswith(".mp4"):
            raise BadInput(f"--video {path}: expected a name that ends in .mp4")
        self._cv2 = cv2
        self._path = path
        self._fps = fps
        self._writer = None

    def write(self, frame):
        given = type(frame).__name__
        if isinstance(frame, np.ndarray):
            given = f"{frame.dtype} {list(frame.shape)}"
        if not re.fullmatch(r"uint8 \[\d+, \d+, [34]\]", given):
            raise BadInput(
                f"--video: render() returned {given}, expected an array [H, W, 3] uint8"
            )
        if self._writer is None:
            self._size = frame.shape[1::-1]  # Width and height.
            self._writer = self._cv2.VideoWriter(
                self._path,
                self._cv2.VideoWriter_fourcc(*"mp4v"),
                self._fps,
                self._size,
            )
            if not self._writer.isOpened():
                raise BadInput(f"--video {self._path} cannot be written as MP4")
        if frame.shape[1::-1] != self._size:  # It would be left out.
            frame = self._cv2.resize(frame, self._size)
        self._writer.write(self._cv2.cvtColor(frame, self._cv2.COLOR_RGB2BGR))

    def close(self):
        self._writer.release()
