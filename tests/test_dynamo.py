"""Runs without PyTorch's compiler."""

import subprocess
import sys

from tests.programs import ROOT

SCRIPT = """
import sys
import monobeast
import torch

assert monobeast.main(sys.argv[1:]) == 0
assert not hasattr(sys.modules["torch._dynamo"], "__file__")  # So inspect asks.
assert "torch._dynamo.config" not in sys.modules
import torch._dynamo.config as config
from torch._dynamo.utils import counters
from torch._dynamo import convert_frame, utils
assert convert_frame.config is config and counters is utils.counters
double = torch._dynamo.optimize("eager")(lambda x: 2 * x)  # As torch.compile() does.
assert double(torch.ones(1)).item() == 2
assert "torch._dynamo.config" in sys.modules
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.Adam([weight])
double(weight).backward()
optimizer.step()
assert weight.item() < 1
"""


def test_a_run_does_not_import_the_compiler_and_whoever_wants_it_gets_it(tmp_path):
    args = ["--env", "CartPole-v1", "--num_actors", "0", "--total_steps", "100"]
    command = [sys.executable, "-c", SCRIPT, *args, "--savedir", tmp_path]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
