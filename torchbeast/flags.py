"""The command line: flags that all training programs have, and --agent.

A flag has the first of these values that there is: the command line's; the checkpoint's
that --mode test plays; --preset's; the default of parser(); what the machine makes of
None, set_defaults() of a program's sources of rollouts; what the environment does,
Agent.sizes() there, and Agent.defaults(), where the first agent is made.

No torch in here: environment servers import this file.
"""

import argparse
import difflib
import importlib
import importlib.util
import math
import os
import pathlib
import re
import shlex
import signal
import sys
import time

from torchbeast.messages import BadInput, setup_logging
from torchbeast.process import (
    children,
    keep_freed_memory,
    kill_children,
    leave_forks_alone,
    open_standard_files,
    terminable,
)

AGENTS = "polybeast", "ppo", "pqn", "r2d2", "sac", "td3"  # That are here.
# Flags that may differ between two sessions of a run, or two runs of one experiment.
UNCOMPARED = {"chosen", "command", "mode", "savedir", "seed", "track", "xpid"}


class Parser(argparse.ArgumentParser):
    """Prints bad input as one line on stderr and exits with code 2. Flags cannot be
    abbreviated, because an agent may add a flag that begins like another one."""

    presets = {}  # {value of --preset: {flag: default}}

    def __init__(self, **kwargs):
        super().__init__(**kwargs, allow_abbrev=False)
        self.set_defaults(**self._defaults)  # An agent's, of the program's flags.

    def add_presets(self, agent, **presets):
        """Adds --preset, if the agent's module or the program has any."""
        self.presets = {**getattr(load_agent(agent), "PRESETS", {}), **presets}
        if self.presets:
            self.add_argument("--preset", choices=self.presets,
                              help="defaults for a kind of environment")  # fmt: skip

    def error(self, message):
        options = self._option_string_actions
        what = "(unrecognized arguments: |--preset: invalid choice: ')([^ =']+)"
        if typed := re.search(what, message):
            agents = _agents_with(typed[2]) if "--agent" in options else ()
            close = difflib.get_close_matches(typed[2], options, n=1, cutoff=0.8)
            if agents:
                message += f"; there is one for --agent {' or '.join(agents)}"
            elif close:
                message += f"; did you mean {close[0]}?"
        self.exit(2, error_line(self.prog, message))


def _agents_with(word):
    """Returns which of the repository's agents have this flag, or preset."""
    found = []
    for name in AGENTS:
        path = pathlib.Path(__file__).resolve().parent.parent / f"{name}.py"
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin == str(path):  # No file of a user's.
            options = agent_parser(name)._option_string_actions
            if word in options or word in getattr(load_agent(name), "PRESETS", ()):
                found.append(name)
    return found


def error_line(prog, message):
    """Returns the line about bad input. What is wrong on all ranks of a host the first
    one prints, and torchrun ends the others."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(1)
    message = re.sub(r"\s*\n\s*", " ", str(message))  # Of a space, for one.
    return f"{prog}: error: {message}\n"


def number(kind, low=None, high=None, above=None):
    """An argparse type: an int or float within bounds."""
    bounds = [
        f"{sign} {bound}"
        for sign, bound in ((">=", low), (">", above), ("<=", high))
        if bound is not None
    ]
    expected = " and ".join(bounds) or "a finite number"

    def parse(text):
        try:
            x = kind(text)
        except ValueError:
            name = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}") from None
        if not (
            math.isfinite(x)
            and (low is None or x >= low)
            and (high is None or x <= high)
            and (above is None or x > above)
        ):
            raise argparse.ArgumentTypeError(f"{text}, expected {expected}")
        return x

    return parse


def path(text):
    """An argparse type: an absolute path, because environments may change the working
    directory."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, not an empty text")
    try:
        return os.path.abspath(pathlib.Path(text).expanduser())
    except RuntimeError as e:  # ~nobody
        raise argparse.ArgumentTypeError(f"{text}: {e}") from e


def text_or_path(text):
    """An argparse type: any text, or @FILE with an absolute path."""
    return f"@{path(text[1:])}" if text[:1] == "@" else text


def import_module(name):
    """Imports a module that a flag names. Raises BadInput if there is none, and what
    the module itself raises: its traceback says where it fails."""
    try:
        return importlib.import_module(name)
    except (ImportError, ValueError, TypeError) as e:  # "" and ".x" are not names.
        missing, is_name = getattr(e, "name", None), name[:1] not in ("", ".")
        if is_name and missing != name and not name.startswith(f"{missing}."):
            raise
        raise BadInput(str(e)) from e


def load_agent(name):
    """Imports the module that --agent names. Raises BadInput if it is not an agent."""
    try:
        module = import_module(name)
    except BadInput as e:
        raise BadInput(
            f"--agent {name}: {e}; expected polybeast (IMPALA), ppo, pqn, r2d2 (also "
            "DQN), sac, td3 or the name of a module (not .py), such as "
            "examples.minatar.agent"
        ) from e
    for attribute in ("parser", "Agent"):
        if not hasattr(module, attribute):
            raise BadInput(f"--agent {name}: expected a module with {attribute}")
    return module


def agent_parser(name):
    """The flags of an agent. Raises BadInput if they are not argparse's."""
    module = load_agent(name)
    p = module.parser()
    if not isinstance(p, argparse.ArgumentParser) or p.add_help:
        raise BadInput(
            f"--agent {name}: parser() returned {type(p).__name__}, expected "
            "argparse.ArgumentParser(add_help=False)"
        )
    return p


def parse_args(parser, argv):
    """Parses a program's command line. The defaults are those of --preset, if one is
    named."""
    flags = parser.parse_args(argv)
    if getattr(flags, "preset", None) is not None:
        preset = parser.presets[flags.preset]
        parser.set_defaults(**{k: x for k, x in preset.items() if hasattr(flags, k)})
        flags = parser.parse_args(argv)
    return flags


def by_environment(parser, *names):
    """Makes these flags of an agent None by default: the agent calls fill_in()."""
    parser.set_defaults(**dict.fromkeys(names))
    for action in parser._actions:
        if action.dest in names:
            action.help = re.sub(r" \(default: .*\)$", "", action.help)
            action.help += " (default: by the environment)"


def fill_in(flags, defaults):
    """Gives the flags that are None their values, {name: value}. Those are in
    flags.chosen, which a run logs."""
    missing = [name for name, value in vars(flags).items() if value is None]
    choose(flags, {name: x for name, x in defaults.items() if name in missing})


def choose(flags, chosen):
    """Gives flags the values {name: value}, which are not of the command line."""
    if chosen:
        before = vars(flags).get("chosen", {})
        vars(flags).update(chosen, chosen={**before, **chosen})


def is_given(flags, name):
    """Tells whether the command line has a flag."""
    words = [word.split("=")[0] for word in getattr(flags, "command", ())]
    return f"--{name}" in words or f"--no-{name}" in words


def synchronous(flags):
    """Tells whether acting waits for each update, so that no rollout is of an older
    policy than the one that learns. Agents that want this have a flag --async."""
    return not vars(flags).get("async", True)


def words_of(flags):
    """Returns flags {name or policy.name: value} as words of a command line."""
    words = []
    for name, x in flags.items():
        if x is False:
            policy, dot, name = name.rpartition(".")
            name = f"{policy}{dot}no-{name}"
        words.append(f"--{name}")
        if not isinstance(x, bool):
            items = x if isinstance(x, (list, tuple)) else [x]
            texts = (
                "=".join(map(str, y)) if isinstance(y, (list, tuple)) else y
                for y in items
            )
            words += [shlex.quote(str(text)) for text in texts]
    return " ".join(words)


def run_command(prog, body):
    """Returns what body() returns, the exit code of the command that this process is.
    BadInput becomes one line on stderr and exit code 2."""
    open_standard_files()
    leave_forks_alone()
    setup_logging()
    keep_freed_memory()
    children_before = children()
    try:
        with terminable():
            return body()
    except BadInput as e:
        sys.stderr.write(error_line(prog, e))
        return 2
    except KeyboardInterrupt as e:  # Training handles signals itself.
        return 128 + getattr(e, "signum", signal.SIGINT)
    except BrokenPipeError:  # Nobody reads the results of a test.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    finally:  # Environments in this process may have left some.
        kill_children(children() - children_before)


def command_line(flags, *words):
    """Returns the command line of this run with other words at its end, such as
    "--mode", "test"."""
    program, *own = flags.command
    num = int(os.environ.get("WORLD_SIZE", 1))
    launcher = "python" if num == 1 or words else "torchrun [...]"
    if not is_given(flags, "xpid"):
        own.append(f"--xpid={flags.xpid}")
    return f"{launcher} -m {program} {shlex.join([*own, *words])}"


def run_parser() -> argparse.ArgumentParser:
    """The flags of every training program, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("run")
    g.add_argument("--mode", default="train", choices=("train", "test", "test_render"),
                   help="train; or let a trained agent play, test_render on the screen "
                   "(default: %(default)s)")
    g.add_argument("--agent", metavar="MODULE", default="polybeast",
                   help="module with the agent: network, loss, optimizer "
                   "(default: %(default)s)")
    g.add_argument("--xpid", metavar="NAME", help="name of the run: the same name "
                   "again resumes it (default: from the time; for tests, the newest)")
    g.add_argument("--savedir", metavar="DIR", type=path, default="~/logs/torchbeast",
                   help="directory in which runs are kept (default: %(default)s)")
    g.add_argument("--seed", type=number(int, 0, 2**31 - 1), metavar="N",
                   help="seed of weights, actions and environments "
                   "(default: drawn by the system)")
    g.add_argument("--disable_checkpoint", action="store_true",
                   help="write no model.tar")
    g.add_argument("--keep_checkpoints", type=number(int, 1), default=1, metavar="N",
                   help="newest checkpoints to keep (default: %(default)s)")
    g.add_argument("--checkpoint_interval_seconds", type=number(float, above=0),
                   default=600, metavar="S",
                   help="time between checkpoints (default: %(default)s)")
    g.add_argument("--log_interval_steps", type=number(int, 1), default=1000,
                   metavar="N",
                   help="steps between lines of logs.csv (default: %(default)s)")

    g.add_argument("--eval_interval_steps", type=number(int, 1), metavar="N",
                   help="play --num_test_episodes beside training, each N steps: "
                   "eval_return in logs.csv (default: never)")
    g.add_argument("--track", nargs="+", metavar="NAME",
                   help="trackers that get flags, logs.csv and --video: wandb, mlflow, "
                   "modules of your own")

    g = p.add_argument_group("training")
    g.add_argument("--total_steps", type=number(int, 1), default=10_000_000,
                   metavar="N", help="agent steps to train for (default: %(default)s)")
    g.add_argument("--batch_size", type=number(int, 1, 10**6), default=4,
                   metavar="B", help="rollouts in a learner batch (default: "
                   "%(default)s; of IMPALA 16 for numbers with an LSTM, and 8 for "
                   "images in PolyBeast on a GPU)")
    g.add_argument("--unroll_length", type=number(int, 1, 10**6), default=20,
                   metavar="T", help="steps in a rollout (default: %(default)s)")
    g.add_argument("--one_episode_rollouts", action=argparse.BooleanOptionalAction,
                   default=False,
                   help="end rollouts with their episodes, and pad them: for networks "
                   "with attention")
    g.add_argument("--learner_device", metavar="DEVICE",
                   help="cpu, cuda, cuda:1, ..., or xpu, which is untried (default: a "
                   "GPU if there is one)")
    g.add_argument("--precision", default="auto",
                   choices=("auto", "float32", "tf32", "bfloat16"),
                   help="arithmetic of the image encoder; everything else is float32 "
                   "(default: auto, tf32 on GPUs, bfloat16 for --net shallow and "
                   "nature on CPUs that gain by it, else float32)")
    g.add_argument("--compile", action="store_true",
                   help="compile the learner's network, and whole steps of WarpBeast, "
                   "for GPUs: slower to start")
    g.add_argument("--cuda_graphs", action=argparse.BooleanOptionalAction,
                   help="launch each gradient step, and each batch to act on, as one "
                   "CUDA graph: several times as fast (default: where one learner "
                   "has a GPU)")

    g = p.add_argument_group("test")
    g.add_argument("--checkpoint", metavar="FILE", type=path,
                   help="checkpoint of the agent that plays (default: the run's "
                   "model.tar)")
    g.add_argument("--num_test_episodes", type=number(int, 1), default=10, metavar="N",
                   help="whole games to play (default: %(default)s)")
    g.add_argument("--greedy", dest="test_actions", action="store_const",
                   const="greedy", help="take the most probable action, or the most "
                   "valuable, here and for eval_return (default: policies sample, and "
                   "Q-learning takes a random one with probability 0.001)")
    g.add_argument("--sample_actions", dest="test_actions", action="store_const",
                   const="sampled", help="act as in training, with all that explores, "
                   "here and for eval_return")
    g.add_argument("--opponent", metavar="WHO", help="of games of two: random, human "
                   "(in this terminal), a checkpoint, or MODULE:FUNCTION (default: "
                   "itself)")
    g.add_argument("--video", metavar="FILE.mp4", type=path,
                   help="record the first episode")
    # fmt: on
    return p
