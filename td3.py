"""TD3 (Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic
Methods", arXiv 1802.09477): continuous actions, learned from replay by a
deterministic actor.

    python -m monobeast --agent td3 --env Pendulum-v1
    python -m monobeast --agent td3 --preset mujoco --env HalfCheetah-v5
    python -m monobeast --agent td3 --preset ddpg --env HalfCheetah-v5

Read it top to bottom: flags, Actor, Agent. What it does not define is in
torchbeast/actor_critic.py, shared with SAC, and torchbeast/agents.py.

The target is the smaller of two target critics' values of the target actor's action
plus noise. The actor learns at every second update of the critics. With one critic, no
noise in the targets and an actor that learns each time it is DDPG
(Lillicrap et al., arXiv 1509.02971).

B is the number of samples in a batch, D of numbers in an action, P of parameters of a
distribution. Actions and noise are in units of the actions' bounds.
"""

import argparse

import torch
from torch import nn

from torchbeast import actor_critic
from torchbeast.actor_critic import ReplayAgent
from torchbeast.encoders import mlp, to_channels_last
from torchbeast.flags import number
from torchbeast.nests import map_structure

LARGEST = 0.999999  # The largest squashed action, so that its atanh() is finite.

# The authors' constants (sfujim/TD3), which are CleanRL's.
MUJOCO = {
    **actor_critic.MUJOCO, "replay_start": 25_000, "critic_learning_rate": 3e-4
}  # fmt: skip
PRESETS = {
    "mujoco": MUJOCO,
    "ddpg": {**MUJOCO, "num_critics": 1, "target_noise": 0.0, "policy_delay": 1},
}


def parser():
    """Returns the agent's flags, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("network")
    actor_critic.add_network_flags(g)
    g.add_argument("--num_critics", type=number(int, 1, 100), default=2, metavar="N",
                   help="critics, of which the smallest value is believed "
                   "(default: %(default)s)")

    g = p.add_argument_group("exploration")
    g.add_argument("--exploration_noise", type=number(float, 0), default=0.1,
                   metavar="X", help="standard deviation of the noise added to actions "
                   "(default: %(default)s)")

    g = p.add_argument_group("loss")
    actor_critic.add_loss_flags(g, policy_delay=2)
    g.add_argument("--target_noise", type=number(float, 0), default=0.2, metavar="X",
                   help="standard deviation of the noise added to actions in targets "
                   "(default: %(default)s)")
    g.add_argument("--target_noise_clipping", type=number(float, 0), default=0.5,
                   metavar="X", help="largest noise in targets (default: %(default)s)")
    # fmt: on
    actor_critic.add_learning_flags(p)
    return p


class Actor(nn.Module):
    """Maps observations [N, ...] to the parameters [N, P] of a distribution, of which
    only the means count. features() maps observations to actions [N, D]."""

    def __init__(self, encoder, hidden_sizes, distribution):
        super().__init__()
        self.encoder = encoder
        self.distribution = distribution
        D = distribution.num_features
        self.layers = mlp(encoder.out_features, *hidden_sizes, D)
        means = (~distribution.log_stds).nonzero().squeeze(1)
        self.register_buffer("means", means, persistent=False)
        # Whether to act uniformly at random. Actors get this buffer with the weights.
        self.register_buffer("uniform", torch.tensor(True))

    def forward(self, observation):
        x = self.layers(self.encoder(observation))
        params = x.new_zeros(len(x), self.distribution.num_params)
        return params.index_copy(1, self.means, x)

    def features(self, observation):
        return self.layers(self.encoder(observation)).tanh()


class Agent(ReplayAgent):
    """Learns an actor and its critics, in learn(), from samples of what it has seen."""

    make_actor = Actor

    def __init__(self, flags, observation_space, action_space):
        super().__init__(flags, observation_space, action_space)
        self.num_critics = flags.num_critics

    def act_in_test(self, step, core_state):
        return self.act(step, core_state, greedy=True)

    def explore(self, params):
        def add_noise(x):
            action = x.tanh() + self.flags.exploration_noise * torch.randn_like(x)
            return action.clamp(-LARGEST, LARGEST).atanh()

        return map_structure(add_noise, self.distribution.mode(params))

    # Learning.

    def make_targets(self, device):
        super().make_targets(device)
        target = self.make_net(self.observation_space, self.action_space)
        target = to_channels_last(self.normalized(target), device)
        self.target_net = self.add_target("target_net", target, self.net)

    def critic_loss(self, batch):
        flags, scale = self.flags, 1 / self.flags.replay_batch_size
        now, following = (
            map_structure(lambda x, i=i: x[i], batch["observation"]) for i in (0, 1)
        )
        with torch.no_grad():
            action = self.target_net.features(following)
            noise = flags.target_noise * torch.randn_like(action)
            limit = flags.target_noise_clipping
            action = (action + noise.clamp(-limit, limit)).clamp(-1, 1)
            value = self.values(self.target_critics, following, action).min(0).values
        taken = self.distribution.features(batch["action"])[0]
        q = self.values(self.critics, now, taken)  # [num_critics, B]
        loss = scale * (q - self.targets_of(batch, value)).square().sum()
        return loss, {"critic_loss": loss, "q": scale * q.mean(0).sum()}

    def actor_loss(self, batch):
        """Returns the actor's loss: minus the first critic's value of its actions."""
        now = map_structure(lambda x: x[0], batch["observation"])
        value = self.critics[0](now, self.net.features(now))
        loss = -value.sum() / self.flags.replay_batch_size
        return loss, {"actor_loss": loss}


if __name__ == "__main__":
    raise SystemExit("an agent, not a program: python -m monobeast --agent td3")
