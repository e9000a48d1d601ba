"""Several learners: this process among those that torchrun started.

    torchrun --standalone --nproc-per-node 4 -m polybeast --env PongNoFrameskip-v4

Each rank is a whole program with actors or streams of its own; only gradients cross.
--batch_size and --total_steps are of all ranks together. Without torchrun there is one
rank, and nothing in here does anything.

Before each update the ranks vote, so that all make it or none does: a rank that has no
batch holds the others up, for days if need be; a signal or an error of one ends all of
them at the same update; and a rank that is gone is noticed, because each votes at least
once a second, whatever its learner is doing.
"""

import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import secrets
import sys
import threading
import time

import torch
import torch.distributed as dist

from torchbeast import machine, seeds
from torchbeast.messages import BadInput, Stop, first_line, log

JOIN_TIMEOUT_S = 600
VOTE_TIMEOUT_S = 50  # After which a rank that does not vote is gone.
IDLE_S = 1  # A rank that waits for nothing votes this often.
PATIENCE_S = 10  # Of the log with a rank that holds the others up.
REMIND_S = 60  # It is logged again after this time, then twice this time, ...
READY, DONE, LEAVING, SAVE = range(4)  # What a rank votes.
OWN_FLAGS = {"command", "savedir", "tls_cert", "tls_key", "tls_ca"}  # May differ.


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
        self.hosts = [platform.node()]  # Of the ranks.
        self.num_here = 1  # Ranks on this host.
        self.lost = False  # Some rank is gone: no thread of ours may be waited for.
        self.faulty = None  # [num], of the last update: whose losses are not finite.
        self.differs = None  # Tensor [], of the last update: whether statistics do.
        self.seconds = {}  # Where the time went, for the log.
        self.describe = lambda: ""  # Says why there are no rollouts.
        self._end = None  # The Stop that all have agreed on.
        self._leaving = None  # The exception for which this rank leaves.
        self._over = num == 1  # There are no more votes.
        self._updating = False
        self._nccl = self._store = self._statistics = None
        self._lock = threading.RLock()  # Of a vote.
        self._losing = threading.Lock()  # Of _lose().
        self._parent = os.getppid()  # Torchrun.
        self._voted_at = self._ready_at = time.monotonic()
        self._held_up = {}  # {rank: (since when, when it is logged next)}

    # Beginning and end.

    def join(self, flags):
        """Joins the other ranks. Flags that were not given become those of rank 0.
        Raises BadInput if the ranks cannot learn together."""
        name = "num_envs" if hasattr(flags, "num_envs") else "batch_size"
        if (size := getattr(flags, name)) % self.num:
            raise BadInput(
                f"--{name} {size} is of all ranks together: expected a multiple of "
                f"{self.num}, their number"
            )
        store, _, _ = next(dist.rendezvous("env://", self.rank, self.num))
        # Torchrun's store still has what ranks that were killed have left in it.
        self._store = dist.PrefixStore(self._attempt(store), store)
        dist.init_process_group(
            "gloo", store=self._store, rank=self.rank, world_size=self.num
        )
        timeout = datetime.timedelta(seconds=VOTE_TIMEOUT_S)
        self._votes = dist.new_group(backend="gloo", timeout=timeout)
        self.seconds = {"vote": 0.0, "reduction": 0.0}
        given = {k: x for k, x in vars(flags).items() if k not in OWN_FLAGS}
        if self.rank == 0:
            flags.seed = seeds.set_seed(flags.seed)
            flags.xpid = flags.xpid or self.new_xpid()
        mine = platform.node(), os.sched_getaffinity(0), given
        mine = *mine, flags.seed, flags.xpid
        hosts, cores, all_given, all_seeds, xpids = zip(*self.all_gather(mine))
        for rank, theirs in enumerate(all_given):
            for name, x in theirs.items():
                first = all_given[0].get(name)
                if x != first:
                    raise BadInput(
                        f"rank {rank} has --{name} {x}, rank 0 {first}: expected the "
                        "same flags on all ranks"
                    )
        flags.seed, flags.xpid = all_seeds[0], xpids[0]
        # A core is shared by the ranks that may use it.
        here = [c for h, c in zip(hosts, cores) if h == hosts[self.rank]]
        share = sum(1 / sum(core in c for c in here) for core in cores[self.rank])
        machine.use_cores(max(1, round(share)))
        self.hosts = list(hosts)
        self.num_here = len(here)

    def _attempt(self, store):
        """Agrees with the other ranks on a text that no earlier ranks had. Raises Stop
        if they do not come."""
        mine = secrets.token_hex(8)
        store.set(f"hello/{self.rank}", mine)
        missing = set(range(1, self.num))
        deadline = time.monotonic() + JOIN_TIMEOUT_S

        def read(name):
            return store.get(name).decode() if store.check([name]) else ""

        while missing:
            if time.monotonic() > deadline:
                raise Stop(f"ranks did not join within {JOIN_TIMEOUT_S} s")
            if self.rank > 0:
                hello, _, attempt = read(f"welcome/{self.rank}").partition(" ")
                if hello == mine:  # Else the answer to an earlier rank.
                    store.set(f"joined/{self.rank}", attempt)
                    return attempt
            else:
                for rank in missing:
                    store.set(f"welcome/{rank}", f"{read(f'hello/{rank}')} {mine}")
                missing = {r for r in missing if read(f"joined/{r}") != mine}
            time.sleep(0.05)
        return mine

    def new_xpid(self):
        """Returns a name for a run: torchrun's, which is the same when torchrun starts
        the ranks again, or the time."""
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        if run_id != "none":
            return f"torchbeast-{run_id}"
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            raise BadInput(
                "torchrun could not resume this run: expected --xpid, or torchrun's "
                "--rdzv-id or --standalone"
            )
        now = datetime.datetime.now()
        return f"torchbeast-{now:%Y%m%d-%H%M%S}-{os.getpid()}"

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
        types, uuids = zip(*self.all_gather((device.type, uuid)))
        if len(set(types)) > 1:
            rank = [t == types[0] for t in types].index(False)
            raise BadInput(
                f"rank {rank} learns on {types[rank]}, rank 0 on {types[0]}: expected "
                "the same on all ranks"
            )
        if device.type == "cuda":
            if len(set(uuids)) == self.num:
                self._nccl = dist.new_group(backend="nccl")
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
        """Waits until all ranks have a batch. Raises Stop if the run ends instead.

        Calls save() on all ranks at the same time, when save_is_due() on rank 0.
        """
        if self.num == 1:
            if save_is_due():
                save()
            return
        start = time.monotonic()
        saved = False
        while True:
            votes = self._vote({READY: 1, SAVE: int(not saved and save_is_due())})
            if votes[:, READY].all():
                if not votes[0, SAVE]:
                    break
                save()
                saved = True
        self.seconds["vote"] += time.monotonic() - start

    @contextlib.contextmanager
    def update(self):
        """A context for the update for which wait() has waited."""
        self._updating = True
        try:
            yield
        except BaseException as e:
            if self.num > 1:
                self.tell(e)
                # No votes: the others wait for gradients of this rank that do not come.
                self._over = self.lost = True
            raise
        self._updating = False
        self._ready_at = time.monotonic()

    def finish(self):
        """Ends the votes, after the last update of all ranks."""
        with self._lock:
            while not self._over:
                self._over = bool(self._vote({DONE: 1})[:, DONE].all())

    def _vote(self, mine):
        """Takes part in one vote. Returns what the ranks voted, [num, 4] int64. Raises
        Stop if the run ends."""
        with self._lock:
            self.check()
            leaving = self._leaving or self._signals.stop()
            if leaving is not None:
                mine = {LEAVING: 1}
                self.tell(leaving)
            votes = torch.zeros(self.num, 4, dtype=torch.int64)
            for what, x in mine.items():
                votes[self.rank, what] = x
            try:
                dist.all_reduce(votes, group=self._votes)
            except RuntimeError as e:
                raise self._lose(e) from e
            self._voted_at = time.monotonic()
            for rank in votes[:, LEAVING].nonzero().flatten().tolist():
                if self._torchrun_is_gone():
                    told = isinstance(leaving, Stop)
                    self._end = leaving if told else Stop("torchrun is gone")
                else:
                    self._end = self._reason(rank) or Stop(f"rank {rank} left")
                raise self._end
            if self.rank == 0:
                self._watch(votes[:, READY].tolist())
            return votes

    def _keep_voting(self):
        """Votes in place of a learner that is busy or has no batch."""
        while not self._over and self._end is None:
            time.sleep(IDLE_S / 5)
            if self._lock.acquire(blocking=False):
                try:
                    now = time.monotonic()
                    if self._torchrun_is_gone():
                        self.leave(Stop("torchrun is gone"))
                    if not self._over and now - self._voted_at > IDLE_S:
                        if now - self._ready_at > PATIENCE_S / 2:
                            self._write(f"status/{self.rank}", self.describe())
                        self._vote({})
                except (Stop, RuntimeError):
                    pass
                finally:
                    self._lock.release()

    def _watch(self, ready):
        """Logs which ranks hold the others up."""
        now = time.monotonic()
        for rank in range(self.num):
            since, log_at = self._held_up.get(rank, (now, now + PATIENCE_S))
            if ready[rank] or not any(ready):
                if since + PATIENCE_S < now:
                    log.info("rank %d has rollouts again", rank)
                self._held_up.pop(rank, None)
                continue
            if now > log_at:
                status = self._read(f"status/{rank}")
                log.warning("rank %d has no rollouts%s", rank, status and f": {status}")
                log_at = now + max(REMIND_S, now - since)
            self._held_up[rank] = since, log_at

    # What is told when a rank ends.

    def tell(self, error):
        """Leaves word why this rank ends."""
        text = str(error) if isinstance(error, (Stop, BadInput)) else first_line(error)
        code = getattr(error, "exit_code", 2 if isinstance(error, BadInput) else 1)
        why = json.dumps([text, code, getattr(error, "save", True)])
        self._write(f"why/{self.rank}", why)

    def tell_statistics(self, shapes):
        """Leaves word which statistics this rank has: {name: shape} in JSON."""
        if shapes != self._statistics:
            self._write(f"statistics/{self.rank}", shapes)
            self._statistics = shapes

    def different_statistics(self):
        """Returns the Stop of ranks that have left word of different statistics."""
        texts = [self._read(f"statistics/{rank}") for rank in range(self.num)]
        first, *others = [json.loads(text or "{}") for text in texts]
        rank, theirs = next(
            ((r, x) for r, x in enumerate(others, 1) if x != first), (1, first)
        )
        names = sorted(first.keys() | theirs.keys())
        different = [
            f"{name} is {theirs.get(name, 'missing')}, on rank 0 "
            f"{first.get(name, 'missing')}"
            for name in names
            if first.get(name) != theirs.get(name)
        ]
        return Stop(
            f"rank {rank} has other statistics than rank 0: "
            f"{'; '.join(different[:3])}: expected the same on all ranks",
            save=False,
        )

    def _reason(self, rank):
        """Returns the Stop that a rank has left word of, or None."""
        if not (why := self._read(f"why/{rank}")):
            return None
        text, code, save = json.loads(why)
        return Stop(f"rank {rank}: {text}", code, save)

    def _torchrun_is_gone(self):
        """Returns whether torchrun, whose store it was, is gone."""
        if os.getppid() != self._parent:
            self._store = None
        return self._store is None

    def _write(self, key, text):
        """Writes into the store, if it is there."""
        if (store := self._store) is not None:
            with contextlib.suppress(RuntimeError):
                store.set(key, text)

    def _read(self, key):
        """Returns what _write() has written, "" if there is nothing."""
        if (store := self._store) is not None:
            with contextlib.suppress(RuntimeError):
                if store.check([key]):
                    return store.get(key).decode()
        return ""

    def _lose(self, error):
        """Returns the Stop of a run whose ranks cannot be reached any more. Threads may
        find that out at the same time."""
        with self._losing:
            if self.lost:
                return self._end
            reasons = (self._reason(rank) for rank in range(self.num))
            end = next(filter(None, reasons), None)
            if end is None:
                # Gloo's place in its code, and its advice, are left out.
                what = re.sub(r"^\[\S*\] | This is .*", "", first_line(error, False))
                end = Stop(f"another rank is gone: {what}")
            if self._nccl is not None and self._updating:
                # What it has summed is not known to be whole.
                end.save = False
            self._end, self.lost = end, True
            return end

    # Data.

    @contextlib.contextmanager
    def _reached(self, always=True):
        """A context for what all ranks do. Raises Stop if it fails, or, unless always,
        if the run does not end anyway."""
        ends = self._end is not None
        try:
            yield
        except RuntimeError as e:
            stop = self._lose(e)
            if always or not ends:
                raise stop from e

    def sum(self, x):
        """Replaces a tensor, [n] on the learner's device, by its sum over all ranks."""
        start = time.monotonic()
        with self._reached():
            if self._nccl is not None:
                dist.all_reduce(x, group=self._nccl)
            elif x.is_cuda:
                on_host = x.cpu()
                dist.all_reduce(on_host)
                x.copy_(on_host)
            else:
                dist.all_reduce(x)
        self.seconds["reduction"] += time.monotonic() - start

    def all_gather(self, x):
        """Returns the ranks' picklable objects; without those of ranks that are gone
        where the run ends."""
        everybody = [None] * self.num
        everybody[self.rank] = x
        if self.num > 1 and not self.lost:
            with self._reached(always=False):
                dist.all_gather_object(everybody, x)
        return [x for x in everybody if x is not None]

    def broadcast(self, data):
        """Returns the bytes that rank 0 has."""
        size = torch.tensor(len(data or b""))
        with self._reached():
            dist.broadcast(size, src=0)
            x = torch.empty(int(size), dtype=torch.uint8)
            if self.rank == 0:
                x = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(x, src=0)
        return x.numpy().tobytes()

    def compare(self, module):
        """Raises Stop if a module's parameters are not the same on all ranks."""
        if self.num == 1 or self.lost:
            return
        digest = hashlib.sha256()
        for parameter in module.parameters():
            x = parameter.detach().cpu().reshape(-1)
            digest.update(x.view(torch.uint8).numpy())  # NumPy has no bfloat16.
        hashes = self.all_gather(digest.hexdigest())
        for rank, x in enumerate(hashes):
            if x != hashes[0]:
                raise Stop(
                    f"rank {rank} has other weights than rank 0: gradients of learn() "
                    "were not summed (torchbeast/gradients.py)",
                    save=False,
                )


current = Ranks()


def join(flags):
    """Makes this process the rank that torchrun's variables say, if they are there.
    Raises BadInput if only some of them are."""
    global current
    names = "WORLD_SIZE", "RANK", "LOCAL_RANK"
    if os.environ.get("WORLD_SIZE", "1") == "1" or current.num > 1:
        return
    try:
        num, rank, local_rank = (int(os.environ[name]) for name in names)
    except (KeyError, ValueError) as e:
        raise BadInput(
            "WORLD_SIZE is set, as torchrun does it: expected numbers in WORLD_SIZE, "
            "RANK and LOCAL_RANK, or none of them"
        ) from e
    current = Ranks(rank, num, local_rank)
    current.join(flags)
