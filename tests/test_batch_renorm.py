"""BatchRenorm, against slow references."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchbeast import batch_renorm, ranks
from torchbeast.batch_renorm import BatchRenorm, add_batch_renorm, average_over_ranks

N = 7
SCALES = torch.tensor([0.05, 1.0, 3.0, 100.0])  # Smaller and larger than 1, by far.
SHIFTS = torch.tensor([0.0, 30.0, -0.5, -40.0])


def make_layer(num_updates=0):
    torch.manual_seed(1)
    layer = BatchRenorm(4)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    layer.num_updates.fill_(num_updates)
    return layer


def samples():
    return torch.randn(N, 4) * SCALES + SHIFTS


def slow(x, mean, variance, weight, bias):
    """One batch, feature by feature, in NumPy. Returns y [N, 4]."""
    y = np.empty(x.shape)
    for f in range(4):
        batch_mean = sum(x[:, f]) / len(x)
        batch_std = (sum((x[:, f] - batch_mean) ** 2) / len(x) + 1e-3) ** 0.5
        std = (variance[f] + 1e-3) ** 0.5
        r = min(max(batch_std / std, 1 / 3), 3)
        d = min(max((batch_mean - mean[f]) / std, -5), 5)
        y[:, f] = weight[f] * ((x[:, f] - batch_mean) / batch_std * r + d) + bias[f]
    return y


def test_it_is_a_batch_norm_until_it_has_warmed_up():
    layer = make_layer(batch_renorm.WARM_UP - 1)
    x = samples()
    expected = F.batch_norm(x, None, None, layer.weight, layer.bias, True, 0, 1e-3)
    torch.testing.assert_close(layer(x), expected)
    assert not torch.allclose(layer(x), expected)  # The next one is not.


def test_it_corrects_by_the_running_statistics_within_limits():
    layer = make_layer(batch_renorm.WARM_UP)
    for _ in range(20):
        x = samples()
        before = [p.detach().double().numpy().copy() for p in (
            layer.mean, layer.variance, layer.weight, layer.bias
        )]  # fmt: skip
        expected = torch.from_numpy(slow(x.double().numpy(), *before)).float()
        torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)


def test_no_gradient_flows_through_the_correction():
    layer = make_layer(batch_renorm.WARM_UP)
    x = samples().requires_grad_()
    mean, variance = layer.mean.clone(), layer.variance.clone()
    target = torch.randn(N, 4)
    (layer(x) * target).sum().backward()
    got = [p.grad.clone() for p in (x, layer.weight, layer.bias)]
    for p in (x, layer.weight, layer.bias):
        p.grad = None
    batch_std = (x.var(0, correction=0) + 1e-3).sqrt()
    std = (variance + 1e-3).sqrt()
    r = (batch_std / std).detach().clamp(1 / 3, 3)
    d = ((x.mean(0) - mean) / std).detach().clamp(-5, 5)
    y = layer.weight * ((x - x.mean(0)) / batch_std * r + d) + layer.bias
    (y * target).sum().backward()
    for grad, p in zip(got, (x, layer.weight, layer.bias)):
        torch.testing.assert_close(grad, p.grad, atol=1e-4, rtol=1e-4)


def test_running_statistics_follow_batches_in_training_alone():
    layer = make_layer()
    mean, variance = torch.zeros(4), torch.ones(4)
    for i in range(5):
        x = samples()
        layer(x)
        mean = 0.99 * mean + 0.01 * x.mean(0)
        variance = 0.99 * variance + 0.01 * x.var(0, correction=0)
        assert layer.num_updates == i + 1
    torch.testing.assert_close(layer.mean, mean)
    torch.testing.assert_close(layer.variance, variance)
    layer.eval()
    y = layer(x)
    expected = (x - mean) / (variance + 1e-3).sqrt() * layer.weight + layer.bias
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(layer(x[:1]), y[:1])
    torch.testing.assert_close(layer.mean, mean)
    assert layer.num_updates == 5


def test_training_is_evaluation_once_the_statistics_are_known():
    layer = make_layer(batch_renorm.WARM_UP)
    layer.mean.copy_(SHIFTS)
    layer.variance.copy_(SCALES**2)
    x = torch.cat([samples() for _ in range(20)])
    trained = layer(x)
    layer.mean.copy_(SHIFTS)
    layer.variance.copy_(SCALES**2)
    torch.testing.assert_close(trained, layer.eval()(x), atol=1e-4, rtol=1e-4)


def test_one_sample_is_normalised_too():
    y = make_layer(batch_renorm.WARM_UP)(samples()[:1])
    assert y.isfinite().all()


def test_a_checkpoint_has_its_buffers():
    layer, other = make_layer(batch_renorm.WARM_UP - 2), BatchRenorm(4)
    for _ in range(3):
        layer(samples())
    other.load_state_dict(layer.state_dict())
    x = samples()
    assert torch.equal(layer(x), other(x))
    assert torch.equal(layer.eval()(x), other.eval()(x))


def test_all_that_layers_read_is_normalised():
    layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU())
    normalized = add_batch_renorm(layers)
    sizes = [len(x.mean) for x in normalized if isinstance(x, BatchRenorm)]
    assert sizes == [3, 8, 5]
    assert [isinstance(x, BatchRenorm) for x in normalized] == [1, 0, 0, 1, 0, 0, 1]
    assert len(add_batch_renorm(layers.append(nn.Linear(5, 1)))) == 8


def test_ranks_have_the_mean_of_their_running_statistics(monkeypatch):
    mine, others = nn.Sequential(make_layer(), nn.Linear(4, 4)), make_layer()
    mine[0](samples()), others(samples() + 1)
    expected = [
        (x + y) / 2
        for x, y in ((mine[0].mean, others.mean), (mine[0].variance, others.variance))
    ]
    weight = mine[0].weight.clone()

    class TwoRanks(ranks.Ranks):
        def sum(self, x):
            x += torch.cat([others.mean, others.variance])

    monkeypatch.setattr(ranks, "current", TwoRanks(0, 2))
    average_over_ranks(mine)
    torch.testing.assert_close(mine[0].mean, expected[0])
    torch.testing.assert_close(mine[0].variance, expected[1])
    assert torch.equal(mine[0].weight, weight)


@pytest.mark.parametrize("training", [True, False])
def test_a_rank_alone_sends_nothing(training):
    layer = make_layer().train(training)
    layer(samples())
    before = layer.mean.clone()
    average_over_ranks(layer)
    assert torch.equal(layer.mean, before)
