"""--resize: larger images become smaller where the environment is."""

import cv2
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from tests.programs import args, refusal, succeeds
from tests.test_environment import play, same
from tests.test_spaces import Sampler
from torchbeast.environment import Environment
from torchbeast.images import image_shape, large_image
from torchbeast.messages import BadInput
from torchbeast.spaces import BadStep


def box(*shape, low=0, high=255, dtype=np.uint8):
    return spaces.Box(low, high, shape, dtype)


def resized(image, size):
    """The mean of the pixels of an image [H, W, C], by OpenCV, channel by channel."""
    parts = [
        cv2.resize(
            image[..., c].astype(float), (size, size), interpolation=cv2.INTER_AREA
        )
        for c in range(image.shape[-1])
    ]
    return np.stack(parts, -1)


@pytest.mark.parametrize(
    ("space", "order", "shape"),  # order: of [H, W, ...].
    [
        (box(48, 64, 3), (0, 1, 2), (12, 12, 3)),
        (box(3, 48, 64), (1, 2, 0), (3, 12, 12)),
        (box(40, 24), (0, 1), (12, 12)),
        (box(10, 20, 3), (0, 1, 2), (12, 12, 3)),  # Only one side is longer.
        (box(40, 40, 12), (0, 1, 2), (12, 12, 12)),
        (box(4, 40, 48, 3), (1, 2, 0, 3), (4, 12, 12, 3)),
        (box(4, 3, 40, 48), (2, 3, 0, 1), (4, 3, 12, 12)),
        (box(48, 64, 29, high=1, dtype=np.bool_), (0, 1, 2), (12, 12, 29)),
        (box(48, 64, 3, dtype=np.int64), (0, 1, 2), (12, 12, 3)),
        (box(48, 64, 1, high=65535, dtype=np.uint16), (0, 1, 2), (12, 12, 1)),
        (box(24, 36, 3, low=-1, high=1, dtype=np.float32), (0, 1, 2), (12, 12, 3)),
        (box(24, 36, 3, low=-np.inf, high=np.inf, dtype=np.float64), (0, 1, 2),
         (12, 12, 3)),
    ],
    ids=str,
)  # fmt: skip
def test_a_larger_image_is_the_mean_of_its_pixels(space, order, shape):
    parts = [Sampler(space, spaces.Discrete(2), e) for e in range(2)]
    env = Environment(parts, resize=12)
    steps = play(env, np.zeros((5, 2), int))
    new = env.observation_space
    assert new.shape == shape and new.dtype == space.dtype
    assert image_shape(new)[0] == order
    channels = image_shape(space)[1][2]
    assert image_shape(new)[1] == (12, 12, channels)
    for t, step in enumerate(steps):
        for x, part in zip(step["observation"], parts, strict=True):
            assert x.shape == shape and x.dtype == space.dtype
            assert new.contains(x) and x.flags.c_contiguous
            image = np.asarray(part.observations[t]).transpose(order)
            expected = resized(image.reshape(*image.shape[:2], -1), 12)
            found = x.transpose(order).reshape(12, 12, -1)
            error = 1e-4 if space.dtype.kind == "f" else 1
            np.testing.assert_allclose(found.astype(float), expected, atol=error)


SPACE = spaces.Dict(
    camera=box(48, 64, 3),
    glyphs=box(21, 79, high=5976, dtype=np.int16),
    map=box(12, 10, 3),
    mission=spaces.Text(9),
    pose=spaces.Tuple([box(30, high=1, dtype=np.float32), box(2, 30, 40)]),
)


def make(seed):
    return Sampler(SPACE, spaces.Discrete(2), seed)


def test_only_the_entries_that_are_larger_images_become_smaller():
    env = Environment([make(0), make(1)], resize=12)
    shapes = {"camera": (12, 12, 3), "glyphs": (21, 79), "map": (12, 10, 3)}
    observation = env.initial(0)["observation"]
    assert list(observation) == [*shapes, "pose"]
    for name, shape in shapes.items():
        assert env.observation_space[name].shape == shape
        assert observation[name].shape == (2, *shape)
    assert [x.shape for x in observation["pose"]] == [(2, 30), (2, 2, 12, 12)]
    assert env.texts == ["observation/mission"]


def test_numbers_of_an_image_that_are_none_of_its_ids_are_refused_by_name():
    space = spaces.Dict(camera=SPACE["camera"], glyphs=SPACE["glyphs"])
    env = Environment([Sampler(space, spaces.Discrete(2), 0)])
    observation = {name: x[0] for name, x in env.initial(0)["observation"].items()}
    expected = "glyphs has numbers from 0 to 5977, expected 0 to 5976, ids of things"
    observation["glyphs"][:] = 0
    observation["glyphs"][3, 4] = 5977
    with pytest.raises(BadStep, match=expected):
        env.env.observations.stack([observation])


def test_entries_beside_text_become_smaller_in_any_order():
    entries = [("map", box(30, 40, 3)), ("camera", box(3, 48, 64)), ("pose", box(3))]
    space = spaces.Dict([*entries, ("mission", spaces.Text(9))])
    env = Environment([Sampler(space, spaces.Discrete(2), 0)], resize=12)
    observation = env.initial(0)["observation"]
    assert list(observation) == list(env.observation_space) == [k for k, _ in entries]
    for name, part in env.observation_space.items():
        assert observation[name].shape == (1, *part.shape)


def test_a_vector_environments_images_become_the_same():
    actions = np.zeros((6, 2), int)
    single = Environment([make(0), make(1)], resize=12)
    vector = Environment(
        SyncVectorEnv([lambda: make(0), lambda: make(1)], copy=True), resize=12
    )
    assert vector.observation_space == single.observation_space
    for a, b in zip(play(single, actions), play(vector, actions), strict=True):
        assert same(a["observation"], b["observation"])


class Camera(Sampler):
    """Sees 30 x 104 pixels."""

    def __init__(self):
        super().__init__(
            spaces.Dict(image=box(30, 104, 3), speed=box(1, high=1, dtype=np.float32)),
            spaces.Discrete(2),
        )


gymnasium.register("torchbeast/Camera-v0", Camera)
CAMERA = "tests.test_images:torchbeast/Camera-v0"
LARGE = "observation/image is 30 x 104: --resize 84"


@pytest.mark.parametrize(("module", "resize"), [("monobeast", None), ("polybeast", 20)])
def test_a_large_image_is_told_of_with_the_flag_that_mends_it(module, resize, savedir):
    flags = () if resize is None else ("--resize", resize)
    words = args(module, savedir, *flags, "--net", "shallow", env=CAMERA, steps=80)
    result = succeeds(*words, module=module)
    height, width = (30, 104) if resize is None else (20, 20)
    assert f"image, height {height}, width {width}, channels 3" in result.stderr
    assert result.stderr.count(LARGE) == (resize is None)
    if resize is not None:
        assert "--resize 84" not in result.stderr
    succeeds("--savedir", savedir, "--mode", "test", "--env", CAMERA,
             "--num_test_episodes", 1, module=module)  # fmt: skip


def test_what_is_large():
    assert large_image(box(84, 84, 4)) is None
    assert large_image(box(84, 101)) == (84, 101)
    assert large_image(box(3, 240, 320)) == (240, 320)
    assert large_image(box(500, 500, high=9)) is None  # Ids have no mean.
    assert large_image(spaces.Discrete(200)) is None


def test_bools_are_images_too():
    assert image_shape(box(20, 20, high=1, dtype=bool)) == ((0, 1), (20, 20, 1))


def test_what_is_too_small_for_an_image_is_no_image_by_its_layout():
    def made(layout, **entries):
        return Environment(
            Sampler(spaces.Dict(entries), spaces.Discrete(2)), None, layout
        )

    small = {"a": box(7, 7, 3), "b": box(4, 4)}
    with pytest.raises(BadInput, match="HWC: .* an image with sides of 10 or more"):
        made("HWC", **small)
    made("numbers", **small)
    made("HWC", **small, c=box(12, 12, 3))


def test_environments_on_the_device_are_not_resized():
    for flags in (["--resize", 84], ["--observation_layout", "HWC"]):
        for module in ("warpbeast", "monobeast"):
            line = refusal("--env", "warp/CartPole", *flags, module=module)
            assert "environments on the device" in line
