"""Minibatches: a batch is learned from several times, a part in each gradient step."""

import itertools

import torch

from torchbeast import agents, graphs, ranks
from torchbeast.flags import number
from torchbeast.gradients import checked, means, sum_over_ranks
from torchbeast.messages import BadInput
from torchbeast.nests import map_structure
from torchbeast.process import check_signals


def add_flags(group, epochs, minibatches):
    """Adds --num_epochs and --num_minibatches with these defaults."""
    # fmt: off
    group.add_argument("--num_epochs", type=number(int, 1), default=epochs,
                       metavar="N", help="times that a batch is learned from "
                       "(default: %(default)s)")
    group.add_argument("--num_minibatches", type=number(int, 1), default=minibatches,
                       metavar="N", help="gradient steps of each time "
                       "(default: %(default)s)")
    # fmt: on


def check(flags):
    """Raises BadInput if a batch cannot be cut into --num_minibatches."""
    most = ranks.current.share(flags.batch_size)
    what = "rollouts (a minibatch has whole ones, --use_lstm)"
    if not flags.use_lstm:
        most, what = most * flags.unroll_length, "steps"
    if flags.num_minibatches > most:
        raise BadInput(
            f"--num_minibatches {flags.num_minibatches}: a batch has {most} {what}"
        )


def prepare(batch, core_state, **data):
    """Returns what minibatches are made of, [T, B, ...]: the steps of a batch [T + 1,
    B, ...] on which actions were taken, as networks read them, those actions, and more
    data about them. Without a core_state it is [1, T * B, ...]: each step stands for
    itself."""
    data = {
        **map_structure(lambda x: x[:-1], agents.what_networks_read(batch)),
        "action": batch["action"],
        "core_state": core_state,
        **data,
    }
    if not core_state:
        data = map_structure(lambda x: x.flatten(0, 1)[None], data)
    return data


def learn(agent, data):
    """Makes a gradient step on each of --num_minibatches parts of the data [T, B, ...],
    --num_epochs times. Returns the means of what gradient_step() returns."""

    def step_of(data, columns):
        return gradient_step(agent, take(data, columns))

    flags, step = agent.flags, agent.graphs.of(step_of, data)
    with graphs.not_capturing(flags, data["done"].device):
        epochs = [draw(data, flags.num_minibatches) for _ in range(flags.num_epochs)]
    statistics = []
    for columns in itertools.chain.from_iterable(epochs):
        if ranks.current.num == 1:
            check_signals()  # There may be many, and each may take seconds.
        statistics.append(step(columns))
    return means(statistics)


def gradient_step(agent, part):
    """Makes a gradient step of an agent's network. agent.loss(part, the network's
    outputs) returns (loss, statistics), means over the minibatch's real transitions."""
    parameters = list(agent.net.parameters())
    agent.optimizer.zero_grad()
    outputs, _ = agent.net(part, part["core_state"])
    loss, statistics = checked(agent.loss(part, outputs))
    loss.backward()
    statistics = {name: x.detach() for name, x in statistics.items()}
    if ranks.current.num > 1:  # The means over all ranks' real transitions.
        statistics = sum_over_ranks(parameters, statistics, part["real"].sum())
    return agent.clip_and_step(statistics)


def mean_over(real):
    """Returns a function that returns the mean of x [T, B, ...] where it is real, bool
    of the same shape."""
    num = real.sum().clamp(min=1)
    return lambda x: torch.where(real, x, 0).sum() / num


def draw(data, num):
    """Returns `num` lists of columns, indices along B, of the data [T, B, ...]: each
    column is in one of them."""
    B = data["done"].shape[1]
    return torch.randperm(B, device=data["done"].device).tensor_split(min(num, B))


def take(data, columns):
    return map_structure(lambda x: x[:, columns], data)
