"""Gradient steps as CUDA graphs, on a GPU that is not there."""

import contextlib

import pytest
import torch

import monobeast
import polybeast
import warpbeast
from tests.test_pretended_gpu import ON_GPU, PIXELS, Batch, flags_of, gpus  # noqa: F401
from torchbeast import checkpoint, devices, graphs, minibatches, ranks
from torchbeast.environment import probe
from torchbeast.graphs import Graphs
from torchbeast.messages import BadInput
from torchbeast.nests import leaves, map_structure
from torchbeast.policies import make_agent

QUICK = "monobeast polybeast CartPole-v1 --num_epochs 3"


CASES = [
    "monobeast polybeast CartPole-v1 --use_lstm --momentum 0.5",
    f"monobeast polybeast {PIXELS} --loss_reduction mean",
    "monobeast polybeast CartPole-v1 --replay_fraction 0.5",
    "monobeast ppo CartPole-v1 --num_minibatches 3",
    "monobeast ppo CartPole-v1 --use_lstm --num_minibatches 2",
    "monobeast pqn CartPole-v1 --num_minibatches 3",
    "monobeast r2d2 CartPole-v1 --burn_in 2 --target_interval 8",
    "monobeast r2d2 CartPole-v1 --no-use_lstm --replay_ratio 0.5",
    "monobeast sac Pendulum-v1 --replay_ratio 0.5",
    "monobeast sac Pendulum-v1 --preset crossq --replay_ratio 1",
    "monobeast td3 Pendulum-v1 --replay_ratio 1",
    "warpbeast ppo warp/CartPole --num_minibatches 2 --num_epochs 2",
    "warpbeast ppo warp/Tag --num_minibatches 2 --num_epochs 2",
]


def train(case, path, updates):
    """Trains on the GPU, and returns the checkpoint's tensors, {path: tensor}."""
    program, *args = case.split()
    program = {x.__name__: x for x in (monobeast, warpbeast)}[program]
    assert program.train(flags_of(program, path, *args, updates=updates)) == 0
    state = checkpoint.load(path / "x" / "model.tar")
    found = {k: x for k, x in leaves(state) if torch.is_tensor(x)}
    return {k: x for k, x in found.items() if "param_groups" not in k}


def assert_near(name, x, y, most=1e-3, least=1e-6):
    """Where in memory numbers are decides how their sums are rounded."""
    x, y = x.double(), y.double()
    assert x.shape == y.shape and (x - y).norm() <= most * x.norm() + least, name


def compare(case, updates, path, monkeypatch, equal=True):
    """Trains with graphs, without, and with all but the graphs. The last has what the
    first has, or nearly so."""
    graphed = train(case, path / "graphed", updates)
    ordinary = train(f"{case} --no-cuda_graphs", path / "ordinary", updates)
    monkeypatch.setattr(graphs, "WARM_UP", 10**9)
    one_by_one = train(case, path / "one by one", updates)
    assert graphed.keys() == one_by_one.keys() == ordinary.keys()
    for name, x in graphed.items():
        if equal:
            assert_near(name, x, one_by_one[name])
        # In an ordinary run the optimizer's numbers are Python's, rounded otherwise: on
        # some CPUs means of CrossQ's gradients differ by five per cent by now, and
        # its weights by half of one.
        most = 0.1 if name.endswith("/exp_avg") else 0.01
        most = most if equal or "bfloat16" not in case else 0.05
        for y in (ordinary[name], one_by_one[name]):
            assert_near(name, x, y, most, least=1e-3)


@pytest.mark.parametrize(
    "case", [QUICK, *(pytest.param(case, marks=pytest.mark.long) for case in CASES)]
)
def test_replayed_gradient_steps_are_those_that_are_launched_one_by_one(
    case,
    gpus,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    compare(case, 2 if case == QUICK else 6, tmp_path, monkeypatch)


@pytest.mark.parametrize("flags", ["", " --no-cuda_graphs"])
def test_a_run_may_be_resumed_with_graphs_and_without(flags, gpus, tmp_path):  # noqa: F811
    case = f"{QUICK} --momentum 0.5"
    before = train(case + flags, tmp_path, 4)
    after = train(case + ("" if flags else " --no-cuda_graphs"), tmp_path, 8)
    assert before.keys() == after.keys()
    steps = {int(x) for k, x in after.items() if k.endswith("/step")}
    assert steps == {24}  # 8 updates of 3 epochs.


def test_what_a_graph_cannot_have_is_named_in_one_line(gpus, tmp_path, monkeypatch):  # noqa: F811
    loss_of = polybeast.Agent.loss

    def loss(self, *args):
        loss, statistics = loss_of(self, *args)
        return loss if loss.item() < 1e9 else 0 * loss, statistics

    monkeypatch.setattr(polybeast.Agent, "loss", loss)
    with pytest.raises(BadInput, match="a graph cannot have /.*: .*(item|"
                       "_local_scalar_dense at tests/test_graphs.py).*; "
                       "--no-cuda_graphs does without them") as e:  # fmt: skip
        train(QUICK, tmp_path, 4)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("device", "num", "message"),
    [
        ("cpu", 1, "--cuda_graphs: expected a learner on cuda, not cpu"),
        ("cuda:0", 2, "--cuda_graphs: expected one learner, there are 2"),
    ],
)
def test_where_there_are_no_graphs_the_flag_is_refused(
    device,
    num,
    message,
    gpus,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    monkeypatch.setattr(ranks.current, "num", num)
    args = "polybeast", "CartPole-v1", "--cuda_graphs"
    flags = flags_of(monobeast, tmp_path, *args, updates=1)
    with pytest.raises(BadInput, match=message):
        Graphs(flags, torch.device(device), None)


class Flags:
    cuda_graphs = True


@pytest.fixture
def own(gpus):  # noqa: F811
    parameter = torch.nn.Parameter(torch.ones(2, device="cuda:0"))
    optimizer = torch.optim.Adam([parameter])
    return Graphs(Flags, torch.device("cuda:0"), optimizer)


def test_batches_of_other_shapes_and_other_constants_have_graphs_of_their_own(own):
    calls = []

    def double(batch, x, negate):
        calls.append(len(batch["x"]))
        y = 2 * batch["x"].sum() + x
        return {"y": -y if negate else y, "many": 0 * batch["x"], "x": x.double()}

    for i in range(9):
        for n in (1, 2):
            for negate in (True, False):
                x = torch.tensor(float(i), device="cuda:0")
                batch = {"x": torch.full((n,), float(n + i), device="cuda:0")}
                result = own.of(double, batch)(x, negate)
                sign = -1 if negate else 1
                assert result["y"].item() == sign * (2 * n * (n + i) + i)
                assert result["x"].item() == i and result["many"].shape == (n,)
    assert len(calls) == 4 * (graphs.WARM_UP + 1)  # The last ones are captured.


def test_results_are_the_callers_own(own):
    step = own.of(
        lambda batch: (batch + 1, batch.sum()), torch.ones(2, device="cuda:0")
    )
    results = [step() for _ in range(6)]
    for x, total in results[:-1]:
        x.zero_()
        total.zero_()
    assert results[-1][0].tolist() == [2, 2] and results[-1][1].item() == 2


def test_of_batches_of_many_shapes_only_the_first_are_captured(own, monkeypatch):
    calls, told = [], []
    monkeypatch.setattr(graphs.log, "info", lambda *args: told.append(args))

    def step(batch):
        calls.append(len(batch))
        return batch.sum()

    for n in range(1, graphs.MAX_SHAPES + 2):
        for _ in range(graphs.WARM_UP + 3):
            assert own.of(step, torch.ones(n, device="cuda:0"))().item() == n
    called = [calls.count(n + 1) for n in range(graphs.MAX_SHAPES + 1)]
    assert called == [*[graphs.WARM_UP + 1] * graphs.MAX_SHAPES, graphs.WARM_UP + 3]
    assert len(told) == 1
    calls.clear()

    def another(batch):
        return step(batch)

    for _ in range(graphs.WARM_UP + 3):  # Of another function they are not too many.
        own.of(another, torch.ones(1, device="cuda:0"))()
    assert len(calls) == graphs.WARM_UP + 1


def test_nobody_acts_while_a_step_is_launched(own, tmp_path):
    """Beside what is captured some versions of PyTorch draw no random numbers."""
    step = own.of(
        lambda x: 1 * x.fill_(graphs._capturing.locked()),
        torch.ones((), device="cuda:0"),
    )
    assert [step().item() for _ in range(5)] == [1] * 5
    locked = []
    with acting(tmp_path) as (agent, act, batch):
        of_agent = agent.act
        agent.act = lambda *x: locked.append(graphs._capturing.locked()) or of_agent(*x)
        act(*batch(1))
    assert locked == [True] and not graphs._capturing.locked()


@contextlib.contextmanager
def acting(path, *args):
    """(an agent, its Acting, a function that makes batches of n rows)."""
    flags = flags_of(polybeast, path, "polybeast", "CartPole-v1", *args, updates=1)
    polybeast.set_defaults(flags)
    device = torch.device("cuda:0")
    env, _ = probe(polybeast.polybeast_env.create_env, flags, 8)
    agent = make_agent(flags, env)
    agent.net.eval().to(device)
    step = {k: torch.as_tensor(x)[None] for k, x in env.initial(1).items()}

    def batch(n):
        step["observation"] = torch.randn(1, 8, 4)
        inputs = step, agent.initial_state(8)
        return Batch(map_structure(lambda x: x[:, :n].contiguous(), inputs)).inputs

    with torch.inference_mode(), devices.own_stream(device):
        yield agent, graphs.Acting(agent, device), batch


def compare_acting(path, *args):
    """Acts on batches of many sizes, in graphs and by itself."""
    sizes = [1, 3, 8, 5, 2, 7, 6, 4, 1, 8, 3, 2, 5, 6, 7, 3, 1, 8, 4, 2, 1, 1, 2, 2]
    with acting(path, *args) as (agent, act, batch):
        calls, of_agent = [], agent.act

        def counting(step, core_state):
            calls.append(len(step["done"][0]))
            return of_agent(step, core_state)

        agent.act = counting
        for n in sizes:
            inputs = batch(n)
            found, state = act(*inputs)
            of_agent_alone = of_agent(*map_structure(lambda x: x.to("cuda:0"), inputs))
            expected, expected_state = devices.to_host(of_agent_alone, act._device)
            assert found["action"].shape == (1, n)
            found, expected = (
                leaves((outputs["policy_logits"], after))
                for outputs, after in ((found, state), (expected, expected_state))
            )
            for (_, x), (_, y) in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert {n: calls.count(n) for n in calls} == dict.fromkeys((1, 2, 4, 8), 4)


@pytest.mark.parametrize("args", [(), ("--use_lstm",)], ids=str)
def test_who_acts_in_a_graph_does_so_for_batches_of_any_size(args, gpus, tmp_path):  # noqa: F811
    compare_acting(tmp_path, *args)


def test_minibatches_are_drawn_while_nobody_captures(gpus, tmp_path, monkeypatch):  # noqa: F811
    draw, locked = minibatches.draw, []

    def look(*args):
        locked.append(graphs._capturing.locked())
        return draw(*args)

    monkeypatch.setattr(minibatches, "draw", look)
    train("monobeast ppo CartPole-v1 --num_epochs 2", tmp_path, 1)
    assert locked == [True, True]


def test_a_field_that_act_reads_later_is_named(gpus, tmp_path):  # noqa: F811
    with acting(tmp_path) as (agent, act, batch):
        calls, of_agent = [], agent.act

        def reading(step, core_state):
            calls.append(None)
            if len(calls) > graphs.WARM_UP:
                step["episode_step"]
            return of_agent(step, core_state)

        agent.act = reading
        for _ in range(graphs.WARM_UP):
            act(*batch(2))
        message = "act.. did not read 'episode_step' in its first calls; --no-cuda_gr"
        with pytest.raises(BadInput, match=message):
            act(*batch(2))


def test_a_result_that_a_graph_would_not_change_is_refused(own):
    step = own.of(
        lambda x: {"loss": x + 1, "lost": torch.ones(())},
        torch.ones(2, device="cuda:0"),
    )
    with pytest.raises(BadInput, match="a result on the CPU: lost"):
        for _ in range(graphs.WARM_UP + 1):
            step()


def test_a_number_of_pythons_is_brought_up_to_date(own, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_REPLAYS", 4)
    numbers = iter(range(99))
    step = own.of(lambda x: x + next(numbers), torch.zeros((), device="cuda:0"))
    assert [step().item() for _ in range(12)] == [0, 1, 2, *[3] * 4, *[4] * 4, 5]
