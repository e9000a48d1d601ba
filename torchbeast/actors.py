"""What MonoBeast's processes share, and what keeps them alive.

Rollout buffers and weights are tensors in shared memory that no name in /dev/shm leads
to, so nothing is left behind by whatever end. No lock is shared between processes: one
that is killed takes none along.
"""

import argparse
import contextlib
import multiprocessing.connection
import queue
import resource
import shutil
import threading
import time
import traceback
from collections import Counter, deque
from multiprocessing import resource_tracker
from types import SimpleNamespace

import torch
import torch.multiprocessing as mp

from torchbeast import calls, devices, ranks, rollouts, seeds
from torchbeast.flags import number, synchronous
from torchbeast.messages import BadInput, Repeated, Stop, first_line, log, setup_logging
from torchbeast.nests import leaves, map_structure
from torchbeast.process import (
    START_S,
    allow_open_files,
    end_group,
    keep_freed_memory,
    kill_group,
    lead_group,
    signal_name,
    signals_blocked,
)

PAGE = resource.getpagesize()
END_S = 20  # An actor's time to close its environments, as long as that gets further.
READY = True  # What an actor sends once it takes orders.


def actor_parser() -> argparse.ArgumentParser:
    """MonoBeast's flags of actors, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("actors")
    g.add_argument("--num_actors", type=number(int, 0), metavar="N",
                   help="actor processes; 0: everything in one thread of one process "
                   "(default: one per core at most)")
    g.add_argument("--envs_per_actor", type=number(int, 1), metavar="E",
                   help="environments an actor steps together "
                   "(default: those of 32 agents in all at most; if a GPU learns, of "
                   "eight batches')")
    g.add_argument("--max_actor_restarts", type=number(int, 0), default=10,
                   metavar="N", help="restarts of an actor without a rollout between "
                   "them, after which the run ends (default: %(default)s)")
    # fmt: on
    return p


def set_defaults(flags, num_agents=1, observation_space=None):
    """Fills in defaults that depend on the machine, other flags, or the environment."""
    devices.set_defaults(flags)
    flags.num_actors, flags.envs_per_actor = rollouts.spread(
        flags, flags.num_actors, flags.envs_per_actor, num_agents, observation_space
    )


def num_buffers(flags, num_agents):
    """Returns how many rollouts the shared memory has room for: what actors fill, and
    two batches. Where acting waits for updates, it is one batch, and --num_actors
    becomes what fills it at most. num_agents: of one environment."""
    in_actor = flags.envs_per_actor * num_agents
    batch_size = ranks.current.share(flags.batch_size)
    if not synchronous(flags):
        return max(1, flags.num_actors) * in_actor + 2 * batch_size
    rollouts.check_share(flags, "envs_per_actor", num_agents)
    most = batch_size // in_actor
    if flags.num_actors > most:
        log.info(f"{most} actors fill a batch: --num_actors {most} are started")
        flags.num_actors = most
    return batch_size


def check_limits(flags, num_buffers, specs, model):
    """Raises BadInput if buffers and weights need more open files or shared memory than
    there are. (Without this check, writing past the end of /dev/shm would be a SIGBUS.)
    """
    sizes = [num_buffers * x.nbytes for _, x in leaves(specs)]
    sizes += 2 * [x.nbytes for x in model.state_dict().values()]
    allow_open_files(len(sizes) + 1 + 4 * flags.num_actors)
    needed = sum((size // PAGE + 2) * PAGE for size in sizes)
    try:
        torch.zeros(1).share_memory_()
        available = shutil.disk_usage("/dev/shm").free
    except FileNotFoundError:  # Not Linux: shared memory has no limit of its own.
        return
    except (RuntimeError, OSError) as e:
        message = f"shared memory cannot be used: /dev/shm: {first_line(e)}"
        raise BadInput(message) from e
    if needed > available:
        raise BadInput(
            f"rollout buffers and weights need {needed:,} bytes of shared memory, "
            f"/dev/shm has {available:,}: use a smaller --batch_size, or fewer "
            "--num_actors or --envs_per_actor, or enlarge it (mount -o "
            "remount,size=8G /dev/shm; docker run --shm-size=8g)"
        )


def create_buffers(specs, num_buffers):
    """Creates shared tensors [T, num_buffers, ...]. A batch is buffer[:, indices]."""

    def create(spec):
        T, *shape = spec.shape
        return torch.zeros(T, num_buffers, *shape, dtype=spec.dtype).share_memory_()

    return map_structure(create, specs)


class SharedWeights:
    """A network's weights in shared memory, with one writer and any number of readers.

    There are two copies, written in turn, so that a reader finds a whole one without a
    lock, which a killed process could take along. (Where the CPU reorders stores,
    unlike x86, a reader may in theory see two versions mixed that are one update apart,
    which is harmless.)
    """

    def __init__(self, model):
        self._copies = [
            {
                k: v.detach().cpu().clone().share_memory_()
                for k, v in model.state_dict().items()
            }
            for _ in range(2)
        ]
        self._version = torch.zeros(1, dtype=torch.int64).share_memory_()

    @torch.no_grad()
    def publish(self, model, version):
        copy, state = self._copies[version % 2], model.state_dict()
        state = devices.to_host(state, next(model.parameters()).device)
        for name, x in state.items():
            copy[name].copy_(x)
        self._version[0] = version

    @torch.no_grad()
    def fetch(self, model, have=None):
        """Loads the newest weights into the model, unless they are version `have`.
        Returns their version."""
        while True:
            version = int(self._version)
            if version == have:
                return version
            model.load_state_dict(self._copies[version % 2])
            if int(self._version) == version:  # Else it may be overwritten by now.
                return version


def _actor_process(index, act, flags, seed, buffers, weights, connection):
    lead_group()
    setup_logging()
    keep_freed_memory()
    torch.set_num_threads(1)
    orders = Orders(connection)
    orders.send(READY)
    calls.watch(flags.env, flags.env_timeout_seconds, orders.send)
    if index == 0:  # One tells for all.
        rollouts = calls.first_rollouts(flags, flags.envs_per_actor)
        calls.tell_slow(*rollouts, "actor 0: ")
    try:
        act(flags, seed, buffers, weights, orders)
    except BadInput as e:
        orders.send(e)
    except calls.NotWanted:
        pass
    except BaseException as e:  # sys.exit() in an agent, too.
        text = traceback.format_exc()
        orders.send(text if hasattr(e, "of_environment") else Mistake(text))
    end_group()


class Mistake(str):
    """The traceback of what was not the environment's fault: the next process would
    raise it again."""


class NoMoreOrders(Exception):
    """The learner has ended."""


class Orders:
    """An actor's end of its pipe to the learner.

    take() gives the indices of buffers to fill, until the learner wants no more, or is
    gone. Then environments only get close(), and the process is ended when a call does
    not return.
    """

    def __init__(self, connection):
        self._connection = connection
        self._queue = queue.SimpleQueue()
        self._indices = []
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self):
        indices = True
        while indices is not None:
            try:
                indices = self._connection.recv()
            except (EOFError, OSError):
                indices = None
            if indices is None:  # Nobody waits any more for what was ordered before.
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._queue.get_nowait()
            self._queue.put(indices)
        calls.end_process()

    def take(self, n, least=None):
        """Returns the indices of n buffers, or of the `least` or more that there are.
        Raises NoMoreOrders."""
        least = n if least is None else least
        with contextlib.suppress(queue.Empty):
            while len(self._indices) < n:
                if (got := self._queue.get(len(self._indices) < least)) is None:
                    raise NoMoreOrders
                self._indices += got
        taken, self._indices = self._indices[:n], self._indices[n:]
        return taken

    def send(self, message):
        """Sends READY, ([(index, version of the weights)], metrics of episodes, seconds
        of stages), or why this process ends: a text, a Mistake, or a BadInput."""
        with contextlib.suppress(OSError):  # The learner is gone, which ends this.
            self._connection.send(message)


class ActorProcesses:
    """Starts actors, gives them free buffers, passes full ones on, restarts the dead.

    An actor is a process that runs act(flags, seed, buffers, weights, orders)
    (monobeast.py), and leads a process group of its own, which ends with it.

    Each actor has a pipe of its own and no lock in common with anybody, so killing one
    at any moment costs the rollouts it was filling and nothing else: their buffers go
    back to the free queue and another process takes its place.

    free(indices)   any thread; never blocks.
    run()           one thread; returns after stop(). Raises Stop when an actor has died
                    too often without a rollout in between.
    stop()          any thread, any number of times. The context then waits for the
                    actors' ends, which takes seconds.
    num_rows        of each actor: the agents of its environments.
    full_queue      gets (index, version of the weights it was begun with).
    take_metrics()  any thread; see Environment.take_metrics().
    stage_seconds() any thread; of all actors together, see stages.STAGES.
    """

    AHEAD = 2  # Sets of buffers an actor has: the one it fills, and the next.

    def __init__(self, act, flags, num_rows, seed, buffers, weights, full_queue):
        self.act = act
        self.flags = flags
        self.num_rows = num_rows
        self.seed = seed
        self.buffers = buffers
        self.weights = weights
        self.full_queue = full_queue
        self.restarts = 0
        self._failures = Counter()  # Each actor's since its last rollout.
        self._metrics = []  # Guarded by _lock.
        self._stage_seconds = Counter()  # Guarded by _lock.
        self._tracebacks = Repeated()
        # No forks: of threads that an import has started, they would not have any.
        self._context = mp.get_context("spawn")
        self._lock = threading.Lock()
        free = range(buffers["done"].shape[1])
        self._free_queue = deque(free)  # Guarded by _lock.
        self._actors = []  # Guarded by _lock.
        self._stopping = False  # Guarded by _lock.

    def start(self):
        for index in range(self.flags.num_actors):
            self._start_actor(index)

    def _start_actor(self, index):
        # Not the seeds of the process it replaces: those led to where it died.
        seed = seeds.derive_seed(self.seed, index, self.restarts)
        try:
            ours, theirs = self._context.Pipe()
            args = self.act, self.flags, seed, self.buffers, self.weights, theirs
            resource_tracker.ensure_running()  # Else start() does it, and unblocks.
            with signals_blocked():
                process = self._context.Process(
                    target=_actor_process, name=f"actor-{index}", args=(index, *args)
                )
                process.start()
        except OSError as e:
            raise Stop(f"actor {index} cannot be started: {e.strerror}") from e
        theirs.close()
        with self._lock:
            if self._stopping:
                kill_group(process)
            actor = SimpleNamespace(index=index, process=process, connection=ours)
            actor.held = set()  # Indices of buffers that it fills, or will.
            actor.ready, actor.started_at = False, time.monotonic()
            self._actors.append(actor)
            self._hand_out()

    def free(self, indices):
        with self._lock:
            self._free_queue.extend(indices)
            self._hand_out()

    def _hand_out(self):
        """Gives free buffers to actors: first to those that have none, and of these to
        the one that got some longest ago. Called with the lock."""
        E, given = self.num_rows, {}
        n = 1 if rollouts.are_apart(self.flags, self.buffers) else E  # Begin together.
        for ahead in range(0, self.AHEAD * E, n):
            for actor in self._actors:
                if len(actor.held) == ahead and len(self._free_queue) >= n:
                    indices = [self._free_queue.popleft() for _ in range(n)]
                    actor.held.update(indices)
                    others = [x for x in self._actors if x is not actor]
                    self._actors = [*others, actor]  # At once: kill() has no lock.
                    given.setdefault(actor.index, (actor, []))[1].extend(indices)
        # In one message: one that still starts reads none, and a pipe has little room.
        for actor, indices in given.values():
            with contextlib.suppress(OSError):  # Dead: run() finds out, and frees them.
                actor.connection.send(indices)

    def run(self):
        looked_at, limit_s = 0, max(START_S, self.flags.env_timeout_seconds)
        while not self._stopping:
            with self._lock:
                actors = {a.connection: a for a in self._actors}
            for connection in multiprocessing.connection.wait(
                list(actors), timeout=0.5
            ):
                self._receive(actors[connection])
            if time.monotonic() - looked_at > 1:
                looked_at = time.monotonic()
                for actor in actors.values():
                    late = looked_at - actor.started_at > limit_s and not actor.ready
                    if late:
                        log.error(
                            "actor %d did not start in %g s", actor.index, limit_s
                        )
                    # What its environment has forked keeps a dead actor's pipe open.
                    if late or not actor.process.is_alive():
                        kill_group(actor.process)

    def _receive(self, actor):
        try:
            message = actor.connection.recv()
        except (EOFError, OSError):
            message = None
        if message is READY:
            actor.ready = True
        elif isinstance(message, tuple):
            items, metrics, seconds = message
            self._failures[actor.index] = 0
            with self._lock:
                actor.held.difference_update(index for index, _ in items)
                self._metrics += metrics
                self._stage_seconds.update(seconds)
                self._hand_out()
            for item in items:
                self.full_queue.put(item)
        elif isinstance(message, BadInput):
            raise Stop(str(message), exit_code=2)
        elif isinstance(message, Mistake):
            raise Stop(f"actor {actor.index} cannot go on:\n{message.rstrip()}")
        elif not self._stopping:
            self._replace(actor, message)

    def _replace(self, actor, error):
        actor.process.join(timeout=5)
        kill_group(actor.process)
        actor.process.join()
        with self._lock:  # Under which others send.
            actor.connection.close()
            self._actors.remove(actor)
            self._free_queue.extend(actor.held)
        code = actor.process.exitcode
        if error:
            reason = self._tracebacks.shorten(f"\n{error}")
        else:
            reason = f" {signal_name(-code)}" if code < 0 else f" code {code}"
        log.error("actor %d (pid %d) died:%s", actor.index, actor.process.pid, reason)
        failures, limit = self._failures[actor.index], self.flags.max_actor_restarts
        if failures == limit:
            what = "restarts without a rollout (--max_actor_restarts)"
            stop = Stop(f"actor {actor.index} died after {limit} {what}")
            stop.of_environment = True
            raise stop
        self._failures[actor.index] += 1
        self.restarts += 1
        log.info("actor %d is restarted (%d of %d)", actor.index, failures + 1, limit)
        self._start_actor(actor.index)

    def take_metrics(self):
        with self._lock:
            metrics, self._metrics = self._metrics, []
        return metrics

    def stage_seconds(self):
        with self._lock:
            return dict(self._stage_seconds)

    def stop(self):
        with self._lock:
            self._stopping = True
            for actor in self._actors:
                with contextlib.suppress(OSError):  # Dead.
                    actor.connection.send(None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Waits for the actors to end, but for those that still import: they have no
        environments to close. To be called after the end of run()."""
        self.stop()
        deadline = time.monotonic() + END_S
        for actor in self._actors:
            ready = actor.ready or actor.connection.poll()
            actor.process.join(max(0, deadline - time.monotonic()) if ready else 0)
            kill_group(actor.process)
            actor.process.join()
            actor.connection.close()

    def kill(self):
        """Kills the actors. A signal handler may call it: it takes no lock."""
        for actor in list(self._actors):
            kill_group(actor.process)
