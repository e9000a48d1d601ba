"""Writes a trained agent as one file that runs without this repository.

    python -m torchbeast.export --xpid NAME --out agent.pt2

A file.pt2 is a program of torch.export, which needs PyTorch alone; a file.onnx is
ONNX's, which needs onnxruntime alone (the extra onnx writes one). Both
are the function

    (step, core_state) -> (action, core_state)

of B environments: step is a dict of observation [B, ...], reward [B], done [B],
last_action [B, ...] and, where there are masks, action_mask [B, C], as
torchbeast/environment.py describes them; action [B, ...] is the most probable one, or
the most valuable. Actions are the environment's, in int64 and float32: Discrete's
counted from its start, a Box's within its bounds. The file has examples of step and
core_state, those before a first step. docs/experiments.md shows how to use both.

A file.tar is a small checkpoint, with the weights in float16 and nothing that only
learning needs. --mode test --checkpoint FILE plays it.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import json
import pathlib
import sys

import torch
from torch import nn

from torchbeast import checkpoint, play, run
from torchbeast.agents import what_networks_read
from torchbeast.calls import create
from torchbeast.environment import first_step
from torchbeast.files import write_atomically
from torchbeast.flags import Parser, number, parse_args, path, run_command, run_parser
from torchbeast.messages import BadInput, first_line
from torchbeast.nests import leaves, map_structure
from torchbeast.policies import LEARNER, Several
from torchbeast.program import flags_of_checkpoint
from torchbeast.spaces import entry


def parser():
    p = Parser(
        prog="export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # fmt: off
    p.add_argument("--out", metavar="FILE", type=path, required=True,
                   help="file to write, .pt2, .onnx or .tar")
    p.add_argument("--xpid", metavar="NAME", help="run whose model.tar is written "
                   "(default: the newest)")
    p.add_argument("--savedir", metavar="DIR", type=path, default="~/logs/torchbeast",
                   help="directory of the runs (default: %(default)s)")
    p.add_argument("--checkpoint", metavar="FILE", type=path,
                   help="checkpoint to write (default: the run's model.tar)")
    p.add_argument("--num_envs", type=number(int, 1), default=1, metavar="B",
                   help="environments that the function acts for "
                   "(default: %(default)s)")
    # fmt: on
    return p


class Acting(nn.Module):
    """An agent's act() as a module, without gradients and the dimension of time, with
    actions as environments take them."""

    def __init__(self, agent, actions):
        super().__init__()
        self.net = agent.net  # Its weights are to be in the file.
        self._act = inspect.unwrap(agent.act.__func__), agent
        self._actions = actions

    def forward(self, step, core_state):
        act, agent = self._act
        done = step["done"]

        def counted_from_0(x, leaf):
            is_first = done.reshape(-1, *[1] * len(leaf.shape))
            start = torch.as_tensor(leaf.start, dtype=x.dtype)
            return torch.where(is_first, 0, x - start)

        def of_environment(x, leaf):
            if leaf.num_choices is not None:
                return x[0] + torch.as_tensor(leaf.start, dtype=x.dtype)
            bounds = (torch.as_tensor(y, dtype=x.dtype) for y in (leaf.low, leaf.high))
            return x[0].clamp(*bounds)

        last_action = self._map(counted_from_0, step["last_action"])
        step = map_structure(lambda x: x[None], {**step, "last_action": last_action})
        outputs, core_state = act(agent, step, core_state, greedy=True)
        return self._map(of_environment, outputs["action"]), core_state

    def _map(self, function, action):
        """Returns the nest of function(array, Action) of each array of an action."""
        arrays = (
            function(entry(action, leaf.keys, leaf.name), leaf)
            for leaf in self._actions.leaves
        )
        return self._actions.nest(arrays)


def find(flags):
    """Returns (the path of a checkpoint, what is in it, its flags of environment and
    agent)."""
    given = run_parser().parse_args(["--mode", "test"])
    vars(given).update({k: vars(flags)[k] for k in ("xpid", "savedir", "checkpoint")})
    path = run.checkpoint_path(given)
    return path, checkpoint.load(path), flags_of_checkpoint(given)


def load(flags):
    """Returns (the agent of a checkpoint, the Actions and a first step of its
    environment, what a file says of itself)."""
    where, saved, own = find(flags)
    # By name: the program that trained it knows its flags.
    name = saved["flags"].get("command", ["monobeast"])[0]
    try:
        program = importlib.import_module(name)
    except ModuleNotFoundError as e:
        raise BadInput(f"the program that trained it, {name}: {e}") from e
    p = program.program_parser(saved["flags"]["agent"])
    p.set_defaults(**own)
    own = parse_args(p, [])
    env = create(program.polybeast_env.create_env, own, flags.num_envs)
    try:
        step = first_step(env)
    finally:
        env.close()
    agent, _ = play.load(own, env, where)
    if isinstance(agent, Several):
        raise BadInput(f"{env.name} has several policies, expected one")
    agent.net.requires_grad_(False)
    about = {
        "env": own.env, "agent": own.agent, "step": saved["step"],
        "observation_space": str(env.observation_space),
        "action_space": str(env.action_space),
    }  # fmt: skip
    step = map_structure(torch.as_tensor, what_networks_read(step))
    return agent, env.actions, step, about


@contextlib.contextmanager
def writing(out):
    """A context in which what the system refuses, as a full disk does, is one line."""
    try:
        yield
    except OSError as e:
        raise BadInput(f"--out {out}: {first_line(e)}") from e


@torch.no_grad()
def export(flags):
    """Writes the file. Returns the exit code."""
    kind = flags.out.rpartition(".")[2]
    if kind not in ("pt2", "onnx", "tar"):
        raise BadInput(
            f"--out {flags.out}: expected a name that ends in .pt2, .onnx or .tar"
        )
    if not (folder := pathlib.Path(flags.out).parent).is_dir():
        raise BadInput(f"--out {flags.out}: there is no directory {folder}")
    if kind == "tar":
        found = find(flags)
        with writing(flags.out):
            write_small(*found, pathlib.Path(flags.out))
        return 0
    agent, actions, step, about = load(flags)
    acting = Acting(agent, actions).eval()
    inputs = step, agent.initial_state(len(step["reward"]))
    program = torch.export.export(acting, inputs, strict=False)
    if kind == "onnx":
        action, core_state = acting(*inputs)
        inputs = dict(zip(("step", "core_state"), inputs))
        outputs = {"action": action, "next_core_state": core_state}
        with writing(flags.out):
            write_onnx(program, inputs, outputs, about, flags.out)
    else:
        buffer = io.BytesIO()
        torch.export.save(program, buffer, extra_files={"about": json.dumps(about)})
        with writing(flags.out):
            write_atomically(pathlib.Path(flags.out), buffer.getvalue())
    print(f"{flags.out}: {json.dumps(about)}")
    return 0


def write_small(path, saved, own, out):
    """Writes what of the checkpoint at path plays. own: its flags of environment and
    agent. Raises BadInput if it would take the checkpoint's place."""
    if out.exists() and out.samefile(path):
        raise BadInput(f"--out {out}: expected another file than the checkpoint")
    own |= {"command": own.get("command", ["monobeast"])[:1]}
    state, step = saved["agent"], saved["step"]
    if own.get("opponents") is not None:  # Past policies play no part in games of its.
        state = state.get(LEARNER, state)
    checkpoint.write(out, {"agent": weights(state), "flags": own, "step": step})
    size = f"{out.stat().st_size:,} bytes"
    print(f"{out}: --env {own['env']} --agent {own['agent']}, step {step}, {size}")


def weights(state):
    """Returns the weights in an agent's state_dict(), or in those of several policies,
    as float16. Running statistics, which are float64, stay so."""

    def small(x):
        half = x.half() if x.dtype == torch.float32 else x
        return half if half.isfinite().all() else x

    if "model" in state:
        return {"model": {name: small(x) for name, x in state["model"].items()}}
    return {policy: weights(x) for policy, x in state.items()}


def write_onnx(program, inputs, outputs, about, out):
    """Writes a program as ONNX. Arrays are named by where they are in the nests of
    inputs and outputs, such as step/observation and core_state/0."""
    names = [[path for path, _ in leaves(nest)] for nest in (inputs, outputs)]
    try:
        model = torch.onnx.export(
            program, input_names=names[0], output_names=names[1], verbose=False
        )
    except ImportError as e:
        raise BadInput(f"--out {out} needs: pip install onnx onnxscript") from e
    model.model.metadata_props.update(map_structure(str, about))
    model.save(out)


def main(argv=None):
    return run_command("export", lambda: export(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
