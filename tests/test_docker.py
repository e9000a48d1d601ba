"""The Dockerfile, as far as that goes without Docker: what it names is there, and its
steps lead to a program that runs, in an empty virtual environment."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import monobeast
from tests.programs import ROOT, load
from torchbeast.flags import parse_args


def stages():
    """{name: (base, [(instruction, what is after it)])}."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    found = {}
    for line in text.replace("\\\n", " ").splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "FROM":
            base, name = rest.split(" AS ")
            steps = found[name] = base, []
        elif line:
            steps[1].append((kind, rest))
    return found


def last(target, kind):
    """What Docker would take of the instructions of a kind, as words."""
    base, steps = stages()[target]
    values = [rest for k, rest in steps if k == kind]
    return json.loads(values[-1]) if values else last(base, kind)


def test_the_image_runs_the_readmes_first_command():
    target = list(stages())[-1]  # What `docker build .` makes.
    assert last(target, "ENTRYPOINT") == ["tini", "--", "python", "-m"]
    module, *words = last(target, "CMD")
    readme = (ROOT / "README.md").read_text()
    command = next(x for x in readme.splitlines() if x.startswith("python -m"))
    assert ["python", "-m", module, *words[:2]] == command.split()
    flags = parse_args(monobeast.program_parser(), words)
    assert flags.savedir == "/logs"


def test_what_is_copied_into_the_images_is_there_and_not_ignored():
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    files = subprocess.check_output(listed, cwd=ROOT, text=True).splitlines()
    ignored = (ROOT / ".dockerignore").read_text().split()
    for base, steps in stages().values():
        assert base in stages() or base.startswith("python:3.")
        for kind, rest in steps:
            for source in rest.split()[:-1] if kind == "COPY" else ():
                paths = [p.relative_to(ROOT) for p in ROOT.glob(source)]
                assert paths, source
                for path in map(str, paths):
                    assert any(f"{f}/".startswith(f"{path}/") for f in files), path
                    assert path not in ignored


def follow(steps, work, python):
    """Does the steps of a stage in this directory. System packages and users are those
    of this machine."""
    path = f"{python.parent}:{os.environ['PATH']}"
    for kind, rest in steps:
        if kind == "COPY":
            *sources, target = rest.split()
            for source in [p for s in sources for p in ROOT.glob(s)]:
                copy = shutil.copytree if source.is_dir() else shutil.copy
                copy(source, work / target)
        elif kind == "RUN" and not re.match("apt-get|useradd", rest):
            words = ["bash", "-ec", rest]
            result = subprocess.run(
                words, cwd=work, env={**os.environ, "PATH": path}, text=True,
                stdin=subprocess.DEVNULL, capture_output=True, timeout=900,
            )  # fmt: skip
            assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.long
def test_the_steps_of_the_images_lead_to_programs_that_run(tmp_path, savedir):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python, work = tmp_path / "venv/bin/python", tmp_path / "work"
    work.mkdir()

    def run(*words):
        return subprocess.run(
            [python, *map(str, words)], cwd=work, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=300,
        )  # fmt: skip

    def start(target, *words):
        entry = last(target, "ENTRYPOINT")
        assert entry[:3] == ["tini", "--", "python"]
        return run(*entry[3:], *words)

    found = stages()
    follow(found["base"][1], work, python)
    follow(found["environments"][1], work, python)
    result = start("environments", *last("environments", "CMD"))
    assert result.returncode == 0 and "--num_servers" in result.stdout, result
    assert "No module named 'torch'" in run("-c", "import torch").stderr
    for name in ("torchbeast", "examples"):
        shutil.rmtree(work / name)
    follow(found["torchbeast"][1], work, python)
    small = "--savedir", savedir, "--total_steps", 400
    result = start("torchbeast", *last("torchbeast", "CMD"), *small, "--xpid", "x")
    assert result.returncode == 0, result.stderr
    assert load(savedir)["flags"]["env"] == "PongNoFrameskip-v4"
    others = "polybeast", "--env", "CartPole-v1", "--num_servers", 1, "--xpid", "poly"
    result = start("torchbeast", *others, *small)
    assert result.returncode == 0, result.stderr
    assert load(savedir, "poly")["step"] >= 400
