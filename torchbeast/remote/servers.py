"""The environment servers of this host: processes that are started, watched, ended.

No torch in here.
"""

import argparse
import contextlib
import errno
import os
import subprocess
import time

from torchbeast import files
from torchbeast.messages import BadInput, Stop, log
from torchbeast.process import (
    START_S,
    Signals,
    kill_group,
    signals_blocked,
    start_python,
)
from torchbeast.remote.addresses import count_up

MAX_FAILURES = 5
END_S = 20  # A server's time to close its environments, as long as that gets further.


def name_of(address, module):
    """Returns what messages call a process."""
    what = {"server": "server at", "dialer": "process that dials"}[module]
    return f"{what} {address}"


class Server:
    """One supervised server process."""

    def __init__(self, create_env, flags, address, directory, module):
        self.create_env = create_env
        self.flags = flags
        self.address = address
        self.directory = directory
        self.module = module
        self.name = name_of(address, module)
        self.failures = 0
        self.num_rollouts = 0
        self.start()

    def start(self):
        """Starts the process. Raises OSError if the machine has too many processes or
        open files."""
        self.started_at = time.monotonic()
        self.ready = False  # It has said that it serves, or dials.
        self.served = False  # Its socket was there.
        if self.directory is not None:  # Some systems tidy up.
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            if os.lstat(self.directory).st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "its directory is of somebody else")
        with signals_blocked():  # They are this process's to act on.
            self.process, self.connection = start_python(
                f"torchbeast.remote.{self.module}",
                f"The {self.name}.",
                # Our messages do. And gRPC's handlers of forks, half of which are on by
                # default, abort a process in which two environments fork at once.
                env={
                    "GRPC_VERBOSITY": "NONE",
                    **os.environ,
                    "GRPC_ENABLE_FORK_SUPPORT": "0",
                },
            )
        self.swept = False
        with contextlib.suppress(OSError):  # It ended: wait_until_ready() says so.
            self.connection.send(
                (self.create_env, self.flags, self.address, self.directory)
            )

    def wait_until_ready(self):
        """Waits until the server serves, or until a signal has come: a run that has
        begun ends in order. Raises BadInput if the server cannot serve."""
        try:
            while not self.connection.poll(0.2):
                if Signals.current is not None and Signals.current.received:
                    return
                if self.is_late():
                    raise BadInput(
                        f"the {self.name} did not start within {self.limit_s:g} s: if "
                        "that is too little, use a larger --env_timeout_seconds"
                    )
            message = self.connection.recv()
        except (EOFError, OSError):
            message = f"the {self.name} ended while it started"
        if message is not None:
            raise BadInput(message)
        self.ready = True

    def is_late(self):
        """Tells whether the process hangs while it starts. Once it is ready, it watches
        its environments itself."""
        return not self.ready and time.monotonic() - self.started_at > self.limit_s

    @property
    def limit_s(self):
        return max(START_S, self.flags.env_timeout_seconds)

    def restart_if_ended(self, num_rollouts):
        """Starts the process again if it has ended, after waits that grow as long as it
        fails.

        num_rollouts: that a learner got from it so far, None without one. Raises Stop
        if it has failed MAX_FAILURES times and there were no more of them, BadInput if
        the process says that it cannot go on.
        """
        with contextlib.suppress(OSError, EOFError):  # It has ended.
            # A server that cannot start again says so, too, and is tried again.
            while self.connection.poll():
                message = self.connection.recv()
                self.ready = self.ready or message is None
                if message is not None and self.module == "dialer":
                    raise BadInput(message)
        if num_rollouts is not None and num_rollouts > self.num_rollouts:
            self.num_rollouts = num_rollouts
            self.failures = 0
        if self.process.poll() is None:
            there = os.path.exists(self.address.removeprefix("unix:"))
            self.served = self.served or there
            if self.is_late():
                log.error("%s did not start within %g s", self.name, self.limit_s)
            elif there or not self.served or self.directory is None:
                return
            kill_group(self.process)  # Nobody can connect to it, or not any more.
            self.process.wait()
        if not self.swept:
            kill_group(self.process)  # What it started, too.
            self.swept = True
        code, outcome = self.process.returncode, "started again"
        if num_rollouts is not None and self.failures == MAX_FAILURES:
            raise Stop(
                f"the {self.name} ended after {MAX_FAILURES} restarts "
                f"without a rollout (exit code {code})"
            )
        ran_s = time.monotonic() - self.started_at
        if ran_s > 60 and num_rollouts is None:
            self.failures = 0
        if ran_s < min(30, 2**self.failures):
            return
        self.failures = min(self.failures + 1, MAX_FAILURES)
        try:
            self.start()
        except OSError as e:
            outcome = f"cannot be started again: {e.strerror}"
        log.error("%s ended (exit code %s), %s", self.name, code, outcome)

    def stop(self):
        self.connection.close()  # Which ends it.

    def join(self, deadline):
        """Waits for its end until time.monotonic() is deadline, then kills it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0, deadline - time.monotonic()))
        self.kill()
        self.process.wait()

    def kill(self):
        """Kills the process and all that it started. Not once more, long after: the
        number of its process group may be another's by then."""
        if not self.swept:
            kill_group(self.process)


class Servers:
    """The server processes of one program.

        with Servers(create_env) as servers:
            servers.start(flags, addresses)

    create_env(flags, num_envs): a function that server processes can import.
    module: "server", or "dialer" for processes that dial the learners at the addresses.
    """

    def __init__(self, create_env, module="server"):
        self._create_env = create_env
        self._module = module
        self._servers = []
        self._stack = contextlib.ExitStack()

    def start_here(self, flags):
        """Starts --num_servers servers for this program alone. Returns their addresses,
        Unix sockets in a temporary directory."""
        directory = files.socket_directory(self._stack)
        addresses = count_up(f"unix:{directory}/server", flags.num_servers)
        # The learner seeds its streams.
        flags = argparse.Namespace(**{**vars(flags), "seed": None})
        self.start(flags, addresses, directory)
        return addresses

    def start(self, flags, addresses, directory=None):
        """Starts a server at each address. Returns when all of them serve. Raises
        BadInput if one of them cannot.

        directory: that of their sockets, which they remove when this process is gone.
        """
        for address in addresses:
            try:
                server = Server(
                    self._create_env, flags, address, directory, self._module
                )
                self._servers.append(server)
            except OSError as e:
                name = name_of(address, self._module)
                message = f"the {name} cannot be started: {e.strerror}"
                raise BadInput(message) from e
        for server in self._servers:
            server.wait_until_ready()

    def restart_ended(self, num_rollouts=None):
        """Starts servers again that have ended. To be called every second or so.

        num_rollouts: {address: number of rollouts so far}, which a learner has. Raises
        Stop if a server goes on failing without any.
        """
        for server in self._servers:
            number = None if num_rollouts is None else num_rollouts[server.address]
            server.restart_if_ended(number)

    def kill(self):
        """Kills the servers at once. A signal handler may call it."""
        for server in self._servers:
            server.kill()
            if server.directory is not None:
                files.remove_sockets(server.directory)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self._stack:  # The directory goes last.
            for server in self._servers:
                server.stop()
            deadline = time.monotonic() + END_S
            for server in self._servers:
                server.join(deadline)
