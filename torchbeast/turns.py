"""PettingZoo's environments of the AEC API, whose agents act by turns: each agent is a
row.

A row has a step when its agent has its turn, or ends; else it waits. What an agent is
paid while it waits is summed, by the environment, until its next step.

No torch in here: environment servers import this file.
"""

import numpy as np

from torchbeast.calls import Call, random_of_environments
from torchbeast.messages import BadInput
from torchbeast.pettingzoo import NOTHING, Rows
from torchbeast.spaces import BadStep
from torchbeast.vector import unpack

LAST = ("observation", "reward", "termination", "truncation", "info")


def rows(envs, *args):
    """Returns Rows of environments of PettingZoo's. args: as of Rows."""
    if not _by_turns(envs[0]):
        return Rows(envs, *args)
    if not (getattr(envs[0], "metadata", None) or {}).get("is_parallelizable"):
        return Turns(envs, *args)
    try:
        from pettingzoo.utils.conversions import aec_to_parallel
    except ImportError:
        raise BadInput(
            "an AEC environment that is parallelizable needs: pip install pettingzoo"
        ) from None
    return Rows([aec_to_parallel(env) for env in envs], *args)


def _by_turns(env):
    return hasattr(env, "agent_iter") or callable(getattr(env, "last", None))


class Turns(Rows):
    """Steps copies of an environment whose agents act by turns, a row for each agent:
    for Environment, as Rows.

    A step takes the action of one agent of each environment, and goes on to the next
    turn of an agent that can act; the last turns of those that have ended need no step
    of their own. An agent's episode begins with its first turn. One that ends before
    that has no step at all, but a score in a game against opponents. When no agent is
    left, the next step resets the environment.

    waits: [rows] bool, which rows have no part in the newest step. Their observation is
        all zeros, their reward 0 or that score; their action is ignored.
    """

    def __init__(self, envs, *args):
        super().__init__(envs, *args)
        self.waits = np.ones(self.num_envs, bool)
        self._begun = [set() for _ in envs]  # Who has had a turn, and has not ended.
        self._acts = [None] * len(envs)  # Whose turn it is.

    def _stack(self, parts):
        self._waits = [True] * self.num_envs
        result = super()._stack(parts)
        self.waits = np.array(self._waits)
        return result

    def _reset(self, e, seed=None):
        with random_of_environments(), self._reset_call:
            self.envs[e].reset(seed=seed)
        self._check_spaces(self.envs[e])
        self._begun[e], self._ended[e] = set(), set()
        self.seats.draw(e)
        yield from self._turns(e)
        if not self._live[e]:
            raise BadStep(f"environment {e} has no agent that can act after reset()")

    def _step(self, e, actions):
        agent = self._acts[e]
        action = self._own(agent, actions[self._row(e, agent)])
        self._call(e, agent, "step", action)
        yield from self._turns(e)

    def _turns(self, e):
        """Goes on to the next turn of an agent that can act. Yields the observations of
        an environment's rows."""
        seen = {}
        while self._look(e):
            agent = self._acts[e] = getattr(self.envs[e], "agent_selection", None)
            if agent not in self._live[e]:
                raise BadStep(
                    f"environment {e} gives the turn to {agent!r}, expected one of "
                    f"env.agents {self.envs[e].agents}"
                )
            row = e * self.num_agents + self._row(e, agent)
            if not self._turn(e, row, agent, seen):
                break
            self._call(e, agent, "step", None)
        for row, agent in self._rows(e):
            self._out[row] = agent not in self._begun[e]
            if row not in seen:
                self.masks.allow_all(row)
            yield seen.get(row, self._zeros)

    def _look(self, e):
        """Returns who is left."""
        live = self._live[e] = self._agents(e)
        for row, agent in self._rows(e):
            if agent in self._begun[e] - live:
                raise BadStep(
                    f"{self._who(row)} has left env.agents without a last turn, at "
                    "which last() says that it is terminated or truncated"
                )
            if agent in self._ended[e] & live:
                raise BadStep(
                    f"{self._who(row)} is in env.agents after its last turn: it was "
                    "terminated or truncated"
                )
        return live

    def _turn(self, e, row, agent, seen):
        """Writes the step of an agent whose turn it is, its observation into seen.
        Returns whether it has ended."""
        result = self._of(row, unpack, "last", self._call(e, agent, "last"), LAST)
        x, *numbers, info = result
        info = info if isinstance(info, dict) else NOTHING
        reward, terminated, truncated = (
            self._number(row, name, {agent: n}) for name, n in zip(LAST[1:], numbers)
        )
        ends = bool(terminated or truncated)
        if ends:
            self._ended[e].add(agent)
            if agent not in self._begun[e]:
                if self.seats.opponents is not None:  # Without a step, but a score.
                    self._rewards[row], self._terminated[row] = reward, True
                return True
            self._begun[e].remove(agent)
            self._metrics[row] = info.get("episode_metrics")
        else:
            self._begun[e].add(agent)
        self._waits[row], self._rewards[row] = False, reward
        self._terminated[row], self._truncated[row] = bool(terminated), bool(truncated)
        seen[row] = self._seen(row, x, info, not ends)
        return ends

    def _call(self, e, agent, method, *args):
        who = f"{method}() of {self.name}, agent {agent!r} of environment {e}"
        with Call(who):
            return getattr(self.envs[e], method)(*args)
