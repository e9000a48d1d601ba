"""Training where environments, acting and learning are on one device: WarpBeast.

    python -m warpbeast --env warp/CartPole --agent ppo
    python -m warpbeast --env warp/Tag --agent ppo

Read it top to bottom: flags, Rollouts, train(). Environments are pure functions of
tensors, many at a time (warp_envs.py); the agent (network, loss, optimizer) is in
polybeast.py, or in the module that --agent names. WarpDrive (Lan et al., arXiv
2108.13976) showed how fast this is.

T is the unroll length, E the number of environments, N the number of agents in one. A
policy's batch has a rollout of each of its agents in each environment. On a GPU a
rollout of T steps is one CUDA graph: nothing in it waits for Python.
"""

import functools
import inspect
from collections import deque

import torch

import polybeast_env
from torchbeast import devices, graphs, machine, policies, ranks, rollouts, seeds
from torchbeast.encoders import summary
from torchbeast.flags import agent_parser, is_given, number, run_parser
from torchbeast.learner import Learner
from torchbeast.messages import BadInput, Stop, first_line, log
from torchbeast.nests import leaves, map_structure
from torchbeast.policies import Policies, make_agent, policy_sizes
from torchbeast.process import leave
from torchbeast.program import PolicyParser, name_of, run_program
from torchbeast.run import Run
from torchbeast.warp import autoreset
from torchbeast.warp.check import check

CHECKED = "observation", "reward"  # They have to be finite.
WARM_UP = 3  # Rollouts before one is captured, in which libraries choose their kernels.

# WarpDrive's run (salesforce/warp-drive, run_configs/tag_gridworld.yaml): one policy of
# all agents, by A2C. V-trace is A2C where rollouts have no age, and so is PPO with one
# gradient step a batch. WarpDrive's value loss is twice IMPALA's. A billion agent steps
# are two million episodes of 100 steps of 5 agents, in 1,000 gradient steps.
WARPDRIVE = dict(
    env="warp/TagGridWorld", num_envs=2000, unroll_length=100, hidden_sizes=[32, 32],
    discounting=0.98, learning_rate=1e-3, baseline_cost=2.0, entropy_cost=0.05,
    grad_norm_clipping=3.0, reward_clipping="none", loss_reduction="mean",
    num_epochs=1, num_minibatches=1, gae_lambda=1.0, vtrace_lambda=1.0,
    ratio_clipping=0.0, separate_value=False, normalize_observations=False,
    numbers_net="mlp", total_steps=1_000_000_000,
)  # fmt: skip
ENV_ARGS = [("size", 100), ("random_starts", False)]
PRESETS = {
    "warpdrive": {**WARPDRIVE, "env_args": [*ENV_ARGS, ("one_policy", True)]},
    "two_policies": {**WARPDRIVE, "env_args": ENV_ARGS},
}

# Flags.


def program_parser(agent="polybeast"):
    """Returns the program's whole parser. agent: the module whose flags it takes."""
    p = PolicyParser(
        description="Trains an agent with environments that are tensor programs.",
        epilog="A batch has a rollout of each agent in each environment: --num_envs "
        "takes the place of --batch_size.",
        parents=[
            polybeast_env.environment_parser(),
            run_parser(),
            agent_parser(agent),
        ],
    )
    p.add_presets(agent, **PRESETS)
    p.set_defaults(env="warp/CartPole")
    p.add_argument("--num_envs", type=number(int, 1, 10**7), default=256, metavar="E",
                   help="environments that step together, on --learner_device "
                   "(default: %(default)s)")  # fmt: skip
    return p


def set_defaults(flags, num_agents):
    """Fills in the flags whose defaults depend on the machine or on other flags."""
    devices.set_defaults(flags)
    if is_given(flags, "batch_size"):
        raise BadInput(
            "--batch_size: a batch has a rollout of each agent in each environment: "
            "use --num_envs"
        )
    if flags.one_episode_rollouts:
        raise BadInput("--one_episode_rollouts: expected monobeast or polybeast")
    flags.batch_size = flags.num_envs * num_agents


# Acting.


class Rollouts:
    """Makes one rollout after the other, of all policies at once, from E environments.

    agents:  {policy: Agent}; they act with the weights that learn
    buffers: {policy: a batch, [T + 1, B, ...]}; next() fills all of them

    What is kept from one rollout to the next stays in the same memory, as a CUDA graph
    needs it.
    """

    def __init__(self, flags, env, num_envs, agents, specs, device):
        self.T, self.num_envs, self.agents = flags.unroll_length, num_envs, agents
        self.envs = autoreset.Environments(env, num_envs, device)
        self.advance = self._advance
        self.acts = {name: agent.act for name, agent in agents.items()}
        if flags.compile:
            self.advance = torch.compile(self._advance, dynamic=False)
            # PyTorch 2.11 cannot compile inference_mode(); _fill() enters it for all.
            for name, agent in agents.items():
                act = inspect.unwrap(type(agent).act)
                self.acts[name] = functools.partial(act, agent)
        self.buffers, self.core_states = {}, {}
        self.burn_in = max(agent.burn_in for agent in agents.values())  # K, mostly 0.
        sizes = policy_sizes(env)
        for name in agents:
            num = num_envs * sizes[name]
            self.buffers[name] = map_structure(
                lambda x, num=num: torch.zeros(
                    x.shape[0], num, *x.shape[1:], dtype=x.dtype, device=device
                ),
                specs[name],
            )
        # In inference_mode(), as in _fill(), so that _advance() is compiled only once.
        with torch.inference_mode():
            # The states before each of the last K + 1 steps; the last one is current.
            for name, agent in agents.items():
                state = agent.initial_state(num_envs * sizes[name])
                self.core_states[name] = tuple(
                    map_structure(lambda x: x.to(device, copy=True), state)
                    for _ in range(self.burn_in + 1)
                )
            carry, step = self.envs.begin(self.envs.uniforms())
            self.carry = map_structure(torch.clone, carry)
        self.fields = list(step)
        for name, x in self._of_policies(step).items():
            self._write(name, x, 0)
        self.metrics = {}
        checked = [*CHECKED, "action_mask"] if "action_mask" in step else CHECKED
        self._checked = [(name, key) for name in agents for key in checked]
        self._finite = torch.ones(len(self._checked), dtype=torch.bool, device=device)
        self._unread = self._finite, None  # And its event, on its way to the CPU.
        self._num, self._graph = 0, None

    def next(self, check=lambda: None):
        """Fills the buffers with T new steps, the first time with K + T. Returns the
        environments' metrics {name: tensor [2], sum and number}. Calls check() before
        each step that is not part of a graph.

        Raises Stop if an environment returned what is not finite. On a GPU it looks at
        the rollout before, so as not to wait for this one.
        """
        K = self.burn_in
        if self._num < WARM_UP or self.envs.device.type != "cuda":
            self._fill(0 if self._num == 0 else K, check)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                # On the current device, which Learner has made this one.
                remedy = "rollouts always are one, smaller with a smaller --num_envs"
                with graphs.capturing(self._graph, remedy=remedy):
                    self._fill(K, lambda: None)
            self._graph.replay()
        self._num += 1
        self._check_finite()
        return self.metrics

    def _check_finite(self):
        finite = self._finite.to("cpu", non_blocking=True)
        if (read := devices.record_event(self.envs.device)) is not None:
            (finite, read), self._unread = self._unread, (finite, read)
        if read is not None:
            read.synchronize()
        for (policy, key), x in zip(self._checked, finite.tolist()):
            if not x:
                what = f"a number in the {key} of {policy} is not finite"
                if key == "action_mask":
                    what = f"an {key} of {policy} allows no action"
                raise Stop(f"{self.envs.env.name}: {what}", save=False)

    @torch.inference_mode()
    def _fill(self, begin, check):
        """Makes the steps from `begin` to the end of a rollout of K + T + 1."""
        K, T, carry, metrics = self.burn_in, self.T, self.carry, {}
        states = {name: deque(x, maxlen=K + 1) for name, x in self.core_states.items()}
        for name, buffers in self.buffers.items():
            map_structure(torch.Tensor.copy_, buffers["core_state"], states[name][0])
            if self._num > 0:  # Repeat the end of the rollout before.
                for key, nest in buffers.items():
                    n = K + 1 if key in self.fields else K
                    if key != "core_state":
                        map_structure(lambda x, n=n: _repeat(x, T, n), nest)
        for t in range(begin, K + T):
            check()
            steps = {
                name: map_structure(
                    lambda x, t=t: x[t : t + 1], {key: x[key] for key in self.fields}
                )
                for name, x in self.buffers.items()
            }
            before = {name: x[-1] for name, x in states.items()}
            u = self.envs.uniforms()
            carry, steps, acted, totals = self.advance(carry, steps, before, u)
            for name, (outputs, core_state) in acted.items():
                states[name].append(core_state)
                self._write(name, outputs, t)
                self._write(name, steps[name], t + 1)
            for name, x in totals.items():
                metrics[name] = metrics.get(name, 0) + x
        map_structure(torch.Tensor.copy_, self.carry, carry)
        for name, x in self.core_states.items():
            map_structure(torch.Tensor.copy_, x, tuple(states[name]))
        self.metrics = metrics
        self._finite.copy_(torch.stack([self._good(*x) for x in self._checked]))

    def _advance(self, carry, steps, core_states, u):
        """Makes a step of all environments. Returns (carry, steps, what act() returned,
        metrics), of which steps and acts are those of each policy. It changes nothing
        that it is given, so that it may be compiled."""
        acted = {
            name: act(steps[name], core_states[name]) for name, act in self.acts.items()
        }
        actions = [
            map_structure(self._of_envs, outputs["action"])
            for outputs, _ in acted.values()
        ]
        action = map_structure(lambda *xs: torch.cat(xs, 1), *actions)
        carry, step, metrics = self.envs.step(carry, action, u)
        return carry, self._of_policies(step), acted, metrics

    def _good(self, policy, key):
        """Tells whether all numbers are finite, and all masks allow an action: []."""
        x = self.buffers[policy][key]
        if key == "action_mask":
            return self.envs.allow(x).all()
        return torch.stack([x.isfinite().all() for _, x in leaves(x)]).all()

    def _of_envs(self, x):
        """Returns [1, B, ...] as [E, n, ...]."""
        return x[0].unflatten(0, (self.num_envs, -1))

    def _of_policies(self, step):
        """Returns {policy: its agents' step [1, B, ...]} of a step [E, N, ...]."""
        return {
            name: map_structure(
                lambda x, part=part: x[:, part].flatten(0, 1)[None], step
            )
            for name, part in self.envs.policies.items()
        }

    def _write(self, policy, nest, t):
        """Writes a nest [1, B, ...] into a policy's buffers."""
        into = map_structure(lambda _, x: x[t], nest, self.buffers[policy])
        devices.copy_into(map_structure(lambda x: x[0], nest), into)


def _repeat(x, T, n):
    """Copies the n steps from T on to the beginning of x."""
    x[:n].copy_(x[T : T + n].clone() if n > T else x[T : T + n])


# Training.


def check_memory(env, num_envs, specs, device, copies=1):
    """Raises BadInput if the buffers, and what is made of them, do not fit."""
    needed = copies * sum(
        num_envs * num * x.nbytes
        for name, num in policy_sizes(env).items()
        for _, x in leaves(specs[name])
    )
    available = machine.available_memory_bytes()
    if device.type == "cuda":
        available, _ = torch.cuda.mem_get_info(device)
    if needed > available:
        raise BadInput(
            f"the rollouts need {needed:,} bytes of memory with copies of them, "
            f"{device} has {available:,} available: use a smaller --num_envs or "
            "--unroll_length, or smaller observations"
        )


def first_steps(env, agents, flags):
    """Returns {policy: the shapes and dtypes of one rollout of its agents}."""
    envs = autoreset.Environments(env, 2, torch.device("cpu"))
    _, step = envs.begin(envs.uniforms())
    specs = {}
    for name, part in envs.policies.items():
        rows = map_structure(lambda x, part=part: x[:, part].flatten(0, 1), step)
        specs[name] = rollouts.specs(agents[name], rows, flags)
    return specs


def ended_episodes(batches, metrics, T):
    """Returns the statistics of ended episodes, over all agents and for each policy:
    {name: tensor [2], sum and number}."""
    of_policies = {name: rollouts.ended_episodes(x, T) for name, x in batches.items()}
    totals = {}
    for policy, episodes in of_policies.items():
        for name, x in episodes.items():
            totals[name] = totals.get(name, 0) + x
        if len(batches) > 1:
            totals[f"episode/{policy}_return"] = episodes["episode_return"]
    return {**totals, **{f"episode/{name}": x for name, x in metrics.items()}}


def train(flags):
    """Trains until --total_steps or a signal. Returns the exit code.

    Raises BadInput before anything is started.
    """
    env = polybeast_env.create_warp_env(flags)
    check(env)
    num_agents = policies.num_agents(env)
    set_defaults(flags, num_agents)
    flags.seed = seeds.set_seed(flags.seed)
    device = devices.get_device(flags, "learner_device")
    ranks.current.use_device(device)
    torch.set_num_threads(devices.given_threads() or machine.num_cores())
    num_envs = ranks.current.share(flags.num_envs)
    agent = make_agent(flags, env)
    several = isinstance(agent, Policies)
    agents = agent.agents if several else dict.fromkeys(env.policies, agent)
    specs = first_steps(env, agents, flags)
    # Graphs of PPO's and PQN's updates keep some 2.6 times as much beside them.
    check_memory(env, num_envs, specs, device, 4 if flags.cuda_graphs else 1)
    run = Run(flags, num_agents=num_agents)
    run.open()
    learner = Learner(flags, run, agent, None, device, polybeast_env.create_env)
    log.info(
        f"{flags.env}: {num_envs} environments of {num_agents} agents on {device}, "
        f"{devices.precision(agent)}; results in {run.path}"
    )
    for name, x in agents.items():
        log.info("%s%s", f"{name}: " if several else "", summary(x.net))

    def body(signals):
        learner.start()
        acting = Rollouts(flags, env, num_envs, agents, specs, device)
        batches = acting.buffers
        if not several:
            (batches,) = batches.values()
        while not learner.finished:
            signals.check()
            try:
                agent.net.eval()
                metrics = acting.next(signals.check)
                agent.net.train()
                episodes = ended_episodes(acting.buffers, metrics, flags.unroll_length)
                learner.update(batches, episodes, [learner.updates])
            except torch.OutOfMemoryError as e:
                raise Stop(f"use a smaller --num_envs: {first_line(e)}") from e

    return learner.train(body)


def main(argv=None):
    name, create_env = name_of(__spec__, __file__), polybeast_env.create_env
    return run_program(name, program_parser, train, create_env, argv)


if __name__ == "__main__":
    leave(main())
