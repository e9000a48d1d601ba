"""What all agents share: class Agent, and the flags that it reads.

An agent is a module with parser(), the flags of its network, loss and optimizer, and a
subclass of Agent, which says what the network is, how it acts and what it learns.
"""

import argparse
import math

import torch
from torch import nn

from torchbeast import devices, distributions, encoders, replay_files, rollouts
from torchbeast.checkpoint import load_weights
from torchbeast.flags import fill_in, number
from torchbeast.graphs import Graphs
from torchbeast.messages import BadInput
from torchbeast.normalization import (
    NormalizedEncoder,
    NormalizedRewards,
    has_numbers,
)


def what_networks_read(batch):
    """Returns the entries of a batch that networks read."""
    names = "observation", "reward", "done", "last_action", "action_mask"
    return {name: batch[name] for name in names if name in batch}


def what_is_replayed(batch):
    """Returns a batch without what agents with a replay do not learn from."""
    logged = {*rollouts.EPISODE_FIELDS} - {"terminated"}
    return {name: x for name, x in batch.items() if name not in logged}


def add_network_flags(group, net):
    """Adds the flags of encoders. net: the default for images."""
    # fmt: off
    group.add_argument("--net", default=net, choices=encoders.NETS,
                       help="network for images (default: %(default)s)")
    group.add_argument("--hidden_sizes", nargs="+", type=number(int, 1, 2**16),
                       metavar="N", help="layers for observations that are numbers "
                       "(default: the agent's)")
    group.add_argument("--normalize_observations",
                       action=argparse.BooleanOptionalAction,
                       help="subtract the running mean of observations that are "
                       "numbers, and divide by their standard deviation (default: "
                       "where there are no images, or real numbers beside them; r2d2: "
                       "where real numbers may be large)")
    # fmt: on


def add_reward_flags(group, clipping, normalized=False):
    """Adds the flags of Agent.rewards(), and the discount. clipping: the default.
    normalized: rewards can be, by Agent.unroll()."""
    # fmt: off
    group.add_argument("--discounting", type=number(float, 0, 1), default=0.99,
                       metavar="GAMMA", help="discount of a step "
                       "(default: %(default)s)")
    group.add_argument("--reward_clipping", default=clipping,
                       choices=("abs_one", "none"), help="clip the rewards that are "
                       "learned from, never those that are reported "
                       "(default: %(default)s)")
    if normalized:
        group.add_argument("--normalize_rewards",
                           action=argparse.BooleanOptionalAction, default=False,
                           help="divide rewards by the running standard deviation of "
                           "the discounted return, or by up to ten times as much, so "
                           "that the largest is 10, instead of --reward_clipping")
    # fmt: on
    group.set_defaults(normalize_rewards=False)  # Not all agents have this flag.


def add_actor_critic_flags(group):
    """Adds the costs of an actor-critic's losses, and what rewards it learns from."""
    # fmt: off
    group.add_argument("--entropy_cost", type=number(float, 0), metavar="X",
                       help="weight of the entropy loss")
    group.add_argument("--baseline_cost", type=number(float, 0), default=0.5,
                       metavar="X", help="weight of the value loss "
                       "(default: %(default)s)")
    # fmt: on
    add_reward_flags(group, "abs_one", normalized=True)


def reward_defaults(flags, atari):
    """Returns the part of Agent.defaults() that is about rewards. atari: the
    environment is a game of Atari's."""
    clip = atari and not flags.normalize_rewards
    return {
        "reward_clipping": "abs_one" if clip else "none",
        "normalize_rewards": not atari and flags.reward_clipping is None,
    }


def actor_critic_defaults(flags, action_space, entropy_cost, atari):
    """Returns the part of Agent.defaults() that is about add_actor_critic_flags().
    entropy_cost: for choices. atari: the environment is a game of Atari's."""
    if distributions.make(action_space).log_stds.any():  # There are Gaussians,
        entropy_cost = 0.0  # whose deviations it would widen for ever.
    return {**reward_defaults(flags, atari), "entropy_cost": entropy_cost}


def add_async_flag(group, default):
    """Adds the flag with which a program decides whether acting waits for updates."""
    group.add_argument("--async", action=argparse.BooleanOptionalAction,
                       default=default, help="act on while the learner updates; "
                       "--no-async: wait for each update, so that rollouts are always "
                       "of the policy that learns from them")  # fmt: skip


class Agent:
    """What a program needs of an agent. Everything is time-major: [T, B, ...].

    A subclass defines make_net(), act(), make_optimizer() and learn().

    net           what acts; its weights and buffers are handed to the actors. Every
                  process that acts makes an agent of its own.
    burn_in       K: rollouts begin K steps earlier, for the recurrent state alone.
    optimizer     None, but for the agent that was told to start_learning().
    graphs        of what learn() does: graphs.Graphs. Only the learner's has it.
    step, updates agent steps and batches that were learned from.
    counters      names of these, and of what else a subclass counts, in checkpoints.
    learned       {name: what else is learned, with state_dict() and load_state_dict()},
                  which a checkpoint has, too. start_learning() may add to it.
    normalized_rewards
                  normalization.NormalizedRewards, with --normalize_rewards: core_state
                  then is (the net's, that of the rewards).
    """

    numbers_net = "mlp"  # What observations that are numbers go through.
    credit = None  # When to learn from the replay: replay.Credit, or replay.Mixer.
    acts_in_graphs = True  # Whether act() may be captured, with Python's numbers in it.
    layer_norm = False  # Of the encoder's layers, unless there is a flag of this name.
    max_reward_scale = math.inf  # What --normalize_rewards multiplies them by at most.
    burn_in = 0
    counters = "step", "updates"

    def __init__(self, flags, observation_space, action_space):
        self.flags = flags
        numbers = {"normalize_observations": has_numbers(observation_space)}
        fill_in(flags, numbers | self.defaults(observation_space, action_space))
        devices.choose_precision(flags, observation_space)
        self.observation_space, self.action_space = observation_space, action_space
        self.distribution = self.make_distribution(action_space)
        self.net = self.normalized(self.make_net(observation_space, action_space))
        self.normalized_rewards = None
        if flags.normalize_rewards:
            self.normalized_rewards = NormalizedRewards(
                flags.discounting, self.max_reward_scale
            )
        self.optimizer = None
        for name in self.counters:
            setattr(self, name, 0)
        self.learned = {}

    @staticmethod
    def sizes(flags, observation_space):
        """Returns what else than the program's default {flag: default} --batch_size
        should be, and num_envs, the environments of all actors or servers, for the kind
        of environment: defaults() comes too late for these."""
        return {}

    def defaults(self, observation_space, action_space):
        """Returns {name of a flag: its value where the command line has none}, for the
        flags that parser() names in flags.by_environment()."""
        return {}

    def make_distribution(self, action_space):
        """Returns the distribution of actions (torchbeast/distributions.py)."""
        return distributions.make(action_space)

    def make_encoder(self, observation_space):
        """Returns a module: observations [N, ...] to features [N, out_features]."""
        flags, bfloat16 = self.flags, self.flags.precision == "bfloat16"
        return encoders.make_encoder(
            observation_space,
            flags.net,
            bfloat16,
            self.numbers_net,
            flags.hidden_sizes,
            vars(flags).get("layer_norm", self.layer_norm),
        )

    def make_encoders(self, observation_space):
        """Returns two of make_encoder()'s modules as one, for policy and value. Where
        they share one, the gradients of the value may drown the policy's."""
        if self.flags.use_lstm:
            raise BadInput("--separate_value (or a checkpoint's): not with --use_lstm")
        policy = self.make_encoder(observation_space)
        return encoders.TwoEncoders(policy, self.make_encoder(observation_space))

    def make_net(self, observation_space, action_space):
        """Returns the module that acts. Its `encoder` is what observations that are
        normalised go to."""
        raise NotImplementedError

    def normalized(self, net):
        """Returns the network with its `encoder` replaced, where observations are
        normalised. An agent's further networks share the statistics of `net`. Raises
        BadInput if the network has no encoder and --normalize_observations was given.
        """
        flags = self.flags
        if flags.normalize_observations and not hasattr(net, "encoder"):
            if "normalize_observations" not in getattr(flags, "chosen", {}):
                raise BadInput(
                    f"--normalize_observations: the network of --agent {flags.agent} "
                    "has no `encoder`, which would get them"
                )
            flags.normalize_observations = False
            flags.chosen["normalize_observations"] = False
        if flags.normalize_observations:
            before = getattr(self, "net", None)
            statistics = None if before is None else before.encoder.statistics
            space = self.observation_space
            net.encoder = NormalizedEncoder(space, net.encoder, statistics)
        return net

    def initial_state(self, batch_size):
        """Returns the core_state before a first step: a nest of tensors [., B, ...]."""
        core_state = self.net.initial_state(batch_size)
        if self.normalized_rewards is not None:
            return core_state, self.normalized_rewards.initial_state(batch_size)
        return core_state

    def act(self, step, core_state, greedy=False):
        """Chooses an action for each step [1, B, ...].

        Returns (outputs, core_state). outputs["action"] [1, B, ...] goes to the
        environment; all outputs are in the batches that learn() gets.
        """
        raise NotImplementedError

    def act_in_test(self, step, core_state):
        """As act(), where the agent is judged: in --mode test and for eval_return."""
        return self.act(step, core_state)

    def state_of_net(self, core_state):
        """Returns the net's part of what initial_state() is like."""
        return core_state if self.normalized_rewards is None else core_state[0]

    def unroll(self, step, core_state):
        """Calls the net for steps [T, B, ...]. Returns (its outputs, core_state)."""
        if self.normalized_rewards is None:
            return self.net(step, core_state)
        core_state, discounted_return = core_state
        outputs, core_state = self.net(step, core_state)
        returns = self.normalized_rewards.returns(step, discounted_return)
        return outputs, (core_state, returns[-1:])

    def start_learning(self, device):
        """Makes what only the learner has. The net is on the device already."""
        self.optimizer = self.make_optimizer()
        self.graphs = Graphs(self.flags, device, self.optimizer)
        if self.normalized_rewards is not None:
            self.learned["normalized_rewards"] = self.normalized_rewards.to(device)

    def make_optimizer(self):
        raise NotImplementedError

    def learn(self, batch):
        """Learns from one batch [K + T + 1, B, ...], and calls self.count(batch).
        Returns what is logged: {name: tensor [] or number}; the first one is shown."""
        raise NotImplementedError

    def count(self, batch):
        """Counts a batch [K + T + 1, B, ...] that was learned from, and takes it into
        the statistics that observations and rewards are normalised by."""
        self.update_statistics(batch)
        self.step += self.flags.unroll_length * self.flags.batch_size
        self.updates += 1

    def skip(self, frozen):
        """Counts a batch that had nothing for this one of several policies to learn
        from, or that it must not learn from: schedules go on."""
        self.step += self.flags.unroll_length * self.flags.batch_size

    def fraction_left(self):
        """The part of --total_steps that is still to come, for schedules."""
        return max(0, 1 - self.step / self.flags.total_steps)

    def set_learning_rate(self, learning_rate):
        for group in self.optimizer.param_groups:
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def clip_and_step(self, statistics):
        """Clips the net's gradients, by --grad_norm_clipping, and lets the optimizer
        make a step. Returns the statistics and the gradients' norm."""
        largest = self.flags.grad_norm_clipping
        norm = nn.utils.clip_grad_norm_(list(self.net.parameters()), largest)
        self.optimizer.step()
        return {**statistics, "grad_norm": norm}

    def rewards(self, batch):
        """Returns the rewards [T, B] that are learned from. Index t is of the action
        taken on step t."""
        rewards = batch["reward"][1:]
        if self.normalized_rewards is not None:
            return self.normalized_rewards(rewards)
        if self.flags.reward_clipping == "abs_one":
            rewards = rewards.clamp(-1, 1)
        return rewards

    def update_statistics(self, batch):
        """Takes a batch into the statistics, once: count() calls it."""
        names = "reward", "done", "mask"
        read = {name: batch[name] for name in names if name in batch}
        encoder = getattr(self.net, "encoder", None)
        if isinstance(encoder, NormalizedEncoder):
            read["numbers"] = encoder.numbers(batch["observation"])
        if self.normalized_rewards is not None:
            read["returns"] = batch["core_state"][1]
        if read.get("numbers") or "returns" in read:
            self.graphs.of(self._take_in, read)()

    def _take_in(self, batch):
        if "numbers" in batch:
            counted = rollouts.new(batch, self.burn_in)
            self.net.encoder.take_in(batch["numbers"], counted)
        if "returns" in batch:
            self.normalized_rewards.update(batch, batch["returns"])
        return {}

    def state_dict(self):
        """Returns all that a checkpoint needs, in types that torch.load(weights_only)
        reads."""
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name) for name in self.counters},
            **{name: x.state_dict() for name, x in self.learned.items()},
        }

    def load_state_dict(self, state):
        """Takes the net's weights, and the rest if it learns. Raises KeyError if
        something is missing."""
        load_weights(self.net, state["model"])
        if self.optimizer is None:
            return
        load_optimizer(self.optimizer, state["optimizer"])
        if (rewards := self.normalized_rewards) is not None:  # Older runs have no such.
            state.get("normalized_rewards", {}).setdefault("largest", rewards.largest)
        for name, x in self.learned.items():
            load = load_weights if isinstance(x, nn.Module) else type(x).load_state_dict
            load(x, state[name])
        for name in self.counters:
            setattr(self, name, state[name])
        if self.credit is not None and self.updates > 0:  # The run is resumed.
            replay_files.resume(self.credit, self.flags)


def load_optimizer(optimizer, state):
    """Loads an optimizer's state, but not its options: this command's flags count, not
    those that the checkpoint was made with."""
    options = [
        {name: x for name, x in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    groups = zip(state["param_groups"], options, strict=True)
    groups = [{**saved, **own} for saved, own in groups]
    optimizer.load_state_dict({**state, "param_groups": groups})
    if optimizer.defaults.get("momentum", 0) > 0:
        for parameter, state_of in optimizer.state.items():  # It may be new.
            state_of.setdefault("momentum_buffer", torch.zeros_like(parameter))
