"""Nests: dicts and tuples of arrays or tensors, and of such dicts and tuples.

No torch in here: environment servers import this file.
"""


def map_structure(fn, nest, *others):
    """Applies fn to every leaf of nested dicts and tuples. The others have the nest's
    structure, or more entries."""
    if isinstance(nest, dict):
        return {
            k: map_structure(fn, x, *(o[k] for o in others)) for k, x in nest.items()
        }
    if isinstance(nest, (tuple, list)):
        return tuple(map_structure(fn, *leaves) for leaves in zip(nest, *others))
    return fn(nest, *others)


def replaced(rows, nest, other):
    """Returns a nest of arrays [E, ...], with the other's where rows [E] bool is
    true."""

    def with_rows(x, y):
        x = x.copy()
        x[rows] = y[rows]
        return x

    return map_structure(with_rows, nest, other)


def leaves(nest, path=""):
    """Returns [(path, leaf)] of nested dicts and tuples, in order. A path is like
    'observation/image'."""
    if isinstance(nest, dict):
        items = nest.items()
    elif isinstance(nest, (tuple, list)):
        items = enumerate(nest)
    else:
        return [(path, nest)]
    prefix = f"{path}/" if path else ""
    return [leaf for k, v in items for leaf in leaves(v, f"{prefix}{k}")]
