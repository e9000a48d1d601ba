"""Makes the agent that --agent names; of several policies in one environment, an agent
for each."""

import contextlib
import functools
import re

import torch
from torch import nn

from torchbeast import devices, graphs, ranks, rollouts, union
from torchbeast.environment import Environment
from torchbeast.flags import Parser, agent_parser, load_agent
from torchbeast.messages import BadInput, first_line
from torchbeast.nests import leaves, map_structure


def make_agent(flags, env):
    """Makes an agent of --agent for an environment.Environment, or one on the device;
    for several policies, all of theirs as one. Raises BadInput if the network is larger
    than the memory."""
    module = load_agent(flags.agent)
    named = [*getattr(flags, "policy_flags", ()), *getattr(flags, "freeze", ())]
    try:
        if len(env.policies) > 1:
            return Policies(flags, env)
        for name in named:
            if env.policies:
                check_policy(env, name)
            raise BadInput(
                f"{env.name} has one policy, whose flags are the program's own"
            )
        if getattr(env, "opponents", None):
            return SelfPlay(flags, env)
        return module.Agent(flags, env.observation_space, env.action_space)
    except (MemoryError, RuntimeError) as e:
        if not re.search("allocate memory|out of memory", str(e)):
            raise
        message = f"the network for {env.name} is larger than the memory"
        raise BadInput(f"{message}: {first_line(e)}") from e


def acting(agent, device):
    """Returns the agent's act() on the device, for batches in host memory
    (graphs.Acting). Several policies have one each."""
    if not isinstance(agent, Several):
        return graphs.Acting(agent, device)
    acts = {name: graphs.Acting(x, device) for name, x in agent.agents.items()}
    return functools.partial(agent.act_by, acts, device)


def make_judged(flags, env):
    """Makes what plays where an agent is judged: what make_agent() does, or in
    self-play the learner's agent alone."""
    if env.opponents is None:
        return make_agent(flags, env)
    return load_agent(flags.agent).Agent(flags, *_spaces(env))


def state_of_judged(env, state):
    """Returns the part of an agent's state_dict() that make_judged() takes."""
    return state if env.opponents is None else state.get(LEARNER, state)


LEARNER = "learner"  # Beside its past policies.
OUTPUTS = "outputs"  # What act() returns, {policy: its own} without actions.


class Several:
    """Some agents as one: an agent for each policy that acts in an environment, for
    programs, Learner and tests.

    act() and act_in_test() have each policy act for its own rows, those with its number
    as step["policy"]. learn() has each learn from its own steps.

    agents: {policy: Agent}, in the order of the policies' numbers
    frozen: policies that do not learn
    """

    def __init__(self, flags, env, agents, frozen):
        self.flags, self.agents, self.frozen = flags, agents, frozen
        self._choices, self._like = None, {}
        if getattr(env, "of_policies", False):
            self._choices = union.choices(env.action_space)
        if getattr(flags, "save_replay", False):
            raise BadInput("--save_replay: expected an environment with one policy")
        if ranks.current.num > 1 and isinstance(env, Environment):
            raise BadInput(f"{env.name} has several policies: expected one learner")
        burn_ins = {agent.burn_in for agent in agents.values()}
        if len(burn_ins) > 1:
            raise BadInput("expected the same --burn_in and --use_lstm of all policies")
        [self.burn_in] = burn_ins
        self.observation_space = env.observation_space
        self.net = nn.ModuleList([x.net for x in agents.values()])

    def initial_state(self, batch_size):
        return {name: x.initial_state(batch_size) for name, x in self.agents.items()}

    def state_of(self, name, core_state):
        """Returns the part of initial_state() that a policy takes."""
        return core_state[name]

    def act(self, step, core_state, greedy=False):
        acts = {
            name: functools.partial(agent.act, greedy=greedy)
            for name, agent in self.agents.items()
        }
        return self.act_by(acts, torch.device("cpu"), step, core_state)

    def act_in_test(self, step, core_state):
        acts = {name: agent.act_in_test for name, agent in self.agents.items()}
        return self.act_by(acts, torch.device("cpu"), step, core_state)

    @torch.inference_mode()
    def act_by(self, acts, device, step, core_state):
        """As act(), of batches in host memory, by functions {policy: its act()} that
        take those in page-locked memory where the device is a GPU."""
        all_outputs = {}
        core_state = map_structure(torch.clone, core_state)
        # (Numbers that a server makes up do no harm.)
        numbers = step["policy"][0].clamp(max=len(self.agents) - 1)
        for number, (name, act) in enumerate(acts.items()):
            rows = (numbers == number).nonzero()[:, 0]
            has_rows = len(rows) > 0
            if not has_rows and (self._choices is None or name in self._like):
                continue
            if not has_rows:  # Only to see what its outputs are like.
                rows = rows.new_zeros(1)
            # First what it sees, as what is indexed is not in page-locked memory.
            nests = self._own(name, step), self.state_of(name, core_state)
            own, state = map_structure(
                lambda x, i=rows: devices.select(x, i, device), nests
            )
            outputs, after = act(own, state)
            self._like[name] = map_structure(lambda x: x[:, :0], outputs)
            if has_rows:
                all_outputs[name] = rows, outputs
                _put(after, self.state_of(name, core_state), rows)
        return self._merge(all_outputs, len(numbers)), core_state

    def _merge(self, outputs, size):
        """Returns the outputs {policy: (its rows, its act()'s outputs)} as those of all
        rows. Where spaces differ, actions are {policy: its own}, and so is the rest."""

        def whole(name, like):
            rows, found = outputs.get(name, (None, None))
            x = map_structure(lambda x: x.new_zeros(1, size, *x.shape[2:]), like)
            return x if rows is None else _put(found, x, rows)

        if self._choices is not None:
            merged = {name: whole(name, self._like[name]) for name in self._choices}
            actions = {name: x.pop("action") for name, x in merged.items()}
            return {"action": actions, OUTPUTS: merged}
        (first, (_, like)), *_ = outputs.items()
        merged = whole(first, like)
        for name, (rows, found) in outputs.items():
            if _kinds(found) != _kinds(like):
                raise BadInput(
                    f"act() of policy {name} returned {_kinds(found)}, expected "
                    f"{_kinds(like)}, as of {first}"
                )
            _put(found, merged, rows)
        return merged

    def _own(self, name, nest):
        """Returns what a policy sees of a step or batch, where spaces differ."""
        if self._choices is None:
            return nest
        own = {k: x for k, x in nest.items() if k != OUTPUTS}
        for key in ("observation", "last_action", "action"):
            if key in own:
                own[key] = own[key][name]
        if "action_mask" in own:
            own["action_mask"] = own["action_mask"][..., self._choices[name]]
            if own["action_mask"].shape[-1] == 0:
                del own["action_mask"]
        return {**own, **nest.get(OUTPUTS, {}).get(name, {})}

    def start_learning(self, device):
        for name, agent in self.agents.items():
            if agent.flags.compile:
                agent.net.compile()
            with _naming(name):
                agent.start_learning(device)

    def learn(self, batch):
        """Learns from a batch [T + 1, B, ...], or from {policy: its own}. Returns
        statistics as policy/name."""
        batches = self.split(batch) if torch.is_tensor(batch.get("policy")) else batch
        statistics = {}
        for policy, agent in self.agents.items():
            if policy in batches and policy not in self.frozen:
                for name, x in agent.learn(batches[policy]).items():
                    statistics[f"{policy}/{name}"] = x
            else:
                agent.skip(policy in self.frozen)
        return statistics

    def split(self, batch):
        """Returns {policy: the rollouts of a batch in which it acts}, of the policies
        that learn. Steps at which others act are `done` there, as those of agents that
        have left: no step that leads to one is learned from."""
        batches = {}
        for number, name in enumerate(self.agents):
            if name in self.frozen:
                continue
            mine = batch["policy"] == number  # [T + 1, B]
            rows = mine.any(0).nonzero()[:, 0]
            if len(rows) == 0:
                continue
            own = {k: x for k, x in batch.items() if k not in ("policy", "core_state")}
            own["core_state"] = self.state_of(name, batch["core_state"])
            own = map_structure(lambda x, rows=rows: x.index_select(1, rows), own)
            own, mine = self._own(name, own), mine[:, rows]
            own["done"] = own["done"] | ~mine
            for key in ("reward", "terminated", "truncated"):
                own[key] = own[key] * mine
            batches[name] = own
        return batches

    def ended_episodes(self, batch, unroll_length):
        """Returns what is logged of the episodes that ended in a batch, as
        rollouts.ended_episodes() does, and what counted() adds of each policy."""
        totals = {}
        for number, name in enumerate(self.agents):
            mine = batch["policy"] == number
            ends = ("terminated", "truncated", "episode_end")
            own = {**batch, **{key: batch[key] & mine for key in ends}}
            episodes = rollouts.ended_episodes(own, unroll_length)
            for key, x in self.counted(name, episodes).items():
                totals[key] = totals.get(key, 0) + x
        return totals

    def counted(self, policy, episodes):
        """Returns what of a policy's episodes is logged."""
        return {**episodes, f"episode/{policy}_return": episodes["episode_return"]}

    def state_dict(self):
        return {name: agent.state_dict() for name, agent in self.agents.items()}

    def load_state_dict(self, state):
        for name, agent in self.agents.items():
            agent.load_state_dict(state[name])


class Policies(Several):
    """The agents of an environment's policies, each with flags of its own, such as
    --tagger.learning_rate."""

    def __init__(self, flags, env):
        for name in (*flags.policy_flags, *flags.freeze):
            check_policy(env, name)
        sizes, num = policy_sizes(env), num_agents(env)
        make = load_agent(flags.agent).Agent
        agents, chosen = {}, {}
        for name in env.policies:
            with _naming(name):
                own = self._flags(flags, name, sizes[name] / num)
                agents[name] = make(own, *_spaces(env, name))
            chosen |= {f"{name}.{k}": x for k, x in own.chosen.items()}
        flags.chosen = {**vars(flags).get("chosen", {}), **chosen}
        super().__init__(flags, env, agents, flags.freeze)

    def _flags(self, flags, name, share):
        """Returns the flags of one policy, which has a share of the agents."""
        program = getattr(flags, "command", ["torchbeast"])[0]
        p = Parser(
            prog=f"{program}: policy {name}", parents=[agent_parser(flags.agent)]
        )
        p.set_defaults(**vars(flags))
        words = flags.policy_flags.get(name, [])
        own, unknown = p.parse_known_args(words)
        if unknown:
            raise BadInput(f"{unknown[0]}: expected a flag of --agent {flags.agent}")
        own.batch_size = max(1, round(flags.batch_size * share))
        share = own.batch_size / flags.batch_size  # Rounded: its steps are so many.
        own.total_steps = max(1, round(flags.total_steps * share))
        own.chosen = {}
        return own


class SelfPlay(Several):
    """An agent that learns, and past policies of its own, against which it plays."""

    def __init__(self, flags, env):
        steps = flags.unroll_length * flags.batch_size
        if flags.opponent_interval < steps:
            raise BadInput(
                f"--opponent_interval {flags.opponent_interval}: expected at least the "
                f"{steps} steps of an update"
            )
        past = [f"past{i}" for i in range(1, env.opponents + 1)]
        make, spaces = load_agent(flags.agent).Agent, _spaces(env)
        agents = {name: make(flags, *spaces) for name in (LEARNER, *past)}
        super().__init__(flags, env, agents, past)
        self.learner, self._past = agents[LEARNER], [agents[name] for name in past]
        for agent in self._past:
            agent.net.requires_grad_(False)
            agent.net.load_state_dict(self.learner.net.state_dict())

    def initial_state(self, batch_size):
        return self.learner.initial_state(batch_size)

    def state_of(self, name, core_state):
        return core_state  # A row has that of the policy that acts.

    def start_learning(self, device):
        """Past policies only act: they need no optimizer and no target networks."""
        if self.flags.compile:
            self.learner.net.compile()
        self.learner.start_learning(device)

    def learn(self, batch):
        """Learns from the learner's steps. Each --opponent_interval steps it takes the
        place of its oldest past policy."""
        before = self._num_snapshots()
        statistics = super().learn(batch)
        if (num := self._num_snapshots()) > before:
            oldest = self._past[num % len(self._past)]
            oldest.net.load_state_dict(self.learner.net.state_dict())
        return {name.partition("/")[2]: x for name, x in statistics.items()}

    def state_dict(self):
        past = {
            name: {"model": self.agents[name].net.state_dict()} for name in self.frozen
        }
        return {LEARNER: self.learner.state_dict(), **past}

    def _num_snapshots(self):
        return self.learner.step // self.flags.opponent_interval

    def counted(self, policy, episodes):
        if policy == LEARNER:
            return episodes
        return {"episode/opponent_return": episodes["episode_return"]}


def _spaces(env, policy=None):
    """Returns the spaces of observations and actions, or those of one policy."""
    both = env.observation_space, env.action_space
    if getattr(env, "of_policies", False):
        return tuple(space[policy] for space in both)
    return both


def _kinds(nest):
    """Returns [(path, dtype, shape of a row)] of a nest of tensors [1, B, ...]."""
    return [(path, x.dtype, tuple(x.shape[2:])) for path, x in leaves(nest)]


def _put(nest, into, rows):
    """Writes a nest's tensors [1, n, ...] into the n rows of others [1, B, ...], and
    returns these."""
    return map_structure(lambda x, y: y.index_copy_(1, rows, x), nest, into)


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
    return sum(policy_sizes(env).values())


def policy_sizes(env):
    """Returns {policy: the number of its agents in one environment}."""
    return {
        name: part.stop - (part.start or 0) if isinstance(part, slice) else len(part)
        for name, part in env.policies.items()
    }
