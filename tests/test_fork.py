"""docs/fork.md, followed line by line, in a copy of the repository."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.programs import ROOT, read_logs


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository, and its home directory."""
    copy = tmp_path / "torchbeast"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")
    for name in [*filter(None, names), *(p.name for p in ROOT.glob("_lib*.so"))]:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    subprocess.run(["git", "init", "-q", copy], check=True)
    return copy


def follow(copy, script):
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-ec", script],
        cwd=copy,
        env={**os.environ, "HOME": str(copy.parent), "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_whoever_follows_fork_md_gets_what_it_says(copy):
    text = (ROOT / "docs/fork.md").read_text()
    blocks = {kind: [] for kind in ("bash", "diff", "python")}
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.S | re.M):
        blocks[kind].append(block)
    [diff], (agent, env, wrapper, bonus) = blocks["diff"], blocks["python"]
    setup, edited, own_agent, own_env, wrapped = blocks["bash"]
    assert "make setup" in setup

    def columns():
        latest = copy.parent / "logs" / "torchbeast" / "latest"
        return read_logs(latest)[0].keys()

    (copy / "edit.diff").write_text(diff)
    follow(copy, "git apply edit.diff")
    follow(copy, edited)
    assert "logit_loss" in columns()
    follow(copy, "git apply -R edit.diff")

    (copy / "my_agent.py").write_text(agent)
    assert "episodes: mean return" in follow(copy, own_agent)
    assert "prediction_loss" in columns()

    (copy / "my_env.py").write_text(env)
    assert follow(copy, own_env).count("return 1, ") == 10  # All of them.

    (copy / "my_env.py").write_text(f"{env}\n\n{wrapper}")
    (copy / "my_agent.py").write_text(f"{agent}\n{bonus}")
    follow(copy, wrapped)
