"""Environment servers: PolyBeast's environments, on the learner's machine or any other.

    python -m polybeast_env --env PongNoFrameskip-v4 --address 127.0.0.1:50051

Each server is a process, at an address of its own (ports, or names of Unix sockets, are
counted up from the first), and gives each learner that connects a new batch of
environments, which it steps together. csrc/torchbeast.proto says what crosses the
network. Needs neither torch nor a compiler.

E is the number of environments of a stream.
"""

import contextlib
import errno
import math
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent import futures

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import atari_wrappers
import environment
import tls
import torchbeast_pb2 as pb
from command_line import (
    SIGNALS,
    Parser,
    allow_open_files,
    environment_parser,
    handle_signals,
    keep_freed_memory,
    log,
    number,
    setup_logging,
    start_process,
)
from environment import BadInput

PROTOCOL_VERSION = 1
SERVICE = "torchbeast.protocol.EnvironmentServer"
MAX_STREAMS = 64  # Of a server.
MAX_MESSAGE_BYTES = 2**28  # Of a response; the learner takes no more.
MAX_STEP_BYTES = MAX_MESSAGE_BYTES - 2**21  # Beside a Welcome and lengths.
MAX_REQUEST_BYTES = 2**22
MAX_ERROR_CHARACTERS = 4000  # gRPC sends a status in a header of at most 8 KB.
HANDSHAKE_TIMEOUT_S = 10
LOG_EVERY_S = 60


# Flags.


def parser():
    p = Parser(
        prog="polybeast_env",
        description="Environment servers for PolyBeast.",
        parents=[environment_parser(), tls.parser()],
    )
    # fmt: off
    g = p.add_argument_group("servers")
    g.add_argument("--address", default="127.0.0.1:50051", metavar="HOST:PORT",
                   help="of the first server, or unix:PATH; the others count up "
                   "(default: %(default)s)")
    g.add_argument("--num_servers", type=number(int, 1), metavar="N",
                   help="server processes (default: one per core)")
    g.add_argument("--envs_per_server", type=number(int, 1), default=8, metavar="E",
                   help="environments of each stream (default: %(default)s)")
    g.add_argument("--seed", type=number(int, 0, 2**31 - 1), metavar="N",
                   help="of environments (default: the learner's)")
    # fmt: on
    return p


def addresses(first, n):
    """The n addresses that count up from the first. BadInput if it is none."""
    if first.startswith("unix:"):
        path = first.removeprefix("unix:")
        if not path:
            raise BadInput(f"--address {first}: expected unix:PATH")
        return [first] if n == 1 else [f"{first}.{i}" for i in range(n)]
    host, colon, port = first.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) <= 65536 - n):
        raise BadInput(
            f"--address {first}: expected HOST:PORT, PORT from 1 to {65536 - n}, or "
            "unix:PATH"
        )
    return [f"{host}:{int(port) + i}" for i in range(n)]


# The environment.


def create_env(flags, num_envs, render_mode=None):
    """num_envs environments. To use another environment, edit this function."""
    if atari_wrappers.is_atari(flags.env):
        options = {
            "sticky_actions": flags.sticky_actions,
            "full_action_space": flags.full_action_space,
            "terminal_on_life_loss": flags.terminal_on_life_loss,
        }
        if render_mode is not None:
            env = atari_wrappers.make_single(
                flags.env, render_mode=render_mode, **options
            )
        else:
            env = atari_wrappers.make_vector(flags.env, num_envs, **options)
    else:
        env = environment.make(flags.env, num_envs, render_mode)
    return environment.Environment(env)


# Messages.


def encode_structure(nest):
    if isinstance(nest, dict):
        children = map(encode_structure, nest.values())
        return pb.Structure(kind=pb.Structure.DICT, keys=nest, children=children)
    if isinstance(nest, (tuple, list)):
        kind = pb.Structure.TUPLE if isinstance(nest, tuple) else pb.Structure.LIST
        return pb.Structure(kind=kind, children=map(encode_structure, nest))
    return pb.Structure(kind=pb.Structure.LEAF)


DTYPE_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}  # DLPack's.


def encode_spec(nest):
    """The Spec of a nest of arrays. ValueError for arrays that cannot be sent."""
    arrays = []
    size = 0
    for path, x in environment.leaves(nest):
        x = np.asarray(x)
        if x.dtype.kind not in DTYPE_CODES or not x.dtype.isnative or x.ndim > 7:
            raise ValueError(
                f"{path} is {x.dtype} {list(x.shape)}, expected numbers or bool, of at "
                "most 7 dimensions, in this machine's byte order"
            )
        code = DTYPE_CODES[x.dtype.kind]
        arrays.append(pb.ArraySpec(code=code, bits=8 * x.itemsize, shape=x.shape))
        size += x.nbytes
    if size > MAX_STEP_BYTES:
        raise ValueError(
            f"a step has {size} bytes, expected at most {MAX_STEP_BYTES}: take smaller "
            "--envs_per_server"
        )
    return pb.Spec(structure=encode_structure(nest), arrays=arrays)


def encode_step(step):
    """A serialised Response with these arrays. (protobuf gives the same bytes, but
    copies every array three times more.)"""
    arrays = []
    for _, x in environment.leaves(step):
        x = np.asarray(x).reshape(-1).view(np.uint8)
        arrays += [prefix(pb.Arrays.DATA_FIELD_NUMBER, len(x)), x]
    size = sum(map(len, arrays))
    return b"".join([prefix(pb.Response.STEP_FIELD_NUMBER, size), *arrays])


def prefix(field, size):
    """Of a field of so many bytes in a serialised message."""
    result = bytearray([field << 3 | 2])
    while size > 127:
        result.append(size & 127 | 128)
        size >>= 7
    result.append(size)
    return result


# A server.


class EnvironmentServer:
    """Answers the streams of one server process."""

    def __init__(self, flags):
        self.flags = flags
        self._lock = threading.Lock()
        self._num_streams = 0  # Guarded by _lock.

    def handler(self):
        """What a grpc.Server is given."""
        stream = grpc.stream_stream_rpc_method_handler(
            self.stream,
            # stream() parses requests, and yields serialised responses.
            request_deserializer=None,
            response_serializer=None,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Stream": stream})

    def stream(self, requests, context):
        """One stream: a batch of environments of its own, from Hello to the end.

        requests: bytes."""
        peer = context.peer()
        if peer.startswith("unix:"):  # All that gRPC knows of it.
            peer = "learner on this host"
        with self._lock:
            full = self._num_streams >= MAX_STREAMS
            self._num_streams += not full
        if full:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"this server has {MAX_STREAMS} streams already",
            )
        env = None
        stats = Statistics(peer)
        try:
            hello = self._parse(next(requests, b"")).hello
            if hello.version != PROTOCOL_VERSION:
                raise Refused(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"the learner speaks version {hello.version} of the protocol, this "
                    f"server version {PROTOCOL_VERSION}",
                )
            log.info("%s: connected", peer)
            with environment.watched():
                env = create_env(self.flags, self.flags.envs_per_server)
            seed = hello.seed if self.flags.seed is None else self.flags.seed
            step = env.initial(seed % 2**30)  # Every environment takes these, and + E.
            welcome = pb.Response(welcome=self._welcome(env, step))
            # Serialised messages one after the other are one message.
            yield welcome.SerializeToString() + encode_step(step)
            shape = (env.num_envs, *env.action_shape)
            for request in requests:
                action = self._action(self._parse(request), shape, env.num_actions)
                step = env.step(action)
                stats.add(step)
                yield encode_step(step)
        except GeneratorExit:  # The learner is gone.
            raise
        except Exception as e:
            if not context.is_active():
                return  # The learner is gone, which interrupts next(requests).
            if isinstance(e, Refused):
                code, text = e.args
            else:
                code, text = grpc.StatusCode.INTERNAL, traceback.format_exc()
            log.error("%s: %s", peer, text)
            context.abort(code, text[-MAX_ERROR_CHARACTERS:])
        finally:
            with self._lock:
                self._num_streams -= 1
            if env is not None:
                env.close()
            stats.log("disconnected after ")

    def _welcome(self, env, step):
        action = np.zeros((env.num_envs, *env.action_shape), np.int64)
        return pb.Welcome(
            version=PROTOCOL_VERSION,
            observation_space=str(env.observation_space),
            action_space=str(env.action_space),
            num_envs=env.num_envs,
            step=encode_spec(step),
            action=encode_spec(action),
        )

    def _parse(self, request):
        try:
            return pb.Request.FromString(request)
        except DecodeError:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                "the learner sent a message that cannot be parsed",
            ) from None

    def _action(self, request, shape, num_actions):
        """The action [E, ...] int64 of a request. Refused if there is none in it."""
        data = request.action.data
        size = 8 * math.prod(shape)
        if len(data) != 1 or len(data[0]) != size:
            got = f"{len(data[0])} bytes" if len(data) == 1 else f"{len(data)} arrays"
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the action has {got}, expected {size} bytes: int64 {list(shape)}",
            )
        action = np.frombuffer(data[0], np.dtype("<i8")).reshape(shape)
        if action.min() < 0 or not (action < num_actions).all():
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the action {action.tolist()} is out of bounds, expected 0 to less "
                f"than {list(num_actions)}",
            )
        return action


class Refused(Exception):
    """The learner's mistake: (grpc.StatusCode, message)."""


class Statistics:
    """Logs what a stream did, once a minute and at its end."""

    def __init__(self, peer):
        self.peer = peer
        self.start = self.logged_at = time.monotonic()
        self.steps = self.episodes = 0
        self.total_return = 0.0

    def add(self, step):
        self.steps += len(step["reward"])
        end = step["episode_end"]
        if end.any():
            self.episodes += int(end.sum())
            self.total_return += float(step["episode_return"][end].sum())
        if time.monotonic() - self.logged_at > LOG_EVERY_S:
            self.log()

    def log(self, what=""):
        self.logged_at = time.monotonic()
        rate = self.steps / max(1e-9, self.logged_at - self.start)
        text = f"{what}{self.steps:,} steps, {rate:,.0f} steps/s, "
        text += f"{self.episodes} episodes"
        if self.episodes:
            text += f", mean return {self.total_return / self.episodes:.2f}"
        log.info("%s: %s", self.peer, text)


def add_port(server, address, flags):
    """BadInput if it cannot serve there."""
    try:
        if flags.tls_cert is None or address.startswith("unix:"):
            server.add_insecure_port(address)
        else:
            pem = tls.load(flags, "server")
            key_and_cert = pem["tls_key"], pem["tls_cert"]
            credentials = grpc.ssl_server_credentials(
                [key_and_cert], pem["tls_ca"], require_client_auth=True
            )
            server.add_secure_port(address, credentials)
    except RuntimeError as e:
        raise BadInput(f"cannot serve at {address}: {why_not_free(address)}") from e


def why_not_free(address):
    """What the system says; gRPC does not."""
    try:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            with socket.socket(socket.AF_UNIX) as s:
                s.bind(path)
            os.unlink(path)
        else:
            host, _, port = address.rpartition(":")
            where = socket.getaddrinfo(host.strip("[]"), int(port))
            family, _, _, _, name = where[0]
            with socket.socket(family, socket.SOCK_STREAM) as s:
                s.bind(name)
    except (OSError, UnicodeError) as e:  # UnicodeError: no name of a host.
        return getattr(e, "strerror", None) or str(e)
    return "is it in use?"


def serve(flags, address, directory, parent):
    """Server process. Serves at the address until its parent closes the other end of
    the connection, or is gone; then removes the directory. Signals are the parent's to
    handle."""
    for s in SIGNALS:
        signal.signal(s, signal.SIG_IGN)
    setup_logging()
    keep_freed_memory()
    environment.watch(f"{flags.env} at {address}", flags.env_timeout_seconds, log.error)
    pool = futures.ThreadPoolExecutor(MAX_STREAMS + 8)  # And some for health checks.
    server = grpc.server(
        pool,
        options=[
            ("grpc.so_reuseport", 0),  # Two servers at one address are a mistake.
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # No compression: a few bytes could become any number of them.
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.per_message_decompression", 0),
            ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_TIMEOUT_S),
            # Learner and server ask each other every 10 s: one that is gone without
            # a word, as when its host's power fails, is noticed after half a minute.
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ],
    )
    server.add_generic_rpc_handlers([EnvironmentServer(flags).handler()])
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    try:
        add_port(server, address, flags)
    except BadInput as e:
        with contextlib.suppress(OSError):
            parent.send(str(e))
        sys.exit(2)
    server.start()
    for service in ("", SERVICE):
        checks.set(service, health_pb2.HealthCheckResponse.SERVING)
    with contextlib.suppress(OSError, EOFError):
        parent.send(None)
        parent.recv()
    checks.enter_graceful_shutdown()
    server.stop(grace=1).wait()
    if directory is not None:  # The parent may not have come to it.
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # Streams that are in an environment's step do not hold this up.


# The servers of this host.


@contextlib.contextmanager
def main_module_hidden():
    """multiprocessing does not find it, so processes that are started within do not
    import polybeast, and with it PyTorch: two seconds and 180 MB for each server."""
    if __name__ == "__main__":  # It is this one, which they do need.
        yield
        return
    main = vars(sys.modules["__main__"])
    hidden = {name: main.pop(name) for name in ("__spec__", "__file__") if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(hidden)


class Server:
    """One supervised server process."""

    def __init__(self, flags, address, directory):
        self.flags = flags
        self.address = address
        self.directory = directory
        self.restarts = 0
        self.start()

    def start(self):
        """OSError if the machine has too many processes or open files."""
        self.started_at = time.monotonic()
        self.served = False  # Its socket was there.
        if self.directory is not None:  # Some systems tidy up.
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            if os.lstat(self.directory).st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "its directory is of somebody else")
        context = multiprocessing.get_context("spawn")
        connection, child = context.Pipe()
        process = context.Process(
            target=serve,
            args=(self.flags, self.address, self.directory, child),
            name=self.address,
        )
        with main_module_hidden():
            start_process(process)
        child.close()
        self.process, self.connection = process, connection

    def wait_until_ready(self):
        """BadInput if it cannot serve there."""
        try:
            message = self.connection.recv()
        except EOFError:
            message = f"the server at {self.address} ended while it started"
        if message is not None:
            raise BadInput(message)

    def restart_if_ended(self):
        if self.process.is_alive():
            there = os.path.exists(self.address.removeprefix("unix:"))
            self.served = self.served or there
            if there or not self.served or self.directory is None:
                return
            self.process.kill()  # Nobody can connect to it any more.
            self.process.join()
        ran_s = time.monotonic() - self.started_at
        wait_s = min(30, 2 ** min(self.restarts, 5)) if ran_s < 60 else 0
        if ran_s < wait_s:
            return
        self.restarts += 1
        code, outcome = self.process.exitcode, "started again"
        try:
            self.start()
        except OSError as e:
            outcome = f"cannot be started again: {e.strerror}"
        log.error("server at %s ended (exit code %s), %s", self.address, code, outcome)

    def stop(self):
        self.connection.close()  # Which ends it.

    def join(self, timeout_s=10):
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Servers:
    """All servers of one program: with Servers() as servers: servers.start(...)."""

    def __init__(self):
        self._servers = []

    def start(self, flags, addresses, directory=None):
        """Returns when all of them serve. BadInput if one cannot.

        directory: of their sockets, theirs to remove when this process is gone.
        """
        for address in addresses:
            try:
                self._servers.append(Server(flags, address, directory))
            except OSError as e:
                message = f"the server at {address} cannot be started: {e.strerror}"
                raise BadInput(message) from e
        for server in self._servers:
            server.wait_until_ready()

    def restart_ended(self):
        for server in self._servers:
            server.restart_if_ended()

    def kill(self):
        """At once, from a signal handler."""
        for server in self._servers:
            server.process.kill()
            if server.directory is not None:
                shutil.rmtree(server.directory, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for server in self._servers:
            server.stop()
        for server in self._servers:
            server.join()


def run(flags):
    """Serves until a signal. Returns the exit code."""
    if flags.num_servers is None:
        flags.num_servers = len(os.sched_getaffinity(0))
    all_addresses = addresses(flags.address, flags.num_servers)
    tls.check(flags, all_addresses)
    tls.load(flags, "server")
    allow_open_files(max(4 * flags.num_servers, MAX_STREAMS))
    create_env(flags, flags.envs_per_server).close()  # BadInput here, not in a process.
    received = []
    handle_signals(lambda signum, _: received.append(signum))
    if flags.insecure:
        log.warning(tls.INSECURE)
    with Servers() as servers:
        servers.start(flags, all_addresses)
        log.info(
            "%s: %d environments for each stream at %s",
            flags.env,
            flags.envs_per_server,
            ", ".join(all_addresses),
        )
        while not received:
            time.sleep(0.2)
            servers.restart_ended()
    log.info("stopped by %s", signal.Signals(received[0]).name)
    return 128 + received[0]


def main(argv=None):
    p = parser()
    flags = p.parse_args(argv)
    setup_logging()
    try:
        return run(flags)
    except BadInput as e:
        p.error(str(e))
    except KeyboardInterrupt:  # Before run() deals with signals.
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
