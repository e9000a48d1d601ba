"""Which encoder observations get, and what it makes of them."""

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces

from torchbeast.encoders import NETS, ImageEncoder, image_shape, make_encoder, summary


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
        (box(7, 7, 3), None),  # MiniGrid's: too small.
        (box(10, 5), None),
        (floats(30, 20, low=-np.inf, high=np.inf), None),  # A table.
        (floats(100), None),
        (spaces.Discrete(3), None),
        (spaces.MultiBinary([20, 20]), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("net", NETS)
def test_what_looks_like_images_is_encoded_by_convolutions(space, expected, net):
    found = image_shape(space)
    assert (None if found is None else found[1]) == expected
    encoder = make_encoder(space, net)
    assert isinstance(encoder, ImageEncoder) == (expected is not None)
    sample = torch.as_tensor(np.stack([space.sample() for _ in range(2)]))
    before = sample.clone()
    assert encoder(sample).shape == (2, encoder.out_features)
    assert torch.equal(sample, before)  # A batch is read again by loss().


@pytest.mark.parametrize(
    ("space", "low", "high"),
    [
        (box(12, 12, 1), 0, 255 / 64),
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


@pytest.mark.parametrize("net", NETS)
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
    features = encoder(images)
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
        "24 x 32 x 3), observation/rest/0 (1 of 4), observation/rest/1 (numbers, 5), "
        f"without observation/mission (text), {count:,} parameters"
    )
    both = torch.nn.ModuleList([encoder, make_encoder(space)])
    assert summary(both).count("observation/cards") == 1
