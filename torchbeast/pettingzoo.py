"""PettingZoo's environments of the Parallel API: each agent is a row. (Those of the AEC
API are in turns.py.)

Copies of an environment with N possible agents are N rows each, copy by copy, agents in
the order of possible_agents. Rows says what becomes of a row when its agent leaves
before the others, or joins later. The package itself is not needed.

No torch in here: environment servers import this file.
"""

import functools
import importlib
import itertools
import math
import sys
import types
from collections.abc import Mapping

import gymnasium
import numpy as np

from torchbeast import union
from torchbeast.calls import Call, random_of_environments
from torchbeast.masks import NAME
from torchbeast.messages import BadInput
from torchbeast.seats import Seats
from torchbeast.seeds import derive_seed
from torchbeast.spaces import Actions, BadStep, Observations
from torchbeast.vector import RESET, Separate, number, split, unpack

STEP = ("observations", "rewards", "terminations", "truncations", "infos")
NOTHING = types.MappingProxyType({})


def find(env_id):
    """Returns the function or class that --env names, or None: MODULE:NAME, a name in a
    module; MODULE, which has a parallel_env or an env; MODULE:ID, an ID in PettingZoo's
    own registry. A MODULE before a colon has been imported.

    Raises ImportError if something that the module imports is missing.
    """
    module, colon, name = env_id.rpartition(":")
    zoo = sys.modules.get("pettingzoo")
    for kind in ("parallel", "aec"):
        if name in getattr(zoo, f"{kind}_registry", ()):
            return functools.partial(zoo.make, kind, name)
    names = [name] if colon else ["parallel_env", "env"]
    module = module or name
    if not all(part.isidentifier() for part in module.split(".")):
        return None
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name == module and "." not in module:  # Then it names something else.
            return None
        raise
    for x in (getattr(found, name, None) for name in names):
        # A class of Gymnasium's is to be registered.
        if callable(x) and not (isinstance(x, type) and issubclass(x, gymnasium.Env)):
            return x
    return None


def checked(env_id, envs):
    """Returns environments that were made. Raises BadInput if they are no
    PettingZoo's."""
    if not is_pettingzoo(envs[0]):
        raise BadInput(
            f"environment {env_id!r} is a {type(envs[0]).__name__}, expected an "
            "environment of PettingZoo's, or an ID that is registered with Gymnasium"
        )
    return envs


def is_pettingzoo(env):
    """Tells whether an object is an environment of PettingZoo's, or looks like one."""
    if isinstance(env, gymnasium.Env):  # Whatever else it has.
        return False
    bases = {cls.__name__ for cls in type(env).__mro__}
    return hasattr(env, "possible_agents") or bool(bases & {"ParallelEnv", "AECEnv"})


class Rows(Separate):
    """Steps copies of an environment, a row for each agent: for Environment, as
    Separate.

    An agent's episode begins with its first observation and ends where it is terminated
    or truncated. From the step after that on, its row is out: the observation is all
    zeros, the reward 0, the action ignored, until the first observation of the agent's
    next episode. An agent that joins late is out until then, too. When no agent is
    left, the next step resets the environment.

    policies, opponents: as of seats.Seats
    out: [rows] bool, whose agent's last step was the newest one or an older one
    policy: [rows] uint8, the numbers of the policies that act, or None
    union: union.Union, if the policies' spaces differ, or None
    """

    def __init__(self, envs, policies=None, opponents=None):
        self.envs, first = envs, envs[0]
        self.name, self.metadata = _name(first), getattr(first, "metadata", None)
        self.frames_per_step = getattr(first, "frames_per_step", 1)
        self.agents = list(getattr(first, "possible_agents", None) or ())
        self.num_agents, self._known = len(self.agents), set(self.agents)
        if not 0 < self.num_agents == len(self._known):
            raise BadInput(
                f"environment {self.name} has possible_agents {self.agents}, expected "
                "the names of all agents, no two of them equal"
            )
        self.num_envs = len(envs) * self.num_agents
        self.seats = Seats(self.agents, len(envs), self.name, policies, opponents)
        policies = self.seats.policies or {None: range(self.num_agents)}
        self._policies = {self.agents[i]: p for p, own in policies.items() for i in own}
        self._firsts = {p: self.agents[own[0]] for p, own in policies.items()}
        self._spaces = {p: _spaces_of(first, a) for p, a in self._firsts.items()}
        for env in self.envs:
            self._check_spaces(env)
        self.union = union.make(self._spaces)
        space, action_space = self._spaces[next(iter(policies))]
        if self.union is not None:
            space, action_space = self.union.spaces
        self.actions = Actions(action_space, self.num_envs)
        self.observations, self.masks = split(space, self.actions)
        self.masks.who = self._who
        self._zeros = self.observations.zeros()
        self._alone = Observations(self.observations.declared, 1)
        self._live = [set() for _ in envs]  # Whose episode has begun.
        self._ended = [set() for _ in envs]  # And ended, since reset().
        self._reset_call = Call(f"reset() of {self.name}")
        self._step_call = Call(f"step() of {self.name}")

    def _check_spaces(self, env):
        if list(env.possible_agents) != self.agents:
            raise BadInput(
                f"environment {self.name} has possible_agents {env.possible_agents}, "
                f"and had {self.agents}"
            )
        for agent in self.agents:
            policy = self._policies[agent]
            for x, expected in zip(_spaces_of(env, agent), self._spaces[policy]):
                if x is not expected and x != expected:
                    raise BadInput(
                        f"environment {self.name}: agent {agent!r} has the space {x}, "
                        f"expected {expected}, as {self._firsts[policy]!r} had: they "
                        "have one policy (--policies NAME=PATTERN,... makes several)"
                    )

    def reset(self, seed):
        self.seats.seed(seed)
        return self._stack(
            self._reset(e, None if seed is None else derive_seed(seed, e))
            for e in range(len(self.envs))
        )

    def step(self, action):
        actions, N = self.actions.split(action), self.num_agents
        observations = self._stack(
            self._step(e, actions[e * N : (e + 1) * N]) if live else self._reset(e)
            for e, live in enumerate(self._live)
        )
        terminated, truncated = np.array(self._terminated), np.array(self._truncated)
        rewards, end = np.array(self._rewards, np.float64), terminated | truncated
        return observations, rewards, terminated, truncated, end, self._metrics

    def _stack(self, parts):
        """Stacks the observations of all rows. parts: an iterable of theirs, for each
        environment; what makes them writes the rest of the step."""
        E, seen = self.num_envs, []
        self._rewards, self._metrics, self._out = [0.0] * E, [None] * E, [True] * E
        self._terminated, self._truncated = [False] * E, [False] * E
        rows = itertools.chain.from_iterable(parts)
        try:
            result = self.observations.stack(seen.append(x) or x for x in rows)
        except BadStep:
            for row, x in enumerate(seen):  # Whose is it?
                self._of(row, self._alone.stack, [x])
            raise
        self.out = np.array(self._out)
        if self.seats.numbers is not None:
            self.policy = self.seats.numbers.copy()
        return result

    def _reset(self, e, seed=None):
        """Resets environment e. Yields the observations of its rows."""
        env = self.envs[e]
        with random_of_environments(), self._reset_call:
            result = env.reset(seed=seed)
        observations, infos = unpack("reset", result, RESET)
        self._check_spaces(env)
        self._live[e], self._ended[e] = self._agents(e), set()
        self.seats.draw(e)
        if not self._live[e]:
            raise BadStep(f"environment {e} has no agents after reset()")
        yield from self._observations(e, observations, infos)

    def _step(self, e, actions):
        """Steps environment e. Yields the observations of its rows."""
        before = self._live[e]
        rows = self.seats.rows[e]
        given = {a: self._own(a, x) for a, x in zip(rows, actions) if a in before}
        with self._step_call:
            result = self.envs[e].step(given)
        observations, *numbers, infos = unpack("step", result, STEP)
        for name, x in zip(STEP[1:], numbers):
            if not isinstance(x, Mapping) or not self._known >= x.keys():
                found = list(x) if isinstance(x, Mapping) else type(x).__name__
                raise BadStep(
                    f"{name} of environment {e} has {found}, expected a dict of agents "
                    f"of {self.agents}"
                )
        now = self._live[e] = self._agents(e)
        for row, agent in self._rows(e):
            if agent in before:
                reward, terminated, truncated = (
                    self._number(row, name, x) for name, x in zip(STEP[1:], numbers)
                )
                self._rewards[row] = reward
                self._terminated[row] = bool(terminated)
                self._truncated[row] = bool(truncated)
                if terminated or truncated:
                    self._ended[e].add(agent)
                    self._metrics[row] = _get(infos, agent).get("episode_metrics")
                elif agent not in now:
                    raise BadStep(
                        f"{self._who(row)} has left env.agents, and is neither "
                        "terminated nor truncated"
                    )
            elif agent in numbers[0] and self._number(row, "rewards", numbers[0]):
                raise BadStep(
                    f"{self._who(row)} has reward {numbers[0][agent]} at a step at "
                    "which it was not in env.agents"
                )
            if agent in now & self._ended[e]:
                raise BadStep(
                    f"{self._who(row)} is in env.agents after its last step: it was "
                    "terminated or truncated"
                )
        yield from self._observations(e, observations, infos, before)

    def _observations(self, e, observations, infos, before=frozenset()):
        """Yields the observations of an environment's rows."""
        now = self._live[e]
        for row, agent in self._rows(e):
            self._out[row] = agent not in now
            if agent not in now and agent not in before:
                self.masks.allow_all(row)
                yield self._zeros
                continue
            x, info = _get(observations, agent, None), _get(infos, agent)
            if x is None:
                raise BadStep(f"{self._who(row)} is not in observations")
            yield self._seen(row, x, info, agent in now)

    def _seen(self, row, x, info, acts):
        """Returns the observation x of a row without its mask, which it takes."""
        if self.union is not None:
            policy = self._policies[self._agent(row)]
            x, info = self._of(row, self.union.observe, policy, x, info, acts)
        if acts or self.masks.of_observation or NAME in info:
            return self._of(row, self.masks.take, x, info, row)
        self.masks.allow_all(row)  # No action is taken at a last observation.
        return x

    def _agents(self, e):
        """Returns the set of env.agents."""
        agents = self.envs[e].agents
        found = set(agents)
        if len(found) < len(agents) or not found <= self._known:
            raise BadStep(
                f"environment {e} has agents {agents}, expected some of possible_agents"
                f" {self.agents}, each once"
            )
        return found

    def _rows(self, e):
        return enumerate(self.seats.rows[e], e * self.num_agents)

    def _own(self, agent, action):
        """Returns an agent's own part of an action."""
        return action if self.union is None else action[self._policies[agent]]

    def _row(self, e, agent):
        """Returns which of the rows of environment e is an agent's."""
        return self.seats.rows[e].index(agent)

    def _agent(self, row):
        e, i = divmod(int(row), self.num_agents)
        return self.seats.rows[e][i]

    def _who(self, row):
        return f"agent {self._agent(row)!r} of environment {row // self.num_agents}"

    def _of(self, row, function, *args):
        """Calls a function. Names the agent in what it raises."""
        try:
            return function(*args)
        except BadStep as e:
            text = str(e).replace(" of environment 0", "")
            raise BadStep(f"{self._who(row)}: {text}") from None

    def _number(self, row, name, x):
        agent = self._agent(row)
        if agent not in x:
            raise BadStep(f"{self._who(row)} is not in {name}")
        found = self._of(row, number, x[agent], name)
        if not math.isfinite(found):
            raise BadStep(f"{self._who(row)}: {name} is {found}")
        return found


def _get(nest, agent, otherwise=NOTHING):
    """Returns what is there of an agent, who may have none."""
    x = nest.get(agent) if isinstance(nest, Mapping) else None
    return otherwise if x is None else x


def _name(env):
    metadata = getattr(env, "metadata", None) or {}
    return metadata.get("name") or type(getattr(env, "unwrapped", env)).__name__


def _spaces_of(env, agent):
    return env.observation_space(agent), env.action_space(agent)
