"""TD3 (Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic
Methods", arXiv 1802.09477): continuous actions, learned from replay by an actor that
leaves nothing to chance.

    python -m monobeast --agent td3 --env Pendulum-v1
    python -m monobeast --agent td3 --preset mujoco --env HalfCheetah-v5
    python -m monobeast --agent td3 --preset ddpg --env HalfCheetah-v5

Read it top to bottom: flags, Actor, Agent. sac.ReplayAgent and torchbeast/agents.py
have what it does not define.

Two critics learn the values of the actions of a slowly following actor, with some noise
added; the smaller of both values is the target. The actor learns every second time.
With one critic, no noise in the targets and an actor that learns each time it is DDPG
(Lillicrap et al., arXiv 1509.02971).

B is the number of samples in a batch, D of numbers in an action, P of parameters of a
distribution. Actions and noise are in units of the actions' bounds.
"""

import argparse

import torch
from torch import nn

import sac
from torchbeast import agents, replay
from torchbeast.encoders import mlp
from torchbeast.flags import number
from torchbeast.gradients import set_gradients
from torchbeast.nests import map_structure

LARGEST = 0.999999  # The largest action: a tanh is smaller than 1.

# The authors' constants (sfujim/TD3), which are CleanRL's.
MUJOCO = dict(
    replay_size=1_000_000, replay_start=25_000, total_steps=1_000_000,
    num_actors=0, envs_per_actor=1, num_servers=1, envs_per_server=1,
    batch_size=1, unroll_length=8, critic_learning_rate=3e-4,
)  # fmt: skip
PRESETS = {
    "mujoco": MUJOCO,
    "ddpg": {**MUJOCO, "num_critics": 1, "target_noise": 0.0, "policy_delay": 1},
}


def parser():
    """Returns the agent's flags, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("network")
    agents.add_network_flags(g, "shallow")
    g.add_argument("--num_critics", type=number(int, 1, 100), default=2, metavar="N",
                   help="critics, of which the smallest value is believed "
                   "(default: %(default)s)")

    g = p.add_argument_group("exploration")
    g.add_argument("--exploration_noise", type=number(float, 0), default=0.1,
                   metavar="X", help="standard deviation of the noise added to actions "
                   "(default: %(default)s)")

    g = p.add_argument_group("loss")
    agents.add_reward_flags(g, "none")
    g.add_argument("--target_noise", type=number(float, 0), default=0.2, metavar="X",
                   help="standard deviation of the noise added to actions in targets "
                   "(default: %(default)s)")
    g.add_argument("--target_noise_clipping", type=number(float, 0), default=0.5,
                   metavar="X", help="largest noise in targets (default: %(default)s)")
    g.add_argument("--policy_delay", type=number(int, 1), default=2, metavar="N",
                   help="gradient steps of the critics for each step of the actor and "
                   "of all target networks (default: %(default)s)")
    g.add_argument("--target_rate", type=number(float, 0, 1), default=0.005,
                   metavar="TAU", help="part of the way to the learned networks that "
                   "target networks go in a step (default: %(default)s)")

    g = p.add_argument_group("replay")
    replay.add_flags(g, size=100_000, ratio=256.0, start=1000, batch=256)

    g = p.add_argument_group("optimizer (Adam)")
    g.add_argument("--learning_rate", type=number(float, above=0), default=3e-4,
                   metavar="X", help="actor's learning rate (default: %(default)s)")
    g.add_argument("--critic_learning_rate", type=number(float, above=0), default=1e-3,
                   metavar="X", help="critics' learning rate (default: %(default)s)")
    # fmt: on
    # Short rollouts: the agent learns from each step, and should act on it soon.
    p.set_defaults(batch_size=4, unroll_length=2, envs_per_actor=4, envs_per_server=4)
    p.set_defaults(hidden_sizes=[256, 256])
    return p


class Actor(nn.Module):
    """Maps observations [N, ...] to the parameters [N, P] of a distribution, of which
    only the means count. features() maps them to actions [N, D]."""

    def __init__(self, encoder, hidden_sizes, distribution):
        super().__init__()
        self.encoder = encoder
        self.distribution = distribution
        D = distribution.num_features
        self.layers = mlp(encoder.out_features, *hidden_sizes, D)
        means = (~distribution.log_stds).nonzero().squeeze(1)
        self.register_buffer("means", means, persistent=False)
        # Whether actions are uniform. Actors get this buffer with the weights.
        self.register_buffer("uniform", torch.tensor(True))

    def forward(self, observation):
        x = self.layers(self.encoder(observation))
        params = x.new_zeros(len(x), self.distribution.num_params)
        return params.index_copy(1, self.means, x)

    def features(self, observation):
        return self.layers(self.encoder(observation)).tanh()


class Agent(sac.ReplayAgent):
    """Learns an actor and its critics, in learn(), from samples of what it has seen."""

    name, make_actor = "td3", Actor

    def __init__(self, flags, observation_space, action_space):
        super().__init__(flags, observation_space, action_space)
        self.num_critics = flags.num_critics
        self.gradient_steps = 0

    def act_in_test(self, step, core_state):
        return self.act(step, core_state, greedy=True)

    def explore(self, params):
        def add_noise(x):
            action = x.tanh() + self.flags.exploration_noise * torch.randn_like(x)
            return action.clamp(-LARGEST, LARGEST).atanh()

        return map_structure(add_noise, self.distribution.mode(params))

    # Learning.

    def start_learning(self, device):
        target = self.make_net(self.observation_space, self.action_space)
        self.target_net = self.normalized(target).requires_grad_(False).to(device)
        self.target_net.load_state_dict(self.net.state_dict())
        self.learned["target_net"] = self.target_net
        super().start_learning(device)
        self.actor_loss = torch.zeros((), device=device)  # The newest, for the logs.

    def make_optimizer(self):
        flags = self.flags
        groups = [
            {"params": list(self.net.parameters()), "lr": flags.learning_rate},
            {
                "params": list(self.critics.parameters()),
                "lr": flags.critic_learning_rate,
            },
        ]
        return torch.optim.Adam(groups, fused=True)

    def learn_from(self, batch):
        statistics = self.update(self.critics, self.critic_loss, batch)
        self.gradient_steps += 1
        if self.gradient_steps % self.flags.policy_delay == 0:
            self.critics.requires_grad_(False)  # The actor's loss is not theirs.
            self.actor_loss = self.update(self.net, self.loss, batch)["actor_loss"]
            self.critics.requires_grad_(True)
            self.follow(self.target_critics, self.critics)
            self.follow(self.target_net, self.net)
        return {**statistics, "actor_loss": self.actor_loss}

    def update(self, module, loss, batch):
        """Makes a gradient step of one module. Returns the loss's statistics."""
        parameters = list(module.parameters())
        statistics = set_gradients(parameters, loss, batch)
        self.optimizer.step()
        for parameter in parameters:  # The optimizer skips those without a gradient.
            parameter.grad = None
        return statistics

    def critic_loss(self, batch):
        """Returns the critics' loss of transitions [2, B, ...], which may be a part of
        a batch, and its statistics. All are sums, divided by the whole batch's size."""
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
            discount = flags.discounting * ~batch["terminated"][1]
            target = self.rewards(batch)[0] + discount * value
        taken = self.distribution.features(batch["action"])[0]
        q = self.values(self.critics, now, taken)  # [num_critics, B]
        loss = scale * (q - target).square().sum()
        return loss, {"critic_loss": loss, "q": scale * q.mean(0).sum()}

    def loss(self, batch):
        """Returns the actor's loss: minus the first critic's value of its actions."""
        now = map_structure(lambda x: x[0], batch["observation"])
        value = self.critics[0](now, self.net.features(now))
        loss = -value.sum() / self.flags.replay_batch_size
        return loss, {"actor_loss": loss}

    def state_dict(self):
        return {**super().state_dict(), "gradient_steps": self.gradient_steps}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.optimizer is not None:
            self.gradient_steps = state["gradient_steps"]
