"""Environments that step together: a Batch of single ones, or a Vector.

Both give arrays [E, ...] as the spaces declare them, and raise BadStep for what an
environment returns that is not. Of an info they read `episode_end` and
`episode_metrics`, and look at nothing else in it. (Gymnasium's SyncVectorEnv merges all
of the infos, which other people's environments fill with anything, and casts what does
not fit.)

No torch in here: environment servers import this file.
"""

import numpy as np
from gymnasium.vector import AutoresetMode

from torchbeast.calls import Call
from torchbeast.process import BadInput
from torchbeast.seeds import derive_seed
from torchbeast.spaces import Actions, BadStep, Observations, as_declared

# What a stream of PolyBeast carries.
MAX_ENVS = 4096
MAX_MESSAGE_BYTES = 2**28  # Of a response; the learner takes no more.
MAX_STEP_BYTES = MAX_MESSAGE_BYTES - 2**22  # Beside a Welcome, metrics and lengths.

RESET = ("observation", "info")
STEP = ("observation", "reward", "terminated", "truncated", "info")


class Batch:
    """Steps E single Gymnasium environments, one after the other.

    reset(seed) returns observations. step(action), an action as Actions gives it,
    returns (observations, rewards float64 [E], terminated [E], truncated [E],
    episode_end [E], metrics), where metrics is a list of E infos' "episode_metrics", or
    None where there are none. After its last observation an environment is reset
    instead of stepped.
    """

    def __init__(self, envs):
        self.envs = envs
        self.num_envs = len(envs)
        self.metadata = envs[0].metadata
        self.frames_per_step = getattr(envs[0], "frames_per_step", 1)
        first, *others = envs
        self.name = name_of(first)
        space = space_of(first, "observation_space")
        action_space = space_of(first, "action_space")
        self.observations = Observations(space, self.num_envs)
        self.actions = Actions(action_space, self.num_envs)
        for env in others:
            if (env.observation_space, env.action_space) != (space, action_space):
                raise BadInput(
                    f"environments with different spaces: {space} and {action_space}, "
                    f"{env.observation_space} and {env.action_space}"
                )
        self._reset_call = Call(f"reset() of {self.name}")
        self._step_call = Call(f"step() of {self.name}")

    def reset(self, seed):
        self._last = np.zeros(self.num_envs, bool)
        return self.observations.stack(
            self._reset(env, None if seed is None else derive_seed(seed, i))
            for i, env in enumerate(self.envs)
        )

    def _reset(self, env, seed=None):
        with self._reset_call:
            result = env.reset(seed=seed)
        return _unpack("reset", result, RESET)[0]

    def step(self, action):
        E = self.num_envs
        actions = self.actions.split(action)
        rewards, metrics = [0.0] * E, [None] * E
        terminated, truncated, end = [False] * E, [False] * E, [False] * E

        def step(i, env):
            if self._last[i]:
                return self._reset(env)
            with self._step_call:
                result = env.step(actions[i])
            observation, reward, ends, cut, info = _unpack("step", result, STEP)
            rewards[i] = _number(reward, "reward")
            terminated[i] = bool(_number(ends, "terminated"))
            truncated[i] = bool(_number(cut, "truncated"))
            end[i] = terminated[i] or truncated[i]
            if isinstance(info, dict):
                if "episode_end" in info:
                    end[i] = bool(_number(info["episode_end"], "info['episode_end']"))
                metrics[i] = info.get("episode_metrics") if end[i] else None
            return observation

        observations = self.observations.stack(map(step, range(E), self.envs))
        terminated, truncated, end = map(np.array, (terminated, truncated, end))
        self._last = terminated | truncated
        rewards = np.array(rewards, np.float64)
        return observations, rewards, terminated, truncated, end, metrics

    def render(self):
        return self.envs[0].render()

    def close(self):
        errors = []
        for env in self.envs:
            try:
                with Call(f"close() of {self.name}"):
                    env.close()
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]


class Vector:
    """The same for a Gymnasium vector environment, which resets its environments
    itself, at the step after a last one."""

    def __init__(self, env):
        mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if getattr(mode, "value", mode) != AutoresetMode.NEXT_STEP.value:
            raise BadInput(
                f"vector environment has autoreset mode {getattr(mode, 'value', mode)}"
                ": make it with autoreset_mode=AutoresetMode.NEXT_STEP"
            )
        self.env = env
        self.num_envs = env.num_envs
        self.metadata = env.metadata
        self.frames_per_step = getattr(env, "frames_per_step", 1)
        self.name = name_of(env)
        space = space_of(env, "single_observation_space")
        self.observations = Observations(space, self.num_envs)
        action_space = space_of(env, "single_action_space")
        self.actions = Actions(action_space, self.num_envs)
        self._step_call = Call(f"step() of {self.name}")

    def reset(self, seed):
        with Call(f"reset() of {self.name}"):
            result = self.env.reset(seed=seed)
        return self.observations.of_vector(_unpack("reset", result, RESET)[0])

    def step(self, action):
        with self._step_call:
            result = self.env.step(action)
        observations, rewards, terminated, truncated, info = _unpack(
            "step", result, STEP
        )
        rewards = self._numbers(rewards, "reward")
        terminated = self._numbers(terminated, "terminated").astype(bool)
        truncated = self._numbers(truncated, "truncated").astype(bool)
        end = terminated | truncated
        info = info if isinstance(info, dict) else {}
        if "episode_end" in info:
            # Gymnasium's convention: info["_x"] tells of which environments "x" is.
            said = self._numbers(info["episode_end"], "info['episode_end']")
            end = np.where(info.get("_episode_end", True), said, end).astype(bool)
        return (
            self.observations.of_vector(observations),
            rewards,
            terminated,
            truncated,
            end,
            self._metrics(info.get("episode_metrics"), end),
        )

    def _numbers(self, x, name):
        dtype = np.dtype(np.float64)
        return as_declared(x, dtype, (self.num_envs,), name).astype(dtype)

    def _metrics(self, metrics, end):
        """Takes apart what Gymnasium's vector environments make of E dicts."""
        result = [None] * self.num_envs
        if not isinstance(metrics, dict):
            return result
        for i in np.flatnonzero(end):
            result[i] = {}
            for name, x in metrics.items():
                x, there = np.asarray(x), np.asarray(metrics.get(f"_{name}", end))
                if not str(name).startswith("_") and there.shape == end.shape:
                    if x.shape[:1] != end.shape:
                        result[i][name] = None  # Which is told of and left out.
                    elif there[i]:
                        result[i][name] = x[i]
        return result

    def render(self):
        frame = self.env.render()
        return frame[0] if isinstance(frame, (tuple, list)) else frame

    def close(self):
        self.env.close()


def name_of(env):
    spec = getattr(env, "spec", None)
    return spec.id if spec is not None else type(env.unwrapped).__name__


def space_of(env, attribute):
    space = getattr(env, attribute, None)
    if space is None:
        raise BadInput(f"environment {name_of(env)} has no {attribute}")
    return space


def _unpack(method, result, names):
    if not isinstance(result, tuple) or len(result) != len(names):
        what = type(result).__name__
        if isinstance(result, tuple):
            what = f"{len(result)} things"
        raise BadStep(f"{method}() returned {what}, expected ({', '.join(names)})")
    return result


def _number(x, name):
    """Returns the one number in x, whatever type has it. Raises BadStep if there is
    none."""
    if isinstance(x, (bool, float)):  # Much the fastest.
        return x
    try:
        return float(np.asarray(x).item())
    except (TypeError, ValueError, OverflowError) as e:
        raise BadStep(f"{name} is {str(x)[:50]!r}, expected one number") from e
