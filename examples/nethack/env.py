"""The NetHack Learning Environment as dicts of glyphs, blstats and message.

The module registers NLE's tasks again, with torchbeast/ before their names.
"""

import gymnasium
import nle  # noqa: F401 (registers its tasks)

KEYS = "glyphs", "blstats", "message"
# At its own limit, 5,000 steps, NLE ends a game as if by death, and shows an empty map.
# Gymnasium's limit comes one step before that, and is bootstrapped.
MAX_EPISODE_STEPS = 4999


def make(task, render_mode=None):
    mode = "pixel" if render_mode == "rgb_array" else render_mode
    return gymnasium.make(
        task, observation_keys=KEYS, render_mode=mode, disable_env_checker=True
    )


for task in [name for name in gymnasium.registry if name.startswith("NetHack")]:
    gymnasium.register(
        f"torchbeast/{task}",
        make,
        kwargs={"task": task},
        max_episode_steps=MAX_EPISODE_STEPS,
    )
