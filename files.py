"""Files that no killed process spoils: locks, atomic writes, logs."""

import csv
import fcntl
import io
import os
import pathlib
import platform
import shutil
import tempfile

from command_line import log


class Locked(Exception):
    """Another process holds the lock; the message says which."""


def lock(path):
    """The locked file: the lock goes when it is closed or the process ends, however it
    ends; children do not inherit it. Locked if another process has it, OSError if it
    cannot be opened. A warning where files cannot be locked."""
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
    """A directory that lives as long as stack, a contextlib.ExitStack. Removes those of
    processes that were killed together with all that would have removed them."""
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


def cut_log(path, step):
    """Leaves of logs.csv what was saved: the whole rows up to that step. The updates
    after it, of a run that was killed, are made again. Returns the columns; None if
    there are none, and then the file is empty."""
    with open(path, newline="", errors="replace") as f:
        lines = (line.replace("\0", "") for line in f if len(line) < 4000)
        reader = csv.DictReader(lines, quoting=csv.QUOTE_NONE)
        columns = reader.fieldnames or ()
        rows = [
            row
            for row in reader
            if None not in row.values()
            and row.get("step", "").isdecimal()
            and int(row["step"]) <= step
        ]
    text = io.StringIO(newline="")
    if "step" in columns:
        writer = csv.DictWriter(text, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    elif path.stat().st_size > 0:
        log.warning("%s is written anew: it has no column step", path)
    write_atomically(path, text.getvalue().encode())
    return columns if "step" in columns else None
