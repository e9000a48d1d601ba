"""Addresses of servers and learners: HOST:PORT or unix:PATH.

No torch in here: environment servers import this file.
"""

import contextlib
import errno
import os
import pathlib
import re
import socket
import stat

from torchbeast.messages import BadInput

# What an address answers that is of the other kind.
NOT_A_LEARNER = "this is an environment server, expected a learner (--listen)"
NO_SERVER = "this is a learner (--listen), expected an environment server"  # listener.h


def parse(text):
    """Returns the addresses in a text: one a line, or several between commas; # begins
    a comment. Raises BadInput if one of them is not an address."""
    lines = [line.partition("#")[0] for line in text.splitlines()]
    found = [a.strip() for a in ",".join(lines).split(",") if a.strip()]
    for address in found:
        port = re.fullmatch(r"unix:.+|\S+:([0-9]{1,5})", address)
        if not port or not 0 < int(port[1] or 1) < 65536:
            raise BadInput(f"{address!r}: expected HOST:PORT or unix:PATH")
    return found


def read(text):
    """Returns the addresses HOST:PORT,..., or those in a file, @FILE. Raises OSError or
    ValueError if there are none."""
    if text.startswith("@"):
        path = pathlib.Path(text[1:])
        if path.exists() and not path.is_file():  # A pipe would be waited for.
            raise ValueError("expected a file")
        text = path.read_text(encoding="utf-8-sig")
    if found := parse(text):
        return found
    raise ValueError("no address, expected HOST:PORT,...")


def of_flag(flag, text, check):
    """Returns check(read(text)). What that raises becomes BadInput with the flag."""
    file = f" {text}" if text.startswith("@") else ""
    try:
        return check(read(text))
    except (OSError, ValueError) as e:
        raise BadInput(f"{flag}{file}: {reason(e)}") from e


def reason(error):
    """Returns what the system says of an error, or else its message."""
    return getattr(error, "strerror", None) or str(error)


def count_up(first, n, flag="--address"):
    """Returns the n addresses that count up from the first. Raises BadInput if the
    first, which is a flag's, is not an address."""
    if first.startswith("unix:"):
        path = first.removeprefix("unix:")
        if not path:
            raise BadInput(f"{flag} {first}: expected unix:PATH")
        return [first] if n == 1 else [f"{first}.{i}" for i in range(n)]
    host, colon, port = first.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) <= 65536 - n):
        raise BadInput(
            f"{flag} {first}: expected HOST:PORT, PORT from 1 to {65536 - n}, or "
            "unix:PATH"
        )
    return [f"{host}:{int(port) + i}" for i in range(n)]


def why_not_free(address):
    """Returns the system's reason why an address cannot be listened at, which gRPC
    hides, or None. Removes a Unix socket at which nobody listens any more."""
    try:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            with socket.socket(socket.AF_UNIX) as s:
                s.settimeout(1)  # Whoever listens may never accept.
                with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
                    with contextlib.suppress(TimeoutError, BlockingIOError):
                        s.connect(path)
                    return os.strerror(errno.EADDRINUSE)
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISSOCK(os.stat(path).st_mode):
                        os.unlink(path)  # A process left it that was killed.
            with socket.socket(socket.AF_UNIX) as s:
                s.bind(path)
            os.unlink(path)
        else:
            host, _, port = address.rpartition(":")
            where = socket.getaddrinfo(host.strip("[]"), int(port))
            family, _, _, _, name = where[0]
            with socket.socket(family, socket.SOCK_STREAM) as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As gRPC.
                s.bind(name)
    except (OSError, UnicodeError) as e:  # UnicodeError: no name of a host.
        return reason(e)
    return None
