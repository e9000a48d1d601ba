"""What all tests share."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile

import pytest
import torch

from tests.programs import ROOT, args, succeeds
from tests.supervisor import supervise_this_process
from torchbeast.machine import core_shares, num_cores, use_only
from torchbeast.process import SIGNALS

# Tests run beside each other: threads that wait for threads are in their way.
torch.set_num_threads(1)
# Programs take what cores there are: each of pytest's workers has its share.
num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
if 2 * num_workers <= num_cores():
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    use_only(core_shares(num_workers, 0)[int(worker)])
# Programs have it as by default, if whoever started the tests used nohup,
signal.signal(signal.SIGHUP, lambda *_: None)
# and Ctrl-C, if the tests were started in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A program that a test starts has a session of its own, which outlives Ctrl-C.
supervise_this_process()


@pytest.fixture(scope="session", autouse=True)
def own_temporary_directory(tmp_path_factory):
    """Tests run beside each other, and look at what their programs leave in it."""
    tmp_path_factory.getbasetemp()  # Stays where it is.
    with tempfile.TemporaryDirectory(prefix="tests-") as path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", path)
            patch.setattr(tempfile, "tempdir", path)
            yield


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """made_once(name, make): a directory that make(path) has filled, for the tests of
    all of pytest's workers to read."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def made_once(name, make):
        path = root / f"made-{name}"
        with open(root / f"made-{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                new = path.with_suffix(".new")
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(new)
                new.mkdir()
                make(new)
                new.rename(path)
        return path

    return made_once


@pytest.fixture
def repository(tmp_path):
    """A copy of the working tree, a repository of its own."""
    copy = tmp_path / "torchbeast"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")
    for name in [*filter(None, names), *(p.name for p in ROOT.glob("_lib*.so"))]:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    subprocess.run(["git", "init", "-q", copy], check=True)
    return copy


@pytest.fixture
def savedir(tmp_path):
    return tmp_path / "logs"


@pytest.fixture
def trained(made_once, request, savedir):
    """A savedir of its own, with run "x" of CartPole, 400 steps, by the program that
    the test is parametrized with (module), else by a serial MonoBeast."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    module = parameters.get("module", "monobeast")
    serial = ("--num_actors", 0) if module == "monobeast" else ()

    def train(path):
        succeeds(*args(module, path, *serial, steps=400), module=module)

    shutil.copytree(made_once(module, train), savedir, symlinks=True)
    return savedir


@pytest.fixture(autouse=True)
def own_handlers_of_signals():
    """A run that a signal ended ignores it while its process ends, which is the next
    test's."""
    before = {s: signal.getsignal(s) for s in SIGNALS}
    yield
    for s, handler in before.items():
        signal.signal(s, handler)
