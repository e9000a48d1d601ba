"""The examples: patches that fit this repository, and learn."""

import ast
import math
import os
import shlex
import shutil
import subprocess

import pytest

from tests.programs import ROOT, read_logs, run
from tests.test_learning import learns

# What each adds to the files beside create_env() and Net.
ADDED = {"minatar": set(), "nethack": {"NetHackEncoder"}}
SHORT = ["--num_servers", 1, "--envs_per_server", 2, "--batch_size", 2]
SHORT += ["--total_steps", 400, "--log_interval_steps", 80]


@pytest.fixture(params=ADDED)
def example(request):
    return request.param


@pytest.fixture
def patched(example, tmp_path):
    """A copy of the programs, with the example's patch applied."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("_libtorchbeast*")]
    for file in files:
        shutil.copy(file, tmp_path)
    result = subprocess.run(
        ["git", "apply", ROOT / f"examples/{example}/{example}.patch"],
        cwd=tmp_path,
        # Or git would leave alone what is outside a repository that it finds above.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return tmp_path


def documented_flags(example):
    """Those of the first command in the example's README."""
    text = (ROOT / f"examples/{example}/README.md").read_text().replace("\\\n", " ")
    commands = [x for x in text.splitlines() if x.startswith("python -m polybeast ")]
    return shlex.split(commands[0])[3:]


def definitions(path):
    """{name: its code} of the top level, without imports."""
    nodes = [
        node
        for node in ast.parse(path.read_text()).body
        if not isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    return {getattr(node, "name", ast.dump(node)): ast.dump(node) for node in nodes}


def test_only_the_environment_and_the_network_differ(example, patched):
    changed, added = set(), set()
    for file in ROOT.glob("*.py"):
        before, after = definitions(file), definitions(patched / file.name)
        assert before.keys() <= after.keys()
        added |= after.keys() - before.keys()
        changed |= {(file.name, x) for x in before if before[x] != after[x]}
    assert changed == {("polybeast_env.py", "create_env"), ("polybeast.py", "Net")}
    assert added == ADDED[example]


@pytest.mark.parametrize("lstm", [[], ["--use_lstm"]])
def test_the_patched_program_trains(example, patched, lstm, tmp_path):
    result = run(*documented_flags(example), *SHORT, *lstm, "--savedir", tmp_path,
                 "--xpid", "x", module="polybeast", cwd=patched)  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = read_logs(tmp_path / "x")
    assert int(rows[-1]["step"]) == 400
    assert all(math.isfinite(float(row["total_loss"])) for row in rows)


@pytest.mark.parametrize("example", ["minatar"], indirect=True)
def test_minatar_breakout_is_learned_with_the_documented_command(
    example, patched, tmp_path
):
    learns("polybeast", documented_flags(example), 5, tmp_path, cwd=patched)
