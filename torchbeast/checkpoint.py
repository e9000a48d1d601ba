"""Checkpoints: one file with all that resumes a run.

agent     what the agent's state_dict() returned
flags     of the command that wrote it
step, updates, episodes, seconds, returns, best, sums, rng    the run's counters
"""

import io
import os

import torch

from torchbeast.files import write_atomically
from torchbeast.messages import BadInput, first_line


def write(path, checkpoint):
    """Replaces the file at path by the checkpoint, atomically. OSError if the disk is
    full."""
    # Through memory: torch's own writer hides the reason of a failed write.
    write_atomically(path, to_bytes(checkpoint))


def to_bytes(checkpoint):
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return buffer.getvalue()  # A view of it crashes Python 3.12.1 after a failed write.


def from_bytes(data) -> dict:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def keep(path, step, num):
    """Keeps the checkpoint at path, which is of this step, beside it as name-STEP.tar.
    Removes all but the newest num of those."""
    kept = path.with_name(f"{path.stem}-{step:012d}.tar")
    kept.unlink(missing_ok=True)
    try:
        os.link(path, kept)
    except OSError:  # Some file systems have no links.
        write_atomically(kept, path.read_bytes())
    others = {*path.parent.glob(f"{path.stem}-{12 * '[0-9]'}.tar")} - {kept}
    # By time: who goes back to an earlier checkpoint goes on from there.
    others = sorted(others, key=lambda p: p.stat().st_mtime_ns)
    if others and kept.stat().st_mtime_ns <= (last := others[-1].stat().st_mtime_ns):
        os.utime(kept, ns=(last + 1, last + 1))  # The clock was set back.
    for old in others[: max(0, len(others) + 1 - num)]:
        old.unlink()


def load(path) -> dict:
    """Reads a checkpoint, executing nothing in the file (weights_only=True). Raises
    BadInput if it is not one."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        int(checkpoint["step"])
        flags = checkpoint["flags"]
        own = flags["env"], flags["agent"], *flags.get("command", ())
        for text in (*flags, *own):
            if not isinstance(text, str):
                raise TypeError(f"{text!r}, expected a text")
    except FileNotFoundError:
        raise BadInput(f"no checkpoint at {path}") from None
    except Exception as e:  # Whatever a damaged or hostile file leads to.
        raise not_a_checkpoint(path, e) from e
    return checkpoint


def read(path, flags) -> dict:
    """Reads a checkpoint, as load(). Raises BadInput if it is of another environment or
    agent."""
    checkpoint = load(path)
    env, agent = (checkpoint["flags"][name] for name in ("env", "agent"))
    if env != flags.env:
        raise BadInput(f"checkpoint {path} is of --env {env}, not {flags.env}")
    if agent != flags.agent:
        raise BadInput(f"checkpoint {path} is of --agent {agent}, not {flags.agent}")
    return checkpoint


def load_agent_state(agent, checkpoint, path):
    """Has the agent load its part of the checkpoint at path. Raises BadInput if that
    part does not fit."""
    try:
        agent.load_state_dict(checkpoint["agent"])
    except OtherNetwork as e:
        raise BadInput(f"checkpoint {path} is of another network: {e}") from e
    except KeyError as e:
        raise BadInput(f"checkpoint {path} lacks the agent's {e}") from e
    except Exception as e:
        raise BadInput(
            f"the agent cannot load checkpoint {path}: {first_line(e)}"
        ) from e


def check_agent_state(agent):
    """Raises BadInput if the agent's state_dict(), or that of one of several policies,
    lacks what resuming needs, or holds what read() would refuse."""
    for one in getattr(agent, "agents", {"": agent}).values():
        if one.optimizer is None:  # A past policy, which does not learn.
            continue
        state = one.state_dict()
        for name in ("model", "optimizer", "step", "updates"):
            if name not in state:
                raise BadInput(
                    f"the agent's state_dict() lacks {name!r}: it has to extend "
                    "super().state_dict()"
                )
    if entry := _not_kept(agent.state_dict()):
        raise BadInput(
            "the agent's state_dict() holds what no checkpoint can, expected tensors, "
            f"numbers, texts, and dicts and lists of them: {entry}"
        )


def _not_kept(x, path=""):
    """Returns the path and type of the first entry of a nest that a checkpoint cannot
    have, or None."""
    try:
        from_bytes(to_bytes(x))
        return None
    except Exception:
        items = x.items() if isinstance(x, dict) else ()
        entries = (_not_kept(y, f"{path}/{name}") for name, y in items)
        return next(filter(None, entries), f"{path[1:]} is a {type(x).__name__}")


class OtherNetwork(ValueError):
    """Names the first difference between two networks' weights."""


def load_weights(module, weights):
    """Loads weights into the module. Raises OtherNetwork if they do not fit."""
    theirs = {name: tuple(x.shape) for name, x in dict(weights).items()}
    ours = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise OtherNetwork(
                f"{name} is {theirs.get(name, 'not there')} in the checkpoint, "
                f"{ours.get(name, 'not there')} in the network of this command"
            )
    module.load_state_dict(weights)


def not_a_checkpoint(path, error):
    why = first_line(error)
    if "weights_only" in str(error):  # PyTorch says how to execute it.
        why = "it is damaged, or holds more than tensors, numbers and texts"
    return BadInput(f"{path} is not a checkpoint that can be read: {why}")
