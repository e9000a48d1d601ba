"""Several learners: this process among those that torchrun started.

    torchrun --standalone --nproc-per-node 4 -m polybeast --env PongNoFrameskip-v4

Each rank is a whole program with actors or streams of its own; only gradients cross.
--batch_size and --total_steps are of all ranks together. Without torchrun there is one
rank, and nothing in here does anything.

Before each update the ranks vote, so that all make it or none does: a rank that has no
batch holds the others up, for days if need be; a signal or an error of one ends all of
them at the same update; and a rank that is gone is noticed, because each votes at least
once a second, whatever its learner is doing. With a vote a rank says why it ends, or
why it has no batch: torchrun and its store are needed only at the start (torchrun.py).
"""

import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import sys
import threading
import time
import zlib

import torch
import torch.distributed as dist

from torchbeast.messages import BadInput, Stop, Throttle, first_line, log

VOTE_TIMEOUT_S = 50  # After which a rank that does not vote is gone.
IDLE_S = 1  # A rank that waits for nothing votes this often.
PATIENCE_S = 10  # After so long is logged which rank holds the others up.
MAX_MESSAGE_BYTES = 2**28
READY, DONE, LEAVING, SAVE, ASK, STATISTICS = range(6)  # What a rank votes.


class Ranks:
    """This process's rank, the number of ranks, and what they agree on.

    One thread at a time, the one that learns, calls wait(), update(), sum(), compare(),
    all_gather() and finish(), in the same order on each rank. Any thread may call
    check() and leave().
    """

    def __init__(self, rank=0, num=1, local_rank=0):
        self.rank = rank
        self.num = num
        self.local_rank = local_rank
        self.hosts = [platform.node()]  # By rank.
        self.num_here = 1  # Ranks on this host.
        self.lost = False  # Some rank is gone: no thread of ours may be waited for,
        self.stuck = False  # nor our GPU, which waits for gradients of that rank.
        self.faulty = None  # [num]: whose losses were the first not to be finite.
        self.statistics = {}  # {name: shape}, of the last update.
        self.seconds = {}  # Where the time went, for the log.
        self.describe = lambda: ""  # Says why there are no rollouts.
        self._end = None  # The Stop that all have agreed on.
        self._leaving = None  # The exception for which this rank leaves.
        self._over = num == 1  # There are no more votes.
        self._updating = False
        self._nccl = None
        self._lock = threading.RLock()  # For a vote, and for _end.
        self._parent = os.getppid()  # Torchrun.
        self._voted_at = time.monotonic()
        self._held_up = {}  # {rank: (since when, Throttle)}, on rank 0.
        self._ask = []  # Ranks that are to say why they hold the others up.

    # Beginning and end.

    def connect(self, store):
        """Connects the ranks. store: one in which nothing else is."""
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.num
        )
        timeout = datetime.timedelta(seconds=VOTE_TIMEOUT_S)
        self._votes = dist.new_group(backend="gloo", timeout=timeout)
        self.seconds = {"vote": 0.0, "reduction": 0.0}

    def share(self, batch_size):
        """Returns this rank's share of the batch of all ranks."""
        return batch_size // self.num

    def use_device(self, device):
        """Says on which device this rank learns. Raises BadInput if the ranks' devices
        do not fit together."""
        if self.num == 1:
            return
        uuid = None
        if device.type == "cuda":
            uuid = str(torch.cuda.get_device_properties(device).uuid)
        self.agree({"the learner's device": device.type})
        if device.type == "cuda":
            if len(set(self.all_gather(uuid))) == self.num:
                self._nccl = dist.new_group(backend="nccl")
                # Connects them, for which NCCL needs torchrun's store.
                self.sum(torch.zeros(1, device=device))
            else:
                log.info("ranks share a GPU: their gradients go through the CPU")

    def leave(self, error):
        """Has all ranks end at their next vote, because of an exception of this
        one."""
        if self._leaving is None and self._end is None and not self._over:
            self._leaving = error

    def close(self, exit_code):
        """Ends this process, after everything else, if it is one of several ranks.
        Gloo's threads may wait for what never comes, and gloo was seen to abort in its
        destructors."""
        if self.num > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)

    @contextlib.contextmanager
    def voting(self, signals):
        """A context in which the ranks vote. signals: process.Signals; its check()
        raises what the ranks have agreed on."""
        if self._over:
            yield
            return
        self._signals = signals
        signals.check = self.check
        thread = threading.Thread(target=self._keep_voting, name="votes", daemon=True)
        thread.start()
        try:
            yield
            self.leave(Stop("ended"))  # If it was not to the last step.
        except BaseException as e:
            self.leave(e)
            raise
        finally:
            thread.join()

    # Votes.

    def check(self):
        """Raises Stop if the ranks have agreed to end."""
        if self._end is not None:
            raise self._end

    def wait(self, save_is_due, save):
        """Waits until all ranks have a batch, and calls save() on all of them if
        save_is_due() on rank 0. Raises Stop if the run ends instead."""
        due = save_is_due()
        if self.num > 1:
            start = time.monotonic()
            due = self._vote_until_all(READY, *[SAVE] * due)[0, SAVE]
            self.seconds["vote"] += time.monotonic() - start
        if due:
            save()

    @contextlib.contextmanager
    def update(self):
        """A context for the update for which wait() has waited."""
        self._updating = True
        try:
            yield
        except BaseException:
            # The others may wait for gradients of this rank that do not come.
            self.lost = self.num > 1
            raise
        self._updating = False

    def finish(self):
        """Ends the votes, after the last update of all ranks."""
        with self._lock:
            if not self._over:
                self._vote_until_all(DONE)
                self._over = True

    def _vote_until_all(self, *mine):
        """Votes until all ranks have voted for the first of these. Returns the last
        votes."""
        votes = self._vote(*mine)
        while not votes[:, mine[0]].all():
            votes = self._vote(*mine)
        if (votes[:, STATISTICS] != votes[0, STATISTICS]).any():
            shapes = {f"the statistic {k}": x for k, x in self.statistics.items()}
            self.agree(shapes, Unlike)
        return votes

    def _vote(self, *mine):
        """Takes part in one vote. Returns what the ranks voted, [num, 6] int64. Raises
        Stop if the run ends."""
        with self._lock:
            self.check()
            leaving = self._leaving or self._signals.stop()
            if leaving is not None:
                mine = (LEAVING,)
            votes = torch.zeros(self.num, 6, dtype=torch.int64)
            votes[self.rank, list(mine) + [ASK] * bool(self._ask)] = 1
            shapes = json.dumps(self.statistics, sort_keys=True)
            votes[self.rank, STATISTICS] = zlib.crc32(shapes.encode())
            self._all(dist.all_reduce, votes, group=self._votes)
            texts = []
            if votes[:, LEAVING].any():
                mine = leaving and (self.lost, *reason(leaving))
                reasons = self._gather(mine, self._votes)
                rank = int(votes[:, LEAVING].argmax())
                _, text, *how = reasons[rank]
                self._end = Stop(f"rank {rank}: {text}", *how)
                if any(x[0] for x in reasons if x):
                    self._give_up()
                raise self._end
            if votes[0, ASK]:
                texts = self._gather(self.describe(), self._votes)
            self._voted_at = time.monotonic()
            if self.rank == 0:
                self._watch(votes[:, READY].tolist(), texts)
            return votes

    def _keep_voting(self):
        """Votes in place of a learner that is busy or has no batch."""
        while not self._over and self._end is None:
            time.sleep(IDLE_S / 5)
            if os.getppid() != self._parent:
                self.leave(Stop("torchrun is gone"))
            if self._lock.acquire(blocking=False):
                try:
                    idle = time.monotonic() - self._voted_at > IDLE_S
                    if idle and not self._over:
                        self._vote()
                except Stop:
                    pass
                finally:
                    self._lock.release()

    def _watch(self, ready, texts):
        """Logs which ranks hold the others up. texts: what they say to that, if they
        were asked."""
        for rank in self._ask:
            why = texts[rank] and f": {texts[rank]}"
            log.warning("rank %d has no rollouts%s", rank, why)
        self._ask = []
        now = time.monotonic()
        for rank in range(self.num):
            since, reminder = self._held_up.get(rank, (now, Throttle()))
            late = now > since + PATIENCE_S
            if ready[rank] or not any(ready):
                if late:
                    log.info("rank %d has rollouts again", rank)
                self._held_up.pop(rank, None)
                continue
            self._held_up[rank] = since, reminder
            if late and reminder.count(rank, "")[1]:
                self._ask.append(rank)

    def _lose(self, error):
        """Returns the Stop of a run whose ranks cannot be reached any more."""
        with self._lock:  # A vote that is under way may say why.
            if self._end is None:
                # Gloo's place in its code, and its advice, are left out.
                what = re.sub(r"^\[\S*\] | This is .*", "", first_line(error, False))
                self._end = Stop(f"another rank is gone: {what}")
            self._give_up()
            return self._end

    def _give_up(self):
        """Has this rank end without a rank that takes part in no more updates."""
        if self._nccl is not None and self._updating:
            # NCCL waits on in the GPU, and what it has summed is not known to be whole.
            self.stuck = True
            self._end.save = False
        self.lost = True

    # Data.

    @contextlib.contextmanager
    def _reached(self):
        """A context for what all ranks do. Raises Stop if some are gone."""
        try:
            yield
        except RuntimeError as e:
            raise self._lose(e) from e

    def _all(self, operation, *args, group=None, **kwargs):
        """Runs an operation of torch.distributed in which all ranks take part. Raises
        Stop if some are gone.

        Of a rank that says nothing any more only the votes know that it is gone:
        another one may take its time here, for example to compile its network. And a
        thread that waited without end would never run this process's signal handlers.
        """
        with self._reached():
            work = operation(*args, group=group, async_op=True, **kwargs)
            while not work.is_completed():
                if group is not None and group is self._nccl:
                    time.sleep(1e-4)  # After its time-out, NCCL would end all.
                else:
                    with contextlib.suppress(RuntimeError):  # Not yet; or see below.
                        work.wait(datetime.timedelta(seconds=IDLE_S / 5))
                if self.lost:
                    self.check()
            work.wait()  # Raises what went wrong.

    def sum(self, x):
        """Replaces a tensor, [n] on the learner's device, by its sum over all ranks."""
        if self.num == 1:
            return
        start = time.monotonic()
        if self._nccl is not None or x.device.type == "cpu":
            self._all(dist.all_reduce, x, group=self._nccl)
        else:
            on_host = x.cpu()
            self._all(dist.all_reduce, on_host)
            x.copy_(on_host)
        self.seconds["reduction"] += time.monotonic() - start

    def max(self, x):
        """Returns the maximum, [], of the ranks' tensors [] on the learner's device."""
        if self.num == 1:
            return x
        numbers = x.new_zeros(self.num)
        numbers[self.rank] = x
        self.sum(numbers)
        return numbers.max()

    def all_gather(self, x):
        """Returns the ranks' data, in JSON's types; this rank's alone where others are
        gone and the run ends anyway."""
        if self.num == 1 or self.lost:
            return [x]
        ends = self._end is not None
        try:
            return self._gather(x)
        except Stop:
            if not ends:
                raise
            return [x]

    def _gather(self, x, group=None):
        """Sends JSON, and not pickle: nothing that a peer sends is executed."""
        data = json.dumps(x, default=float).encode()
        with self._reached():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num)]
            self._all(dist.all_gather, sizes, torch.tensor([len(data)]), group=group)
            size = int(max(sizes))
            if size > MAX_MESSAGE_BYTES:
                raise RuntimeError(f"a message has {size} bytes, {MAX_MESSAGE_BYTES=}")
            mine = torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)
            texts = [torch.empty_like(mine) for _ in range(self.num)]
            self._all(dist.all_gather, texts, mine, group=group)
            try:
                return [json.loads(text.numpy().tobytes()) for text in texts]
            except (ValueError, RecursionError) as e:
                raise RuntimeError(f"a message is no JSON: {e}") from e

    def broadcast(self, data):
        """Returns the bytes that rank 0 has."""
        size = torch.tensor(len(data or b""))
        self._all(dist.broadcast, size, src=0)
        x = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0:
            x = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._all(dist.broadcast, x, src=0)
        return x.numpy().tobytes()

    def agree(self, mine, error=BadInput, hint=""):
        """Raises an error if {name: x} is not the same on all ranks."""
        first, *others = self.all_gather(mine)
        for rank, theirs in enumerate(others, 1):
            for name in sorted({**first, **theirs}):
                x, expected = (d.get(name, "missing") for d in (theirs, first))
                if x != expected:
                    raise error(
                        f"{name} is {x} on rank {rank}, {expected} on rank 0: expected "
                        f"the same on all ranks{hint}"
                    )

    def compare(self, module):
        """Raises Stop if a module's parameters are not the same on all ranks."""
        if self.num == 1 or self.lost:
            return
        digest = hashlib.sha256()
        for parameter in module.parameters():
            x = parameter.detach().cpu().reshape(-1)
            digest.update(x.view(torch.uint8).numpy())  # NumPy has no bfloat16.
        hint = ": gradients of learn() were not summed (torchbeast/gradients.py)"
        self.agree({"the weights' hash": digest.hexdigest()}, Unlike, hint)


class Unlike(Stop):
    """Ends a run whose ranks do not learn alike, without a checkpoint."""

    def __init__(self, message):
        super().__init__(message, save=False)


def reason(error):
    """Returns why a rank ends because of an error, as arguments of Stop."""
    text = str(error) if isinstance(error, (Stop, BadInput)) else first_line(error)
    code = getattr(error, "exit_code", 2 if isinstance(error, BadInput) else 1)
    return text, code, getattr(error, "save", True)


current = Ranks()
