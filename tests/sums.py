"""Run by torchrun: what two ranks put together, against one that has all of it. Prints
what is wrong."""

import argparse
import contextlib
import os
import pathlib
import pickle
import sys

import torch
import torch.distributed as dist

from torchbeast import ranks, torchrun
from torchbeast.gradients import set_gradients
from torchbeast.messages import Stop
from torchbeast.replay import Replay


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


def importance(priorities, items=None):
    """Of samples from a replay, of these items if there are any: (weights, items)."""
    ring = Replay(len(priorities), 1, 2, torch.device("cpu"))
    done = torch.zeros(2, len(priorities), dtype=torch.bool)
    added = ring.add({"done": done, "core_state": ()})
    ring.set_priorities(added, priorities)
    if items is not None:
        ring._tree.find = lambda mass: items
    batch, items = ring.sample(6, importance_exponent=0.7)
    return batch["importance"][0], items


def listening():
    """The IPv4 addresses, in hexadecimal, at which this process listens."""
    paths = pathlib.Path("/proc/self/fd").iterdir()
    mine = {os.readlink(path) for path in paths if path.is_symlink()}
    rows = [line.split() for line in open("/proc/net/tcp")][1:]
    return {
        row[1].partition(":")[0]
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in mine
    }


class Command:
    """Something that is executed when it is unpickled."""

    def __reduce__(self):
        return exec, ("import ranks_test; ranks_test.executed = True",)


torchrun.join(argparse.Namespace(batch_size=2, seed=None, xpid="x"))
group, alone = ranks.current, ranks.Ranks()
assert group.num == 2
assert listening() == {"0100007F"}  # 127.0.0.1
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
    assert "the weights' hash is" in str(e) and not e.save
else:
    sys.exit("the difference is not seen")
# Either rank draws in proportion to its own priorities.
priorities = [torch.tensor([1.0, 2, 3, 4]), torch.tensor([500.0, 1, 1, 2])]
weights, items = importance(priorities[group.rank])
drawn = torch.tensor(group.all_gather((items + 4 * group.rank).tolist())).reshape(-1)
ranks.current = alone
expected, _ = importance(torch.cat([p / p.sum() for p in priorities]), drawn.numpy())
ranks.current = group
torch.testing.assert_close(weights, expected.view(2, 6)[group.rank])

# A pickle in place of JSON.
executed = sys.modules["ranks_test"] = type(sys)("ranks_test")
if group.rank == 1:
    pickle.loads(pickle.dumps(Command()))
    assert executed.executed
    with contextlib.suppress(Exception):
        dist.all_gather_object([None, None], Command())
else:
    try:
        group.all_gather("text")
    except Stop as e:
        assert "a message is no JSON" in str(e), e
    else:
        sys.exit("the pickle is not refused")
    assert not hasattr(executed, "executed")
dist.barrier()
group.close(0)
