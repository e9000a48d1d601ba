"""Devices: which to compute on, in which precision, and copies to and from them."""

import contextlib
import functools
import os
import re
import warnings
from collections.abc import MutableMapping

import torch

from torchbeast import ranks
from torchbeast.encoders import ResidualBlock
from torchbeast.flags import synchronous
from torchbeast.images import has_images
from torchbeast.machine import num_cores
from torchbeast.messages import BadInput, first_line
from torchbeast.nests import map_structure

ACCELERATORS = "cuda", "xpu"  # NVIDIA's and AMD's GPUs; Intel's, which are untried.


def set_defaults(flags):
    """Fills in the flags of run_parser() whose defaults depend on the machine. Raises
    BadInput if it has a GPU that PyTorch cannot use."""
    torch.backends.cudnn.allow_tf32 = False  # Until an agent with images has chosen.
    if flags.learner_device is None:
        flags.learner_device = name = find_accelerator()
        if ranks.current.num > 1 and name != "cpu":
            index = ranks.current.local_rank % getattr(torch, name).device_count()
            flags.learner_device = f"{name}:{index}"
    if flags.cuda_graphs is None:
        one = ranks.current.num == 1
        flags.cuda_graphs = one and flags.learner_device.startswith("cuda")


def find_accelerator():
    """Returns the kind of the machine's GPUs, "cpu" if there are none. Raises BadInput
    if there is one that PyTorch cannot use."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ACCELERATORS:
            if getattr(torch, name).is_available():
                return name
    # PyTorch says nothing where there is no GPU, and warns of a driver that is too old.
    for warning in caught:
        what = first_line(warning.message, with_type=False)
        raise BadInput(
            f"PyTorch cannot use this machine's GPU; --learner_device cpu does without "
            f"it: {what}"
        )
    return "cpu"


def get_device(flags, flag):
    """Returns the torch.device that a flag names, with its number. Raises BadInput if
    it cannot be used."""
    name = getattr(flags, flag)
    kind, _, _ = name.partition(":")
    if kind == "mps":
        raise BadInput(
            f"--{flag} {name}: statistics are float64, which MPS does not have: "
            "expected cpu"
        )
    if not re.fullmatch(r"cpu|(cuda|xpu)(:[0-9]{1,2})?", name):
        raise BadInput(
            f"--{flag} {name}: expected cpu, cuda or xpu, or cuda:N or xpu:N"
        )
    try:
        x = torch.ones(1, device=name)
        (x + x).item()  # PyTorch may have no kernels for this GPU.
    except (RuntimeError, AssertionError) as e:  # Without CUDA: AssertionError.
        raise BadInput(f"--{flag} {name}: {first_line(e, False)}") from e
    return x.device


def use(device):
    """Makes a GPU the current one of this thread, on which CUDA graphs are captured and
    Triton's kernels are launched."""
    if device.type != "cpu":
        backend(device).set_device(device)


def backend(device):
    """Returns the module that has the streams of such a GPU, such as torch.cuda."""
    return getattr(torch, device.type)


def has_bfloat16(device):
    """Tells whether the device is a CPU that is faster in bfloat16: one with AMX, or
    AMD's with AVX512-BF16. (PyTorch computes in bfloat16 on any. On Intel's with
    AVX512-BF16 alone it was slower than float32.)"""
    # Older versions of PyTorch do not tell.
    has = getattr(torch.cpu, "get_capabilities", dict)()
    avx512 = has.get("avx512_bf16") and "AMD" in has.get("cpu_name", "")
    return device.type == "cpu" and bool(has.get("amx_bf16") or avx512)


def choose_precision(flags, space):
    """Replaces --precision auto, once --net is chosen: for images tf32 on a GPU, as
    PyTorch's convolutions have it by default (10 bits for 23); bfloat16 only with the
    networks whose learning in it was compared with float32, and was as good and
    faster."""
    if flags.precision == "auto":
        devices = flags.learner_device, getattr(flags, "actor_device", "cpu")
        compared = getattr(flags, "net", None) in ("shallow", "nature")
        if not has_images(space):
            flags.precision = "float32"
        elif any(name != "cpu" for name in devices):
            flags.precision = "tf32"
        elif compared and all(has_bfloat16(torch.device(name)) for name in devices):
            flags.precision = "bfloat16"
        else:
            flags.precision = "float32"
    if has_images(space):  # Another policy may have none.
        torch.backends.cudnn.allow_tf32 = flags.precision == "tf32"


def precision(agent):
    """Returns the precision of an agent, or of the first of several policies."""
    first = next(iter(getattr(agent, "agents", {"": agent}).values()))
    return first.flags.precision


def given_threads():
    """The number of threads that OMP_NUM_THREADS says, at most one a core; 0 if it says
    none, and under torchrun, which sets it always."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    given = int(text) if text.isdecimal() and ranks.current.num == 1 else 0
    return min(given, num_cores())


def num_learner_cores(agent, flags):
    """The number of cores for one update of PolyBeast on a CPU: about an update's share
    of all that a step costs, with Atari's environments. (With more, runs of the shallow
    network were slower by a third.)"""
    deep = any(isinstance(m, ResidualBlock) for m in agent.net.modules())
    return num_update_cores(0.75 if deep else 0.45, agent, flags)


def num_update_cores(share, agent, flags):
    """The number of cores for one update: given_threads(), else all of them where
    acting waits for it and it learns from images, else a share. (With numbers, a second
    thread made PPO's update 20 times as slow, on 2 cores beside other work.)"""
    if given := given_threads():
        return given
    if synchronous(flags) and has_images(agent.observation_space):
        share = 1
    return max(1, round(share * num_cores()))


@functools.cache
def copy_stream(device):
    """Returns the one stream of copies to a device. There is one because PyTorch keeps
    freed memory for the stream that the memory was taken in."""
    return backend(device).Stream(device)


def send(nest, device):
    """Copies the nest's tensors to the device, without waiting if they are in
    page-locked memory."""
    return map_structure(lambda x: x.to(device, non_blocking=True), nest)


def send_late(x, device):
    """Copies a tensor in host memory to the device, without waiting: behind what was
    launched before."""
    return x if device.type == "cpu" else send(x.pin_memory(), device)


class Lazy(MutableMapping, dict):
    """A dict {name: nest} of which a nest becomes find(name, nest) when it is first
    read, in whatever way: of a step's fields, networks read less than half."""

    __setitem__, __delitem__ = dict.__setitem__, dict.__delitem__
    __len__, __contains__ = dict.__len__, dict.__contains__
    __reversed__ = dict.__reversed__

    def __init__(self, nests, find):
        super().__init__(nests)
        self._find = find

    def __getitem__(self, name):
        self[name] = nest = self._find(name, dict.__getitem__(self, name))
        return nest

    def __iter__(self):  # Else dict() and ** would take what is not sent yet.
        return dict.__iter__(self)


# CUDA's _foreach_copy_() has no kernel for these (PyTorch 2.13).
NO_FOREACH = torch.uint16, torch.uint32, torch.uint64


def copy_into(nest, into):
    """Copies a nest's tensors into those of another on the same device, all of a dtype
    in one launch if their strides are the same."""
    by_dtype = {}
    map_structure(
        lambda x, y: by_dtype.setdefault(x.dtype, []).append((y, x)), nest, into
    )
    for dtype, pairs in by_dtype.items():
        if dtype in NO_FOREACH:
            for y, x in pairs:
                y.copy_(x)
        else:
            torch._foreach_copy_(*map(list, zip(*pairs)))


def to_device(nest, device):
    """Copies the nest's tensors to the device and waits for the copies."""
    if device.type == "cpu":
        return nest
    # A stream of its own: behind the kernels of an update copies would wait for it.
    stream = copy_stream(device)
    with backend(device).stream(stream):
        nest = send(nest, device)
        copied = record_event(device)
    # Also what makes it safe to recycle pinned memory that was copied from.
    copied.synchronize()
    # Whoever uses them, their memory is not to be reused before that is done.
    current = backend(device).current_stream(device)
    map_structure(lambda x: x.record_stream(current), nest)
    return nest


def own_stream(device):
    """A context in which this thread's kernels do not queue behind other threads', and
    go first where a GPU can choose."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return backend(device).stream(backend(device).Stream(device, priority=-1))


def record_event(device):
    """Returns an event that has passed once what was launched on the device so far is
    done; None on a CPU, where it is."""
    if device.type == "cpu":
        return None
    # Who waits leaves the core to environments. (By default it would be kept busy.)
    event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None
    return backend(device).current_stream(device).record_event(event)


def to_host(nest, device):
    """Copies the nest's tensors to host memory. Waits for a GPU once, not for each
    tensor."""
    nest = map_structure(lambda x: x.to("cpu", non_blocking=True), nest)
    if device.type != "cpu":
        record_event(device).synchronize()
    return nest


def select(x, indices, device):
    """Returns x[:, indices], where x is in host memory: in page-locked memory if it
    goes to a GPU, which then copies it without the CPU."""
    out = torch.empty(
        (len(x), len(indices), *x.shape[2:]),
        dtype=x.dtype,
        pin_memory=device.type != "cpu",
    )
    return torch.index_select(x, 1, indices, out=out)
