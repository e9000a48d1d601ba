"""IMPALA with environment servers: PolyBeast.

    python -m polybeast --env PongNoFrameskip-v4
    python -m polybeast --server_addresses localhost:50051,localhost:50052
    python -m polybeast --server_addresses @hosts.txt

Read it top to bottom. First the agent: parser(), Net, Agent. It knows nothing of
processes and queues, and every program runs it. Then the program: its flags,
inference(), learning(), train(). Environments are in polybeast_env.py.

Environment servers, here or on other hosts, step environments. In this process actors
(threads in C++, one for each stream to a server) ask for actions and assemble rollouts;
an inference thread evaluates the network for all of them in batches; a learner thread
updates the weights, which the inference takes for its next batch (TorchBeast, arXiv
1910.03552, section 5.2).

T is the unroll length, B the batch size, A the number of actions, E the number of
environments of a stream. A rollout has T + 1 steps: step 0 repeats the last step of the
rollout before it. A rollout's actions are those taken on its steps 0 to T - 1.
"""

import argparse
import math

import torch

import polybeast_env
import vtrace
from atari_wrappers import is_atari
from torchbeast import agents, devices, ranks, replay, rollouts, seeds
from torchbeast.encoders import to_channels_last
from torchbeast.environment import probe, with_arguments
from torchbeast.flags import agent_parser, by_environment, number, run_parser
from torchbeast.gradients import means, set_gradients
from torchbeast.images import has_images, smaller_sides
from torchbeast.learner import Learner, PublishedWeights
from torchbeast.messages import Stop
from torchbeast.nests import map_structure
from torchbeast.networks import ActorCritic
from torchbeast.policies import acting, make_agent
from torchbeast.process import leave
from torchbeast.program import PolicyParser, name_of, run_program
from torchbeast.remote import MAX_ENVS, streams, tls
from torchbeast.remote.servers import Servers
from torchbeast.remote.sources import Sources, load_core, server_parser, set_defaults
from torchbeast.run import Run
from torchbeast.threads import Threads

# The agent.

# Flags whose defaults depend on the environment: those for Atari (docs/learning.md).
DEFAULTS = dict(
    reward_clipping="abs_one", normalize_rewards=False, separate_value=False,
    numbers_net="mlp", vtrace_lambda=1.0, num_epochs=1, learning_rate=1e-3,
    entropy_cost=0.01, baseline_cost=0.5, net="deep",
)  # fmt: skip
# A2C with openai/baselines' constants: where acting waits for updates, V-trace's loss
# is A2C's. Their epsilon, 1e-5, is added to the mean of squares, ours to its root.
PRESETS = {
    "a2c": DEFAULTS | {"async": False} | dict(
        normalize_observations=False,
        batch_size=16, num_envs=16, unroll_length=5, learning_rate=7e-4,
        ratio_clipping=0.0, baseline_cost=1.0, loss_reduction="mean",
        grad_norm_clipping=0.5, net="nature", epsilon=1e-5**0.5,
    ),
}  # fmt: skip


def parser():
    """Returns the agent's flags, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("network")
    agents.add_network_flags(g, None)
    g.add_argument("--use_lstm", action=argparse.BooleanOptionalAction, default=False,
                   help="a recurrent network")
    g.add_argument("--numbers_net", choices=("mlp", "tanh"),
                   help="layers for observations that are numbers, of ReLU or tanh")
    g.add_argument("--separate_value", action=argparse.BooleanOptionalAction,
                   help="networks of their own for policy and value")

    g = p.add_argument_group("loss")
    agents.add_actor_critic_flags(g)
    g.add_argument("--loss_reduction", default="sum", choices=vtrace.REDUCTIONS,
                   help="reduction over T and B (default: %(default)s)")
    g.add_argument("--replay_fraction", type=number(float, 0, 0.99), default=0.0,
                   metavar="X", help="share of replayed rollouts in a batch; V-trace "
                   "corrects for their age (default: %(default)s)")
    replay.add_size_flag(g, 100_000)
    g.add_argument("--vtrace_lambda", type=number(float, 0, 1), metavar="LAMBDA",
                   help="V-trace's lambda, the decay of later steps in targets")
    g.add_argument("--ratio_clipping", type=number(float, 0), default=0.2,
                   metavar="X", help="as PPO's: an action whose probability has "
                   "changed by more has no gradient; 0: no clip (default: %(default)s)")
    agents.add_async_flag(g, True)

    g = p.add_argument_group("optimizer (RMSProp)")
    g.add_argument("--num_epochs", type=number(int, 1), metavar="N",
                   help="gradient steps on each batch")
    g.add_argument("--learning_rate", type=number(float, above=0), metavar="X",
                   help="learning rate, which falls linearly to 0 at --total_steps")
    g.add_argument("--alpha", type=number(float, 0, 0.9999), default=0.99,
                   metavar="X", help="smoothing constant (default: %(default)s)")
    g.add_argument("--momentum", type=number(float, 0), default=0.0, metavar="X",
                   help="momentum (default: %(default)s)")
    g.add_argument("--epsilon", type=number(float, above=0), default=1e-5,
                   metavar="X", help="term added to the denominator "
                   "(default: %(default)s)")
    g.add_argument("--grad_norm_clipping", type=number(float, above=0), default=40.0,
                   metavar="X", help="largest gradient norm (default: %(default)s)")
    # fmt: on
    by_environment(p, *DEFAULTS)
    return p


class Net(ActorCritic):
    """An encoder, an LSTM if one is wanted, and two heads. Their layers are in
    torchbeast/networks.py: override its methods here, or Agent.make_encoder().

    forward(step, core_state) takes a dict of tensors [T, B, ...] and returns (outputs,
    core_state): outputs["policy_logits"] [T, B, P], the parameters of the distribution
    of actions (torchbeast/distributions.py), and, in training, outputs["baseline"]
    [T, B], both float32.
    """


class Agent(agents.Agent):
    """IMPALA: an actor-critic that corrects by V-trace for the age of its rollouts.

    torchbeast/agents.py says what a program needs of an agent, and has what all agents
    share: the encoder, rewards, statistics of normalisation, checkpoints.
    """

    @staticmethod
    def sizes(flags, observation_space):
        """Returns {flag: default} of flags that actors and servers depend on."""
        if not has_images(observation_space):
            return dict(batch_size=16) if flags.use_lstm else {}
        if flags.learner_device == "cpu" or hasattr(flags, "num_actors"):
            return {}
        return dict(batch_size=8 * ranks.current.num, num_envs=256)

    def defaults(self, observation_space, action_space):
        """Returns {flag: default}, by the kind of environment, for flags that were not
        given."""
        flags, chosen = self.flags, dict(DEFAULTS)
        sides = smaller_sides(observation_space)
        # MonoBeast's actors evaluate it alone, on a CPU: only small images are cheap.
        if max(sides, default=0) >= 20 and hasattr(flags, "num_actors"):
            chosen["net"] = "shallow"
        if not sides:
            del chosen["net"]  # There are no images.
            chosen.update(vtrace_lambda=0.95, num_epochs=4)
            if flags.use_lstm:
                chosen.update(entropy_cost=1e-3, baseline_cost=0.1)
            else:
                chosen.update(
                    separate_value=True, numbers_net="tanh", entropy_cost=3e-4
                )
        return chosen | agents.actor_critic_defaults(
            flags, action_space, chosen["entropy_cost"], is_atari(flags.env)
        )

    @property
    def numbers_net(self):
        return self.flags.numbers_net

    def make_net(self, observation_space, action_space):
        make = self.make_encoders if self.flags.separate_value else self.make_encoder
        return Net(make(observation_space), action_space, self.flags.use_lstm)

    @torch.inference_mode()
    def act(self, step, core_state, greedy=False):
        """Chooses an action for each step [1, B, ...].

        Returns (outputs, core_state). outputs["action"] [1, B, ...] goes to the
        environment; all outputs are in the batches that learn() gets.
        """
        outputs, core_state = self.unroll(step, core_state)
        logits = outputs["policy_logits"]  # [1, B, P]
        choose = self.distribution.mode if greedy else self.distribution.sample
        return {"action": choose(logits), "policy_logits": logits}, core_state

    def start_learning(self, device):
        super().start_learning(device)
        if self.flags.replay_fraction > 0:
            self.credit = replay.Mixer(self.flags, device)

    def make_optimizer(self):
        flags = self.flags
        return torch.optim.RMSprop(
            self.net.parameters(),
            lr=flags.learning_rate,
            alpha=flags.alpha,
            momentum=flags.momentum,
            eps=flags.epsilon,
            foreach=True,  # Fewer, larger operations, on a CPU too.
        )

    def learn(self, batch):
        """Makes --num_epochs gradient steps on one batch [T + 1, B, ...]. Returns the
        means of their statistics: {name: tensor [] or number}, the loss first.

        grad_norm is the gradient's norm before clipping. loss() describes the others.
        """
        learning_rate = self.learning_rate()
        self.set_learning_rate(learning_rate)
        mixed, logged = (batch, {}) if self.credit is None else self.credit.mix(batch)
        step = self.graphs.of(self.gradient_step, mixed)
        # V-trace corrects for the gradient steps since the rollouts, these included.
        steps = [step() for _ in range(self.flags.num_epochs)]
        self.count(batch)
        return {**means(steps), **logged, "learning_rate": learning_rate}

    def gradient_step(self, batch):
        def loss(batch):  # set_gradients() may pass a few rollouts at a time.
            outputs, _ = self.unroll(batch, batch["core_state"])  # [T + 1, B, ...]
            return self.loss(batch, outputs)

        x = set_gradients(self.net.parameters(), loss, batch, self.flags.loss_reduction)
        return self.clip_and_step(x)

    def loss(self, batch, outputs):
        """Returns the loss of rollouts [T + 1, B, ...], for which the net returned
        outputs [T + 1, B, ...], and its statistics. Loss and statistics are sums over T
        and B (or means: --loss_reduction).

        pg_loss is the policy gradient's loss. baseline_loss and entropy_loss are not
        multiplied by their costs; entropy_loss is minus the policy's entropy.
        """
        # Index t of each tensor below is about the action taken on step t, whose result
        # is in step t + 1. The mask leaves out steps from one episode into the next.
        logits, actions = outputs["policy_logits"][:-1], batch["action"]
        log_prob = self.distribution.log_prob
        losses = vtrace.compute_losses(
            behavior_log_probs=log_prob(batch["policy_logits"], actions),
            target_log_probs=log_prob(logits, actions),
            target_entropies=self.distribution.entropy(logits),
            discounts=self.flags.discounting * (~batch["terminated"][1:]).float(),
            rewards=self.rewards(batch),
            values=outputs["baseline"][:-1],
            bootstrap_value=outputs["baseline"][-1],
            mask=~batch["done"][1:],
            baseline_cost=self.flags.baseline_cost,
            entropy_cost=self.flags.entropy_cost,
            ratio_clipping=self.flags.ratio_clipping,
            lambda_=self.flags.vtrace_lambda,
            reduction=self.flags.loss_reduction,
        )
        return losses.total, {
            "total_loss": losses.total,
            "pg_loss": losses.pg,
            "baseline_loss": losses.baseline,
            "entropy_loss": losses.entropy,
        }

    def learning_rate(self):
        """Returns the learning rate of the next update."""
        # RMSProp's mean of squares begins at zero, so its first steps would be ten
        # times too long: without correction most of the ReLUs died on Pong.
        steps = self.updates * self.flags.num_epochs
        correction = math.sqrt(1 - self.flags.alpha ** (steps + 1))
        return self.flags.learning_rate * correction * self.fraction_left()


# The program.


def program_parser(agent="polybeast"):
    """Returns the program's whole parser. agent: the module whose flags it takes."""
    p = PolicyParser(
        description="Trains an agent with environment servers.",
        parents=[
            polybeast_env.environment_parser(),
            run_parser(),
            agent_parser(agent),
            server_parser(),
            tls.parser(),
        ],
    )
    p.add_presets(agent)
    return p


@torch.inference_mode()
def inference(batcher, agent, weights, device):
    """Answers the actors, batch by batch, until the batcher is closed.

    A batch's inputs are (step, core_state), [1, n, ...]; its outputs are act()'s, for
    the rollouts, and the next core_state. The weights do not change within a batch.
    """
    to_channels_last(agent.net.eval(), device)
    version = None

    act = acting(agent, device)
    for batch in batcher:
        version = weights.fetch(agent.net, version)
        step, core_state = batch.get_inputs()
        outputs, core_state = rollouts.act(act, step, core_state, device)
        try:
            rollouts.check_outputs(outputs)
        except ValueError as e:
            if not all(p.isfinite().all() for p in agent.net.parameters()):
                raise Stop(str(e), save=False) from e  # Weights stay as they are.
            batch.set_error(str(e))  # Only these streams' rollouts are lost.
            continue
        outputs["version"] = torch.full(step["done"].shape, version)
        batch.set_outputs((outputs, core_state))


def learning(queue, actors, learner, stop):
    """Learns from batches of the queue until the last step, or until it is closed."""
    while not learner.finished and (batch := next(queue, None)) is not None:
        T = learner.flags.unroll_length
        versions = batch.pop("version")[-T].tolist()  # Of first actions.
        episodes = rollouts.ended_episodes(batch, T)
        batch = devices.to_device(batch, learner.device)
        if stop.is_set():
            return
        learner.update(batch, episodes, versions)
        actors.allow(learner.batch_size)  # Lets those go on that waited for the update.


def train(flags):
    """Trains until --total_steps or a signal. Returns the exit code.

    Raises BadInput before anything is started.
    """
    core = load_core()  # Not at the top: testing needs no C++.
    flags.seed = seeds.set_seed(flags.seed)
    create_env = polybeast_env.create_env
    # Two environments show what steps look like.
    env, step = probe(create_env, flags, min(2, flags.envs_per_server or 2))
    seeds.set_seed(flags.seed)  # Environments may have set another.
    set_defaults(flags, env.num_agents, env.observation_space)
    sources = Sources(flags)
    device = devices.get_device(flags, "learner_device")
    ranks.current.use_device(device)
    actor_device = devices.get_device(flags, "actor_device")
    agent = make_agent(flags, env)
    specs = rollouts.specs(agent, step, flags)
    sources.check_sizes(step, specs, env.num_agents)
    run = Run(flags, env.frames_per_step, env.num_acting)
    run.open()
    weights = PublishedWeights(agent.net, actor_device)
    learner = Learner(flags, run, agent, weights, device, create_env)
    servers = Servers(create_env)

    def body(signals):
        signals.on_second = servers.kill
        train_with_streams(core, flags, sources, servers, env, step, learner, signals)

    return learner.train(body, servers)


def train_with_streams(core, flags, sources, servers, env, step, learner, signals):
    """Starts the streams, inference and learning, each in threads of its own; waits for
    a signal or the last step; ends all threads. Raises what went wrong in any of them.
    """
    actor_device = learner.weights.device
    # At most one batch waits while another is learned from, to limit policy lag.
    learner_queue = core.BatchingQueue(
        batch_dim=1,
        minimum_batch_size=learner.batch_size,
        maximum_batch_size=learner.batch_size,
        maximum_queue_size=learner.batch_size,
        pin_memory=learner.device.type != "cpu",
    )
    inference_batcher = core.DynamicBatcher(
        batch_dim=1,
        maximum_batch_size=MAX_ENVS,
        pin_memory=actor_device.type != "cpu",
    )
    actors = core.ActorPool(
        flags.unroll_length,
        learner_queue,
        inference_batcher,
        sources.start(servers),
        learner.agent.initial_state(1),
        observation_space=env.signature(),
        action_space=str(env.action_space),
        # A resumed run does not repeat the episodes of its first session.
        seed=seeds.derive_seed(flags.seed, learner.run.step, ranks.current.rank),
        max_rollouts=learner.rollouts_left,
        step=map_structure(torch.as_tensor, step),
        burn_in=learner.agent.burn_in,
        one_episode=flags.one_episode_rollouts,
        **sources.options,
    )
    learner.describe(f"{sources}, inference on {actor_device}", env.texts)

    def infer():
        with devices.own_stream(actor_device):
            actor = make_agent(flags, env)
            inference(inference_batcher, actor, learner.weights, actor_device)

    def learn():
        learning(learner_queue, actors, learner, threads.stop)

    def end():
        actors.stop()
        inference_batcher.close()
        learner_queue.close(discard=True)

    threads = Threads()
    threads.add("actors", lambda: streams.run(actors))
    threads.add("inference", infer)
    threads.add("learner", learn, devices.num_learner_cores(learner.agent, flags))
    name = with_arguments(env.name, flags.env_args)
    watched = streams.Streams(actors, flags, name, servers)
    learner.start(actors.stage_seconds, watched.take_metrics)
    with watched.reporting(learner):
        threads.run(signals, end, watched.check)


def main(argv=None):
    name, create_env = name_of(__spec__, __file__), polybeast_env.create_env
    return run_program(name, program_parser, train, create_env, argv, name)


if __name__ == "__main__":
    leave(main())
