"""What SAC (sac.py) and TD3 (td3.py) share: an actor and critics that learn from replay
to choose numbers in the bounds of their Box.

B is the number of samples of a batch.
"""

import math

import torch
from torch import nn

from torchbeast import agents, distributions, ranks, replay
from torchbeast.encoders import mlp, to_channels_last
from torchbeast.flags import by_environment, number
from torchbeast.gradients import means, set_gradients
from torchbeast.images import has_images
from torchbeast.messages import BadInput
from torchbeast.nests import map_structure
from torchbeast.spaces import Actions

MAX_BATCHES = 8  # That are drawn at once.

# For MuJoCo; the rates are CleanRL's.
MUJOCO = dict(
    normalize_observations=False, replay_size=1_000_000,
    num_actors=0, envs_per_actor=1, num_servers=1,
    envs_per_server=1, batch_size=1, unroll_length=8,
    learning_rate=3e-4, critic_learning_rate=1e-3, target_rate=0.005,
)  # fmt: skip


def add_network_flags(group):
    agents.add_network_flags(group, "shallow")
    # fmt: off
    group.add_argument("--critic_hidden_sizes", nargs="+", type=number(int, 1, 2**16),
                       metavar="N", help="layers of the critics "
                       "(default: --hidden_sizes)")
    # fmt: on


def add_loss_flags(group, policy_delay):
    """Adds the flags of the losses. policy_delay: the default."""
    agents.add_reward_flags(group, "none")
    # fmt: off
    group.add_argument("--policy_delay", type=number(int, 1), default=policy_delay,
                       metavar="N", help="gradient steps of the critics for each step "
                       "of the actor and of all target networks "
                       "(default: %(default)s)")
    group.add_argument("--target_rate", type=number(float, 0, 1), default=0.01,
                       metavar="TAU", help="part of the way to the learned networks "
                       "that target networks go in a step (default: %(default)s)")
    # fmt: on


def add_learning_flags(p):
    """Adds the flags of replay and optimizer to a parser, and defaults of others."""
    g = p.add_argument_group("replay")
    start = "10000, at most a tenth of --total_steps"
    replay.add_flags(g, size=None, ratio=256.0, start=start, batch=256)
    by_environment(p, "replay_size")

    g = p.add_argument_group("optimizer (Adam)")
    # fmt: off
    # RL Zoo's of SAC on LunarLanderContinuous (rl-baselines3-zoo, sac.yml), where they
    # fall linearly. (That did not pay: docs/notebook.md, SAC's learning rates.)
    g.add_argument("--learning_rate", type=number(float, above=0), default=7.3e-4,
                   metavar="X", help="actor's learning rate (default: %(default)s)")
    g.add_argument("--critic_learning_rate", type=number(float, above=0),
                   default=7.3e-4, metavar="X",
                   help="learning rate of all else (default: %(default)s)")
    g.add_argument("--beta1", type=number(float, 0, 0.9999), default=0.9, metavar="X",
                   help="decay of the mean of gradients, of actor and critics "
                   "(default: %(default)s)")
    # fmt: on
    # Short rollouts: the agent learns from each step, and should act on it soon.
    p.set_defaults(batch_size=4, unroll_length=2, envs_per_actor=4, envs_per_server=4)
    p.set_defaults(hidden_sizes=[256, 256], total_steps=1_000_000)


class Critic(nn.Module):
    """Maps observations [N, ...] and features [N, F] of actions to values [N]."""

    def __init__(self, encoder, hidden_sizes, num_features):
        super().__init__()
        self.encoder = encoder
        self.layers = mlp(encoder.out_features + num_features, *hidden_sizes, 1)

    def forward(self, observation, action):
        x = torch.cat([self.encoder(observation), action], dim=1)
        return self.layers(x).squeeze(1)


class ReplayAgent(agents.Agent):
    """Learns an actor and critics from samples of what it has seen.

    A subclass has make_actor(encoder, hidden sizes, distribution), explore(params),
    which chooses x while training, and two losses of transitions [2, B, ...] of a
    batch, or of a part of it: critic_loss(batch) and actor_loss(batch). They return
    (loss [], {name: what is logged}); both are means over the whole batch.
    """

    counters = *agents.Agent.counters, "gradient_steps"
    num_critics = 2
    numbers_net = "flat"  # The layers are the actor's and the critics' own.

    def __init__(self, flags, observation_space, action_space):
        if any(x.num_choices is not None for x in Actions(action_space, 1).leaves):
            raise BadInput(
                f"--agent {flags.agent} needs an action space of Boxes, the "
                f"environment has {action_space}: use --agent polybeast or ppo"
            )
        super().__init__(flags, observation_space, action_space)
        self.net.uniform.fill_(flags.replay_start > 0)

    def defaults(self, observation_space, action_space):
        flags, size = self.flags, 100_000
        if not has_images(observation_space):  # A million of these take much memory.
            num_steps = math.ceil(flags.total_steps / ranks.current.num)
            size = max(size, min(num_steps, 1_000_000))
        # Fewer random actions may show too little to learn from, as how to land.
        start = min(10_000, flags.total_steps // 10, flags.replay_size or size)
        return {"replay_size": size, "replay_start": start}

    def make_distribution(self, action_space):
        return distributions.make(action_space, squashed=True)

    def make_net(self, observation_space, action_space):
        encoder, sizes = self.make_encoder(observation_space), self.flags.hidden_sizes
        return self.make_actor(encoder, sizes, self.distribution)

    def initial_state(self, batch_size):
        return ()

    @torch.inference_mode()
    def act(self, step, core_state, greedy=False):
        params = self.net(map_structure(lambda x: x[0], step["observation"]))
        if greedy:
            x = self.distribution.mode(params)
        else:
            x, uniform = self.explore(params), self.net.uniform
            first = self.distribution.uniform(params)  # The first steps' actions.
            x = map_structure(lambda a, b: torch.where(uniform, a, b), first, x)
        action = self.distribution.to_action(x)
        return {"action": map_structure(lambda x: x[None], action)}, core_state

    # Learning.

    def start_learning(self, device):
        flags = self.flags
        self.critics = self.learned["critics"] = self.make_critics(device)
        self.targets = []  # (target network, the one that it follows).
        self.make_targets(device)
        self.replay, self.credit = replay.make(flags, flags.unroll_length, 2, device)
        super().start_learning(device)

    def make_critics(self, device):
        sizes = self.flags.critic_hidden_sizes or self.flags.hidden_sizes
        num_features = self.distribution.num_features
        critics = nn.ModuleList(
            Critic(self.make_encoder(self.observation_space), sizes, num_features)
            for _ in range(self.num_critics)
        )
        for critic in critics:
            self.normalized(critic)
        return to_channels_last(critics, device)

    def make_targets(self, device):
        target = self.make_critics(device)
        self.target_critics = self.add_target("target_critics", target, self.critics)

    def add_target(self, name, target, module):
        """Makes a network the target network of a module. Returns it."""
        target.load_state_dict(module.state_dict())
        self.learned[name] = target
        self.targets.append((target, module))
        return target.requires_grad_(False)

    def make_optimizer(self):
        flags = self.flags
        rates = (
            (self.net, flags.learning_rate),
            (self.critics, flags.critic_learning_rate),
        )
        groups = [{"params": list(x.parameters()), "lr": lr} for x, lr in rates]
        return torch.optim.Adam(groups, betas=(flags.beta1, 0.999), fused=True)

    def learn(self, batch):
        """Takes a batch [T + 1, B, ...] into the replay and makes the gradient steps
        that are due. Returns the means of what is logged."""
        flags = self.flags
        items = self.replay.add(agents.what_is_replayed(batch))  # [T, B]
        self.replay.set_priorities(items, ~batch["done"][1:].cpu())  # All the same.
        T = flags.unroll_length
        updates = self.credit.updates(batch, T, flags.replay_batch_size)
        steps = [self.gradient_step(*sample) for sample in self.samples(updates)]
        self.count(batch)
        self.net.uniform.fill_(flags.replay_start > 0 and self.gradient_steps == 0)
        size, ratio = self.replay.size * T, self.credit.measured
        return {**means(steps), "replay_size": size, "replay_ratio": ratio}

    def samples(self, updates):
        """Yields (batch, its samples' numbers) for each update. Unless they are images,
        those of several updates are drawn, and sent to a GPU, at once."""
        size, left = self.flags.replay_batch_size, []
        num = size // ranks.current.num
        most = 1 if has_images(self.observation_space) else MAX_BATCHES
        for _ in updates:
            if not left:
                k = min(1 + self.credit.num_due(size), most)
                batch, items = self.replay.sample(num, batches=k)
                # Each of the strides of a batch alone, as a graph's inputs.
                parts = map_structure(
                    lambda x: x.unflatten(1, (-1, num)).transpose(0, 1).contiguous(),
                    batch,
                )
                for i in range(k):
                    of_one = map_structure(lambda x, i=i: x[i], parts)
                    left.append((of_one, items[i * num : (i + 1) * num]))
            yield left.pop()

    def gradient_step(self, batch, items):
        self.gradient_steps += 1
        actor_learns = self.gradient_steps % self.flags.policy_delay == 0
        statistics = self.graphs.of(self.learn_from, batch)(actor_learns)
        age = self.replay.age(items) * self.flags.unroll_length
        return {**statistics, "replay_age": age}

    def learn_from(self, batch, actor_learns):
        """Has the critics learn from samples [2, B, ...], and, after --policy_delay of
        such steps, the actor, which all target networks wait for."""
        statistics = self.update(self.critics.parameters(), self.critic_loss, batch)
        if actor_learns:
            # The actor's loss is not theirs.
            self.critics.requires_grad_(False).eval()
            statistics |= self.update(self.actor_parameters(), self.actor_loss, batch)
            self.critics.requires_grad_(True).train()
            for target, module in self.targets:
                self.follow(target, module)
        return statistics

    def actor_parameters(self):
        """Returns what learns by actor_loss()."""
        return self.net.parameters()

    def update(self, parameters, loss, batch):
        """Makes a gradient step of these parameters alone. Returns the loss's
        statistics."""
        parameters = list(parameters)
        statistics = set_gradients(parameters, loss, batch)
        self.optimizer.step()
        for parameter in parameters:  # The optimizer skips those without a gradient.
            parameter.grad = None
        return statistics

    def follow(self, target, module):
        """Moves a target network by --target_rate towards its network."""
        update = torch.optim.swa_utils.get_ema_multi_avg_fn(1 - self.flags.target_rate)
        update(list(target.parameters()), list(module.parameters()), None)

    def values(self, critics, observation, action):
        return torch.stack([critic(observation, action) for critic in critics])

    def targets_of(self, batch, value):
        """Returns the critics' targets [B]: rewards and the value [B] of what
        follows."""
        discount = self.flags.discounting * ~batch["terminated"][1]
        return self.rewards(batch)[0] + discount * value
