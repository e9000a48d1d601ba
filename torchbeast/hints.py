"""Hints for whoever types the name of an environment or of its arguments wrong, or
declares something else than what it returns.

No torch in here: environment servers import this file.
"""

import difflib
import inspect
import re
import sys
import traceback

import gymnasium
import numpy as np
from gymnasium.envs import registration

from torchbeast import old_gym
from torchbeast.messages import first_line
from torchbeast.old_gym import OLD, PETTINGZOO
from torchbeast.spaces import children


def not_made(error, env_id, render_mode, caller):
    """Returns one line that says why the constructor of an environment raised an error,
    and what to type instead. caller: the file that called it."""
    _, _, name = env_id.rpartition(":")
    of_registry = name in gymnasium.registry
    begin = f"environment {env_id!r} cannot be made: "
    if not isinstance(error, TypeError):
        if isinstance(error, gymnasium.error.Error) and not of_registry:
            if old_gym.registers(name):
                return begin + OLD
            return f"unknown environment {env_id!r}{close(env_id)}"
        reason = " ".join(str(error).split())
        return begin + (OLD if "is incompatible with Gymnasium" in reason else reason)
    cause = error.__cause__ or error  # Gymnasium's says more of itself.
    text = first_line(cause, False)
    # A class without __init__() does not name the argument that it refuses.
    refused = "render_mode" in str(cause) or str(cause).endswith("takes no arguments")
    if render_mode and refused:
        return f"environment {env_id!r} cannot be shown: {text}"
    file, line, *_ = traceback.extract_tb(cause.__traceback__)[-1]
    if file not in (registration.__file__, caller):
        text += f" ({file}:{line})"
    elif "unexpected keyword" in text and of_registry:
        text += f": expected {arguments(gymnasium.spec(name))}"
    elif "multiple values for argument 'id'" in text:
        text = "gymnasium.make() has an argument 'id' of its own: register a function "
        text += "that takes it by another name"
    elif "missing" in text and "argument" in text:
        text += ": give its arguments by --env_args NAME=VALUE"
    elif "pettingzoo" in text:
        text = PETTINGZOO
    elif "must inherit from the gymnasium.Env" in text:
        text = OLD
    return begin + text


def refused(error, env_id, given):
    """Returns one line that says what a constructor raised that was given arguments
    [(name, value)]."""
    file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
    given = ", ".join(f"{name}={value!r}" for name, value in given)
    begin = f"environment {env_id!r} cannot be made with {given}: "
    return begin + f"{first_line(error)} ({file}:{line})"


def close(env_id):
    """Returns a question with the IDs that are close to one that there is not, or says
    that none is, if a module was named: then these are its own, if it has any, and
    names in it as of PettingZoo's environments. Else it tells how to name one."""
    module, _, name = env_id.rpartition(":")
    if not module and name in sys.modules:
        module, name = name, ""
    package, ids = module.partition(".")[0], gymnasium.registry
    own = [i for i, x in ids.items() if _package(x) == package] if package else []
    own += [
        key
        for key, x in vars(sys.modules.get(module, object)).items()
        if key.lower().endswith("env") and callable(x)
        if (getattr(x, "__module__", None) or "").partition(".")[0] == package
        if not (isinstance(x, type) and issubclass(x, gymnasium.Env))
        if not inspect.isabstract(x)
        if key not in ("AECEnv", "ParallelEnv")  # Without which there is none.
    ]
    for kind in ("parallel", "aec"):  # PettingZoo's own.
        own += getattr(sys.modules.get(module), f"{kind}_registry", ())
    known = own if own or not name else ids
    # With a namespace, and without one.
    by_lower = {i.lower().rpartition("/")[2]: i for i in known}
    by_lower |= {i.lower(): i for i in known}
    # A module may have registered what another package makes.
    cutoff = 0.8 if package and not own else 0.5
    found = [*by_lower][:3]
    if name:
        found = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=cutoff)
    found = dict.fromkeys(f"{module}:{by_lower[x]}".strip(":") for x in found)
    if package and not found:
        return f": {module} registers none like it"
    if not name:
        return f": {module} has {', '.join(found)}{', ...' if len(known) > 3 else ''}"
    text = f": did you mean {', '.join(found)}?" if found else ""
    return text if package else f"{text} (if another package has it: MODULE:{env_id})"


def _package(spec):
    entry_point = spec.entry_point
    entry_point = getattr(entry_point, "func", entry_point)  # Of a functools.partial.
    if not isinstance(entry_point, str):
        entry_point = getattr(entry_point, "__module__", None) or ""
    return re.split("[.:]", entry_point)[0]


def arguments(spec):
    """Returns what arguments an environment's constructor takes."""
    entry_point = spec.entry_point or spec.vector_entry_point
    if isinstance(entry_point, str):
        entry_point = registration.load_env_creator(entry_point)
    try:
        names = list(inspect.signature(entry_point).parameters)
    except ValueError:  # It is a function in C.
        return "another"
    return f"one of {', '.join(names)}" if names else "none"


def outside(space, observation, name="observation"):
    """Yields a line for each Box of a space whose bounds numbers of the observation [E,
    ...] exceed, by more than rounding."""
    for key, part in children(space) or ():
        yield from outside(part, observation[key], f"{name}/{key}")
    if not isinstance(space, gymnasium.spaces.Box):
        return
    low, high = space.low.astype(float), space.high.astype(float)
    least, most = np.min(observation, 0), np.max(observation, 0)
    margin = np.nan_to_num(high / 1000 - low / 1000, posinf=0)
    if (least < low - margin).any() or (most > high + margin).any():
        yield (
            f"{name} has numbers from {least.min():.6g} to {most.max():.6g}, its space "
            f"declares {low.min():.6g} to {high.max():.6g}"
        )
