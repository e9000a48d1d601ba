"""Which encoder observations get, and what it makes of them."""

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from tests import envs
from torchbeast import encoders
from torchbeast.encoders import (
    NETS,
    NUMBERS,
    ImageEncoder,
    ResidualBlock,
    make_encoder,
    summary,
)
from torchbeast.environment import Environment
from torchbeast.images import image_shape, num_ids


def box(*shape, low=0, high=255, dtype=np.uint8):
    return spaces.Box(low, high, shape, dtype)


def floats(*shape, low=0.0, high=1.0):
    return box(*shape, low=low, high=high, dtype=np.float32)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (box(84, 84, 3), (84, 84, 3)),
        (box(4, 84, 84), (84, 84, 4)),
        (box(84, 60), (84, 60, 1)),
        (box(16, 16, 3), (16, 16, 3)),
        (floats(64, 64, 3), (64, 64, 3)),
        (floats(3, 64, 64, low=-np.inf, high=np.inf), (64, 64, 3)),
        (floats(64, 64), (64, 64, 1)),
        (box(4, 84, 84, 3), (84, 84, 12)),
        (box(4, 3, 84, 84), (84, 84, 12)),
        (box(10, 10, 6, high=1, dtype=np.bool_), (10, 10, 6)),
        (box(16, 16, 29, high=1, dtype=np.int32), (16, 16, 29)),
        (box(29, 16, 16, high=1, dtype=np.int32), (16, 16, 29)),
        (box(10, 10, 27), (10, 10, 27)),
        (box(11, 11, 20), (11, 11, 20)),
        (box(20, 11, 11), (11, 11, 20)),
        (box(10, 12, 29), (10, 12, 29)),
        (box(9, 10, 29), None),
        (box(3, 10, 40), (10, 40, 3)),
        (box(12, 30, 40), (30, 40, 12)),
        (box(30, 40, 12), (30, 40, 12)),
        (box(10, 10, 10), (10, 10, 10)),
        (box(2, 16, 16, 29), (16, 16, 58)),
        (box(21, 79, high=5976, dtype=np.int16), (21, 79, 1)),  # NLE's glyphs.
        (box(7, 7, 3), None),  # MiniGrid's: too small.
        (box(10, 5), None),
        (floats(30, 20, low=-np.inf, high=np.inf), None),  # A table.
        (floats(15, 12), None),
        (floats(10, 36), None),
        (box(15, 12), None),
        (
            spaces.Box(np.zeros((40, 40), np.float32), np.eye(40, dtype=np.float32)),
            None,
        ),
        (floats(100), None),
        (spaces.Discrete(3), None),
        (spaces.MultiBinary([20, 20]), None),
    ],
    ids=str,
)
def test_what_looks_like_images_is_encoded_by_convolutions(space, expected):
    found = image_shape(space)
    assert (None if found is None else found[1]) == expected
    encoder = make_encoder(space, "shallow")
    assert isinstance(encoder, ImageEncoder) == (expected is not None)
    sample = torch.as_tensor(np.stack([space.sample() for _ in range(2)]))
    before = sample.clone()
    assert encoder(sample).shape == (2, encoder.out_features)
    assert torch.equal(sample, before)  # A batch is read again by loss().


@pytest.mark.parametrize(
    ("layout", "shape", "expected"),
    [
        ("HWC", (20, 80, 40), (20, 80, 40)),
        ("CHW", (20, 80, 40), (80, 40, 20)),
        ("CHW", (16, 16, 29), (16, 29, 16)),
        ("HWC", (2, 20, 80, 40), (20, 80, 80)),
        ("HWC", (15, 12), (15, 12, 1)),
        ("numbers", (84, 84, 3), None),
        ("numbers", (84, 84), None),
    ],
)
def test_a_layout_that_is_given_decides_what_is_an_image(layout, shape, expected):
    class Shows(envs.Bandit):
        observation_space = spaces.Dict(x=box(*shape), y=spaces.Discrete(2))

        def __init__(self):
            self.action_space = spaces.Discrete(2)

        def reset(self, **_):
            return {"x": self.observation_space["x"].low, "y": 0}, {}

    env = Environment(Shows(), layout=layout)
    found = image_shape(env.observation_space["x"])
    assert (None if found is None else found[1]) == expected
    assert env.observation_space == Shows.observation_space
    assert env.initial()["observation"]["x"].shape == (1, *shape)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (box(21, 79, high=5976, dtype=np.int16), 5977),
        (box(20, 20, high=2, dtype=np.int64), 3),
        (box(12, 12, 3, high=10), 11),
        (box(84, 84, 3), None),
        (box(84, 84, 3, dtype=np.int32), None),
        (box(84, 84, high=65535, dtype=np.uint16), None),  # A camera's.
        (box(20, 20, high=1, dtype=np.int8), None),
        (box(16, 16, 29, high=20, dtype=np.int32), None),  # Counts.
        (box(20, 20, low=-1, high=5, dtype=np.int8), None),
        (box(64, 64, high=np.iinfo(np.int64).max, dtype=np.int64), None),
        (floats(64, 64), None),
    ],
    ids=str,
)
def test_integers_of_which_no_camera_has_so_many_are_ids(space, expected):
    assert num_ids(space) == expected
    encoder = make_encoder(space)
    assert encoder.num_ids == expected
    assert ("ids" in encoder.encodes) == (expected is not None)
    x = torch.as_tensor(np.stack([space.low, space.high]))
    assert encoder(x).isfinite().all()


def test_ids_that_follow_each_other_differ_as_much_as_any_two():
    encoder = make_encoder(box(21, 79, high=5976, dtype=np.int16))
    x = torch.full((3, 21, 79), 2359, dtype=torch.int16)
    for i, glyph in enumerate((2380, 2381, 5976)):
        x[i, 8:12, 8:12] = glyph
    near, far = encoder(x[:1]) - encoder(x[1:2]), encoder(x[:1]) - encoder(x[2:])
    assert near.norm() > 0.3 * far.norm()
    # What is out of bounds is the last one: no index error on a GPU.
    beyond = torch.where(x[2:] == 5976, 5977, x[2:])
    torch.testing.assert_close(encoder(beyond), encoder(x[2:]))


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize(
    ("space", "logarithms"),
    [
        (box(55, high=5976, dtype=np.int16), True),
        (box(27, low=np.iinfo(np.int64).min, high=2**63 - 1, dtype=np.int64), True),
        (box(2, high=9, dtype=np.int32), False),
        (box(5), True),
        (box(5, high=9), False),
        (floats(5, high=5976), False),
        (spaces.MultiBinary(5), False),
    ],
    ids=str,
)
def test_integers_that_may_be_large_are_encoded_by_their_logarithms(
    space, logarithms, numbers
):
    encoder = make_encoder(space, numbers=numbers)
    assert ("logarithms" in encoder.state_dict()) == logarithms
    if logarithms:
        high = torch.full((1, *space.shape), 5976, dtype=torch.int64)
        assert encoder(high).abs().max() < 10 * 2 * 2 * 9 * len(high[0]) ** 0.5
        assert not torch.equal(encoder(high), encoder(-high))
        # Normalised ones have nothing to take logarithms of.
        x = torch.randn(1, *space.shape)
        reference = make_encoder(floats(*space.shape), numbers=numbers)
        reference.load_state_dict(encoder.state_dict(), strict=False)
        torch.testing.assert_close(encoder(x), reference(x))


@pytest.mark.parametrize("numbers", NUMBERS)
def test_the_entries_of_a_nest_are_combined_unless_the_network_has_layers(numbers):
    """Without: f(a, b) + f(c, d) = f(a, d) + f(c, b), of any linear function f."""
    space = spaces.Dict(x=spaces.Discrete(3), y=floats(2))
    encoder = make_encoder(space, numbers=numbers)
    x, y = torch.tensor([0, 1, 0, 1]), torch.rand(2, 2)[[0, 1, 1, 0]]
    a, b, c, d = encoder({"x": x, "y": y})
    assert torch.allclose(a + b, c + d, atol=1e-4) == (numbers == "flat")
    assert encoder.out_features == len(a)
    # One entry needs nothing.
    one = make_encoder(spaces.Dict(y=floats(2)), numbers=numbers)
    assert not list(one.combine.parameters())


@pytest.mark.parametrize(
    ("space", "low", "high"),
    [
        (box(12, 12, 1), 0, 255 / 64),
        (box(12, 12, 1, high=1), 0, 4),
        (floats(12, 12, 1), 0, 4),
        (floats(12, 12, 1, low=-1.0, high=3.0), -1, 3),
        (floats(12, 12, 1, low=-np.inf, high=np.inf), 0, 1),
        (floats(12, 12, 1, low=-3e38, high=3e38), 0, 1),
    ],
)
def test_images_are_scaled_by_their_bounds(space, low, high):
    encoder = make_encoder(space)
    bounded = abs(float(space.high.max())) < 1e6
    zeros = np.zeros_like(space.low)
    images = [space.low, space.high] if bounded else [zeros, zeros + 1]
    for image, expected in zip(images, (low, high)):
        x = encoder._scaled_image(torch.as_tensor(image)[None])
        torch.testing.assert_close(x, torch.full_like(x, expected))


@pytest.mark.parametrize("net", [net for net in NETS if net != "small"])
def test_convolutions_see_no_difference_between_backgrounds_of_any_color(net):
    encoder = make_encoder(box(32, 32, 3), net)
    convolution = encoder.layers[0]
    torch.nn.init.normal_(convolution.weight)  # Whatever is learned.
    black, red = np.zeros((2, 32, 32, 3), np.uint8)
    red[..., 0] = 200
    for image in black, red:
        image[10:13, 20] += 40  # A small, slightly brighter thing.
    x = torch.as_tensor(np.stack([black, red]))
    y = convolution(encoder._scaled_image(x))[..., 1:-1, 1:-1]  # Without the padding.
    torch.testing.assert_close(y[0], y[1], rtol=1e-3, atol=1e-3)
    assert y[0].abs().max() > 0.1


@pytest.mark.parametrize("net", NETS)
def test_the_brightness_of_each_channel_of_a_flat_image_is_encoded(net):
    encoder = make_encoder(box(32, 32, 3), net)
    images = torch.zeros(4, 32, 32, 3, dtype=torch.uint8)
    for channel in range(3):
        images[channel + 1, ..., channel] = 200
    before, features = images.clone(), encoder(images)
    assert features.shape == (4, encoder.out_features)
    assert torch.equal(images, before)  # A batch is read again by loss().
    assert torch.pdist(features).min() > 0.1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_order_of_an_images_dimensions_does_not_matter(order):
    """The same weights, the same image: the same features."""
    image = np.random.default_rng(0).integers(256, size=(24, 32, 3), dtype=np.uint8)
    reference = make_encoder(box(24, 32, 3))
    encoder = make_encoder(box(*image.transpose(order).shape))
    encoder.load_state_dict(reference.state_dict())
    x = torch.as_tensor(np.ascontiguousarray(image.transpose(order)))
    torch.testing.assert_close(
        encoder(x[None]), reference(torch.as_tensor(image)[None])
    )


@pytest.mark.parametrize("layer_norm", [False, True])
def test_residual_blocks_add_nothing_at_first_unless_they_are_normalised(layer_norm):
    encoder = make_encoder(box(84, 84, 4), "deep", layer_norm=layer_norm)
    blocks = [x for x in encoder.modules() if isinstance(x, ResidualBlock)]
    assert len(blocks) == 6
    for block, channels in zip(blocks, (16, 16, 32, 32, 32, 32)):
        x = torch.randn(2, channels, 8, 8)
        assert torch.equal(block(x), x) != layer_norm


@pytest.mark.slow
def test_a_compiled_encoder_takes_batches_of_several_sizes():
    encoder = make_encoder(box(16, 16, 3), "shallow")
    compiled = copy.deepcopy(encoder)
    compiled.compile(backend="aot_eager")
    for N in (2, 5, 3):
        x = torch.randint(0, 256, (N, 16, 16, 3), dtype=torch.uint8)
        torch.testing.assert_close(compiled(x), encoder(x))


def test_a_stack_of_frames_is_one_image_of_all_their_channels():
    frames = np.random.default_rng(0).integers(256, size=(4, 24, 32, 3), dtype=np.uint8)
    together = np.concatenate(list(frames), axis=-1)  # [H, W, 4 * 3]
    reference = make_encoder(box(24, 32, 12))
    encoder = make_encoder(box(4, 24, 32, 3))
    encoder.load_state_dict(reference.state_dict())
    torch.testing.assert_close(
        encoder(torch.as_tensor(frames)[None]),
        reference(torch.as_tensor(together)[None]),
    )


def test_the_summary_names_each_entry_and_counts_the_parameters():
    space = spaces.Dict(
        cards=spaces.MultiDiscrete([3, 7]),
        image=box(24, 32, 3),
        rest=spaces.Tuple([spaces.Discrete(4), floats(5)]),
    )
    encoder = make_encoder(space)
    count = sum(p.numel() for p in encoder.parameters())
    assert summary(encoder, ["observation/mission"]) == (
        "network: observation/cards (integers, 2), observation/image (image, "
        "height 24, width 32, channels 3), observation/rest/0 (1 of 4), "
        "observation/rest/1 (numbers, 5), "
        f"without observation/mission (text), {count:,} parameters"
    )
    both = torch.nn.ModuleList([encoder, make_encoder(space)])
    assert summary(both).count("observation/cards") == 1


def test_a_byte_that_is_0_or_1_is_seen_though_its_bounds_are_lazy():
    encoder = make_encoder(box(8), numbers="flat")
    assert encoder(torch.ones(1, 8, dtype=torch.uint8)).min() > 0.5
    assert encoder(torch.full((1, 8), 255, dtype=torch.uint8)).max() < 6


def test_a_table_of_integers_that_is_read_as_numbers_says_how_it_becomes_an_image():
    encoder = make_encoder(spaces.Box(0, 9, (24, 18), np.uint8))
    said = summary(encoder)
    assert "(numbers, 432 (24 x 18: --observation_layout HWC makes it" in said
    said = summary(make_encoder(spaces.Box(0, 9, (24, 4), np.uint8)))
    assert "(numbers, 96)" in said  # No image, whatever one says.


def test_a_network_of_ones_own_may_have_convolutions_of_three_dimensions():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv3d(1, 4, 3))
    encoders.to_channels_last(net, torch.device("cpu"))
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert net[1](torch.zeros(1, 1, 8, 8, 8)).shape == (1, 4, 6, 6, 6)
