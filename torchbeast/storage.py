"""What a replay is made of: memory for each tensor of its rollouts. Frames of stacked
images are kept once.

L is the number of steps of a rollout, W that of a sample, B that of samples or rollouts
in a batch.
"""

import math

import numpy as np
import torch

from torchbeast import devices, machine, ranks
from torchbeast.messages import BadInput
from torchbeast.nests import leaves, map_structure


class Store:
    """A _Tensor or _Frames for each tensor of a rollout. names: of a saved Store's
    arrays, whose kinds are taken."""

    def __init__(self, rollouts, num, num_bytes, names):
        paths = iter([path for path, _ in leaves(rollouts)])

        def kind_of(x):
            path = next(paths)
            if f"{path}/data" in names:
                return _Frames if f"{path}/begins" in names else _Tensor
            return _kind(x)

        kinds = map_structure(kind_of, rollouts)
        needed = num_bytes + num * sum(
            kind.nbytes(x) for (_, kind), (_, x) in zip(leaves(kinds), leaves(rollouts))
        )
        # All learners of a host take theirs at the same time.
        available = machine.available_memory_bytes() // ranks.current.num_here
        self.device, kind = rollouts["done"].device, "memory"
        if self.device.type != "cpu":
            available, _ = devices.backend(self.device).mem_get_info(self.device)
            available = available * 4 // 5  # Updates and graphs need the rest.
            kind = f"{self.device}'s memory"
        if needed > available:
            raise BadInput(
                f"--replay_size: {num:,} rollouts need {needed:,} bytes of {kind}, "
                f"{available:,} are available: use {0.9 * available / needed:.2g} of "
                "this size or less"
            )
        self._left = available - needed
        self._tensors = map_structure(lambda kind, x: kind(x, num), kinds, rollouts)

    def write(self, slots, rollouts):
        real = rollouts.get("mask", torch.ones_like(rollouts["done"]))
        map_structure(lambda t, x: t.write(slots, x, real), self._tensors, rollouts)
        beside = sum(tensor.num_bytes_beside for _, tensor in leaves(self._tensors))
        if beside > self._left:
            raise BadInput(
                f"--replay_size: images that are no longer stacks of the last frames "
                f"take {beside:,} bytes of memory, {self._left:,} were left for them: "
                "use a smaller size"
            )

    def arrays(self, size):
        """Returns {name: array} of the first `size` slots."""
        return {
            f"{path}/{name}": x
            for path, tensor in leaves(self._tensors)
            for name, x in tensor.arrays(size).items()
        }

    def take_beside(self, arrays):
        """Takes what is kept beside out of arrays() that were read."""
        for path, tensor in leaves(self._tensors):
            tensor.take_beside({k: arrays[f"{path}/{k}"] for k in tensor.arrays(0)})

    def read(self, slots, starts, num_steps, device):
        """Returns samples on the device. Where they need not be copied to it the next
        ones take their place."""
        length = len(self._tensors["done"])
        at = torch.from_numpy(np.stack([slots, starts]))
        slots, starts = devices.send_late(at, self.device)
        steps = torch.arange(num_steps, device=self.device)[:, None]
        times, pin = starts + steps, device.type != self.device.type  # [W, B]
        after = times >= length

        def read(tensor):  # One time less of what act() returned.
            at = times if len(tensor) == length else times[:-1]
            return tensor.read(at, slots, pin)

        tensors = dict(self._tensors)
        core_state = tensors.pop("core_state")
        batch = map_structure(read, tensors)
        batch["done"] |= after
        batch["core_state"] = map_structure(
            lambda tensor: tensor.first(slots, pin), core_state
        )
        return devices.to_device(batch, device) if pin else batch


class _Tensor:
    """The same tensor, [L, B, ...], of all rollouts."""

    num_bytes_beside = 0  # What is not in nbytes().

    def __init__(self, x, num):
        self._data = x.new_empty(num, len(x), *x.shape[2:])
        self._length = len(x)
        self._rows = self._data.flatten(0, 1)  # One for each step.
        self._taken = None

    @staticmethod
    def nbytes(x):
        return x[:, :1].numel() * x.element_size()

    def __len__(self):
        return self._length

    def arrays(self, size):
        return {"data": self._data[:size].numpy()}

    def take_beside(self, arrays):
        pass

    def write(self, slots, x, real):
        """Takes x [L, B, ...] into these slots. real: [L, B] bool, no padding."""
        self._data[slots] = x.transpose(0, 1)

    def read(self, times, slots, pin):
        """Returns [W, B, ...], if `pin` in page-locked memory. times: [W, B],
        consecutive, slots: [B]."""
        rows = slots * self._data.shape[1] + times.clamp(max=self._length - 1)
        return self._take(rows.reshape(-1), pin).unflatten(0, times.shape)

    def _take(self, rows, pin):
        # Into the same memory again: new memory of this size would cost more than what
        # is copied into it.
        if self._taken is None or len(self._taken) != len(rows):
            shape = len(rows), *self._rows.shape[1:]
            self._taken = self._rows.new_empty(shape, pin_memory=pin)
        return torch.index_select(self._rows, 0, rows, out=self._taken)

    def first(self, slots, pin):
        x = self._data[slots].transpose(0, 1)
        return x.pin_memory() if pin else x


class _Frames(_Tensor):
    """Images that are stacks of the last k frames, oldest first, [L, B, k, ...], of
    which each frame is kept once: k - 1 before the first step, and then one of each.

    Where frames are all zero before the newest, as they are when a game begins, the
    stack has not moved on, but begins anew. Stacks that are neither are kept whole.
    """

    def __init__(self, x, num):
        L, _, self._k, *shape = x.shape
        k, size = self._k, math.prod(shape)
        self._data = x.new_empty(num, k - 1 + L, *shape)
        self._begins = x.new_empty(num, L, dtype=torch.bool)
        self._whole, self._num_whole = {}, 0  # {slot: {t: stack}}, and how many.
        self._length, self._taken = L, None
        # A row is a stack, and begins a frame after the one before.
        num_rows = num * (k - 1 + L) - (k - 1)
        self._rows = self._data.as_strided((num_rows, k * size), (size, 1))

    @staticmethod
    def nbytes(x):
        k = x.shape[2]
        return x[:, :1, :1].numel() + (k - 1) * x[:1, :1, :1].numel() + len(x)

    @property
    def num_bytes_beside(self):
        return self._num_whole * self._rows[:1].numel()

    @staticmethod
    def are_stacks(x):
        """Whether most of x, [L, B, k, ...], are stacks of frames that move on. Images
        that stay as they are say nothing about it."""
        begins, moved_on = _Frames._compare(x)
        changed = (x[1:] != x[:-1]).flatten(2).any(2)
        return moved_on[changed & ~begins[1:]].float().mean() > 0.5

    @staticmethod
    def _compare(x):
        """Returns which stacks have nothing before their newest frame, [L, B] bool, and
        which have moved on from the one before, [L - 1, B] bool."""
        x = x.flatten(3)
        if x.shape[3] % 8 == 0 and x.is_contiguous():
            x = x.view(torch.int64)  # Fewer numbers to compare.
        begins = (x[:, :, :-1] == 0).flatten(2).all(2)
        return begins, (x[1:, :, :-1] == x[:-1, :, 1:]).flatten(2).all(2)

    def arrays(self, size):
        whole = [(s, t) for s, stacks in self._whole.items() for t in stacks]
        stacks = [self._whole[s][t].numpy() for s, t in whole]
        return {
            **super().arrays(size),
            "begins": self._begins[:size].numpy(),
            "whole_at": np.array(whole, np.int64).reshape(-1, 2),
            "whole": np.array(stacks, np.uint8),
        }

    def take_beside(self, arrays):
        for (slot, t), stack in zip(arrays["whole_at"].tolist(), arrays["whole"]):
            self._whole.setdefault(slot, {})[t] = torch.from_numpy(stack)
        self._num_whole = len(arrays["whole"])

    def write(self, slots, x, real):
        begins, moved_on = self._compare(x)
        begins[0] = False
        self._data[slots, : self._k - 1] = x[0, :, :-1]
        self._data[slots, self._k - 1 :] = x[:, :, -1].transpose(0, 1)
        self._begins[slots] = begins.transpose(0, 1)
        for slot in range(slots.start, slots.stop):
            self._num_whole -= len(self._whole.pop(slot, ()))
        others = ~(moved_on | begins[1:]) & real[1:]  # Index t is about step t + 1.
        for t, b in others.nonzero().tolist():
            # Frames of what was before are in the next ones' stacks, too.
            whole = self._whole.setdefault(slots.start + b, {})
            before = len(whole)
            for i in range(t + 1, min(t + self._k, self._length)):
                whole[i] = x[i, b].clone()
            self._num_whole += len(whole) - before

    def read(self, times, slots, pin):
        k, times = self._k, times.clamp(max=self._length - 1)
        rows = (slots * self._data.shape[1] + times).reshape(-1)
        stacks = self._take(rows, pin)
        stacks = stacks.view(*times.shape, k, *self._data.shape[2:])
        # The number of frames since the stack began, at most k.
        since = torch.full_like(times, k)
        for i in reversed(range(k - 1)):
            begins = self._begins[slots, (times - i).clamp(min=0)]
            since.masked_fill_(begins, i + 1)
        if since.device.type == "cpu":
            for t, b in (since < k).nonzero().tolist():
                stacks[t, b, : k - since[t, b]] = 0
        else:  # Which would wait for the numbers.
            before = torch.arange(k, device=since.device) < k - since[..., None]
            before = before.reshape(*before.shape, *(1 for _ in stacks.shape[3:]))
            stacks.masked_fill_(before, 0)
        for b, slot in enumerate(slots.tolist() if self._whole else ()):
            for t, stack in self._whole.get(slot, {}).items():
                stacks[times[:, b] == t, b] = stack
        return stacks


def _kind(x):
    """Finds what keeps a tensor [L, B, ...]."""
    could_be = x.dtype == torch.uint8 and x.dim() >= 5 and x.shape[2] > 1
    return _Frames if could_be and _Frames.are_stacks(x) else _Tensor
