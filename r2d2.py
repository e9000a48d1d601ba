"""R2D2: recurrent Q-learning from prioritised replay; without its LSTM it is DQN.

    python -m monobeast --agent r2d2 --preset r2d2 --env PongNoFrameskip-v4
    python -m monobeast --agent r2d2 --preset dqn --env PongNoFrameskip-v4
    python -m monobeast --agent r2d2 --preset rainbow --env PongNoFrameskip-v4
    python -m monobeast --agent r2d2 --no-use_lstm --env CartPole-v1

Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning"
(ICLR 2019). DQN is that of Mnih et al. (Nature 2015) with double Q-learning (arXiv
1509.06461), dueling (1511.06581), prioritised replay (1511.05952) and n-step targets.
--quantiles adds the quantile regression of QR-DQN (1710.10044). Read it top to bottom:
flags, Net, Agent. What is not here is in torchbeast/q_learning.py and agents.py.

T is the unroll length, K the burn-in, B the number of samples in a batch, A of actions,
N of quantiles. A sample is a whole rollout with its recurrent state, [K + T + 1, B,
...]; without an LSTM, it is one step of a rollout and the n steps after it.
"""

import argparse

import torch

from atari_wrappers import is_atari
from torchbeast import agents, normalization, q_learning, ranks, replay, targets
from torchbeast.encoders import initialize, mlp, to_channels_last
from torchbeast.flags import by_environment, number
from torchbeast.gradients import means, set_gradients
from torchbeast.images import smaller_sides
from torchbeast.nests import map_structure
from torchbeast.q_learning import QAgent, QNetwork

# Rlpyt's "ernbw" (configs/atari/dqn/atari_dqn.py), smaller.
DQN = dict(
    use_lstm=False, reward_clipping="abs_one", n_step=3, exploration=(0.01, 0.01),
    exploration_steps=100_000, target_interval=4000, replay_size=300_000,
    replay_start=10_000, replay_ratio=4.0, replay_batch_size=32, epsilon=7.8e-5,
    importance_exponent=(0.4, 1.0), learning_rate=1.25e-4, grad_norm_clipping=10.0,
)  # fmt: skip
PRESETS = {
    # Rlpyt's r2d1_long (astooke/rlpyt, configs/atari/dqn/atari_r2d1.py), smaller.
    "r2d2": dict(
        terminal_on_life_loss=False, n_step=5, value_rescaling=True,
        exploration=(0.0005, 0.1), exploration_steps=100_000, target_interval=4000,
        replay_size=300_000, replay_start=10_000, replay_ratio=4.0, replay_batch_size=8,
        priority_exponent=0.9, importance_exponent=(0.6, 0.6), learning_rate=2.5e-4,
        epsilon=1e-5, grad_norm_clipping=80.0,
    ),
    "dqn": DQN,
    # Rainbow (arXiv 1710.02298) without noisy networks, by quantiles.
    "rainbow": {**DQN, "quantiles": 32},
}  # fmt: skip


def parser():
    """Returns the agent's flags, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("network")
    agents.add_network_flags(g, "shallow")
    g.add_argument("--use_lstm", action=argparse.BooleanOptionalAction, default=True,
                   help="a recurrent network, which learns from whole rollouts")
    g.add_argument("--layer_norm", action=argparse.BooleanOptionalAction,
                   help="normalise each layer of the encoder")

    g = p.add_argument_group("exploration")
    q_learning.add_exploration_flags(g, "0.01 0.1; 0.01 0.01 without an LSTM",
                                     "a thirtieth of the run, or 10,000 if more")

    g = p.add_argument_group("loss")
    agents.add_reward_flags(g, None)
    g.add_argument("--n_step", type=number(int, 1, 10**6), metavar="N",
                   help="rewards in a target, if its rollout is as long")
    g.add_argument("--quantiles", type=number(int, 1, 1000), default=1, metavar="N",
                   help="quantiles of the return that are learned; 1: its mean "
                   "(default: %(default)s)")
    g.add_argument("--value_rescaling", action=argparse.BooleanOptionalAction,
                   default=False, help="learn sign(Q) (sqrt(|Q| + 1) - 1) + Q / 1000")
    g.add_argument("--target_interval", type=number(int, 1), default=1600, metavar="N",
                   help="agent steps between copies of the network to the target "
                   "network (default: %(default)s)")
    g.add_argument("--burn_in", type=number(int, 0, 10_000), default=10, metavar="K",
                   help="steps before a rollout on which the LSTM's state is brought "
                   "up to date (default: %(default)s)")

    g = p.add_argument_group("replay")
    replay.add_flags(g, 100_000, 8.0, 1000, "16 rollouts; 64 steps without an LSTM")
    replay.add_priority_flags(g)

    g = p.add_argument_group("optimizer (Adam)")
    g.add_argument("--learning_rate", type=number(float, above=0), default=5e-4,
                   metavar="X", help="learning rate, which falls linearly to 0 at "
                   "--total_steps (default: %(default)s)")
    g.add_argument("--epsilon", type=number(float, above=0), metavar="X",
                   help="term added to the denominator")
    g.add_argument("--grad_norm_clipping", type=number(float, above=0), default=40.0,
                   metavar="X", help="largest gradient norm (default: %(default)s)")
    # fmt: on
    by_environment(p, "reward_clipping", "net", "layer_norm", "n_step", "epsilon")
    return p


class Net(QNetwork):
    """outputs["quantiles"] [T, B, A, N] of the return after each action, by dueling
    heads, and outputs["q"] [T, B, A], their means. With --value_rescaling quantiles are
    of rescaled returns; if there are several, q is the mean of the unscaled ones."""

    def __init__(self, encoder, action_space, use_lstm, num_quantiles, rescaled):
        self.num_quantiles = num_quantiles
        self.mean_of_returns = rescaled and num_quantiles > 1
        super().__init__(encoder, action_space, use_lstm)

    def make_heads(self, num_features):
        N, A = self.num_quantiles, self.distribution.num_params
        self.value = mlp(num_features, num_features, N)
        self.advantage = mlp(num_features, num_features, A * N)
        for head in (self.value, self.advantage):
            initialize(head)
            initialize(head[-1], gain=0.01)  # Values are about 0 at first.

    def heads(self, x):
        advantage = self.advantage(x).unflatten(1, (-1, self.num_quantiles))
        advantage = advantage - advantage.mean(1, keepdim=True)
        quantiles = self.value(x).unsqueeze(1) + advantage
        return {"q": self.mean(quantiles), "quantiles": quantiles}

    def mean(self, quantiles):
        x = targets.unscale(quantiles) if self.mean_of_returns else quantiles
        return x.mean(-1)


class Agent(QAgent):
    """Learns Q-values, in learn(), from samples of what it has seen."""

    counters = *QAgent.counters, "gradient_steps"

    def __init__(self, flags, observation_space, action_space):
        super().__init__(flags, observation_space, action_space)
        self.burn_in = flags.burn_in if flags.use_lstm else 0

    def defaults(self, observation_space, action_space):
        clip = is_atari(self.flags.env) and not self.flags.value_rescaling
        chosen = dict(
            reward_clipping="abs_one" if clip else "none", n_step=3, epsilon=1e-3,
            exploration=(0.01, 0.01), replay_batch_size=64,
            normalize_observations=normalization.has_large_numbers(observation_space),
            exploration_steps=q_learning.exploration_steps(self.flags, 1 / 30, 10_000),
        )  # fmt: skip
        if sides := smaller_sides(observation_space):
            chosen["net"] = "shallow"
            if max(sides) < 20:
                chosen.update(net="small", layer_norm=True, n_step=1, epsilon=1e-5)
        if self.flags.use_lstm:
            chosen.update(exploration=(0.01, 0.1), n_step=5, replay_batch_size=16)
        return chosen

    def make_net(self, observation_space, action_space):
        encoder, flags = self.make_encoder(observation_space), self.flags
        sizes = flags.use_lstm, flags.quantiles, flags.value_rescaling
        return Net(encoder, action_space, *sizes)

    def start_learning(self, device):
        super().start_learning(device)
        flags = self.flags
        target = self.make_net(self.observation_space, self.action_space)
        self.target_net = self.learned["target"] = self.normalized(target)
        self.target_net.requires_grad_(False)
        to_channels_last(self.target_net, device)
        self.target_net.load_state_dict(self.net.state_dict())
        T, K = flags.unroll_length, self.burn_in
        self.num_learned = flags.replay_batch_size * (T if flags.use_lstm else 1)
        self.copy_interval = targets.copy_interval(flags, self.num_learned)
        size = (1, K + T + 1) if flags.use_lstm else (T, min(flags.n_step, T) + 1)
        self.replay, self.credit = replay.make(flags, *size, device)

    def make_optimizer(self):
        epsilon = self.flags.epsilon
        return torch.optim.Adam(self.net.parameters(), eps=epsilon, fused=True)

    def learn(self, batch):
        """Takes a batch [K + T + 1, B, ...] into the replay and makes the gradient
        steps that are due. Returns the means of what is logged.

        td_error is the mean absolute error, q the mean value of the actions taken; both
        are of rescaled values with --value_rescaling.
        """
        rate = self.flags.learning_rate * self.fraction_left()
        self.set_learning_rate(rate)
        batch = agents.what_is_replayed(batch)
        priorities = self.graphs.of(self.first_priorities, batch)()
        self.replay.set_priorities(self.replay.add(batch), priorities)
        T, num = self.flags.unroll_length, self.num_learned
        steps = [self.gradient_step() for _ in self.credit.updates(batch, T, num)]
        self.count(batch)
        return {
            **means(steps),
            "replay_size": self.replay.size * T,
            "exploration": self.explore_less(),
            "replay_ratio": self.credit.measured,
            "learning_rate": rate,
        }

    def gradient_step(self):
        flags = self.flags
        num = flags.replay_batch_size // ranks.current.num
        first, last = flags.importance_exponent
        beta = first + (last - first) * (1 - self.fraction_left())
        batch, items = self.replay.sample(num, beta)
        self.credit.leave_out_padding(batch)
        statistics, priorities = self.graphs.of(self.learn_from, batch)()
        self.replay.set_priorities(items, priorities, late=True)
        self.gradient_steps += 1
        if self.gradient_steps % self.copy_interval == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        age = self.replay.age(items) * flags.unroll_length
        return {**statistics, "replay_age": age}

    def learn_from(self, batch):
        """Makes a gradient step. Returns (what is logged, the samples' priorities)."""
        size, num, parts = self.flags.replay_batch_size, batch["done"].shape[1], []

        def loss(batch):  # set_gradients() may pass a few samples at a time.
            errors, real, q = self.td_errors(batch, sampled=True)
            losses = targets.quantile_loss(errors)  # [T, B]
            errors = errors.detach().mean((2, 3))
            parts.append((errors, real))
            total = (batch["importance"] * losses).sum() / (len(errors) * size)
            sums = dict(td_error=errors.abs().sum(), q=torch.where(real, q, 0).sum())
            return total, dict(total_loss=total, **sums, real=real.sum())

        logged = set_gradients(self.net.parameters(), loss, batch)
        num_real = logged.pop("real").clamp(min=1)
        logged |= {name: logged[name] / num_real for name in ("td_error", "q")}
        # Where memory ran out, set_gradients() began again: the last num are of the
        # complete pass.
        errors, real = (torch.cat(x, 1)[:, -num:] for x in zip(*parts))
        return self.clip_and_step(logged), self.priorities(errors, real)

    @torch.no_grad()
    def first_priorities(self, batch):
        """Returns the priorities of new rollouts."""
        errors, real, _ = self.td_errors(batch)
        return self.priorities(errors.mean((2, 3)), real)

    def td_errors(self, batch, sampled=False):
        """Returns (TD errors [T, B, N, N] of targets and quantiles, 0 where a
        transition is not real; real [T, B] bool; the taken actions' values [T, B]).
        Of a sample from the replay without an LSTM only the first step counts."""
        flags, K, n = self.flags, self.burn_in, self.flags.n_step
        rewards, real = self.rewards(batch)[K:], ~batch["done"][K + 1 :]
        discounts = flags.discounting * (~batch["terminated"][K + 1 :]).float()
        returns, discounts, ends = targets.n_step_returns(rewards, discounts, real, n)
        action = batch["action"][K:]
        steps = agents.what_networks_read(batch)
        core_state, _ = batch["core_state"]
        if sampled and not flags.use_lstm:
            returns, discounts, real = returns[:1], discounts[:1], real[:1]
            action, end = action[:1], ends[0]
            b = torch.arange(len(end), device=end.device)
            q = self.values(self.net, map_structure(lambda x: x[:1], steps), core_state)
            last = map_structure(lambda x: x[end, b][None], steps)
            with torch.no_grad():
                last_q = self.values(self.net, last, core_state)
            following = self.target_values(last_q, last, core_state)
        else:
            q = self.values(self.net, steps, core_state)  # [T + 1, B, A, N]
            following = self.target_values(q, steps, core_state)
            following = following.take_along_dim(ends[..., None], 0)
            q = q[:-1]
        returns, discounts = returns[..., None], discounts[..., None]
        if flags.value_rescaling:
            target = targets.rescale(returns + discounts * targets.unscale(following))
        else:
            target = returns + discounts * following
        q = targets.of_actions(q, action)  # [T, B, N], as the target.
        errors = target.unsqueeze(3) - q.unsqueeze(2)
        return torch.where(real[..., None, None], errors, 0), real, q.detach().mean(-1)

    @torch.no_grad()
    def target_values(self, q, steps, core_state):
        """Returns the target network's quantiles [T + 1, B, N] for the action that is
        best by the learned network's, q [T + 1, B, A, N] (double Q-learning)."""
        best = self.net.mean(q).argmax(-1)
        return targets.of_actions(self.values(self.target_net, steps, core_state), best)

    def values(self, net, steps, core_state):
        """Returns the quantiles [T + 1, B, A, N] of the steps after the burn-in."""
        K = self.burn_in
        if K > 0:
            with torch.no_grad():
                before = map_structure(lambda x: x[:K], steps)
                _, core_state = net(before, core_state)
        return net(map_structure(lambda x: x[K:], steps), core_state)[0]["quantiles"]

    def priorities(self, errors, real):
        exponent, of_rollouts = self.flags.priority_exponent, self.flags.use_lstm
        return targets.priorities(errors, real, exponent, of_rollouts)


if __name__ == "__main__":
    raise SystemExit("an agent, not a program: python -m monobeast --agent r2d2")
