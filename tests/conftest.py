"""What all tests share."""

import signal
import tempfile

import pytest
import torch

# Tests run beside each other: threads that wait for threads are in their way.
torch.set_num_threads(1)
# Programs have it as by default, if whoever started the tests used nohup.
signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def own_temporary_directory(tmp_path_factory):
    """Tests run beside each other, and look at what their programs leave in it."""
    tmp_path_factory.getbasetemp()  # Stays where it is.
    with tempfile.TemporaryDirectory(prefix="tests-") as path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", path)
            patch.setattr(tempfile, "tempdir", path)
            yield
