"""Runs a program once for each combination of the values of some of its flags.

    python -m torchbeast.launch --slots 2 --learning_rate 1e-3,3e-4 --seed 1:3 -- \\
        python -m monobeast --env PongNoFrameskip-v4

trains six runs, two at a time. What is before `--` varies; what is after it is the
command of every run. 1:3 is 1,2,3; a flag that takes no value varies as on,off. Runs
are named after what varies, so the same command again resumes them.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections import deque

from torchbeast import logs
from torchbeast.combinations import combinations, difference, parse_varied
from torchbeast.display import Table
from torchbeast.flags import Parser, is_given, number, run_command, run_parser
from torchbeast.machine import core_shares, num_cores, use_only
from torchbeast.messages import BadInput, first_line
from torchbeast.process import Signals, follow_parent, kill_group, signal_name


def slots_parser():
    """The flags of commands that start runs."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    p.add_argument("--slots", type=number(int, 1), metavar="N", help="runs at a time, "
                   "each on its share of the cores (default: one for each of --gpus, "
                   "else 1)")
    p.add_argument("--gpus", type=lambda text: text.split(","), metavar="GPU,...",
                   help="GPU of each slot (CUDA_VISIBLE_DEVICES); slots may share one")
    # fmt: on
    return p


def parser():
    p = Parser(
        prog="launch",
        usage="%(prog)s [--slots N] [--gpus GPU,...] [--list] --FLAG ... -- COMMAND",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[slots_parser()],
    )
    p.add_argument("--list", action="store_true",
                   help="print the command of each run, and start nothing")  # fmt: skip
    return p


def run_flags(command):
    """Returns those flags of a program that all programs have."""
    p = Parser(prog="launch", add_help=False, parents=[run_parser()])
    p.set_defaults(command=command)
    return p.parse_known_args(command)[0]


def make_slots(flags):
    """Returns [(cores, GPU or None)] of the slots."""
    num = flags.slots or len(flags.gpus or "1")
    gpus = flags.gpus or [None] * num
    if len(gpus) != num or "" in gpus:
        raise BadInput(f"--gpus {','.join(gpus)}: expected one for each of {num} slots")
    if num > num_cores():
        raise BadInput(f"--slots {num} is more than the {num_cores()} cores here")
    return list(zip(core_shares(num), gpus))


class Job:
    """One run of the program."""

    def __init__(self, name, command):
        self.name, self.command = name, command
        self.flags = run_flags(command)
        self.path = pathlib.Path(self.flags.savedir, name)
        name = "launch.log" if self.flags.mode == "train" else "test.log"
        self.output = self.path / name
        self.state, self.note, self.step, self.mean_return = "waits", "", 0, None
        self.look()
        with contextlib.suppress(OSError, ValueError):  # The program says why.
            self._look_for_earlier_one()

    def look(self):
        """Reads how far the run is."""
        # Agents and presets have their own.
        if not is_given(self.flags, "total_steps"):
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                own = json.loads((self.path / "meta.json").read_text())["flags"]
                self.flags.total_steps = int(own["total_steps"])
        with contextlib.suppress(OSError):
            rows = logs.read(self.path / "logs.csv", last_bytes=100_000)
            if rows:
                self.step = int(rows[-1]["step"])
            means = logs.moving_average(rows, "episode_return")
            if means and self.flags.mode == "train":
                self.mean_return = means[-1][1]

    def _look_for_earlier_one(self):
        if self.flags.mode == "train" and (self.path / "model.tar").exists():
            from torchbeast import checkpoint  # Imports torch.

            self.step = checkpoint.load(self.path / "model.tar")["step"]
            if self.step >= self.flags.total_steps:
                self.state = "complete"
        before = shlex.split(logs.last_line(self.output, lambda x: x[:2] == "$ ")[2:])
        if before and (changed := difference(before, self.command)):
            self.note = f"its command {changed}"
            if self.state == "complete":  # Very likely another experiment's.
                self.state = "failed"
                self.note = f"complete, but {self.note}: name these runs by --xpid"

    def start(self, cores, gpu):
        def set_up():
            use_only(cores)
            follow_parent()

        gpus = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.output, "a") as output:
            print(f"$ {shlex.join(self.command)}", file=output, flush=True)
            self.process = subprocess.Popen(  # Ctrl-C does not reach its session.
                self.command, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, env={**os.environ, **gpus},
                start_new_session=True, preexec_fn=set_up,
            )  # fmt: skip

    def has_ended(self, signum):
        """Tells whether the run has ended. signum: what it was sent, or None."""
        if (code := self.process.poll()) is None:
            return False
        kill_group(self.process)  # What it left behind.
        self.look()
        if code == 0 and self.flags.mode != "train":
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                results = json.loads((self.path / "test.json").read_text())
                self.mean_return = results[-1]["mean_return"]
        self.state = "ended" if code == 0 else "stopped" if signum else "failed"
        self.note = ""
        if code not in ({0, -signum, 128 + signum} if signum else {0}):
            why = f"exit code {code}" if code > 0 else signal_name(-code)
            line = first_line(logs.last_line(self.output, str.strip), with_type=False)
            self.note = f"{why}: {line[:200]}; {self.output}"
        return True


def run_all(runs, slots):
    """Has each slot run one run after the other. Returns the exit code."""
    waiting = deque(run for run in runs if run.state == "waits")
    running = {}  # {index of its slot: run}
    with Signals() as signals, Table(runs) as table:
        while running or (waiting and not signals.received):
            signum = signals.received
            for run in running.values():
                if signum and run.state != "ends":
                    run.state = "ends"
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(run.process.pid, signum)
            for i, slot in enumerate(slots):
                if waiting and i not in running and not signum:
                    run = waiting.popleft()
                    try:
                        run.start(*slot)
                        run.state, running[i] = "runs", run
                    except (OSError, subprocess.SubprocessError) as e:
                        run.state, run.note = "failed", str(e)
            for i, run in list(running.items()):
                if run.has_ended(signum):
                    del running[i]
            table.update()
            time.sleep(0.1)
    failed = any(run.state == "failed" for run in runs)
    return 128 + signals.received if signals.received else int(failed)


def launch(argv):
    split = argv.index("--") if "--" in argv else len(argv)
    flags, words = parser().parse_known_args(argv[:split])
    if not (command := argv[split + 1 :]):
        raise BadInput("expected -- and a command, such as -- python -m monobeast")
    slots = make_slots(flags)
    xpid = run_flags(command).xpid
    commands = combinations(parse_varied(words), command, f"{xpid}," if xpid else "")
    if flags.list:
        print(*map(shlex.join, commands.values()), sep="\n")
        return 0
    return run_all([Job(name, words) for name, words in commands.items()], slots)


if __name__ == "__main__":
    sys.exit(run_command("launch", lambda: launch(sys.argv[1:])))
