"""Finds what is wrong with an environment on the device, before the first step."""

import re

import numpy as np
import torch
from torch import nn

from torchbeast.environment import NAME
from torchbeast.masks import sizes
from torchbeast.messages import BadInput
from torchbeast.nests import leaves, map_structure
from torchbeast.policies import num_agents
from torchbeast.spaces import (
    Actions,
    BadStep,
    Observations,
    children,
    space_leaves,
    unsupported_actions,
)
from torchbeast.warp.autoreset import no_action, raised, to

ARGUMENTS = {
    "begin": ("u",), "move": ("state", "action"), "observe": ("state",),
    "mask": ("state",), "metrics": ("state",),
}  # fmt: skip
RESULTS = {
    "begin": ("state",), "move": ("state", "reward", "terminated", "truncated"),
    "observe": ("observation",), "mask": ("mask",), "metrics": ("metrics",),
}  # fmt: skip


def check(env, num_envs=3):
    """Raises BadInput, with the name of the function, if the environment's functions
    change what they are given, return something else the second time or than their
    spaces say, or wait for the device."""
    for name in ("observation_space", "action_space", "policies", "num_uniforms",
                 "begin", "move", "observe"):  # fmt: skip
        if not hasattr(env, name):
            raise _bad(env, f"it has no {name}")
    try:
        _check_declared(env)
    except BadInput as e:
        raise _bad(env, e) from e
    # On meta, tensors have no data: whoever asks for a value would wait for a GPU.
    for device in ("cpu", "meta"):
        _Check(env, num_envs, torch.device(device)).all()


def _check_declared(env):
    """Raises BadInput that names what is wrong with the environment's attributes."""
    if texts := Observations(env.observation_space, 1).texts:
        raise BadInput(f"{texts[0]} is text, expected numbers")
    if Actions(env.action_space, 1).space != env.action_space:
        raise unsupported_actions(env.action_space)
    _check_starts(env.action_space)
    if type(env.num_uniforms) is not int or env.num_uniforms < 0:
        what = "expected a whole number, 0 or more"
        raise BadInput(f"num_uniforms is {env.num_uniforms!r}, {what}")
    if not isinstance(env.policies, dict) or not env.policies:
        what = "expected {name: slice of the agents}"
        raise BadInput(f"policies is {env.policies!r}, {what}")
    stop, modules = 0, nn.ModuleDict()
    for name, part in env.policies.items():
        if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
            raise BadInput(f"policy {name!r}: expected a word of ASCII")
        if hasattr(modules, name):
            raise BadInput(f"policy {name!r}: PyTorch has another use for this name")
        if not isinstance(part, slice) or not all(
            x is None or type(x) is int for x in (part.start, part.stop, part.step)
        ):
            raise BadInput(f"policies[{name!r}] is {part!r}, expected a slice")
        if (
            (part.start or 0) != stop
            or part.step not in (None, 1)
            or (part.stop or 0) <= stop
        ):
            raise BadInput(
                f"policies[{name!r}] is {part}, expected a slice from {stop} on"
            )
        stop = part.stop


def _check_starts(space):
    for _, part in children(space) or ():
        _check_starts(part)
    if np.any(getattr(space, "start", 0)):
        raise BadInput(f"action space {space}: expected choices that begin at 0")


class _Check:
    """Calls the functions of an environment on one device."""

    def __init__(self, env, num_envs, device):
        self.env, self.device = to(env, device), device
        self.E, self.N = num_envs, num_agents(env)

    @torch.no_grad()
    def all(self):
        env, E, N = self.env, self.E, self.N
        u = torch.rand(E, env.num_uniforms, device=self.device)
        state = self.call("begin", u)
        self.expect_dict("begin", state)
        action = no_action(env, E, N, self.device)
        result = self.call("move", state, action)
        if not isinstance(result, tuple) or len(result) != 4:
            raise _bad(
                env, "move() returned something else than (state, reward, terminated, "
                "truncated)"
            )  # fmt: skip
        following, *flags = result
        self.expect_dict("move", following)
        for name in {**state, **following}:
            before, x = _text(state.get(name)), _text(following.get(name))
            if x != before:
                raise _bad(env, f"move() returned {x} as {name!r}, begin() {before}")
        for name, x in zip(("reward", "terminated", "truncated"), flags):
            kind = "float32" if name == "reward" else "bool"
            if _text(x) != f"{kind} [{E}, {N}]":
                raise _bad(
                    env, f"move() returned {_text(x)} as {name}, expected {kind} "
                    f"[{E}, {N}]"
                )  # fmt: skip
        if self.device.type == "cpu" and not flags[0].isfinite().all():
            raise _bad(env, "move() returned a reward that is not finite")
        for some_state in (state, following):
            self.expect_observation(self.call("observe", some_state))
            if hasattr(env, "mask"):
                self.expect_mask(self.call("mask", some_state))
        if hasattr(env, "metrics"):
            self.expect_metrics(self.call("metrics", following))

    def call(self, name, *args):
        """Calls a function of the environment twice. Returns what it returned."""
        given = dict(zip(ARGUMENTS[name], args))
        before = {path: (x, _version(x), x.clone()) for path, x in leaves(given)}
        try:
            result, again = (getattr(self.env, name)(*args) for _ in range(2))
        except (Exception, SystemExit) as e:
            raise _bad(self.env, self._what_raised(name, e)) from e
        after = dict(leaves(given))
        for path in {**before, **after}:
            x, version, copy = before.get(path, (None, None, None))
            if (
                after.get(path) is not x
                or _version(x) != version
                or not self.is_same(x, copy)
            ):
                raise _bad(
                    self.env,
                    f"{name}() changes its argument {path}: expected a new dict, of "
                    "new tensors",
                )
        result_leaves, again_leaves = (self.named(name, x) for x in (result, again))
        for (path, x), (_, y) in zip(result_leaves, again_leaves):
            if torch.is_tensor(x) and torch.is_tensor(y) and not self.is_same(x, y):
                raise _bad(
                    self.env,
                    f"{name}() returned two results for the same arguments, {path}: "
                    "take what is random from u, and all else from the state",
                )
        for path, x in result_leaves:
            if torch.is_tensor(x) and x.device != self.device:
                raise _bad(
                    self.env,
                    f"{name}() makes tensors on another device ({path}): use "
                    "device=u.device, or an attribute of the environment",
                )
        return result

    def named(self, name, result):
        """Returns the leaves of what a function returned, by their names."""
        parts = result if name == "move" and isinstance(result, tuple) else (result,)
        return leaves(dict(zip(RESULTS[name], parts)))

    def is_same(self, x, y):
        """Tells whether two tensors have the same values, as far as they have any."""
        return x.shape == y.shape and (
            self.device.type != "cpu" or torch.allclose(x, y, 0, 0, equal_nan=True)
        )

    def _what_raised(self, name, error):
        what = f"{name}() raised {raised(error)}"
        if self.device.type == "cpu":
            return what
        if "device" in str(error) or "out of meta tensor" in str(error):
            what = f"{name}() makes tensors on another device ({raised(error)})"
            return f"{what}: use device=u.device"
        what = f"{name}() looks at the values of tensors ({raised(error)})"
        return f"{what}, for which a GPU would wait: use torch.where()"

    def expect_dict(self, name, state):
        expected = f"expected a dict of tensors [{self.E}, ...]"
        if not isinstance(state, dict):
            raise _bad(self.env, f"{name}() returned {_text(state)}, {expected}")
        for key, x in state.items():
            if not torch.is_tensor(x) or x.ndim == 0 or len(x) != self.E:
                raise _bad(
                    self.env, f"{name}() returned {_text(x)} as {key!r}, {expected}"
                )

    def expect_observation(self, observation):
        E, N = self.E, self.N
        got = [(path, _text(x)) for path, x in leaves(observation, "observation")]
        expected = [
            (name, f"{dtype} {[E, N, *shape]}")
            for _, name, dtype, shape in space_leaves(self.env.observation_space)
        ]
        if dict(got) != dict(expected):
            got, expected = (", ".join(map(" ".join, x)) for x in (got, expected))
            raise _bad(self.env, f"observe() returned {got}, expected {expected}")
        if self.device.type == "cpu":
            rows = map_structure(lambda x: x.flatten(0, 1).numpy(), observation)
            try:
                Observations(self.env.observation_space, E * N).of_vector(rows)
            except BadStep as e:
                raise _bad(self.env, f"observe(): {e}") from e

    def expect_mask(self, mask):
        expected = (
            f"bool {[self.E, self.N, sum(sizes(Actions(self.env.action_space, 1)))]}"
        )
        if _text(mask) != expected:
            raise _bad(self.env, f"mask() returned {_text(mask)}, expected {expected}")

    def expect_metrics(self, metrics):
        if not isinstance(metrics, dict):
            what = f"metrics() returned {_text(metrics)}, expected a dict"
            raise _bad(self.env, what)
        taken = [f"{policy}_return" for policy in self.env.policies]
        for name, x in metrics.items():
            if not isinstance(name, str) or not re.fullmatch(NAME, name):
                what = "expected letters, digits and signs, without spaces"
                raise _bad(self.env, f"metrics() has the name {name!r}, {what}")
            if name in taken:
                what = f"metrics() has {name!r}, which is logged of each policy"
                raise _bad(self.env, what)
            if not torch.is_tensor(x) or list(x.shape) != [self.E]:
                raise _bad(
                    self.env,
                    f"metrics() returned {_text(x)} as {name!r}, expected [{self.E}]",
                )


def _text(x):
    if not torch.is_tensor(x):
        return type(x).__name__ if x is not None else "nothing"
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _bad(env, what):
    return BadInput(f"environment {getattr(env, 'name', type(env).__name__)}: {what}")


def _version(x):
    """A number that changes whenever the tensor does, but for inference_mode()."""
    return None if x is None or x.is_inference() else x._version
