"""Hosts that dial their learner: the real programs."""

import argparse
import contextlib
import os
import queue
import re
import signal
import socket
import threading
import time
from concurrent import futures

import grpc
import pytest

import polybeast_env
from tests import certificates
from tests.programs import (
    Program,
    load,
    main,
    marked,
    refusal,
    rollouts,
    step,
    succeeds,
    wait_for_steps,
)
from tests.test_polybeast_env import free_port
from tests.test_polybeast_faults import CARTPOLE
from torchbeast.messages import BadInput
from torchbeast.remote import dialer, streams, tls
from torchbeast.remote import torchbeast_pb2 as pb
from torchbeast.remote.addresses import why_not_free
from torchbeast.remote.protocol import LEARNER_SERVICE, PROTOCOL_VERSION


def here():
    return f"127.0.0.1:{free_port()}"


def dial(address, *args, env=CARTPOLE, num_servers=1, **kwargs):
    flags = ("--env", env, "--learner", address, "--envs_per_server", 2)
    return Program(*flags, "--num_servers", num_servers, *args, module="polybeast_env",
                   **kwargs)  # fmt: skip


def flags_of(savedir, address, *args, env=CARTPOLE):
    return ("--env", env, "--listen", address, "--savedir", savedir, "--xpid", "x",
            "--log_interval_steps", 80, *args)  # fmt: skip


def listen(savedir, address, *args, **kwargs):
    return Program(*flags_of(savedir, address, *args, **kwargs), module="polybeast")


def connect(address, timeout_s=60):
    """A connection, once somebody listens."""
    host, port = address.split(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=30)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    path = tmp_path_factory.mktemp("certs")
    certificates.make(path, "127.0.0.1", "elsewhere")
    return path


def files(path):
    names = (("tls_cert", "cert.pem"), ("tls_key", "key.pem"), ("tls_ca", "ca.pem"))
    return [x for flag, name in names for x in (f"--{flag}", path / name)]


# Both directions.


@pytest.mark.survives("learner-restarted")
def test_a_learner_that_comes_back_gets_its_hosts_back(savedir):
    address = here()
    with dial(address, num_servers=2) as host:
        host.wait_for("no stream, dials again: failed to connect")  # It waits.
        result = succeeds(*flags_of(savedir, address, "--total_steps", 2000),
                          module="polybeast")  # fmt: skip
        assert rollouts(result.stderr)["learned from"] == 100
        assert "host 127.0.0.1: " in result.stderr
        host.wait_for("disconnected after")
        succeeds(*flags_of(savedir, address, "--total_steps", 4000),
                 module="polybeast")  # fmt: skip
        assert load(savedir)["step"] == 4000
        host.stop()
    assert "Traceback" not in host.output


@pytest.mark.slow
def test_one_run_has_streams_of_both_directions(savedir):
    address, server = here(), here()
    fixed = Program("--env", CARTPOLE, "--address", server, "--envs_per_server", 2,
                    "--num_servers", 1, module="polybeast_env")  # fmt: skip
    flags = ("--server_addresses", server)
    with fixed, dial(address) as host, listen(savedir, address, *flags) as learner:
        wait_for_steps(savedir, 400)
        learner.wait_for("host 127.0.0.1: 1 streams, 0 before")
        host.stop()
        reached = step(savedir)
        wait_for_steps(savedir, 400)  # With the other.
        assert step(savedir) > reached
        learner.stop()
        n = rollouts(learner.output)
        assert n["learned from"] > 20
        fixed.stop()


@pytest.mark.slow
def test_two_learners_share_the_hosts_processes(savedir, tmp_path):
    one, two = here(), here()
    with (
        dial(f"{one},{two}", num_servers=2) as host,
        listen(savedir, one) as first,
        listen(tmp_path / "b", two) as second,
    ):
        wait_for_steps(savedir, 400)
        wait_for_steps(tmp_path / "b", 400)
        for learner in (first, second):
            learner.stop()
        host.stop()


@pytest.mark.long
@pytest.mark.survives("learner-moved")
def test_a_learner_that_comes_back_at_another_address_of_the_list(savedir, monkeypatch):
    one, two = here(), here()
    with dial(f"{one},{two}") as host:
        with listen(savedir, one) as learner:
            wait_for_steps(savedir, 400, timeout_s=dialer.PATIENCE_S + 60)
            learner.signal(signal.SIGKILL)
        with listen(savedir, two) as learner:
            wait_for_steps(savedir, 400, timeout_s=dialer.PATIENCE_S + 60)
            learner.stop()
        host.stop()


@pytest.mark.long
def test_hosts_follow_a_learner_whose_address_is_in_a_file(savedir, tmp_path):
    one, two = here(), here()
    path = tmp_path / "learners"
    path.write_text(one)
    with dial(f"@{path}") as host:
        with listen(savedir, one) as learner:
            wait_for_steps(savedir, 400)
            path.unlink()
            wait_for_steps(savedir, 400)
            learner.stop()
        host.wait_for(f"--learner @{path}: no stream, dials again: FileNotFoundError")
        path.write_text("# moves\n")
        host.wait_for("no address, expected HOST:PORT,...")
        path.write_text("10.0.0.1:50050")
        host.wait_for("10.0.0.1:50050 is not of this host only")
        path.write_text(two)
        with listen(savedir, two) as learner:
            wait_for_steps(savedir, 400)
            learner.stop()
        host.stop()


# What goes wrong.


@pytest.mark.slow
@pytest.mark.survives("environment-raises")
def test_a_hosts_traceback_reaches_the_learners_log(savedir):
    address = here()
    env = "tests.faulty_envs:Raises-v0"
    with (
        dial(address, env=env) as host,
        listen(savedir, address, env=env) as learner,
    ):
        line = learner.wait_for("host 127.0.0.1: no stream (1 so far): ")
        assert "Error" in line and "Traceback" not in line, line
        host.wait_for("Traceback")
        wait_for_steps(savedir, 400)  # It dials again.
        learner.stop()
        host.stop()


@pytest.mark.slow
@pytest.mark.survives("other-environment")
def test_a_host_with_another_environment_is_refused_and_told_why(savedir):
    address = here()
    with (
        dial(address, env="Acrobot-v1") as host,
        listen(savedir, address) as learner,
    ):
        learner.wait_for("the observation space differs: the learner has Box([-4.8")
        host.wait_for("dials again: the observation space differs: the learner has Box")
        with dial(address) as other:
            wait_for_steps(savedir, 400)
            other.stop()
        learner.stop()
        host.stop()


@pytest.mark.slow
@pytest.mark.survives("silent-connection", "too-many-streams")
def test_who_says_nothing_is_hung_up_on_and_who_is_too_many_is_refused(savedir):
    address = here()
    flags = ("--max_streams", 2, "--env_timeout_seconds", 3)
    with listen(savedir, address, *flags) as learner:
        with connect(address) as silent:
            with grpc.insecure_channel(address) as channel:
                stream = channel.stream_stream(f"/{LEARNER_SERVICE}/Stream")
                calls = [stream(iter(lambda: time.sleep(100), None)) for _ in range(2)]
                for call in calls:
                    hello = pb.Request.FromString(next(call)).hello
                    assert hello.version == PROTOCOL_VERSION
                [too_many] = [stream(iter(()))]
                assert too_many.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "has 2 streams already (--max_streams)" in too_many.details()
                for call in calls:
                    assert call.code() in (
                        grpc.StatusCode.CANCELLED,
                        grpc.StatusCode.FAILED_PRECONDITION,
                    )
            while silent.recv(1000):
                pass
        learner.wait_for("no environments came within 3 s")
        with dial(address) as host:
            wait_for_steps(savedir, 400)
            host.stop()
        learner.stop()


@pytest.mark.long
@pytest.mark.survives("too-many-connections")
def test_connections_that_are_too_many_are_hung_up_on_and_training_goes_on(savedir):
    address = here()
    few = argparse.Namespace(prefix=["prlimit", "--nofile=200:400"])  # Open files.
    flags = flags_of(savedir, address, "--max_streams", 4)
    with (
        Program(*flags, module="polybeast", host=few) as learner,
        dial(address, env=CARTPOLE) as host,
        contextlib.ExitStack() as stack,
    ):
        wait_for_steps(savedir, 400)
        silent = [stack.enter_context(connect(address)) for _ in range(600)]
        for connection in silent:
            while connection.recv(1000):
                pass
        line = learner.wait_for("host 127.0.0.1: no stream (1 so far): ")
        assert "too many connections, there are 72 already (--max_streams)" in line
        wait_for_steps(savedir, 400)
        with dial(address) as other:  # There is room again.
            other.wait_for("connected")
            other.stop()
        learner.stop()
        host.stop()
    assert "Traceback" not in learner.output


@pytest.mark.slow
@pytest.mark.survives("garbage")
def test_garbage_ends_its_stream_in_one_line_and_no_other(savedir):
    address = here()
    with dial(address) as host, listen(savedir, address) as learner:
        wait_for_steps(savedir, 400)
        with grpc.insecure_channel(address) as channel:
            stream = channel.stream_stream(f"/{LEARNER_SERVICE}/Stream")
            with pytest.raises(grpc.RpcError, match="larger than max"):
                list(stream(iter([bytes(2**22)])))  # What CartPoles never have.
            for garbage in (b"", b"\xff" * 100, bytes(1000)):
                with pytest.raises(grpc.RpcError) as e:
                    list(stream(iter([garbage])))
                assert e.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        learner.wait_for("host 127.0.0.1: no stream (1 so far): ")
        wait_for_steps(savedir, 400)
        learner.stop()
        host.stop()
    assert "Traceback" not in learner.output


@pytest.mark.slow
def test_a_host_that_is_killed_leaves_nothing_and_its_streams_go(savedir):
    address = here()
    with listen(savedir, address) as learner:
        with dial(address, num_servers=2) as host:
            learner.wait_for("host 127.0.0.1: ")
            host.signal(signal.SIGKILL)
            host.process.wait()
            deadline = time.monotonic() + 10
            while marked(host.mark):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        learner.wait_for("host 127.0.0.1: 0 streams", timeout_s=60)
        learner.stop()


# Who may connect.


@pytest.mark.long
@pytest.mark.survives("no-certificate")
def test_hosts_and_learner_know_each_other_by_two_authorities(certs, savedir):
    address = here()
    host, learner = files(certs / "hosts/127.0.0.1"), files(certs / "learner")
    with listen(savedir, address, *learner) as program:
        program.wait_for("to resume")
        for stranger in (
            [],
            [*host[:4], *learner[4:]],  # Takes another host for a learner.
            [*learner[:4], *host[4:]],  # A learner poses as a host.
        ):
            with dial(address, *stranger) as other:
                other.wait_for("no stream, dials again: ")
                assert step(savedir) == 0
                other.stop()
        with dial(address, *files(certs / "hosts/elsewhere")) as other:
            wait_for_steps(savedir, 400)
            other.stop()
        program.stop()


@pytest.mark.slow
def test_a_host_does_not_take_another_host_for_a_learner(certs, savedir):
    address = here()
    with listen(savedir, address, *files(certs / "hosts/127.0.0.1")) as impostor:
        impostor.wait_for("to resume")
        with dial(address, *files(certs / "hosts/elsewhere")) as host:
            host.wait_for("no stream, dials again: ")
            assert step(savedir) == 0
            host.stop()
        impostor.stop()


# Bad input.


def test_what_cannot_be_is_refused_in_one_line(savedir):
    address = here()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        line = refusal(*flags_of(savedir, taken), module="polybeast")
        assert line == f"polybeast: error: --listen {taken}: Address already in use"
    for bad in ("nonsense", "127.0.0.1:0", "127.0.0.1:70000", "unix:", "a:1,b:2"):
        line = refusal(*flags_of(savedir, bad), module="polybeast")
        assert line.startswith(f"polybeast: error: --listen {bad}: expected"), line
    line = refusal(*flags_of(savedir, "0.0.0.0:1"), module="polybeast")
    assert "0.0.0.0:1 is not of this host only" in line
    assert not savedir.exists()

    def env(*args):
        return refusal("--env", CARTPOLE, *args, module="polybeast_env")

    line = env("--learner", address, "--address", address)
    assert line == "polybeast_env: error: expected --address or --learner, not both"
    line = env("--learner", ",")
    assert line == "polybeast_env: error: --learner: no address, expected HOST:PORT,..."
    assert "expected HOST:PORT" in env("--learner", "nonsense")
    assert "10.0.0.1:5 is not of this host only" in env("--learner", "10.0.0.1:5")


@pytest.mark.slow
def test_each_end_that_finds_the_wrong_other_end_says_so(savedir):
    address, learner_address = here(), here()
    server = Program("--env", CARTPOLE, "--address", address, "--num_servers", 1,
                     module="polybeast_env")  # fmt: skip
    with server, listen(savedir, learner_address) as learner:
        server.wait_for("environments for each stream")
        with dial(address) as host:
            assert host.end() == 2
        assert host.output.splitlines()[-1] == (
            f"polybeast_env: error: --learner {address}: this is an environment "
            "server, expected a learner (--listen)"
        )
        connect(learner_address).close()
        flags = ("--env", CARTPOLE, "--savedir", savedir, "--xpid", "y")
        result = main(*flags, "--server_addresses", learner_address, module="polybeast")
        assert result.returncode == 2
        assert (
            f"--server_addresses {learner_address}: this is a learner (--listen), "
            "expected an environment server"
        ) in result.stderr
        learner.stop()
        server.stop()


# The dialer, alone.


def dialer_of(learners, own):
    flags = ["--env", CARTPOLE, "--learner", learners, "--envs_per_server", "1"]
    flags = polybeast_env.parser().parse_args([*flags, "--insecure"])
    return dialer.Dialer(polybeast_env.create_env, flags, own)


def test_a_dialer_also_dials_others_while_its_own_learner_is_away(monkeypatch):
    d = dialer_of("a:1,b:2,c:3", "b:2")
    dialed = []

    def stream(address, own):
        assert own == "b:2"
        dialed.append(address)
        if len(dialed) == 8:
            d.close()
        if len(dialed) == 5:
            raise BadInput("a certificate is being replaced")
        return False, "gone"

    monkeypatch.setattr(d, "stream", stream)
    monkeypatch.setattr(dialer, "MAX_WAIT_S", 0.01)
    monkeypatch.setattr(dialer, "PATIENCE_S", 0)
    d.run()
    assert dialed == ["b:2", "c:3", "b:2", "a:1", "b:2", "c:3", "b:2", "a:1"]


def test_reasons_that_are_all_different_do_not_flood_a_hosts_log(monkeypatch):
    d, dialed, lines = dialer_of("a:1", "a:1"), [], []

    def stream(address, own):
        dialed.append(address)
        if len(dialed) == 100:
            d.close()
        return True, f"no {chr(ord('a') + len(dialed))}"

    monkeypatch.setattr(d, "stream", stream)
    monkeypatch.setattr(dialer, "MAX_WAIT_S", 0.001)
    monkeypatch.setattr(dialer.log, "warning", lambda *args: lines.append(args))
    d.run()
    assert len(dialed) == 100 and 2 <= len(lines) < 10


@contextlib.contextmanager
def fake_learner(address, streams, says_hello=True, full=False):
    """Says Hello, or nothing, or that it is full, and no more. streams: a queue of who
    comes."""

    def stream(requests, context):
        streams.put(address)
        if full:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this learner has some")
        if says_hello:
            hello = pb.Hello(version=PROTOCOL_VERSION, seed=1)
            yield pb.Request(hello=hello).SerializeToString()
        while context.is_active():
            time.sleep(0.01)

    handler = grpc.stream_stream_rpc_method_handler(stream)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    handler = grpc.method_handlers_generic_handler(LEARNER_SERVICE, {"Stream": handler})
    server.add_generic_rpc_handlers([handler])
    assert server.add_insecure_port(address)
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


@contextlib.contextmanager
def impatient(monkeypatch, own, other):
    """A dialer of two learners runs, which waits half a second for its own."""
    monkeypatch.setattr(dialer, "PATIENCE_S", 0.5)
    monkeypatch.setattr(dialer, "MAX_WAIT_S", 0.5)
    d = dialer_of(f"{own},{other}", own)
    thread = threading.Thread(target=d.run)
    thread.start()
    try:
        yield
    finally:
        d.close()
        thread.join(30)
    assert not thread.is_alive()


def test_a_dialer_returns_to_its_own_learner_when_that_is_back(monkeypatch):
    own, other, came = here(), here(), queue.Queue()
    with fake_learner(other, came), impatient(monkeypatch, own, other):
        assert came.get(timeout=30) == other
        with fake_learner(own, came):
            assert came.get(timeout=30) == own
            time.sleep(2)
            assert came.empty()  # It stays there.


def test_a_dialer_stays_with_another_learner_while_its_own_is_full(monkeypatch):
    own, other, came = here(), here(), queue.Queue()
    with fake_learner(other, came), fake_learner(own, came, full=True):
        with impatient(monkeypatch, own, other):
            assert came.get(timeout=30) == own
            while came.get(timeout=30) != other:
                pass
            time.sleep(2)
            assert came.empty()  # It stays there.


@pytest.mark.survives("silent-connection")
def test_a_dialer_hangs_up_on_a_learner_that_never_says_hello(monkeypatch):
    monkeypatch.setattr(dialer, "HELLO_TIMEOUT_S", 0.5)
    address = here()
    d = dialer_of(address, address)
    end = threading.Timer(60, d.close)  # Where it does not hang up.
    end.start()
    with fake_learner(address, queue.Queue(), says_hello=False):
        result = d.stream(address, address)
    end.cancel()
    assert result == (False, "the learner said no Hello within 0.5 s")


def test_a_process_that_dials_is_not_called_a_server():
    with dial(here()) as host:
        host.wait_for("no stream, dials again")
        os.kill(host.workers()[0], signal.SIGKILL)
        line = host.wait_for("ended (exit code -9), started again")
        assert "] process that dials 127.0.0.1:" in line
        host.stop()


def test_a_host_is_named_by_its_address():
    for address, host in (
        ("10.0.0.5:43210", "10.0.0.5"),
        ("%5B::1%5D:43210", "[::1]"),
        ("", "here"),
    ):
        assert streams.host_of({"address": address}) == host


def test_a_socket_that_a_killed_learner_has_left_is_free(tmp_path):
    address = f"unix:{tmp_path}/socket"
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(f"{tmp_path}/socket")
        s.listen()
        assert why_not_free(address) == "Address already in use"
    assert why_not_free(address) is None
    (tmp_path / "socket").write_text("a file")
    assert why_not_free(address) == "Address already in use"


def test_a_socket_whose_listener_never_accepts_is_not_waited_for(tmp_path):
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"{tmp_path}/socket")
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):  # Until no more may wait.
            while True:
                s = stack.enter_context(socket.socket(socket.AF_UNIX))
                s.setblocking(False)
                s.connect(f"{tmp_path}/socket")
        found, address = queue.Queue(), f"unix:{tmp_path}/socket"
        args = {"target": lambda: found.put(why_not_free(address)), "daemon": True}
        threading.Thread(**args).start()
        assert found.get(timeout=30) == "Address already in use"


def test_an_address_that_nobody_has_is_free():
    address = here()
    assert why_not_free(address) is None
    assert re.match("Name or service|Temporary", why_not_free("nowhere.invalid:1"))
    assert tls.is_local(address)
