"""Environments as the programs see them: steps of arrays, E environments at a time.

Environment takes whatever there is (one Gymnasium environment, a list of them, a
Gymnasium vector environment, objects of the old Gym API) and gives steps. A step is a
dict of arrays whose first dimension is E:

    observation              what the environment returned: an array, or a dict or tuple
    reward            [E]    float32, of the transition into the observation, unclipped
    done              [E]    bool, the observation is the first of an episode
    terminated        [E]    bool, it is the last, and nothing is bootstrapped from it
    truncated         [E]    bool, it is the last, cut off by a limit: bootstrapped
    last_action       [E, ...] int64, the action that led here (0 at `done`)
    episode_end       [E]    bool, the episode that is *reported* ended here
    episode_step      [E]    int32, of the reported episode, so far
    episode_return    [E]    float32, the same, unclipped
    training_episode_return [E] float32, of the episode between two `done`

After a last observation the next step ignores its action and returns the first
observation of the next episode, with reward 0 and `done` (Gymnasium's next-step
autoreset). The episode that is trained on and the one that is reported are the same,
unless the environment says otherwise with info["episode_end"] (atari_wrappers.py does:
a lost life ends a training episode, the end of the game the reported one).

No torch in here: environment servers import this file.
"""

import contextlib
import difflib
import importlib
import inspect
import os
import threading
import time

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv


class BadInput(ValueError):
    """A mistake of the user's. The programs print it as one line and exit with code
    2."""


def map_structure(fn, nest, *others):
    """Applies fn to every leaf of nested dicts and tuples. The others have the nest's
    structure, or more entries."""
    if isinstance(nest, dict):
        return {
            k: map_structure(fn, x, *(o[k] for o in others)) for k, x in nest.items()
        }
    if isinstance(nest, (tuple, list)):
        return tuple(map_structure(fn, *leaves) for leaves in zip(nest, *others))
    return fn(nest, *others)


def leaves(nest, path=""):
    """Returns [(path, leaf)] of nested dicts and tuples, in order. A path is like
    'observation/image'."""
    if isinstance(nest, dict):
        items = nest.items()
    elif isinstance(nest, (tuple, list)):
        items = enumerate(nest)
    else:
        return [(path, nest)]
    prefix = f"{path}/" if path else ""
    return [leaf for k, v in items for leaf in leaves(v, f"{prefix}{k}")]


def make(env_id: str, num_envs: int = 1, render_mode: str | None = None):
    """Makes what Environment takes: a list of num_envs Gymnasium environments, or the
    vector environment that env_id has of its own.

    Raises BadInput, one line with close matches, if there is no such environment.
    """
    # Not every environment has the argument.
    kwargs = {"render_mode": render_mode} if render_mode else {}
    try:
        module, _, name = env_id.rpartition(":")
        if module:
            importlib.import_module(module)
        spec = gymnasium.spec(name)
        if spec.vector_entry_point and num_envs > 1 and not spec.additional_wrappers:
            mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
            return gymnasium.make_vec(name, num_envs, mode, **kwargs)
        kwargs["disable_env_checker"] = True
        return [gymnasium.make(name, **kwargs) for _ in range(num_envs)]
    except (gymnasium.error.Error, ImportError, TypeError) as e:
        if isinstance(e, gymnasium.error.Error) and name not in gymnasium.registry:
            raise BadInput(f"unknown environment {env_id!r}{_close(name)}") from e
        reason = " ".join(str(e).split())
        raise BadInput(f"environment {env_id!r} cannot be made: {reason}") from e


def _close(env_id: str) -> str:
    by_lower = {name.lower(): name for name in gymnasium.registry}
    close = difflib.get_close_matches(env_id.lower(), by_lower, n=3, cutoff=0.5)
    return f": did you mean {', '.join(by_lower[c] for c in close)}?" if close else ""


_calls = set()  # Of environments, that have not returned yet.


@contextlib.contextmanager
def watched():
    """A context for a call of an environment: see watch()."""
    call = object()
    _calls.add(call)
    try:
        yield
    finally:
        _calls.discard(call)


def watch(name: str, timeout_s: float, tell):
    """Ends this process when a call of an environment has not returned for timeout_s,
    because nothing can end the call alone. Calls tell(one line) first.

    A call that holds the GIL all the time is not noticed. The thread that watches ends
    with the process.
    """

    def check():
        seen = {}  # {call: how often}: time in which the process was stopped is none.
        while max(seen.values(), default=0) <= 10:
            time.sleep(timeout_s / 10)
            seen = {call: seen.get(call, 0) + 1 for call in list(_calls)}
        tell(f"{name} did not answer for {timeout_s:g} s (--env_timeout_seconds)")
        os._exit(1)

    threading.Thread(target=check, daemon=True, name="watch").start()


class Environment:
    """E environments that step together. Not thread-safe.

    num_envs:           E
    observation_space:  of one environment, Gymnasium's
    action_space:       of one environment, Gymnasium's
    num_actions:        A of each of the D numbers that make an action: a tuple
    action_shape:       () for Discrete, (D,) for MultiDiscrete
    frames_per_step:    the frames of the game that one step advances
    fps:                steps per second at the game's own speed, for videos
    """

    def __init__(self, env):
        if isinstance(env, list) and not env:
            raise BadInput("no environment: expected one or more")
        if not isinstance(env, VectorEnv):
            envs = [_as_gymnasium(e) for e in (env if isinstance(env, list) else [env])]
            env = SyncVectorEnv([lambda e=e: e for e in envs])
        mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if AutoresetMode(mode) != AutoresetMode.NEXT_STEP:
            raise BadInput(
                f"vector environment has autoreset mode {AutoresetMode(mode).value}: "
                "make it with autoreset_mode=AutoresetMode.NEXT_STEP"
            )
        self.env = env
        self.num_envs = env.num_envs
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.frames_per_step = getattr(env, "frames_per_step", 1)
        self.fps = env.metadata.get("render_fps", 30) / self.frames_per_step
        check_observation_space(self.observation_space)
        self.num_actions, self.action_shape, self._start = choices(self.action_space)
        self._last = None  # [E] bool, terminated | truncated at the last step.

    def initial(self, seed: int | None = None) -> dict:
        """Resets all environments. Returns the first step, with done = True."""
        with watched():
            observation, _ = self.env.reset(seed=seed)
        E = self.num_envs
        self._last = np.zeros(E, bool)
        self._episode_end = np.zeros(E, bool)
        self._episode_step = np.zeros(E, np.int32)
        self._episode_return = np.zeros(E)
        self._training_return = np.zeros(E)
        zeros = np.zeros(E, bool)
        action = np.zeros((E, *self.action_shape), np.int64)
        return self._step(observation, np.zeros(E), ~zeros, zeros, zeros, action, {})

    def step(self, action: np.ndarray) -> dict:
        """Steps all environments.

        action: [E, ...] integers. An action is ignored where the last step was a last
        one.
        """
        if self._last is None:
            raise RuntimeError("Environment.step before Environment.initial")
        action = np.asarray(action, np.int64)
        if action.shape != (self.num_envs, *self.action_shape):
            raise ValueError(
                f"action has shape {action.shape}, "
                f"expected {(self.num_envs, *self.action_shape)}"
            )
        done = self._last
        with watched():
            observation, reward, terminated, truncated, info = self.env.step(
                action + self._start
            )
        self._episode_step[self._episode_end] = 0
        self._episode_return[self._episode_end] = 0
        self._training_return[done] = 0
        self._episode_step[~self._episode_end] += 1
        action = action.copy()
        action[done] = 0
        return self._step(
            observation, reward, done, terminated, truncated, action, info
        )

    def _step(self, observation, reward, done, terminated, truncated, action, info):
        # No reward leads into a first observation. If only training begins anew there,
        # the game may have paid: it goes on the score.
        self._episode_return += np.where(done & self._episode_end, 0, reward)
        reward = np.where(done, 0, reward).astype(np.float32)
        check_finite({"observation": observation, "reward": reward})
        self._training_return += reward
        # Both at once is an end: nothing is bootstrapped.
        truncated = truncated & ~terminated
        self._last = terminated | truncated
        # Gymnasium's convention: info["_x"] tells which environments info["x"] is of.
        self._episode_end = np.where(
            info.get("_episode_end", "episode_end" in info),
            info.get("episode_end", self._last),
            self._last,
        ).astype(bool)
        return {
            "observation": observation,
            "reward": reward,
            "done": done,
            "terminated": terminated,
            "truncated": truncated,
            "last_action": action,
            "episode_end": self._episode_end,
            "episode_step": self._episode_step.copy(),
            "episode_return": self._episode_return.astype(np.float32),
            "training_episode_return": self._training_return.astype(np.float32),
        }

    def render(self):
        """Returns the frame [H, W, 3] uint8 of the first environment, if it renders
        arrays."""
        frame = self.env.render()
        return frame[0] if isinstance(frame, (tuple, list)) else frame

    def close(self):
        self.env.close()


def check_finite(nest):
    """Raises a ValueError that names the environment if a number is NaN or infinite.
    The network would turn every number it computes from such a number into NaN."""
    for path, x in leaves(nest):
        x = np.asarray(x)
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            index = tuple(int(i) for i in np.argwhere(~np.isfinite(x))[0])
            raise ValueError(f"{path} of environment {index[0]} is {x[index]}")


def check_observation_space(space, path="observation"):
    """Raises BadInput that names the first part of the space that is not supported."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            check_observation_space(part, f"{path}/{key}")
    elif isinstance(space, spaces.Tuple):
        for i, part in enumerate(space.spaces):
            check_observation_space(part, f"{path}/{i}")
    elif not isinstance(
        space,
        (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary),
    ):
        raise BadInput(
            f"{path} space {space} is not supported: "
            "use Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them"
        )


def choices(space):
    """Describes an action of the space: (the number of choices of each of its D
    numbers, its shape () or (D,), its smallest value). Raises BadInput if the space is
    not supported."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),), (), int(space.start)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return tuple(int(n) for n in space.nvec), space.shape, space.start
    raise BadInput(
        f"action space {space} is not supported: use Discrete or a flat MultiDiscrete"
    )


# The old Gym API: reset() -> observation, step() -> (observation, reward, done, info),
# spaces of a package that need not be installed.


def _as_gymnasium(env) -> gymnasium.Env:
    return env if isinstance(env, gymnasium.Env) else OldGym(env)


class OldGym(gymnasium.Env):
    """Turns an object of the old Gym API into a Gymnasium environment."""

    def __init__(self, env):
        if isinstance(env, VectorEnv):
            raise BadInput("a vector environment stands alone, not in a list")
        for name in ("reset", "step", "observation_space", "action_space"):
            if not hasattr(env, name):
                raise BadInput(
                    f"{type(env).__name__} is neither a Gymnasium nor an old Gym "
                    f"environment: it has no {name}"
                )
        self.env = env
        self.observation_space = _as_gymnasium_space(env.observation_space)
        self.action_space = _as_gymnasium_space(env.action_space)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        parameters = inspect.signature(self.env.reset).parameters.values()
        takes_seed = any(
            p.name == "seed" or p.kind == p.VAR_KEYWORD for p in parameters
        )
        if seed is None:
            result = self.env.reset()
        elif hasattr(self.env, "seed"):
            self.env.seed(seed)
            result = self.env.reset()
        else:  # Gym 0.26.
            result = self.env.reset(**({"seed": seed} if takes_seed else {}))
        if isinstance(result, tuple) and len(result) == 2:
            if isinstance(result[1], dict):  # Gym 0.26, and look-alikes.
                return result
        return result, {}

    def step(self, action):
        result = self.env.step(action)
        if len(result) == 5:
            return result
        observation, reward, done, info = result
        truncated = bool(done) and bool(info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated, info

    def render(self):
        return self.env.render(mode="rgb_array")

    def close(self):
        if hasattr(self.env, "close"):
            self.env.close()


def _as_gymnasium_space(space) -> spaces.Space:
    """Converts a space of the old Gym API, by its class's name: gym need not be
    installed."""
    if isinstance(space, spaces.Space):
        return space
    name = type(space).__name__
    if name == "Box":
        return spaces.Box(space.low, space.high, space.shape, space.dtype)
    if name == "Discrete":
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if name == "MultiDiscrete":
        return spaces.MultiDiscrete(space.nvec)
    if name == "MultiBinary":
        return spaces.MultiBinary(space.n)
    if name == "Dict":
        return spaces.Dict({k: _as_gymnasium_space(v) for k, v in space.spaces.items()})
    if name == "Tuple":
        return spaces.Tuple([_as_gymnasium_space(v) for v in space.spaces])
    raise BadInput(f"space {space} of the old Gym API is not supported")
