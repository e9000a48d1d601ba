"""IMPALA with Random Network Distillation (Burda et al. 2018, arXiv 1810.12894).

A predictor learns the outputs of a fixed random network, the target. Its error is large
where observations are new. With the mean of all errors so far subtracted and divided by
their standard deviation, it is a bonus for the action that led to the observation.
"""

import torch
from torch import nn

import polybeast
from torchbeast import ranks
from torchbeast.flags import number
from torchbeast.gradients import sum_over_ranks
from torchbeast.nests import leaves
from torchbeast.normalization import RunningStatistics


def parser():
    p = polybeast.parser()
    g = p.add_argument_group("Random Network Distillation")
    g.add_argument("--bonus_weight", type=number(float, 0), default=0.1, metavar="X",
                   help="weight of the bonus (default: %(default)s)")  # fmt: skip
    g.add_argument("--predictor_learning_rate", type=number(float, above=0),
                   default=1e-3, metavar="X", help="default: %(default)s")  # fmt: skip
    return p


class Novelty(nn.Module):
    """Maps observations [N, F] to the predictor's errors [N] and to bonuses [N]."""

    def __init__(self, space):
        super().__init__()
        F = sum(x.size for _, x in leaves(space.sample()))
        self.target = nn.Sequential(nn.Linear(F, 128), nn.ReLU(), nn.Linear(128, 64))
        middle = nn.Linear(F, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
        self.predictor = nn.Sequential(*middle, nn.Linear(128, 64))
        self.observations, self.errors = RunningStatistics((F,)), RunningStatistics()

    def forward(self, x):
        self.observations.update(x)
        x = self.observations(x).clamp(-5, 5)
        errors = (self.predictor(x) - self.target(x).detach()).square().mean(1)
        self.errors.update(errors.detach())
        return errors, self.errors(errors.detach())


class Agent(polybeast.Agent):
    def __init__(self, flags, observation_space, action_space):
        super().__init__(flags, observation_space, action_space)
        self.novelty = Novelty(observation_space)

    def start_learning(self, device):
        super().start_learning(device)
        parameters = self.novelty.to(device).predictor.parameters()
        self.adam = torch.optim.Adam(parameters, self.flags.predictor_learning_rate)
        self.learned.update(novelty=self.novelty, adam=self.adam)

    def learn(self, batch):
        real = ~batch["done"][1:]  # [T, B]; what an action has led to.
        x = [o[1:].flatten(2).float() for _, o in leaves(batch["observation"])]
        errors, real_bonus = self.novelty(torch.cat(x, dim=2)[real])
        bonus = torch.zeros(real.shape, device=real.device)
        bonus[real] = real_bonus
        error = errors.sum() / max(1, len(errors))
        self.adam.zero_grad()
        error.backward()
        if ranks.current.num > 1:  # The mean over all learners.
            sum_over_ranks(list(self.novelty.predictor.parameters()), {}, weight=1.0)
        self.adam.step()
        # Not in batch["reward"], which the net reads as the last reward.
        batch = {**batch, "bonus": bonus}  # [T, B]
        statistics = super().learn(batch)
        return {**statistics, "bonus": bonus.mean(), "predictor_error": error}

    def rewards(self, batch):
        return super().rewards(batch) + self.flags.bonus_weight * batch["bonus"]
