"""Games of two: who plays against the agent that is judged (--opponent).

A player is a function of its own row of a step, arrays [1, ...], that returns an action
[1, ...]. The first row of an environment is the judged agent's (torchbeast/seats.py).
"""

import importlib
import os

import numpy as np
from gymnasium import spaces

from torchbeast import masks
from torchbeast.messages import BadInput, first_line
from torchbeast.nests import map_structure
from torchbeast.spaces import Actions


class Sides:
    """Two players as one: a function of a step of one environment of two agents."""

    def __init__(self, env, *players):
        self._actions, self._players = env.actions, players

    def __call__(self, step):
        action = self._actions.zeros()
        for row, player in enumerate(self._players):
            if "waits" in step and step["waits"][row]:
                continue
            own = map_structure(lambda x, i=row: x[i : i + 1], step)
            map_structure(lambda x, y, i=row: _put(x, y, i), action, player(own))
        return action


def _put(x, y, row):
    x[row] = y[0]


class Random:
    """Takes any action that is allowed, each as likely as the others."""

    def __init__(self, env, seed):
        if any(leaf.num_choices is None for leaf in env.actions.leaves):
            raise BadInput(f"random play: {env.name} has actions that are no choices")
        self._actions = Actions(env.action_space, 1)
        self._random = np.random.default_rng(seed)

    def __call__(self, step):
        mask = step.get("action_mask")
        if mask is None:
            mask = np.ones((1, sum(masks.sizes(self._actions))), bool)
        scores = mask * (1 - self._random.random(mask.shape))  # Above 0.
        return masks.some_action(self._actions, scores)


class Function:
    """Asks a function of (observation, legal actions, random numbers) for the number of
    an action, where those are Discrete. name: --opponent"""

    def __init__(self, env, function, seed, name):
        if not isinstance(env.action_space, spaces.Discrete):
            raise BadInput(f"--opponent: {env.name} has no Discrete actions")
        self._num, self._function = int(env.action_space.n), function
        self._name = name
        self._random = np.random.default_rng(seed)

    def __call__(self, step):
        legal = list(range(self._num))
        if "action_mask" in step:
            legal = np.flatnonzero(step["action_mask"][0]).tolist()
        observation = map_structure(lambda x: x[0], step["observation"])
        action = self._function(observation, legal, self._random)
        if action not in legal:
            raise BadInput(
                f"--opponent {self._name} returned {action!r}, expected one of {legal}"
            )
        return np.array([int(action)])


def ask(env):
    """Returns a function that shows a person in a terminal the game, and asks for the
    number of a legal action."""

    def function(observation, legal, random):
        agent = env.env.seats.rows[0][1]
        print(f"{board(env, observation)}\n{agent}, your action, one of {legal}:")
        while True:
            try:
                text = input("> ")
            except EOFError:
                raise KeyboardInterrupt from None
            if text.strip().isdecimal() and int(text) in legal:
                return int(text)
            print(f"expected one of {legal}")

    return function


def board(env, observation):
    """Returns a text: what the environment renders as one, or else the observation. Two
    planes [H, W, 2] of 0 and 1 are the pieces of who is asked, X, and the other's."""
    if getattr(env.env.envs[0], "render_mode", None) == "ansi":
        return str(env.render())
    planes = list(observation.values()) if isinstance(observation, dict) else []
    x = planes[0] if len(planes) == 1 else observation
    if getattr(x, "shape", ())[2:] != (2,) or not np.isin(x, (0, 1)).all():
        return str(x)
    lines = x[..., 0] + 2 * x[..., 1]
    return "\n".join(" ".join(".XO"[int(i) % 3] for i in line) for line in lines)


def find(env, name, seed, of_checkpoint):
    """Returns the player that --opponent names. of_checkpoint: a function of a path
    that returns a checkpoint's player."""
    if name == "random":
        return Random(env, seed)
    if name == "human":
        return Function(env, ask(env), seed, name)
    module, colon, attribute = name.rpartition(":")
    if not colon or os.path.exists(name):
        return of_checkpoint(name)
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        raise BadInput(f"--opponent {name}: {first_line(e, False)}") from e
    return Function(env, function, seed, name)
