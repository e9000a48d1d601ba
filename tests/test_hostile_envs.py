"""Other people's environments, in both programs: each trains, or ends with one line and
the right exit code; and no process is left."""

import functools
import os
import re
import time

import pytest

from tests import hostile_envs
from tests.programs import ROOT, args, both, main, run

PROGRAMS = {
    "monobeast": ("--max_actor_restarts", 3),
    "polybeast": (),
}
# What they do to a process, and exceptions, is not for that of the tests.
ALONE = {"ChangesDirectory", "ConfiguresLogging", "ExitsInConstructor", "RaisesInReset"}


def processes_of(path):
    """The processes, and their command lines, whose environment names the path."""
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                if os.fsencode(path) in f.read():
                    with open(f"/proc/{pid}/cmdline", "rb") as f:
                        found[int(pid)] = f.read().replace(b"\0", b" ")
        except OSError:
            pass  # It has ended.
    # Python's own lives as long as the process of the tests.
    return {pid: x for pid, x in found.items() if b"resource_tracker" not in x}


@pytest.mark.survives(
    "environment-always-fails",
    "environment-exits",
    "environment-starts-processes",
    "environment-changes-process",
    "environment-raises-in-close",
)
@pytest.mark.slow
@both
@pytest.mark.parametrize("env", hostile_envs.ENVIRONMENTS, ids=lambda e: e.__name__)
def test_it_trains_or_is_one_line_and_nothing_is_left(
    module, env, tmp_path, monkeypatch
):
    monkeypatch.setenv("MARK", str(tmp_path))
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
    while (left := processes_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == {}
    if env.__doc__ is None:
        assert result.returncode == 0, result.stderr
        assert "test it: python -m" in result.stderr.splitlines()[-1]
        assert (tmp_path / "logs" / "x" / "model.tar").exists()
        return
    assert result.returncode in (1, 2), result.stderr
    assert re.search(env.__doc__, result.stderr), result.stderr
    if result.returncode == 2:  # Gymnasium may warn of the same before.
        assert "Traceback" not in result.stderr
        assert re.search(env.__doc__, result.stderr.splitlines()[-1])
