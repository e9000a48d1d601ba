"""Observation and action spaces: those that are supported, and arrays as they declare.

No torch in here: environment servers import this file.
"""

import math

import numpy as np
from gymnasium import spaces

from torchbeast.process import BadInput, first_line

MAX_DEPTH = 16  # Of nested observations.
MAX_CHOICES = 2**16  # Of a number that is encoded one-hot.
LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class BadStep(ValueError):
    """Something that an environment returned is not what its spaces declare."""

    of_environment = True


def children(space):
    """Returns [(key, space)] of a Dict's or Tuple's entries; None for other spaces."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return list(enumerate(space.spaces))
    return None


def is_text(space):
    """Tells whether observations of the space are text, which no network reads."""
    return isinstance(space, spaces.Text) or getattr(space, "dtype", None) == np.str_


def without_text(space, path="observation"):
    """Checks an observation space. Returns (the space without its entries of text, the
    paths of these entries). Raises BadInput that names what is not supported."""
    if not isinstance(space, spaces.Space):
        raise BadInput(f"observation_space is {space!r}, expected a space of Gymnasium")
    if path.count("/") > MAX_DEPTH:
        raise BadInput(
            f"the observation space is nested deeper than {MAX_DEPTH} levels"
        )
    entries = children(space)
    if entries is None:
        _check_leaf(space, path)
        return space, []
    kept, texts = {}, []
    for key, part in entries:
        if is_text(part):
            texts.append(f"{path}/{key}")
        else:
            kept[key], more = without_text(part, f"{path}/{key}")
            texts += more
    if not kept:
        raise BadInput(f"{path} space {space} has no entry that a network can read")
    if isinstance(space, spaces.Dict):
        return (spaces.Dict(kept) if texts else space), texts
    return (spaces.Tuple(list(kept.values())) if texts else space), texts


def _check_leaf(space, path):
    if is_text(space) or not isinstance(space, LEAVES):
        raise BadInput(
            f"{path} space {space} is not supported: use Box, Discrete, MultiDiscrete, "
            "MultiBinary, or a Dict or Tuple of them"
        )
    if space.dtype.kind not in "iufb" or space.dtype.itemsize > 8:
        raise BadInput(
            f"{path} has dtype {space.dtype}, expected numbers of at most 64 bits"
        )
    if 0 in space.shape:
        raise BadInput(f"{path} has shape {space.shape}, expected one number or more")
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        total = sum(np.ravel(space.n if space.shape == () else space.nvec).tolist())
        if total > MAX_CHOICES:
            raise BadInput(
                f"{path} space {space} has {total:,} choices, expected at most "
                f"{MAX_CHOICES:,}: use a Box"
            )


def choices(space):
    """Describes an action of the space: (the number of choices of each of its D
    numbers, its shape, its smallest value). Raises BadInput if the space is not
    supported."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),), (), int(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(space.nvec.ravel().tolist()), space.shape, space.start
    if isinstance(space, spaces.MultiBinary):
        return (2,) * math.prod(space.shape), space.shape, 0
    raise BadInput(
        f"action space {space} is not supported: use Discrete, MultiDiscrete or "
        "MultiBinary"
    )


def as_declared(x, dtype, shape, name):
    """Returns x as an array of this shape, whose dtype can become `dtype` without
    losing more than digits. Raises BadStep, which names it, if there is none."""
    try:
        array = np.asarray(x)
    except Exception as e:  # Ragged lists; tensors on a GPU.
        raise BadStep(f"{name} cannot be an array: {first_line(e)}") from e
    if array.shape != shape or (
        array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind")
    ):
        raise BadStep(
            f"{name} is {array.dtype} {list(array.shape)}, expected {dtype} "
            f"{list(shape)}"
        )
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        if not np.can_cast(array.dtype, dtype) and (array.astype(dtype) != array).any():
            raise BadStep(f"{name} has numbers that are no {dtype}: {array.max()}")
    return array


def check_finite(x, name):
    """Raises BadStep that names the environment if a number of x [E, ...] is NaN or
    infinite. The network would turn every number it computes from it into NaN."""
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(x))[0])
        raise BadStep(f"{name} of environment {index[0]} is {x[index]}")


class Observations:
    """Makes arrays [E, ...], as a space declares them, of what environments return.

    space: of one environment's observations, without entries of text
    texts: the paths of these entries
    """

    def __init__(self, space, num_envs):
        self.num_envs = num_envs
        self.space, self.texts = without_text(space)
        self._declared = space
        self._leaves = list(_leaves(space))  # [(keys, name, dtype, shape)]
        self._bounds = dict(_bounds(space))

    def stack(self, observations):
        """Stacks an iterable of E observations, each of which is read before the next
        one is made."""
        arrays = [
            np.empty((self.num_envs, *shape), dtype)
            for _, _, dtype, shape in self._leaves
        ]
        for i, observation in enumerate(observations):
            for array, (keys, name, dtype, shape) in zip(arrays, self._leaves):
                x = _entry(observation, keys, name) if keys else observation
                if not (  # As nearly always, and three times as fast as the check.
                    type(x) is np.ndarray and x.dtype is dtype and x.shape == shape
                ):
                    x = as_declared(x, dtype, shape, name)
                array[i] = x
        return self._nest(arrays)

    def of_vector(self, observation):
        """Takes the observations of a vector environment."""
        arrays = []
        for keys, name, dtype, shape in self._leaves:
            x = _entry(observation, keys, name)
            x = as_declared(x, dtype, (self.num_envs, *shape), name)
            arrays.append(np.asarray(x, dtype, order="C"))
        return self._nest(arrays)

    def _nest(self, arrays):
        for array, (_, name, _, _) in zip(arrays, self._leaves):
            check_finite(array, name)
            if name in self._bounds:
                low, high = self._bounds[name]
                if (array < low).any() or (array > high).any():
                    raise BadStep(
                        f"{name} is {array.tolist()}, expected {low} to {high}"
                    )
        return _pack(self._declared, iter(arrays))


def _leaves(space, keys=()):
    entries = children(space)
    if entries is None:
        name = "/".join(map(str, ("observation", *keys)))
        dtype = np.dtype(space.dtype.newbyteorder("=").name)  # NumPy's one of its kind.
        yield keys, name, dtype, space.shape
        return
    for key, part in entries:
        if not is_text(part):
            yield from _leaves(part, (*keys, key))


def _bounds(space, name="observation"):
    """Yields (name, (low, high)) of the entries that are encoded one-hot."""
    for key, part in children(space) or ():
        yield from _bounds(part, f"{name}/{key}")
    if isinstance(space, spaces.Discrete):
        yield name, (int(space.start), int(space.start + space.n - 1))
    elif isinstance(space, spaces.MultiDiscrete):
        yield name, (space.start, space.start + space.nvec - 1)


def _entry(observation, keys, name):
    for key in keys:
        try:
            observation = observation[key]
        except (KeyError, IndexError, TypeError) as e:
            raise BadStep(
                f"{name} is not in the observation, a {type(observation).__name__}"
            ) from e
    return observation


def _pack(space, arrays):
    entries = children(space)
    if entries is None:
        return next(arrays)
    packed = {k: _pack(part, arrays) for k, part in entries if not is_text(part)}
    return packed if isinstance(space, spaces.Dict) else tuple(packed.values())
