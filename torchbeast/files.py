"""Files that no killed process spoils: locks, atomic writes, links."""

import contextlib
import fcntl
import os
import pathlib
import platform
import secrets
import stat
import tempfile

from torchbeast.messages import log


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
    os.register_at_fork(after_in_child=file.close)  # Else a fork holds the lock, too.
    return file


@contextlib.contextmanager
def locked_directory(path):
    """A context that one process at a time enters, and threads one at a time. Where a
    directory cannot be locked, any number do."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # Some network file systems.
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


# Not that of a run's name: a run's directory has a `lock`, too.
SOCKETS = "torchbeast_sockets-"


def socket_directory(stack):
    """Makes a directory for Unix sockets, which lives as long as stack, a
    contextlib.ExitStack. Returns its path.

    Removes such directories of killed processes, whose locks nobody holds.
    """
    for path in pathlib.Path(tempfile.gettempdir()).glob(f"{SOCKETS}*/lock"):
        with contextlib.suppress(OSError):  # In use, or just removed.
            if _is_own(path.parent):
                with open(path) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_sockets(path.parent)
    directory = tempfile.mkdtemp(prefix=SOCKETS)
    stack.callback(remove_sockets, directory)
    # Under another name until it is locked, lest it be removed.
    new = pathlib.Path(directory, "lock.new")
    stack.enter_context(lock(new))
    new.rename(new.with_name("lock"))
    return directory


def remove_sockets(directory):
    """Removes a directory of this user's that holds nothing but Unix sockets and a
    lock. Leaves any other directory as it is, with all that is in it."""
    directory = pathlib.Path(directory)
    with contextlib.suppress(OSError):  # Another process removes it, too.
        paths = list(directory.iterdir())
        ours = ("lock", "lock.new")
        if _is_own(directory) and all(
            p.name in ours or stat.S_ISSOCK(p.lstat().st_mode) for p in paths
        ):
            for path in paths:
                path.unlink(missing_ok=True)
            directory.rmdir()


def _is_own(directory):
    """Tells whether a path is a directory, and no link to one, of this user."""
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def write_atomically(path, *data):
    """Writes these bytes, one after the other, to the file or, where that fails, leaves
    what was there before."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            f.writelines(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def link(path, name):
    """Has a link of this name, beside the path, lead to it."""
    where = path.with_name(name)
    new = path.with_name(f".{name}-{secrets.token_hex(4)}")
    ours = where.is_symlink() and "/" not in os.readlink(where)
    if os.path.lexists(where) and not ours:
        log.warning("no link %s: something else is there", where)
        return
    try:
        new.symlink_to(path.name)
        os.replace(new, where)
    except OSError as e:  # No symlinks here, or it is another user's.
        new.unlink(missing_ok=True)
        log.warning("no link %s: %s", where, e.strerror)
