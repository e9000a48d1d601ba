"""What --save_replay writes: a replay as one file, replay.bin, beside model.tar.

The file is a line of JSON, which names the arrays and has the counters, and then the
arrays' bytes, one after the other. Both ways go between the file and the ring's own
memory, without a copy of it.
"""

import json
import pathlib

import numpy as np

from torchbeast import ranks
from torchbeast.files import write_atomically
from torchbeast.messages import BadInput, first_line, log

FORMAT = 2


def check(flags):
    """Raises BadInput if there are several learners."""
    if flags.save_replay and ranks.current.num > 1:
        raise BadInput(f"--save_replay: {ranks.current.num} learners, expected one")


def save(path, credit, step):
    """Writes a replay, atomically, after this agent step. A disk that is full costs the
    replay alone: one line says so, and the file of before stays."""
    ring = credit.ring
    if ring.saved is not None or ring.size == 0:
        return  # A resumed run ends before it has read the file, or has none.
    arrays = {name: np.ascontiguousarray(x) for name, x in ring.arrays().items()}
    header = {
        "format": FORMAT,
        "step": step,
        "counters": {**credit.counters(), **ring.counters()},
        "arrays": {name: [x.dtype.str, x.shape] for name, x in arrays.items()},
    }
    num_bytes = sum(x.nbytes for x in arrays.values())
    log.info("saving the replay: %s, %s bytes", path, f"{num_bytes:,}")
    data = (x.reshape(-1).view(np.uint8).data for x in arrays.values())
    try:
        write_atomically(path, json.dumps(header).encode() + b"\n", *data)
    except OSError as e:
        log.warning("%s: the replay is not saved: %s", path, e.strerror)


def resume(credit, flags):
    """Has a replay.Credit, or Mixer, of a run that is resumed go on with the run's
    file, if there is one. Raises BadInput if it is of another replay."""
    path = None
    if flags.save_replay:
        path = pathlib.Path(flags.savedir, flags.xpid, "replay.bin")
    if path is None or not path.exists():
        credit.resume(None)
        return
    try:
        with open(path, "rb") as f:
            header = json.loads(f.readline(2**20))
        counters = header["counters"]
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}, expected {FORMAT}")
        if counters["num_rollouts"] != credit.ring.num_rollouts:
            sizes = counters["num_rollouts"], credit.ring.num_rollouts
            size, expected = (n * flags.unroll_length for n in sizes)
            what = f"it is of --replay_size {size}, this command's is {expected}"
            raise ValueError(f"{what}: give {size}")
        credit.resume(counters)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise another(path, e) from e
    credit.ring.saved = path, header
    where = f"{counters['size']} rollouts, of step {header['step']}"
    log.info(f"resuming {path}: {where}")


def another(path, error):
    return BadInput(
        f"--save_replay: {path} cannot be gone on with: {first_line(error)}; move it "
        "away, or leave the flag out"
    )


def read(path, header, arrays):
    """Reads the file's arrays into arrays {name: array} of the same shapes, in which an
    array may be None: it is made. Returns them. Raises BadInput."""
    try:
        with open(path, "rb") as f:
            f.readline()
            for name, (dtype, shape) in header["arrays"].items():
                if arrays[name] is None:
                    arrays[name] = np.empty(shape, dtype)
                x = arrays[name]
                if [x.dtype.str, list(x.shape)] != [dtype, shape]:
                    now = f"{x.dtype} {list(x.shape)}"
                    raise ValueError(f"{name} is {dtype} {shape}, expected {now}")
                x = x.reshape(-1).view(np.uint8)
                if f.readinto(x.data) != x.nbytes:
                    raise ValueError(f"it ends within {name}")
    except (OSError, ValueError, KeyError) as e:
        raise another(path, e) from e
    return arrays
