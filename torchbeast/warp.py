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

and, if it likes, metrics(state) -> {name: [E]}, which is logged where episodes end;
draw(state) -> [H, W, 3] uint8 of the first environment; and fps. Tensors that are its
attributes are moved to the device.

Environments turns these into steps as every program knows them (torchbeast/
environment.py): next-step autoreset, an agent that leaves before the others is
`terminated` there and `done` until the next episode begins.
"""

import copy
import importlib

import numpy as np
import torch
from gymnasium import spaces

from torchbeast import environment
from torchbeast.calls import Call
from torchbeast.environment import leaves, map_structure
from torchbeast.process import BadInput, first_line
from torchbeast.spaces import Actions, check_finite, children, space_leaves

PREFIX = "warp/"


def make(env_id, **kwargs):
    """Makes an environment: NAME of `warp/NAME` is a class of warp_envs.py, of
    `MODULE:warp/NAME` one of that module. Raises BadInput if there is none."""
    module, _, name = env_id.rpartition(":")
    name = name.removeprefix(PREFIX)
    try:
        module = importlib.import_module(module or "warp_envs")
    except (ImportError, ValueError) as e:
        raise BadInput(f"environment {env_id!r} cannot be made: {e}") from e
    classes = {
        name: x
        for name, x in vars(module).items()
        if isinstance(x, type) and hasattr(x, "begin") and not name.startswith("_")
    }
    if name not in classes:
        names = ", ".join(PREFIX + known for known in classes) or "none"
        raise BadInput(f"unknown environment {env_id!r}: {module.__name__} has {names}")
    try:
        env = classes[name](**kwargs)
    except (TypeError, ValueError) as e:
        raise BadInput(f"environment {env_id!r} cannot be made: {e}") from e
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


def num_agents(env):
    """Returns N."""
    return max(part.stop for part in env.policies.values())


def policy_sizes(env):
    """Returns {policy: the number of its agents in one environment}."""
    agents = range(num_agents(env))
    return {name: len(agents[part]) for name, part in env.policies.items()}


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
        self._bounds = _bounds(env.action_space, device)

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
        action = map_structure(_clip, action, self._bounds)
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
            },
            metrics,
        )


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


def _bounds(space, device):
    """Returns the nest of (low, high) of a space's actions, None of choices."""
    entries = children(space)
    if entries:
        parts = {key: _bounds(part, device) for key, part in entries}
        return parts if isinstance(space, spaces.Dict) else tuple(parts.values())
    if isinstance(space, spaces.Box):
        pair = space.low, space.high
        return Bounds(*(torch.as_tensor(x, device=device).float() for x in pair))
    if np.any(getattr(space, "start", 0)):
        raise BadInput(f"action space {space}: expected choices that begin at 0")
    return None


class Bounds:
    """Of a Box of actions."""

    def __init__(self, low, high):
        self.low, self.high = low, high


def _clip(x, bounds):
    return x if bounds is None else x.clamp(bounds.low, bounds.high)


# For the other programs, and for tests.


class HostEnvironment(environment.Environment):
    """num_envs environments on the CPU as the other programs know them: with a row for
    each agent, environment by environment."""

    def __init__(self, env, num_envs):
        check(env)
        self.env, self._envs = env, Environments(env, num_envs, torch.device("cpu"))
        self.name, self.texts = env.name, []
        self.num_agents = self._envs.num_agents
        self.num_envs = num_envs * self.num_agents
        self.policies = self._envs.policies
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.actions = Actions(env.action_space, self.num_envs)
        self.frames_per_step, self.fps = 1, getattr(env, "fps", 30)
        self._metrics, self._carry, self._warned = [], None, False

    @torch.inference_mode()
    def initial(self, seed=None):
        self._random = torch.Generator()
        if seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(seed)
        with Call(f"begin() of {self.name}"):
            u = self._envs.uniforms(self._random)
            self._carry, step = self._envs.begin(u)
        return self._rows(step)

    @torch.inference_mode()
    def step(self, action):
        if self._carry is None:
            raise RuntimeError("Environment.step before Environment.initial")
        _, action = self.actions.to_environment(action)
        shape = -1, self.num_agents
        action = map_structure(
            lambda x: torch.from_numpy(x).unflatten(0, shape), action
        )
        with Call(f"move() of {self.name}"):
            u = self._envs.uniforms(self._random)
            self._carry, step, metrics = self._envs.step(self._carry, action, u)
        totals = {name: x.tolist() for name, x in metrics.items()}
        if means := {name: x / n for name, (x, n) in totals.items() if n}:
            self._add_metrics(means)
        return self._rows(step)

    def _rows(self, step):
        step = map_structure(lambda x: x.flatten(0, 1).numpy().copy(), step)
        for name in ("observation", "reward"):
            for path, x in leaves(step[name], name):
                check_finite(x, path)
        return step

    def render(self):
        if not hasattr(self.env, "draw"):
            raise BadInput(f"environment {self.name} cannot be shown: it has no draw()")
        return np.asarray(self.env.draw(self._carry["state"]))

    def close(self):
        pass


# Checks.


def check(env, num_envs=3):
    """Raises BadInput, with the name of the function, if the environment's functions
    change what they are given, wait for the device, or return something else than
    their spaces say."""
    missing = [
        name
        for name in ("observation_space", "action_space", "policies", "num_uniforms",
                     "begin", "move", "observe")
        if not hasattr(env, name)
    ]  # fmt: skip
    if missing:
        raise _bad(env, f"it has no {missing[0]}")
    stop = 0
    for name, s in env.policies.items():
        if (s.start or 0) != stop or s.step not in (None, 1) or s.stop <= stop:
            raise _bad(
                env, f"policies[{name!r}] is {s}, expected a slice from {stop} on"
            )
        stop = s.stop
    _check_on("cpu", env, num_envs, stop)
    try:
        # Tensors without data: whoever asks for one's value would wait for a GPU.
        _check_on("meta", env, num_envs, stop)
    except (RuntimeError, NotImplementedError) as e:
        what = "look at the values of tensors, for which a GPU would wait"
        remedy = "use torch.where()"
        if "device" in str(e):
            what, remedy = "make tensors on another device", "use device=u.device"
        what = f"its functions {what} ({first_line(e)}): {remedy}"
        raise _bad(env, what) from e


def _check_on(device, env, E, N):
    env = to(env, device)
    u = torch.rand(E, env.num_uniforms, device=device)
    action = no_action(env, E, N, device)
    state = _call(env, "begin", u)
    _expect_dict(env, "begin", state, E)
    result = _call(env, "move", state, action)
    if not isinstance(result, tuple) or len(result) != 4:
        raise _bad(
            env, "move() returned something else than (state, reward, terminated, "
            "truncated)"
        )  # fmt: skip
    following, *flags = result
    _expect_dict(env, "move", following, E)
    for name, x in state.items():
        y = following.get(name)
        if y is None or (x.shape, x.dtype) != (y.shape, y.dtype):
            raise _bad(
                env, f"move() returned {_text(y)} as {name!r}, begin() {_text(x)}"
            )
    for name, x in zip(("reward", "terminated", "truncated"), flags):
        kind = "float32" if name == "reward" else "bool"
        if _text(x) != f"{kind} [{E}, {N}]":
            raise _bad(
                env, f"move() returned {_text(x)} as {name}, expected {kind} [{E}, {N}]"
            )
    for some_state in (state, following):
        observation = _call(env, "observe", some_state)
        got = [(path, _text(x)) for path, x in leaves(observation, "observation")]
        expected = [
            (name, f"{dtype} {[E, N, *shape]}")
            for _, name, dtype, shape in space_leaves(env.observation_space)
        ]
        if dict(got) != dict(expected):
            got, expected = (", ".join(map(" ".join, x)) for x in (got, expected))
            raise _bad(env, f"observe() returned {got}, expected {expected}")
    if hasattr(env, "metrics"):
        for name, x in _call(env, "metrics", following).items():
            if not torch.is_tensor(x) or list(x.shape) != [E]:
                raise _bad(
                    env, f"metrics() returned {_text(x)} as {name!r}, expected [{E}]"
                )


def _call(env, name, *args):
    """Calls a function of the environment, and raises BadInput if it changes what it is
    given."""
    before = [(path, x, x._version) for path, x in leaves(args)]
    result = getattr(env, name)(*args)
    for path, x, version in before:
        if x._version != version:
            raise _bad(
                env, f"{name}() changes its argument {path}: expected a new tensor"
            )
    return result


def _expect_dict(env, name, state, E):
    if not isinstance(state, dict):
        raise _bad(env, f"{name}() returned {_text(state)}, expected a dict of tensors")
    for key, x in state.items():
        if not torch.is_tensor(x) or x.ndim == 0 or len(x) != E:
            raise _bad(
                env, f"{name}() returned {_text(x)} as {key!r}, expected a tensor "
                f"[{E}, ...]"
            )  # fmt: skip


def _text(x):
    if not torch.is_tensor(x):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _bad(env, what):
    return BadInput(f"environment {getattr(env, 'name', type(env).__name__)}: {what}")
