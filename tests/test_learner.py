"""What both scripts do with a network: gradients in slices, precisions, weights."""

import threading

import gymnasium
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

import environment
import learner
import polybeast
from benchmarks.bfloat16 import rounded
from environment import map_structure
from learner import PublishedWeights

CPU = torch.device("cpu")
T, B = 5, 6


class Image(gymnasium.Env):
    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


def learn(*args, prepare=lambda net: None, device="cpu"):
    """(statistics, gradients) of one update on random rollouts."""
    flags = polybeast.parser().parse_args(["--net", "shallow", *args])
    env = environment.Environment([Image()])
    torch.manual_seed(0)
    net = polybeast.create_net(flags, env).to(device)
    prepare(net)
    optimizer, scheduler = learner.create_optimizer(flags, net)
    step = map_structure(torch.as_tensor, env.initial(0))
    batch = map_structure(
        lambda x: x.new_zeros(T + 1, B, *x.shape[1:]).random_(0, 2), step
    )
    observation = batch["observation"]
    batch["observation"] = torch.randint(256, observation.shape, dtype=torch.uint8)
    batch["policy_logits"] = torch.randn(T, B, 3)
    batch["action"] = torch.randint(3, (T, B))
    batch["core_state"] = map_structure(
        lambda x: torch.randn(x.shape), net.initial_state(B)
    )
    batch = map_structure(lambda x: x.to(device), batch)
    stats = polybeast.learn(flags, net, optimizer, scheduler, batch)
    return stats, {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("lstm", [[], ["--use_lstm"]])
@pytest.mark.parametrize(("rollouts", "num_threads"), [(1, 1), (4, 1), (1, 4), (20, 3)])
def test_the_gradients_of_slices_add_up_to_the_batchs(
    reduction, lstm, rollouts, num_threads, monkeypatch
):
    args = ["--loss_reduction", reduction, "--grad_norm_clipping", "1e9", *lstm]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = learn(*args)  # 36 observations.
    size = rollouts * (T + 1) * 4 * 84 * 84
    monkeypatch.setattr(learner, "SLICE_BYTES", size)
    torch.set_num_threads(num_threads)
    sliced = learn(*args)
    torch.set_num_threads(before)
    for one, other in zip(whole, sliced):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("T", "B", "num_threads", "sizes"),
    [
        (21, 4, 1, [4]),  # The default: one slice,
        (21, 4, 2, [2, 2]),  # or one for each thread,
        (6, 4, 2, [4]),  # unless they would be small.
        (21, 32, 1, [4] * 8),
        (21, 32, 3, [4] * 8),
        (1000, 3, 2, [1, 1, 1]),
    ],
)
def test_a_batch_is_cut_for_the_cache_and_for_the_threads(T, B, num_threads, sizes):
    flags = polybeast.parser().parse_args([])
    batch = {
        "observation": torch.empty(T, B, 4, 84, 84, dtype=torch.uint8),
        "done": torch.zeros(T, B, dtype=torch.bool),
        "action": torch.zeros(T - 1, B, dtype=torch.int64),
    }
    parts = list(learner.slices(flags, batch, num_threads))
    assert [part["action"].shape[1] for part, _ in parts] == sizes


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


def test_slices_in_bfloat16_at_the_same_time_compute_the_same(monkeypatch):
    args = ["--precision", "bfloat16", "--grad_norm_clipping", "1e9"]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    _, whole = learn(*args)
    monkeypatch.setattr(learner, "SLICE_BYTES", (T + 1) * 4 * 84 * 84)
    torch.set_num_threads(3)
    _, sliced = learn(*args)
    torch.set_num_threads(before)
    for name in whole:  # Each slice's gradients are rounded.
        assert (sliced[name] - whole[name]).norm() < 0.03 * whole[name].norm(), name


def test_rounded_operations_compute_what_bfloat16_does(monkeypatch):
    _, expected = learn("--precision", "bfloat16")
    dtypes = set()

    def noting(operation):
        def compute(x, weight, *args):
            dtypes.update((x.dtype, weight.dtype))
            return operation(x, weight, *args)

        return compute

    for name in ("conv2d", "linear"):
        monkeypatch.setattr(F, name, rounded(noting(getattr(F, name))))
    _, gradients = learn("--precision", "bfloat16")
    assert dtypes == {torch.float32}
    for name, gradient in expected.items():
        # float32's differ by up to 0.05.
        assert (gradients[name] - gradient).norm() < 0.01 * gradient.norm(), name


def test_a_compiled_network_learns_the_same():
    stats, gradients = learn()
    compiled = []

    def compile(net):
        net.compile()
        compiled.append(net)

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
