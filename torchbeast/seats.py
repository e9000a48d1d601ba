"""Which policy acts for which agent: --policies, and --opponents for games of two.

No torch in here: environment servers import this file.
"""

import argparse
import fnmatch
import re

import numpy as np

from torchbeast.flags import number
from torchbeast.messages import BadInput
from torchbeast.seeds import derive_seed

# OpenAI Five's (Berner et al., arXiv 1912.06680): 80 % of its games were against
# itself, of which both sides are learned from, the others against its past.
AGAINST_ITSELF = 0.8
MAX_POLICIES = 255


def add_flags(group):
    """Adds --policies, --opponents and --opponent_interval."""
    # fmt: off
    group.add_argument("--policies", type=patterns, metavar="NAME=PATTERN,...",
                       help="policies of PettingZoo's agents, such as "
                       "red=red_*,blue=blue_*; each may have flags of its own: "
                       "--red.learning_rate (default: one policy of all agents)")
    group.add_argument("--opponents", type=number(int, 0, MAX_POLICIES - 1),
                       metavar="N", help="learn games of two agents by self-play, in "
                       "part against N past policies; 0: against itself alone "
                       "(default: agents stay in their places)")
    group.add_argument("--opponent_interval", type=number(int, 1), default=50_000,
                       metavar="STEPS", help="steps after which the learner takes the "
                       "place of its oldest past policy (default: %(default)s)")
    # fmt: on


def patterns(text):
    """An argparse type: a text NAME=PATTERN,..."""
    for name, pattern in pairs_of(text):
        if not re.fullmatch(r"\w+", name) or not pattern:
            raise argparse.ArgumentTypeError(f"{text!r}, expected NAME=PATTERN,...")
    if len(dict(pairs_of(text))) > MAX_POLICIES:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_POLICIES} policies")
    return text


def pairs_of(text):
    """Returns [(name, pattern)] of a text."""
    words = [word.strip().partition("=") for word in text.split(",")]
    return [(name, pattern) for name, _, pattern in words]


def refuse(policies, opponents, name):
    """Raises BadInput if an environment without agents by name has either flag."""
    flag = "--policies" if policies else "--opponents"
    if policies or opponents is not None:
        raise BadInput(f"{flag}: {name} is no environment of PettingZoo's")


def of_agents(policies, agents, name):
    """Returns {policy: the indices of its agents}, in the order of --policies. Raises
    BadInput if an agent has no policy or several, or a pattern no agent."""
    pairs = pairs_of(policies)
    found = {policy: [] for policy, _ in pairs}
    for i, agent in enumerate(agents):
        own = {p: x for p, x in pairs if fnmatch.fnmatchcase(str(agent), x)}
        if len(own) != 1:
            what = " and ".join(f"{p}={x}" for p, x in own.items()) or "nothing"
            raise BadInput(
                f"--policies: agent {agent!r} of {name} matches {what}, expected "
                f"exactly one policy for each of {agents}"
            )
        found[next(iter(own))].append(i)
    for policy, pattern in pairs:
        if not fnmatch.filter(map(str, agents), pattern):
            raise BadInput(
                f"--policies: {policy}={pattern} matches no agent of {name}, which has "
                f"{agents}"
            )
    return found


class Seats:
    """Whose each row of E environments is, and which policy acts for it.

    With --opponents, the first row of an environment is the learner's and the second
    one its opponent's. At each reset it is drawn which of the past policies 1 to N acts
    for the second one, or 0, the learner itself. Of each two episodes of an environment
    the learner has one side in the first, which is drawn, and the other in the second.

    policies: {policy: indices of its agents}, empty if there is one policy
    rows:     for each environment, the agents of its rows
    numbers:  [rows] uint8, the numbers of the policies, or None if there is one
    """

    def __init__(self, agents, num_envs, name, policies=None, opponents=None):
        self.rows = [agents for _ in range(num_envs)]
        self.policies, self.opponents, self.numbers = {}, opponents, None
        self._agents = agents
        if opponents is not None and policies:
            raise BadInput("--opponents and --policies do not go together")
        if opponents is not None and len(agents) != 2:
            raise BadInput(
                f"--opponents: {name} has the agents {agents}, expected two of them"
            )
        if policies:
            self.policies = of_agents(policies, agents, name)
        if len(self.policies) < 2:
            self.policies = {}
        else:
            own = np.zeros(len(agents), np.uint8)
            for number_, indices in enumerate(self.policies.values()):
                own[indices] = number_
            self.numbers = np.tile(own, num_envs)
        if opponents:
            self.numbers = np.zeros(2 * num_envs, np.uint8)
        self.seed(None)

    def seed(self, seed):
        """Seeds what is drawn. (Environments have the seeds of lower numbers.)"""
        seed = None if seed is None else derive_seed(seed, len(self.rows))
        self._random = np.random.default_rng(seed)
        self._sides = [0] * len(self.rows)  # Of the next episode, or 0: is to be drawn.

    def draw(self, e):
        """Draws who plays the next episode of environment e."""
        if self.opponents is None:
            return
        side = self._sides[e] or self._random.choice([1, -1])
        self._sides[e] = 0 if self._sides[e] else -side
        self.rows[e] = self._agents[::side]
        if self.opponents and self._random.random() < AGAINST_ITSELF:
            self.numbers[2 * e + 1] = 0
        elif self.opponents:
            self.numbers[2 * e + 1] = 1 + self._random.integers(self.opponents)
