"""Run by torchrun: gradients of batches that the ranks have a part of each. Prints what
is wrong."""

import argparse
import sys

import torch

from torchbeast import ranks
from torchbeast.gradients import set_gradients
from torchbeast.messages import Stop


def make_batch(B):
    g = torch.Generator().manual_seed(B)
    return {
        "observation": torch.randn(4, B, 3, generator=g),
        "done": torch.rand(4, B, generator=g) < 0.3,
    }


def gradients(batch, reduction):
    net = torch.nn.Linear(3, 2)
    unused = torch.nn.Parameter(torch.ones(2))
    torch.nn.init.constant_(net.weight, 0.5)
    torch.nn.init.constant_(net.bias, 0.1)

    def loss(batch):
        x = net(batch["observation"][1:]).square().sum(-1)
        x = x[~batch["done"][1:]]
        if reduction == "mean":
            x = x / max(1, len(x))
        return x.sum(), {"loss": x.sum(), "twice": 2 * x.sum()}

    parameters = [*net.parameters(), unused]
    statistics = set_gradients(parameters, loss, batch, reduction)
    return [p.grad for p in parameters[:2]], statistics


ranks.join(argparse.Namespace(batch_size=2, seed=None, xpid="x"))
group, alone = ranks.current, ranks.Ranks()
assert group.num == 2
for reduction in ("sum", "mean"):
    batch = make_batch(10)
    ranks.current = alone
    expected = gradients(batch, reduction)
    mine = slice(0, 3) if group.rank == 0 else slice(3, 10)
    ranks.current = group
    got = gradients({name: x[:, mine] for name, x in batch.items()}, reduction)
    torch.testing.assert_close(got, expected)
    assert group.faulty.tolist() == [0, 0]

batch["observation"][:] = torch.inf if group.rank == 1 else 1.0
gradients(batch, "sum")
assert group.faulty.tolist() == [0, 1]

module = torch.nn.Linear(1, 1)
torch.nn.init.ones_(module.weight)
torch.nn.init.ones_(module.bias)
group.compare(module)
group.compare(torch.nn.Linear(1, 0).bfloat16())
torch.nn.init.constant_(module.bias, 1.0 + group.rank)
try:
    group.compare(module)
except Stop as e:
    assert "rank 1 has other weights than rank 0" in str(e)
else:
    sys.exit("the difference is not seen")
group.close(0)
