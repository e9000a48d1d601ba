"""IMPALA on one machine, in one file.

    python -m monobeast --env PongNoFrameskip-v4

Read it top to bottom: flags, create_env(), Net, Actor, act(), learn(), train(), test().

Actor processes step environments, evaluate the network on the CPU and write rollouts
into buffers in shared memory; a free queue and a full queue pass the buffers' indices;
learner threads make batches of full buffers and update the weights, which the actors
take at the start of each rollout (section 5.1 of the TorchBeast paper, arXiv 1910.03552).

T is the unroll length, B the batch size, A the number of actions, E the number of
environments an actor steps together. A rollout has T + 1 steps: step 0 repeats the last
step of the rollout before it. Its actions are those taken on steps 0 to T - 1.
"""

import logging
import math
import multiprocessing.connection
import os
import queue
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

import atari_wrappers
import environment
import experiment
import vtrace
from environment import leaves, map_structure
from experiment import Stop, number

log = logging.getLogger("torchbeast")


# Flags.


def parser():
    p = experiment.Parser(
        prog="monobeast",
        description="IMPALA with V-trace on one machine.",
        parents=[experiment.parser()],
    )
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
                   metavar="N", help="in a run (default: %(default)s)")
    g.add_argument("--disable_cuda", action="store_true", help="learn on the CPU")
    return p


def set_defaults(flags):
    """Fills in the flags whose defaults depend on the machine or on other flags."""
    if flags.num_actors is None:
        flags.num_actors = experiment.num_cores()
    if flags.envs_per_actor is None:
        flags.envs_per_actor = max(1, 32 // max(1, flags.num_actors))
    if flags.num_buffers is None:
        in_actors = max(1, flags.num_actors) * flags.envs_per_actor
        flags.num_buffers = in_actors + 2 * flags.batch_size


# The environment.


def create_env(flags, num_envs, render_mode=None):
    """num_envs environments. To use another environment, edit this function."""
    if atari_wrappers.is_atari(flags.env):
        options = dict(
            sticky_actions=flags.sticky_actions,
            full_action_space=flags.full_action_space,
            terminal_on_life_loss=flags.terminal_on_life_loss,
        )
        if num_envs == 1:
            env = atari_wrappers.make_single(
                flags.env, render_mode=render_mode, **options
            )
        else:
            env = atari_wrappers.make_vector(flags.env, num_envs, **options)
    else:
        env = [
            environment.make(flags.env, render_mode=render_mode)
            for _ in range(num_envs)
        ]
    return environment.Environment(env)


# The network.


class Net(nn.Module):
    """The agent's network. To use another one, edit this class.

    forward(step, core_state) takes a dict of tensors [T, B, ...] (environment.py) and
    returns (outputs, core_state): outputs["policy_logits"] [T, B, A], or [T, B, D, A]
    if an action is D numbers, and outputs["baseline"] [T, B], both float32. core_state
    is a tuple of tensors [layers, B, hidden], () without --use_lstm.
    """

    def __init__(self, observation_space, num_actions, action_shape, use_lstm=False):
        super().__init__()
        self.num_actions = num_actions
        self.action_shape = action_shape
        self.encoder = make_encoder(observation_space)
        # The last action, one-hot, and the last reward, clipped (IMPALA, figure 3).
        core_size = self.encoder.out_features + sum(num_actions) + 1
        self.core = None
        if use_lstm:
            self.core = nn.LSTM(core_size, 256)
            core_size = 256
        self.policy = nn.Linear(core_size, sum(num_actions))
        self.baseline = nn.Linear(core_size, 1)

    def initial_state(self, batch_size):
        if self.core is None:
            return ()
        shape = (self.core.num_layers, batch_size, self.core.hidden_size)
        return (torch.zeros(shape), torch.zeros(shape))

    def forward(self, step, core_state=()):
        T, B = step["reward"].shape
        x = self.encoder(map_structure(lambda o: o.flatten(0, 1), step["observation"]))
        last_action = step["last_action"].view(T * B, -1)  # [T * B, D]
        x = torch.cat(
            [x]
            + [F.one_hot(a, n) for a, n in zip(last_action.unbind(1), self.num_actions)]
            + [step["reward"].clamp(-1, 1).view(T * B, 1)],
            dim=1,
        )
        if self.core is not None:
            x, core_state = self._unroll(x.view(T, B, -1), step["done"], core_state)
            x = x.flatten(0, 1)
        return {
            "policy_logits": self._logits(self.policy(x)).unflatten(0, (T, B)),
            "baseline": self.baseline(x).view(T, B),
        }, core_state

    def _unroll(self, x, done, core_state):
        """The LSTM over x [T, B, features], reset where an episode begins."""
        outputs = []
        for x_t, done_t in zip(x, done):
            keep = (~done_t).view(1, -1, 1).to(x.dtype)
            core_state = tuple(keep * s for s in core_state)
            output, core_state = self.core(x_t[None], core_state)
            outputs.append(output)
        return torch.cat(outputs), core_state

    def _logits(self, x):
        if not self.action_shape:
            return x
        # D numbers with their own numbers of choices: impossible ones get no mass.
        parts = [
            F.pad(part, (0, max(self.num_actions) - part.shape[1]), value=-1e9)
            for part in x.split(self.num_actions, dim=1)
        ]
        return torch.stack(parts, dim=1)  # [N, D, A]


def make_encoder(space):
    """A module that turns observations of the space [N, ...] into [N, out_features]."""
    if isinstance(space, spaces.Dict):
        return NestEncoder(space.spaces)
    if isinstance(space, spaces.Tuple):
        return NestEncoder(dict(enumerate(space.spaces)))
    if isinstance(space, spaces.Box):
        if len(space.shape) == 3 and space.dtype == np.uint8:
            channels_last = space.shape[2] < space.shape[0]
            if min(space.shape[:2] if channels_last else space.shape[1:]) >= 20:
                return ImageEncoder(space.shape, channels_last)
        scale = 255 if space.dtype == np.uint8 else 1
        return VectorEncoder(math.prod(space.shape), scale)
    if isinstance(space, spaces.MultiBinary):
        return VectorEncoder(math.prod(space.shape))
    if isinstance(space, spaces.Discrete):
        return OneHotEncoder([int(space.n)], space.start)
    if isinstance(space, spaces.MultiDiscrete):
        start = torch.as_tensor(space.start.ravel())
        return OneHotEncoder([int(n) for n in space.nvec.ravel()], start)
    raise ValueError(f"Net has no encoder for observation space {space}")


class ImageEncoder(nn.Module):
    """uint8 [N, C, H, W] (or [N, H, W, C]): the shallow network of the IMPALA paper."""

    def __init__(self, shape, channels_last=False):
        super().__init__()
        self.channels_last = channels_last
        channels = shape[2] if channels_last else shape[0]
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            features = self._convolve(torch.zeros(1, *shape)).shape[1]
        self.out_features = 256
        self.fc = nn.Linear(features, self.out_features)

    def _convolve(self, x):
        if self.channels_last:
            x = x.permute(0, 3, 1, 2)
        return self.layers(x.float() / 255)

    def forward(self, x):
        return F.relu(self.fc(self._convolve(x)))


class VectorEncoder(nn.Module):
    """Numbers [N, ...] of any shape and dtype, divided by scale: an MLP."""

    def __init__(self, in_features, scale=1):
        super().__init__()
        self.scale = scale
        self.out_features = 256
        self.layers = nn.Sequential(
            nn.Linear(in_features, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
        )

    def forward(self, x):
        return self.layers(x.flatten(1).float() / self.scale)


class OneHotEncoder(nn.Module):
    """Integers [N, ...], the i-th one of sizes[i] choices from start: an embedding."""

    def __init__(self, sizes, start=0):
        super().__init__()
        self.sizes = sizes
        self.start = start
        self.out_features = 64
        self.layer = nn.Linear(sum(sizes), self.out_features)

    def forward(self, x):
        x = (x.flatten(1) if x.ndim > 1 else x[:, None]).long() - self.start
        one_hot = [F.one_hot(i, n) for i, n in zip(x.unbind(1), self.sizes)]
        return F.relu(self.layer(torch.cat(one_hot, dim=1).float()))


class NestEncoder(nn.Module):
    """A dict or tuple of observations: each encoded, and concatenated."""

    def __init__(self, parts):
        super().__init__()
        self.keys = list(parts)
        self.encoders = nn.ModuleList([make_encoder(space) for space in parts.values()])
        self.out_features = sum(e.out_features for e in self.encoders)

    def forward(self, x):
        parts = [encode(x[key]) for key, encode in zip(self.keys, self.encoders)]
        return torch.cat(parts, dim=1)


def create_net(flags, env):
    return Net(env.observation_space, env.num_actions, env.action_shape, flags.use_lstm)


def choose_action(policy_logits, greedy=False):
    """An action for every [..., A] of logits: sampled, or the most probable one."""
    if greedy:
        return policy_logits.argmax(-1)
    probabilities = F.softmax(policy_logits, dim=-1)
    flat = torch.multinomial(probabilities.flatten(0, -2), 1)
    return flat.view(policy_logits.shape[:-1])


# Shared memory: rollout buffers and weights.


def rollout_specs(flags, env, model):
    """A nest of (shape, dtype): what one rollout holds. First dimension time, except
    for the initial core_state."""
    T = flags.unroll_length
    step = env.initial(seed=0)
    step = map_structure(lambda x: ((T + 1, *x.shape[1:]), torch.as_tensor(x).dtype), step)
    D = env.action_shape
    return {
        **step,
        "action": ((T, *D), torch.int64),
        "policy_logits": ((T, *D, max(env.num_actions)), torch.float32),
        "core_state": tuple(
            ((s.shape[0], *s.shape[2:]), s.dtype) for s in model.initial_state(1)
        ),
    }


def num_bytes(specs):
    """Of one rollout."""
    if isinstance(specs, dict):
        return sum(num_bytes(x) for x in specs.values())
    if is_spec(specs):
        return math.prod(specs[0]) * specs[1].itemsize
    return sum(num_bytes(x) for x in specs)


def is_spec(x):
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], torch.dtype)


def create_buffers(specs, num_buffers):
    """Shared tensors [T, num_buffers, ...]: a batch is buffers[:, indices]."""
    if is_spec(specs):
        (T, *shape), dtype = specs
        return torch.zeros(T, num_buffers, *shape, dtype=dtype).share_memory_()
    if isinstance(specs, dict):
        return {k: create_buffers(v, num_buffers) for k, v in specs.items()}
    return tuple(create_buffers(v, num_buffers) for v in specs)


class SharedWeights:
    """A network's weights in shared memory: one writer, any number of readers.

    Two copies, written in turn, so that a reader finds a whole one without a lock that
    a killed process could take along. (Where the CPU reorders stores, unlike x86, a
    reader may in theory see two versions mixed, one update apart: harmless.)
    """

    def __init__(self, model):
        self._copies = [
            {k: v.detach().cpu().clone().share_memory_() for k, v in model.state_dict().items()}
            for _ in range(2)
        ]
        self._version = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def version(self):
        return int(self._version)

    @torch.no_grad()
    def publish(self, model, version):
        copy = self._copies[version % 2]
        for name, x in model.state_dict().items():
            copy[name].copy_(x)
        self._version[0] = version

    @torch.no_grad()
    def fetch(self, model, have=None):
        """Loads the newest weights, unless they are version `have`. Returns theirs."""
        while True:
            version = self.version
            if version == have:
                return version
            model.load_state_dict(self._copies[version % 2])
            if self.version == version:  # Else it may have been overwritten meanwhile.
                return version


# Acting.


class Actor:
    """E environments and a network: fills rollouts, one after the other."""

    def __init__(self, flags, env, model, seed):
        self.flags = flags
        self.env = env
        self.model = model
        self.step = env.initial(seed)
        self.core_state = model.initial_state(env.num_envs)

    @torch.inference_mode()
    def rollout(self, buffers, indices):
        """Fills the buffers of the E indices with T steps each.

        buffers: a nest of NumPy arrays [T, num_buffers, ...].
        """
        T = self.flags.unroll_length
        for buffer, state in zip(buffers["core_state"], self.core_state):
            buffer[:, indices] = state.numpy()
        self._write(buffers, 0, indices)
        for t in range(T):
            step = map_structure(lambda x: torch.from_numpy(x)[None], self.step)
            outputs, self.core_state = self.model(step, self.core_state)
            logits = outputs["policy_logits"][0]  # [E, A]
            action = choose_action(logits).numpy()
            buffers["policy_logits"][t, indices] = logits.numpy()
            buffers["action"][t, indices] = action
            self.step = self.env.step(action)
            self._write(buffers, t + 1, indices)

    def _write(self, buffers, t, indices):
        def write(x, buffer):
            buffer[t, indices] = x

        map_structure(write, self.step, buffers)


def act(flags, index, seed, buffers, weights, connection):
    """Actor process. Fills the buffers whose indices the connection brings, until it
    brings None or is closed. Sends (indices, version of the weights), or the traceback
    of what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The learner decides when to end.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    try:
        env = create_env(flags, flags.envs_per_actor)
        model = create_net(flags, env).eval()
        actor = Actor(flags, env, model, seed)
        arrays = map_structure(lambda x: x.numpy(), buffers)
        version = None
        while (indices := connection.recv()) is not None:
            version = weights.fetch(model, version)
            actor.rollout(arrays, indices)
            connection.send((indices, version))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # The learner is gone.
    except Exception:
        try:
            connection.send(traceback.format_exc())
        except OSError:
            sys.exit(1)


class ActorProcesses:
    """Starts actors, gives them free buffers, passes full ones on, restarts the dead.

    Each actor has a pipe of its own and no lock in common with anybody, so killing one
    at any moment costs the rollouts it was filling and nothing else: their buffers go
    back to the free queue and another process takes its place.

    free(indices)   any thread; never blocks.
    run()           one thread; returns after stop().
    stop()          any thread, any number of times; ends the processes within seconds.
    full_queue      gets (index, version), or a Stop when there were too many restarts.
    """

    AHEAD = 2  # Sets of buffers an actor has: the one it fills, and the next.

    def __init__(self, flags, buffers, weights, full_queue):
        self.flags = flags
        self.buffers = buffers
        self.weights = weights
        self.full_queue = full_queue
        self.restarts = 0
        self._context = mp.get_context("spawn")  # Never fork: there are threads.
        self._lock = threading.Lock()
        self._free_queue = deque(range(flags.num_buffers))  # Guarded by _lock.
        self._actors = []  # Guarded by _lock.
        self._stopping = False  # Guarded by _lock.

    def start(self):
        for index in range(self.flags.num_actors):
            self._start_actor(index)

    def _start_actor(self, index):
        ours, theirs = self._context.Pipe()
        # Not the seeds of the process it replaces: those led to where it died.
        seed = experiment.derive_seed(self.flags.seed, index, self.restarts)
        process = self._context.Process(
            target=act,
            name=f"actor-{index}",
            args=(self.flags, index, seed, self.buffers, self.weights, theirs),
        )
        process.start()
        theirs.close()
        with self._lock:
            self._actors.append(_ActorProcess(index, process, ours))
            self._hand_out()

    def free(self, indices):
        with self._lock:
            self._free_queue.extend(indices)
            self._hand_out()

    def _hand_out(self):
        """With the lock. First those that have none."""
        E = self.flags.envs_per_actor
        for ahead in range(self.AHEAD):
            for actor in self._actors:
                if len(actor.held) == ahead and len(self._free_queue) >= E:
                    indices = [self._free_queue.popleft() for _ in range(E)]
                    actor.held.append(indices)
                    try:
                        actor.connection.send(indices)
                    except OSError:
                        pass  # Dead: run() finds out, and frees what it held.

    def run(self):
        while not self._stopping:
            with self._lock:
                actors = {a.connection: a for a in self._actors}
            for connection in multiprocessing.connection.wait(list(actors), timeout=0.5):
                self._receive(actors[connection])

    def _receive(self, actor):
        try:
            message = actor.connection.recv()
        except (EOFError, OSError):
            message = None
        if isinstance(message, tuple):
            indices, version = message
            with self._lock:
                actor.held.popleft()
                self._hand_out()
            for index in indices:
                self.full_queue.put((index, version))
        elif not self._stopping:
            self._replace(actor, message)

    def _replace(self, actor, error):
        actor.process.join(timeout=5)
        actor.process.kill()
        actor.process.join()
        actor.connection.close()
        with self._lock:
            self._actors.remove(actor)
            for indices in actor.held:
                self._free_queue.extend(indices)
        code = actor.process.exitcode
        reason = f"\n{error}" if error else (
            f" {signal.Signals(-code).name}" if code < 0 else f" exit code {code}"
        )
        log.error("actor %d (pid %d) died:%s", actor.index, actor.process.pid, reason)
        if self.restarts >= self.flags.max_actor_restarts:
            self.full_queue.put(
                Stop(
                    f"actor {actor.index} died after {self.restarts} restarts of actors "
                    "(--max_actor_restarts)"
                )
            )
            self._stopping = True
            return
        self.restarts += 1
        log.info(
            "actor %d is restarted (%d of %d)",
            actor.index, self.restarts, self.flags.max_actor_restarts,
        )
        self._start_actor(actor.index)

    def stop(self):
        with self._lock:
            self._stopping = True
            actors, self._actors = self._actors, []
        for actor in actors:
            try:
                actor.connection.send(None)
            except OSError:
                pass
        deadline = time.monotonic() + 2
        for actor in actors:
            actor.process.join(max(0, deadline - time.monotonic()))
            actor.process.kill()  # In the middle of a long step.
            actor.process.join()
            actor.connection.close()

    def kill(self):
        """From a signal handler: takes no lock."""
        for actor in list(self._actors):
            actor.process.kill()


class _ActorProcess:
    def __init__(self, index, process, connection):
        self.index = index
        self.process = process
        self.connection = connection
        self.held = deque()  # Lists of indices, in the order it fills them.


# Learning.


def learn(flags, model, optimizer, scheduler, batch):
    """One gradient step on one batch. Returns its statistics, tensors [].

    No queue, no lock, no logging in here, so that a test can call it.
    """
    outputs, _ = model(batch, batch["core_state"])  # [T + 1, B, ...]
    bootstrap_value = outputs["baseline"][-1]  # [B]
    outputs = {key: x[:-1] for key, x in outputs.items()}  # [T, B, ...]

    # Index t of all that follows is about the action taken on step t: what it led to
    # is in step t + 1. Nothing did lead from a last observation to a first one.
    rewards = batch["reward"][1:]
    if flags.reward_clipping == "abs_one":
        rewards = rewards.clamp(-1, 1)
    losses = vtrace.compute_losses(
        behavior_policy_logits=batch["policy_logits"],
        target_policy_logits=outputs["policy_logits"],
        actions=batch["action"],
        discounts=flags.discounting * (~batch["terminated"][1:]).float(),
        rewards=rewards,
        values=outputs["baseline"],
        bootstrap_value=bootstrap_value,
        mask=~batch["done"][1:],
        baseline_cost=flags.baseline_cost,
        entropy_cost=flags.entropy_cost,
        reduction=flags.loss_reduction,
    )
    optimizer.zero_grad()
    losses.total.backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), flags.grad_norm_clipping)
    optimizer.step()
    scheduler.step()
    return {
        "total_loss": losses.total.detach(),
        "pg_loss": losses.pg.detach(),
        "baseline_loss": losses.baseline.detach(),
        "entropy_loss": losses.entropy.detach(),
        "grad_norm": grad_norm.detach(),
    }


def create_optimizer(flags, model):
    """(optimizer, scheduler): RMSProp, learning rate falling linearly to zero."""
    optimizer = torch.optim.RMSprop(
        model.parameters(),
        lr=flags.learning_rate,
        alpha=flags.alpha,
        momentum=flags.momentum,
        eps=flags.epsilon,
    )
    steps = flags.unroll_length * flags.batch_size

    def factor(update):
        return 1 - min(update * steps, flags.total_steps) / flags.total_steps

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make_batch(buffers, items, device):
    """Copies rollouts, (index, version of the weights), out of the buffers.

    Returns a nest of [T, B, ...] on the device, the episodes that ended in it, and the
    versions.
    """
    indices = torch.tensor([index for index, _ in items])
    batch = map_structure(lambda x: x.index_select(1, indices), buffers)
    end = batch["episode_end"][1:]  # Step 0 was counted with the rollout before.
    training_end = (batch["terminated"] | batch["truncated"])[1:]
    episodes = {
        "episode_return": batch["episode_return"][1:][end].tolist(),
        "episode_step": batch["episode_step"][1:][end].tolist(),
        "training_episode_return": batch["training_episode_return"][1:][
            training_end
        ].tolist(),
    }
    batch = map_structure(lambda x: x.to(device, non_blocking=True), batch)
    return batch, episodes, [version for _, version in items]


class Learner:
    """What an update touches: model, optimizer, published weights, counters, logs."""

    def __init__(self, flags, run, model, weights, device):
        self.flags = flags
        self.run = run
        self.device = device
        # channels_last: twice as fast to train on a CPU.
        self.model = model.to(device, memory_format=torch.channels_last)
        self.optimizer, self.scheduler = create_optimizer(flags, self.model)
        self.weights = weights

    def update(self, batch, episodes, versions):
        """Learns from what make_batch() returned. One thread at a time."""
        run = self.run
        stats = learn(self.flags, self.model, self.optimizer, self.scheduler, batch)
        stats = {name: x.item() for name, x in stats.items()}  # GPU sync point.
        run.update(
            num_steps=self.flags.unroll_length * self.flags.batch_size,
            losses=stats,
            episodes=episodes,
            policy_lag=run.updates - sum(versions) / len(versions),
            learning_rate=self.optimizer.param_groups[0]["lr"],
        )
        self.weights.publish(self.model, run.updates)
        if run.save_is_due():
            self.save()

    def save(self):
        self.run.save(
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            scheduler=self.scheduler.state_dict(),
        )

    def restore(self, checkpoint):
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])
        self.run.restore(checkpoint)
        self.weights.publish(self.model, self.run.updates)

    @property
    def finished(self):
        return self.run.step >= self.flags.total_steps


# Training.


def train(flags):
    """Trains until --total_steps or a signal. Returns the exit code.

    ValueError for bad input, before anything is started.
    """
    check_flags(flags)
    torch.set_num_threads(num_learner_cores(flags))
    flags.seed = experiment.set_seed(flags.seed)
    device = torch.device(
        "cuda" if torch.cuda.is_available() and not flags.disable_cuda else "cpu"
    )
    # This environment only tells the shapes, unless there are no actors.
    env = create_env(flags, flags.envs_per_actor)
    model = create_net(flags, env)
    specs = rollout_specs(flags, env, model)
    check_shared_memory(flags, num_bytes(specs) * flags.num_buffers)
    run = experiment.Run(flags, env.frames_per_step)
    checkpoint = None
    if not flags.disable_checkpoint and run.checkpoint_path.exists():
        checkpoint = experiment.load_checkpoint(run.checkpoint_path, flags, model)
    run.open()

    buffers = create_buffers(specs, flags.num_buffers)
    weights = SharedWeights(model)
    learner = Learner(flags, run, model, weights, device)
    if checkpoint is not None:
        learner.restore(checkpoint)
        log.info("resuming %s at step %d", run.checkpoint_path, run.step)
        # Not the episodes of the first session again.
        flags.seed = experiment.derive_seed(flags.seed, run.step)
    log.info(
        "%s: %d actors of %d environments, learner on %s; results in %s",
        flags.env, flags.num_actors, flags.envs_per_actor, device, run.path,
    )

    stop = threading.Event()
    try:
        run.start()
        if flags.num_actors == 0:
            with experiment.Signals(stop) as signals:
                train_serially(flags, env, learner, buffers, stop)
        else:
            env.close()
            actors = ActorProcesses(flags, buffers, weights, queue.Queue())
            with experiment.Signals(stop, actors.kill) as signals:
                train_with_actors(flags, actors, learner, buffers, stop)
        if signals.received is not None:
            raise Stop(f"{signal.Signals(signals.received).name}: stopped",
                       128 + signals.received)
        learner.save()
        exit_code = 0
    except Stop as e:
        exit_code = end_early(e, learner)
    except OSError as e:
        exit_code = end_early(Stop(f"{e.strerror}: {e.filename or run.path}", save=False), learner)
    finally:
        run.close()
    log.info("step %d; results in %s", run.step, run.path)
    log.info("test it: %s", test_command(flags))
    return exit_code


def train_serially(flags, env, learner, buffers, stop):
    """Everything in this thread: act, then learn. The same seed, the same losses."""
    model = create_net(flags, env).eval()
    actor = Actor(flags, env, model, flags.seed)
    arrays = map_structure(lambda x: x.numpy(), buffers)
    free_queue = deque(range(flags.num_buffers))
    full_queue = deque()
    version = None
    while not (learner.finished or stop.is_set()):
        indices = [free_queue.popleft() for _ in range(flags.envs_per_actor)]
        version = learner.weights.fetch(model, version)
        actor.rollout(arrays, indices)
        full_queue.extend((index, version) for index in indices)
        while len(full_queue) >= flags.batch_size and not learner.finished:
            items = [full_queue.popleft() for _ in range(flags.batch_size)]
            batch = make_batch(buffers, items, learner.device)
            free_queue.extend(index for index, _ in items)
            learner.update(*batch)


def train_with_actors(flags, actors, learner, buffers, stop):
    """Starts the actors and learner threads, waits for `stop` or the last step, ends
    them all. Raises what went wrong in any of them."""
    full_queue = actors.full_queue
    errors = []
    batch_lock = threading.Lock()  # One thread takes a whole batch off the full queue.
    update_lock = threading.Lock()  # One thread updates the weights.

    def batch_and_learn():
        while True:
            with batch_lock:
                items = []
                while len(items) < flags.batch_size:
                    item = full_queue.get()
                    if item is None:
                        full_queue.put(None)  # For the next thread.
                        return
                    if isinstance(item, Stop):
                        raise item
                    items.append(item)
            batch = make_batch(buffers, items, learner.device)
            actors.free(index for index, _ in items)
            with update_lock:
                if learner.finished or stop.is_set():
                    return
                learner.update(*batch)

    def guarded(body):
        def target():
            try:
                body()
            except Exception as e:
                errors.append(e)
            finally:
                stop.set()

        return target

    threads = [
        threading.Thread(target=guarded(body), name=name, daemon=True)
        for name, body in [("actors", actors.run)]
        + [(f"learner-{i}", batch_and_learn) for i in range(flags.num_learner_threads)]
    ]
    try:
        actors.start()
        for thread in threads:
            thread.start()
        stop.wait()
    finally:
        stop.set()
        actors.stop()
        full_queue.put(None)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]


def end_early(stop, learner):
    """Says why, and saves what is worth saving. Returns the exit code."""
    log.error("%s", stop)
    if stop.save:
        try:
            learner.save()
        except OSError as e:
            log.error("no checkpoint: %s; %s", e.strerror, learner.run.last_checkpoint())
            return 1
    return stop.exit_code


def num_learner_cores(flags):
    """For one update. On a CPU it takes about 0.3 of what a step costs in all, with the
    shallow network on Atari; the actors have the rest."""
    if flags.num_actors == 0:
        return 1
    return max(1, round(0.3 * experiment.num_cores() / flags.num_learner_threads))


def check_flags(flags):
    """ValueError if flags do not fit together."""
    in_actors = max(1, flags.num_actors) * flags.envs_per_actor
    if flags.num_buffers < in_actors + flags.batch_size:
        raise ValueError(
            f"--num_buffers {flags.num_buffers} is too small: actors fill {in_actors} "
            f"(--num_actors {flags.num_actors} times --envs_per_actor "
            f"{flags.envs_per_actor}) and a batch takes {flags.batch_size} "
            f"(--batch_size): use {in_actors + flags.batch_size} or more"
        )


def check_shared_memory(flags, needed):
    """ValueError if /dev/shm is too small: writing past its end would be a SIGBUS."""
    if not os.path.isdir("/dev/shm"):
        return  # Not Linux: shared memory has no such limit.
    available = shutil.disk_usage("/dev/shm").free
    if needed > available:
        raise ValueError(
            f"the rollout buffers need {needed:,} bytes of shared memory, /dev/shm has "
            f"{available:,}: use fewer --num_buffers ({flags.num_buffers} now), or "
            "enlarge it (mount -o remount,size=8G /dev/shm; docker run --shm-size=8g)"
        )


def test_command(flags):
    """What the user types to see the trained agent play."""
    words = ["python -m monobeast --mode test", "--env", flags.env, "--xpid", flags.xpid]
    default = parser().get_default("savedir")
    if flags.savedir != default:
        words += ["--savedir", shlex.quote(flags.savedir)]
    if flags.use_lstm:
        words += ["--use_lstm"]
    if flags.full_action_space:
        words += ["--full_action_space"]
    return " ".join(words)


# Testing.


def test(flags):
    """Plays whole games with the weights of a checkpoint. Returns the exit code."""
    path = experiment.run_path(flags)
    render_mode = None
    if flags.mode == "test_render":
        if sys.platform == "linux" and not (
            os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        ):
            raise ValueError(
                "--mode test_render needs a display, and neither DISPLAY nor "
                "WAYLAND_DISPLAY is set: use --mode test --video FILE.mp4"
            )
        render_mode = "human"
    elif flags.video:
        render_mode = "rgb_array"
    flags.seed = experiment.set_seed(flags.seed)
    env = create_env(flags, 1, render_mode)
    model = create_net(flags, env).eval()
    checkpoint = experiment.load_checkpoint(path / "model.tar", flags, model)
    print(f"{path / 'model.tar'}: step {checkpoint['step']}")
    returns, lengths = [], []
    video = None
    step = env.initial(flags.seed)
    core_state = model.initial_state(1)
    while len(returns) < flags.num_test_episodes:
        if flags.video and not returns:
            video = video or experiment.Video(flags.video, env)
            video.write(env.render())
        with torch.inference_mode():
            inputs = map_structure(lambda x: torch.from_numpy(x)[None], step)
            outputs, core_state = model(inputs, core_state)
            action = choose_action(outputs["policy_logits"][0], not flags.sample_actions)
        step = env.step(action.numpy())
        if step["episode_end"][0]:
            returns.append(float(step["episode_return"][0]))
            lengths.append(int(step["episode_step"][0]))
            print(f"episode {len(returns)}: return {returns[-1]:g}, {lengths[-1]} steps")
            if video is not None:
                video.write(env.render())
                video.close()
                video = None
    env.close()
    experiment.report_test(path, checkpoint, flags, returns, lengths)
    return 0


def main(argv=None):
    p = parser()
    flags = p.parse_args(argv)
    set_defaults(flags)
    experiment.setup_logging()
    try:
        return train(flags) if flags.mode == "train" else test(flags)
    except ValueError as e:
        p.error(str(e))


if __name__ == "__main__":
    sys.exit(main())
