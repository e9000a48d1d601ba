"""Policies of unequal spaces: all rows have the union of the spaces, {policy: its own},
of observations and of actions, with zeros for what is not theirs; and if an action has
choices, a mask of all policies' choices, one policy's after the other's.

No torch in here: environment servers import this file.
"""

import numpy as np
from gymnasium import spaces

from torchbeast.masks import NAME, sizes
from torchbeast.spaces import Actions
from torchbeast.vector import split


class Union:
    """Puts what an environment returns to an agent of one policy into the union.

    of_policies: {policy: (its observation space, its action space)}, as environments
        have them

    spaces: of the union, without masks
    """

    def __init__(self, of_policies):
        self._parts, self._num_choices = {}, {}
        for policy, (space, action_space) in of_policies.items():
            actions = Actions(action_space, 1)
            self._parts[policy] = split(space, actions)
            self._num_choices[policy] = sum(sizes(actions))
        self._zeros = {p: x.zeros() for p, (x, _) in self._parts.items()}
        observations = {p: x.declared for p, (x, _) in self._parts.items()}
        actions = {p: action_space for p, (_, action_space) in of_policies.items()}
        self.spaces = spaces.Dict(observations), spaces.Dict(actions)

    def observe(self, policy, x, info, acts):
        """Returns what an agent of a policy has observed, and an info with its mask.
        acts: whether it takes an action; else all of its choices are allowed."""
        _, masks = self._parts[policy]
        mask = {p: np.ones(n, bool) for p, n in self._num_choices.items()}
        if acts or masks.of_observation or NAME in info:
            x = masks.take(x, info, 0)
            if (own := masks.of_step(np.array([not acts]))) is not None:
                mask[policy] = own[0]
        in_order = [mask[p] for p in self.spaces[1].spaces]
        return {**self._zeros, policy: x}, {NAME: np.concatenate(in_order)}


def choices(action_space):
    """Returns {policy: slice of its choices in a union's masks}."""
    ends, begin = {}, 0
    for policy, space in action_space.spaces.items():
        end = begin + sum(sizes(Actions(space, 1)))
        ends[policy], begin = slice(begin, end), end
    return ends


def make(of_policies):
    """Returns the Union of policies' spaces, None if they are equal."""
    first, *others = of_policies.values()
    return None if all(x == first for x in others) else Union(of_policies)
