"""IMPALA on one machine: MonoBeast.

    python -m monobeast --env PongNoFrameskip-v4

Read it top to bottom: flags, create_env(), Net, Actor, act(), learn(), train(), test().

Actor processes step environments, evaluate the network on the CPU and write rollouts
into buffers in shared memory; a free queue and a full queue pass the buffers' indices;
learner threads make batches of full buffers and update the weights, which the actors
take at the start of each rollout (TorchBeast, arXiv 1910.03552, section 5.1).

T is the unroll length, B the batch size, A the number of actions, E the number of
environments an actor steps together. A rollout has T + 1 steps: step 0 repeats the last
step of the rollout before it. Its actions are those taken on steps 0 to T - 1.
"""

import queue
import signal
import sys
import threading
import traceback
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

import atari_wrappers
import environment
import experiment
import play
import vtrace
from actors import (
    ActorProcesses,
    SharedWeights,
    check_limits,
    create_buffers,
    receive,
    send,
)
from command_line import Parser, keep_freed_memory, log, number, setup_logging
from encoders import choose_precision, initialize, make_encoder
from environment import BadInput, map_structure
from experiment import Stop
from learner import (
    Learner,
    choose_action,
    end_early,
    ended_episodes,
    set_gradients,
    to_device,
)

# Flags.


def parser():
    p = Parser(
        prog="monobeast",
        description="IMPALA with V-trace on one machine.",
        parents=[experiment.parser()],
    )
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
                   metavar="N", help="in a run (default: %(default)s)")
    # fmt: on
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
    experiment.set_defaults(flags)


# The environment.


def create_env(flags, num_envs, render_mode=None):
    """num_envs environments. To use another environment, edit this function."""
    if atari_wrappers.is_atari(flags.env):
        options = {
            "sticky_actions": flags.sticky_actions,
            "full_action_space": flags.full_action_space,
            "terminal_on_life_loss": flags.terminal_on_life_loss,
        }
        if render_mode is not None:
            env = atari_wrappers.make_single(
                flags.env, render_mode=render_mode, **options
            )
        else:
            env = atari_wrappers.make_vector(flags.env, num_envs, **options)
    else:
        env = environment.make(flags.env, num_envs, render_mode)
    return environment.Environment(env)


# The network.


class Net(nn.Module):
    """The agent's network. To use another one, edit this class.

    forward(step, core_state) takes a dict of tensors [T, B, ...] (environment.py) and
    returns (outputs, core_state): outputs["policy_logits"] [T, B, A], or [T, B, D, A]
    if an action is D numbers, and outputs["baseline"] [T, B], both float32. core_state
    is a tuple of tensors [1, B, hidden], () without --use_lstm. bfloat16 is about
    images.
    """

    def __init__(
        self,
        observation_space,
        num_actions,
        action_shape,
        use_lstm=False,
        bfloat16=False,
    ):
        super().__init__()
        self.num_actions = num_actions
        self.action_shape = action_shape
        self.encoder = make_encoder(observation_space, bfloat16=bfloat16)
        # The last action, one-hot, and the last reward, clipped (IMPALA, figure 3).
        core_size = self.encoder.out_features + sum(num_actions) + 1
        self.core = None
        if use_lstm:
            self.core = nn.LSTMCell(core_size, 256)
            core_size = 256
        self.policy = nn.Linear(core_size, sum(num_actions))
        self.baseline = nn.Linear(core_size, 1)
        if self.core is not None:
            # Remember from the start: the forget gate's bias (the second quarter).
            nn.init.ones_(self.core.bias_ih[256:512])
        initialize(self.encoder)
        initialize(self.policy, gain=0.01)  # Nearly uniform at first.
        initialize(self.baseline, gain=1)

    def initial_state(self, batch_size):
        if self.core is None:
            return ()
        shape = (1, batch_size, self.core.hidden_size)
        return (torch.zeros(shape), torch.zeros(shape))

    def forward(self, step, core_state=()):
        T, B = step["reward"].shape
        observation = map_structure(lambda o: o.flatten(0, 1), step["observation"])
        x = self.encoder(observation)
        last_action = step["last_action"].reshape(T * B, -1)  # [T * B, D]
        x = torch.cat(
            [x]
            + [F.one_hot(a, n) for a, n in zip(last_action.unbind(1), self.num_actions)]
            + [step["reward"].clamp(-1, 1).reshape(T * B, 1)],
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
        """The LSTM over x [T, B, features], reset where an episode begins. (A cell step
        by step: on a CPU five times faster than nn.LSTM, which the resets cut up.)"""
        outputs = []
        state = tuple(s[0] for s in core_state)  # [B, hidden]
        for x_t, keep_t in zip(x, (~done).unsqueeze(-1).to(x.dtype)):
            state = self.core(x_t, tuple(keep_t * s for s in state))
            outputs.append(state[0])
        return torch.stack(outputs), tuple(s[None] for s in state)

    def _logits(self, x):
        if not self.action_shape:
            return x
        # D numbers with their own numbers of choices: impossible ones get no mass.
        parts = [
            F.pad(part, (0, max(self.num_actions) - part.shape[1]), value=-1e9)
            for part in x.split(self.num_actions, dim=1)
        ]
        return torch.stack(parts, dim=1)  # [N, D, A]


def create_net(flags, env):
    return Net(
        env.observation_space,
        env.num_actions,
        env.action_shape,
        flags.use_lstm,
        flags.precision == "bfloat16",
    )


# Acting.


def rollout_specs(flags, env, model):
    """What one rollout holds: a nest of tensors without data. Their first dimension is
    time, except for the initial core_state's."""
    T = flags.unroll_length

    def spec(shape, dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    step = map_structure(torch.as_tensor, env.initial(seed=0))
    logits_shape = (T, *env.action_shape, max(env.num_actions))
    return {
        **map_structure(lambda x: spec((T + 1, *x.shape[1:]), x.dtype), step),
        "action": spec((T, *env.action_shape), torch.int64),
        "policy_logits": spec(logits_shape, torch.float32),
        "core_state": map_structure(
            lambda x: spec((x.shape[0], *x.shape[2:]), x.dtype), model.initial_state(1)
        ),
    }


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
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    environment.watch(
        flags.env, flags.env_timeout_seconds, lambda error: send(connection, error)
    )
    try:
        with environment.watched():
            env = create_env(flags, flags.envs_per_actor)
        model = create_net(flags, env).eval()
        actor = Actor(flags, env, model, seed)
        arrays = map_structure(lambda x: x.numpy(), buffers)
        version = None
        while (indices := receive(connection)) is not None:
            version = weights.fetch(model, version)
            actor.rollout(arrays, indices)
            send(connection, (indices, version))
    except Exception:
        send(connection, traceback.format_exc())


# Learning.


def compute_losses(flags, model, batch):
    """The losses of a batch [T + 1, B, ...]: vtrace.Losses."""
    outputs, _ = model(batch, batch["core_state"])  # [T + 1, B, ...]
    bootstrap_value = outputs["baseline"][-1]  # [B]
    outputs = {key: x[:-1] for key, x in outputs.items()}  # [T, B, ...]

    # Index t of all that follows is about the action taken on step t: what it led to
    # is in step t + 1. Nothing did lead from a last observation to a first one.
    rewards = batch["reward"][1:]
    if flags.reward_clipping == "abs_one":
        rewards = rewards.clamp(-1, 1)
    return vtrace.compute_losses(
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


def learn(flags, model, optimizer, scheduler, batch):
    """One gradient step on one batch. Returns its statistics, tensors [].

    No queue, no lock, no logging in here, so that a test can call it.
    """
    losses = set_gradients(flags, model, batch, compute_losses)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), flags.grad_norm_clipping)
    optimizer.step()
    scheduler.step()
    total, pg, baseline, entropy = losses
    return {
        "total_loss": total,
        "pg_loss": pg,
        "baseline_loss": baseline,
        "entropy_loss": entropy,
        "grad_norm": grad_norm.detach(),
    }


def make_batch(buffers, items, device):
    """Copies rollouts, (index, version of the weights), out of the buffers.

    Returns a nest of [T, B, ...] on the device, the episodes that ended in it, and the
    versions.
    """
    indices = torch.tensor([index for index, _ in items])
    batch = map_structure(lambda x: x.index_select(1, indices), buffers)
    episodes = ended_episodes(batch)
    return to_device(batch, device), episodes, [version for _, version in items]


# Training.


def train(flags):
    """Trains until --total_steps or a signal. Returns the exit code.

    BadInput, before anything is started.
    """
    check_flags(flags)
    torch.set_num_threads(num_learner_cores(flags))
    flags.seed = experiment.set_seed(flags.seed)
    device = experiment.get_device(flags, "learner_device")
    # With actors, this environment only tells the shapes.
    env = create_env(flags, flags.envs_per_actor)
    if env.num_envs != flags.envs_per_actor:
        raise BadInput(
            f"create_env() made {env.num_envs} environments, expected num_envs = "
            f"{flags.envs_per_actor} (--envs_per_actor)"
        )
    choose_precision(flags, env.observation_space)
    model = create_net(flags, env)
    specs = rollout_specs(flags, env, model)
    check_limits(flags, specs, model)
    run = experiment.Run(flags, env.frames_per_step)
    checkpoint = run.open(model)

    buffers = create_buffers(specs, flags.num_buffers)
    learner = Learner(flags, run, model, SharedWeights(model), device, learn)
    if checkpoint is not None:
        learner.restore(checkpoint)
        log.info("resuming %s at step %d", run.checkpoint_path, run.step)
    # The episodes of a resumed run are not those of its first session again.
    seed = experiment.derive_seed(flags.seed, run.step)
    log.info(
        "%s: %d actors of %d environments, learner on %s, %s; results in %s",
        flags.env,
        flags.num_actors,
        flags.envs_per_actor,
        device,
        flags.precision,
        run.path,
    )
    exit_code = 0
    with experiment.Signals() as signals:
        try:
            run.stage_seconds = lambda: dict(learner.stage_seconds)
            run.start()
            if flags.num_actors == 0:
                train_serially(flags, env, seed, learner, buffers, signals)
            else:
                env.close()
                train_with_actors(flags, seed, learner, buffers, signals)
            learner.save()
        except Stop as e:
            exit_code = end_early(e, learner)
        finally:
            run.close()
    log.info("step %d of %d; results in %s", run.step, flags.total_steps, run.path)
    if run.checkpoint_path.exists():
        log.info("test it: %s", play.command(flags, "monobeast"))
    return exit_code


def train_serially(flags, env, seed, learner, buffers, signals):
    """Everything in this thread: act, then learn. The same seed, the same losses."""
    model = create_net(flags, env).eval()
    actor = Actor(flags, env, model, seed)
    arrays = map_structure(lambda x: x.numpy(), buffers)
    free_queue = deque(range(flags.num_buffers))
    full_queue = deque()
    version = None
    while not learner.finished:
        indices = [free_queue.popleft() for _ in range(flags.envs_per_actor)]
        version = learner.weights.fetch(model, version)
        actor.rollout(arrays, indices)
        full_queue.extend((index, version) for index in indices)
        while len(full_queue) >= flags.batch_size and not learner.finished:
            items = [full_queue.popleft() for _ in range(flags.batch_size)]
            batch = make_batch(buffers, items, learner.device)
            free_queue.extend(index for index, _ in items)
            learner.update(*batch)
            signals.check()


def train_with_actors(flags, seed, learner, buffers, signals):
    """Starts actors and learner threads, waits for a signal or the last step, ends them
    all. Raises what went wrong in any of them."""
    full_queue = queue.Queue()
    actors = ActorProcesses(act, flags, seed, buffers, learner.weights, full_queue)
    batch_lock = threading.Lock()  # One thread takes a whole batch off the full queue.
    update_lock = threading.Lock()  # One thread updates the weights.
    stop = threading.Event()
    errors = []

    def batch_and_learn():
        while True:
            with batch_lock:
                items = []
                while len(items) < flags.batch_size:
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

    def guarded(body):
        def target():
            try:
                body()
            except Exception as e:
                errors.append(e)
            finally:
                stop.set()

        return target

    bodies = {"actors": actors.run}
    for i in range(flags.num_learner_threads):
        bodies[f"learner-{i}"] = batch_and_learn
    threads = [
        threading.Thread(target=guarded(body), name=name)
        for name, body in bodies.items()
    ]
    signals.on_second = actors.kill
    try:
        actors.start()
        for thread in threads:
            thread.start()
        # A handler may not set an Event that this thread may be waiting for.
        while not stop.wait(0.2):
            signals.check()
    finally:
        stop.set()
        actors.stop()
        full_queue.put(None)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        actors.join()
    if errors:
        raise errors[0]


def num_learner_cores(flags):
    """For one update. On a CPU it takes about 0.3 of what a step costs in all, with the
    shallow network on Atari; the actors have the rest."""
    if flags.num_actors == 0:
        return 1
    return max(1, round(0.3 * experiment.num_cores() / flags.num_learner_threads))


def check_flags(flags):
    """BadInput if flags do not fit together."""
    if flags.video:
        raise BadInput("--video goes with --mode test")
    in_actors = max(1, flags.num_actors) * flags.envs_per_actor
    if flags.num_buffers < in_actors + flags.batch_size:
        raise BadInput(
            f"--num_buffers {flags.num_buffers} is too small: actors fill {in_actors} "
            f"(--num_actors {flags.num_actors} times --envs_per_actor "
            f"{flags.envs_per_actor}) and a batch takes {flags.batch_size} "
            f"(--batch_size): use {in_actors + flags.batch_size} or more"
        )


# Testing.


def test(flags):
    """Plays whole games with the weights of a checkpoint. Returns the exit code."""
    render_mode = play.render_mode(flags)
    path = experiment.run_path(flags)
    flags.seed = experiment.set_seed(flags.seed)
    env = create_env(flags, 1, render_mode)
    model = create_net(flags, env).eval()
    checkpoint = experiment.load_checkpoint(path / "model.tar", flags, model)
    print(f"{path / 'model.tar'}: step {checkpoint['step']}")
    core_state = model.initial_state(1)

    @torch.inference_mode()
    def policy(step):
        nonlocal core_state  # Net itself forgets it where an episode begins.
        inputs = map_structure(lambda x: torch.from_numpy(x)[None], step)
        outputs, core_state = model(inputs, core_state)
        logits = outputs["policy_logits"][0]
        return choose_action(logits, greedy=not flags.sample_actions).numpy()

    returns, lengths = play.episodes(flags, env, policy)
    play.report(flags, path, checkpoint["step"], returns, lengths)
    return 0


def main(argv=None):
    p = parser()
    flags = p.parse_args(argv)
    set_defaults(flags)
    setup_logging()
    keep_freed_memory()
    try:
        return train(flags) if flags.mode == "train" else test(flags)
    except BadInput as e:
        p.error(str(e))
    except KeyboardInterrupt:  # Before or after training: in it, see Signals.
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
