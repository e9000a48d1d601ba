"""One process of a host that dials learners, and steps environments for them.

For hosts that no learner can reach: behind NAT, or started by somebody's scheduler. The
messages are those of a server (torchbeast/remote/server.py); only who connects differs.
torchbeast/remote/servers.py starts such processes. No torch in here.
"""

import contextlib
import queue
import random
import threading
import time
import traceback

import grpc

from torchbeast.messages import BadInput, Repeated, Throttle, first_line, log
from torchbeast.remote import server, tls
from torchbeast.remote import torchbeast_pb2 as pb
from torchbeast.remote.addresses import NOT_A_LEARNER, read
from torchbeast.remote.protocol import LEARNER_SERVICE, OPTIONS
from torchbeast.remote.server import Refused, converse, end_of, within

MAX_WAIT_S = 10  # Between attempts.
HELLO_TIMEOUT_S = 30  # To connect may take 20 of them.
MAX_WHY_CHARACTERS = 1000
PATIENCE_S = 60  # After which other learners of the list are dialed, too.


class Dialer:
    """Opens one stream after the other, to a learner of the list, its own. While that
    is away for longer, or full, others are dialed as well, until it is back. One that
    is full takes no stream from another."""

    def __init__(self, create_env, flags, address):
        self.create_env = create_env
        self.flags = flags
        self.own = random.randrange(10**6)  # Number of a learner in the list.
        with contextlib.suppress(OSError, ValueError):  # It is none any more.
            self.own = read(flags.learner).index(address)
        self.wrong_end = None  # What the other end said it is.
        self.num_streams = 0  # 1 while there may be environments.
        self._full = False  # Its own learner has refused it.
        self._call = None
        self._closed = threading.Event()
        self._tracebacks = Repeated()
        self._throttle = Throttle()

    def run(self):
        """Dials until close(), or until the other end is not a learner."""
        wait_s = 0.1
        seen_at = time.monotonic()  # Its own learner.
        others, at_home = 0, True
        while not self._closed.is_set():
            own = address = f"--learner {self.flags.learner}"
            began_at = time.monotonic()
            try:
                found = read(self.flags.learner)
                tls.check(self.flags, found)
                own = address = found[self.own % len(found)]
                if not at_home and len(found) > 1:
                    # The others are dialed in turn.
                    offset = 1 + others % (len(found) - 1)
                    address = found[(self.own + offset) % len(found)]
                answered, why = self.stream(address, own)
            except Exception as e:  # For example, a certificate is being replaced.
                answered, why = False, first_line(e, not isinstance(e, BadInput))
            now = time.monotonic()
            if NOT_A_LEARNER in why and len(found) == 1:
                self.wrong_end = f"--learner {address}: {NOT_A_LEARNER}"
                return
            if answered and now - began_at > MAX_WAIT_S:
                wait_s = 0.1
            if address == own and answered:
                seen_at = now
            if address == own or answered:
                _, due = self._throttle.count(address, why, now)
                if due:
                    log.warning("%s: no stream, dials again: %s", address, why)
            others += not at_home
            at_home = not at_home or now - seen_at < PATIENCE_S
            self._closed.wait(wait_s * random.uniform(0.5, 1.5))
            wait_s = min(MAX_WAIT_S, 2 * wait_s)

    def _go_home(self, own, call, ended):
        """Ends a stream to another learner when its own one answers."""
        while not ended.wait(PATIENCE_S):
            with contextlib.suppress(Exception):
                with open_channel(own, self.flags) as channel:
                    grpc.channel_ready_future(channel).result(timeout=MAX_WAIT_S)
                log.info("%s is back", own)
                call.cancel()
                return

    def stream(self, address, own):
        """Opens one stream to a learner. Returns, when it has ended, whether the
        learner had answered, and why it ended.

        own: the address of the learner for which it would end the stream.
        """
        answered = threading.Event()
        silent = threading.Event()
        ended = threading.Event()
        call = queue.SimpleQueue()

        def messages():
            try:
                yield from self._converse(call.get(), address, answered, silent)
            finally:
                ended.set()

        self.num_streams = 1
        try:
            with open_channel(address, self.flags) as channel:
                stream = channel.stream_stream(f"/{LEARNER_SERVICE}/Stream")
                self._call = stream(messages())
                call.put(self._call)
                if address != own and not self._full:
                    args = own, self._call, ended
                    thread = threading.Thread(target=self._go_home, args=args)
                    thread.daemon = True
                    thread.start()
                if self._closed.is_set():
                    self._call.cancel()
                why = self._call.details()  # Waits for the end.
                if address == own:
                    code = self._call.code()
                    self._full = code is grpc.StatusCode.RESOURCE_EXHAUSTED
                if silent.is_set():
                    why = f"the learner said no Hello within {HELLO_TIMEOUT_S} s"
                elif self._call.code() is grpc.StatusCode.CANCELLED:
                    why = "the learner ended the stream"
                ended.wait()
        finally:
            self.num_streams = 0
        if not answered.is_set() and "Socket closed" in why:
            hint = (
                "expects TLS" if self.flags.tls_cert is None else "refuses --tls_cert"
            )
            why = f"the learner hangs up, perhaps because it {hint} ({why})"
        if "larger than max" in why:
            why = (
                "a step is larger than the learner takes: it has another --env, or use "
                f"a smaller --envs_per_server, or there a smaller --max_streams ({why})"
            )
        why = "".join(c for c in " ".join(why.split()) if c.isprintable())
        return answered.is_set(), why[:MAX_WHY_CHARACTERS]

    def _converse(self, call, address, answered, silent):
        """Yields what the learner gets."""

        def requests():
            for request in within(HELLO_TIMEOUT_S, call, hang_up):
                answered.set()
                yield request

        def hang_up():
            silent.set()
            call.cancel()

        try:
            yield from converse(self.create_env, self.flags, requests(), address)
        except GeneratorExit:
            raise
        except BaseException as e:  # KeyboardInterrupt of an environment, too.
            if isinstance(e, grpc.RpcError) or not call.is_active():
                return  # The learner has ended the stream.
            text = e.args[1] if isinstance(e, Refused) else traceback.format_exc()
            log.error("%s: %s", address, self._tracebacks.shorten(text))
            yield pb.Response(error=end_of(text).encode()).SerializeToString()

    def close(self):
        self._closed.set()
        if self._call is not None:
            self._call.cancel()


def open_channel(address, flags):
    options = [
        *OPTIONS,
        # As the learner's other direction has them, csrc/channel.h.
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    ]
    if flags.tls_cert is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options)
    pem = tls.load(flags, "client")
    credentials = grpc.ssl_channel_credentials(
        pem["tls_ca"], pem["tls_key"], pem["tls_cert"]
    )
    return grpc.secure_channel(address, credentials, options)


def dial(create_env, flags, address, _directory, parent):
    """Dials until the parent closes the connection, or is gone. Returns the Dialer."""
    dialer = Dialer(create_env, flags, address)

    def run():
        dialer.run()
        if dialer.wrong_end is not None:
            with contextlib.suppress(OSError):
                parent.send(dialer.wrong_end)

    with contextlib.suppress(OSError, EOFError):
        parent.send(None)
        threading.Thread(target=run, name="dialer", daemon=True).start()
        parent.recv()
    dialer.close()
    return dialer


def main(parent):
    """Runs the process that servers.py describes over the connection."""
    server.main(parent, dial)
