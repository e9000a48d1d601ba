"""Gradients: all that happens between a loss and the clipping of its gradients."""

import math

import torch

from torchbeast import ranks
from torchbeast.encoders import SLICE_BYTES
from torchbeast.messages import log
from torchbeast.nests import leaves, map_structure
from torchbeast.rollouts import kind

MIN_RECURRENT = 8  # Rollouts of a slice: an LSTM of fewer would take as long.
MAX_STATISTICS = 1024  # Numbers in them.
_largest = 2**62  # Rollouts of a slice that fit into the memory.


def set_gradients(parameters, loss, batch, reduction="sum"):
    """Sets the parameters' grad to the gradients of a batch's loss. Returns the loss's
    statistics, {name: tensor []}.

    loss:      function of a batch [T + 1, B, ...] -> (tensor [], {name: tensor []})
    reduction: what loss and statistics are over T and B, "sum" or "mean" (over real
               transitions, those that do not lead to a `done`)

    On a CPU, and on a GPU whose memory the batch does not fit into, loss is called for
    a few of the rollouts at a time, slice after slice. With several learners the batch
    is that of all ranks together, and so are its gradients and statistics: this is
    where they are summed.
    """
    global _largest
    parameters, sums = list(parameters), None
    while sums is None:
        try:
            sums = _sum_of_slices(parameters, loss, batch, reduction)
        except torch.OutOfMemoryError:
            B = batch["done"].shape[1]
            if min(B, _largest) == 1:
                raise
            _largest = (min(B, _largest) + 1) // 2
        if sums is None:  # Not above: the exception holds on to the slice.
            if (kind := batch["done"].device.type) != "cpu":
                getattr(torch, kind).empty_cache()
            log.info("learning from slices of %d rollouts: more do not fit", _largest)
    if ranks.current.num > 1:
        num_real = (~batch["done"][1:]).sum() if reduction == "mean" else None
        sums = sum_over_ranks(parameters, sums, num_real)
    return sums


def _sum_of_slices(parameters, loss, batch, reduction):
    for parameter in parameters:
        parameter.grad = None
    sums = {}
    for part, weight in slices(batch, reduction):
        value, statistics = checked(loss(part))
        # Products and sums that change nothing would be a GPU's work, too.
        whole = reduction == "sum" and part["done"].shape == batch["done"].shape
        (value if whole else weight * value).backward()
        for name, x in statistics.items():
            x = x.detach() if torch.is_tensor(x) else value.new_full((), x)
            sums[name] = x if whole else sums.get(name, 0) + weight * x
    return sums


def checked(result):
    """Returns what a loss function returned, (loss, statistics). Raises TypeError if it
    is something else."""
    pair = isinstance(result, (tuple, list)) and len(result) == 2
    value, statistics = result if pair else (result, None)
    if not torch.is_tensor(value) or not isinstance(statistics, dict):
        what = ", ".join(type(x).__name__ for x in (value, statistics))
        raise TypeError(f"loss() returned {what}, expected (loss, {{name: statistic}})")
    if value.shape != () or not value.requires_grad:
        expected = "expected one with a gradient, of shape []"
        raise TypeError(f"loss() returned a loss {kind(value)}, {expected}")
    return value, statistics


def means(statistics):
    """Returns the means {name: tensor []} of several gradient steps' statistics, of
    which some may lack a name."""

    def mean(xs):
        if len(xs) == 1:
            return xs[0]
        tensors = torch.is_tensor(xs[0])
        return torch.stack(xs).float().mean() if tensors else sum(xs) / len(xs)

    names = dict.fromkeys(k for x in statistics for k in x)
    return {k: mean([x[k] for x in statistics if k in x]) for k in names}


@torch.no_grad()
def sum_over_ranks(parameters, statistics, weight=None):
    """Replaces the parameters' gradients, and returns the statistics, {name: tensor
    []}, by their sums over all ranks, or by their means with these weights.

    Notes in ranks.current.faulty which ranks' statistics are not finite, and in
    ranks.current.statistics their names and shapes, which the ranks compare.
    """
    group = ranks.current
    names = sorted(statistics)
    values = [statistics[name] for name in names]
    if names:  # Else it may be a second call in this update.
        group.statistics = {name: list(statistics[name].shape) for name in names}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [parameter.grad for parameter in parameters]
    device = grads[0].device
    tensors = [x.to(device).float() for x in (*grads, *values)]
    finite = [x.isfinite() for x in tensors[len(grads) :]]
    faulty = torch.zeros(group.num, device=device)
    if finite:
        faulty[group.rank] = (~torch.stack(finite)).any()
    # Messages of different sizes would abort: all have room for the same number.
    room = MAX_STATISTICS - sum(x.numel() for x in values)
    if room < 0:
        raise ValueError(
            f"the loss has statistics of more than {MAX_STATISTICS} numbers"
        )
    tensors.append(torch.zeros(room, device=device))
    if weight is not None:
        tensors = [weight * x for x in tensors]
    total = torch.as_tensor(1.0 if weight is None else weight, device=device).float()
    # One message for all of them.
    tensors += [faulty, total]
    flat = torch.cat([x.reshape(-1) for x in tensors])
    group.sum(flat)
    sums = flat.split([x.numel() for x in tensors])
    sums = [x.view(y.shape) for x, y in zip(sums, tensors)]
    *sums, faulty, total = sums
    if group.faulty is not None:  # After a first gradient step all ranks are.
        faulty = torch.where(group.faulty.any(), group.faulty, faulty)
    group.faulty = faulty
    if weight is not None:
        sums = [x / total.clamp(min=1) for x in sums]
    for grad, x in zip(grads, sums):
        grad.copy_(x)
    sums = dict(zip(names, sums[len(grads) :]))
    return {name: sums[name] for name in statistics}  # In their own order.


def slices(batch, reduction="sum"):
    """Cuts a batch [T + 1, B, ...] along B into parts. Yields (part, its weight in the
    batch's loss).

    On a CPU each part has about SLICE_BYTES of observations, which are 96 of Atari's:
    what the network computes from them stays in the cache and takes a fraction of the
    memory. On a GPU there is one part, if it fits.
    """
    done = batch["done"]
    size = B = done.shape[1]
    if done.device.type == "cpu":
        num_bytes = sum(x.nbytes for _, x in leaves(batch["observation"]))
        # Running returns and shares of random actions are [1, B].
        states = leaves(batch.get("core_state", ()))
        least = MIN_RECURRENT if any(x.dim() > 2 for _, x in states) else 1
        size = max(least, int(B / max(1, num_bytes / SLICE_BYTES)))
    # Even ones: of a single sample, a network's BatchNorm would learn nothing.
    size = math.ceil(B / math.ceil(B / min(size, _largest)))
    num_real = (~done[1:]).sum().clamp(min=1)
    for i in range(0, B, size):
        part = map_structure(lambda x, i=i: x[:, i : i + size], batch)
        weight = 1
        if reduction == "mean":
            weight = (~part["done"][1:]).sum() / num_real
        yield part, weight
