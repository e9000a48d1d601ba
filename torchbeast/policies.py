"""Makes the agent that --agent names; of several policies in one environment, an agent
for each."""

import contextlib
import re

import torch
from torch import nn

from torchbeast.flags import Parser, agent_parser, load_agent
from torchbeast.messages import BadInput, first_line
from torchbeast.nests import map_structure


def make_agent(flags, env):
    """Makes an agent of --agent for an environment.Environment; in WarpBeast, for
    several policies, all of theirs as one. Raises BadInput if the network is larger
    than the memory."""
    module = load_agent(flags.agent)
    try:
        if hasattr(flags, "policy_flags") and len(env.policies) > 1:
            return Policies(flags, env)
        return module.Agent(flags, env.observation_space, env.action_space)
    except (MemoryError, RuntimeError) as e:
        if not re.search("allocate memory|out of memory", str(e)):
            raise
        message = f"the network for {env.name} is larger than the memory"
        raise BadInput(f"{message}: {first_line(e)}") from e


class Policies:
    """The agents of an environment's policies as one agent, for Learner and for tests.

    Its rows are the N agents of E environments, environment by environment. learn()
    takes {policy: batch of its own rows}, and returns statistics as policy/name.

    agents: {policy: Agent}, each with flags of its own: --tagger.learning_rate
    """

    def __init__(self, flags, env):
        self.slices = dict(env.policies)
        self.num_agents, self.sizes = num_agents(env), policy_sizes(env)
        self.frozen = flags.freeze
        if getattr(flags, "save_replay", False):
            raise BadInput("--save_replay: expected an environment with one policy")
        for name in (*flags.policy_flags, *flags.freeze):
            check_policy(env, name)
        make = load_agent(flags.agent).Agent
        self.agents, chosen = {}, {}
        for name in self.slices:
            with _naming(name):
                own = self._flags(flags, name)
                self.agents[name] = make(own, env.observation_space, env.action_space)
            chosen |= {f"{name}.{k}": x for k, x in vars(own).get("chosen", {}).items()}
        if chosen:
            flags.chosen = chosen
        self.net = nn.ModuleDict({name: x.net for name, x in self.agents.items()})

    def _flags(self, flags, name):
        p = Parser(
            prog=f"warpbeast: policy {name}", parents=[agent_parser(flags.agent)]
        )
        p.set_defaults(**vars(flags))
        words = flags.policy_flags.get(name, [])
        own, unknown = p.parse_known_args(words)
        if unknown:
            raise BadInput(f"{unknown[0]}: expected a flag of --agent {flags.agent}")
        share = self.sizes[name] / self.num_agents
        own.batch_size = round(flags.batch_size * share)
        own.total_steps = max(1, round(flags.total_steps * share))
        return own

    def initial_state(self, batch_size):
        E = batch_size // self.num_agents
        return {
            name: agent.initial_state(E * self.sizes[name])
            for name, agent in self.agents.items()
        }

    def act(self, step, core_state, greedy=False):
        acts = {name: agent.act for name, agent in self.agents.items()}
        return self._act(acts, step, core_state, greedy)

    def act_in_test(self, step, core_state):
        acts = {name: agent.act_in_test for name, agent in self.agents.items()}
        return self._act(acts, step, core_state)

    def _act(self, acts, step, core_state, *args):
        actions, core_states = [], {}
        for name, act in acts.items():

            def rows(x, part=self.slices[name]):
                return x.unflatten(1, (-1, self.num_agents))[:, :, part].flatten(1, 2)

            outputs, core_states[name] = act(
                map_structure(rows, step), core_state[name], *args
            )
            E = step["reward"].shape[1] // self.num_agents
            actions.append(
                map_structure(lambda x, E=E: x.unflatten(1, (E, -1)), outputs["action"])
            )
        action = map_structure(lambda *xs: torch.cat(xs, 2).flatten(1, 2), *actions)
        return {"action": action}, core_states

    def start_learning(self, device):
        for name, agent in self.agents.items():
            if agent.flags.compile:
                agent.net.compile()
            with _naming(name):
                agent.start_learning(device)

    def learn(self, batches):
        return {
            f"{policy}/{name}": x
            for policy, agent in self.agents.items()
            if policy not in self.frozen
            for name, x in agent.learn(batches[policy]).items()
        }

    def state_dict(self):
        return {name: agent.state_dict() for name, agent in self.agents.items()}

    def load_state_dict(self, state):
        for name, agent in self.agents.items():
            agent.load_state_dict(state[name])


@contextlib.contextmanager
def _naming(policy):
    """A context in which BadInput gets a policy's name."""
    try:
        yield
    except BadInput as e:
        raise BadInput(f"policy {policy}: {e}") from e


def check_policy(env, name):
    """Raises BadInput if the environment has no policy of this name."""
    if name not in env.policies:
        raise BadInput(
            f"{env.name} has no policy {name!r}, it has {', '.join(env.policies)}"
        )


def num_agents(env):
    """Returns the number of agents in one environment."""
    return max(part.stop for part in env.policies.values())


def policy_sizes(env):
    """Returns {policy: the number of its agents in one environment}."""
    agents = range(num_agents(env))
    return {name: len(agents[part]) for name, part in env.policies.items()}
