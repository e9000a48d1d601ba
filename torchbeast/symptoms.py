"""What the numbers of a run tell of what may be wrong with it, in one line each."""

import math
import statistics
from collections import defaultdict, deque

import torch

from torchbeast.messages import log

NUM_REWARDS = 100  # That are not 0: so many are judged.
MAX_UPDATES = 1000  # In which they have to come.
NUM_LOSSES = 100  # A loss "was" the median of so many,
MIN_LOSSES = 10  # or, at first, of fewer.
GROWTH = 1e6


def clips_rewards(agent):
    """Tells whether an agent clips rewards; of several policies, whether all do."""
    policies = getattr(agent, "agents", {"": agent}).values()
    return all(
        getattr(x.flags, "reward_clipping", "none") != "none"
        and not getattr(x.flags, "normalize_rewards", False)
        for x in policies
    )


class Symptoms:
    """Looks at the rewards and losses of updates. Says each thing once."""

    def __init__(self, agent):
        self._rewards_left = MAX_UPDATES if clips_rewards(agent) else 0
        self._rewards = self._clipped = self._largest = 0
        self._losses = defaultdict(lambda: deque(maxlen=NUM_LOSSES))
        self._was = {}  # {name: the smallest median so far}
        self._grown = False

    def of_rewards(self, batch):
        """Returns what see() is to get of a batch [T + 1, B, ...]: a tensor [3], or
        None."""
        if self._rewards_left == 0 or "reward" not in batch:
            return None
        size = batch["reward"][1:].abs()
        return torch.stack([(size > 0).sum(), (size > 1).sum(), size.max()])

    def see(self, values, rewards=None):
        """Looks at one update.

        values:  {name: number}, the agent's statistics; names of losses end with "loss"
        rewards: of_rewards() as a list
        """
        if rewards is not None and self._rewards_left > 0:
            self._see_rewards(*rewards)
        for name, x in values.items():
            if name.endswith("loss") and not self._grown:
                self._see_loss(name, abs(x))

    def _see_rewards(self, num, clipped, largest):
        self._rewards_left -= 1
        self._rewards += num
        self._clipped += clipped
        self._largest = max(self._largest, largest)
        if self._rewards < NUM_REWARDS:
            return
        self._rewards_left = 0
        if (share := self._clipped / self._rewards) > 0.5:
            log.info(
                "%.0f %% of the rewards that are not 0 are clipped to 1 or -1, the "
                "largest is %.3g: --reward_clipping none learns from their size, and "
                "so does --normalize_rewards (polybeast, ppo, pqn)",
                100 * share,
                self._largest,
            )

    def _see_loss(self, name, x):
        seen = self._losses[name]
        if len(seen) >= MIN_LOSSES:
            # The smallest: a loss that grows step by step takes its median along. And
            # 1, or more: a loss may be near 0 for as long as there are no rewards.
            was = min(self._was.get(name, math.inf), max(1, statistics.median(seen)))
            self._was[name] = was
            if x > GROWTH * was:
                self._grown = True
                log.info(
                    "%s is %.2g, and was %.2g: are there very large observations or "
                    "rewards? If not, a smaller learning rate may help",
                    name,
                    x,
                    was,
                )
        seen.append(x)
