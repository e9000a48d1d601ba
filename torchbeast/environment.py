"""Environments as the programs see them: steps of arrays, E environments at a time.

Environment takes whatever there is (one Gymnasium environment, a list of them, a
Gymnasium vector environment, objects of the old Gym API) and gives steps. A step is a
dict of arrays whose first dimension is E:

    observation              what the environment returned: an array, or a dict or tuple
    reward            [E]    float32, of the transition into the observation, unclipped
    done              [E]    bool, the observation is the first of an episode
    terminated        [E]    bool, it is the last, and nothing is bootstrapped from it
    truncated         [E]    bool, it is the last, cut off by a limit: bootstrapped
    last_action              the action that led here (0 at `done`): spaces.Actions
    episode_end       [E]    bool, the episode that is *reported* ended here
    episode_step      [E]    int32, of the reported episode, so far
    episode_return    [E]    float32, the same, unclipped
    training_episode_return [E] float32, of the episode between two `done`
    action_mask    [E, C]    bool, which choices an action has, if the environment says
                             so (torchbeast/masks.py)
    waits             [E]    bool, which rows have no step: their agents wait for their
                             turns. Only where agents act by turns (torchbeast/turns.py)
    policy            [E]    uint8, the number of the policy that acts. Only where there
                             are several (torchbeast/seats.py)

After a last observation the next step ignores its action and returns the first
observation of the next episode, with reward 0 and `done` (Gymnasium's next-step
autoreset). An agent that waits for its next episode while others play is `done` at each
step (torchbeast/pettingzoo.py). The episode that is trained on and the one that is
reported are the same, unless the environment says otherwise with info["episode_end"]
(atari_wrappers.py does: a lost life ends a training episode, the end of the game the
reported one).

No torch in here: environment servers import this file.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import inspect
import math
import os
import re
import sys
import time
from multiprocessing.process import ORIGINAL_DIR  # type: ignore[attr-defined]

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import VectorEnv

from torchbeast import hints, images, masks, pettingzoo, seats, turns
from torchbeast.calls import Call, count_steps, create, tell_slow
from torchbeast.messages import BadInput, first_line, log
from torchbeast.nests import replaced
from torchbeast.old_gym import OldGym
from torchbeast.process import take_signals_back
from torchbeast.spaces import BadStep, check_finite
from torchbeast.vector import Separate, Vector, envpool_spec

LOG_EVERY_S = 10  # While environments are made.
MAX_METRICS = 100  # An episode has no more.
# A column of logs.csv: ASCII without spaces, commas and quotes.
NAME = r"[!#-+\--~]{1,100}"


def argument(text):
    """An argparse type: NAME=VALUE, an argument of a constructor. A value is Python's
    number, True, None, list, ..., or else a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}, expected NAME=VALUE")
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(value)
    return name, value


def with_arguments(name, arguments):
    """Returns an environment's name and its arguments [(name, value)], as a learner
    and its servers compare them."""
    return " ".join([name, *sorted(f"{key}={x!r}" for key, x in arguments)])


def make(env_id, num_envs=1, render_mode=None, seed=None, /, **kwargs):
    """Makes what Environment takes: a list of num_envs Gymnasium environments, or of
    PettingZoo's (pettingzoo.find()), or the vector environment that env_id has of its
    own.

    render_mode, seed: given to constructors only where they are set: the seed to a
        vector environment that has such an argument.
    kwargs: given to the constructor.

    Raises BadInput, one line with close matches, if there is no such environment, if it
    needs a package that is not there, or if it does not take these arguments.
    """
    if render_mode:
        kwargs["render_mode"] = render_mode
    module, _, name = env_id.rpartition(":")
    try:
        if module and not re.fullmatch(r"\w+(\.\w+)*", module):
            raise ImportError(f"{module!r} cannot be the name of a module")
        if module:
            importlib.import_module(module)
        of_module = name not in gymnasium.registry and pettingzoo.find(env_id)
        if of_module:
            envs = _make(env_id, num_envs, functools.partial(of_module, **kwargs))
            return pettingzoo.checked(env_id, envs)
        spec = envpool_spec(name) if module == "envpool" else gymnasium.spec(name)
        vector = spec.vector_entry_point and (num_envs > 1 or spec.entry_point is None)
        if vector and not spec.additional_wrappers:
            with Call(f"the constructor of {name}"):
                return _make_vector(spec, num_envs, seed, kwargs)
        kwargs["disable_env_checker"] = True
        create = functools.partial(gymnasium.make, name, **kwargs)
        return _make(name, num_envs, create)
    except (TypeError, gymnasium.error.Error, ImportError) as e:
        raise BadInput(hints.not_made(e, env_id, render_mode, __file__)) from e


def _make_vector(spec, num_envs, seed, kwargs):
    """Makes the vector environment of a spec. (gymnasium.make_vec() would write over
    EnvPool's own spec, from which that takes its spaces.)"""
    entry_point = spec.vector_entry_point
    if not callable(entry_point):
        entry_point = load_env_creator(entry_point)
    kwargs = {**spec.kwargs, **kwargs}
    if spec.max_episode_steps is not None:
        kwargs.setdefault("max_episode_steps", spec.max_episode_steps)
    with contextlib.suppress(ValueError):  # It is a function in C.
        if seed is not None and "seed" in inspect.signature(entry_point).parameters:
            kwargs.setdefault("seed", seed)
    env = entry_point(num_envs=num_envs, **kwargs)
    if getattr(env.unwrapped, "spec", None) is None:
        env.unwrapped.spec = spec
    return env


def _make(name, num_envs, create):
    envs, logged_at = [], time.monotonic()
    try:
        for i in range(num_envs):
            if time.monotonic() - logged_at > LOG_EVERY_S:
                logged_at = time.monotonic()
                log.info("%s: %d of %d environments are made", name, i, num_envs)
            with Call(f"the constructor of {name}"):
                envs.append(create())
    except BaseException as e:
        for env in envs:
            with contextlib.suppress(Exception), Call(f"close() of {name}", True):
                env.close()
        if envs and re.search(r"\b(instances?|process(es)?)\b", str(e)):
            raise BadInput(
                f"environment {name} cannot be made twice in a process: use "
                "--envs_per_actor 1 (MonoBeast) or --envs_per_server 1 (PolyBeast): "
                f"{first_line(e)}"
            ) from e
        raise
    return envs


class Naming:
    """A context in which BadSteps name their environment."""

    def __init__(self, name):
        self._name = name

    def __enter__(self):
        pass

    def __exit__(self, kind, error, _):
        if kind is BadStep:
            error.args = (f"environment {self._name}: {error}",)


class Environment:
    """E environments that step together. Not thread-safe.

    env: one Gymnasium environment or a list of them, a Gymnasium vector environment,
        environments of PettingZoo's, or objects of the old Gym API. BadInput if it is
        none of these.
    resize, layout: --resize and --observation_layout (images.prepare())
    policies, opponents: --policies and --opponents (torchbeast/seats.py)

    num_envs:           E
    num_agents:         of each environment, as a vector says; E counts each of them
    num_acting:         the same, or 1 where they act by turns
    policies:           {name: slice or indices of its agents}, if there are several
    opponents:          --opponents
    of_policies:        whether spaces, and what is of them, are {policy: its own}
    observation_space:  of one environment, Gymnasium's, without entries of text
    texts:              names of the entries of text that are left out
    action_space:       of one environment, Gymnasium's
    actions:            spaces.Actions: the dtypes and shapes of an action
    frames_per_step:    the frames of the game that one step advances
    fps:                steps per second at the game's own speed, for videos
    """

    num_agents, opponents, of_policies = 1, None, False
    policies: dict = {}
    _mask = None  # [E, C], that of the newest step.

    def __init__(self, env, resize=None, layout=None, policies=None, opponents=None):
        if isinstance(env, VectorEnv):
            self.env = Vector(env)
            self.num_agents = getattr(env, "num_agents", 1)
        else:
            envs = env if isinstance(env, list) else [env]
            if not envs:
                raise BadInput("no environment: expected one or more")
            if all(map(pettingzoo.is_pettingzoo, envs)):
                self.env = turns.rows(envs, policies, opponents)
                self.num_agents = self.env.num_agents
                self.policies, self.opponents = self.env.seats.policies, opponents
            else:
                envs = [e if isinstance(e, gymnasium.Env) else OldGym(e) for e in envs]
                self.env = Separate(envs)
        if not hasattr(self.env, "seats"):
            seats.refuse(policies, opponents, self.env.name)
        images.prepare(self.env.observations, resize, layout)
        self.num_acting = self.num_agents if self.env.waits is None else 1
        self.name = self.env.name
        self._naming = Naming(self.name)
        self.of_policies = getattr(self.env, "union", None) is not None
        self.num_envs = self.env.num_envs
        self.observation_space = self.env.observations.space
        self.texts = self.env.observations.texts
        self.actions = self.env.actions
        self.action_space = self.actions.space
        self.frames_per_step = self.env.frames_per_step
        metadata = self.env.metadata or {}
        self.fps = (metadata.get("render_fps") or 30) / self.frames_per_step
        self._last = None  # [E] bool, whose action is ignored: the next is `done`.
        self._metrics = []
        self._warned = False

    def initial(self, seed: int | None = None) -> dict:
        """Resets all environments. Returns the first step, with done = True.

        Each environment gets a seed of its own. Raises BadStep if an observation is not
        what the space declares.
        """
        with self._naming:
            observation = self.env.reset(seed)
        E = self.num_envs
        self._last = np.zeros(E, bool)
        self._episode_end = np.zeros(E, bool)
        self._episode_step = np.zeros(E, np.int32)
        self._episode_return = np.zeros(E)
        self._training_return = np.zeros(E)
        no = np.zeros(E, bool)
        action = self._action = self.actions.zeros()  # Each row's newest one.
        with self._naming:
            return self._step(observation, np.zeros(E), ~no, no, no, no, action)

    def step(self, action) -> dict:
        """Steps all environments.

        action: a nest of arrays [E, ...], as spaces.Actions describes it. Ignored where
        the last step was a last one. Numbers outside of a Box are clipped to it.
        """
        if self._last is None:
            raise RuntimeError("Environment.step before Environment.initial")
        given, action = self.actions.to_environment(action)
        done = self._last
        if self._mask is not None:
            self.env.masks.check(action, self._mask, done)
        waited = self.env.waits
        with self._naming:
            stepped = self.env.step(given)
        observation, reward, terminated, truncated, end, metrics = stepped
        self._episode_step[self._episode_end] = 0
        self._episode_return[self._episode_end] = 0
        self._training_return[done] = 0
        # No reward leads into a first observation. If only training begins anew there,
        # the game may have paid: it goes on the score.
        made = paid = ~(done & self._episode_end) | self.env.unseen
        if waited is None:
            count_steps(self.num_envs)
        else:  # What an agent is paid before its first turn is on its score, too.
            made, paid = made & ~self.env.waits, True
            action = self._action = replaced(waited, action, self._action)
            count_steps(int(made.sum()))
        self._episode_step[made] += 1
        self._episode_return += np.where(paid, reward, 0)
        # (Also a copy, as the caller may write into its own.)
        action = replaced(done, action, self.actions.zeros())
        for m in metrics:
            if m is not None:
                self.add_metrics(m)
        step = observation, reward, done, terminated, truncated, end, action
        with self._naming:
            return self._step(*step)

    def _step(self, observation, reward, done, terminated, truncated, end, action):
        reward = np.where(done, 0, reward)
        check_finite(reward, "reward")
        reward = reward.astype(np.float32)
        self._training_return += reward
        # Both at once is an end: nothing is bootstrapped.
        truncated = truncated & ~terminated
        self._last = terminated | truncated
        self._episode_end = end
        if self.env.out is not None:
            self._last = self._episode_end = self.env.out
        self._mask = self.env.masks.of_step(self._last)
        return {
            "observation": observation,
            "reward": reward,
            "done": done,
            "terminated": terminated,
            "truncated": truncated,
            "last_action": action,
            "episode_end": end,
            "episode_step": self._episode_step.copy(),
            "episode_return": self._episode_return.astype(np.float32),
            "training_episode_return": self._training_return.astype(np.float32),
            **({} if self._mask is None else {"action_mask": self._mask}),
            **({} if self.env.waits is None else {"waits": self.env.waits}),
            **({} if self.env.policy is None else {"policy": self.env.policy}),
        }

    def signature(self):
        """Returns a text that a learner and its servers compare: the space of
        observations, and the policies."""
        policies = f", policies {self.policies}" if self.policies else ""
        if self.opponents is not None:
            policies = f", opponents {self.opponents}"
        return f"{self.observation_space}{policies}"

    def all_out(self):
        """Tells whether all agents have had their last steps, or have left without
        any."""
        return self.env.out is not None and bool(self.env.out.all())

    def some_action(self):
        """Returns an action [E, ...] that may be taken after the newest step."""
        if self._mask is None:
            return self.actions.zeros()
        return masks.some_action(self.actions, self._mask)

    def add_metrics(self, metrics):
        """Keeps the numbers of an episode's metrics, and warns once of anything
        else."""
        numbers, metrics = {}, metrics if isinstance(metrics, dict) else {"": metrics}
        for name, x in list(metrics.items())[:MAX_METRICS]:
            try:
                number = float(np.asarray(x).item())
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if math.isfinite(number) and re.fullmatch(NAME, str(name)):
                numbers[str(name)] = number
            elif not self._warned:
                self._warned = True
                log.warning(
                    "%s: info['episode_metrics'] has %.50r: %.50r, expected a finite "
                    "number and a name without spaces, commas and quotes: left out",
                    self.name,
                    name,
                    x,
                )
        if numbers:
            self._metrics.append(numbers)

    def take_metrics(self) -> list[dict]:
        """Returns info["episode_metrics"] of the reported episodes that ended since the
        last call: {name: number} of each."""
        metrics, self._metrics = self._metrics, []
        return metrics

    def render(self):
        """Returns the frame [H, W, 3] uint8 of the first environment, if it renders
        arrays."""
        return self.env.render()

    def close(self):
        """Closes the environments. Logs what they raise."""
        try:
            with Call(f"close() of {self.name}", closing=True):
                self.env.close()
        except Exception as e:
            log.warning("close() of %s raised %s", self.name, first_line(e))


def probe(create_env, flags, num_envs):
    """Makes environments only to see what their steps look like, and closes them.
    Returns (env, its first step)."""
    told, streams = tell_slow(math.inf), (sys.stdout, sys.stderr)
    try:
        try:
            env = create(create_env, flags, num_envs)
        except Exception as e:
            if isinstance(e, BadInput) or not flags.env_args:
                raise
            raise BadInput(hints.refused(e, flags.env, flags.env_args)) from e
        if isinstance(env.env, Vector) and env.env.same_step:
            log.warning(
                "%s resets within the step (AutoresetMode.SAME_STEP): of an episode, "
                "the first step is not learned from (docs/fork.md)",
                env.name,
            )
        try:
            step = first_step(env)
            for line in hints.outside(env.observation_space, step["observation"]):
                log.warning("%s: %s", env.name, line)
            try_step(env)
            return env, step
        finally:
            env.close()
    finally:
        take_signals_back()
        sys.stdout, sys.stderr = streams  # It may have had others.
        told.set()
        with contextlib.suppress(OSError):
            os.chdir(ORIGINAL_DIR)


def first_step(env, seed=0):
    """Returns a first step. Raises BadInput if it is not what the environment's spaces
    declare."""
    try:
        return env.initial(seed)
    except BadStep as e:
        raise BadInput(str(e)) from e
    except TypeError as e:
        if not re.search("unexpected keyword argument '(seed|options)'", str(e)):
            raise
        expected = "expected reset(self, *, seed=None, options=None)"
        raise BadInput(f"environment {env.name}: {first_line(e)}: {expected}") from e


def try_step(env):
    """Raises BadInput if a step is not what the environment's spaces declare. Whatever
    else an environment raises is left to actors and servers, which begin anew: it may
    raise that only now and then."""
    try:
        env.step(env.some_action())
    except BadStep as e:
        raise BadInput(str(e)) from e
    except Exception:
        pass
