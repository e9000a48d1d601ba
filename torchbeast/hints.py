"""Hints for whoever types the name of an environment or of its arguments wrong.

No torch in here: environment servers import this file.
"""

import difflib
import inspect
import re

import gymnasium
from gymnasium.envs.registration import load_env_creator


def close(env_id):
    """Returns a question with the IDs that are close to one that there is not, or says
    that none is, if a module was named: then these are its own, if it has any. Else it
    tells how to name one."""
    module, colon, name = env_id.rpartition(":")
    package, ids = module.partition(".")[0], gymnasium.registry
    own = [i for i, x in ids.items() if _package(x) == package] if package else []
    # With a namespace, and without one.
    by_lower = {i.lower().rpartition("/")[2]: i for i in own or ids}
    by_lower |= {i.lower(): i for i in own or ids}
    # A module may have registered what another package makes.
    cutoff = 0.8 if package and not own else 0.5
    found = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=cutoff)
    found = dict.fromkeys(f"{module}{colon}{by_lower[x]}" for x in found)
    if package and not found:
        return f": {module} registers none like it"
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
        entry_point = load_env_creator(entry_point)
    try:
        names = list(inspect.signature(entry_point).parameters)
    except ValueError:  # It is a function in C.
        return "another"
    return f"one of {', '.join(names)}" if names else "none"
