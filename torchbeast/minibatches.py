"""Minibatches: a batch is learned from several times, a part in each gradient step."""

import torch

from torchbeast import agents, ranks
from torchbeast.flags import number
from torchbeast.messages import BadInput
from torchbeast.nests import map_structure


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


def draw(data, num):
    """Yields the data [T, B, ...] in `num` parts, in random order along B."""
    _, B = data["done"].shape
    order = torch.randperm(B, device=data["done"].device)
    for part in order.tensor_split(min(num, B)):
        yield map_structure(lambda x, part=part: x[:, part], data)
