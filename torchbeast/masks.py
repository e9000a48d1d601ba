"""Masks of actions: which choices an agent has at a step.

A mask is the entry "action_mask" of an observation that is a Dict (PettingZoo, RLlib),
or of an info (Gymnasium's Taxi). It is a nest of arrays like the action: of Discrete
[n]; of MultiDiscrete and MultiBinary one array of all choices, one number's after the
other's, or a tuple of one array for each number; True or not 0 is allowed. A Box has
none. One array of all choices of a Tuple or Dict will do, too.

No torch in here: environment servers import this file.
"""

import numpy as np
from gymnasium import spaces

from torchbeast.messages import BadInput
from torchbeast.spaces import BadStep, entry

NAME = "action_mask"


def in_observation(space, actions):
    """Tells whether observations of this space have masks of spaces.Actions."""
    choices = any(leaf.num_choices is not None for leaf in actions.leaves)
    return choices and isinstance(space, spaces.Dict) and NAME in space.spaces


def without(space):
    """Returns a Dict space without its masks."""
    kept = {key: part for key, part in space.spaces.items() if key != NAME}
    if not kept:
        raise BadInput(f"observation space {space} has nothing beside {NAME!r}")
    return spaces.Dict(kept)


def num_of(leaf):
    """Returns the number of choices of all numbers of a spaces.Action."""
    return int(np.sum(leaf.num_choices))


class Masks:
    """The masks of E environments, of C choices: those of all numbers of an action, one
    after the other.

    of_observation: whether observations have them; None until take() has seen an info
    """

    def __init__(self, actions, num_envs, of_observation):
        self.num_envs = num_envs
        self.of_observation = of_observation or None
        self._where = "observation" if of_observation else "info"
        self._leaves = [x for x in actions.leaves if x.num_choices is not None]
        self._starts = _starts(actions)
        num_choices = sum(num_of(leaf) for leaf in self._leaves)
        self._rows = np.zeros((num_envs, num_choices), bool)
        self._none = None if self._leaves else True
        self.who = "environment {}".format  # What messages call a row.

    def take(self, observation, info, i=None):
        """Takes the mask of environment i, or those of all, out of what an environment
        returned. Returns the observation without it."""
        if self._none:
            if self._leaves and isinstance(info, dict) and NAME in info:
                raise BadStep(f"{self._name} is not in the first info, expected in all")
            return observation
        if self.of_observation is None:
            self._none = not isinstance(info, dict) or NAME not in info
            self.of_observation = False
            return self.take(observation, info, i)
        mask = entry(observation if self.of_observation else info, (NAME,), self._name)
        rows = slice(None) if i is None else slice(i, i + 1)
        self._rows[rows] = self._flat(mask, self.num_envs if i is None else 1)
        if not self.of_observation:
            return observation
        return {key: x for key, x in observation.items() if key != NAME}

    def allow_all(self, i):
        """Lets environment i have a mask of which all is allowed."""
        self._rows[i] = True

    @property
    def _name(self):
        return f"{self._where}/{NAME}"

    def _flat(self, mask, E):
        """Returns the masks of E environments as one array [E, C]."""
        if getattr(mask, "dtype", None) == np.dtype(object):  # It holds E nests.
            return np.concatenate([self._flat(x, 1) for x in mask])
        if not isinstance(mask, (dict, tuple)):
            return self._array([mask], E, self._rows.shape[1], self._name)
        parts = []
        for leaf in self._leaves:
            name = "/".join(map(str, (self._name, *leaf.keys)))
            parts.append(self._part(mask, leaf.keys, E, num_of(leaf), name))
        return np.concatenate(parts, 1)

    def _part(self, x, keys, E, size, name):
        """Returns the masks [E, size] at these keys of a nest of arrays. Of a tuple,
        Gymnasium's vector environments make an array of E tuples."""
        if getattr(x, "dtype", None) == np.dtype(object):
            rows = [self._part(row, keys, 1, size, name) for row in x]
            return np.concatenate(rows)
        if keys:
            x = entry(x, keys[:1], name)
            return self._part(x, keys[1:], E, size, name)
        return self._array(x if isinstance(x, tuple) else (x,), E, size, name)

    def _array(self, arrays, E, size, name):
        arrays = [np.asarray(x) for x in arrays]
        good = all(x.dtype.kind in "biuf" and x.size % E == 0 for x in arrays)
        if not good or sum(x.size for x in arrays) != E * size:
            given = ", ".join(f"{x.dtype} {list(x.shape)}" for x in arrays)
            of_all = f"[{E}, {size}]" if E > 1 else f"[{size}]"
            raise BadStep(f"{name} is {given}, expected numbers {of_all}")
        arrays = [x.reshape(E, -1) for x in arrays]
        x = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, 1)
        return x if x.dtype == bool else x != 0

    def of_step(self, last):
        """Returns the masks [E, C] bool of a step, or None if there are none. Where
        nothing is allowed at a last observation, last [E], the mask allows all.

        Raises BadStep where nothing is allowed elsewhere.
        """
        if self._none:
            return None
        masks = self._rows.copy()
        some = np.logical_or.reduceat(masks, self._starts, axis=1).all(1)  # [E]
        if not some.all():
            if (bad := np.flatnonzero(~some & ~last)).size:
                mask = str(masks[bad[0]].astype(int).tolist())[:50]
                raise BadStep(
                    f"{self._name} of {self.who(bad[0])} allows no action: {mask}"
                )
            masks[~some] = True
        return masks

    def check(self, action, masks, ignored):
        """Raises ValueError if an action [E, ...] is outside of the masks [E, C], where
        it is not ignored [E]."""
        numbers = [
            entry(action, leaf.keys, leaf.name).reshape(self.num_envs, -1)
            for leaf in self._leaves
        ]
        indices = np.concatenate(numbers, 1) + self._starts  # [E, D]
        allowed = np.take_along_axis(masks, indices, 1).all(1) | ignored
        if not allowed.all():
            e = int(np.flatnonzero(~allowed)[0])
            raise ValueError(
                f"action {(indices - self._starts)[e].tolist()} of {self.who(e)} is "
                f"outside of its {NAME} {masks[e].astype(int).tolist()}: the network "
                "has to apply it (torchbeast/networks.py)"
            )


def sizes(actions):
    """Returns [D], how many choices each number of spaces.Actions has."""
    leaves = [x for x in actions.leaves if x.num_choices is not None]
    return [int(n) for leaf in leaves for n in np.ravel(leaf.num_choices)]


def _starts(actions):
    """Returns the index [D] of each number's first choice."""
    return np.cumsum([0, *sizes(actions)])[:-1]


def some_action(actions, masks):
    """Returns an action [E, ...] of spaces.Actions that the masks [E, C] allow."""
    numbers = iter(x.argmax(1) for x in np.split(masks, _starts(actions)[1:], 1))
    zeros = actions.zeros()
    for leaf in actions.leaves:
        if leaf.num_choices is not None:
            x = entry(zeros, leaf.keys, leaf.name).reshape(len(masks), -1)
            for d in range(x.shape[1]):
                x[:, d] = next(numbers)
    return zeros
