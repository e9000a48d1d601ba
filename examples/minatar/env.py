"""MinAtar's five games, as MinAtar itself registers them with Gymnasium."""

from minatar.gym import register_envs

register_envs()
