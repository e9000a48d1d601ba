"""PQN: Q-learning from new rollouts alone, without replay and target network.

    python -m monobeast --agent pqn --env CartPole-v1
    python -m monobeast --agent pqn --env PongNoFrameskip-v4
    python -m warpbeast --agent pqn --env warp/CartPole

Gallici et al., "Simplifying Deep Temporal Difference Learning", arXiv 2407.04811: layer
normalisation keeps temporal differences from running away, so that a parallelised
Q-network needs no target network. Read it top to bottom: flags, Net, Agent.
What it does not define is in torchbeast/q_learning.py and torchbeast/agents.py.

A batch is learned from several times, in minibatches. The targets are Q(lambda) by the
network at the start of the update, which is the one that acted, unless --async lets
acting go on while it learns. Then actions are of older policies; values are always by
the current network. Peng's Q(lambda) corrects for neither old nor random actions: with
a larger lambda its values are more those of the actions that were taken (arXiv
2103.00107). Not in the paper, as layers that all actions share move all values of a
state together, and small differences drown in that: advantage learning (Bellemare et
al., "Increasing the Action Gap", arXiv 1512.04860) where observations are numbers. And
where these are integers, such as a grid's, the values of actions that were not taken
are held where they were at the start of the update (compare value churn, 2409.04792).

T is the unroll length, B the batch size, A the number of actions.
"""

import argparse

import torch
from torch import nn

import vtrace
from atari_wrappers import is_atari
from torchbeast import agents, minibatches, q_learning, ranks, targets
from torchbeast.encoders import initialize
from torchbeast.flags import by_environment, number
from torchbeast.images import smaller_sides
from torchbeast.q_learning import QAgent, QNetwork
from torchbeast.spaces import space_leaves

# CleanRL's constants (cleanrl/pqn_atari_envpool.py, pqn_atari_envpool_lstm.py).
PRESETS = {
    "atari": dict(
        unroll_length=128, batch_size=8, num_minibatches=4, num_epochs=4,
        num_actors=0, envs_per_actor=8, num_servers=1, envs_per_server=8,
        advantage_learning=0.0, churn_reduction=0.0,
    ),
}  # fmt: skip

# Flags that defaults() chooses.
BY_ENVIRONMENT = (
    "net", "reward_clipping", "normalize_rewards", "num_minibatches", "learning_rate",
    "grad_norm_clipping", "advantage_learning", "churn_reduction",
)  # fmt: skip


# Purejaxql's of 4,096 steps. WarpBeast's larger batches have larger minibatches.
MAX_MINIBATCHES = 32


def parser():
    """Returns the agent's flags, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("network")
    agents.add_network_flags(g, None)
    g.add_argument("--use_lstm", action=argparse.BooleanOptionalAction, default=False,
                   help="a recurrent network")

    g = p.add_argument_group("exploration")
    steps = "a tenth of the run, or 50,000 if more"
    q_learning.add_exploration_flags(g, (0.01, 0.01), steps)

    g = p.add_argument_group("loss")
    agents.add_reward_flags(g, None, normalized=True)
    g.add_argument("--q_lambda", type=number(float, 0, 1), default=0.65,
                   metavar="LAMBDA", help="weight of later steps in the targets; 0: "
                   "only the next step's value, 1: all rewards of the rollout "
                   "(default: %(default)s)")
    g.add_argument("--advantage_learning", type=number(float, 0, 0.99),
                   metavar="ALPHA", help="makes the other actions' values 1 / (1 - "
                   "ALPHA) times as far from the best one's")
    g.add_argument("--churn_reduction", type=number(float, 0), metavar="WEIGHT",
                   help="weight of the squared changes, since the start of the update, "
                   "of the values of actions that were not taken")
    agents.add_async_flag(g, False)

    g = p.add_argument_group("optimizer (RAdam)")
    minibatches.add_flags(g, 4, None)
    g.add_argument("--learning_rate", type=number(float, above=0), metavar="X",
                   help="learning rate, which falls linearly to 0 at --total_steps")
    g.add_argument("--grad_norm_clipping", type=number(float, above=0), metavar="X",
                   help="largest gradient norm")
    # fmt: on
    by_environment(p, *BY_ENVIRONMENT)
    p.set_defaults(unroll_length=32, batch_size=32)
    return p


class Net(QNetwork):
    """outputs["q"] [T, B, A]. Without an LSTM the heads do not read the last action."""

    def __init__(self, encoder, action_space, use_lstm):
        super().__init__(encoder, action_space, use_lstm, feedback=use_lstm)

    def make_heads(self, num_features):
        self.q = nn.Linear(num_features, self.distribution.num_params)
        initialize(self.q, gain=0.01)  # Values are about 0 at first.

    def heads(self, x):
        return {"q": self.q(x)}


class Agent(QAgent):
    """Learns Q-values from each batch of rollouts, num_epochs times."""

    numbers_net, layer_norm = "relu", True
    max_reward_scale = 1  # Values that are larger take longer to learn.

    def defaults(self, observation_space, action_space):
        """Returns what is best for the kind of environment. Atari's are CleanRL's."""
        flags = self.flags
        sides = smaller_sides(observation_space)
        *_, dtypes, shapes = zip(*space_leaves(observation_space))
        grid = not sides and any(shapes) and all(x.kind != "f" for x in dtypes)
        most = ranks.current.share(flags.batch_size)  # Of a rank: rollouts, or steps.
        most *= 1 if flags.use_lstm else flags.unroll_length
        chosen = {
            "exploration_steps": q_learning.exploration_steps(flags, 1 / 10, 50_000),
            **agents.reward_defaults(flags, is_atari(flags.env)),
            "learning_rate": 2.5e-4,
            "grad_norm_clipping": 0.5 if flags.use_lstm else 10.0,
            "advantage_learning": 0.9 if any(shapes) and not sides else 0.0,
            "churn_reduction": 1.0 if grid else 0.0,
        }
        size = 64  # Steps of a minibatch of all ranks.
        if sides and max(sides) < 20:
            chosen["net"], chosen["learning_rate"] = "small", 5e-4
        elif sides:
            chosen["net"], size = "nature", 256
        num = max(1, flags.unroll_length * flags.batch_size // size)
        chosen["num_minibatches"] = min(num, MAX_MINIBATCHES, most)
        return chosen

    def make_net(self, observation_space, action_space):
        encoder = self.make_encoder(observation_space)
        return Net(encoder, action_space, self.flags.use_lstm)

    def start_learning(self, device):
        minibatches.check(self.flags)
        super().start_learning(device)

    def make_optimizer(self):
        return torch.optim.RAdam(self.net.parameters())

    def learn(self, batch):
        """Makes num_epochs * num_minibatches gradient steps on one batch [T + 1, B,
        ...]. Returns the means of what is logged.

        td_error is the mean absolute error, q the mean value of the actions taken.
        """
        flags = self.flags
        learning_rate = flags.learning_rate * self.fraction_left()
        self.set_learning_rate(learning_rate)
        data = self.graphs.of(self.prepare, batch)()
        means = minibatches.learn(self, data)
        self.count(batch)
        logged = dict(exploration=self.explore_less(), learning_rate=learning_rate)
        return {**means, **logged}

    @torch.no_grad()
    def prepare(self, batch):
        """Returns what minibatches are made of, with

        target  [T, B], of the action taken on a step: lambda_targets()', less ALPHA of
                how far its value is from the best one of the step (arXiv 1512.04860)
        q       [T, B, A], the values at the start of the update, if they are to be held
        real    [T, B] bool, the step was not the last of an episode
        """
        core_state = self.state_of_net(batch["core_state"][0])
        outputs, _ = self.net(batch, core_state)  # [T + 1, B, A]
        real = ~batch["done"][1:]
        discounts = self.flags.discounting * (~batch["terminated"][1:]).float()
        target = lambda_targets(
            self.rewards(batch), discounts, real, outputs["q"], self.flags.q_lambda
        )
        q = outputs["q"][:-1]
        gap = q.max(-1).values - targets.of_actions(q, batch["action"])
        target = target - self.flags.advantage_learning * gap
        held = {"q": q} if self.flags.churn_reduction else {}
        return minibatches.prepare(batch, core_state, target=target, real=real, **held)

    def loss(self, part, outputs):
        """Returns the loss of a minibatch, for which the net returned outputs [T, B,
        ...], and its statistics, means over real transitions. With the weight w of
        --churn_reduction and the values Q' at the start of the update the loss is

            mean_t [(Q(s_t, a_t) - G_t)^2
                    + w sum_{b != a_t} (Q(s_t, b) - Q'(s_t, b))^2]
        """
        mean = minibatches.mean_over(part["real"])
        q = targets.of_actions(outputs["q"], part["action"])
        error = q - part["target"]
        losses = error.square()
        if "q" in part:
            moved = (outputs["q"] - part["q"]).square()
            churn = moved.sum(-1) - targets.of_actions(moved, part["action"])
            losses = losses + self.flags.churn_reduction * churn
        total = mean(losses)
        return total, {
            "total_loss": total,
            "td_error": mean(error.abs()),
            "q": mean(q),
        }


def lambda_targets(
    rewards,  # [T, B]
    discounts,  # [T, B] gamma, or 0 where the episode terminated at step t + 1.
    real,  # [T, B] bool, False: no action led from step t to step t + 1.
    q,  # [T + 1, B, A]
    q_lambda,
):
    """Returns the targets G [T, B] of the values of the actions taken on steps t.

        G_t = r_t + gamma_t ((1 - lambda) max_a Q(s_{t+1}, a) + lambda G_{t+1})

    G_{t+1} is max_a Q(s_{t+1}, a) where no action of the episode and of the rollout
    follows. It is V-trace's recursion with the largest values for V and ratios of 1.
    """
    value = q.max(-1).values
    return vtrace.from_importance_weights(
        torch.zeros_like(rewards), discounts, rewards, value[:-1], value[-1], real,
        lambda_=q_lambda,
    ).vs  # fmt: skip


if __name__ == "__main__":
    raise SystemExit("an agent, not a program: python -m monobeast --agent pqn")
