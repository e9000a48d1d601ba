"""MiniGrid with observations of zeros and ones: what the agent sees, one-hot.

The module registers every environment of MiniGrid again, twice:

    torchbeast/MiniGrid-MultiRoom-N4-S5-v1           a new map in each episode
    torchbeast/MiniGrid-SameMap-MultiRoom-N4-S5-v1   the same map in all episodes
"""

import gymnasium
import minigrid  # noqa: F401 (registers its environments)
import numpy as np
from gymnasium import spaces
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX

SIZES = len(OBJECT_TO_IDX), len(COLOR_TO_IDX), len(STATE_TO_IDX)


class OneHot(gymnasium.ObservationWrapper):
    """Turns the numbers of object, color and state in each cell in view, [7, 7, 3],
    into [7, 7, 20] zeros and ones. Drops the text of the mission and the compass."""

    def __init__(self, env):
        super().__init__(env)
        height, width, _ = env.observation_space["image"].shape
        self.observation_space = spaces.MultiBinary((height, width, sum(SIZES)))

    def observation(self, observation):
        image = observation["image"]
        parts = [np.eye(n, dtype=np.int8)[image[..., i]] for i, n in enumerate(SIZES)]
        return np.concatenate(parts, axis=-1)


class SameMap(gymnasium.Wrapper):
    """Resets with the same seed for every episode, whatever --seed is."""

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=1, options=options)


def make(name, same_map=False, **kwargs):
    env = OneHot(gymnasium.make(name, disable_env_checker=True, **kwargs))
    return SameMap(env) if same_map else env


for name in [name for name in gymnasium.registry if name.startswith("MiniGrid-")]:
    same = name.replace("MiniGrid-", "MiniGrid-SameMap-")
    gymnasium.register(f"torchbeast/{name}", make, kwargs={"name": name})
    gymnasium.register(
        f"torchbeast/{same}", make, kwargs={"name": name, "same_map": True}
    )
