"""Objects of the old Gym API as Gymnasium environments: reset() -> observation,
step() -> (observation, reward, done, info), spaces of a package that is not needed.

No torch in here: environment servers import this file.
"""

import inspect
import sys

import gymnasium
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from torchbeast.messages import BadInput

OLD = (
    "it is of the old Gym API: register a function that returns "
    "torchbeast.old_gym.OldGym(it) (docs/fork.md)"
)
PETTINGZOO = (
    "it is PettingZoo's, of several agents: name what makes it by --env MODULE:NAME, "
    "without registering it (docs/multi-agent.md)"
)


def registers(name):
    """Tells whether the old Gym, if it was imported, has an environment of this ID."""
    registry = getattr(getattr(sys.modules.get("gym"), "envs", None), "registry", ())
    return name in getattr(registry, "env_specs", registry)  # Until Gym 0.22.


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
        if hasattr(env, "possible_agents"):
            raise BadInput(f"environment {type(env).__name__}: {PETTINGZOO}")
        self.env = env
        self.observation_space = as_space(env.observation_space)
        self.action_space = as_space(env.action_space)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is None:
            result = self.env.reset()
        elif callable(getattr(self.env, "seed", None)):
            self.env.seed(seed)
            result = self.env.reset()
        else:  # Gym 0.26.
            result = _call(self.env.reset, seed=seed)
        if isinstance(result, tuple) and len(result) == 2:
            if isinstance(result[1], dict):  # Gym 0.26, and look-alikes.
                return result
        return result, {}

    def step(self, action):
        result = self.env.step(action)
        if not isinstance(result, tuple) or len(result) != 4:
            return result  # Gym 0.26's, or wrong.
        observation, reward, done, info = result
        truncated = isinstance(info, dict) and info.get("TimeLimit.truncated", False)
        truncated = bool(done) and bool(truncated)
        return observation, reward, bool(done) and not truncated, truncated, info

    def render(self):
        return _call(self.env.render, mode="rgb_array")

    def close(self):
        if hasattr(self.env, "close"):
            self.env.close()


def _call(method, **argument):
    """Calls a method with an argument if it takes that, else without."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # It is a function in C.
        parameters = ()
    takes = any(p.name in argument or p.kind is p.VAR_KEYWORD for p in parameters)
    return method(**argument if takes else {})


def as_space(space) -> spaces.Space:
    """Converts a space of the old Gym API, by its class's name, Box or BoxSpace: gym
    need not be installed."""
    if isinstance(space, spaces.Space):
        return space
    name = type(space).__name__.removesuffix("Space")
    if name == "Box":
        return spaces.Box(space.low, space.high, space.shape, space.dtype)
    if name == "Discrete":
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if name == "MultiDiscrete":
        return spaces.MultiDiscrete(space.nvec)
    if name == "MultiBinary":
        return spaces.MultiBinary(space.n)
    if name == "Dict":
        return spaces.Dict({k: as_space(v) for k, v in space.spaces.items()})
    if name == "Tuple":
        return spaces.Tuple([as_space(v) for v in space.spaces])
    raise BadInput(f"space {space} of the old Gym API is not supported")
