"""What both scripts do with a network, whatever it is: choose actions, optimise, count,
log, save.
"""

import math

import torch
import torch.nn.functional as F

from command_line import log
from experiment import Stop


def choose_action(policy_logits, greedy=False):
    """An action for every [..., A] of logits: sampled, or the most probable one."""
    if not torch.isfinite(policy_logits).all():
        raise ValueError(
            "policy_logits are not finite: the network was given an observation or a "
            "reward that is NaN or infinite"
        )
    if greedy:
        return policy_logits.argmax(-1)
    probabilities = F.softmax(policy_logits, dim=-1)
    flat = torch.multinomial(probabilities.flatten(0, -2), 1)
    return flat.view(policy_logits.shape[:-1])


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
    )
    steps = steps_per_update(flags)

    def factor(update):
        # RMSProp's mean of squares begins at zero. Uncorrected, its first steps are ten
        # times too long, which was seen to kill most of the network's ReLUs on Pong.
        correction = math.sqrt(1 - flags.alpha ** (update + 1))
        return correction * max(0, 1 - update * steps / flags.total_steps)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


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


class Learner:
    """What an update touches: model, optimizer, published weights, counters, logs.

    learn: the script's function, learn(flags, model, optimizer, scheduler, batch) ->
    statistics. weights: anything with publish(model, version).
    """

    def __init__(self, flags, run, model, weights, device, learn):
        self.flags = flags
        self.learn = learn
        self.run = run
        self.device = device
        # channels_last: twice as fast to train on a CPU.
        self.model = model.to(device, memory_format=torch.channels_last)
        self.optimizer, self.scheduler = create_optimizer(flags, self.model)
        self.weights = weights

    def update(self, batch, episodes, versions):
        """Learns from a batch. One thread at a time.

        episodes: what Run.update takes; versions: of the weights its rollouts were
        begun with.
        """
        run = self.run
        learning_rate = self.optimizer.param_groups[0]["lr"]
        stats = self.learn(
            self.flags, self.model, self.optimizer, self.scheduler, batch
        )
        stats = {name: x.item() for name, x in stats.items()}  # GPU sync point.
        run.update(
            num_steps=steps_per_update(self.flags),
            losses=stats,
            episodes=episodes,
            policy_lag=run.updates - sum(versions) / len(versions),
            learning_rate=learning_rate,
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
        self.run.restore(checkpoint)
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])
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
        self.weights.publish(self.model, self.run.updates)

    @property
    def finished(self):
        return self.run.step >= self.flags.total_steps


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
