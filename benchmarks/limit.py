"""What this machine could do if only environments, network and learning cost anything.

    python benchmarks/limit.py [--program polybeast] [--seconds 5] [the program's flags]

Measures each alone, in one process for each core at once: an environment's step, the
network for one step in a batch of all environments that it acts for, and an update for
one step at the learner's batch. A step needs one of each, so the limit is 1 / (sum of
seconds per step), agent steps per second of the whole machine. Prints a table, and JSON
on the last line.
"""

import argparse
import importlib
import json
import multiprocessing
import pathlib
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import polybeast_env  # noqa: E402
from torchbeast import flags as command_line  # noqa: E402
from torchbeast import machine  # noqa: E402
from torchbeast.nests import map_structure  # noqa: E402
from torchbeast.process import keep_freed_memory  # noqa: E402


def parse(program, args):
    module = importlib.import_module(program)
    p = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    p.add_argument("--agent", default="polybeast")
    agent = p.parse_known_args(args)[0].agent
    flags = command_line.parse_args(module.program_parser(agent), args)
    flags.command = [program, *args]
    env = polybeast_env.create_env(flags, 1)
    module.set_defaults(flags, env.num_agents, env.observation_space)
    env.close()
    return flags


def envs_together(flags):
    """How many environments one process of the program steps together."""
    return getattr(flags, "envs_per_server", None) or flags.envs_per_actor


def environment_stage(flags, num_envs):
    """(function, agent steps it makes)"""
    env = polybeast_env.create_env(flags, num_envs)
    env.initial(0)
    (action,) = env.actions.leaves
    rng = np.random.default_rng(0)
    shape = (env.num_envs, *action.shape)

    def step():
        return env.step(rng.integers(0, action.num_choices, shape))

    return step, env.num_envs


def make_agent(flags, env):
    import torch

    torch.manual_seed(0)
    module = command_line.load_agent(flags.agent)
    return module.Agent(flags, env.observation_space, env.action_space)


def repeat(nest, *shape):
    """The nest's first environment [E, ...] as a nest of tensors [*shape, ...]."""
    import torch

    def one(x):
        x = torch.as_tensor(x)[0]
        return x.expand(*shape, *x.shape).contiguous()

    return map_structure(one, nest)


def inference_stage(flags, n):
    import torch

    from torchbeast import devices, graphs
    from torchbeast.encoders import to_channels_last

    env = polybeast_env.create_env(flags, 1)
    step = repeat(env.initial(0), 1, n)
    device = torch.device(getattr(flags, "actor_device", "cpu"))
    agent = make_agent(flags, env)
    to_channels_last(agent.net.eval(), device)
    batch = step, agent.initial_state(n)
    if device.type != "cpu":
        batch = map_structure(torch.Tensor.pin_memory, batch)
    act, stream = graphs.Acting(agent, device), devices.own_stream(device)

    def evaluate():
        with stream, torch.inference_mode():
            act(*batch)

    return evaluate


def update_stage(flags):
    import torch

    from torchbeast import devices
    from torchbeast.encoders import to_channels_last

    B = flags.batch_size
    env = polybeast_env.create_env(flags, 1)
    step = env.initial(0)
    agent = make_agent(flags, env)
    T = agent.burn_in + flags.unroll_length
    state = agent.initial_state(1)
    outputs, _ = agent.act(repeat(step, 1, 1), state)
    outputs = map_structure(lambda x: x[0], outputs)
    batch = {**repeat(step, T + 1, B), **repeat(outputs, T, B)}
    batch["done"].zero_()
    batch["core_state"] = agent.initial_state(B)
    device = torch.device(flags.learner_device)
    batch = devices.to_device(batch, device)
    to_channels_last(agent.net, device)
    if flags.compile:
        agent.net.compile()
    agent.start_learning(device)

    unread = []

    def update():  # As the learner: a statistic is read one update late.
        unread.append(next(iter(agent.learn(batch).values())))
        float(unread.pop(0) if len(unread) > 1 else 0)

    return update


def stage(flags, name):
    """(function, agent steps it is about)"""
    if name == "environment":
        return environment_stage(flags, envs_together(flags))
    if name.startswith("inference"):
        n = int(name.split()[-1])
        return inference_stage(flags, n), n
    return update_stage(flags), flags.unroll_length * flags.batch_size


def worker(program, args, name, seconds, barrier, results):
    keep_freed_memory()
    flags = parse(program, args)
    if name.startswith(("inference", "update")):
        import torch

        torch.set_num_threads(1)
    function, num_steps = stage(flags, name)
    warm_up_until = time.monotonic() + min(2, seconds)
    while time.monotonic() < warm_up_until:
        function()
    barrier.wait(timeout=120)
    # Processor time: other work on the machine is not to count. A GPU's is none.
    device = "cpu"
    if name.startswith("inference"):
        device = getattr(flags, "actor_device", "cpu")
    elif name == "update":
        device = flags.learner_device
    on_gpu = device != "cpu"
    clock = time.monotonic if on_gpu else time.process_time
    calls, start, until = 0, clock(), time.monotonic() + seconds
    while time.monotonic() < until:
        function()
        calls += 1
    results.put(calls * num_steps / (clock() - start))


def rate(program, args, name, seconds, num_processes):
    """Agent steps per second of all processes together, doing nothing else."""
    context = multiprocessing.get_context("spawn")
    results, barrier = context.Queue(), context.Barrier(num_processes)
    processes = [
        context.Process(
            target=worker,
            args=(program, args, name, seconds, barrier, results),
            daemon=True,
        )
        for _ in range(num_processes)
    ]
    for process in processes:
        process.start()
    total = sum(results.get(timeout=seconds + 180) for _ in processes)
    for process in processes:
        process.join()
    return total


def measure(program, args, seconds):
    """{stage: steps per second of the machine}, "limit" among them."""
    flags = parse(program, args)
    cores = machine.num_cores()
    n = envs_together(flags) * getattr(flags, "num_servers", 1)
    names = "environment", f"inference at {n}", "update"
    rates = {name: rate(program, args, name, seconds, cores) for name in names}
    rates["limit"] = 1 / sum(1 / x for x in rates.values())
    return rates


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--program", default="polybeast", choices=("monobeast", "polybeast"))
    p.add_argument("--seconds", type=float, default=5)
    options, args = p.parse_known_args()
    rates = measure(options.program, args, options.seconds)
    print(f"| {options.program} {' '.join(args)} | steps/s |\n|---|---|")
    for name, x in rates.items():
        print(f"| {name} | {x:,.0f} |")
    print(json.dumps({name: round(x, 1) for name, x in rates.items()}))


if __name__ == "__main__":
    main()
