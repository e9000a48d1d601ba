"""IMPALA with environment servers: PolyBeast.

    python -m polybeast --env PongNoFrameskip-v4
    python -m polybeast --server_addresses localhost:50051,localhost:50052
    python -m polybeast --server_addresses @hosts.txt

Read it top to bottom: flags, Net, inference(), learn(), train(), test(). Environments
are in polybeast_env.py.

Environment servers, here or on other hosts, step environments. In this process actors
(threads in C++, one for each stream to a server) ask for actions and assemble rollouts;
an inference thread evaluates the network for all of them in batches; a learner thread
updates the weights, which the inference takes for its next batch (TorchBeast, arXiv
1910.03552, section 5.2).

T is the unroll length, B the batch size, A the number of actions, E the number of
environments of a stream. A rollout has T + 1 steps: step 0 repeats the last step of the
rollout before it. Its actions are those taken on steps 0 to T - 1.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading

import torch
import torch.nn.functional as F
from torch import nn

import encoders
import experiment
import files
import play
import polybeast_env
import streams
import tls
import vtrace
from command_line import (
    Parser,
    allow_open_files,
    keep_freed_memory,
    log,
    number,
    setup_logging,
)
from encoders import choose_precision, initialize, make_encoder
from environment import BadInput, map_structure
from experiment import Stop
from learner import (
    Learner,
    PublishedWeights,
    choose_action,
    end_early,
    ended_episodes,
    own_stream,
    set_gradients,
    to_device,
    to_host,
)

# Flags.


def parser():
    p = Parser(
        prog="polybeast",
        description="IMPALA with V-trace and environment servers.",
        parents=[experiment.parser(), tls.parser()],
    )
    # fmt: off
    g = p.add_argument_group("environment servers")
    g.add_argument("--server_addresses", metavar="HOST:PORT,...",
                   help="of running servers (python -m polybeast_env), or unix:PATH; "
                   "one stream each; @FILE: one a line, read again when it changes "
                   "(default: starts servers of its own)")
    g.add_argument("--num_servers", type=number(int, 1), metavar="N",
                   help="servers of its own (default: one per core)")
    g.add_argument("--envs_per_server", type=number(int, 1), metavar="E",
                   help="environments of each (default: 32 in all)")
    g.add_argument("--connect_timeout_seconds", type=number(float, above=0),
                   default=60, metavar="S",
                   help="without any server (default: %(default)s)")

    g = p.add_argument_group("network")
    g.add_argument("--net", default="deep", choices=("deep", "shallow"),
                   help="for images; shallow is MonoBeast's (default: %(default)s)")
    g.add_argument("--actor_device", metavar="DEVICE",
                   help="of the inference (default: the learner's)")
    g.add_argument("--num_inference_threads", type=number(int, 1), metavar="N",
                   help="one prepares a batch while another is evaluated "
                   "(default: 2 with a GPU, else 1)")
    # fmt: on
    return p


def set_defaults(flags):
    """Fills in the flags whose defaults depend on the machine or on other flags."""
    if flags.num_servers is None:
        flags.num_servers = experiment.num_cores()
    if flags.envs_per_server is None:
        flags.envs_per_server = max(1, 32 // flags.num_servers)
    experiment.set_defaults(flags)
    if flags.actor_device is None:
        flags.actor_device = flags.learner_device
    if flags.num_inference_threads is None:
        flags.num_inference_threads = 1 if flags.actor_device == "cpu" else 2


# The network.


class Net(nn.Module):
    """The agent's network. To use another one, edit this class.

    forward(step, core_state) takes a dict of tensors [T, B, ...] (environment.py) and
    returns (outputs, core_state): outputs["policy_logits"] [T, B, A], or [T, B, D, A]
    if an action is D numbers, and outputs["baseline"] [T, B], both float32. core_state
    is a tuple of tensors [1, B, hidden], () without --use_lstm. deep and bfloat16 are
    about images.
    """

    def __init__(
        self,
        observation_space,
        num_actions,
        action_shape,
        use_lstm=False,
        deep=True,
        bfloat16=False,
    ):
        super().__init__()
        self.num_actions = num_actions
        self.action_shape = action_shape
        self.encoder = make_encoder(observation_space, deep, bfloat16)
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
        flags.net == "deep",
        flags.precision == "bfloat16",
    )


# Acting.


@torch.inference_mode()
def inference(batcher, model, weights, device):
    """Answers the actors, batch by batch, until the batcher is closed.

    A batch's inputs are (step, core_state), [1, n, ...]; its outputs what is to be
    learned from, and the next core_state. The weights do not change within a batch.
    """
    version = None
    for batch in batcher:
        version = weights.fetch(model, version)
        inputs = map_structure(
            lambda x: x.to(device, non_blocking=True), batch.get_inputs()
        )
        outputs, core_state = to_host(model(*inputs), device)
        logits = outputs["policy_logits"]  # [1, n, A]
        try:
            action = choose_action(logits)
        except ValueError as e:
            if not all(p.isfinite().all() for p in model.parameters()):
                raise Stop(str(e), save=False) from e  # It will not get better.
            batch.set_error(str(e))  # It costs these streams' rollouts, not the run.
            continue
        answer = {
            "action": action,
            "policy_logits": logits,
            "version": torch.full(outputs["baseline"].shape, version),
        }
        batch.set_outputs((answer, core_state))


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


# Training.


def train(flags):
    """Trains until --total_steps or a signal. Returns the exit code.

    BadInput, before anything is started.
    """
    try:  # Not at the top: testing needs no C++.
        from libtorchbeast import ActorPool, BatchingQueue, DynamicBatcher
    except ImportError as e:
        raise BadInput(str(e)) from e
    if flags.video:
        raise BadInput("--video goes with --mode test")
    pem = tls.load(flags, "learner")
    num_streams = flags.num_servers
    if flags.server_addresses is not None:
        num_streams = len(streams.addresses(flags))
    allow_open_files(streams.FILES_PER_STREAM * num_streams)
    flags.seed = experiment.set_seed(flags.seed)
    device = experiment.get_device(flags, "learner_device")
    actor_device = experiment.get_device(flags, "actor_device")
    env = polybeast_env.create_env(flags, 1)  # Only tells what steps look like.
    step = map_structure(torch.tensor, env.initial(0))
    env.close()
    choose_precision(flags, env.observation_space)
    model = create_net(flags, env)
    run = experiment.Run(flags, env.frames_per_step)
    checkpoint = run.open(model)
    weights = PublishedWeights(model, actor_device)
    learner = Learner(flags, run, model, weights, device, learn)
    if checkpoint is not None:
        learner.restore(checkpoint)
        log.info("resuming %s at step %d", run.checkpoint_path, run.step)

    if flags.insecure:
        log.warning(tls.INSECURE)

    exit_code = 0
    with experiment.Signals() as signals, contextlib.ExitStack() as stack:
        try:
            servers = stack.enter_context(polybeast_env.Servers())
            signals.on_second = servers.kill
            addresses = server_addresses(flags, servers, stack)
            # One batch waits while another is learned from; no more, for the policy's
            # sake.
            learner_queue = BatchingQueue(
                batch_dim=1,
                minimum_batch_size=flags.batch_size,
                maximum_batch_size=flags.batch_size,
                maximum_queue_size=flags.batch_size,
                pin_memory=device.type == "cuda",
            )
            inference_batcher = DynamicBatcher(
                batch_dim=1, pin_memory=actor_device.type == "cuda"
            )
            actors = ActorPool(
                flags.unroll_length,
                learner_queue,
                inference_batcher,
                addresses,
                model.initial_state(1),
                observation_space=str(env.observation_space),
                action_space=str(env.action_space),
                # The episodes of a resumed run are not those of its first session.
                seed=experiment.derive_seed(flags.seed, run.step),
                connect_timeout_s=flags.connect_timeout_seconds,
                max_rollouts=learner.rollouts_left,
                **pem,
                step=step,
            )
            log.info(
                "%s: %d streams, learner on %s, inference on %s, %s; results in %s",
                flags.env,
                len(addresses),
                device,
                actor_device,
                flags.precision,
                run.path,
            )
            run.stage_seconds = lambda: actors.stage_seconds() | learner.stage_seconds
            run.start()

            def infer():
                with own_stream(actor_device):
                    actor_model = create_net(flags, env).eval()
                    actor_model.to(actor_device, memory_format=torch.channels_last)
                    inference(inference_batcher, actor_model, weights, actor_device)

            train_with_servers(
                learner,
                actors,
                learner_queue,
                inference_batcher,
                infer,
                servers,
                signals,
            )
            learner.save()
        except Stop as e:
            exit_code = end_early(e, learner)
        finally:
            run.close()
    for line in report_stages(flags, run):
        log.info("%s", line)
    log.info("step %d of %d; results in %s", run.step, flags.total_steps, run.path)
    if run.checkpoint_path.exists():
        log.info("test it: %s", play.command(flags, "polybeast"))
    return exit_code


def server_addresses(flags, servers, stack):
    """Those of --server_addresses, or of servers started for this run."""
    if flags.server_addresses is not None:
        return streams.addresses(flags)
    directory = files.temporary_directory(stack)
    first = f"unix:{directory}/server"
    addresses = polybeast_env.addresses(first, flags.num_servers)
    # The learner seeds its streams.
    flags = argparse.Namespace(**{**vars(flags), "seed": None})
    servers.start(flags, addresses, directory)
    return addresses


def train_with_servers(
    learner, actors, learner_queue, inference_batcher, infer, servers, signals
):
    """Starts actors, inference and learner, waits for a signal or the last step, ends
    them all. Raises what went wrong in any of them."""
    flags = learner.flags
    update_lock = threading.Lock()  # One thread updates the weights.
    stop = threading.Event()
    errors = []
    watched_streams = streams.Streams(actors, flags)
    updates_before = learner.updates

    def act():
        try:
            actors.run()
        except RuntimeError as e:
            raise Stop(str(e), save=False) from e

    def batch_and_learn():
        for batch in learner_queue:
            versions = batch.pop("version")[0].tolist()
            episodes = ended_episodes(batch)
            batch = to_device(batch, learner.device)
            with update_lock:
                if learner.finished or stop.is_set():
                    return
                learner.update(batch, episodes, versions)

    def guarded(body):
        def target():
            # PyTorch counts threads for each thread.
            learns = threading.current_thread().name.startswith("learner")
            torch.set_num_threads(num_learner_cores(learner) if learns else 1)
            try:
                body()
            except Exception as e:
                errors.append(e)
            finally:
                stop.set()

        return target

    bodies = {"actors": act}
    for i in range(flags.num_inference_threads):
        bodies[f"inference-{i}"] = infer
    for i in range(flags.num_learner_threads):
        bodies[f"learner-{i}"] = batch_and_learn
    threads = [
        threading.Thread(target=guarded(body), name=name)
        for name, body in bodies.items()
    ]
    try:
        for thread in threads:
            thread.start()
        # A handler may not set an Event that this thread may be waiting for.
        while not learner.finished and not stop.wait(0.2):
            signals.check()
            servers.restart_ended()
            watched_streams.check()
    finally:
        stop.set()
        actors.stop()
        inference_batcher.close()
        learner_queue.close(discard=True)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        rollouts = actors.rollouts()
        log.info(
            "rollouts: %d delivered, %d learned from (%d begun, %d lost with their "
            "streams, %d unfinished at the end)",
            rollouts["delivered"],
            (learner.updates - updates_before) * flags.batch_size,
            rollouts["begun"],
            rollouts["lost"],
            rollouts["ended"],
        )
    if errors:
        learner.flush()  # Says it better, if it is the weights that are not finite.
        raise errors[0]


def num_learner_cores(learner):
    """For one update on a CPU: about its share of all that a step costs, with Atari's
    environments. (More made the shallow network's runs slower, by a third.)"""
    blocks = encoders.ResidualBlock
    deep = any(isinstance(m, blocks) for m in learner.model.modules())
    cores = (0.75 if deep else 0.45) * experiment.num_cores()
    return max(1, round(cores / learner.flags.num_learner_threads))


# Where the time went.

REMEDIES = {
    "environment_wait": "environments: more of them together (--envs_per_server), more "
    "servers (--num_servers), or other machines' (--server_addresses)",
    "inference_queue": "inference: --num_inference_threads",
    "inference": "inference: --actor_device",
    "rollout_queue": "learning: --learner_device",
    "cores": "the cores of this machine: --server_addresses moves the environments to "
    "other machines, --learner_device and --actor_device the network to a GPU",
}


def report_stages(flags, run):
    """The stage table, and what to do about the longest stage: lines. After the servers
    have ended."""
    shares = experiment.stage_shares(run.stage_seconds())
    if "update" not in shares or "inference" not in shares:
        return  # Nothing was learned.
    for who, stages in zip(("streams", "learner"), experiment.STAGES):
        times = [f"{name} {100 * shares[name]:.0f} %" for name in stages]
        yield f"where the time of {who} went: {', '.join(times)}"
    slowest = max(experiment.STAGES[0], key=lambda name: shares[name])
    busy, cores = run.busy_cores(), experiment.num_cores()
    if busy > 0.8 * cores:
        slowest = "cores"
    yield f"{busy:.1f} of {cores} cores were busy; bottleneck: {REMEDIES[slowest]}"


# Testing.


def test(flags):
    """Plays whole games with the weights of a checkpoint. Returns the exit code."""
    render_mode = play.render_mode(flags)
    path = experiment.run_path(flags)
    flags.seed = experiment.set_seed(flags.seed)
    env = polybeast_env.create_env(flags, 1, render_mode)
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
    # gRPC logs each attempt to connect; streams.py says what matters.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        return train(flags) if flags.mode == "train" else test(flags)
    except BadInput as e:
        p.error(str(e))
    except KeyboardInterrupt:  # Before or after training: in it, see Signals.
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
