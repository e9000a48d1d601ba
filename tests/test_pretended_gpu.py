"""What a GPU would refuse, read too early or wait for, found without one."""

import threading
from collections import Counter

import pytest
import torch
from torch import nn

import monobeast
import polybeast
import polybeast_env
import warpbeast
from benchmarks import warp as benchmark
from tests import turn_envs
from tests.pretended_gpu import PretendedGpus
from tests.test_agent import parse
from torchbeast import devices, environment, graphs, machine, rollouts, run
from torchbeast.flags import parse_args
from torchbeast.learner import Learner, PublishedWeights
from torchbeast.nests import map_structure
from torchbeast.policies import acting, make_agent

T, B = 4, 4
REPLAY = ("--replay_start", "0", "--replay_size", "1000", "--replay_batch_size", "8")
PIXELS = "tests.envs:torchbeast/CatchPixels-v0"
ON_GPU = "--replay_device cuda"

# How often the CPU waits, and how many kernels are launched, by the program up to an
# update, and in the update. A number that grows makes every run slower: 10 us a launch,
# and a wait lets the GPU run empty.
BUDGETS = {
    "monobeast polybeast CartPole-v1": [(1, 13), (2, 914)],
    f"monobeast polybeast {PIXELS}": [(1, 13), (2, 267)],
    "monobeast ppo CartPole-v1 --num_epochs 1": [(1, 13), (2, 2764)],
    "monobeast pqn CartPole-v1 --num_epochs 1": [(1, 13), (2, 260)],
    "monobeast r2d2 CartPole-v1 --burn_in 2 --replay_ratio 2": [(1, 14), (6, 1043)],
    "monobeast sac Pendulum-v1 --replay_ratio 0.5": [(1, 11), (5, 367)],
    "monobeast td3 Pendulum-v1 --replay_ratio 0.5": [(1, 11), (5, 230)],
    "warpbeast polybeast warp/Catch": [(1, 21), (1, 903)],
    "warpbeast ppo warp/CartPole --num_epochs 1": [(1, 21), (1, 2753)],
    "warpbeast r2d2 warp/CartPole --burn_in 2 --replay_ratio 2": [(1, 21), (5, 1030)],
    f"polybeast polybeast {PIXELS} --use_lstm": [(5, 432), (1, 523)],
    "polybeast ppo CartPole-v1 --num_epochs 1": [(5, 143), (2, 2751)],
    "polybeast sac Pendulum-v1 --replay_ratio 0.5": [(5, 142), (4, 360)],
}  # fmt: skip
GRAPHED = {
    "monobeast polybeast CartPole-v1": [(1, 13), (2, 45)],
    f"monobeast polybeast {PIXELS} --precision bfloat16": [(1, 13), (2, 25)],
    "monobeast polybeast CartPole-v1 --replay_fraction 0.5": [(1, 13), (4, 86)],
    "monobeast ppo CartPole-v1 --num_epochs 2": [(1, 13), (2, 155)],
    "monobeast ppo CartPole-v1 --use_lstm --num_minibatches 2": [(1, 15), (2, 87)],
    "monobeast pqn CartPole-v1 --num_minibatches 2": [(1, 13), (2, 74)],
    "monobeast r2d2 CartPole-v1 --burn_in 2 --replay_ratio 2": [(1, 14), (6, 56)],
    "monobeast r2d2 CartPole-v1 --no-use_lstm --replay_ratio 0.5": [(1, 12), (6, 48)],
    "monobeast sac Pendulum-v1 --replay_ratio 0.5": [(1, 11), (5, 35)],
    "monobeast sac Pendulum-v1 --preset crossq --replay_ratio 0.5": [(1, 11), (5, 44)],
    "monobeast td3 Pendulum-v1 --replay_ratio 0.5": [(1, 11), (5, 35)],
    "warpbeast ppo warp/CartPole --num_minibatches 2": [(1, 21), (1, 74)],
    "polybeast polybeast CartPole-v1": [(5, 51), (1, 32)],
    "polybeast ppo CartPole-v1 --num_minibatches 2": [(5, 47), (2, 72)],
    f"monobeast r2d2 CartPole-v1 --replay_ratio 2 {ON_GPU}": [(1, 14), (4, 80)],
    f"monobeast sac Pendulum-v1 --replay_ratio 2 {ON_GPU}": [(1, 11), (3, 86)],
    f"warpbeast td3 warp/Pendulum --replay_ratio 2 {ON_GPU}": [(1, 21), (2, 76)],
}  # fmt: skip
BUDGETS = {f"{case} --no-cuda_graphs": x for case, x in BUDGETS.items()} | GRAPHED
QUICK = "polybeast polybeast CartPole-v1"


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(machine, "_num_cores", 1)  # Other tests have the others.
    monkeypatch.setattr(run, "setup_logging", lambda *_: None)
    monkeypatch.setattr(warpbeast, "check", lambda env: None)  # On "meta", too.
    devices.copy_stream.cache_clear()
    with PretendedGpus(2) as gpus:
        yield gpus


def flags_of(program, savedir, agent, env, *args, updates):
    size = {"--num_envs": B} if program is warpbeast else {"--batch_size": B}
    size |= {"--num_actors": 0, "--envs_per_actor": B} if program is monobeast else {}
    given = {"--agent": agent, "--env": env, "--unroll_length": T, **size,
             "--total_steps": updates * T * B, "--seed": 1, "--savedir": savedir,
             "--xpid": "x", "--log_interval_steps": 1}  # fmt: skip
    replay = REPLAY if agent in ("r2d2", "sac", "td3") else ()
    args = [str(x) for item in given.items() for x in item] + [*replay, *args]
    flags = parse_args(program.program_parser(agent), args)
    flags.command = [program.__name__, *args]
    return flags


def count(gpus, monkeypatch):
    """A list that will have, of each update, (waits and launches before it, those of
    it), each ({what and where: number}, number)."""
    counts, update = [], Learner.update

    def take():
        taken = gpus.waits, gpus.launches
        gpus.waits, gpus.launches = Counter(), 0
        return taken

    def counting(self, *args):
        before = take()
        update(self, *args)
        counts.append((before, take()))

    monkeypatch.setattr(Learner, "update", counting)
    return counts


class Batch:
    """As inference() gets them."""

    def __init__(self, inputs):
        self.inputs = map_structure(lambda x: x.pin_memory(), inputs)

    def get_inputs(self):
        return self.inputs

    def set_outputs(self, outputs):
        self.outputs = outputs


class Actors:
    def allow(self, num):
        pass


def train_polybeast(flags):
    """inference() and learning() by turns, in one thread, for batches as streams make
    them."""
    polybeast.set_defaults(flags)
    device = devices.get_device(flags, "learner_device")
    env = polybeast_env.create_env(flags, B)
    agent, actor = make_agent(flags, env), make_agent(flags, env)
    own_run = run.Run(flags)
    own_run.open()
    actor_device = devices.get_device(flags, "actor_device")
    weights = PublishedWeights(agent.net, actor_device)
    learner = Learner(flags, own_run, agent, weights, device, None)
    learner.start()
    step = map_structure(lambda x: torch.as_tensor(x)[None], env.initial(1))
    core_state, K = agent.initial_state(B), agent.burn_in
    steps, outputs, core_states = [step], [], [core_state]

    stream = torch.cuda.current_stream(device)

    def asked():
        while not learner.finished:
            while len(outputs) < K + T:
                batch = Batch((steps[-1], core_states[-1]))
                yield batch
                output, core_state = batch.outputs
                arrays = map_structure(lambda x: x[0].numpy(), output["action"])
                step = map_structure(lambda x: torch.as_tensor(x.copy())[None],
                                     env.step(arrays))  # fmt: skip
                steps.append(step)
                outputs.append(output)
                core_states.append(core_state)
            with torch.inference_mode(False), torch.cuda.stream(stream):
                learn()

    def learn():
        batch = {
            name: map_structure(lambda *xs: torch.cat(xs), *[x[name] for x in part])
            for part in (steps, outputs)
            for name in part[0]
        }
        batch["core_state"] = core_states[0]
        batch = map_structure(lambda x: x.pin_memory(), batch)
        polybeast.learning(iter([batch]), Actors(), learner, threading.Event())
        for kept, num in ((steps, K + 1), (outputs, K), (core_states, K + 1)):
            del kept[: len(kept) - num]

    with devices.own_stream(actor_device):
        polybeast.inference(asked(), actor, weights, actor_device)
    learner.save()
    own_run.close()
    env.close()
    return 0


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case == QUICK else pytest.mark.slow)
        for case in BUDGETS
    ],
)
def test_a_run_on_a_gpu_keeps_to_its_budget_of_waits_and_launches(
    case, gpus, tmp_path, monkeypatch
):
    program, *args = case.split()
    program = {x.__name__: x for x in (monobeast, polybeast, warpbeast)}[program]
    updates = 6 if program is warpbeast else 4  # A captured rollout's, too.
    if "--no-cuda_graphs" not in args:  # After what is launched one by one.
        updates = 10 if {"td3", "crossq"} & {*args} else 6
    flags = flags_of(program, tmp_path, *args, updates=updates)
    counts = count(gpus, monkeypatch)
    train = train_polybeast if program is polybeast else program.train
    assert train(flags) == 0
    assert flags.learner_device == "cuda" and len(counts) == updates
    found = [(sum(waits.values()), launches) for waits, launches in counts[-1]]
    assert found == BUDGETS[case], [waits for waits, _ in counts[-1]]


@pytest.mark.slow
@pytest.mark.parametrize("learner, actor", [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")])
def test_one_gpu_acts_while_another_learns(learner, actor, gpus, tmp_path):
    args = "--learner_device", learner, "--actor_device", actor, "--num_epochs", "1"
    flags = flags_of(polybeast, tmp_path, "polybeast", "CartPole-v1", *args, updates=8)
    assert train_polybeast(flags) == 0
    assert {x.device.index for x, _ in gpus.written.values()} == {0, 1}


@pytest.mark.slow
def test_each_of_several_policies_acts_in_graphs_of_its_own(gpus, monkeypatch):
    held, wait = [], gpus.wait
    monkeypatch.setattr(
        gpus,
        "wait",
        lambda *args: (held.append(graphs._capturing.locked()), wait(*args)),
    )
    flags = parse("--opponents", 2, "--envs_per_actor", 4, "--opponent_interval", 10**6)
    env = environment.Environment([turn_envs.Two() for _ in range(4)], opponents=2)
    agent = make_agent(flags, env)
    for x in agent.agents.values():
        x.flags.cuda_graphs = True
    device = torch.device("cuda:0")
    agent.net.eval().to(device)
    nests = map_structure(lambda x: torch.as_tensor(x)[None], env.initial(0))
    nests = nests, agent.initial_state(env.num_envs)
    with devices.own_stream(device), torch.inference_mode():
        act = acting(agent, device)
        for _ in range(6):
            gpus.launches = 0
            held.clear()
            outputs, _ = act(*nests)
    assert gpus.launches < 10 * len(agent.agents)  # Not each kernel by itself.
    assert held and not any(held)
    assert outputs["action"].device.type == "cpu"


def test_rows_that_have_their_turns_are_sent_without_waits(gpus):
    flags = parse("--envs_per_actor", 4, "--use_lstm")
    env = environment.Environment([turn_envs.Two() for _ in range(4)])
    agent = make_agent(flags, env)
    agent.flags.cuda_graphs = True
    device = torch.device("cuda:0")
    agent.net.eval().to(device)
    step = map_structure(lambda x: torch.as_tensor(x)[None], env.initial(0))
    inputs = Batch((step, agent.initial_state(env.num_envs))).inputs
    with devices.own_stream(device), torch.inference_mode():
        act = acting(agent, device)
        for _ in range(6):
            gpus.waits.clear()
            rollouts.act(act, *inputs, device)
    assert sum(gpus.waits.values()) == 1, gpus.waits


@pytest.mark.slow
def test_warpbeast_captures_the_gpu_that_it_trains_on(gpus, tmp_path):
    args = "--learner_device", "cuda:1", "--num_epochs", "1"
    flags = flags_of(warpbeast, tmp_path, "polybeast", "warp/Catch", *args, updates=6)
    assert warpbeast.train(flags) == 0
    assert {stream.device.index for stream, _ in gpus.written.values()} == {1}


@pytest.mark.slow
def test_what_environments_on_a_gpu_do_in_a_second_is_measured(
    gpus, tmp_path, monkeypatch
):
    device = torch.ones(1, device="cuda").device
    monkeypatch.setitem(
        benchmark.CASES, "CartPole", ("warp/CartPole", [], [8], 4096, 64)
    )
    case = benchmark.Case("CartPole", device, str(tmp_path), [])
    found = case.measure(0.1)
    case.learner.run.close()
    assert min(found.values()) > 0 and case.num_envs == 64


def test_weights_that_an_update_still_computes_are_not_waited_for(gpus):
    model, reader = (nn.Linear(2, 2).to("cuda:0") for _ in range(2))
    published = PublishedWeights(model, torch.device("cuda:0"))
    torch.cuda.synchronize()
    with torch.no_grad():
        model.weight.fill_(1)
    published.publish(model, 1)
    with devices.own_stream(torch.device("cuda:0")):
        assert published.fetch(reader) == 0
        torch.cuda.synchronize()
        assert published.fetch(reader, 0) == 1
        assert reader.weight.tolist() == [[1, 1], [1, 1]]
    for version in (2, 3):
        published.publish(model, version)
    with devices.own_stream(torch.device("cuda:0")):
        assert published.fetch(reader, 1) == 2  # None is there: the GPU waits.
        assert reader.weight.tolist() == [[1, 1], [1, 1]]


def test_weights_for_the_cpu_are_read_when_they_have_arrived(gpus):
    model, reader = nn.Linear(2, 2).to("cuda:0"), nn.Linear(2, 2)
    published = PublishedWeights(model, torch.device("cpu"))
    assert published.fetch(reader) == 0
    assert sum(gpus.waits.values()) == 3  # Two to make the model, one for all weights.
    assert reader.weight.tolist() == model.weight.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.uint64])
def test_copies_of_any_dtype_arrive(dtype, gpus):
    x = {"a": torch.ones(2), "b": torch.ones(2, 3)}
    x = map_structure(lambda x: x.to("cuda:0").to(dtype), x)
    into = map_structure(torch.zeros_like, x)
    gpus.launches = 0
    devices.copy_into(x, into)
    assert gpus.launches == (1 if dtype == torch.float32 else 2)
    assert into["b"].tolist() == [[1] * 3] * 2


# The pretence itself.


def captured(function):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def on_own_stream(function):
    with devices.own_stream(torch.device("cuda:0")):
        return function()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda x: x + torch.ones(2), "tensors on .'cpu', 'cuda:0'.: tests/test_pre"),
        (lambda x: x + torch.ones(2, device="cuda:1"), "several GPUs"),
        (lambda x: x.to("cpu", non_blocking=True).tolist(), "has not arrived yet"),
        (lambda x: x.to("cpu", non_blocking=True).double(), "has not arrived yet"),
        (lambda x: on_own_stream(lambda: x + 1), "another stream"),
        (lambda x: captured(lambda: x.sum().item()), "a graph cannot wait"),
        (lambda x: captured(lambda: torch.ones(2, device="cuda:1")), "in no graph"),
        (lambda x: x.numpy(), "no NumPy array"),
        (
            lambda x: torch._foreach_copy_(*[[x.to(torch.uint16)]] * 2),
            "_foreach_copy_ of torch.uint16",
        ),
    ],
)
def test_a_mistake_is_found(mistake, message, gpus):
    with pytest.raises((RuntimeError, TypeError), match=message):
        mistake(torch.ones(2, device="cuda:0"))


def test_a_graph_does_again_what_it_captured(gpus):
    x = torch.zeros(2, device="cuda:0")
    graph = captured(lambda: x.add_(1))
    for n in (1, 2, 3):
        graph.replay()
        assert x.tolist() == [n, n]


@pytest.mark.parametrize(
    ("what", "num"),
    [
        (lambda x: x + 1, 0),
        (lambda x: x.sum().item(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x.masked_fill(x > 0, 1), 0),
        (lambda x: torch.ones(2).to("cuda:0", non_blocking=True), 1),
        (lambda x: torch.ones(2).pin_memory().to("cuda:0", non_blocking=True), 0),
        (lambda x: torch.tensor([1.0], device="cuda:0"), 1),
        (lambda x: devices.to_host({"x": x, "y": x}, x.device), 1),
    ],
)
def test_what_waits_is_counted(what, num, gpus):
    x = torch.ones(2, device="cuda:0")
    what(x)
    assert sum(gpus.waits.values()) == num
