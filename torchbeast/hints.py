"""Hints for whoever types the name of an environment or of its arguments wrong.

No torch in here: environment servers import this file.
"""

import difflib
import inspect

import gymnasium
from gymnasium.envs.registration import load_env_creator


def close(env_id):
    """Returns a question with the IDs that are close to one that there is not, "" if
    none is. Those of the module that was named, if it has any, go first."""
    module, colon, name = env_id.rpartition(":")
    package, ids = module.partition(".")[0], gymnasium.registry
    own = [i for i, x in ids.items() if f"{x.entry_point}".startswith(package or ":")]
    # With a namespace, and without one.
    by_lower = {i.lower().rpartition("/")[2]: i for i in own or ids}
    by_lower |= {i.lower(): i for i in own or ids}
    found = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    found = dict.fromkeys(f"{module}{colon}{by_lower[x]}" for x in found)
    return f": did you mean {', '.join(found)}?" if found else ""


def arguments(spec):
    """Returns what arguments an environment's constructor takes."""
    entry_point = spec.entry_point or spec.vector_entry_point
    if isinstance(entry_point, str):
        entry_point = load_env_creator(entry_point)
    names = list(inspect.signature(entry_point).parameters)
    return f"one of {', '.join(names)}" if names else "none"
