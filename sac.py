"""SAC (Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", arXiv
1812.05905): continuous actions, learned from replay.

    python -m monobeast --agent sac --env Pendulum-v1
    python -m monobeast --agent sac --preset mujoco --env HalfCheetah-v5

Read it top to bottom: flags, Actor, Critic, ReplayAgent, which td3.py has, too, Agent.
What they do not define is in torchbeast/agents.py.

The actor chooses actions in the bounds of their Box. Two critics learn their values;
the smaller of both is believed. Entropy is worth as much as keeps that of the policy at
its target. Entropies are those of numbers in units of their bounds.

B is the number of samples of a batch, P that of a distribution's parameters.
"""

import argparse

import torch
from gymnasium import spaces
from torch import nn

from torchbeast import agents, distributions, ranks, replay
from torchbeast.distributions import PolicyHead
from torchbeast.encoders import mlp
from torchbeast.flags import number
from torchbeast.gradients import means, set_gradients
from torchbeast.messages import BadInput
from torchbeast.nests import map_structure
from torchbeast.spaces import children

LOG_STD = -5, 2  # Bounds.

# CleanRL's constants (docs.cleanrl.dev/rl-algorithms/sac).
PRESETS = {
    "mujoco": dict(
        replay_size=1_000_000, replay_start=5000, total_steps=1_000_000,
        num_actors=0, envs_per_actor=1, num_servers=1, envs_per_server=1,
        batch_size=1, unroll_length=8,
    ),
}  # fmt: skip


def parser():
    """Returns the agent's flags, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("network")
    agents.add_network_flags(g, "shallow")

    g = p.add_argument_group("loss")
    agents.add_reward_flags(g, "none")
    g.add_argument("--target_entropy", type=number(float), metavar="X",
                   help="entropy of the policy, of numbers from -1 to 1 (default: -1 "
                   "for each number of an action)")
    g.add_argument("--target_rate", type=number(float, 0, 1), default=0.005,
                   metavar="TAU", help="part of the way that the target networks go to "
                   "the critics in a gradient step (default: %(default)s)")

    g = p.add_argument_group("replay")
    replay.add_flags(g, size=100_000, ratio=256.0, start=1000, batch=256)

    g = p.add_argument_group("optimizers (Adam)")
    g.add_argument("--learning_rate", type=number(float, above=0), default=3e-4,
                   metavar="X", help="of the actor (default: %(default)s)")
    g.add_argument("--critic_learning_rate", type=number(float, above=0), default=1e-3,
                   metavar="X", help="of critics and the weight of entropy "
                   "(default: %(default)s)")
    # fmt: on
    # A policy is to act soon after it has learned, as it learns from each step.
    p.set_defaults(batch_size=4, unroll_length=2, envs_per_actor=4, envs_per_server=4)
    p.set_defaults(hidden_sizes=[256, 256])
    return p


class Actor(nn.Module):
    """Maps observations [N, ...] to the parameters [N, P] of a distribution."""

    def __init__(self, encoder, hidden_sizes, distribution):
        super().__init__()
        self.encoder = encoder
        self.distribution = distribution
        self.layers = mlp(encoder.out_features, *hidden_sizes)
        size = hidden_sizes[-1]
        self.policy = PolicyHead(size, distribution, state_dependent_std=True)
        self.register_buffer("log_stds", distribution.log_stds, persistent=False)
        # Whether actions are uniform; whoever acts gets it with the weights.
        self.register_buffer("uniform", torch.tensor(True))

    def forward(self, observation):
        params = self.policy(self.layers(self.encoder(observation)).relu())
        low, high = LOG_STD
        log_std = low + (high - low) * (params.tanh() + 1) / 2
        return torch.where(self.log_stds, log_std, params)


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
    """What SAC and TD3 share: an actor, critics and a replay. learn_from() makes a
    gradient step from samples [2, B, ...], explore() chooses x while training."""

    name, num_critics = "sac", 2
    numbers = "flat"  # The layers are the actor's and the critics' own.

    def __init__(self, flags, observation_space, action_space):
        if not is_continuous(action_space):
            raise BadInput(
                f"--agent {self.name} needs an action space of Boxes, the environment "
                f"has {action_space}: use --agent polybeast, ppo, pqn or r2d2"
            )
        super().__init__(flags, observation_space, action_space)
        self.net.uniform.fill_(flags.replay_start > 0)

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
        self.critics, self.target_critics = (self.make_critics(device) for _ in "12")
        self.target_critics.load_state_dict(self.critics.state_dict())
        self.target_critics.requires_grad_(False)
        self.learned.update(critics=self.critics, target_critics=self.target_critics)
        self.replay, self.credit = replay.make(flags, flags.unroll_length, 2, device)
        super().start_learning(device)

    def make_critics(self, device):
        sizes, num_features = self.flags.hidden_sizes, self.distribution.num_features
        critics = nn.ModuleList(
            Critic(self.make_encoder(self.observation_space), sizes, num_features)
            for _ in range(self.num_critics)
        )
        for critic in critics:
            self.normalized(critic)
        return critics.to(device, memory_format=torch.channels_last)

    def learn(self, batch):
        """Takes a batch [T + 1, B, ...] into the replay and makes the gradient steps
        that are due. Returns the means of what is logged."""
        flags = self.flags
        items = self.replay.add(batch)  # [T, B]
        self.replay.set_priorities(items, ~batch["done"][1:].cpu())  # All the same.
        T = flags.unroll_length
        updates = self.credit.updates(batch, T, flags.replay_batch_size)
        steps = [self.gradient_step() for _ in updates]
        self.update_statistics(batch)
        self.count()
        self.net.uniform.fill_(self.step < flags.replay_start)
        size, ratio = self.replay.size * T, self.credit.measured
        return {**means(steps), "replay_size": size, "replay_ratio": ratio}

    def gradient_step(self):
        num = self.flags.replay_batch_size // ranks.current.num
        batch, items = self.replay.sample(num)
        statistics = self.learn_from(batch)
        age = self.replay.age(items) * self.flags.unroll_length
        return {**statistics, "replay_age": age}

    def follow(self, target, module):
        """Moves a target network by --target_rate towards its network."""
        update = torch.optim.swa_utils.get_ema_multi_avg_fn(1 - self.flags.target_rate)
        update(list(target.parameters()), list(module.parameters()), None)

    def values(self, critics, observation, action):
        return torch.stack([critic(observation, action) for critic in critics])

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.optimizer is not None:
            self.credit.say_empty(self.step)


class Agent(ReplayAgent):
    """Learns an actor and two critics, in learn(), from samples of what it has seen."""

    make_actor = Actor

    def explore(self, params):
        return self.distribution.sample(params)

    def start_learning(self, device):
        # For the weight of entropy:
        self.log_alpha = torch.zeros((), device=device, requires_grad=True)
        self.target_entropy = self.flags.target_entropy
        if self.target_entropy is None:
            self.target_entropy = -self.distribution.num_features
        super().start_learning(device)

    def make_optimizer(self):
        flags = self.flags
        critics = [*self.critics.parameters(), self.log_alpha]
        groups = [
            {"params": list(self.net.parameters()), "lr": flags.learning_rate},
            {"params": critics, "lr": flags.critic_learning_rate},
        ]
        return torch.optim.Adam(groups, fused=True)

    def learn_from(self, batch):
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        statistics = set_gradients(parameters, self.loss, batch)
        self.optimizer.step()
        self.follow(self.target_critics, self.critics)
        return statistics

    def loss(self, batch):
        """Returns the loss of transitions [2, B, ...] of a batch, or of a part of it,
        and what is logged of it. Both are means over the whole batch."""
        now, following = (
            map_structure(lambda x, i=i: x[i], batch["observation"]) for i in (0, 1)
        )
        scale, alpha = 1 / self.flags.replay_batch_size, self.log_alpha.exp()
        weight = alpha.detach()
        with torch.no_grad():
            action, log_prob = self.sample_action(following)
            value = self.values(self.target_critics, following, action).min(0).values
            discount = self.flags.discounting * ~batch["terminated"][1]
            target = self.rewards(batch)[0] + discount * (value - weight * log_prob)
        taken = self.distribution.features(batch["action"])[0]
        q = self.values(self.critics, now, taken)  # [2, B]
        critic_loss = scale * (q - target).square().sum()

        action, log_prob = self.sample_action(now)
        self.critics.requires_grad_(False)  # They don't learn what the actor likes.
        value = self.values(self.critics, now, action).min(0).values
        self.critics.requires_grad_(True)
        actor_loss = scale * (weight * log_prob - value).sum()
        gap = scale * (-log_prob.detach() - self.target_entropy).sum()
        total = critic_loss + actor_loss + self.log_alpha * gap
        return total, {
            "critic_loss": critic_loss,
            "actor_loss": actor_loss,
            "q": scale * q.mean(0).sum(),
            "entropy": -scale * log_prob.sum(),
            "alpha": scale * len(log_prob) * weight,
        }

    def sample_action(self, observation):
        """Returns (features [N, F] of actions that the actor samples, their
        log-probabilities [N] in units of bounds), with gradients to the actor."""
        params = self.net(observation)
        x = self.distribution.rsample(params)
        log_prob = self.distribution.log_prob(params, x) + self.distribution.log_units
        return self.distribution.features(self.distribution.to_action(x)), log_prob

    def state_dict(self):
        return {**super().state_dict(), "log_alpha": self.log_alpha.detach()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.optimizer is not None:
            with torch.no_grad():
                self.log_alpha.copy_(state["log_alpha"])


def is_continuous(space):
    parts = children(space)
    if parts:
        return all(is_continuous(part) for _, part in parts)
    return isinstance(space, spaces.Box) and space.dtype.kind == "f"
