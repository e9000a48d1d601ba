"""What a learner does with a network: gradients in slices, precisions, weights."""

import functools
import pathlib
import threading

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import monobeast
import polybeast
from torchbeast import devices, encoders, environment, gradients
from torchbeast.flags import load_agent
from torchbeast.learner import PublishedWeights
from torchbeast.nests import map_structure
from torchbeast.threads import Threads

CPU = torch.device("cpu")
T, B = 5, 6


class Image(gymnasium.Env):
    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


IMAGE = Image.observation_space
NUMBERS = spaces.Box(-1, 1, (4,))
SMALL_IMAGE = spaces.Box(0, 255, (10, 5, 1), np.uint8)


def learn(*args, prepare=lambda agent: None, device="cpu"):
    """(statistics, gradients) of one update on random rollouts."""
    flags = polybeast.program_parser().parse_args(["--net", "shallow", *args])
    env = environment.Environment([Image()])
    torch.manual_seed(0)
    agent = polybeast.Agent(flags, env.observation_space, env.action_space)
    agent.net.to(device)
    prepare(agent)
    agent.start_learning(torch.device(device))
    step = map_structure(torch.as_tensor, env.initial(0))
    batch = map_structure(
        lambda x: x.new_zeros(T + 1, B, *x.shape[1:]).random_(0, 2), step
    )
    observation = batch["observation"]
    batch["observation"] = torch.randint(256, observation.shape, dtype=torch.uint8)
    batch["policy_logits"] = torch.randn(T, B, 3)
    batch["action"] = torch.randint(3, (T, B))
    batch["core_state"] = map_structure(
        lambda x: torch.randn(x.shape), agent.initial_state(B)
    )
    batch = map_structure(lambda x: x.to(device), batch)
    stats = agent.learn(batch)
    assert stats.pop("learning_rate") > 0
    return stats, {name: p.grad for name, p in agent.net.named_parameters()}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("lstm", [[], ["--use_lstm"]])
@pytest.mark.parametrize("rollouts", [1, 4, 20])
def test_the_gradients_of_slices_add_up_to_the_batchs(
    reduction, lstm, rollouts, monkeypatch
):
    args = ["--loss_reduction", reduction, "--grad_norm_clipping", "1e9", *lstm]
    whole = learn(*args)  # 36 observations.
    monkeypatch.setattr(gradients, "SLICE_BYTES", rollouts * (T + 1) * 4 * 84 * 84)
    sliced = learn(*args)
    for one, other in zip(whole, sliced):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-4)


def test_a_batch_that_does_not_fit_is_learned_from_in_slices(monkeypatch):
    def small(agent):
        loss = agent.loss

        def loss_of_few(batch, outputs):
            if batch["done"].shape[1] > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss(batch, outputs)

        agent.loss = loss_of_few

    monkeypatch.setattr(gradients, "_largest", 2**62)
    whole, sliced = learn("--use_lstm"), learn("--use_lstm", prepare=small)
    assert gradients._largest == 2
    for one, other in zip(whole, sliced):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("T", "B", "sizes"),
    [
        (21, 4, [4]),  # The default: one slice.
        (21, 32, [4] * 8),
        (21, 30, [4] * 7 + [2]),
        (1000, 3, [1, 1, 1]),
        (2, 256, [43] * 5 + [41]),  # No slice is much smaller than the others.
    ],
)
def test_a_batch_is_cut_for_the_cache(T, B, sizes):
    batch = {
        "observation": torch.empty(T, B, 4, 84, 84, dtype=torch.uint8),
        "done": torch.zeros(T, B, dtype=torch.bool),
        "action": torch.zeros(T - 1, B, dtype=torch.int64),
    }
    for reduction in ("sum", "mean"):
        parts = list(gradients.slices(batch, reduction))
        assert [part["action"].shape[1] for part, _ in parts] == sizes
        weights = [float(weight) for _, weight in parts]
        mean = [size / B for size in sizes]
        expected = [1] * len(sizes) if reduction == "sum" else mean
        assert weights == pytest.approx(expected)


def test_only_the_states_of_networks_make_slices_larger():
    T, B = 21, 32
    batch = {
        "observation": torch.empty(T, B, 4, 84, 84, dtype=torch.uint8),
        "done": torch.zeros(T, B, dtype=torch.bool),
    }
    for state, size in (((), 4), (torch.zeros(1, B), 4), (torch.zeros(1, B, 256), 8)):
        parts = gradients.slices({**batch, "core_state": ((), state)})
        assert [part["done"].shape[1] for part, _ in parts] == [size] * (B // size)


def test_the_mean_of_a_statistic_is_of_the_gradient_steps_that_have_it():
    steps = [{"a": 1.0}, {"a": 3.0, "b": 5.0}]
    assert gradients.means(steps) == {"a": 2, "b": 5}
    assert gradients.means([]) == {}


def test_forward_is_called_for_one_slice_after_the_other_and_once_for_each(
    monkeypatch,
):
    """Else a running mean in a network would not be right."""
    monkeypatch.setattr(gradients, "SLICE_BYTES", 2 * (T + 1) * 4 * 84 * 84)
    entered, calls = [], []

    def prepare(agent):
        forward = agent.net.forward

        def count(step, core_state):
            assert not entered
            entered.append(True)
            calls.append(step["reward"].shape)
            result = forward(step, core_state)
            entered.pop()
            return result

        agent.net.forward = count

    learn(prepare=prepare)
    assert calls == [(T + 1, 2)] * 3


def test_bfloat16_changes_losses_and_gradients_by_a_few_percent_at_most():
    stats, gradients = learn()
    reduced_stats, reduced_gradients = learn("--precision", "bfloat16")
    assert stats["total_loss"] != reduced_stats["total_loss"]  # It does something.
    for name in stats:
        torch.testing.assert_close(
            reduced_stats[name], stats[name], rtol=0.03, atol=0.03
        )
    for name, gradient in gradients.items():
        assert reduced_gradients[name].dtype == torch.float32
        error = (reduced_gradients[name] - gradient).norm() / gradient.norm()
        assert error < 0.1, name


def test_numbers_beside_an_image_are_not_rounded():
    space = spaces.Dict(image=IMAGE, numbers=NUMBERS)
    encoder = encoders.make_encoder(space)
    step = {
        "image": torch.randint(256, (2, *IMAGE.shape), dtype=torch.uint8),
        "numbers": torch.tensor([[1001.0] * 4, [1003.0] * 4]),
    }
    rounding = encoders.make_encoder(space, bfloat16=True)
    rounding.load_state_dict(encoder.state_dict())
    expected, got = (
        [encode(step[key]) for key, encode in zip(x.keys, x.encoders)]
        for x in (encoder, rounding)
    )
    assert not torch.equal(got[0], expected[0])  # bfloat16.
    assert torch.equal(got[1], expected[1])
    assert rounding(step).dtype == torch.float32
    rounding.encoders[0] = encoder.encoders[0]
    assert torch.equal(rounding(step), encoder(step))  # Nor are they combined in it.
    assert not torch.equal(got[1][0], got[1][1])


def test_slices_in_bfloat16_compute_nearly_the_same(monkeypatch):
    args = ["--precision", "bfloat16", "--grad_norm_clipping", "1e9"]
    _, whole = learn(*args)
    monkeypatch.setattr(gradients, "SLICE_BYTES", (T + 1) * 4 * 84 * 84)
    _, sliced = learn(*args)
    for name in whole:  # Each slice's gradients are rounded.
        assert (sliced[name] - whole[name]).norm() < 0.03 * whole[name].norm(), name


@pytest.mark.parametrize(
    ("space", "precision"),
    [
        (IMAGE, "bfloat16"),
        (spaces.Dict(image=IMAGE, inventory=NUMBERS), "bfloat16"),
        (spaces.Tuple([NUMBERS, spaces.Tuple([IMAGE])]), "bfloat16"),
        (NUMBERS, "float32"),
        (SMALL_IMAGE, "float32"),
        (spaces.Dict(numbers=NUMBERS, rest=spaces.Discrete(3)), "float32"),
    ],
)
def test_the_default_is_bfloat16_where_it_was_compared(space, precision, monkeypatch):
    """For images, with two of the networks, where all devices have it; tf32 on GPUs."""
    images = precision != "float32"
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: device.type == "cpu")
    shallow, on_gpu = ["--net", "shallow"], ["--actor_device", "cuda"]
    for script, args, expected in (
        (polybeast, shallow, precision),
        (monobeast, shallow, precision),
        (monobeast, ["--net", "nature"], precision),
        (polybeast, [], "float32"),
        (monobeast, ["--net", "deep"], "float32"),
        (polybeast, [*shallow, *on_gpu], "tf32" if images else "float32"),
        (polybeast, ["--learner_device", "cuda"], "tf32" if images else "float32"),
        (polybeast, [*shallow, "--precision", "float32"], "float32"),
        (polybeast, [*on_gpu, "--precision", "bfloat16"], "bfloat16"),
    ):
        flags = script.program_parser().parse_args(["--learner_device", "cpu", *args])
        if script is polybeast:
            flags.actor_device = flags.actor_device or "cpu"
        devices.choose_precision(flags, space)
        assert flags.precision == expected


@pytest.mark.parametrize("agent", ["polybeast", "ppo", "pqn", "r2d2"])
def test_an_agent_that_chooses_its_network_chooses_the_precision_then(
    agent, monkeypatch
):
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: True)
    flags = monobeast.program_parser(agent).parse_args(["--num_actors", "0"])
    monobeast.set_defaults(flags)
    net = load_agent(agent).Agent(flags, IMAGE, spaces.Discrete(2)).net
    assert flags.precision == "bfloat16"
    assert net.encoder.bfloat16


@pytest.mark.parametrize(
    ("device", "capabilities", "expected"),
    [
        ("cpu", {"amx_bf16": True}, True),
        ("cpu", {"avx512_bf16": True, "cpu_name": "AMD EPYC 9B14"}, True),
        ("cpu", {"avx512_bf16": True, "cpu_name": "Intel(R) Xeon(R)"}, False),
        ("cpu", {"avx512_bf16": True, "amx_bf16": False}, False),
        ("cpu", {"avx512_f": True}, False),
        ("cuda", {"amx_bf16": True}, False),
    ],
)
def test_what_a_device_can_do_tells_whether_it_has_bfloat16(
    device, capabilities, expected, monkeypatch
):
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: capabilities, raising=False
    )
    assert devices.has_bfloat16(torch.device(device)) == expected
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not devices.has_bfloat16(torch.device(device))  # An older PyTorch's.


@pytest.mark.skipif(
    not hasattr(torch.cpu, "get_capabilities"), reason="an older PyTorch does not tell"
)
def test_this_cpu_has_bfloat16_if_the_kernel_says_so():
    words = pathlib.Path("/proc/cpuinfo").read_text().split()
    avx512 = "avx512_bf16" in words and "AuthenticAMD" in words
    assert devices.has_bfloat16(CPU) == ("amx_bf16" in words or avx512)


@pytest.mark.long
def test_a_compiled_network_learns_the_same():
    stats, gradients = learn()
    compiled = []

    def compile(agent):
        agent.net.compile()
        compiled.append(agent.net)

    compiled_stats, compiled_gradients = learn(prepare=compile)
    assert compiled[0]._compiled_call_impl is not None
    for one, other in ((stats, compiled_stats), (gradients, compiled_gradients)):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-3)


def test_weights_are_never_fetched_half_published():
    def net(value):
        layers = nn.Sequential(*(nn.Linear(200, 200) for _ in range(5)))
        for parameter in layers.parameters():
            nn.init.constant_(parameter, value)
        return layers

    published = PublishedWeights(net(0), CPU)
    done = threading.Event()

    def publish():
        for version in range(1, 300):
            published.publish(net(version), version)
        done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    model, version, seen = net(-1), None, set()
    while not done.is_set():
        version = published.fetch(model, version)
        values = {
            float(x) for p in model.state_dict().values() for x in (p.min(), p.max())
        }
        assert values == {float(version)}
        seen.add(version)
    thread.join()
    assert len(seen) > 1


def test_published_weights_are_not_the_models():
    model = nn.Linear(1, 1)
    published = PublishedWeights(model, CPU)
    weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    other = nn.Linear(1, 1)
    assert published.fetch(other) == 0
    torch.testing.assert_close(other.weight.detach(), weight)
    published.publish(model, 1)
    torch.testing.assert_close(other.weight.detach(), weight)
    assert published.fetch(other, 1) == 1  # It says that it has them.
    torch.testing.assert_close(other.weight.detach(), weight)
    assert published.fetch(other, 0) == 1
    torch.testing.assert_close(other.weight, model.weight)


def test_each_thread_computes_with_the_number_of_threads_that_it_was_given():
    given, found = (1, 3, 2), {}
    barrier = threading.Barrier(len(given))

    def body(number):
        barrier.wait()
        torch.ones(10**6).add_(1)
        found[number] = torch.get_num_threads()

    threads = Threads()
    for number in given:
        threads.add(f"thread-{number}", functools.partial(body, number), number)

    class NoSignals:
        def check(self):
            pass

    threads.run(NoSignals(), end=lambda: None)
    assert found == {number: number for number in given}
