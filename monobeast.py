"""Training on one machine, in pure Python: MonoBeast.

    python -m monobeast --env PongNoFrameskip-v4

Read it top to bottom: flags, Actor, act(), learning(), train(). The agent (network,
loss, optimizer) is in polybeast.py, or in the module that --agent names; environments
are in polybeast_env.py. With --num_actors 0 everything runs in one thread, where a
debugger works.

Actor processes step environments, evaluate the network on the CPU and write rollouts
into buffers in shared memory; a free queue and a full queue pass the buffers' indices;
a learner thread makes batches of full buffers and updates the weights, which the actors
take at the start of each rollout (TorchBeast, arXiv 1910.03552, section 5.1).

T is the unroll length, B the batch size, E the number of environments an actor steps
together. A rollout has T + 1 steps: step 0 repeats the last step of the rollout before
it. Its actions are those taken on steps 0 to T - 1.
"""

import itertools
import queue
from collections import deque

import torch

import polybeast_env
from torchbeast import devices, ranks, rollouts, seeds
from torchbeast.actors import (
    ActorProcesses,
    NoMoreOrders,
    SharedWeights,
    actor_parser,
    check_limits,
    create_buffers,
    num_buffers,
    set_defaults,
)
from torchbeast.calls import create, first_rollouts, tell_slow
from torchbeast.environment import probe
from torchbeast.flags import agent_parser, run_parser, synchronous
from torchbeast.learner import Learner
from torchbeast.nests import map_structure
from torchbeast.policies import make_agent
from torchbeast.process import leave
from torchbeast.program import PolicyParser, name_of, run_program
from torchbeast.run import Run
from torchbeast.stages import Stopwatch
from torchbeast.threads import Threads

# Flags.


def program_parser(agent="polybeast"):
    """Returns the program's whole parser. agent: the module whose flags it takes."""
    p = PolicyParser(
        description="Trains an agent on one machine.",
        parents=[
            polybeast_env.environment_parser(),
            run_parser(),
            agent_parser(agent),
            actor_parser(),
        ],
    )
    p.add_presets(agent)
    return p


# Acting.


class Actor:
    """Fills rollouts, one after the other, from E environments and an agent."""

    def __init__(self, flags, env, agent, seed):
        self.flags = flags
        self.env = env
        self.agent = agent
        self.stage = Stopwatch()
        self.step = env.initial(seed)
        # The last K + 1 steps of the rollout before, which the next rollout repeats.
        self.overlap = map_structure(lambda x: x[None], self.step)
        self.burn_in = agent.burn_in  # K, mostly 0.
        self.core_states = deque(maxlen=self.burn_in + 1)  # The last one is current.
        self.core_states.append(agent.initial_state(env.num_envs))

    def rollouts(self, buffers, take, weights):
        """Fills rollouts, one after the other, without end. Each begins with the newest
        weights. Yields lists of (index of a full buffer, version of its weights).

        take(n, least=n): returns the indices of n free buffers, or of fewer if fewer
            are free, but of at least `least`. A rollout begins in each.
        """
        version, versions = None, {}  # The weights' versions, now and by buffer.

        def begin(*n):
            nonlocal version
            with self.stage("rollout_queue"):
                indices = take(*n)
            version = weights.fetch(self.agent.net, version)
            versions.update(dict.fromkeys(indices, version))
            return indices

        if rollouts.are_apart(self.flags, buffers):
            filled = rollouts.of_rows(self, buffers, begin)
        else:
            filled = self.whole_rollouts(buffers, begin)
        for indices in filled:
            yield [(index, versions[index]) for index in indices]

    def whole_rollouts(self, buffers, begin):
        """Yields lists of indices of full buffers. begin(n) takes n free buffers, as
        rollouts() says, and returns their indices."""
        while True:
            indices = begin(self.env.num_envs)
            self.rollout(buffers, indices)
            yield indices

    def act(self):
        """Returns the outputs of the agent's act() for the newest step: arrays [E,
        ...]."""
        with self.stage("inference"):
            step = map_structure(lambda x: torch.from_numpy(x)[None], self.step)
            before = self.core_states[-1]
            outputs, core_state = rollouts.act(self.agent.act, step, before)
            rollouts.check_outputs(outputs)
        self.core_states.append(core_state)
        return map_structure(lambda x: x[0].numpy(), outputs)

    def rollout(self, buffers, indices):
        """Writes T new steps (the first time K + T) into each of the buffers of E
        indices.

        buffers: a nest of NumPy arrays [K + T (+ 1), num_buffers, ...].
        """
        T, first_t = self.flags.unroll_length, len(self.overlap["reward"]) - 1
        first, E = indices[0], len(indices)
        if indices == list(range(first, first + E)):
            indices = slice(first, first + E)  # Several times as fast as a list.

        def repeat(x, buffer):
            buffer[: len(x), indices] = x

        map_structure(repeat, self.overlap, buffers)
        core_state = map_structure(lambda x: x.numpy(), self.core_states[0])
        rollouts.write(core_state, buffers["core_state"], slice(None), indices)
        for t in range(first_t, self.burn_in + T):
            outputs = self.act()
            rollouts.write(outputs, buffers, t, indices)
            with self.stage("environment_wait"):
                self.step = self.env.step(outputs["action"])
            rollouts.write(self.step, buffers, t + 1, indices)
        # A copy: the buffers may soon be another actor's.
        self.overlap = map_structure(lambda x: x[T:, indices].copy(), buffers)


def act(flags, seed, buffers, weights, orders):
    """Runs an actor process: fills the buffers that are ordered (torchbeast/actors.py)
    until the learner wants no more."""
    seeds.set_seed(seed)
    env = create(polybeast_env.create_env, flags, flags.envs_per_actor, seed=seed)
    try:
        actor = Actor(flags, env, make_agent(flags, env), seed)
        actor.agent.net.eval()
        arrays = map_structure(lambda x: x.numpy(), buffers)
        for items in actor.rollouts(arrays, orders.take, weights):
            orders.send((items, env.take_metrics(), actor.stage.take()))
    except NoMoreOrders:
        pass
    finally:
        env.close()


# Learning.


def make_batch(buffers, items, device, unroll_length):
    """Copies rollouts out of the buffers.

    items: (index of a buffer, version of the weights) of each rollout. Returns a nest
    of [T + 1, B, ...] on the device, the episodes that ended in it, and the versions.
    """
    indices = torch.tensor([index for index, _ in items])
    batch = map_structure(lambda x: devices.select(x, indices, device), buffers)
    episodes = rollouts.ended_episodes(batch, unroll_length)
    return devices.to_device(batch, device), episodes, [version for _, version in items]


def learning(full_queue, buffers, actors, learner, stop):
    """Runs the learner thread. Learns from full buffers, and frees them, until the last
    step or until the queue brings None."""
    full, T = iter(full_queue.get, None), learner.flags.unroll_length
    while not learner.finished:
        items = list(itertools.islice(full, learner.batch_size))
        if len(items) < learner.batch_size or stop.is_set():
            return
        new = make_batch(buffers, items, learner.device, T)
        indices = [index for index, _ in items]
        if not synchronous(learner.flags):
            actors.free(indices)
        learner.update(*new)
        if synchronous(learner.flags):  # The next rollouts begin with new weights.
            actors.free(indices)


# Training.


def train(flags):
    """Trains until --total_steps or a signal. Returns the exit code.

    Raises BadInput before anything is started.
    """
    flags.seed = seeds.set_seed(flags.seed)
    create_env = polybeast_env.create_env
    # Two environments show what steps look like.
    env, step = probe(create_env, flags, min(2, flags.envs_per_actor or 2))
    seeds.set_seed(flags.seed)  # Environments may have set another.
    set_defaults(flags, env.num_agents, env.observation_space)
    device = devices.get_device(flags, "learner_device")
    ranks.current.use_device(device)
    num = num_buffers(flags, env.num_agents)
    agent = make_agent(flags, env)
    specs = rollouts.specs(agent, step, flags)
    check_limits(flags, num, specs, agent.net)
    batch_size = ranks.current.share(flags.batch_size)
    rollouts.check_memory(specs, 2 * batch_size)  # Beside the buffers.
    run = Run(flags, env.frames_per_step, env.num_acting)
    run.open()
    buffers = create_buffers(specs, num)
    learner = Learner(flags, run, agent, SharedWeights(agent.net), device, create_env)
    # A resumed run does not repeat the episodes of its first session.
    seed = seeds.derive_seed(flags.seed, run.step, ranks.current.rank)
    text = f"{flags.num_actors} actors of {flags.envs_per_actor} environments"
    learner.describe(text, env.texts)

    if flags.num_actors > 0:
        num_rows = flags.envs_per_actor * env.num_agents
        full_queue = queue.Queue()
        actors = ActorProcesses(
            act, flags, num_rows, seed, buffers, learner.weights, full_queue
        )
        parts = flags, actors, full_queue, learner, buffers
        return learner.train(lambda signals: train_with_actors(*parts, signals), actors)
    stop_telling = tell_slow(*first_rollouts(flags, flags.envs_per_actor))
    # Not in learner.train(), where Ctrl-C waits for a step: constructors may be slow.
    env = create(create_env, flags, flags.envs_per_actor, seed=seed)
    parts = flags, env, seed, learner, buffers
    try:
        return learner.train(lambda signals: train_serially(*parts, signals))
    finally:
        stop_telling.set()
        env.close()


def train_serially(flags, env, seed, learner, buffers, signals):
    """Acts and learns by turns, all in this thread. On a CPU the same seed gives the
    same losses."""
    torch.set_num_threads(1)
    actor = Actor(flags, env, make_agent(flags, env), seed)
    actor.agent.net.eval()
    learner.start(lambda: actor.stage.seconds, env.take_metrics)
    arrays = map_structure(lambda x: x.numpy(), buffers)
    free_queue = deque(range(buffers["done"].shape[1]))
    full_queue = deque()

    def take(n, least=None):
        n = n if least is None else min(n, len(free_queue))
        return [free_queue.popleft() for _ in range(n)]

    for items in actor.rollouts(arrays, take, learner.weights):
        full_queue.extend(items)
        signals.check()
        while len(full_queue) >= learner.batch_size and not learner.finished:
            items = [full_queue.popleft() for _ in range(learner.batch_size)]
            new = make_batch(buffers, items, learner.device, flags.unroll_length)
            free_queue.extend(index for index, _ in items)
            learner.update(*new)
            signals.check()
        if learner.finished:
            return


def train_with_actors(flags, actors, full_queue, learner, buffers, signals):
    """Starts actors and a learner thread, waits for a signal or the last step, ends all
    of them. Raises what went wrong in any of them."""
    learner.start(actors.stage_seconds, actors.take_metrics)
    threads = Threads()

    def learn():
        learning(full_queue, buffers, actors, learner, threads.stop)

    def end():
        actors.stop()
        full_queue.put(None)

    threads.add("actors", actors.run)
    # With the shallow network on Atari, learning takes about 0.3 of a CPU's time. The
    # actors get the rest, unless acting waits for updates.
    num_cores = devices.num_update_cores(0.3, learner.agent, flags)
    threads.add("learner", learn, num_cores)
    signals.on_second = actors.kill
    actors.start()
    threads.run(signals, end)


def main(argv=None):
    name, create_env = name_of(__spec__, __file__), polybeast_env.create_env
    return run_program(name, program_parser, train, create_env, argv)


if __name__ == "__main__":
    leave(main())
