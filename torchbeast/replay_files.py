"""What --save_replay writes: a replay as one file beside model.tar.

The file is a line of JSON, which names the arrays and has the counters, and then the
arrays' bytes, one after the other. Both ways go between the file and the ring's own
memory, without a copy of it.
"""

import json
import os
import pathlib

import numpy as np

from torchbeast import ranks
from torchbeast.messages import first_line, log

FORMAT = 1


def path_in(directory):
    """Returns the path of this rank's file in a run's directory."""
    rank = ranks.current.rank
    return directory / ("replay.bin" if rank == 0 else f"replay-{rank}.bin")


def is_saved(agent):
    """Tells whether an agent has a replay that --save_replay asks for."""
    credit = getattr(agent, "credit", None)
    return credit is not None and agent.flags.save_replay


def save(directory, credit):
    """Writes the replay of a replay.Credit, or Mixer, beside its file in a run's
    directory, of which replace() then makes the file. OSError if the disk is full."""
    path, ring = path_in(directory), credit.ring
    arrays = {name: np.ascontiguousarray(x) for name, x in ring.arrays().items()}
    header = {
        "format": FORMAT,
        "counters": {**credit.counters(), **ring.counters()},
        "arrays": {name: [x.dtype.str, x.shape] for name, x in arrays.items()},
    }
    num_bytes = sum(x.nbytes for x in arrays.values())
    log.info("saving the replay: %s, %s bytes", path, f"{num_bytes:,}")
    temporary = _temporary(path)
    try:
        with open(temporary, "wb") as f:
            f.write(json.dumps(header).encode() + b"\n")
            for x in arrays.values():
                f.write(x.reshape(-1).view(np.uint8).data)
            f.flush()
            os.fsync(f.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def replace(directory):
    """Makes what save() wrote the directory's file."""
    path = path_in(directory)
    if _temporary(path).exists():
        os.replace(_temporary(path), path)


def resume(credit, flags):
    """Has a replay.Credit, or Mixer, of a run that is resumed go on with its file."""
    header = None
    if flags.save_replay:
        path = path_in(pathlib.Path(flags.savedir, flags.xpid))
        if (header := header_of(path)) is not None:
            credit.ring.saved = path, header
            log.info("resuming %s: %d rollouts", path, header["counters"]["size"])
    credit.resume(header)


def _temporary(path):
    return path.with_name(path.name + ".tmp")


def header_of(path):
    """Returns the header of a file, or None, and says why, if it is none."""
    try:
        with open(path, "rb") as f:
            header = json.loads(f.readline(2**20))
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}, expected {FORMAT}")
        return header
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as e:
        log.warning("%s is not a replay that can be read: %s", path, first_line(e))
        return None


def read(path, header, arrays):
    """Reads the file's arrays into arrays {name: array} of the same shapes, in which an
    array may be None: it is made. Returns them."""
    with open(path, "rb") as f:
        f.readline()
        for name, (dtype, shape) in header["arrays"].items():
            if arrays[name] is None:
                arrays[name] = np.empty(shape, dtype)
            x = arrays[name].reshape(-1).view(np.uint8)
            if f.readinto(x.data) != x.nbytes:
                raise ValueError(f"it ends within {name}")
    return arrays
