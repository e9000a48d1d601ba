"""Replay: what was seen before is learned from again.

A Replay holds the newest rollouts of its process in a ring and draws samples from them,
in proportion to priorities: a whole rollout with its recurrent state (R2D2), or a few
steps from anywhere in one (DQN, SAC).

L is the number of steps of a rollout, W that of a sample, B that of samples or rollouts
in a batch.
"""

import math

import numpy as np
import torch

from torchbeast import devices, ranks, replay_files, storage
from torchbeast.flags import number
from torchbeast.messages import BadInput, log
from torchbeast.nests import map_structure
from torchbeast.process import signalled


def add_size_flag(group, size):
    # fmt: off
    group.add_argument("--replay_size", type=number(int, 1, 10**12), default=size,
                       metavar="N", help="newest steps to keep, of each learner "
                       "(default: %(default)s)")
    group.add_argument("--save_replay", action="store_true",
                       help="write the replay beside each checkpoint, to resume with")
    # fmt: on


def add_flags(group, size, ratio, start, batch):
    add_size_flag(group, size)
    # fmt: off
    group.add_argument("--replay_start", type=number(int, 0), metavar="N",
                       default=start if isinstance(start, int) else None,
                       help="steps before the first is learned from "
                       f"(default: {start})")
    group.add_argument("--replay_ratio", type=number(float, above=0), default=ratio,
                       metavar="X", help="times that a step is learned from, on "
                       "average (default: %(default)s)")
    group.add_argument("--replay_batch_size", type=number(int, 1, 10**6),
                       default=batch if isinstance(batch, int) else None, metavar="B",
                       help="samples of a gradient step, of all learners together "
                       f"(default: {batch})")
    group.add_argument("--replay_device", metavar="DEVICE", default="cpu",
                       help="keep the replay on cpu, or on the learner's GPU, such as "
                       "cuda (default: %(default)s)")
    # fmt: on


def add_priority_flags(group):
    # fmt: off
    group.add_argument("--priority_exponent", type=number(float, 0, 10), default=0.6,
                       metavar="ALPHA", help="samples are drawn in proportion to their "
                       "error to this power (default: %(default)s)")
    group.add_argument("--importance_exponent", nargs=2, type=number(float, 0, 1),
                       default=(0.4, 0.4), metavar=("FIRST", "LAST"),
                       help="their loss is divided by their probability to this power, "
                       "at the first and at the last of --total_steps (default: 0.4 "
                       "0.4)")
    # fmt: on


def make(flags, num_starts, num_steps, device):
    """Makes (a Replay, its Credit). Raises BadInput if --replay_size is smaller than a
    batch, or if batches cannot be shared by the learners."""
    replay_files.check(flags)
    on_device = flags.replay_device != "cpu"
    if on_device and flags.replay_device not in (device.type, str(device)):
        what = f"--replay_device {flags.replay_device}: expected cpu or the learner's"
        raise BadInput(f"{what} device, {device}")
    if on_device and flags.save_replay:
        raise BadInput("--save_replay: expected --replay_device cpu")
    if flags.replay_start >= flags.total_steps:
        log.warning(
            f"--replay_start {flags.replay_start:,}: the run, of "
            f"{flags.total_steps:,} steps, ends before it learns"
        )
    size = max(flags.batch_size, flags.replay_start // flags.unroll_length)
    size = math.ceil(size / ranks.current.num)
    num_rollouts = flags.replay_size // flags.unroll_length
    if num_rollouts < size:
        raise BadInput(
            f"--replay_size {flags.replay_size} is too small: expected "
            f"{size * flags.unroll_length} or more, this learner's part of a batch "
            f"(--batch_size times --unroll_length) and of --replay_start"
        )
    if flags.replay_batch_size % ranks.current.num:
        raise BadInput(
            f"--replay_batch_size {flags.replay_batch_size} cannot be shared by "
            f"{ranks.current.num} learners: expected a multiple of that"
        )
    ring = Replay(num_rollouts, num_starts, num_steps, device, on_device)
    return ring, Credit(ring, flags.replay_ratio, flags.replay_start)


class SumTree:
    """Numbers >= 0, [size] float64, and their sums, to draw indices in proportion to
    them. Each method takes O(log size) operations on whole arrays."""

    def __init__(self, size):
        self._first = 1 << (size - 1).bit_length()  # Leaf; the root is node 1.
        self._sums = np.zeros(2 * self._first)

    @staticmethod
    def nbytes(size):
        return 16 << (size - 1).bit_length()

    @property
    def total(self):
        return self._sums[1]

    def __getitem__(self, indices):
        return self._sums[self._first + indices]

    def __setitem__(self, indices, values):
        """Where an index occurs more than once, its last value counts."""
        nodes = self._first + indices
        self._sums[nodes] = values
        while nodes[0] > 1:
            nodes = nodes >> 1
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def find(self, mass):
        """Returns for each mass [n], 0 <= mass < total, the index at which the sum of
        the numbers up to it, itself included, first is larger. Its number is not 0."""
        nodes = np.ones(len(mass), np.int64)
        while nodes[0] < self._first:
            nodes = 2 * nodes
            left, right = self._sums[nodes], self._sums[nodes + 1]
            go_right = (mass >= left) & (right > 0)  # Sums are rounded.
            mass = np.where(go_right, mass - left, mass)
            nodes += go_right
        return nodes - self._first


class Replay:
    """A ring of rollouts: nests of tensors [L, B, ...], [L - 1, B, ...] for what an
    agent's act() returned, and [., B, ...] for core_state.

    num_rollouts: to keep; the oldest make room.
    num_starts:   samples of a rollout. They begin at its steps 0, 1, ...
    num_steps:    W, of a sample. What is after its rollout's end repeats the last step,
                  with `done`, so that no transition leads there.
    device:       on which samples are.
    on_device:    whether the ring itself is there, too.

    Not thread-safe. The first add() takes the memory. A sample's number is the slot of
    its rollout times num_starts, and its first step.
    """

    def __init__(self, num_rollouts, num_starts, num_steps, device, on_device=False):
        self.num_rollouts = num_rollouts
        self.num_starts = num_starts
        self.num_steps = num_steps
        self.device, self.on_device = device, on_device
        self.size = 0  # Rollouts that are there.
        self.added = 0  # Rollouts that ever were.
        self._tree = self._added_at = self._store = self._newest = None
        self._late = None  # (items, their priorities, the event that these wait for).
        self.saved = None  # (path, header) of a file that the first add() reads.

    def add(self, rollouts):
        """Takes copies of rollouts [L, B, ...]. Returns the numbers of their samples,
        [num_starts, B], which are drawn once they have priorities.

        Raises BadInput if there is not memory enough for a full ring."""
        self._set_late_ones()
        if not self.on_device:
            rollouts = devices.to_host(rollouts, self.device)
        if self._store is None:
            self._begin(rollouts)
        B = rollouts["done"].shape[1]
        slots = (self.added + np.arange(B)) % self.num_rollouts
        wraps = self.num_rollouts - slots[0]  # So many go to the end of the ring.
        for begin, end in ((0, wraps), (wraps, B)):
            if part := slots[begin:end].size:
                at = slice(slots[begin], slots[begin] + part)
                self._store.write(
                    at, map_structure(lambda x, i=begin, j=end: x[:, i:j], rollouts)
                )
        self._added_at[slots] = self.added + np.arange(B)
        self.added += B
        self.size = min(self.num_rollouts, self.size + B)
        items = slots * self.num_starts + np.arange(self.num_starts)[:, None]
        self._tree[items.reshape(-1)] = 0  # Not the priorities of those before them.
        self._newest = items
        return items

    def _begin(self, rollouts):
        """Takes the memory, and what a file has, if there is one."""
        num, num_items = self.num_rollouts, self.num_rollouts * self.num_starts
        (path, header), self.saved = self.saved or (None, {}), None
        num_bytes = 8 * num + SumTree.nbytes(num_items)
        names = header.get("arrays", {})
        self._store = storage.Store(rollouts, num, num_bytes, names)
        self._tree = SumTree(num_items)
        self._added_at = np.zeros(num, np.int64)
        if path is not None:
            vars(self).update({k: header["counters"][k] for k in self.counters()})
            arrays = self.arrays()
            beside = "/whole", "/whole_at"  # Of _Frames: their sizes are the file's.
            arrays.update({name: None for name in arrays if name.endswith(beside)})
            arrays = replay_files.read(path, header, arrays)
            self._store.take_beside(arrays)
            self._tree[np.arange(len(arrays["priorities"]))] = arrays["priorities"]

    def counters(self):
        """Returns the numbers that a file has."""
        return {k: vars(self)[k] for k in ("num_rollouts", "size", "added")}

    def arrays(self):
        """Returns {name: array} of all that is in the ring."""
        if self._store is None:
            return {}
        self._set_late_ones()
        num_items = self.size * self.num_starts
        return {
            "priorities": self._tree[np.arange(num_items)],
            "added_at": self._added_at[: self.size],
            **self._store.arrays(self.size),
        }

    def set_priorities(self, items, priorities, late=False):
        """items: any shape; priorities: the same, >= 0; 0 is never drawn.

        late: they count once others are set, rollouts are added or the ring is saved: a
            batch that is drawn before need not wait for the GPU that computes them."""
        self._set_late_ones()
        priorities, event = torch.as_tensor(priorities), None
        if priorities.device.type != "cpu":
            priorities = priorities.to("cpu", non_blocking=True)
            event = devices.record_event(self.device)
        self._late = items, priorities, event
        if not late:
            self._set_late_ones()

    def _set_late_ones(self):
        if self._late is None:
            return
        (items, priorities, event), self._late = self._late, None
        if event is not None:
            event.synchronize()
        priorities = priorities.reshape(-1).double().numpy()
        if not (np.isfinite(priorities) & (priorities >= 0)).all():
            raise ValueError("priorities are not finite, or negative: expected >= 0")
        self._tree[np.asarray(items).reshape(-1)] = priorities

    def sample(self, num, importance_exponent=0, batches=1):
        """Draws samples, each with a probability p of its priority's share of the sum.

        Returns (batch [W, batches * num, ...] on the device, the samples' numbers), one
        batch after the other; each is drawn by itself. An entry "importance", as long,
        is p ** -importance_exponent over its maximum of all these and of all ranks:
        what is drawn more often than others is to count less each time. What is drawn
        next overwrites all that was not copied to a GPU.
        Raises RuntimeError if there is nothing to draw."""
        if not self.drawable:
            raise RuntimeError("a replay was sampled in which nothing has a priority")
        # One draw from each of num equal shares of the sum: an item of two shares or
        # more is always drawn.
        random = torch.rand(batches, num, dtype=torch.float64).numpy()
        mass = (np.arange(num) + random).reshape(-1) / num
        items = self._tree.find(mass * self._tree.total)
        batch = self.read(items)
        p = torch.as_tensor(self._tree[items] / self._tree.total)
        importance = devices.send_late(p**-importance_exponent, self.device)
        if importance_exponent > 0:
            importance = importance / ranks.current.max(importance.max())
        return {**batch, "importance": importance[None].float()}, items

    @property
    def drawable(self):
        """Whether a sample has a priority."""
        return self._tree is not None and self._tree.total > 0

    @property
    def num_new(self):
        """How many samples of the rollouts that were added last have priorities."""
        return int((self._tree[self._newest] > 0).sum())

    def read(self, items):
        """Returns the samples of these numbers, [W, num, ...] on the device."""
        slots, starts = np.divmod(items, self.num_starts)
        return self._store.read(slots, starts, self.num_steps, self.device)

    def age(self, items):
        """Returns the mean number of rollouts that all learners added since these
        samples'."""
        age = np.mean(self.added - 1 - self._added_at[items // self.num_starts])
        return float(age) * ranks.current.num


class Credit:
    """Keeps the replay ratio: how often a step is learned from, on average.

    ring:       the Replay
    ratio:      steps that are learned from for each new one
    num_before: new steps before the first is learned from

    Steps are those of all learners. For the ratio those count that samples can be of:
    no padding and, if each is of one transition, no step that none leads from. Learning
    takes place while the next steps are made; who makes them waits for it only when it
    would get too far ahead, because batches are then not taken.
    """

    def __init__(self, ring, ratio, num_before):
        self.ring = ring
        self.ratio = ratio
        self.num_before = num_before
        self.new = self.learned = 0

    def updates(self, batch, unroll_length, num_learned):
        """Yields once for each update that is due after a batch of new rollouts, if
        each learns from num_learned steps: on all ranks as often. With one rank, ends
        after a signal: the batch counts, and a replay that is saved has what is due."""
        ring, num_steps = self.ring, unroll_length * batch["done"].shape[1]
        num_new = ring.num_new * (unroll_length // ring.num_starts)
        counts = num_steps, num_new, int(ring.drawable)
        padded = "mask" in batch and ring.num_starts == 1
        if padded or ranks.current.num > 1:  # Else a GPU is not waited for.
            zero = torch.zeros_like(batch["done"][0, 0], dtype=torch.int64)
            sums = torch.stack([zero + x for x in counts])
            if padded:
                sums[1] = batch["mask"][1:].sum()
            ranks.current.sum(sums)
            counts = sums.tolist()
        num_steps, num_new, num_drawable = counts
        self.num_before -= num_steps
        if self.num_before > 0:
            return
        self.new += num_new
        if num_drawable < ranks.current.num:
            return  # No transition is in a ring yet: what is due is made later.
        while self.learned + num_learned <= self.ratio * self.new:
            if ranks.current.num == 1 and signalled():
                return  # There may be many updates.
            self.learned += num_learned
            yield

    def num_due(self, num_learned):
        """Returns how many of these updates are yet to come."""
        return int((self.ratio * self.new - self.learned) / num_learned)

    def leave_out_padding(self, batch):
        """Counts no padding of the whole rollouts that an update learns from."""
        if "mask" in batch and self.ring.num_starts == 1:
            padding = (~batch["mask"][1:]).sum()
            ranks.current.sum(padding)
            self.learned -= int(padding)

    def counters(self):
        """Returns the numbers that a file has. owed: the steps that are to be learned
        from before the next rollouts."""
        owed = self.ratio * self.new - self.learned
        return {k: vars(self)[k] for k in ("new", "num_before")} | {"owed": owed}

    def resume(self, counters):
        """Goes on with what a file has, None without one."""
        if counters is None:
            what = "the replay is empty: learning goes on after %d new steps"
            log.info(what, self.num_before)
            return
        self.new, self.num_before = counters["new"], counters["num_before"]
        self.learned = self.ratio * self.new - counters["owed"]

    @property
    def measured(self):
        return self.learned / max(1, self.new)


class Mixer:
    """Adds replayed rollouts to batches of new ones: --replay_fraction."""

    def __init__(self, flags, device):
        replay_files.check(flags)
        share = flags.batch_size // ranks.current.num
        fraction = flags.replay_fraction
        self.num = round(share * fraction / (1 - fraction))
        num_rollouts = flags.replay_size // flags.unroll_length
        if self.num == 0 or num_rollouts < share:
            raise BadInput(
                f"--replay_fraction {fraction} with --batch_size {flags.batch_size} "
                f"and --replay_size {flags.replay_size}: expected that at least one of "
                "a batch's rollouts is replayed, and that the replay holds a batch"
            )
        self.ring = Replay(num_rollouts, 1, flags.unroll_length + 1, device)

    def mix(self, batch):
        """Returns (the batch [T + 1, B, ...] with replayed rollouts behind its own,
        what is logged)."""
        items = self.ring.add(batch)
        self.ring.set_priorities(items, np.ones(items.shape))
        replayed, items = self.ring.sample(self.num)
        mixed = map_structure(lambda x, y: torch.cat([x, y], 1), batch, replayed)
        T = len(batch["done"]) - 1
        size, age = self.ring.size * T, self.ring.age(items) * T
        return mixed, {"replay_size": size, "replay_age": age}

    def counters(self):
        return {}

    def resume(self, counters):
        if counters is None:
            log.info("the replay is empty: at first it has new rollouts alone")
