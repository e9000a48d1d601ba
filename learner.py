"""What both scripts do with a network, whatever it is: choose actions, optimise, count,
log, save.
"""

import contextlib
import functools
import math
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

from command_line import log
from environment import leaves, map_structure
from experiment import Stop, not_a_checkpoint


def choose_action(policy_logits, greedy=False):
    """An action for every [..., A] of logits: sampled, or the most probable one."""
    if not torch.isfinite(policy_logits).all():
        raise ValueError(
            "policy_logits are not finite: the network was given numbers that are too "
            "large, or its weights are not finite"
        )
    if greedy:
        return policy_logits.argmax(-1)
    probabilities = F.softmax(policy_logits, dim=-1)
    flat = torch.multinomial(probabilities.flatten(0, -2), 1)
    return flat.view(policy_logits.shape[:-1])


@functools.cache
def copy_stream(device):
    """One: the memory of copies is kept for the stream that made them."""
    return torch.cuda.Stream(device)


def to_device(nest, device):
    """Its tensors on the device: there, not only on their way."""
    if device.type == "cpu":
        return nest
    # A stream of its own: behind the kernels of an update copies would wait for it.
    stream = copy_stream(device)
    with torch.cuda.stream(stream):
        nest = map_structure(lambda x: x.to(device, non_blocking=True), nest)
    stream.synchronize()
    # Whoever uses them, their memory is not to be reused before that is done.
    map_structure(lambda x: x.record_stream(torch.cuda.default_stream(device)), nest)
    return nest


def own_stream(device):
    """A context: the calling thread's kernels do not queue behind other threads'."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def to_host(nest, device):
    """Its tensors in host memory. Waits for a GPU once, not for each of them."""
    nest = map_structure(lambda x: x.to("cpu", non_blocking=True), nest)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return nest


def steps_per_update(flags):
    return flags.unroll_length * flags.batch_size


def create_optimizer(flags, model):
    """(optimizer, scheduler): RMSProp, learning rate falling linearly to zero."""
    optimizer = torch.optim.RMSprop(
        model.parameters(),
        lr=flags.learning_rate,
        alpha=flags.alpha,
        momentum=flags.momentum,
        eps=flags.epsilon,
        foreach=True,  # Fewer, larger operations, on a CPU too.
    )
    steps = steps_per_update(flags)

    def factor(update):
        # RMSProp's mean of squares begins at zero. Uncorrected, its first steps are ten
        # times too long, which was seen to kill most of the network's ReLUs on Pong.
        correction = math.sqrt(1 - flags.alpha ** (update + 1))
        return correction * max(0, 1 - update * steps / flags.total_steps)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


SLICE_BYTES = 96 * 4 * 84 * 84


def set_gradients(flags, model, batch, compute_losses):
    """Sets the parameters' grad to the gradients of a batch's loss. Returns the losses,
    [4] (vtrace.Losses).

    compute_losses: the script's function, (flags, model, batch) -> vtrace.Losses.

    On a CPU slices are computed at the same time, each on a core of its own, as many as
    this thread may use (torch.set_num_threads): cores that share each operation wait
    for each other at each, which costs a fifth more, and more where they are busy.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    num_threads = torch.get_num_threads()
    parts = list(slices(flags, batch, num_threads))
    num_workers = 1 if flags.compile else min(num_threads, len(parts))

    def differentiate(part_and_weight):
        torch.set_num_threads(num_threads // num_workers)
        part, weight = part_and_weight
        losses = compute_losses(flags, model, part)
        loss = weight * losses.total
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return gradients, weight * torch.stack(losses[:4]).detach()

    run = map if num_workers == 1 else workers(num_workers).map
    results, losses = zip(*run(differentiate, parts))
    for parameter, *gradients in zip(parameters, *results):
        gradients = [g for g in gradients if g is not None]  # Those that use it.
        parameter.grad = sum(gradients[1:], gradients[0]) if gradients else None
    return sum(losses)


@functools.cache
def workers(n):
    """Idle between updates; they end with the process."""
    return ThreadPoolExecutor(n, thread_name_prefix="gradients")


def slices(flags, batch, num_threads=1):
    """A batch [T + 1, B, ...] in parts along B: (part, its weight in the batch's loss).
    Their gradients add up.

    On a CPU each has about SLICE_BYTES of observations, 96 of Atari's, so that what the
    network makes of them stays in the cache and takes a fraction of the memory; or
    less, down to a quarter, so that each thread has one. On a GPU there is one.
    """
    size = B = batch["action"].shape[1]
    if not batch["action"].is_cuda:
        num_bytes = sum(x.nbytes for _, x in leaves(batch["observation"]))
        num_parts = max(
            num_bytes / SLICE_BYTES, min(num_threads, 4 * num_bytes // SLICE_BYTES)
        )
        size = max(1, int(B / max(1, num_parts)))
    num_real = (~batch["done"][1:]).sum().clamp(min=1)  # Transitions; see vtrace.py.
    for i in range(0, B, size):
        part = map_structure(lambda x, i=i: x[:, i : i + size], batch)
        weight = 1
        if flags.loss_reduction == "mean":
            weight = (~part["done"][1:]).sum() / num_real
        yield part, weight


def ended_episodes(batch):
    """The episodes that ended in a batch [T + 1, B, ...], as Run.update takes them."""
    end = batch["episode_end"][1:]  # Step 0 was counted with the rollout before.
    training_end = (batch["terminated"] | batch["truncated"])[1:]
    return {
        "episode_return": batch["episode_return"][1:][end].tolist(),
        "episode_step": batch["episode_step"][1:][end].tolist(),
        "training_episode_return": batch["training_episode_return"][1:][
            training_end
        ].tolist(),
    }


class PublishedWeights:
    """A network's weights on a device, for threads of this process: one publishes, any
    number fetch. Published weights do not change: new ones take their place."""

    def __init__(self, model, device):
        self.device = device
        self.publish(model, 0)

    @torch.no_grad()
    def publish(self, model, version):
        weights = {
            name: x.detach().to(self.device, copy=True)
            for name, x in model.state_dict().items()
        }
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.current_stream(self.device).record_event()
        self._published = version, weights, copied

    @torch.no_grad()
    def fetch(self, model, have=None):
        """Loads the newest weights, unless they are version `have`. Returns theirs."""
        version, weights, copied = self._published
        if version != have:
            if copied is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(copied)
                for x in weights.values():
                    x.record_stream(stream)
            model.load_state_dict(weights)
        return version


class Learner:
    """What an update touches: model, optimizer, published weights, counters, logs.

    learn: the script's function, learn(flags, model, optimizer, scheduler, batch) ->
    statistics. weights: anything with publish(model, version).

    An update's statistics are read after the next one has been launched, so that a GPU
    need not wait for Python: logs and counters are one update late there.
    """

    def __init__(self, flags, run, model, weights, device, learn):
        self.flags = flags
        self.learn = learn
        self.run = run
        self.device = device
        # channels_last: twice as fast to train on a CPU.
        self.model = model.to(device, memory_format=torch.channels_last)
        if flags.compile:
            self.model.compile()
        self.optimizer, self.scheduler = create_optimizer(flags, self.model)
        self.weights = weights  # Of version `updates`.
        self.updates = run.updates
        self.stage_seconds = {"learner_wait": 0.0, "update": 0.0}
        self._idle_since = None
        self._unread = None

    def update(self, batch, episodes, versions):
        """Learns from a batch. One thread at a time.

        episodes: what Run.update takes; versions: of the weights its rollouts were
        begun with.
        """
        start = time.monotonic()
        if self._idle_since is not None:
            self.stage_seconds["learner_wait"] += start - self._idle_since
        learning_rate = self.optimizer.param_groups[0]["lr"]
        stats = self.learn(
            self.flags, self.model, self.optimizer, self.scheduler, batch
        )
        names, values = list(stats), torch.stack(list(stats.values()))
        values = values.to("cpu", non_blocking=True)
        read = None
        if self.device.type == "cuda":
            read = torch.cuda.current_stream(self.device).record_event()
        counts = dict(
            num_steps=steps_per_update(self.flags),
            episodes=episodes,
            policy_lag=self.updates - sum(versions) / len(versions),
            learning_rate=learning_rate,
        )
        self.updates += 1
        self.flush()
        self._unread = names, values, read, counts
        if read is None:
            self.flush()
        self.weights.publish(self.model, self.updates)
        self.stage_seconds["update"] += time.monotonic() - start
        if self.run.save_is_due():
            self.save()
        self._idle_since = time.monotonic()

    def flush(self):
        """Counts and logs the last update, once its statistics have come."""
        if self._unread is None:
            return
        names, values, read, counts = self._unread
        self._unread = None
        if read is not None:
            read.synchronize()
        self.run.update(losses=dict(zip(names, values.tolist())), **counts)

    def save(self):
        self.flush()
        self.run.save(
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            scheduler=self.scheduler.state_dict(),
        )

    def restore(self, checkpoint):
        """BadInput if something is missing in the checkpoint, or damaged."""
        try:
            self.run.restore(checkpoint)
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.scheduler.load_state_dict(checkpoint["scheduler"])
        except Exception as e:
            raise not_a_checkpoint(self.run.checkpoint_path, e) from e
        self.updates = self.run.updates
        # This command's flags count, not those the checkpoint was made with.
        flags = self.flags
        self.scheduler.base_lrs = [flags.learning_rate]
        self.scheduler.last_epoch = self.run.step // steps_per_update(flags)
        factor = self.scheduler.lr_lambdas[0](self.scheduler.last_epoch)
        self.optimizer.param_groups[0].update(
            initial_lr=flags.learning_rate,
            lr=flags.learning_rate * factor,
            alpha=flags.alpha,
            momentum=flags.momentum,
            eps=flags.epsilon,
        )
        self.weights.publish(self.model, self.updates)

    @property
    def rollouts_left(self):
        """How many are learned from until --total_steps."""
        steps = max(0, self.flags.total_steps - self.run.step)
        updates = math.ceil(steps / steps_per_update(self.flags))
        return updates * self.flags.batch_size

    @property
    def finished(self):
        step = self.run.step
        if self._unread is not None:
            step += steps_per_update(self.flags)
        return step >= self.flags.total_steps


def end_early(stop, learner):
    """Says why, and saves what is worth saving. Returns the exit code."""
    log.error("%s", stop)
    if stop.save:
        try:
            learner.save()
        except Stop as e:
            log.error("not saved: %s", e)
            return e.exit_code
    return stop.exit_code
