"""Other people's environments, in both programs: each trains, or ends with one line and
the right exit code; and no process is left."""

import functools
import os
import re
import time

import pytest

from tests import hostile_envs
from tests.programs import ROOT, args, cmdline, main, marked, run
from torchbeast.remote import servers

PROGRAMS = {
    "monobeast": ("--max_actor_restarts", 3),
    "polybeast": (),
}
# What they do to a process, and exceptions, is not for that of the tests.
ALONE = {"ChangesDirectory", "ConfiguresLogging", "ExitsInConstructor", "RaisesInReset"}
ALONE |= {"LeavesAThread", "LeavesATimer", "ComputesInDoubles"}
# CI tests one in four environments in each program, make test-long the rest.
CASES = [
    pytest.param(
        env,
        module,
        marks=pytest.mark.slow if (i + j) % 4 == 2 else pytest.mark.long,
        id=f"{env.__name__}-{module}",
    )
    for i, env in enumerate(hostile_envs.ENVIRONMENTS)
    for j, module in enumerate(PROGRAMS)
]


@pytest.mark.survives(
    "environment-always-fails",
    "environment-exits",
    "environment-starts-processes",
    "environment-changes-process",
    "environment-raises-in-close",
)
@pytest.mark.parametrize(("env", "module"), CASES)
def test_it_trains_or_is_one_line_and_nothing_is_left(
    env, module, tmp_path, monkeypatch
):
    monkeypatch.setenv("MARK", str(tmp_path))
    monkeypatch.setattr(servers, "MAX_FAILURES", 2)  # Waits 3 s, not 31.
    env_id = f"tests.hostile_envs:{env.__name__}-v0"
    start = main
    savedir = tmp_path / "logs"
    if env.__name__ in ALONE:
        python_path = {**os.environ, "PYTHONPATH": str(ROOT)}
        start = functools.partial(run, cwd=tmp_path, env=python_path)
        savedir = "logs"  # Where it was started, whatever the environment does.
    flags = args(module, savedir, *PROGRAMS[module], env=env_id, steps=800)
    result = start(*flags, module=module)
    deadline = time.monotonic() + 20  # The killed take their time on a busy machine.
    while (left := marked(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, [cmdline(pid) for pid in left]
    if env.__doc__ is None:
        assert result.returncode == 0, result.stderr
        last = result.stderr.splitlines()[-2:]  # Behind it, what was left behind.
        assert any("test it: python -m" in line for line in last)
        assert (tmp_path / "logs" / "x" / "model.tar").exists()
        return
    assert result.returncode in (1, 2), result.stderr
    assert re.search(env.__doc__, result.stderr), result.stderr
    if result.returncode == 2:  # Gymnasium may warn of the same before.
        assert "Traceback" not in result.stderr
        assert len(re.findall(env.__doc__, result.stderr)) == 1 or re.search(
            env.__doc__, result.stderr.splitlines()[-1]
        )
