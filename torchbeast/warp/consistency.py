"""Compares an environment on the device with a reference that is written in another
way.

    python -m torchbeast.warp.consistency warp/CartPole tests.warp_references:CartPole

A reference is a class with the functions begin(u), move(state, action) and
observe(state) of one environment: NumPy arrays as torchbeast/warp/autoreset.py
describes them, without the dimension of environments. Two things are compared:

1. Steps. States that random actions lead to are copied into the reference, which makes
   one step: in float64 to 1e-12, in float32 to 1e-5. In float64, the numbers of every
   other environment are made smaller and larger before, and change signs.
2. Episodes with their resets, in float64, from the same random numbers.

What another rounding of the state would change by more than these, as it is on a
threshold, is left out: of each field at most a half.
"""

import importlib
import sys

import numpy as np
import torch

from torchbeast import devices
from torchbeast.environment import argument
from torchbeast.flags import Parser, number, run_command
from torchbeast.messages import BadInput
from torchbeast.nests import leaves, map_structure
from torchbeast.spaces import Actions
from torchbeast.warp import autoreset
from torchbeast.warp.check import check

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
ROUNDINGS = {torch.float64: 1e-13, torch.float32: 1e-6}
CPU = torch.device("cpu")


class Mismatch(AssertionError):
    """Says at which step, in which environment, of which agent which field differs."""


def compare(env, reference, num_envs=4, num_steps=200, seed=0, device=CPU):
    """Raises Mismatch if the environment and the reference differ."""
    default = torch.get_default_dtype()
    try:
        for dtype in TOLERANCES:
            torch.set_default_dtype(
                dtype
            )  # A choice times a Python number has it, too.
            compare_steps(env, reference, num_envs, num_steps, seed, dtype, device)
        torch.set_default_dtype(torch.float64)
        compare_episodes(env, reference, num_envs, num_steps, seed, device)
    finally:
        torch.set_default_dtype(default)


def compare_steps(env, reference, num_envs, num_steps, seed, dtype, device):
    """Compares single steps from states that random actions lead to."""
    compared = {}
    envs, random = autoreset.Environments(env, num_envs, device, dtype), _random(seed)
    u = _uniforms(envs, random)
    carry, _ = envs.begin(u)
    begun = {e: _all_sure(reference.begin(x)) for e, x in enumerate(_rows(u))}
    begun = {e: {"state": x} for e, x in begun.items()}
    _expect_same("begin()", 0, _rows({"state": carry["state"]}), begun, dtype)
    for t in range(num_steps):
        action, before = random_actions(envs, random), carry["state"]
        if dtype == torch.float64:
            before = _varied(before, random)
        after = envs.env.move(before, action)
        names = ("state", "reward", "terminated", "truncated")
        given = list(zip(_rows(before), _rows(action)))
        got, expected = _rows(dict(zip(names, after))), {}
        for e in (~carry["out"].all(1)).nonzero().flatten().tolist():  # Goes on.
            state, of_env = given[e]
            result, sure = _move(reference, state, of_env, dtype)
            expected[e] = dict(zip(names, zip(result, sure)))
        _expect_same("move()", t, got, expected, dtype, compared)
        got = _rows({"observation": envs.env.observe(before)})
        seen = (_all_sure(reference.observe(state)) for state, _ in given)
        seen = {e: {"observation": x} for e, x in enumerate(seen)}
        _expect_same("observe()", t, got, seen, dtype)
        carry, _, _ = envs.step(carry, action, _uniforms(envs, random))
    _expect_enough(compared)


def compare_episodes(env, reference, num_envs, num_steps, seed, device):
    """Compares whole episodes, with what follows them."""
    dtype, compared = torch.float64, {}
    envs, random = autoreset.Environments(env, num_envs, device, dtype), _random(seed)
    u = _uniforms(envs, random)
    carry, step = envs.begin(u)
    states = list(map(reference.begin, _rows(u)))
    out = np.zeros((num_envs, envs.num_agents), bool)
    for t in range(num_steps):
        action, u = random_actions(envs, random), _uniforms(envs, random)
        carry, step, _ = envs.step(carry, action, u)
        u, action, expected = _rows(u), _rows(action), {}
        for e in range(num_envs):
            done = out[e].copy()
            if done.all():
                states[e], zeros = reference.begin(u[e]), np.zeros(envs.num_agents)
                flags, sure = [zeros, zeros > 0, zeros > 0], True
            else:
                result, sure = _move(reference, states[e], action[e], dtype)
                states[e], *flags = result
            reward, terminated, truncated = (np.where(done, 0, x) for x in flags)
            truncated = truncated & ~terminated
            out[e] = (done & ~done.all()) | terminated | truncated
            if sure is True or all(x.all() for _, x in leaves(sure)):
                fields = {"observation": reference.observe(states[e])}
                sure_flags = [np.ones_like(done)] * 3
            else:  # What follows is seen from where the device is.
                fields, (_, *sure_flags) = {}, sure
                states[e] = _rows(carry["state"])[e]
                out[e] = carry["out"][e].cpu().numpy()
            flags = [reward.astype(np.float32), terminated, truncated]
            expected[e] = {name: _all_sure(x) for name, x in fields.items()}
            expected[e]["done"] = _all_sure(done)
            names = ("reward", "terminated", "truncated")
            expected[e].update(zip(names, zip(flags, sure_flags)))
        _expect_same("an episode", t, _rows(step), expected, dtype, compared)
    _expect_enough(compared)


def _random(seed):
    return torch.Generator().manual_seed(seed)


def _uniforms(envs, random):
    """The same in every precision and on every device."""
    shape = envs.num_envs, envs.env.num_uniforms
    return torch.rand(shape, generator=random).to(envs.device, envs.dtype)


def random_actions(envs, random):
    """Draws actions: choices, and numbers within their bounds, of which those that are
    missing are -1 and 1, or 2 from the other one."""
    shape = envs.num_envs, envs.num_agents
    arrays = []
    for leaf in Actions(envs.env.action_space, 1).leaves:
        x = torch.rand((*shape, *leaf.shape), generator=random, dtype=torch.float64)
        if leaf.num_choices is not None:
            x = (x * torch.as_tensor(leaf.num_choices)).long()
        else:
            low, high = (leaf.clip(np.full(leaf.shape, y)) for y in (-1e9, 1e9))
            low = np.where(low < -1e8, np.minimum(-1, high - 2), low)
            high = np.where(high > 1e8, np.maximum(1, low + 2), high)
            x = torch.as_tensor(low) + torch.as_tensor(high - low) * x
            x = x.to(envs.dtype)
        arrays.append(x.to(envs.device))
    return Actions(envs.env.action_space, 1).nest(arrays)


def _rows(nest):
    """Returns the E nests of arrays of a nest of tensors [E, ...]."""
    (_, first), *_ = leaves(nest)
    nest = map_structure(lambda x: x.cpu().numpy(), nest)
    return [map_structure(lambda x, e=e: x[e], nest) for e in range(len(first))]


def _varied(state, random):
    """A state of which every other environment has other numbers."""

    def vary(x):
        if not x.is_floating_point():
            return x
        u = torch.rand(2, *x.shape, generator=random, dtype=x.dtype).to(x.device)
        by = 10 ** (3 * u[0] - 1) * (u[1] - 0.5).sign()
        by[::2] = 1
        return x * by

    return {name: vary(x) for name, x in state.items()}


def _move(reference, state, action, dtype):
    """Returns what the reference's move() returns, and, of the same structure, where
    another rounding of the state would not matter. Raises Mismatch if the reference
    does not return the same twice."""

    def rounded(x, by):
        return x * x.dtype.type(1 + by) if x.dtype.kind == "f" else x

    def alike(x, y):
        x, y = np.asarray(x), np.asarray(y)
        if x.dtype.kind != "f":
            return x == y
        tolerance = TOLERANCES[dtype]
        return np.isclose(x, y, tolerance, tolerance, equal_nan=True)

    result, sure = _all_sure(reference.move(map_structure(np.copy, state), action))
    again = reference.move(map_structure(np.copy, state), action)
    for (path, x), (_, y) in zip(leaves(result), leaves(again)):
        if not np.array_equal(x, y, equal_nan=np.asarray(x).dtype.kind == "f"):
            raise Mismatch(f"the reference's move() returns two results: {path}")
    for sign in (1, -1):
        by = sign * ROUNDINGS[dtype]
        near = map_structure(lambda x, by=by: rounded(x, by), state)
        same = map_structure(alike, reference.move(near, action), result)
        sure = map_structure(np.logical_and, sure, same)
    return result, sure


def _all_sure(nest):
    return nest, map_structure(lambda x: np.ones(np.shape(x), bool), nest)


def _expect_enough(compared):
    for path, shares in compared.items():
        if np.mean(shares) < 0.5:
            raise Mismatch(f"{path} is on thresholds more often than not")


def _expect_same(what, step, got, expected, dtype, compared=None):
    """Raises Mismatch where the nests of environments differ from those that are
    expected: {number of the environment: {field: (nest, where it is sure)}}. Adds the
    shares of them that are sure to compared."""
    for e, fields in expected.items():
        for field, (nest, sure) in fields.items():
            ours, theirs = dict(leaves(got[e][field], field)), leaves(nest, field)
            if set(ours) != set(dict(theirs)):
                names = sorted(dict(theirs))
                raise Mismatch(f"{what}: {sorted(ours)}, of the reference {names}")
            for (path, y), (_, where) in zip(theirs, leaves(sure)):
                if compared is not None:
                    compared.setdefault(path, []).append(np.mean(where))
                text = _difference(ours[path], np.asarray(y), where, dtype)
                if text:
                    raise Mismatch(
                        f"{what}: {path} differs at step {step}, environment {e}{text} "
                        f"({dtype})"
                    )


def _difference(x, y, where, dtype):
    """Returns a text, empty if arrays x and y are the same where they are to be."""
    if x.shape != y.shape:
        return f": {list(x.shape)}, of the reference {list(y.shape)}"
    if x.dtype.kind != "f":
        bad = (x != y) & where
    else:
        tolerance = TOLERANCES[dtype]
        if y.dtype == np.float32:  # As Gymnasium's observations are.
            tolerance = max(tolerance, 1e-6)
        bad = ~np.isclose(x, y, tolerance, tolerance) & where
    if not bad.any():
        return ""
    index = tuple(map(int, np.argwhere(bad)[0]))
    agent = f", agent {index[0]}" if index else ""
    return f"{agent}: {list(index)} is {x[index]!r}, of the reference {y[index]!r}"


def load_reference(name, args):
    """Makes the reference MODULE:CLASS. Raises BadInput if there is none."""
    module, _, cls = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module), cls)
        return cls(**args)
    except (ImportError, ValueError, AttributeError, TypeError) as e:
        raise BadInput(f"reference {name!r}, expected MODULE:CLASS: {e}") from e


def main(argv=None):
    prog = "torchbeast.warp.consistency"
    p = Parser(prog=prog, description="Compares an environment with its reference.")
    # fmt: off
    p.add_argument("env", metavar="ID", help="environment, such as warp/Tag")
    p.add_argument("reference", metavar="MODULE:CLASS", help="its reference")
    p.add_argument("--env_args", nargs="+", type=argument, default=[],
                   metavar="NAME=VALUE", help="arguments of both constructors")
    p.add_argument("--num_envs", type=number(int, 1), default=4, metavar="E",
                   help="environments (default: %(default)s)")
    p.add_argument("--num_steps", type=number(int, 1), default=200, metavar="N",
                   help="steps of each (default: %(default)s)")
    p.add_argument("--seed", type=number(int, 0), default=0, metavar="N",
                   help="seed of actions and starts (default: %(default)s)")
    p.add_argument("--device", default="cpu", help="(default: %(default)s)")
    # fmt: on

    def body():
        flags = p.parse_args(argv)
        device = devices.get_device(flags, "device")
        devices.use(device)
        env = autoreset.make(flags.env, **dict(flags.env_args))
        check(env)
        reference = load_reference(flags.reference, dict(flags.env_args))
        try:
            compare(env, reference, flags.num_envs, flags.num_steps, flags.seed, device)
        except Mismatch as e:
            sys.stderr.write(f"{prog}: {e}\n")
            return 1
        print(
            f"{flags.env}: {flags.num_steps} steps of {flags.num_envs} environments "
            "are the same, one by one and as episodes"
        )
        return 0

    return run_command(prog, body)


if __name__ == "__main__":
    sys.exit(main())
