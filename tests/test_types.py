"""Type hints of what the author of an agent imports. mypy checks the files that
pyproject.toml names."""

import subprocess
import sys

import pytest

from tests.programs import ROOT

pytestmark = pytest.mark.long  # Reading PyTorch's hints takes half a minute.

AGENT = """
import torch
import vtrace
from torchbeast.agents import Agent

x = torch.zeros(2, 3)
returns = vtrace.from_importance_weights(x, x, x, x, x[0], clip_c_threshold=None)
vs: torch.Tensor = returns.vs
vtrace.from_importance_weights(x, x, x, x, x[0], lambda_="one")
class MyAgent(Agent): ...
"""


def mypy(*files):
    return subprocess.run(
        [sys.executable, "-m", "mypy", *files],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip


def test_the_type_hints_of_what_an_agent_imports_are_right():
    result = mypy()
    assert result.stdout == "Success: no issues found in 5 source files\n", result


def test_an_agent_that_gives_a_word_for_a_number_is_told(tmp_path):
    (tmp_path / "my_agent.py").write_text(AGENT)
    result = mypy(tmp_path / "my_agent.py")
    [error, found] = result.stdout.splitlines()
    assert "my_agent.py:9: error: Argument" in error and '"str"' in error
    assert found.startswith("Found 1 error")
