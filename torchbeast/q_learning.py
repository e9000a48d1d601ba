"""What agents that learn the values of actions share: random actions, and how many of
them there are."""

import numpy as np
import torch
from gymnasium import spaces

from torchbeast import agents, targets
from torchbeast.distributions import IMPOSSIBLE
from torchbeast.flags import number
from torchbeast.messages import BadInput, log
from torchbeast.networks import Network

TEST_EPSILON = 0.001  # Random actions of tests and of the evaluation, as Dopamine's.


def add_exploration_flags(group, exploration, steps):
    """Adds the flags of QAgent.act(). exploration: the default, or what the help says
    of it if the agent's defaults() has it. steps: what the help says of the default,
    exploration_steps()."""
    if isinstance(exploration, str):
        default, text = None, exploration
    else:
        default, text = exploration, "{} {}".format(*exploration)
    # fmt: off
    group.add_argument("--exploration", nargs=2, type=number(float, 0, 1),
                       default=default, metavar=("LOW", "HIGH"),
                       help="probability of a random action: each episode draws its "
                       f"own, log-uniformly (default: {text})")
    group.add_argument("--exploration_steps", type=number(int, 0), metavar="N",
                       help="agent steps over which it falls from 1 to that "
                       f"(default: {steps}; at most half of a short run)")
    # fmt: on


def exploration_steps(flags, share, least):
    """Returns a share of --total_steps, or, if that is more, `least`, of which a short
    run has half of its steps at most: its share is over before there are values to act
    by."""
    return max(round(share * flags.total_steps), min(least, flags.total_steps // 2))


class QNetwork(Network):
    """outputs["q"] [T, B, A]: the value of each action. A subclass has the heads."""

    def __init__(self, encoder, action_space, use_lstm=False, feedback=True):
        super().__init__(encoder, action_space, use_lstm, feedback)
        # Random actions beyond those of an episode; actors get it with the weights.
        self.register_buffer("exploration", torch.ones(()))

    def masked(self, outputs, mask):
        """The values of actions that are not allowed are IMPOSSIBLE."""
        values = {
            name: outputs[name].masked_fill(
                ~(mask if name == "q" else mask[..., None]), IMPOSSIBLE
            )
            for name in ("q", "quantiles")
            if name in outputs
        }
        return {**outputs, **values}


class QAgent(agents.Agent):
    """Takes the most valuable action, or a random one with a probability that falls
    over the first --exploration_steps and differs from episode to episode.

    core_state: (Agent.initial_state()'s, episodes' shares of random actions [1, B]).
    """

    def __init__(self, flags, observation_space, action_space):
        if not isinstance(action_space, spaces.Discrete):
            need = "needs a Discrete action space, the environment has"
            use = "use --agent polybeast or ppo"
            raise BadInput(f"--agent {flags.agent} {need} {action_space}: {use}")
        super().__init__(flags, observation_space, action_space)
        self.net.exploration.fill_(flags.exploration_steps > 0)
        self._random = 1.0  # What is left of random actions beyond an episode's own.

    def start_learning(self, device):
        super().start_learning(device)
        if self.flags.exploration_steps > self.flags.total_steps:
            log.warning(
                f"--exploration_steps {self.flags.exploration_steps:,}: the run, of "
                f"{self.flags.total_steps:,} steps, ends before"
            )

    def initial_state(self, batch_size):
        return super().initial_state(batch_size), torch.zeros(1, batch_size)

    @torch.inference_mode()
    def act(self, step, core_state, greedy=False):
        core_state, share = core_state
        outputs, core_state = self.unroll(step, core_state)
        if greedy:
            return {"action": outputs["q"].argmax(-1)}, (core_state, share)
        low, high = np.log(np.clip(self.flags.exploration, 1e-9, 1))
        drawn = (low + (high - low) * torch.rand_like(share)).exp()
        share = torch.where(step["done"], drawn, share)
        random = share + (1 - share) * self.net.exploration
        return targets.epsilon_greedy(outputs["q"], random), (core_state, share)

    @torch.inference_mode()
    def act_in_test(self, step, core_state):
        core_state, share = core_state
        outputs, core_state = self.unroll(step, core_state)
        random = torch.full_like(share, TEST_EPSILON)
        return targets.epsilon_greedy(outputs["q"], random), (core_state, share)

    def update_statistics(self, batch):
        core_state, _ = batch["core_state"]
        super().update_statistics({**batch, "core_state": core_state})

    def skip(self, frozen):
        super().skip(frozen)
        if not frozen:
            self.explore_less()

    def explore_less(self):
        """Brings the share of random actions up to date with what was learned from.
        Returns what is left of those beyond an episode's own."""
        flags = self.flags
        learned = flags.unroll_length * flags.batch_size  # Steps.
        less = learned / max(1, flags.exploration_steps)
        self._random = max(0, self._random - less)
        self.net.exploration.fill_(self._random)
        return self._random

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self._random = float(self.net.exploration)
