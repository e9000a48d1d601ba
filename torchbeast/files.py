"""Files that no killed process spoils: locks, atomic writes, logs."""

import csv
import fcntl
import io
import os
import pathlib
import platform
import shutil
import tempfile

from torchbeast.process import log


class Locked(Exception):
    """Another process holds the lock. The message names that process."""


def lock(path):
    """Locks the file at path and returns it.

    The lock goes when the file is closed or the process ends, in whatever way; children
    do not inherit it. Raises Locked if another process has the lock, OSError if the
    file cannot be opened. Logs a warning where the file system has no locks.
    """
    file = open(path, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).strip() or "another process"
        file.close()
        raise Locked(holder) from None
    except OSError as e:  # Some network file systems.
        log.warning("%s: not locked: %s", path, e.strerror)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    return file


def temporary_directory(stack):
    """Makes a directory that lives as long as stack, a contextlib.ExitStack. Removes
    directories of processes that were killed together with all that would have removed
    them."""
    for path in pathlib.Path(tempfile.gettempdir()).glob("torchbeast-*/lock"):
        try:
            if path.parent.lstat().st_uid == os.getuid():
                with open(path) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent)
        except OSError:
            pass  # In use, or just removed.
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchbeast-"))
    # Under another name until it is locked, lest it be removed.
    new = pathlib.Path(directory, "lock.new")
    stack.enter_context(lock(new))
    new.rename(new.with_name("lock"))
    return directory


def write_atomically(path, data):
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def cut_log(path, step, new_columns=()):
    """Cuts logs.csv back to the whole rows up to a step, and adds columns that are
    empty in these rows. Returns the columns.

    Rows after that step are of a run that was killed: their updates are made again.
    """
    with open(path, newline="", errors="replace") as f:
        lines = (line.replace("\0", "") for line in f if len(line) < 100_000)
        reader = csv.DictReader(lines, quoting=csv.QUOTE_NONE)
        columns = list(reader.fieldnames or ())
        rows = [
            row
            for row in reader
            if None not in row.values()
            and row.get("step", "").isdecimal()
            and int(row["step"]) <= step
        ]
    if "step" not in columns:
        if path.stat().st_size > 0:
            log.warning("%s is written anew: it has no column step", path)
        columns, rows = [], []
    columns += new_columns
    text = io.StringIO(newline="")
    if columns:
        writer = csv.DictWriter(text, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())
    return columns
