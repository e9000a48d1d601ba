"""Devices: which to compute on, in which precision, and copies to and from them."""

import contextlib
import functools
import re

import torch

from torchbeast import ranks
from torchbeast.encoders import ResidualBlock
from torchbeast.flags import synchronous
from torchbeast.images import has_images
from torchbeast.machine import share_of_cores
from torchbeast.messages import BadInput
from torchbeast.nests import map_structure


def set_defaults(flags):
    """Fills in the flags of run_parser() whose defaults depend on the machine."""
    if flags.learner_device is None:
        flags.learner_device = "cuda" if torch.cuda.is_available() else "cpu"
        if ranks.current.num > 1 and torch.cuda.is_available():
            index = ranks.current.local_rank % torch.cuda.device_count()
            flags.learner_device = f"cuda:{index}"
    if flags.num_learner_threads is None:
        flags.num_learner_threads = 1 if flags.learner_device == "cpu" else 2


def get_device(flags, flag):
    """Returns the torch.device that a flag names. Raises BadInput if it cannot be
    used."""
    name = getattr(flags, flag)
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", name):
        raise BadInput(f"--{flag} {name}: expected cpu, cuda or cuda:N")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as e:  # Without CUDA: AssertionError.
        raise BadInput(f"--{flag} {name}: {str(e).splitlines()[0]}") from e
    return device


def has_bfloat16(device):
    """Tells whether the device is a CPU that is faster in bfloat16: one with AMX.
    (PyTorch computes in bfloat16 on any, but with AVX512-BF16 alone it was slower than
    float32.)"""
    # Older versions of PyTorch do not tell.
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and bool(capabilities.get("amx_bf16"))


def choose_precision(flags, space):
    """Replaces --precision auto: bfloat16 only where learning in it was compared with
    float32, and was as good and faster, else float32."""
    if flags.precision == "auto":
        devices = flags.learner_device, getattr(flags, "actor_device", "cpu")
        everywhere = all(has_bfloat16(torch.device(name)) for name in devices)
        compared = getattr(flags, "net", None) == "shallow" and has_images(space)
        flags.precision = "bfloat16" if everywhere and compared else "float32"


def num_learner_cores(agent, flags):
    """The number of cores for one update of PolyBeast on a CPU: about an update's share
    of all that a step costs, with Atari's environments. (With more, runs of the shallow
    network were slower by a third.)"""
    deep = any(isinstance(m, ResidualBlock) for m in agent.net.modules())
    return num_update_cores(0.75 if deep else 0.45, agent, flags)


def num_update_cores(share, agent, flags):
    """The number of cores for one update: all of them where acting waits for it and it
    learns from images, else a share. (With numbers, a second thread made PPO's update
    20 times as slow, on 2 cores beside other work.)"""
    if synchronous(flags) and has_images(agent.observation_space):
        share = 1
    return share_of_cores(share, flags.num_learner_threads)


@functools.cache
def copy_stream(device):
    """Returns the one stream of copies to a device. There is one because PyTorch keeps
    freed memory for the stream that the memory was taken in."""
    return torch.cuda.Stream(device)


def to_device(nest, device):
    """Copies the nest's tensors to the device and waits for the copies."""
    if device.type == "cpu":
        return nest
    # A stream of its own: behind the kernels of an update copies would wait for it.
    stream = copy_stream(device)
    with torch.cuda.stream(stream):
        nest = map_structure(lambda x: x.to(device, non_blocking=True), nest)
    # Also what makes it safe to recycle pinned memory that was copied from.
    stream.synchronize()
    # Whoever uses them, their memory is not to be reused before that is done.
    map_structure(lambda x: x.record_stream(torch.cuda.current_stream(device)), nest)
    return nest


def own_stream(device):
    """A context in which this thread's kernels do not queue behind other threads'."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def to_host(nest, device):
    """Copies the nest's tensors to host memory. Waits for a GPU once, not for each
    tensor."""
    nest = map_structure(lambda x: x.to("cpu", non_blocking=True), nest)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return nest
