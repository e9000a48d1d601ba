"""Training on one machine, in pure Python: MonoBeast.

    python -m monobeast --env PongNoFrameskip-v4

Read it top to bottom: flags, Actor, act(), learning(), train(). The agent (network,
loss, optimizer) is in polybeast.py, or in the module that --agent names; environments
are in polybeast_env.py. With --num_actors 0 everything runs in one thread, where a
debugger works.

Actor processes step environments, evaluate the network on the CPU and write rollouts
into buffers in shared memory; a free queue and a full queue pass the buffers' indices;
learner threads make batches of full buffers and update the weights, which the actors
take at the start of each rollout (TorchBeast, arXiv 1910.03552, section 5.1).

T is the unroll length, B the batch size, E the number of environments an actor steps
together. A rollout has T + 1 steps: step 0 repeats the last step of the rollout before
it. Its actions are those taken on steps 0 to T - 1.
"""

import queue
import sys
import threading
from collections import deque

import torch

import polybeast_env
from torchbeast import devices, ranks, rollouts, seeds
from torchbeast.actors import (
    ActorProcesses,
    SharedWeights,
    check_limits,
    create_buffers,
)
from torchbeast.calls import create
from torchbeast.encoders import summary
from torchbeast.environment import first_step, map_structure, probe
from torchbeast.flags import (
    Parser,
    agent_parser,
    make_agent,
    number,
    run_parser,
)
from torchbeast.learner import Learner
from torchbeast.machine import num_cores
from torchbeast.process import BadInput, log
from torchbeast.program import run_program
from torchbeast.run import Run
from torchbeast.threads import Threads

# Flags.


def program_parser(agent="polybeast"):
    """Returns the program's whole parser. agent: the module whose flags it takes."""
    p = Parser(
        prog="monobeast",
        description="Trains an agent on one machine.",
        parents=[
            polybeast_env.environment_parser(),
            run_parser(),
            agent_parser(agent),
        ],
    )
    if p.get_default("net") == "deep":  # Each actor evaluates it alone, on a CPU.
        p.set_defaults(net="shallow")
    # fmt: off
    g = p.add_argument_group("actors")
    g.add_argument("--num_actors", type=number(int, 0), metavar="N",
                   help="actor processes; 0: everything in one thread of one process "
                   "(default: one per core)")
    g.add_argument("--envs_per_actor", type=number(int, 1), metavar="E",
                   help="environments an actor steps together "
                   "(default: 32 in all, spread over the actors)")
    g.add_argument("--num_buffers", type=number(int, 1), metavar="N",
                   help="rollouts in shared memory "
                   "(default: what the actors fill, and two batches)")
    g.add_argument("--max_actor_restarts", type=number(int, 0), default=10,
                   metavar="N", help="restarts of an actor without a rollout between "
                   "them, after which the run ends (default: %(default)s)")
    # fmt: on
    return p


def set_defaults(flags):
    """Fills in the flags whose defaults depend on the machine or on other flags."""
    if flags.num_actors is None:
        flags.num_actors = num_cores()
    if flags.envs_per_actor is None:
        flags.envs_per_actor = max(1, 32 // max(1, flags.num_actors))
    in_actors = max(1, flags.num_actors) * flags.envs_per_actor
    batch_size = ranks.current.share(flags.batch_size)
    if flags.num_buffers is None:
        flags.num_buffers = in_actors + 2 * batch_size
    devices.set_defaults(flags)
    if flags.num_buffers < in_actors + batch_size:
        raise BadInput(
            f"--num_buffers {flags.num_buffers} is too small: actors fill {in_actors} "
            f"(--num_actors {flags.num_actors} times --envs_per_actor "
            f"{flags.envs_per_actor}) and a batch takes {batch_size} "
            f"(--batch_size): use {in_actors + batch_size} or more"
        )


# Acting.


class Actor:
    """Fills rollouts, one after the other, from E environments and an agent."""

    def __init__(self, flags, env, agent, seed):
        self.flags = flags
        self.env = env
        self.agent = agent
        self.step = env.initial(seed)
        self.core_state = agent.initial_state(env.num_envs)

    def rollout(self, buffers, indices):
        """Fills the buffers of the E indices with T steps each.

        buffers: a nest of NumPy arrays [T, num_buffers, ...].
        """
        core_state = map_structure(lambda x: x.numpy(), self.core_state)
        write(core_state, buffers["core_state"], slice(None), indices)
        write(self.step, buffers, 0, indices)
        for t in range(self.flags.unroll_length):
            step = map_structure(lambda x: torch.from_numpy(x)[None], self.step)
            outputs, self.core_state = self.agent.act(step, self.core_state)
            rollouts.check_outputs(outputs)
            outputs = map_structure(lambda x: x[0].numpy(), outputs)
            write(outputs, buffers, t, indices)
            self.step = self.env.step(outputs["action"])
            write(self.step, buffers, t + 1, indices)


def write(nest, buffers, t, indices):
    """Writes the nest's arrays, [E, ...], into buffers [T, num_buffers, ...] that have
    entries of the same names."""

    def write_array(x, buffer):
        buffer[t, indices] = x

    map_structure(write_array, nest, buffers)


def act(flags, seed, buffers, weights, orders):
    """Runs an actor process: fills the buffers that are ordered (torchbeast/actors.py)
    until the learner wants no more."""
    torch.manual_seed(seed)
    env = create(polybeast_env.create_env, flags, flags.envs_per_actor)
    try:
        actor = Actor(flags, env, make_agent(flags, env), seed)
        actor.agent.net.eval()
        arrays = map_structure(lambda x: x.numpy(), buffers)
        version = None
        for indices in orders:
            version = weights.fetch(actor.agent.net, version)
            actor.rollout(arrays, indices)
            orders.send((indices, version, env.take_metrics()))
    finally:
        env.close()


# Learning.


def make_batch(buffers, items, device):
    """Copies rollouts out of the buffers.

    items: (index of a buffer, version of the weights) of each. Returns a nest of [T, B,
    ...] on the device, the episodes that ended in it, and the versions.
    """
    indices = torch.tensor([index for index, _ in items])
    batch = map_structure(lambda x: x.index_select(1, indices), buffers)
    episodes = rollouts.ended_episodes(batch)
    return devices.to_device(batch, device), episodes, [version for _, version in items]


def learning(full_queue, buffers, actors, learner, batch_lock, update_lock, stop):
    """Runs a learner thread. Learns from full buffers, and frees them, until the last
    step or until the queue brings None."""
    while not learner.finished:
        with batch_lock:  # One thread takes a whole batch off the queue.
            items = []
            while len(items) < learner.batch_size:
                item = full_queue.get()
                if item is None:
                    full_queue.put(None)  # For the next thread.
                    return
                items.append(item)
        batch = make_batch(buffers, items, learner.device)
        actors.free(index for index, _ in items)
        with update_lock:
            if learner.finished or stop.is_set():
                return
            learner.update(*batch)


# Training.


def train(flags):
    """Trains until --total_steps or a signal. Returns the exit code.

    Raises BadInput before anything is started.
    """
    set_defaults(flags)
    flags.seed = seeds.set_seed(flags.seed)
    device = devices.get_device(flags, "learner_device")
    ranks.current.use_device(device)
    create_env = polybeast_env.create_env
    if flags.num_actors > 0:  # Two show what steps look like.
        env, step = probe(create_env, flags, min(2, flags.envs_per_actor))
    else:
        env = create(create_env, flags, flags.envs_per_actor)
        step = first_step(env)
    devices.choose_precision(flags, env.observation_space)
    agent = make_agent(flags, env)
    specs = rollouts.specs(agent, step, flags.unroll_length)
    check_limits(flags, specs, agent.net)
    batch_size = ranks.current.share(flags.batch_size)
    rollouts.check_memory(specs, 2 * batch_size)  # Beside the buffers.
    run = Run(flags, env.frames_per_step)
    run.open()
    buffers = create_buffers(specs, flags.num_buffers)
    learner = Learner(flags, run, agent, SharedWeights(agent.net), device)
    # The episodes of a resumed run are not those of its first session again.
    seed = seeds.derive_seed(flags.seed, run.step, ranks.current.rank)
    actors = f"{flags.num_actors} actors of {flags.envs_per_actor} environments"
    log.info(
        f"{flags.env}: {actors}, learner on {device}, {flags.precision}; "
        f"results in {run.path}"
    )
    log.info(summary(agent.net, env.texts))

    def body(signals):
        if flags.num_actors == 0:
            train_serially(flags, env, seed, learner, buffers, signals)
        else:
            train_with_actors(flags, seed, learner, buffers, signals)

    try:
        return learner.train(body)
    finally:
        if flags.num_actors == 0:
            env.close()


def train_serially(flags, env, seed, learner, buffers, signals):
    """Acts and learns by turns, all in this thread. The same seed gives the same
    losses."""
    torch.set_num_threads(1)
    learner.start(take_metrics=env.take_metrics)
    actor = Actor(flags, env, make_agent(flags, env), seed)
    actor.agent.net.eval()
    arrays = map_structure(lambda x: x.numpy(), buffers)
    free_queue = deque(range(flags.num_buffers))
    full_queue = deque()
    version = None
    while not learner.finished:
        indices = [free_queue.popleft() for _ in range(flags.envs_per_actor)]
        version = learner.weights.fetch(actor.agent.net, version)
        actor.rollout(arrays, indices)
        full_queue.extend((index, version) for index in indices)
        signals.check()
        while len(full_queue) >= learner.batch_size and not learner.finished:
            items = [full_queue.popleft() for _ in range(learner.batch_size)]
            batch = make_batch(buffers, items, learner.device)
            free_queue.extend(index for index, _ in items)
            learner.update(*batch)
            signals.check()


def train_with_actors(flags, seed, learner, buffers, signals):
    """Starts actors and learner threads, waits for a signal or the last step, ends them
    all. Raises what went wrong in any of them."""
    full_queue = queue.Queue()
    actors = ActorProcesses(act, flags, seed, buffers, learner.weights, full_queue)
    learner.start(take_metrics=actors.take_metrics)
    locks = threading.Lock(), threading.Lock()  # Of a batch, and of an update.
    threads = Threads()

    def learn():
        learning(full_queue, buffers, actors, learner, *locks, threads.stop)

    def end():
        actors.stop()
        full_queue.put(None)

    threads.add("actors", actors.run)
    for i in range(flags.num_learner_threads):
        threads.add(f"learner-{i}", learn, num_learner_cores(flags))
    signals.on_second = actors.kill
    try:
        actors.start()
        threads.run(signals, end)
    finally:
        actors.stop()
        actors.join()


def num_learner_cores(flags):
    """The number of cores for one update. On a CPU an update takes about 0.3 of what a
    step costs in all, with the shallow network on Atari; the actors have the rest."""
    return max(1, round(0.3 * num_cores() / flags.num_learner_threads))


def main(argv=None):
    create_env = polybeast_env.create_env
    return run_program("monobeast", program_parser, train, create_env, argv)


if __name__ == "__main__":
    sys.exit(main())
