"""What every program does with an agent that learns: update, count, publish, save."""

import contextlib
import math
import numbers
import time
import traceback
from logging import ERROR, INFO

import torch

from torchbeast import checkpoint, devices, dynamo, ranks, stages
from torchbeast.encoders import large_images, summary, to_channels_last
from torchbeast.evaluation import Evaluator
from torchbeast.flags import command_line, synchronous
from torchbeast.images import RESIZED
from torchbeast.messages import BadInput, Stop, log
from torchbeast.policies import Several
from torchbeast.process import Signals
from torchbeast.symptoms import Symptoms, clips_rewards


class PublishedWeights:
    """A network's weights on a device, for the threads of this process: one thread
    publishes, any number fetch. Published weights do not change; new ones take their
    place.

    While a GPU still computes new ones, fetch() takes those before them, so that acting
    goes on beside an update.
    """

    def __init__(self, model, device):
        self.device = device
        self._published = ()  # The last two, the newer one first.
        self.publish(model, 0)

    @torch.no_grad()
    def publish(self, model, version):
        """Returns an event that has passed once the weights are there, or None if they
        are."""
        on_host, state = self.device.type == "cpu", list(model.state_dict().values())
        own = next(model.parameters()).device
        if own == self.device:
            weights = [torch.empty_like(x) for x in state]
            devices.copy_into(state, weights)
        else:
            weights = [x.to(self.device, non_blocking=on_host) for x in state]
        # Which device copies: the learner's may be a GPU.
        device = own if on_host else self.device
        copied = devices.record_event(device)
        self._published = (version, weights, copied), *self._published[:1]
        return copied

    @torch.no_grad()
    def fetch(self, model, have=None):
        """Loads the newest weights that are there into the model, unless they are
        version `have`. Returns their version."""
        (version, weights, copied), *before = self._published
        if before and copied is not None and not copied.query():
            version, weights, copied = before[0]
        if version != have:
            if copied is None:
                pass
            elif self.device.type == "cpu":
                copied.synchronize()
            else:
                stream = devices.backend(self.device).current_stream(self.device)
                stream.wait_event(copied)
                for x in weights:
                    x.record_stream(stream)
            devices.copy_into(weights, list(model.state_dict().values()))
        return version


class Learner:
    """An agent that learns, and what an update touches: published weights, counters,
    logs, checkpoints.

    weights: anything with publish(model, version); None if whoever acts has the agent's
        own net.

    An update's statistics are read after the next one has been launched, so that a GPU
    need not wait for Python: logs and counters are one update late there.
    """

    def __init__(self, flags, run, agent, weights, device, create_env):
        """Takes the run's checkpoint, if the run has one. Raises BadInput if it does
        not fit."""
        self.flags = flags
        self.run = run
        self.agent = agent
        self.device = device
        devices.use(device)
        to_channels_last(agent.net, device)
        if flags.compile:
            agent.net.compile()
        else:
            dynamo.leave_out()
        agent.start_learning(device)
        checkpoint.check_agent_state(agent)
        run.restore(agent)
        self.updates = run.updates
        self.weights = weights  # Their version is `updates`.
        self._publish()
        self.batch_size = ranks.current.share(flags.batch_size)
        self.stage_seconds = {"learner_wait": 0.0, "update": 0.0}
        self._create_env = create_env
        self._evaluator = None
        self._symptoms = Symptoms(agent)
        self._idle_since = None
        self._unread = None

    @property
    def steps_per_update(self):
        """Of all ranks together."""
        return self.flags.unroll_length * self.flags.batch_size

    def train(self, body, processes=None):
        """Runs body(signals), which calls start() and then update() until `finished`.
        Saves, and returns the exit code.

        processes: a context that ends, after the checkpoint is written, what body has
        started.
        """
        flags, run = self.flags, self.run
        exit_code = 1  # If an exception ends the run.
        if self.finished:
            log.info(
                "step %d of %d: nothing is left to do; a larger --total_steps goes on",
                run.step, flags.total_steps,
            )  # fmt: skip
            run.close()
            return 0
        with Signals() as signals, processes or contextlib.nullcontext():
            try:
                try:
                    try:
                        with ranks.current.voting(signals), signals.blamed():
                            body(signals)
                    finally:
                        self._end_wait()
                except Exception as e:
                    if not ranks.current.stuck:
                        # A loss that is not finite came before what it led to.
                        self.flush()
                    if not isinstance(e, (Stop, BadInput)):
                        run.note(traceback.format_exc())
                    raise
                self.save()
                exit_code = 0
            except Stop as e:
                exit_code = self._end_early(e)
            finally:
                if self._evaluator is not None:
                    self._evaluator.close()
                run.close(exit_code)
        if ranks.current.rank > 0:
            return exit_code
        for line in stages.report(run, self.agent.net):
            log.info("%s", line)
        log.info("step %d of %d; results in %s", run.step, flags.total_steps, run.path)
        if run.checkpoint_path.exists():
            if not self.finished:
                log.info("to resume: %s", command_line(flags))
            log.info("test it: %s", command_line(flags, "--mode", "test"))
        return exit_code

    def describe(self, actors, texts):
        """Logs what the run is. texts: names of what networks do not read."""
        flags, path = self.flags, self.run.path
        learner = f"learner on {self.device}, {devices.precision(self.agent)}"
        log.info(f"{flags.env}: {actors}, {learner}; results in {path}")
        log.info(summary(self.agent.net, texts))

    def start(self, stage_seconds=dict, take_metrics=list):
        """Starts the clock and the logs.

        stage_seconds: called for the seconds of each stage so far, beside the
        learner's.
        take_metrics: called for the episodes' metrics since the last call, dicts of
        numbers.
        """
        group = ranks.current
        if group.num > 1:
            log.info(
                f"{group.num} learners on {len(set(group.hosts))} hosts: each has "
                f"{self.batch_size} of {self.flags.batch_size} rollouts of a batch"
            )
        # What defaults chose is said with them.
        said = any("reward_clipping" in x for x in getattr(self.flags, "chosen", ()))
        if clips_rewards(self.agent) and not said:
            log.info("rewards are clipped to -1 to 1")
        for name, height, width in large_images(self.agent.net):
            log.info(
                f"{name} is {height} x {width}: --resize {RESIZED} makes it smaller "
                "where the environment is, and a run several times as fast"
            )
        self.run.take_metrics = take_metrics
        self.run.stage_seconds = lambda: {
            **stage_seconds(),
            **self.stage_seconds,
            **ranks.current.seconds,
        }
        self.run.start()
        if self.flags.eval_interval_steps is not None and group.rank == 0:
            self._evaluator = Evaluator(self._create_env, self.flags, self.run.step)

    def _end_early(self, stop):
        """Logs why the run ends, and saves what is worth saving. Returns the exit
        code."""
        log.log(ERROR if ranks.current.rank == 0 else INFO, "%s", stop)
        if stop.save:
            try:
                self.save()
            except Stop as e:
                log.error("not saved: %s", e)
                return e.exit_code
        return stop.exit_code

    def update(self, batch, episodes, versions):
        """Learns from a batch. Only one thread may call it at a time.

        episodes: those that ended in the batch: {name: tensor [2], sum and number}
        versions: of the weights with which each of its rollouts was begun
        """
        devices.use(self.device)
        with self._timed():
            with ranks.current.update():
                updates = getattr(self.agent, "updates", -1)  # Several policies: none.
                statistics = self.agent.learn(batch)
            if torch.is_tensor(batch.get("policy")) and isinstance(self.agent, Several):
                episodes = self.agent.ended_episodes(batch, self.flags.unroll_length)
            check_statistics(statistics)
            if updates == getattr(self.agent, "updates", None):
                raise TypeError("learn() did not call self.count(batch)")
            policy_lag = self.updates - sum(versions) / len(versions)
            self.updates += 1
            rewards = self._symptoms.of_rewards(batch)
            self._count(statistics, episodes, rewards, policy_lag)
            self._publish()
            self._evaluate()
        if self.finished:
            self._idle_since = None
            ranks.current.finish()

    @contextlib.contextmanager
    def _timed(self):
        """A context for an update: waits until all ranks have a batch, then adds the
        update's time to that of its stage."""
        self._end_wait()
        ranks.current.wait(self.run.save_is_due, self.save)
        start, summing = time.monotonic(), ranks.current.seconds.get("reduction", 0)
        yield
        summing = ranks.current.seconds.get("reduction", 0) - summing
        self.stage_seconds["update"] += time.monotonic() - start - summing
        self._idle_since = time.monotonic()

    def _end_wait(self):
        """Counts the time since the last update, if a batch is waited for."""
        since, self._idle_since = self._idle_since, None
        if since is not None:
            self.stage_seconds["learner_wait"] += time.monotonic() - since

    def _count(self, statistics, episodes, rewards, policy_lag):
        """Sends an update's numbers to the CPU, to be counted when they have arrived:
        on a GPU after the next update has been launched."""
        tensors = {k: x for k, x in statistics.items() if torch.is_tensor(x)}
        values = torch.zeros(0)
        if tensors:
            values = [x.detach().reshape(()).float() for x in tensors.values()]
            values = torch.stack([x.to(self.device) for x in values])
            values = values.to("cpu", non_blocking=True)
        episodes = {  # float() first: on a GPU the copy has not arrived after to().
            k: x.float().to("cpu", non_blocking=True) for k, x in episodes.items()
        }
        if rewards is not None:
            rewards = rewards.to("cpu", non_blocking=True)
        read = devices.record_event(self.device)
        counts = dict(
            num_steps=self.steps_per_update,
            episodes=episodes,
            policy_lag=policy_lag,
            faulty=ranks.current.faulty,
        )
        self.flush()
        self._unread = statistics, list(tensors), values, read, rewards, counts
        if read is None:
            self.flush()

    def _evaluate(self):
        if self._evaluator is not None:
            judged = getattr(self.agent, "learner", self.agent)  # In self-play.
            self._evaluator.offer(self.run.step, judged.net)
            if (result := self._evaluator.take()) is not None:
                self.run.add_evaluation(result)

    def _publish(self):
        if self.weights is None:
            return
        copied = self.weights.publish(self.agent.net, self.updates)
        if copied is not None and synchronous(self.flags):
            copied.synchronize()  # Whoever waits for them is to find them there.

    def flush(self):
        """Counts and logs the last update, once its statistics have arrived."""
        if self._unread is None:
            return
        statistics, names, values, read, rewards, counts = self._unread
        self._unread = None
        if read is not None:
            read.synchronize()
        statistics = {**statistics, **dict(zip(names, values.tolist()))}
        self._symptoms.see(statistics, None if rewards is None else rewards.tolist())
        episodes = {name: x.tolist() for name, x in counts.pop("episodes").items()}
        self.run.update(statistics=statistics, episodes=episodes, **counts)

    def save(self):
        """Writes a checkpoint. To be called on all ranks at the same update."""
        self.flush()
        ranks.current.compare(self.agent.net)
        self.run.save(self.agent)

    @property
    def rollouts_left(self):
        """The number of rollouts that are learned from until --total_steps."""
        steps = max(0, self.flags.total_steps - self.run.step)
        return math.ceil(steps / self.steps_per_update) * self.batch_size

    @property
    def finished(self):
        step = self.run.step
        if self._unread is not None:
            step += self.steps_per_update
        return step >= self.flags.total_steps


def check_statistics(statistics):
    """Raises TypeError if learn() returned something else than {name: number}."""
    if not isinstance(statistics, dict):
        what = type(statistics).__name__
        raise TypeError(f"learn() returned {what}, expected a dict of statistics")
    for name, x in statistics.items():
        if torch.is_tensor(x) and x.numel() != 1:
            what = f"a tensor of shape {list(x.shape)}"
        elif not torch.is_tensor(x) and not isinstance(x, numbers.Real):
            what = type(x).__name__
        else:
            continue
        raise TypeError(
            f"learn() returned the statistic {name!r} as {what}, expected one number"
        )
