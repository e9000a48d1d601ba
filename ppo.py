"""PPO (Schulman et al., "Proximal Policy Optimization Algorithms", arXiv 1707.06347).

    python -m monobeast --agent ppo --env CartPole-v1
    python -m monobeast --agent ppo --preset mujoco --env HalfCheetah-v5
    python -m polybeast --agent ppo --preset atari --env PongNoFrameskip-v4

Read it top to bottom: flags, Agent. What it does not define is in torchbeast/agents.py
and torchbeast/networks.py.

Each batch is learned from several times, in minibatches, and acting waits for each
update. With --async it does not, and rollouts are of older policies, for which the
objective is decoupled (Hilton et al., "Batch size-invariance for policy optimization",
arXiv 2110.00641). pi is the policy that learns, pi_start the one at the start of the
update, pi_acted the one that acted, whose outputs are in the rollout. The ratio
pi / pi_start is clipped; pi_start / pi_acted is an importance weight, and the rho of
V-trace's values (arXiv 1802.01561). Without --async pi_start is pi_acted
(docs/agents.md has the one exception): weights are 1, advantages are GAE's, and the
objective is PPO's.

T is the unroll length, B the batch size, P the number of parameters of a distribution.
"""

import argparse
import math

import torch

import vtrace
from atari_wrappers import is_atari
from torchbeast import agents, minibatches
from torchbeast.flags import by_environment, number
from torchbeast.images import has_images, smaller_sides
from torchbeast.networks import ActorCritic
from torchbeast.normalization import RunningStatistics

# Flags whose defaults depend on the environment: those for Atari.
DEFAULTS = dict(
    reward_clipping="abs_one", normalize_rewards=False,
    gae_lambda=0.95, entropy_cost=0.01, learning_rate=2.5e-4, net="nature",
)  # fmt: skip
# CleanRL's constants (docs.cleanrl.dev/rl-algorithms/ppo).
PRESETS = {
    "atari": DEFAULTS | dict(
        unroll_length=128, batch_size=8, num_minibatches=4, num_epochs=4,
        clipping=0.1,
    ),
    "mujoco": DEFAULTS | dict(
        unroll_length=2048, batch_size=1, num_minibatches=32, num_epochs=10,
        learning_rate=3e-4, clipping=0.2, entropy_cost=0.0, reward_clipping="none",
        normalize_observations=True, normalize_rewards=True, total_steps=1_000_000,
        num_actors=0, envs_per_actor=1, num_servers=1, envs_per_server=1,
    ),
}  # fmt: skip

MAX_WEIGHT = 100  # The largest importance weight, where rollouts are old.


def parser():
    """Returns the agent's flags, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("network")
    agents.add_network_flags(g, "nature")
    g.add_argument("--use_lstm", action=argparse.BooleanOptionalAction, default=False,
                   help="a recurrent network")

    g = p.add_argument_group("loss")
    g.add_argument("--clipping", type=number(float, above=0), default=0.2, metavar="X",
                   help="largest difference of the ratio of policies from 1 "
                   "(default: %(default)s)")
    g.add_argument("--value_clipping", action="store_true",
                   help="clip the change of the value as well")
    agents.add_actor_critic_flags(g)
    g.add_argument("--gae_lambda", type=number(float, 0, 1), metavar="LAMBDA",
                   help="lambda of GAE")
    agents.add_async_flag(g, False)

    g = p.add_argument_group("optimizer (Adam)")
    minibatches.add_flags(g, 4, 16)
    g.add_argument("--learning_rate", type=number(float, above=0),
                   metavar="X", help="learning rate, which falls linearly to 0 at "
                   "--total_steps")
    g.add_argument("--grad_norm_clipping", type=number(float, above=0), default=0.5,
                   metavar="X", help="largest gradient norm (default: %(default)s)")
    # fmt: on
    p.set_defaults(unroll_length=32, batch_size=32)
    by_environment(p, *DEFAULTS)
    return p


class Agent(agents.Agent):
    """PPO with generalized advantage estimation (Schulman et al., arXiv 1506.02438)."""

    numbers_net = "tanh"

    def defaults(self, observation_space, action_space):
        """Returns {flag: default}, by the kind of environment, for flags that were not
        given."""
        flags, cost = self.flags, DEFAULTS["entropy_cost"]
        chosen = DEFAULTS | agents.actor_critic_defaults(
            flags, action_space, cost, is_atari(flags.env)
        )
        sides = smaller_sides(observation_space)
        if not sides:
            del chosen["net"]  # There are no images.
            chosen["gae_lambda"] = 0.98
            if not flags.use_lstm:
                chosen["learning_rate"] = 1e-3
        elif max(sides) < 20:
            chosen.update(net="small", learning_rate=5e-4)
        return chosen

    def make_net(self, observation_space, action_space):
        """Policy and value share nothing where there are neither images nor an LSTM.
        Without an LSTM the network does not read the last action."""
        lstm = self.flags.use_lstm
        shared = has_images(observation_space) or lstm
        make = self.make_encoder if shared else self.make_encoders
        return ActorCritic(make(observation_space), action_space, lstm, feedback=lstm)

    @torch.inference_mode()
    def act(self, step, core_state, greedy=False):
        outputs, core_state = self.unroll(step, core_state)
        logits = outputs["policy_logits"]  # [1, B, P]
        choose = self.distribution.mode if greedy else self.distribution.sample
        return {"action": choose(logits), "policy_logits": logits}, core_state

    def start_learning(self, device):
        minibatches.check(self.flags)
        super().start_learning(device)

    def make_optimizer(self):
        return torch.optim.Adam(self.net.parameters(), eps=1e-5, fused=True)

    def learn(self, batch):
        """Makes num_epochs * num_minibatches gradient steps on one batch [T + 1, B,
        ...]. Returns the means of what is logged.

        kl is an estimate of KL(policy at the start of the update || policy),
        clip_fraction the share of ratios that are clipped, explained_variance the share
        of the returns' variance that the values explain.
        """
        learning_rate = self.flags.learning_rate * self.fraction_left()
        self.set_learning_rate(learning_rate)
        data, statistics = self.graphs.of(self.prepare, batch)()
        means = minibatches.learn(self, data)
        self.count(batch)
        return {**means, **statistics, "learning_rate": learning_rate}

    @torch.no_grad()
    def prepare(self, batch):
        """Returns (data for minibatches, statistics). The data are the batch's steps 0
        to T - 1, [T, B, ...] (without an LSTM [1, T * B, ...]), with

            log_prob, value, target, advantage  [T, B], of the actions taken, by the
                  network at the start of the update
            weight  [T, B], the action's probability by that network over its
                  probability when it was taken, at most MAX_WEIGHT
            real  [T, B] bool, the step was not the last of an episode
        """
        outputs, _ = self.unroll(batch, batch["core_state"])  # [T + 1, B, ...]
        actions, log_prob_of = batch["action"], self.distribution.log_prob
        log_prob = log_prob_of(outputs["policy_logits"][:-1], actions)
        log_rhos = log_prob - log_prob_of(batch["policy_logits"], actions)
        value, bootstrap_value = outputs["baseline"][:-1], outputs["baseline"][-1]
        rewards, real = self.rewards(batch), ~batch["done"][1:]
        discounts = self.flags.discounting * (~batch["terminated"][1:]).float()
        # V-trace's values. The advantages below leave out rho, which is in the weight.
        # Both are GAE's where all rhos are 1.
        target = vtrace.from_importance_weights(
            log_rhos, discounts, rewards, value, bootstrap_value, real,
            lambda_=self.flags.gae_lambda,
        ).vs  # fmt: skip
        following = torch.cat([target[1:] - value[1:], torch.zeros_like(target[:1])])
        following = self.flags.gae_lambda * following
        following += outputs["baseline"][1:]
        advantage = torch.where(real, rewards + discounts * following - value, 0)
        moments = RunningStatistics((3,), target.device)
        moments.update(torch.stack([advantage, target, target - value], -1), real)
        mean, variance = moments.mean.float(), moments.variance.float()
        advantage = (advantage - mean[0]) / (variance[0].sqrt() + 1e-8)
        unexplained = (variance[2] + mean[2].square()) / variance[1].clamp(min=1e-8)
        data = minibatches.prepare(
            batch,
            self.state_of_net(batch["core_state"]),
            log_prob=log_prob,
            weight=log_rhos.clamp(max=math.log(MAX_WEIGHT)).exp(),
            value=value,
            target=target,
            advantage=torch.where(real, advantage, 0),
            real=real,
        )
        return data, {"explained_variance": 1 - unexplained}

    def loss(self, part, outputs):
        """Returns the loss of a minibatch, for which the net returned outputs [T, B,
        ...], and what is logged of it: means over real transitions."""
        flags, advantage = self.flags, part["advantage"]
        mean = minibatches.mean_over(part["real"])
        logits, value = outputs["policy_logits"], outputs["baseline"]
        log_ratio = self.distribution.log_prob(logits, part["action"])
        log_ratio = log_ratio - part["log_prob"]
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - flags.clipping, 1 + flags.clipping)
        gain = torch.min(ratio * advantage, clipped * advantage)
        pg_loss = -mean(part["weight"] * gain)
        error = (value - part["target"]).square()
        if flags.value_clipping:
            change = (value - part["value"]).clamp(-flags.clipping, flags.clipping)
            near = part["value"] + change
            error = torch.max(error, (near - part["target"]).square())
        baseline_loss = 0.5 * mean(error)
        entropy_loss = -mean(self.distribution.entropy(logits))
        total = pg_loss + flags.baseline_cost * baseline_loss
        total = total + flags.entropy_cost * entropy_loss
        return total, {
            "total_loss": total,
            "pg_loss": pg_loss,
            "baseline_loss": baseline_loss,
            "entropy_loss": entropy_loss,
            "kl": mean(ratio - 1 - log_ratio),
            "clip_fraction": mean((ratio != clipped).float()),
        }


if __name__ == "__main__":
    raise SystemExit("an agent, not a program: python -m monobeast --agent ppo")
