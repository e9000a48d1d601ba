"""Ends what tests have started when the process of the tests ends, in whatever way.

    python tests/supervisor.py PID MARK

waits for the end of its parent PID, then kills all processes that have MARK in their
environment, or in the name of a piece of memory. No torch in here: it starts at once.
"""

import contextlib
import mmap
import os
import pathlib
import secrets
import select
import signal
import subprocess
import sys
import time

NAME = "TESTS_MARK"
DEADLINE_S = 60  # The system cannot kill what waits for a broken disk.


def supervise_this_process():
    """Marks all that this process starts from now on, and has it end with this
    process. Sessions, process groups and forks change nothing about that."""
    global _supervisor, _memory
    mark = secrets.token_hex(8)
    # A fork has this process's memory. Its environment is the one that this process was
    # started with, without the mark.
    fd = os.memfd_create(mark)
    os.ftruncate(fd, mmap.PAGESIZE)
    _memory = mmap.mmap(fd, mmap.PAGESIZE)
    os.close(fd)
    _supervisor = subprocess.Popen(
        [sys.executable, __file__, str(os.getpid()), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # What ends the tests' process group spares it, and so do other supervisors.
        start_new_session=True,
        env={k: v for k, v in os.environ.items() if k != NAME},
    )
    os.environ[NAME] = mark


def marked(mark, where="environ"):
    """All processes that were started with this text in their environment, but for
    multiprocessing's helpers, which end when those that they help have ended."""
    found = []
    for path in pathlib.Path("/proc").glob(f"[0-9]*/{where}"):
        with contextlib.suppress(OSError):  # It has ended.
            pid = int(path.parent.name)
            if mark.encode() in path.read_bytes() and stat(pid):
                found.append(pid)
    return [pid for pid in found if "resource_tracker" not in cmdline(pid)]


def stat(pid):
    """Fields of /proc/pid/stat from the state on, or None."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields


def cmdline(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def main(pid, mark):
    if os.getppid() == pid:  # Else it has ended already.
        # Not a pipe's end: what the tests fork would keep that open.
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(pid)], [], [])
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        left = marked(mark) + marked(mark, "maps")
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
