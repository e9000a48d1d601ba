"""What varies from run to run: from a command line to the runs' names and commands."""

import itertools
import math
import os
import re
import shlex
import subprocess

from torchbeast.messages import BadInput

MAX_RUNS = 10_000


def split_varied(words):
    """Returns {flag: text} of words such as --env A,B --seed=1:3."""
    varied = {}
    words = iter(words)
    for word in words:
        flag, equals, text = word.partition("=")
        if not re.fullmatch(r"--\w[\w-]*", flag):
            raise BadInput(f"{word!r}: expected a flag that varies, such as --seed 1:3")
        if flag in varied:
            raise BadInput(f"{flag} is given twice")
        varied[flag] = text = text if equals else next(words, "")
        if not text or text.startswith("--"):
            raise BadInput(f"{flag} {text!r}: expected values: A,B or 1:3 or on,off")
    if not varied:
        raise BadInput("nothing varies: expected flags before --, such as --seed 1:3")
    return varied


def parse_varied(words):
    """Returns {flag: its values as texts} of words such as --env A,B --seed=1:3."""
    varied = split_varied(words)
    varied = {flag: parse_values(flag, text) for flag, text in varied.items()}
    if math.prod(map(len, varied.values())) > MAX_RUNS:
        raise BadInput(f"there are more than {MAX_RUNS} combinations")
    return varied


def parse_values(flag, text):
    values = []
    for part in text.split(","):
        if not part or part.startswith("--"):
            raise BadInput(f"{flag} {text!r}: expected values: A,B or 1:3 or on,off")
        values.append(part)
        if match := re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", part):
            first, last = map(int, match.groups())
            if not first <= last < first + MAX_RUNS:
                raise BadInput(f"{flag} {part}: expected FIRST:LAST, such as 1:3")
            values[-1:] = map(str, range(first, last + 1))
    return values


def usage(command):
    """Returns the usage that a program prints for --help, after it has parsed the flags
    before that. Raises BadInput with the program's complaint."""
    try:
        result = subprocess.run(
            [*command, "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=300,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as e:
        raise BadInput(f"{command[0]}: {getattr(e, 'strerror', None) or e}") from e
    match = re.search(r"^usage: .*\n(.+\n)*", result.stdout, re.M)
    if result.returncode != 0:
        lines = result.stderr.strip() or f"--help: exit code {result.returncode}"
        raise BadInput(f"the program says: {lines.splitlines()[-1]}")
    if match is None:
        raise BadInput(f"{shlex.join(command)} --help prints no usage")
    return match[0]


def flag_words(flag, value, values, known=()):
    """Returns the words by which a command has a value of a flag. values: all that the
    flag may have; on and off of a flag that takes no value."""
    if not {*values} <= {"on", "off"}:
        return [f"{flag}={value}"]
    no = f"--no-{flag[2:]}"  # argparse.BooleanOptionalAction
    return [flag] if value == "on" else [no] if no in known else []


def check_flags(varied, command):
    """Returns the program's flags. Raises BadInput if the program does not know one of
    {flag: values}, or cannot parse a value."""
    if "--xpid" in varied:
        raise BadInput("--xpid is the beginning of all names: one, after --")
    if both := varied.keys() & {word.partition("=")[0] for word in command}:
        raise BadInput(f"{both.pop()} is given before and after --")
    every = [
        flag_words(flag, x, values) for flag, values in varied.items() for x in values
    ]
    known = re.findall(r"--\w[\w-]*", usage([*command, *itertools.chain(*every)]))
    if unknown := [flag for flag in varied if flag not in known]:
        raise BadInput(f"{unknown[0]} is not a flag of {shlex.join(command)}")
    return known


def combinations(varied, command, prefix):
    """Returns {name: command} of all runs. Raises BadInput as check_flags() does.

    varied: {flag: values}; those of a flag that takes no value are on and off.
    prefix: what all names begin with.
    """
    known = check_flags(varied, command)
    runs = {}
    for values in itertools.product(*varied.values()):
        pairs = list(zip(varied, values))
        name = prefix + ",".join(f"{flag[2:]}={value}" for flag, value in pairs)
        name = re.sub(r"[^\w.,=+-]", "-", name)
        if name in runs or len(os.fsencode(name)) > 255:
            what = "is the name of two runs" if name in runs else "is too long a name"
            raise BadInput(f"{name} {what}")
        flags = itertools.chain(*(flag_words(f, x, varied[f], known) for f, x in pairs))
        runs[name] = [*command, *flags, f"--xpid={name}"]
    return runs


def difference(before, now):
    """Returns a text with the flags in which two commands differ, "" if in none. The
    first word does not count, because one Python has several names."""
    before, now = _with_values(before[1:]), _with_values(now[1:])
    flags = {
        "had": [x for x in before if x not in now],
        "has": [x for x in now if x not in before],
    }
    return ", ".join(f"{verb} {' '.join(x)}" for verb, x in flags.items() if x)


def _with_values(words):
    """Returns a text for each flag with its values."""
    parts = [[]]
    for word in words:
        if word.startswith("--"):
            parts.append([])
        parts[-1].append(word)
    return [shlex.join(part) for part in parts]
