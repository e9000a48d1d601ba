"""Environments on the device: pure functions of tensors, many environments at a time.

An environment is an object with

    observation_space, action_space   of one agent, Gymnasium's
    policies        {name: slice of its N agents}: agents of one slice share a network
    num_uniforms    how many random numbers begin() takes for one environment

and three functions that change nothing they are given:

    begin(u) -> state                 u [E, num_uniforms] from 0 to 1; state: a dict of
                                      tensors [E, ...]
    move(state, action) -> (state, reward, terminated, truncated)
                                      action: a nest of tensors [E, N, ...] like the
                                      action space; reward [E, N] float, the others
                                      [E, N] bool
    observe(state) -> observation     a nest of tensors [E, N, ...] like the
                                      observation space

and, if it likes, mask(state) -> [E, N, C] bool, which choices an action has
(torchbeast/masks.py); metrics(state) -> {name: [E]}, which is logged where episodes
end; draw(state) -> [H, W, 3] uint8 of the first environment; and fps. Tensors that are
its attributes are moved to the device.

Environments turns these into steps as every program knows them (torchbeast/
environment.py): next-step autoreset, an agent that leaves before the others is
`terminated` there and `done` until the next episode begins.
"""

import copy
import functools
import importlib
import os
import traceback

import torch
from gymnasium import spaces

from torchbeast import masks
from torchbeast.messages import BadInput, first_line
from torchbeast.nests import map_structure
from torchbeast.policies import num_agents
from torchbeast.spaces import Actions, children

PREFIX = "warp/"


def make(env_id, **kwargs):
    """Makes an environment: NAME of `warp/NAME` is a class of warp_envs.py, of
    `MODULE:warp/NAME` one of that module. Raises BadInput if there is none."""
    module, _, name = env_id.rpartition(":")
    name = name.removeprefix(PREFIX)
    try:
        module = importlib.import_module(module or "warp_envs")
        classes = {k: x for k, x in vars(module).items() if isinstance(x, type)}
        if name in classes:
            env = classes[name](**kwargs)
    except (Exception, SystemExit) as e:
        what = raised(e)
        raise BadInput(f"environment {env_id!r} cannot be made: {what}") from e
    if name not in classes:
        known = [k for k, x in classes.items() if hasattr(x, "begin") and k[0] != "_"]
        names = ", ".join(PREFIX + k for k in known) or "none"
        raise BadInput(f"unknown environment {env_id!r}: {module.__name__} has {names}")
    env.name = env_id
    return env


def to(env, device, dtype=torch.float32):
    """Returns a copy of the environment whose tensors are on the device; those of
    floating point numbers have this dtype."""
    own, classes = copy.copy(env), reversed(type(env).__mro__)
    attributes = {k: x for c in (*classes, own) for k, x in vars(c).items()}
    for name, x in attributes.items():
        if torch.is_tensor(x):
            setattr(own, name, x.to(device, dtype if x.is_floating_point() else None))
    return own


class Environments:
    """E copies of an environment of N agents, which step together on a device.

    env: the environment; a copy of it is made for the device
    num_agents: N
    policies: {name: slice}

    All is in what begin() and step() take and return: they change nothing, so that they
    may be compiled, and captured in a CUDA graph. A carry is a dict:

        state                  the environment's
        out [E, N] bool        the agent's last step was its last one, or it is gone
        episode_step, episode_return [E, N]
    """

    def __init__(self, env, num_envs, device, dtype=torch.float32):
        self.env = to(env, device, dtype)
        self.num_envs = num_envs
        self.device, self.dtype = device, dtype
        self.policies = dict(env.policies)
        self.num_agents = num_agents(env)
        self._clips = clips(env.action_space, device)
        self._sizes = masks.sizes(Actions(env.action_space, 1))

    def uniforms(self, generator=None):
        """Draws what begin() and step() take, [E, num_uniforms]."""
        return torch.rand(
            self.num_envs,
            self.env.num_uniforms,
            device=self.device,
            dtype=self.dtype,
            generator=generator,
        )

    def begin(self, u):
        """Returns (carry, first step)."""
        shape = self.num_envs, self.num_agents
        carry = {
            "state": self.env.begin(u),
            "out": torch.ones(shape, dtype=torch.bool, device=self.device),
            "episode_step": torch.zeros(shape, dtype=torch.int32, device=self.device),
            "episode_return": torch.zeros(shape, dtype=self.dtype, device=self.device),
        }
        carry, step, _ = self.step(carry, no_action(self.env, *shape, self.device), u)
        return carry, step

    def step(self, carry, action, u):
        """Returns (carry, step [E, N, ...], metrics {name: [2], sum and number}).

        action: a nest of tensors [E, N, ...], ignored where an agent is out
        """
        env, done = self.env, carry["out"]
        begins = done.all(1)  # [E]
        action = map_structure(lambda clip, x: clip(x), self._clips, action)
        state, reward, terminated, truncated = env.move(carry["state"], action)
        terminated = terminated & ~done
        truncated = truncated & ~done & ~terminated
        last = terminated | truncated
        reward = torch.where(done, 0, reward)
        out = done & ~begins[:, None] | last
        metrics = {}
        if hasattr(env, "metrics"):
            over = out.all(1) & ~begins
            for name, x in env.metrics(state).items():
                total = torch.where(over, x, 0).sum()
                metrics[name] = torch.stack([total, over.sum()])
        begun = env.begin(u)
        state = {name: _where(begins, begun[name], x) for name, x in state.items()}
        carry = {
            "state": state,
            "out": out,
            "episode_step": torch.where(done, 0, carry["episode_step"] + 1),
            "episode_return": torch.where(done, 0, carry["episode_return"] + reward),
        }
        episode_return = carry["episode_return"].float()
        mask = {}
        if hasattr(env, "mask"):  # Who is out may have no choice.
            mask["action_mask"] = env.mask(state)
            none = ~self.allow(mask["action_mask"]) & out
            mask["action_mask"] = mask["action_mask"] | none[..., None]
        return (
            carry,
            {
                "observation": env.observe(state),
                "reward": reward.float(),
                "done": done,
                "terminated": terminated,
                "truncated": truncated,
                "last_action": map_structure(lambda x: _where(done, 0, x), action),
                "episode_end": last,
                "episode_step": carry["episode_step"],
                "episode_return": episode_return,
                "training_episode_return": episode_return,
                **mask,
            },
            metrics,
        )

    def allow(self, mask):
        """Tells whether a mask [..., C] allows an action: [...] bool."""
        parts = mask.split(self._sizes, -1)
        return torch.stack([x.any(-1) for x in parts], -1).all(-1)


def _where(mask, x, y):
    """torch.where() for a mask that lacks y's last dimensions."""
    return torch.where(mask.view(*mask.shape, *[1] * (y.ndim - mask.ndim)), x, y)


def no_action(env, num_envs, num_agents, device):
    """Returns an action [E, N, ...] of zeros."""
    action = Actions(env.action_space, num_envs * num_agents).zeros()
    return map_structure(
        lambda x: torch.as_tensor(x, device=device).unflatten(
            0, (num_envs, num_agents)
        ),
        action,
    )


def clips(space, device):
    """Returns a nest of functions, which clip an action to the space."""
    if entries := children(space):
        parts = {key: clips(part, device) for key, part in entries}
        return parts if isinstance(space, spaces.Dict) else tuple(parts.values())
    if isinstance(space, spaces.Box):
        low, high = (
            torch.as_tensor(x, device=device).float() for x in (space.low, space.high)
        )
        return functools.partial(torch.clamp, min=low, max=high)
    return lambda x: x


def raised(error):
    """Returns a text: an exception, and where in whose code it was raised."""
    files = torch.__file__, importlib.__file__, os.path.abspath(__file__)
    others = *map(os.path.dirname, files), "<frozen"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others):
            where = f"{frame.filename}, line {frame.lineno}"
            return f"{first_line(error)} ({where})"
    return first_line(error)
