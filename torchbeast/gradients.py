"""Gradients: all that happens between a loss and the clipping of its gradients."""

import torch

from torchbeast import ranks
from torchbeast.environment import leaves, map_structure

SLICE_BYTES = 96 * 4 * 84 * 84


def set_gradients(parameters, loss, batch, reduction="sum"):
    """Sets the parameters' grad to the gradients of a batch's loss. Returns the loss's
    statistics, {name: tensor []}.

    loss:      function of a batch [T + 1, B, ...] -> (tensor [], {name: tensor []})
    reduction: what loss and statistics are over T and B, "sum" or "mean" (over real
               transitions, those that do not lead to a `done`)

    On a CPU loss is called for a few of the rollouts at a time, slice after slice. With
    several learners the batch is that of all ranks together, and so are its gradients
    and statistics: this is where they are summed.
    """
    for parameter in parameters:
        parameter.grad = None
    sums = {}
    for part, weight in slices(batch, reduction):
        value, statistics = loss(part)
        (weight * value).backward()
        for name, x in statistics.items():
            x = torch.as_tensor(x).detach()
            sums[name] = sums.get(name, 0) + weight * x
    if ranks.current.num > 1:
        num_real = (~batch["done"][1:]).sum() if reduction == "mean" else None
        sums = sum_over_ranks(parameters, sums, num_real)
    return sums


@torch.no_grad()
def sum_over_ranks(parameters, statistics, weight=None):
    """Replaces the parameters' gradients, and returns the statistics, {name: tensor
    []}, by their sums over all ranks, or by their means with these weights.

    Notes in ranks.current.faulty which ranks' statistics are not finite.
    """
    group = ranks.current
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [parameter.grad for parameter in parameters]
    device = grads[0].device
    tensors = [x.to(device).float() for x in (*grads, *statistics.values())]
    finite = [x.isfinite() for x in tensors[len(grads) :]]
    faulty = torch.zeros(group.num, device=device)
    if finite:
        faulty[group.rank] = (~torch.stack(finite)).any()
    if weight is not None:
        tensors = [weight * x for x in tensors]
    total = torch.as_tensor(1.0 if weight is None else weight, device=device).float()
    # One message for all of them.
    tensors += [faulty, total]
    flat = torch.cat([x.reshape(-1) for x in tensors])
    group.sum(flat)
    sums = flat.split([x.numel() for x in tensors])
    sums = [x.view(y.shape) for x, y in zip(sums, tensors)]
    *sums, group.faulty, total = sums
    if weight is not None:
        sums = [x / total.clamp(min=1) for x in sums]
    for grad, x in zip(grads, sums):
        grad.copy_(x)
    return dict(zip(statistics, sums[len(grads) :]))


def slices(batch, reduction="sum"):
    """Cuts a batch [T + 1, B, ...] along B into parts. Yields (part, its weight in the
    batch's loss).

    On a CPU each part has about SLICE_BYTES of observations, which are 96 of Atari's:
    what the network computes from them stays in the cache and takes a fraction of the
    memory. On a GPU there is one part.
    """
    done = batch["done"]
    size = B = done.shape[1]
    if not done.is_cuda:
        num_bytes = sum(x.nbytes for _, x in leaves(batch["observation"]))
        size = max(1, int(B / max(1, num_bytes / SLICE_BYTES)))
    num_real = (~done[1:]).sum().clamp(min=1)
    for i in range(0, B, size):
        part = map_structure(lambda x, i=i: x[:, i : i + size], batch)
        weight = 1
        if reduction == "mean":
            weight = (~part["done"][1:]).sum() / num_real
        yield part, weight
