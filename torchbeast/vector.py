"""Environments that step together: Separate ones, or a Vector.

Both give arrays [E, ...] as the spaces declare them, and raise BadStep for what an
environment returns that is not. Of an info they read `episode_end`, `episode_metrics`
and `action_mask`, a Vector its last observations, too, and nothing else. (Gymnasium's
SyncVectorEnv merges all of the infos, which other people's environments fill with
anything, and casts what does not fit.)

No torch in here: environment servers import this file.
"""

import difflib
import warnings

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from torchbeast import masks
from torchbeast.calls import Call, random_of_environments
from torchbeast.messages import BadInput, log
from torchbeast.nests import replaced
from torchbeast.seeds import derive_seed
from torchbeast.spaces import Actions, BadStep, Observations, as_declared

RESET = ("observation", "info")
STEP = ("observation", "reward", "terminated", "truncated", "info")
# Names under which an info has what a reset within the step would hide.
FINAL = ("final_obs", "final_observation", "terminal_observation")


class Separate:
    """Steps E single Gymnasium environments, one after the other.

    reset(seed) returns observations. step(action), an action as Actions gives it,
    returns (observations, rewards float64 [E], terminated [E], truncated [E],
    episode_end [E], metrics), where metrics is a list of E infos' "episode_metrics", or
    None where there are none. After its last observation an environment is reset
    instead of stepped.

    masks: masks.Masks, which have those of the newest observations
    """

    unseen = False  # See Vector.
    out = None  # See pettingzoo.Rows.
    waits = None  # See turns.Turns.
    policy = None  # See seats.Seats.

    def __init__(self, envs):
        self.envs = envs
        self.num_envs = len(envs)
        self.metadata = envs[0].metadata
        self.frames_per_step = getattr(envs[0], "frames_per_step", 1)
        first, *others = envs
        self.name = name_of(first)
        space = space_of(first, "observation_space")
        action_space = space_of(first, "action_space")
        self.actions = Actions(action_space, self.num_envs)
        self.observations, self.masks = split(space, self.actions)
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
            self._reset(i, env, None if seed is None else derive_seed(seed, i))
            for i, env in enumerate(self.envs)
        )

    def _reset(self, i, env, seed=None):
        with random_of_environments(), self._reset_call:
            result = env.reset(seed=seed)
        return self.masks.take(*unpack("reset", result, RESET), i)

    def step(self, action):
        E = self.num_envs
        actions = self.actions.split(action)
        rewards, metrics = [0.0] * E, [None] * E
        terminated, truncated, end = [False] * E, [False] * E, [False] * E

        def step(i, env):
            if self._last[i]:
                return self._reset(i, env)
            with self._step_call:
                result = env.step(actions[i])
            observation, reward, ends, cut, info = unpack("step", result, STEP)
            rewards[i] = number(reward, "reward")
            terminated[i] = bool(number(ends, "terminated"))
            truncated[i] = bool(number(cut, "truncated"))
            end[i] = terminated[i] or truncated[i]
            if isinstance(info, dict):
                if "episode_end" in info:
                    end[i] = bool(number(info["episode_end"], "info['episode_end']"))
                metrics[i] = info.get("episode_metrics") if end[i] else None
            return self.masks.take(observation, info, i)

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
            close = getattr(env, "close", lambda: None)  # PettingZoo's may have none.
            try:
                with Call(f"close() of {self.name}", closing=True):
                    close()
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]


class Vector:
    """The same for a Gymnasium vector environment, which resets its environments
    itself, as its metadata["autoreset_mode"] says:

    NEXT_STEP   At the step after a last one, as Separate ones do.
    SAME_STEP   Within the last step, whose observation is info["final_obs"] and whose
                info is info["final_info"]. As all environments step together, one that
                was reset makes a step before an agent can answer: it takes action 0,
                its first observation is not shown, what follows is given as the first
                one. The reward belongs to the episode. An episode that ends within
                this step is not shown at all.

    unseen: where the last step() made a step of the latter kind: [E] bool, or False
    """

    out = waits = policy = None

    def __init__(self, env):
        self.env = env
        self.num_envs = env.num_envs
        self.metadata = env.metadata or {}
        self.frames_per_step = getattr(env, "frames_per_step", 1)
        self.name = name_of(env)
        self.same_step = self._autoreset_mode() == AutoresetMode.SAME_STEP.value
        self.unseen = False
        space = space_of(env, "single_observation_space")
        action_space = space_of(env, "single_action_space")
        self.actions = Actions(action_space, self.num_envs)
        self.observations, self.masks = split(space, self.actions)
        self._zeros, _ = self.actions.to_environment(self.actions.zeros())
        self._step_call = Call(f"step() of {self.name}")
        self._warned = False

    def _autoreset_mode(self):
        mode = self.metadata.get("autoreset_mode")
        mode = getattr(mode, "value", mode)
        if mode in (AutoresetMode.NEXT_STEP.value, AutoresetMode.SAME_STEP.value):
            return mode
        what = "no autoreset mode" if mode is None else f"autoreset mode {mode}"
        raise BadInput(
            f"vector environment {self.name} states {what} in its metadata, expected "
            "AutoresetMode.NEXT_STEP, or SAME_STEP with info['final_obs']"
        )

    def reset(self, seed):
        self._last = self._end = np.zeros(self.num_envs, bool)  # At the step before.
        with random_of_environments(), Call(f"reset() of {self.name}"):
            result = self.env.reset(seed=seed)
        observations = self.masks.take(*unpack("reset", result, RESET))
        if self.same_step and self.masks.of_step(self._last) is not None:
            raise BadInput(
                f"vector environment {self.name} has an action_mask and states "
                "AutoresetMode.SAME_STEP, expected NEXT_STEP"
            )
        return self.observations.of_vector(observations)

    def step(self, action):
        if self.same_step and self._last.any():
            action = replaced(self._last, action, self._zeros)
        with self._step_call:
            result = self.env.step(action)
        observations, rewards, terminated, truncated, info = unpack(
            "step", result, STEP
        )
        observations = self.masks.take(observations, info)
        rewards = self._numbers(rewards, "reward")
        terminated = self._numbers(terminated, "terminated").astype(bool)
        truncated = self._numbers(truncated, "truncated").astype(bool)
        last = terminated | truncated
        if not self.same_step and (self._last.any() or last.any()):
            self._check_next_step(rewards, last, info)
        info = info if isinstance(info, dict) else {}
        end, metrics = self._of_info(info, last)
        final = None
        if self.same_step:
            if last.any():
                final = self._final_obs(info)
                final_end, finals = self._of_info(info.get("final_info", info), last)
                end = np.where(last, final_end, end)
                metrics = [f if x else m for x, f, m in zip(last, finals, metrics)]
            ended = self._last & last  # Within the unseen step.
            lost = ended & self._end
            self.unseen = self._last & ~lost
            metrics = [None if x else m for x, m in zip(lost, metrics)]
            end, last = end & ~lost, last & ~ended
            terminated, truncated = terminated & ~ended, truncated & ~ended
        observations = self.observations.of_vector(
            observations, np.flatnonzero(last) if self.same_step else (), final
        )
        self._last, self._end = last, end
        return observations, rewards, terminated, truncated, end, metrics

    def _final_obs(self, info):
        if (final := info.get("final_obs")) is None:
            raise BadInput(
                f"vector environment {self.name} states AutoresetMode.SAME_STEP, but "
                "an episode ended without info['final_obs']"
            )
        return final

    def _check_next_step(self, rewards, last, info):
        """Raises BadInput if an environment resets within the step of an end, which
        hides the last observation and makes of the first transition a reset."""
        began, why = self._last & self._end, None
        if last.any():
            infos = info if isinstance(info, (list, tuple)) else [info]
            for name in FINAL:
                if any(isinstance(x, dict) and name in x for x in infos):
                    why = f"info has {name!r} where an episode ended"
        if (began & last).any():
            why = "an episode ended at the step that was to begin it"
        if why is not None:
            raise BadInput(
                f"vector environment {self.name} states AutoresetMode.NEXT_STEP, but "
                f"resets within the step: {why}"
            )
        if not self._warned and rewards[began].any():
            self._warned = True
            log.warning(
                "%s pays %g at the step after an episode's end, which is to be a reset "
                "(AutoresetMode.NEXT_STEP): left out",
                self.name,
                rewards[began][rewards[began] != 0][0],
            )

    def _of_info(self, info, last):
        """Returns (episode_end [E], metrics) as the info of E environments says."""
        info, end = info if isinstance(info, dict) else {}, last
        if "episode_end" in info:
            # Gymnasium's convention: info["_x"] tells of which environments "x" is.
            said = self._numbers(info["episode_end"], "info['episode_end']")
            end = np.where(info.get("_episode_end", True), said, end).astype(bool)
        return end, self._metrics(info.get("episode_metrics"), end)

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
        frames = self.env.render()
        several = isinstance(frames, (tuple, list)) or getattr(frames, "ndim", 0) == 4
        return frames[0] if several else frames

    def close(self):
        self.env.close()


def split(space, actions):
    """Returns the Observations and Masks of environments with this observation
    space."""
    masked = masks.in_observation(space, actions)
    observations = Observations(
        masks.without(space) if masked else space, actions.num_envs
    )
    return observations, masks.Masks(actions, actions.num_envs, masked)


def envpool_spec(task):
    """Returns the spec of EnvPool's environments of a task (Weng et al., arXiv
    2206.10558). Raises BadInput if it has none of this name."""
    import envpool

    tasks = envpool.list_all_envs()
    if task not in tasks:
        close = ", ".join(
            f"envpool:{x}" for x in difflib.get_close_matches(task, tasks)
        )
        hint = f": did you mean {close}?" if close else ""
        raise BadInput(f"unknown environment 'envpool:{task}'{hint}")

    def make_pool(num_envs, seed=None, **kwargs):
        if seed is None:  # Its own default is the same number each time.
            seed = int(np.random.default_rng().integers(2**31))
        kwargs = {"num_threads": 1, **kwargs}
        warnings.filterwarnings("ignore", "EnvPool seeds are fixed")  # As it has one.
        return envpool.make_gymnasium(task, num_envs=num_envs, seed=seed, **kwargs)

    return EnvSpec(task, vector_entry_point=make_pool)


def name_of(env):
    """Returns what messages call an environment. (EnvPool's spec has no id.)"""
    name = getattr(getattr(env, "spec", None), "id", None)
    return name or type(env.unwrapped).__name__


def space_of(env, attribute):
    space = getattr(env, attribute, None)
    if space is None:
        raise BadInput(f"environment {name_of(env)} has no {attribute}")
    return space


def unpack(method, result, names):
    if not isinstance(result, tuple) or len(result) != len(names):
        what = type(result).__name__
        if isinstance(result, tuple):
            what = f"{len(result)} things"
        raise BadStep(f"{method}() returned {what}, expected ({', '.join(names)})")
    return result


def number(x, name):
    """Returns the one number in x, whatever type has it. Raises BadStep if there is
    none."""
    if isinstance(x, (bool, float)):  # Much the fastest.
        return x
    try:
        return float(np.asarray(x).item())
    except (TypeError, ValueError, OverflowError) as e:
        text = f"{name} is {str(x)[:50]!r}, expected one number"
        if name[:6] == "reward" and isinstance(x, (list, tuple, np.ndarray)):
            text += " (a wrapper has to make one number of several objectives; several "
            text += "agents have one each in PettingZoo's Parallel API)"
        raise BadStep(text) from e
