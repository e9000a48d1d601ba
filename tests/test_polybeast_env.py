"""Environment servers, driven as programs, over gRPC, by a client written in Python."""

import argparse
import contextlib
import queue
import secrets
import signal
import socket
import struct
import subprocess
import threading
from concurrent import futures

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

import polybeast_env
from tests import fuzz_requests, programs
from tests.csrc import make_corpus
from tests.programs import ROOT, Program, run
from torchbeast.environment import Environment, make
from torchbeast.messages import BadInput
from torchbeast.nests import leaves
from torchbeast.process import SIGNALS
from torchbeast.remote import protocol, server
from torchbeast.remote import torchbeast_pb2 as pb
from torchbeast.remote.addresses import count_up
from torchbeast.remote.server import MAX_STREAMS, EnvironmentServer, start_threads
from torchbeast.seeds import derive_seed

COUNTER = "tests.envs:torchbeast/Counter-v0"
NESTED = "tests.faulty_envs:Nested-v0"
READY = "environments for each stream at"
DTYPES = {
    (0, 32): np.int32,
    (0, 64): np.int64,
    (0, 8): np.int8,
    (1, 8): np.uint8,
    (2, 32): np.float32,
    (2, 64): np.float64,
    (6, 8): np.bool_,
}


def free_port():
    """Of those that the system does not give to clients, so it stays free."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def servers(*args, env=COUNTER):
    program = Program("--env", env, *args, module="polybeast_env")
    program.wait_for(READY)
    return program


@pytest.fixture(scope="module")
def counter():
    """The address of a server of two Counters a stream."""
    address = f"127.0.0.1:{free_port()}"
    flags = ["--num_servers", 1, "--envs_per_server", 2, "--address", address]
    with servers(*flags):
        yield address


class Client:
    """One stream."""

    def __init__(
        self, address, version=protocol.PROTOCOL_VERSION, seed=7, compression=None,
        silent=False,
    ):  # fmt: skip
        self.channel = grpc.insecure_channel(address, compression=compression)
        call = self.channel.stream_stream(
            f"/{protocol.SERVICE}/Stream",
            request_serializer=lambda x: (
                x if type(x) is bytes else x.SerializeToString()
            ),
            response_deserializer=pb.Response.FromString,
        )
        self.requests = queue.Queue()
        if not silent:
            self.requests.put(pb.Request(hello=pb.Hello(version=version, seed=seed)))
        self.responses = call(iter(self.requests.get, None), timeout=60)

    def welcome(self):
        response = next(self.responses)
        return response.welcome, response.step

    def step(self, action):
        action = pb.Arrays(data=[np.asarray(action, np.int64).tobytes()])
        return self.send(pb.Request(action=action))

    def send(self, request):
        self.requests.put(request)
        return next(self.responses).step

    def close(self):
        self.requests.put(None)
        self.channel.close()


def arrays(spec, step):
    return [
        np.frombuffer(data, DTYPES[a.code, a.bits]).reshape(a.shape)
        for a, data in zip(spec.arrays, step.data, strict=True)
    ]


def test_a_step_is_encoded_as_protobuf_does_it():
    arrays = np.arange(300, dtype=np.int16).reshape(20, 15).T, np.ones((), bool)
    step = {"none": np.zeros((0, 3)), "some": arrays, "number": np.float32(3)}
    data = [np.asarray(x).tobytes() for x in (step["none"], *arrays, step["number"])]
    expected = pb.Response(step=pb.Arrays(data=data))
    assert protocol.encode_step(step) == expected.SerializeToString()


@pytest.mark.parametrize("env", [COUNTER, NESTED, "CartPole-v1"])
def test_a_stream_is_the_environment_itself(env, tmp_path):
    address = f"unix:{tmp_path}/socket"
    local = Environment(make(env, 3))
    rng = np.random.default_rng(1)
    flags = ["--num_servers", 1, "--envs_per_server", 3, "--address", address]
    with servers(*flags, env=env) as program:
        client = Client(address)
        welcome, step = client.welcome()
        expected = local.initial(derive_seed(7, 0, 0, 0))
        assert welcome.num_envs == 3
        assert welcome.observation_space == str(local.observation_space)
        assert welcome.action_space == str(local.action_space)
        assert list(welcome.step.structure.keys) == list(expected)
        for _ in range(30):
            # Nested draws its observations from the space, which no seed reaches.
            for (path, x), y in zip(leaves(expected), arrays(welcome.step, step)):
                assert (y.dtype, y.shape) == (np.asarray(x).dtype, np.shape(x)), path
                if env != NESTED or not path.startswith("observation"):
                    np.testing.assert_array_equal(x, y, err_msg=path)
            action = rng.integers(0, 2, (3, *local.action_space.shape))
            expected, step = local.step(action), client.step(action)
        client.close()
        program.wait_for("disconnected after 90 steps")


def test_streams_have_environments_of_their_own(counter):
    clients = [Client(counter) for _ in range(3)]
    for client in clients:
        spec = client.welcome()[0].step
        for i in range(1, 4):
            observation = arrays(spec, client.step([0, 1]))[0]
            assert observation[:, 0].tolist() == [i, i]
    for client in clients:
        client.close()


def test_a_server_has_so_many_streams_and_no_more(tmp_path):
    address = f"unix:{tmp_path}/socket"
    flags = ["--num_servers", 1, "--envs_per_server", 1, "--address", address]
    with servers(*flags):
        clients = [Client(address) for _ in range(MAX_STREAMS)]
        for client in clients:
            client.welcome()
        one_more = Client(address)
        error = refusal(one_more, one_more.welcome)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "this server has 64 streams already" in error.details()
        for client in clients:
            client.step([0])
            client.close()


@pytest.mark.survives("silent-connection")
def test_streams_that_never_say_hello_give_their_places_back(tmp_path, monkeypatch):
    flags = polybeast_env.parser().parse_args(["--env", COUNTER])
    environments = EnvironmentServer(polybeast_env.create_env, flags)
    with futures.ThreadPoolExecutor(MAX_STREAMS + 8) as pool:
        here = grpc.server(pool)
        here.add_generic_rpc_handlers(environments.handlers())
        address = f"unix:{tmp_path}/socket"
        here.add_insecure_port(address)
        here.start()
        try:
            first = Client(address)
            first.welcome()
            with monkeypatch.context() as patch:
                patch.setattr(server, "HELLO_TIMEOUT_S", 0.5)
                silent = [Client(address, silent=True) for _ in range(MAX_STREAMS - 1)]
                for client in silent:
                    error = refusal(client, client.welcome)
                    assert error.code() == grpc.StatusCode.CANCELLED
            others = [Client(address) for _ in range(MAX_STREAMS - 1)]
            for client in others:
                client.welcome()
                client.close()
            first.step([0] * 8)  # It has all the time that it wants.
            first.close()
        finally:
            here.stop(None).wait()


def refusal(client, call):
    with pytest.raises(grpc.RpcError) as e:
        call()
    client.close()
    return e.value


@pytest.mark.survives("other-version")
def test_another_version_of_the_protocol_is_refused_with_both_versions(counter):
    client = Client(counter, version=99)
    error = refusal(client, client.welcome)
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "speaks version 99" in error.details() and "version 3" in error.details()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.Request(), "the action has 0 arrays, expected 1"),
        (
            pb.Request(action=pb.Arrays(data=[b"x" * 15])),
            "action has 15 bytes, expected 16: int64 [2]",
        ),
        (pb.Request(action=pb.Arrays(data=[b"", b""])), "has 2 arrays"),
        (
            pb.Request(action=pb.Arrays(data=[np.array([0, 2]).tobytes()])),
            "[0, 2] is out of bounds",
        ),
        (
            pb.Request(action=pb.Arrays(data=[b"\xff" * 16])),
            "[-1, -1] is out of bounds",
        ),
        (b"\xff" * 100, "the learner sent a message that cannot be parsed"),
        (b"\x12\x80\x80\x80\x01" + b"\n\0" * 2**20, "the action has 1048576 arrays"),
    ],
)
def test_actions_that_are_none_end_the_stream_and_not_the_server(
    counter, request_, message
):
    client = Client(counter)
    client.welcome()
    error = refusal(client, lambda: client.send(request_))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in error.details()
    again = Client(counter)
    again.welcome()
    again.close()


def test_a_message_larger_than_any_action_is_not_read(counter):
    client = Client(counter)
    client.welcome()
    request = pb.Request(action=pb.Arrays(data=[bytes(protocol.MAX_REQUEST_BYTES)]))
    error = refusal(client, lambda: client.send(request))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()


def test_compressed_messages_are_refused(counter):
    client = Client(counter, compression=grpc.Compression.Gzip)
    error = refusal(client, client.welcome)
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "'gzip' is disabled" in error.details()


@pytest.mark.parametrize("env", ["CartPole-v1", "PongNoFrameskip-v4"])
@pytest.mark.parametrize("seed", [-(2**63), -1, 2**31 - 1, 2**63 - 1])
def test_any_number_is_a_seed(env, seed):
    flags = polybeast_env.parser().parse_args(["--env", env, "--envs_per_server", "2"])
    hello = pb.Hello(version=protocol.PROTOCOL_VERSION, seed=seed)
    requests = [pb.Request(hello=hello).SerializeToString()]
    server = EnvironmentServer(polybeast_env.create_env, flags)
    [response] = server.stream(iter(requests), fuzz_requests.Context())
    assert pb.Response.FromString(response).welcome.num_envs == 2


def test_a_step_that_is_too_large_is_refused_by_name():
    with pytest.raises(
        ValueError, match="a step has 300000000 bytes, expected at most"
    ):
        protocol.encode_spec({"x": np.broadcast_to(np.uint8(0), (300_000_000,))})


@pytest.mark.survives("garbage")
def test_whatever_learners_send_is_answered_or_refused():
    ends, _ = fuzz_requests.fuzz(seed=1, num_streams=2000)
    assert ends.keys() == {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION"}


def test_fuzzing_begins_with_what_servers_answer_today():
    for name, responses in make_corpus.corpus().items():
        data = [response.SerializeToString() for response in responses]
        file = (make_corpus.CORPUS / name).read_bytes()
        assert pb.Arrays.FromString(file) == pb.Arrays(data=data), name


def test_what_an_environment_raises_ends_its_stream_in_its_own_words(tmp_path):
    address = f"unix:{tmp_path}/socket"
    flags = ["--num_servers", 1, "--envs_per_server", 1, "--address", address]
    with servers(*flags, env="tests.faulty_envs:Raises-v0"):
        for _ in range(2):  # The server lives on.
            client = Client(address)
            client.welcome()

            def play(client=client):
                for _ in range(400):
                    client.step([0])

            error = refusal(client, play)
            assert error.code() == grpc.StatusCode.INTERNAL
            assert "RuntimeError: the ball went through the floor" in error.details()
            assert "tests/faulty_envs.py" in error.details()


@pytest.mark.survives("garbage")
@pytest.mark.parametrize("word", ["configured", "настройка", "100%"])
def test_an_error_in_any_language_reaches_the_learner(tmp_path, word):
    """gRPC sends three bytes for each byte that is not ASCII, and 8 KB at most."""

    def create_env(flags, num_envs, render_mode=None, seed=None):
        raise BadInput(1000 * f"{word} ")

    flags = argparse.Namespace(env="x", envs_per_server=1, seed=0)
    here = grpc.server(futures.ThreadPoolExecutor(4))
    here.add_generic_rpc_handlers(EnvironmentServer(create_env, flags).handlers())
    address = f"unix:{tmp_path}/socket"
    here.add_insecure_port(address)
    here.start()
    try:
        client = Client(address)
        error = refusal(client, client.welcome)
    finally:
        here.stop(None).wait()
    assert error.code() == grpc.StatusCode.INTERNAL, error.details()
    last = error.details().splitlines()[-1]
    assert last.startswith(f"torchbeast.messages.BadInput: {word} {word} ")


def test_of_a_text_that_is_too_long_the_end_is_sent_and_the_last_lines_beginning():
    text = "".join(f"line {i}\n" for i in range(1000)) + "Error: why\n"
    end = server.end_of(text)
    assert end.endswith("line 998\nline 999\nError: why") and text.startswith("line 0")
    assert 3900 < len(end) + 2 * end.count("\n") <= 4000
    assert server.end_of("a\nb\n") == "a\nb"
    assert server.end_of("a\n" + 5000 * "b") == 4000 * "b"
    assert server.end_of("\ud800é") == "?é"


def test_calls_of_one_connection_are_limited(counter):
    host, port = counter.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as s:
        no_settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # HTTP/2: RFC 9113, 3.4, 6.5.
        s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + no_settings)
        with s.makefile("rb") as answer:
            settings = answer.read(int.from_bytes(answer.read(9)[:3], "big"))
    max_concurrent_streams, most = 3, MAX_STREAMS + 8
    assert dict(struct.iter_unpack(">HI", settings))[max_concurrent_streams] == most


@pytest.mark.slow
def test_who_asks_for_health_and_says_nothing_is_hung_up_on(counter):
    with grpc.insecure_channel(counter) as channel:
        never, calls, hung_up = threading.Event(), [], grpc.StatusCode.CANCELLED
        for _ in range(2 * MAX_STREAMS):
            silent = channel.stream_stream("/grpc.health.v1.Health/Check")
            calls.append(silent(iter(never.wait, True), timeout=60))
        for call in calls:
            assert call.code() in (hung_up, grpc.StatusCode.UNAVAILABLE)
        client = Client(counter)
        client.welcome()
        client.close()
        never.set()


def test_learners_that_come_and_go_do_not_flood_the_log(monkeypatch):
    lines = []
    for level in ("info", "error"):
        monkeypatch.setattr(server.log, level, lambda *args: lines.append(args))
    hello = pb.Hello(version=protocol.PROTOCOL_VERSION, seed=1)
    requests = [pb.Request(hello=hello).SerializeToString()]
    flags = polybeast_env.parser().parse_args(["--env", COUNTER])
    environments = EnvironmentServer(polybeast_env.create_env, flags)
    raising = EnvironmentServer(None, flags)  # Which cannot be called.
    for _ in range(50):
        list(environments.stream(iter(requests), fuzz_requests.Context()))
        with pytest.raises(fuzz_requests.Aborted):
            list(raising.stream(iter(requests), fuzz_requests.Context()))
    assert 3 <= len(lines) < 12, lines


def test_garbage_sent_to_the_port_does_no_harm(counter):
    host, port = counter.split(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 100, b""):
        with socket.create_connection((host, int(port))) as s:
            s.sendall(garbage)
    client = Client(counter)
    client.welcome()
    client.close()


def test_health_is_told_by_the_standard_protocol(counter):
    with grpc.insecure_channel(counter) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for service in ("", protocol.SERVICE):
            answer = check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = health_pb2_grpc.HealthStub(channel).Watch
        with pytest.raises(grpc.RpcError) as e:
            next(watch(health_pb2.HealthCheckRequest(), timeout=10))
        assert e.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "signum",
    [
        pytest.param(s, marks=[] if s == signal.SIGTERM else pytest.mark.slow)
        for s in SIGNALS
    ],
)
def test_a_signal_ends_servers_and_streams(signum, tmp_path):
    address = f"unix:{tmp_path}/socket"
    with servers("--num_servers", 2, "--address", address) as program:
        client = Client(f"{address}.0")
        client.welcome()
        program.stop(signum)
        refusal(client, lambda: client.step([0] * 8))


def test_servers_end_with_their_parent(tmp_path):
    address = f"unix:{tmp_path}/socket"
    with servers("--num_servers", 2, "--address", address) as program:
        program.signal(signal.SIGKILL)
        assert program.end() == -signal.SIGKILL  # Asserts that no process is left.


@pytest.mark.survives("server-killed")
def test_a_killed_server_is_started_again(tmp_path):
    address = f"unix:{tmp_path}/socket"
    with servers("--num_servers", 1, "--address", address) as program:
        [pid] = program.workers()
        subprocess.run(["kill", "-9", str(pid)], check=True)
        program.wait_for("ended (exit code -9), started again")
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(60)
        client = Client(address)
        client.welcome()
        client.close()


def test_a_server_does_not_take_the_socket_of_another_one(tmp_path):
    """gRPC would remove it, and once more at the end."""
    flags = "--num_servers", 1, "--address", f"unix:{tmp_path}/socket"
    with servers(*flags):
        result = run("--env", COUNTER, *flags, module="polybeast_env")
        assert result.returncode == 2
        assert f"{tmp_path}/socket: Address already in use" in result.stderr
        client = Client(flags[-1])
        client.welcome()
        client.close()


@pytest.mark.slow
@pytest.mark.survives("environment-starts-processes")
def test_a_server_whose_environments_fork_at_the_same_time_lives_on(tmp_path):
    address = f"unix:{tmp_path}/socket"
    flags = ["--num_servers", 1, "--envs_per_server", 1, "--address", address]
    with servers(*flags, env="tests.hostile_envs:ForksInC-v0"):
        clients = [Client(address) for _ in range(2)]
        for client in clients:
            client.welcome()
            client.close()


def test_addresses_count_up():
    assert count_up("h:50", 3) == ["h:50", "h:51", "h:52"]
    assert count_up("[::1]:50", 1) == ["[::1]:50"]
    assert count_up("unix:/a", 1) == ["unix:/a"]
    assert count_up("unix:/a", 2) == ["unix:/a.0", "unix:/a.1"]
    for bad in ("", "h", "h:", ":1", "h:x", "h:0", "h:65535", "unix:"):
        with pytest.raises(BadInput, match="expected"):
            count_up(bad, 2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--env", "CartPoel-v1"], "CartPole-v1"),
        (["--address", "nonsense"], "--address nonsense: expected HOST:PORT"),
        (["--num_servers", "0"], "--num_servers"),
        (
            ["--address", "192.0.2.1:5", "--insecure"],
            "cannot serve at 192.0.2.1:5: Cannot assign requested address",
        ),
        (
            ["--address", "unix:/nosuch/directory", "--num_servers", 1],
            "cannot serve at unix:/nosuch/directory: No such file or directory",
        ),
        (
            ["--address", f"unix:/tmp/{200 * 'x'}"],
            "AF_UNIX path too long",
        ),
        (
            ["--address", "127.0.0.1:65535", "--num_servers", 8],
            "expected HOST:PORT, PORT from 1 to 65528",
        ),
    ],
)
def test_bad_input_is_one_line(args, message):
    defaults = [] if "--env" in args else ["--env", "CartPole-v1"]
    result = programs.main(*defaults, *args, module="polybeast_env")
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]


def test_torchbeast_pb2_is_what_protoc_makes_of_the_protocol(tmp_path):
    descriptors = tmp_path / "descriptors"
    command = ["protoc", "-Icsrc", f"-o{descriptors}", "csrc/torchbeast.proto"]
    subprocess.run(command, cwd=ROOT, check=True)
    made = descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes())
    committed = descriptor_pb2.FileDescriptorProto.FromString(
        pb.DESCRIPTOR.serialized_pb
    )
    [made] = made.file
    for message in made.message_type:
        for field in message.field:
            field.ClearField("json_name")  # Which only -o fills in.
    assert made.SerializeToString() == committed.SerializeToString()


def test_an_address_that_is_taken_is_one_line_and_none_of_grpcs():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ("--env", "CartPole-v1", "--address", address, "--num_servers", 1)
        result = run(*flags, module="polybeast_env")
    assert result.returncode == 2
    assert result.stderr == (
        f"polybeast_env: error: cannot serve at {address}: Address already in use\n"
    )


def test_a_server_starts_all_its_threads_before_it_serves(monkeypatch):
    pool = start_threads(3)
    assert len(pool._threads) == 3
    pool.shutdown()

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_threads(3)
