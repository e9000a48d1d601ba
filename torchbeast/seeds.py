"""Random numbers: seeds, and the generators' states.

Environment servers import this file, and have no torch.
"""

import random

import numpy as np


def get_rng_state():
    """Returns the states of torch's, NumPy's and Python's random numbers, in types that
    torch.load(weights_only=True) reads."""
    import torch

    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": (name, torch.from_numpy(keys.copy()), position, has_gauss, gauss),
        "python": random.getstate(),
    }


def set_rng_state(state):
    import torch

    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    random.setstate(state["python"])


def set_seed(seed):
    """Seeds torch, NumPy and Python. Returns the seed, which is drawn if it was
    None."""
    import torch

    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0]) & 0x7FFFFFFF
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def derive_seed(*numbers) -> int:
    """Returns a seed from 0 to 2^31 - 1: a hash of the numbers, each from 0."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) & 0x7FFFFFFF
