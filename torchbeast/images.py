"""Which observations are images, and how larger ones become smaller.

No torch in here: environment servers import this file.
"""

import copy
import math

import numpy as np
from gymnasium import spaces

from torchbeast.flags import number
from torchbeast.messages import BadInput
from torchbeast.spaces import MAX_CHOICES, BadStep, children, space_leaves

LAYOUTS = ("HWC", "CHW", "numbers")
MIN_SIDE = 10  # Smaller images are vectors: convolutions have nothing to halve.
# The fewest pixels a side of an image [H, W]: what is smaller is mostly a table.
MIN_SIDE_WITHOUT_CHANNELS = 20
MAX_COLORS = 4  # So few numbers in a row are the colours of a pixel.
LARGE_SIDE = 100  # Beyond it an image costs much more than it tells.
RESIZED = 84  # Atari's.
RESIZABLE = {"uint8", "uint16", "int16", "float32", "float64"}  # By OpenCV.


def add_flags(group):
    """Adds --resize and --observation_layout."""
    # fmt: off
    group.add_argument("--resize", type=number(int, MIN_SIDE, 4096), metavar="N",
                       help="make images with a longer side N pixels high and wide, "
                       "where the environment is (default: as they are)")
    group.add_argument("--observation_layout", choices=LAYOUTS,
                       help="what observations of several dimensions are: images [H, "
                       "W, C] or [C, H, W], stacks of them, or numbers (default: by "
                       "their shape; the log names height, width and channels)")
    # fmt: on


def image_shape(space):
    """Returns (order, (H, W, C)) if the space is an image or a stack of images, else
    None. order: the dimensions of an observation that are H and W, then those that
    together are C.

    Images are [H, W], [H, W, C], [C, H, W], or stacks of the last two, [K, ...], of any
    dtype, with sides of 10 or more. [H, W] must have sides of 20 or more, and the same
    bounds everywhere: else it is a table. --observation_layout says it otherwise.
    """
    layout = getattr(space, "layout", None)
    if not isinstance(space, spaces.Box) or layout == "numbers":
        return None
    shape, least = space.shape, MIN_SIDE
    if len(shape) == 2:
        order = (0, 1)
        if layout is None:
            least = MIN_SIDE_WITHOUT_CHANNELS
            bounds = 1.0 * space.low, 1.0 * space.high  # Of bools, too.
            if not space.is_bounded() or any(map(np.ptp, bounds)):
                return None
    elif len(shape) in (3, 4):
        first = channels_first(*shape[-3:]) if layout is None else layout == "CHW"
        order = {
            3: ((0, 1, 2), (1, 2, 0)),
            4: ((1, 2, 0, 3), (2, 3, 0, 1)),
        }[len(shape)][first]
    else:
        return None
    height, width, *channels = (shape[i] for i in order)
    if min(height, width) < least:
        return None
    return order, (height, width, math.prod(channels))


def channels_first(a, b, c):
    """Tells whether an image of this shape is [C, H, W], else it is [H, W, C]: one of
    both ends is a number of colours; or height and width are more alike than one of
    them and the number of channels."""
    if (a <= MAX_COLORS) != (c <= MAX_COLORS):
        return a <= MAX_COLORS
    return max(b, c) * min(a, b) < max(a, b) * min(b, c)


def is_image(space):
    return image_shape(space) is not None


def has_images(space):
    """Tells whether an observation of the space is an image, or holds one."""
    return bool(smaller_sides(space))


def smaller_sides(space):
    """Returns the smaller side of each image of an observation of the space."""
    entries = children(space)
    if entries is None:
        shape = image_shape(space)
        return [] if shape is None else [min(shape[1][:2])]
    return [side for _, part in entries for side in smaller_sides(part)]


def num_ids(space):
    """Returns n if the pixels of an image are names of things, 0 to n - 1, such as
    NetHack's glyphs, else None: they are brightness, or counts in many channels.

    They are integers with bounds that are not those of a bit, nor of all numbers of
    eight bits or more: cameras have those.
    """
    _, (_, _, channels) = image_shape(space)
    if space.dtype.kind not in "iu" or channels > MAX_COLORS or space.low.min() < 0:
        return None
    n = int(space.high.max()) + 1
    all_bits = n >= 256 and n & (n - 1) == 0
    return n if 2 < n <= MAX_CHOICES and not all_bits else None


def large_image(space):
    """Returns (H, W) of an image that --resize would make faster, else None."""
    if not is_image(space) or num_ids(space):
        return None
    _, (height, width, _) = image_shape(space)
    return (height, width) if max(height, width) > LARGE_SIDE else None


def prepare(observations, resize=None, layout=None):
    """Has spaces.Observations take its images to be as --observation_layout says, and
    make them as small as --resize says: images with a longer side become square. Ids
    stay as they are, as there is no mean of two, and none may exceed its bounds."""
    names = [name for _, name, *_ in space_leaves(observations.space)]
    functions = []

    def leaf(space):
        if layout is not None and isinstance(space, spaces.Box):
            space = _with_layout(space, layout)
        function = None
        if is_image(space):
            if n := num_ids(space):
                function = _ids(n, names[len(functions)])
            elif resize is not None and max(image_shape(space)[1][:2]) > resize:
                function = Resizer(space, resize)
                space = function.space
        functions.append(function)
        return space

    space = _map_leaves(leaf, observations.space)
    if layout in ("HWC", "CHW") and not has_images(space):
        raise BadInput(
            f"--observation_layout {layout}: the environment has {observations.space}, "
            f"expected an image with sides of {MIN_SIDE} or more; without the flag "
            "they are numbers"
        )
    observations.convert(space, functions)


def _ids(n, name):
    """Returns a function of images [E, ...], which raises BadStep if a number is none
    of n ids: to the network it would be the last of them."""

    def checked(x):
        if x.min() < 0 or x.max() >= n:
            raise BadStep(
                f"{name} has numbers from {x.min()} to {x.max()}, expected 0 to "
                f"{n - 1}, ids of things, as its space declares"
            )
        return x

    return checked


def _map_leaves(fn, space):
    entries = children(space)
    if entries is None:
        return fn(space)
    parts = {key: _map_leaves(fn, x) for key, x in entries}
    if isinstance(space, spaces.Dict):
        return spaces.Dict(list(parts.items()))  # In this order.
    return spaces.Tuple(list(parts.values()))


def _with_layout(space, layout):
    space = copy.copy(space)
    space.layout = layout
    return space


class Resizer:
    """A function of images [E, ...] of a space, which returns them `size` pixels high
    and wide, each pixel the mean of what was there.

    space: of what it returns
    """

    def __init__(self, space, size):
        try:
            import cv2
        except ImportError:
            raise BadInput(
                "--resize needs: pip install opencv-python-headless"
            ) from None
        self._cv2, self._size = cv2, (size, size)
        self._order, _ = image_shape(space)
        shape = list(space.shape)
        for i in self._order[:2]:
            shape[i] = size
        # (Arrays: a Box takes no scalars of some dtypes.)
        low, high = (
            np.full(shape, x, space.dtype) for x in (space.low.min(), space.high.max())
        )
        layout = "CHW" if self._order[1] == len(shape) - 1 else "HWC"
        self.space = _with_layout(spaces.Box(low, high, dtype=space.dtype), layout)

    def __call__(self, x):
        order = (0, *(1 + i for i in self._order))
        dtype = x.dtype
        if dtype.name not in RESIZABLE:
            x = x.astype(np.float64)
        x = x.transpose(order)  # [E, H, W, ...]
        channels = x.shape[3:]
        x = x.reshape(*x.shape[:3], -1)
        y = np.empty((len(x), *self._size, x.shape[-1]), x.dtype)
        for image, small in zip(x, y):
            for c in range(0, x.shape[-1], 4):  # OpenCV takes no more at a time.
                part = np.ascontiguousarray(image[..., c : c + 4])
                part = self._cv2.resize(
                    part, self._size, interpolation=self._cv2.INTER_AREA
                )
                small[..., c : c + 4] = part.reshape(*self._size, -1)
        if dtype.kind in "iub":
            y = y.round()
        y = y.reshape(*y.shape[:3], *channels).transpose(np.argsort(order))
        return np.ascontiguousarray(y.astype(dtype, copy=False))
