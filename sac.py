"""SAC (Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", arXiv
1812.05905): continuous actions, learned from replay.

    python -m monobeast --agent sac --env Pendulum-v1
    python -m monobeast --agent sac --preset mujoco --env HalfCheetah-v5
    python -m monobeast --agent sac --preset crossq --env HalfCheetah-v5

Read it top to bottom: flags, Actor, Agent. What they do not define is in
torchbeast/actor_critic.py, which td3.py reads, too, and in torchbeast/agents.py.

The actor chooses actions in the bounds of their Box. Two critics learn their values;
the smaller of both is believed. The weight of entropy is learned, so that the policy's
stays at its target. Entropies are those of numbers in units of their bounds.

With BatchRenorm between their layers, critics need no target networks: CrossQ (Bhatt et
al., arXiv 1902.05605).

B is the number of samples of a batch, P that of a distribution's parameters.
"""

import argparse

import torch
from torch import nn

from torchbeast import actor_critic
from torchbeast.actor_critic import MUJOCO, ReplayAgent
from torchbeast.batch_renorm import add_batch_renorm, average_over_ranks
from torchbeast.distributions import PolicyHead
from torchbeast.encoders import mlp
from torchbeast.flags import number
from torchbeast.nests import map_structure

LOG_STD = -5, 2  # Bounds.

PRESETS = {
    # CleanRL's constants (docs.cleanrl.dev/rl-algorithms/sac).
    "mujoco": {**MUJOCO, "replay_start": 5000},
    # The authors' constants (adityab/CrossQ), with sb3-contrib's narrower critics.
    "crossq": {
        **MUJOCO, "replay_start": 5000, "batch_renorm": True, "policy_delay": 3,
        "learning_rate": 1e-3, "critic_learning_rate": 1e-3, "beta1": 0.5,
    },
}  # fmt: skip


def parser():
    """Returns the agent's flags, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("network")
    actor_critic.add_network_flags(g)
    g.add_argument("--batch_renorm", action=argparse.BooleanOptionalAction,
                   default=False, help="normalise what layers read by BatchRenorm, and "
                   "have no target networks (CrossQ)")

    g = p.add_argument_group("loss")
    actor_critic.add_loss_flags(g, policy_delay=1)
    g.add_argument("--target_entropy", type=number(float), metavar="X",
                   help="entropy of the policy, of numbers from -1 to 1 (default: -1 "
                   "for each number of an action)")
    # fmt: on
    actor_critic.add_learning_flags(p)
    return p


class Actor(nn.Module):
    """Maps observations [N, ...] to the parameters [N, P] of a distribution."""

    def __init__(self, encoder, hidden_sizes, distribution):
        super().__init__()
        self.encoder = encoder
        self.distribution = distribution
        self.layers = mlp(encoder.out_features, *hidden_sizes).append(nn.ReLU())
        size = hidden_sizes[-1]
        self.policy = PolicyHead(size, distribution, state_dependent_std=True)
        self.register_buffer("log_stds", distribution.log_stds, persistent=False)
        # Whether to act uniformly at random. Actors get this buffer with the weights.
        self.register_buffer("uniform", torch.tensor(True))

    def forward(self, observation):
        params = self.policy(self.layers(self.encoder(observation)))
        low, high = LOG_STD
        log_std = low + (high - low) * (params.tanh() + 1) / 2
        return torch.where(self.log_stds, log_std, params)


class Agent(ReplayAgent):
    """Learns an actor and two critics, in learn(), from samples of what it has seen."""

    make_actor = Actor

    def normalized(self, net):
        if self.flags.batch_renorm:
            net.layers = add_batch_renorm(net.layers)
        return super().normalized(net)

    def explore(self, params):
        return self.distribution.sample(params)

    # Learning.

    def start_learning(self, device):
        # The logarithm of entropy's weight, which is learned.
        self.log_alpha = torch.zeros((), device=device, requires_grad=True)
        self.target_entropy = self.flags.target_entropy
        if self.target_entropy is None:
            self.target_entropy = -self.distribution.num_features
        super().start_learning(device)

    def make_targets(self, device):
        if not self.flags.batch_renorm:
            super().make_targets(device)

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        rate = self.flags.critic_learning_rate
        optimizer.add_param_group(
            {"params": [self.log_alpha], "lr": rate, "betas": (0.9, 0.999)}
        )
        return optimizer

    def actor_parameters(self):
        return *self.net.parameters(), self.log_alpha

    def learn_from(self, batch, actor_learns):
        statistics = super().learn_from(batch, actor_learns)
        if self.flags.batch_renorm:
            average_over_ranks(self.net, self.critics)
        return statistics

    def critic_loss(self, batch):
        scale, weight = 1 / self.flags.replay_batch_size, self.log_alpha.detach().exp()
        both, taken = batch["observation"], self.distribution.features(batch["action"])
        now, following = (map_structure(lambda x, i=i: x[i], both) for i in (0, 1))
        with torch.no_grad():
            self.net.eval()
            action, log_prob = self.sample_action(following)
            self.net.train()
        if self.flags.batch_renorm:
            # One pass, so that BatchRenorm normalises both by their joint statistics.
            both = map_structure(lambda x: x.flatten(0, 1), both)
            q = self.values(self.critics, both, torch.cat([taken[0], action]))
            q, value = q.chunk(2, dim=1)
        else:
            q = self.values(self.critics, now, taken[0])  # [2, B]
            value = self.values(self.target_critics, following, action)
        value = value.detach().min(0).values - weight * log_prob
        loss = scale * (q - self.targets_of(batch, value)).square().sum()
        return loss, {"critic_loss": loss, "q": scale * q.mean(0).sum()}

    def actor_loss(self, batch):
        """The sum of the actor's loss and of that of the weight of entropy."""
        now = map_structure(lambda x: x[0], batch["observation"])
        scale, weight = 1 / self.flags.replay_batch_size, self.log_alpha.detach().exp()
        action, log_prob = self.sample_action(now)
        value = self.values(self.critics, now, action).min(0).values
        loss = scale * (weight * log_prob - value).sum()
        gap = scale * (-log_prob.detach() - self.target_entropy).sum()
        return loss + self.log_alpha * gap, {
            "actor_loss": loss,
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


if __name__ == "__main__":
    raise SystemExit("an agent, not a program: python -m monobeast --agent sac")
