"""One environment server: a process that steps environments for learners.

It makes new environments, stepped together, for each learner that connects.
torchbeast/remote/servers.py starts such processes. No torch in here.

E is the number of environments of a stream.
"""

import contextlib
import itertools
import sys
import threading
import time
import traceback
from concurrent import futures

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from torchbeast import calls
from torchbeast.environment import with_arguments
from torchbeast.files import remove_sockets
from torchbeast.messages import BadInput, Repeated, Throttle, log, setup_logging
from torchbeast.process import keep_freed_memory, lead_group
from torchbeast.remote import tls
from torchbeast.remote import torchbeast_pb2 as pb
from torchbeast.remote.addresses import NOT_A_LEARNER, why_not_free
from torchbeast.remote.protocol import (
    LEARNER_SERVICE,
    OPTIONS,
    PROTOCOL_VERSION,
    SERVICE,
    encode_spec,
    encode_step,
)
from torchbeast.seeds import derive_seed

MAX_STREAMS = 64  # A server has no more.
SPARE_THREADS = 8  # For health checks.
MAX_ERROR_BYTES = 4000  # gRPC sends a status in a header of at most 8 KB.
MAX_CONNECTIONS = 2 * MAX_STREAMS  # A stream has one; others are in a handshake.
HANDSHAKE_TIMEOUT_S = 5
HELLO_TIMEOUT_S = 10
LOG_EVERY_S = 60


class EnvironmentServer:
    """Answers the streams of one server process."""

    def __init__(self, create_env, flags):
        self.create_env = create_env
        self.flags = flags
        self.num_streams = 0  # Guarded by _lock.
        self._lock = threading.Lock()
        self._tracebacks = Repeated()
        self._throttle = Throttle()  # Lines about what learners did wrong.
        self._visits = Throttle()  # Lines about their coming and going.

    def handlers(self):
        """Returns what a grpc.Server is given: for learners, and for hosts that take it
        for a learner."""

        def wrong_end(requests, context):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, NOT_A_LEARNER)

        # Requests and responses are bytes: stream() parses and serialises them.
        streams = {SERVICE: self.stream, LEARNER_SERVICE: wrong_end}
        return [
            grpc.method_handlers_generic_handler(
                service, {"Stream": grpc.stream_stream_rpc_method_handler(stream)}
            )
            for service, stream in streams.items()
        ]

    def stream(self, requests, context):
        """Answers one stream, from Hello to the end, with environments of its own.

        requests: an iterator of bytes. Yields bytes.
        """
        peer = context.peer()
        if peer.startswith("unix:"):  # All that gRPC knows of it.
            peer = "learner on this host"
        with self._lock:
            full = self.num_streams >= MAX_STREAMS
            self.num_streams += not full
        if full:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"this server has {MAX_STREAMS} streams already",
            )

        def hang_up():
            self._log(peer, f"said no Hello within {HELLO_TIMEOUT_S} s")
            context.cancel()

        try:
            requests = within(HELLO_TIMEOUT_S, requests, hang_up)
            yield from converse(self.create_env, self.flags, requests, peer, self._tell)
        except GeneratorExit:  # The learner is gone.
            raise
        except BaseException as e:  # KeyboardInterrupt of an environment, too.
            if not context.is_active():
                return  # The learner is gone, which interrupts next(requests).
            if isinstance(e, Refused):
                code, text = e.args
                self._log(peer, text)
            else:
                code, text = grpc.StatusCode.INTERNAL, traceback.format_exc()
                shorter = self._tracebacks.shorten(text)
                if shorter == text:
                    log.error("%s: %s", peer, text)
                else:
                    self._log(peer, shorter)
            context.abort(code, end_of(text))
        finally:
            with self._lock:
                self.num_streams -= 1

    def _log(self, peer, text):
        """Logs what a learner did wrong."""
        with self._lock:
            number, due = self._throttle.count(peer.rpartition(":")[0], text)
        if due:
            log.error("%s: %s (%d so far)", peer, text, number)

    def _tell(self, peer, text):
        """Logs that a learner comes or goes."""
        with self._lock:
            _, due = self._visits.count(peer.rpartition(":")[0], text)
        if due:
            tell(peer, text)


def end_of(text):
    """Returns as much of a text as a status may have: of its last line the beginning,
    and of what is before the end."""

    def num_bytes(c):  # As gRPC encodes it.
        return 1 if " " <= c <= "~" and c != "%" else 3 * len(c.encode())

    def fitting(text, room):
        totals = itertools.accumulate(map(num_bytes, text))
        return "".join(c for c, total in zip(text, totals) if total <= room)

    text = text.encode(errors="replace").decode().rstrip()
    before, newline, last = text.rpartition("\n")
    last = fitting(last, MAX_ERROR_BYTES)
    room = MAX_ERROR_BYTES - sum(map(num_bytes, last))
    return fitting((before + newline)[::-1], room)[::-1] + last


def health_handler(checks):
    """Returns what answers Check() of gRPC's health service. There is no Watch(): in
    grpcio-health-checking 1.85, a call of it that begins while another ends has all
    streams of the server wait for ever."""

    def check(requests, context):
        requests = within(HELLO_TIMEOUT_S, requests, context.cancel)
        return checks.Check(next(requests, health_pb2.HealthCheckRequest()), context)

    handler = grpc.stream_unary_rpc_method_handler(  # A unary one has no time limit.
        check,
        health_pb2.HealthCheckRequest.FromString,
        health_pb2.HealthCheckResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": handler})


def within(timeout_s, requests, hang_up):
    """Yields the requests. Calls hang_up() if the first one does not come within the
    time."""
    timer = threading.Timer(timeout_s, hang_up)
    timer.daemon = True
    timer.start()
    try:
        first = next(requests, None)
    finally:
        timer.cancel()
    if first is not None:
        yield first
        yield from requests


def tell(peer, text):
    log.info("%s: %s", peer, text)


def converse(create_env, flags, requests, peer, tell=tell):
    """Steps environments together as a learner asks for, from Hello to the end.

    requests: an iterator of bytes. tell(peer, text): logs that a learner comes or goes.
    Yields bytes. Raises Refused, or what an environment raises.
    """
    env = stats = told = None
    try:
        hello = parse(next(requests, b"")).hello
        if hello.version != PROTOCOL_VERSION:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the learner speaks version {hello.version} of the protocol, this "
                f"server version {PROTOCOL_VERSION}",
            )
        tell(peer, "connected")
        stats = Statistics(peer)
        if hello.stream == 0:  # One tells for all.
            rollouts = calls.first_rollouts(flags, flags.envs_per_server)
            told = calls.tell_slow(*rollouts, f"{peer}: ")
        seeds = [hello.seed, hello.stream, hello.connection, flags.seed or 0]
        seed = derive_seed(*map(abs, seeds))
        env = calls.create(create_env, flags, flags.envs_per_server, seed=seed)
        step = env.initial(seed)
        welcome = pb.Response(welcome=make_welcome(env, step, flags.env_args))
        # Serialised messages one after the other are one message.
        yield welcome.SerializeToString() + encode_step(step)
        for request in requests:
            step = env.step(get_action(parse(request), env.actions))
            stats.add(step)
            yield encode_step(step, env.take_metrics())
    finally:
        if told is not None:
            told.set()
        try:
            if env is not None:
                env.close()
        finally:
            if stats is not None:
                tell(peer, f"disconnected after {stats}")
        if env is not None and stats.steps == 0:
            tell(peer, "the learner's log says why it left at once")


def make_welcome(env, step, env_args=()):
    return pb.Welcome(
        version=PROTOCOL_VERSION,
        observation_space=env.signature(),
        action_space=str(env.action_space),
        num_envs=env.num_envs,
        step=encode_spec(step),
        action=encode_spec(env.actions.zeros()),
        environment=with_arguments(env.name, env_args),
    )


def parse(request):
    try:
        return pb.Request.FromString(request)
    except DecodeError:
        raise Refused(
            grpc.StatusCode.INVALID_ARGUMENT,
            "the learner sent a message that cannot be parsed",
        ) from None


def get_action(request, actions):
    """Returns the action of a request. Raises Refused if there is none in it."""
    try:
        return actions.from_bytes(request.action.data)
    except ValueError as e:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(e)) from None


class Refused(Exception):
    """A mistake of the learner's: (grpc.StatusCode, message)."""


class Statistics:
    """What a stream did, which is logged once a minute."""

    def __init__(self, peer):
        self.peer = peer
        self.start = self.logged_at = time.monotonic()
        self.steps = self.episodes = 0
        self.total_return = 0.0

    def add(self, step):
        self.steps += len(step["reward"])
        if "waits" in step:
            self.steps -= int(step["waits"].sum())
        end = step["episode_end"]
        if end.any():
            self.episodes += int(end.sum())
            self.total_return += float(step["episode_return"][end].sum())
        if time.monotonic() - self.logged_at > LOG_EVERY_S:
            self.logged_at = time.monotonic()
            tell(self.peer, self)

    def __str__(self):
        rate = self.steps / max(1e-9, time.monotonic() - self.start)
        text = f"{self.steps:,} steps, {rate:,.0f} steps/s, "
        text += f"{self.episodes} episodes"
        if self.episodes:
            text += f", mean return {self.total_return / self.episodes:.2f}"
        return text


def add_port(server, address, flags):
    """Has the server listen at the address. Raises BadInput if it cannot."""
    # gRPC takes a socket away from whoever listens at it.
    if address.startswith("unix:") and (why := why_not_free(address)):
        raise BadInput(f"cannot serve at {address}: {why}")
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
        why = why_not_free(address) or "is it in use?"
        raise BadInput(f"cannot serve at {address}: {why}") from e


def start_threads(n):
    """Returns a pool whose n threads have started: where one cannot be started later,
    gRPC says nothing and the stream waits for ever."""
    pool = futures.ThreadPoolExecutor(n)
    barrier = threading.Barrier(n)
    try:
        for _ in range(n):
            pool.submit(barrier.wait)
    except RuntimeError:
        barrier.abort()
        raise
    return pool


def refuse(parent, message):
    """Ends this process, and tells the parent why."""
    with contextlib.suppress(OSError):
        parent.send(message)
    sys.exit(2)


def serve(create_env, flags, address, directory, parent):
    """Serves at the address until the parent closes the connection, or is gone; then
    removes the directory. Returns the EnvironmentServer."""
    try:
        pool = start_threads(MAX_STREAMS + SPARE_THREADS)
    except RuntimeError as e:
        refuse(parent, f"cannot serve at {address}: {e}")
    server = grpc.server(
        pool,
        options=[
            *OPTIONS,
            ("grpc.so_reuseport", 0),  # Two servers at one address are a mistake.
            ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
            # Each connection's limit, lest calls that wait take the memory.
            ("grpc.max_concurrent_streams", MAX_STREAMS + SPARE_THREADS),
            ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_TIMEOUT_S),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ],
    )
    environments = EnvironmentServer(create_env, flags)
    server.add_generic_rpc_handlers(environments.handlers())
    checks = health.HealthServicer()
    server.add_generic_rpc_handlers([health_handler(checks)])
    try:
        add_port(server, address, flags)
    except BadInput as e:
        refuse(parent, str(e))
    server.start()
    for service in ("", SERVICE):
        checks.set(service, health_pb2.HealthCheckResponse.SERVING)
    with contextlib.suppress(OSError, EOFError):
        parent.send(None)
        parent.recv()
    checks.enter_graceful_shutdown()
    server.stop(grace=1).wait()
    if directory is not None:  # The parent may not have come to it.
        remove_sockets(directory)
    return environments


def main(parent, body=serve):
    """Runs the process that servers.py describes over the connection. Only the parent
    handles signals.

    body: serve(), or another that returns when the parent wants no more of it, with
    something whose num_streams falls to 0 when its environments are closed.
    """
    try:
        create_env, flags, address, directory = parent.recv()
    except EOFError:  # The parent is gone.
        return
    lead_group()
    setup_logging()
    keep_freed_memory()
    calls.watch(f"{flags.env} at {address}", flags.env_timeout_seconds, log.error)
    environments = body(create_env, flags, address, directory, parent)
    calls.end_process(lambda: environments.num_streams == 0)
