"""What a training program does with its command line."""

import argparse
import multiprocessing
import os
import pathlib
import re
import sys

from torchbeast import checkpoint, machine, play, ranks, run, torchrun, tracking
from torchbeast.flags import (
    Parser,
    error_line,
    is_given,
    parse_args,
    run_command,
    run_parser,
    words_of,
)
from torchbeast.messages import BadInput, Stop


class PolicyParser(Parser):
    """Takes flags of one policy, such as --tagger.learning_rate, into policy_flags,
    {policy: [words]}. Has --freeze. Refuses unknown flags before --help is printed: so
    torchbeast.launch tries a command."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs, add_help=False)
        self.add_argument("-h", "--help", action="store_true",
                          help="show this help message and exit")  # fmt: skip
        self.set_defaults(policy_flags={})
        group = self.add_argument_group(
            "several policies", "--POLICY.FLAG, such as --red.learning_rate 5e-4, is "
            "of one policy alone."
        )  # fmt: skip
        # fmt: off
        group.add_argument("--freeze", nargs="+", default=[], metavar="POLICY",
                           help="policies that do not learn (default: none)")
        # fmt: on

    def parse_args(self, args=None, namespace=None):
        flags = super().parse_args(args, namespace)
        if vars(flags).pop("help"):
            self.print_help()
            self.exit()
        return flags

    def parse_known_args(self, args=None, namespace=None):
        policy, own, of_policies = None, [], {}
        for word in sys.argv[1:] if args is None else args:
            if match := re.match(r"--(\w+)\.(.+)", word):
                policy, word = match[1], f"--{match[2]}"
            elif word.startswith("--"):
                policy = None
            words = own if policy is None else of_policies.setdefault(policy, [])
            words.append(word)
        flags, unknown = super().parse_known_args(own, namespace)
        if of_policies:
            flags.policy_flags = of_policies
        return flags, unknown


def name_of(spec, path):
    """Returns the name of the module with this __spec__ and __file__ for python -m. A
    copy of a program has its own. (Under cProfile and pdb a script has none, or its
    __spec__ is that of another module.)"""
    name = getattr(spec, "name", None)
    stem = pathlib.Path(path).stem
    return name if name is not None and name.rpartition(".")[2] == stem else stem


def run_program(prog, parser, train, create_env, argv, agent="polybeast"):
    """Parses the command line, and trains or tests, as --mode says. Returns the exit
    code.

    prog:       what runs, by name_of(); agent: the default of --agent
    parser:     a function of the agent's name that returns the program's parser
    train:      a function of the flags that returns the exit code
    create_env: polybeast_env.create_env
    """
    if hasattr(multiprocessing.current_process(), "_inheriting"):
        raise RuntimeError(
            "main() was called while a process of its own started: the script needs "
            "`if __name__ == '__main__':` before it"
        )
    argv = sys.argv[1:] if argv is None else argv

    def body():
        p = Parser(prog=prog, add_help=False, parents=[run_parser()])
        p.set_defaults(agent=None)
        given, _ = p.parse_known_args(argv)
        if given.mode != "train" and "LOCAL_RANK" in os.environ:
            raise BadInput(f"--mode {given.mode} needs no torchrun: python -m {prog}")
        saved = {}
        if given.mode != "train":
            try:
                saved = flags_of_checkpoint(given)
            except BadInput:
                if not {"-h", "--help"} & {*argv}:
                    raise
        name = given.agent or saved.get("agent", agent)
        try:
            p = parser(name)
        except argparse.ArgumentError as e:  # A flag that the program has, too.
            raise BadInput(f"--agent {name}: parser(): {e}") from e
        p.prog = prog
        p.set_defaults(agent=name)
        flags = parse_args(p, argv)
        if saved:
            defaults = flags
            p.set_defaults(**saved)
            flags = parse_args(p, argv)
            say_taken(flags, defaults, saved)
        flags.command = [prog, *argv]
        if flags.video and flags.mode != "test":
            raise BadInput(f"--video goes with --mode test, not {flags.mode}")
        if flags.opponent and flags.mode == "train":
            raise BadInput("--opponent goes with --mode test, not train")
        if flags.checkpoint and flags.mode == "train":
            raise BadInput("--checkpoint goes with --mode test, not train")
        for name in flags.track or ():
            tracking.find(name)
        if flags.mode == "train":
            try:
                torchrun.join(flags)
                return train(flags)
            except Stop as e:  # Another rank ended before training began.
                sys.stderr.write(error_line(prog, e))
                return e.exit_code
        return play.test(flags, create_env)

    exit_code = run_command(prog, body)
    ranks.current.close(exit_code)
    return exit_code


def flags_of_checkpoint(flags):
    """Returns the flags {name: value} of environment and agent with which the
    checkpoint that is to play was trained."""
    saved = checkpoint.load(run.checkpoint_path(flags))["flags"]
    own = vars(run_parser().parse_args([])).keys() - {"agent"}
    own |= {"preset"}  # Its values are among the others.
    return {name: x for name, x in saved.items() if name not in own}


def say_taken(flags, defaults, saved):
    """Prints which flags are the checkpoint's, and not what this command says. Those
    without a default that the checkpoint's command did not have either were derived."""
    now, before = (machine.plain(vars(x)) for x in (flags, defaults))
    saved = argparse.Namespace(command=saved.get("command", ()))
    taken = {
        name: now[name]
        for name, default in before.items()
        if now[name] != default and (default is not None or is_given(saved, name))
    }
    own = [
        re.sub("^--", f"--{policy}.", word)
        for policy, words in taken.pop("policy_flags", {}).items()
        for word in words
    ]
    words = [*([words_of(taken)] if taken else []), *own]
    if words:
        print("from the checkpoint:", *words, flush=True)
