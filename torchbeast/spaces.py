"""Observation and action spaces: what is supported, and arrays as they declare them.

No torch in here: environment servers import this file.
"""

import math
from collections import OrderedDict

import numpy as np
from gymnasium import spaces

from torchbeast.messages import BadInput, first_line

MAX_DEPTH = 16  # Nested observations go no deeper.
MAX_CHOICES = 2**16  # A one-hot number has no more.
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
        raise BadInput(f"observations are nested deeper than {MAX_DEPTH} levels")
    entries = children(space)
    _check_keys(space, path)
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
        return (spaces.Dict([*kept.items()]) if texts else space), texts  # In order.
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
        if not np.can_cast(array.dtype, dtype):
            if (others := array[array.astype(dtype) != array]).size > 0:
                raise BadStep(f"{name} has numbers that are no {dtype}: {others[0]}")
    return array


def check_finite(x, name):
    """Raises BadStep that names the environment if a number of x [E, ...] is NaN,
    infinite, or too large for the float32 that the network makes of it. It would turn
    every number it computes from it into NaN."""
    if x.dtype.kind != "f":
        return
    with np.errstate(over="ignore"):
        finite = np.isfinite(x.astype(np.float32, copy=False))
    if not finite.all():
        index = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise BadStep(
            f"{name} of environment {index[0]} is {x[index]}, expected a finite float32"
        )


class Observations:
    """Makes arrays [E, ...], as a space declares them, of what environments return.

    space: of one environment's observations, without entries of text
    texts: the paths of these entries
    declared: the space with them
    """

    def __init__(self, space, num_envs):
        self.num_envs = num_envs
        self.space, self.texts = without_text(space)
        self.declared = space
        self._leaves = list(space_leaves(space))  # [(keys, name, dtype, shape)]
        self._bounds = dict(_bounds(space))
        self._functions = [None] * len(self._leaves)

    def convert(self, space, functions):
        """Has stack() and of_vector() return what these functions make of each array
        [E, ...], None for what stays as it is. space: what they return."""
        self.space, self._functions = space, functions

    def zeros(self):
        """Returns one environment's observation of zeros, or where 0 is none of the
        choices, of the first one. Texts are empty."""
        low = {name: low for name, (low, _) in self._bounds.items()}
        arrays = (np.full(s, low.get(name, 0), d) for _, name, d, s in self._leaves)
        return _pack(self.declared, arrays, text="")

    def stack(self, observations):
        """Stacks an iterable of E observations, each of which is read before the next
        one is made."""
        E = self.num_envs
        arrays = [np.empty((E, *shape), dtype) for *_, dtype, shape in self._leaves]
        for i, observation in enumerate(observations):
            for array, (keys, name, dtype, shape) in zip(arrays, self._leaves):
                x = entry(observation, keys, name) if keys else observation
                if not (  # As nearly always, and three times as fast as the check.
                    type(x) is np.ndarray and x.dtype is dtype and x.shape == shape
                ):
                    x = as_declared(x, dtype, shape, name)
                array[i] = x
        return self._nest(arrays)

    def of_vector(self, observation, rows=(), final=None):
        """Takes the observations of a vector environment; those of some rows from
        `final`, an info's "final_obs"."""
        arrays = []
        for keys, name, dtype, shape in self._leaves:
            x = entry(observation, keys, name)
            x = as_declared(x, dtype, (self.num_envs, *shape), name)
            x = np.asarray(x, dtype, order="C")
            if len(rows) > 0:
                x = x.copy()
            for i in rows:
                x[i] = as_declared(_row(final, i, keys, name), dtype, shape, name)
            arrays.append(x)
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
        pairs = zip(arrays, self._functions)
        arrays = [x if function is None else function(x) for x, function in pairs]
        return _pack(self.declared, iter(arrays))


class Actions:
    """Checks actions and turns them into what environments take.

    An action of E environments is a nest of arrays [E, ...] like the space: int64,
    counted from 0, of Discrete, MultiDiscrete, MultiBinary and Boxes of integers;
    float32 of other Boxes; a tuple or dict of them of Tuple and Dict.

    space:  of one environment's actions, where a Box of integers is a MultiDiscrete;
            BadInput if it is not supported
    leaves: an Action for each array
    """

    def __init__(self, space, num_envs):
        self.num_envs = num_envs
        self.leaves = list(_action_leaves(space))
        self.space = _with_choices(space)

    def nest(self, arrays):
        """Returns the nest of one array for each leaf."""
        return _pack(self.space, iter(arrays))

    def zeros(self):
        """Returns the action of which all numbers are 0."""
        return self.nest(
            np.zeros((self.num_envs, *leaf.shape), leaf.dtype) for leaf in self.leaves
        )

    def to_environment(self, action):
        """Returns (the action as environments take it, the action as it is taken):
        numbers of a Box are clipped to its bounds. Raises ValueError that names what is
        no action of the space."""
        arrays = [self._array(action, leaf) for leaf in self.leaves]
        for x, leaf in zip(arrays, self.leaves):
            leaf.check(x)
        arrays = [leaf.clip(x) for x, leaf in zip(arrays, self.leaves)]
        given = [leaf.to_environment(x) for x, leaf in zip(arrays, self.leaves)]
        return self.nest(given), self.nest(arrays)

    def split(self, action):
        """Returns the E actions of to_environment(), one for each environment."""
        rows = [leaf.rows(entry(action, leaf.keys, leaf.name)) for leaf in self.leaves]
        return [self.nest(row) for row in zip(*rows)]

    def from_bytes(self, data):
        """Returns the action whose arrays' bytes are in the list. Raises ValueError
        that says what is wrong with them."""
        if len(data) != len(self.leaves):
            raise ValueError(
                f"the action has {len(data)} arrays, expected {len(self.leaves)}"
            )
        arrays = []
        for x, leaf in zip(data, self.leaves):
            shape = (self.num_envs, *leaf.shape)
            size = leaf.dtype.itemsize * math.prod(shape)
            if len(x) != size:
                raise ValueError(
                    f"{leaf.name} has {len(x)} bytes, expected {size}: {leaf.dtype} "
                    f"{list(shape)}"
                )
            arrays.append(np.frombuffer(x, leaf.dtype).reshape(shape))
            leaf.check(arrays[-1])
        return self.nest(arrays)

    def _array(self, action, leaf):
        x = np.asarray(entry(action, leaf.keys, leaf.name))
        shape = (self.num_envs, *leaf.shape)
        if x.shape != shape or not np.can_cast(x.dtype, leaf.dtype, "same_kind"):
            raise ValueError(
                f"{leaf.name} is {x.dtype} {list(x.shape)}, expected {leaf.dtype} "
                f"{list(shape)}"
            )
        return x.astype(leaf.dtype, copy=False)


def _rounded(bound, sign):
    """Returns a bound as float32, rounded up (sign 1) or down (-1)."""
    x = bound.astype(np.float32)
    y = np.nextafter(x, np.float32(sign * np.inf))
    return np.where(sign * (x - bound) >= 0, x, y)


class Action:
    """One array of an action, for one space that is not a Tuple or Dict.

    keys, name:  where it is in the action: ("arm", 0), "action/arm/0"
    dtype, shape: of the array, without the dimension of environments
    num_choices: integer array of that shape, how many values each number has; None of a
                 Box
    start:       what the environment counts from, of choices
    low, high:   bounds of the numbers of a Box, finite float32 within its own
    """

    def __init__(self, space, keys):
        self.keys = keys
        self.name = "/".join(map(str, ("action", *keys)))
        self.space = space
        self.shape = space.shape
        self.dtype = np.dtype(np.int64)
        self.start = 0
        if isinstance(space, spaces.Discrete):
            self.num_choices, self.start = np.array(space.n), int(space.start)
        elif isinstance(space, spaces.MultiDiscrete):
            self.num_choices, self.start = space.nvec, space.start
        elif isinstance(space, spaces.MultiBinary):
            self.num_choices = np.full(space.shape, 2)
        elif _is_of_integers(space):
            self.num_choices = _num_choices(space).astype(np.int64)
            self.start = space.low
        else:
            self.num_choices, self.dtype = None, np.dtype(np.float32)
            limit = float(min(np.finfo(t).max for t in (np.float32, space.dtype)))
            self.low = _rounded(space.low.astype(float).clip(-limit, limit), 1)
            self.high = _rounded(space.high.astype(float).clip(-limit, limit), -1)

    def clip(self, x):
        if self.num_choices is not None:
            return x
        return np.clip(x, self.low, self.high).astype(np.float32)

    def to_environment(self, x):
        if self.num_choices is not None:
            return (x + self.start).astype(self.space.dtype, copy=False)
        # Bounds in float64 that are equal may lie between two numbers of float32.
        return np.clip(x.astype(self.space.dtype), self.space.low, self.space.high)

    def rows(self, x):
        # Everything that is in a Box is an array.
        return map(np.asarray, x) if isinstance(self.space, spaces.Box) else x

    def check(self, x):
        """Raises ValueError if an array [E, ...] has numbers that are none of the
        choices, or are not finite."""
        if self.num_choices is None:
            good, expected = np.isfinite(x), "finite numbers"
        else:
            good = (0 <= x) & (x < self.num_choices)
            expected = f"0 to less than {self.num_choices.tolist()}"
        if not good.all():
            raise ValueError(
                f"{self.name} {x.tolist()} is out of bounds, expected {expected}"
            )


def _action_leaves(space, keys=()):
    entries = children(space)
    _check_keys(space, "action")
    if entries and len(keys) < MAX_DEPTH:
        for key, part in entries:
            yield from _action_leaves(part, (*keys, key))
    elif (
        isinstance(space, LEAVES)
        and 0 not in space.shape
        and (not _is_of_integers(space) or _may_be_chosen(space))
    ):
        yield Action(space, keys)
    else:
        raise unsupported_actions(space)


def _is_of_integers(space):
    return isinstance(space, spaces.Box) and space.dtype.kind != "f"


def _num_choices(box):
    """Returns how many values each of its integers has, in Python's."""
    return np.array(box.high.astype(object) - box.low.astype(object) + 1, object)


def _may_be_chosen(box):
    few = (_num_choices(box) <= MAX_CHOICES).all()
    return few and int(box.high.max()) < 2**63


def _with_choices(space):
    """Returns a space of actions with a MultiDiscrete for each Box of integers, any of
    which may be chosen."""
    if entries := children(space):
        parts = OrderedDict((key, _with_choices(part)) for key, part in entries)
        of_dict = isinstance(space, spaces.Dict)  # Whose order is kept so.
        return spaces.Dict(parts) if of_dict else spaces.Tuple(parts.values())
    if not _is_of_integers(space):
        return space
    numbers, start = (x.astype(np.int64) for x in (_num_choices(space), space.low))
    if space.shape == ():
        return spaces.Discrete(int(numbers), start=int(start))
    return spaces.MultiDiscrete(numbers, start=start)


def _check_keys(space, name):
    for key in space.spaces if isinstance(space, spaces.Dict) else ():
        if not isinstance(key, str):
            text = f"{name} space has the key {key!r}, expected strings"
            raise BadInput(f"{text} (several agents: PettingZoo's Parallel API)")


def unsupported_actions(space):
    """Returns the BadInput that says so."""
    return BadInput(
        f"action space {space} is not supported: use Discrete, MultiDiscrete, "
        "MultiBinary, a Box of floating point numbers, or of integers of at most "
        f"{MAX_CHOICES:,} values each, or a Tuple or Dict of them"
    )


def space_leaves(space, keys=()):
    entries = children(space)
    if entries is None:
        name = "/".join(map(str, ("observation", *keys)))
        dtype = np.dtype(space.dtype.newbyteorder("=").name)  # NumPy's one of its kind.
        yield keys, name, dtype, space.shape
        return
    for key, part in entries:
        if not is_text(part):
            yield from space_leaves(part, (*keys, key))


def _bounds(space, name="observation"):
    """Yields (name, (low, high)) of the entries that are encoded one-hot."""
    for key, part in children(space) or ():
        yield from _bounds(part, f"{name}/{key}")
    if isinstance(space, spaces.Discrete):
        yield name, (int(space.start), int(space.start + space.n - 1))
    elif isinstance(space, spaces.MultiDiscrete):
        yield name, (space.start, space.start + space.nvec - 1)


def entry(nest, keys, name):
    """Returns what is at these keys of a nest. Raises BadStep, which names it."""
    for key in keys:
        try:
            nest = nest[key]
        except (KeyError, IndexError, TypeError) as e:
            what, _, _ = name.partition("/")
            raise BadStep(
                f"{name} is not in the {what}, a {type(nest).__name__}"
            ) from e
    return nest


def _row(final, i, keys, name):
    """Returns an entry of the i-th observation of an info's "final_obs": an array of E
    observations, or one observation of arrays [E, ...]."""
    while keys and isinstance(final, (dict, tuple)):
        final, keys = entry(final, keys[:1], name), keys[1:]
    return entry(final, (i, *keys), name)


def _pack(space, arrays, text=None):
    """Returns the nest of arrays of a space, with `text` for its entries of text, or
    without them."""
    entries = children(space)
    if entries is None:
        return text if is_text(space) else next(arrays)
    if text is None:
        entries = [(k, part) for k, part in entries if not is_text(part)]
    packed = {k: _pack(part, arrays, text) for k, part in entries}
    return packed if isinstance(space, spaces.Dict) else tuple(packed.values())
