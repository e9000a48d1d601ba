"""PolyBeast with servers of others, when something goes wrong: the real programs."""

import contextlib
import re
import signal
import socket
import threading
from concurrent import futures

import grpc
import numpy as np
import pytest

import polybeast_env
from tests.programs import (
    Program,
    hosts,
    main,
    read_logs,
    refusal,
    rollouts,
    step,
    succeeds,
    wait_for_steps,
)
from tests.test_actor_pool import Learner
from tests.test_polybeast import directories
from tests.test_polybeast_env import READY, free_port
from torchbeast.remote import protocol
from torchbeast.remote import torchbeast_pb2 as pb
from torchbeast.remote.server import make_welcome

CARTPOLE = "CartPole-v1"


def serve(address, *args, env=CARTPOLE, num_envs=2, num_servers=1, host=None):
    program = Program("--env", env, "--address", address, "--envs_per_server", num_envs,
                      "--num_servers", num_servers, *args, module="polybeast_env",
                      host=host)  # fmt: skip
    program.wait_for(READY)
    return program


def flags_of(savedir, addresses, *args, env=CARTPOLE):
    return ("--env", env, "--server_addresses", addresses, "--savedir", savedir,
            "--xpid", "x", "--log_interval_steps", 80, *args)  # fmt: skip


def learn(savedir, addresses, *args, **kwargs):
    """PolyBeast, run "x"."""
    return Program(*flags_of(savedir, addresses, *args, **kwargs), module="polybeast")


def learned(savedir, addresses, *args, **kwargs):
    """The same in this process, to its end."""
    return main(*flags_of(savedir, addresses, *args, **kwargs), module="polybeast")


def delivered_and_learned(output):
    counts = rollouts(output)
    return counts["delivered"], counts["learned from"]


@pytest.mark.slow
@pytest.mark.survives("host-vanishes")
def test_all_hosts_vanish_without_a_word_and_come_back(tmp_path):
    with (
        hosts(2) as (one, two),
        serve(f"{one.ip}:50051", "--insecure", host=one) as first,
        serve(f"{two.ip}:50052", "--insecure", host=two) as second,
        learn(tmp_path, f"{one.ip}:50051,{two.ip}:50052", "--insecure") as learner,
    ):
        wait_for_steps(tmp_path, 1000)
        one.cut_off(first)
        two.cut_off(second)
        for _ in range(2):  # After 20 s and more.
            learner.wait_for("no stream")
        one.restore(first)
        two.restore(second)
        for _ in range(2):
            learner.wait_for(": connected")
        wait_for_steps(tmp_path, 1000)
        learner.stop()
        # One line when a server is lost, one when it is back.
        for address in (f"{one.ip}:50051", f"{two.ip}:50052"):
            assert learner.output.count(f"{address}: no stream") == 1
            assert learner.output.count(f"{address}: connected") == 1
        for server in (first, second):  # They had noticed, too.
            server.wait_for("disconnected")


@pytest.mark.slow
@pytest.mark.survives("server-killed")
def test_a_killed_server_and_its_return_are_logged_and_training_never_stops(tmp_path):
    one, two = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with serve(one), learn(tmp_path, f"{one},{two},{two}") as learner:
        with serve(two) as server:
            wait_for_steps(tmp_path, 1000)
            server.signal_all(signal.SIGKILL)
            for _ in range(2):
                learner.wait_for(f"{two}: no stream")
            wait_for_steps(tmp_path, 1000)
        with serve(two) as server:
            for _ in range(2):
                learner.wait_for(f"{two}: connected")
            wait_for_steps(tmp_path, 1000)
            learner.stop()
        _, learned = delivered_and_learned(learner.output)
        assert learned == step(tmp_path) / 20
    assert f"{one}: no stream" not in learner.output


@pytest.mark.survives("environment-raises")
def test_what_is_delivered_is_learned_from_whatever_environments_raise(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    env = "tests.faulty_envs:Raises-v0"  # After 300 steps.
    with serve(address, env=env, num_envs=3) as server:
        flags = ("--total_steps", 8001)
        learner = learned(tmp_path, f"{address},{address}", *flags, env=env)
        assert learner.returncode == 0, learner.stderr
        server.stop(signal.SIGTERM)
    assert step(tmp_path) == 8080  # Whole batches of 4 times 20.
    assert delivered_and_learned(learner.stderr) == (404, 404)
    # Resets included, 320 steps of 3 environments come through each stream.
    raised = rollouts(learner.stderr)["lost with their stream"] // 3
    assert raised >= 8080 // (320 * 3) - 2
    lines = [line for line in learner.stderr.splitlines() if "no stream" in line]
    assert 2 <= len(lines) < raised  # It does not flood.
    for line in lines:
        assert line.endswith("RuntimeError: the ball went through the floor")


@pytest.mark.slow
@pytest.mark.survives("environment-slow")
def test_a_slow_server_costs_its_share_and_no_more(tmp_path):
    ports = [free_port() for _ in range(4)]
    quick, slow = "tests.faulty_envs:Quick-v0", "tests.faulty_envs:Slow-v0"
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                serve(f"127.0.0.1:{port}", env=slow if i == 0 else quick, num_envs=1)
            )
            for i, port in enumerate(ports)
        ]
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        args = ["--total_steps", 5000, "--batch_size", 2]
        learner = learned(tmp_path, addresses, *args, env=quick)
        assert learner.returncode == 0, learner.stderr
        ends = [server.wait_for("disconnected after") for server in servers]
    steps = [
        int(re.search(r"after ([\d,]+) steps", e)[1].replace(",", "")) for e in ends
    ]
    assert delivered_and_learned(learner.stderr) == (250, 250)
    slow, *quick = steps
    # In step with each other they would all have done the same.
    assert 0 < slow < 0.8 * min(quick), steps
    assert min(quick) > 0.7 * max(quick), steps


@pytest.mark.survives("environment-hangs")
def test_a_server_stuck_in_its_environment_is_restarted_after_the_time_out(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    args = ["--env_timeout_seconds", 1]
    env = "tests.faulty_envs:Stuck-v0"  # After 300 steps.
    with serve(address, *args, env=env, num_envs=1) as server:
        args = ["--total_steps", 800, "--batch_size", 1]
        learner = learned(tmp_path, address, *args, env=env)
        assert learner.returncode == 0, learner.stderr
        for text in (f"{env} at {address} did not answer for 1 s", "started again"):
            assert text in server.output + server.wait_for(text)
    assert delivered_and_learned(learner.stderr) == (40, 40)


@pytest.mark.slow
@pytest.mark.survives("hosts-join-and-leave")
def test_servers_are_added_and_removed_by_a_file(tmp_path):
    one, two, three = (f"127.0.0.1:{free_port()}" for _ in range(3))
    path = tmp_path / "hosts.txt"

    def write(text):
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)

    write(f"# Two streams to one of them.\n{one}, {two}\n\n{one}  # Again.\n")
    with (
        serve(one) as first,
        serve(two),
        serve(three) as third,
        learn(tmp_path, f"@{path}") as learner,
    ):
        learner.wait_for("3 streams")
        first.wait_for("connected")
        write(f"{two}\n{three}\n{three}\n")
        learner.wait_for(f"{path}: {one} has 0 streams, 2 before")
        learner.wait_for(f"{path}: {three} has 2 streams, 0 before")
        first.wait_for("disconnected")
        third.wait_for("connected")
        path.unlink()
        learner.wait_for(f"{path}: No such file or directory; goes on as it is")
        wait_for_steps(tmp_path, 1000)
        write(f"{three}")
        learner.wait_for(f"{path}: {two} has 0 streams, 1 before")
        learner.wait_for(f"{path}: {three} has 1 streams, 2 before")
        write("")
        learner.wait_for(
            f"{path}: no address, expected HOST:PORT,...; goes on as it is"
        )
        wait_for_steps(tmp_path, 1000)
        learner.stop()
    assert learner.output.count("goes on as it is") == 2
    assert "no stream" not in learner.output


@pytest.mark.survives("bad-address-file")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"", "no address, expected HOST"),
        (b"# nothing\n,\n", "no address, expected HOST"),
        (b"\xff\xfe", "can't decode byte"),
    ],
)
def test_a_file_without_addresses_is_one_line(content, message, tmp_path):
    path = tmp_path / "hosts.txt"
    if content is not None:
        path.write_bytes(content)
    flags = ("--server_addresses", f"@{path}", "--savedir", tmp_path / "savedir")
    line = refusal("--env", CARTPOLE, *flags, module="polybeast")
    assert f"--server_addresses @{path}" in line and message in line
    assert not (tmp_path / "savedir").exists()


@pytest.mark.slow
@pytest.mark.survives("learner-killed")
def test_a_killed_learner_leaves_nothing_behind_and_resumes(tmp_path):
    args = ["--env", CARTPOLE, "--num_servers", 2, "--envs_per_server", 2,
            "--savedir", tmp_path, "--xpid", "x", "--log_interval_steps", 80,
            "--checkpoint_interval_seconds", 0.1]  # fmt: skip
    before = directories()
    with Program(*args, module="polybeast") as learner:
        wait_for_steps(tmp_path, 600)
        assert directories() - before
        learner.signal(signal.SIGKILL)
        assert learner.end() == -signal.SIGKILL  # Asserts that no process is left.
    assert directories() == before
    args += ["--total_steps", step(tmp_path) + 600]
    learner = succeeds(*args, module="polybeast")
    resumed_at = int(re.search(r"resuming.* at step (\d+)", learner.stderr)[1])
    assert 0 < resumed_at <= step(tmp_path) - 600
    expected = (step(tmp_path) - resumed_at) / 20
    assert delivered_and_learned(learner.stderr) == (expected, expected)
    # There is nothing left to do, and nothing is done.
    before = (tmp_path / "x" / "model.tar").read_bytes()
    learner = succeeds(*args, module="polybeast")
    assert "nothing is left to do" in learner.stderr.splitlines()[-1]
    assert (tmp_path / "x" / "model.tar").read_bytes() == before


# Garbage.


class FakeServer(threading.Thread):
    """Answers whoever connects with the same bytes, whatever is said to it."""

    def __init__(self, answer):
        super().__init__(daemon=True)
        self.answer = answer
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.start()

    def run(self):
        with contextlib.suppress(OSError):  # Closed.
            while True:
                connection, _ = self.socket.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(self.answer)
                    connection.recv(100)

    def close(self):
        self.socket.close()


class FakeGrpcServer:
    """Answers every request with the next of the messages, bytes or an exception."""

    def __init__(self, *messages, compression=None, credentials=None):
        def stream(requests, context):
            for _, message in zip(requests, messages):
                if isinstance(message, Exception):
                    raise message
                yield message

        self.server = grpc.server(
            futures.ThreadPoolExecutor(8),
            compression=compression,
            options=[("grpc.max_send_message_length", -1)],
        )
        handler = grpc.stream_stream_rpc_method_handler(stream)
        self.server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    protocol.SERVICE, {"Stream": handler}
                )
            ]
        )
        address = "127.0.0.1:0"
        if credentials is None:
            port = self.server.add_insecure_port(address)
        else:
            port = self.server.add_secure_port(address, credentials)
        self.address = f"127.0.0.1:{port}"
        self.server.start()

    def close(self):
        self.server.stop(None)


def cartpoles_first_response():
    """As a server of two CartPoles sends it."""
    flags = polybeast_env.parser().parse_args(["--env", CARTPOLE])
    env = polybeast_env.create_env(flags, 2)
    first = env.initial(1)
    welcome = make_welcome(env, first)
    welcome = pb.Response(welcome=welcome).SerializeToString()
    return pb.Response.FromString(welcome + protocol.encode_step(first))


def changed(message, change):
    message = type(message).FromString(message.SerializeToString())
    change(message)
    return message.SerializeToString()


def wrong_answers():
    """(what a server answers, what the learner says to it)."""
    rng = np.random.default_rng(1)
    good = cartpoles_first_response()
    step = pb.Response(step=good.step)
    least = pb.Response(welcome=pb.Welcome(version=-(2**31))).SerializeToString()

    def welcome(**fields):
        def change(message):
            for name, value in fields.items():
                setattr(message.welcome, name, value)

        return changed(good, change)

    def set_spec(name, value):
        def change(message):
            spec = message.welcome.step.arrays[0]
            setattr(spec, name, value) if name != "shape" else spec.shape.extend(value)

        return changed(good, change)

    def short(message):
        message.step.data[0] = b"x"

    def fewer(message):
        del message.step.data[1:]

    def float64(message):
        message.welcome.step.arrays[0].bits = 64
        message.step.data[0] += message.step.data[0]

    def other_entry(message):
        message.welcome.step.structure.keys[0] = "core_state"

    def tuple_step(message):
        message.welcome.step.structure.kind = pb.Structure.TUPLE
        del message.welcome.step.structure.keys[:]

    def no_action(message):
        message.welcome.action.structure.kind = pb.Structure.TUPLE
        del message.welcome.action.arrays[:]

    def no_bool(message):
        message.step.data[2] = b"\0\2"

    return [
        (FakeServer(rng.bytes(10_000)), ""),
        (FakeServer(b"HTTP/1.1 200 OK\r\n\r\n"), ""),
        (FakeServer(b"\0\0\0\4\0\0\0\0\0" + rng.bytes(10_000)), ""),
        (FakeGrpcServer(rng.bytes(1000)), "a message that cannot be parsed"),
        (FakeGrpcServer(least + b"\xff"), "a message that cannot be parsed"),
        (FakeGrpcServer(), "the server ended the stream"),
        (FakeGrpcServer(b""), "protocol's version differs: the learner has 3, the "),
        (FakeGrpcServer(welcome(version=77)), "the learner has 3, the server 77"),
        (
            FakeGrpcServer(welcome(observation_space="\x1b[31mtea")),
            "learner has Box([-4.8",
        ),
        (FakeGrpcServer(welcome(action_space="Discrete(3)")), "the server Discrete(3)"),
        (FakeGrpcServer(welcome(num_envs=-1)), "the server has -1 environments"),
        (FakeGrpcServer(welcome(num_envs=2**31 - 1)), "has 2147483647 environments"),
        (FakeGrpcServer(welcome(num_envs=3)), "expected [3, ...]"),
        (FakeGrpcServer(set_spec("bits", 7)), "of 7 bits"),
        (FakeGrpcServer(set_spec("shape", [2**40])), "expected sizes from 0 to 2^28"),
        (
            FakeGrpcServer(changed(good, float64)),
            "'observation' is float64 [2, 4], exp",
        ),
        (
            FakeGrpcServer(changed(good, other_entry)),
            "the server's step differs: nests",
        ),
        (
            FakeGrpcServer(changed(good, tuple_step)),
            "step is a tuple of 10, expected a ",
        ),
        (
            FakeGrpcServer(changed(good, no_action)),
            "not what the server asks for: nests differ",
        ),
        (FakeGrpcServer(changed(good, no_bool)), "has a bool that is neither 0 nor 1"),
        (
            FakeGrpcServer(welcome(observation_space="x" * 2**21)),
            "a welcome of more than 1048576 bytes",
        ),
        (FakeGrpcServer(b"\x12\x80\x20" + b"\n\0" * 2048), "of more than 1024 arrays"),
        (FakeGrpcServer(bytes(2**22)), "step is larger than this learner takes: it "),
        (FakeGrpcServer(changed(good, short)), "has 1 bytes, expected"),
        (FakeGrpcServer(changed(good, fewer)), "got 1 arrays, expected"),
        (FakeGrpcServer(good.SerializeToString(), changed(step, short)), "1 bytes"),
        (FakeGrpcServer(good.SerializeToString(), b""), "got 0 arrays, expected"),
    ]


@pytest.mark.slow
@pytest.mark.survives("garbage")
def test_garbage_harms_neither_the_learner_nor_the_server(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    port = int(address.rpartition(":")[2])
    answers = wrong_answers()
    rng = np.random.default_rng(2)
    addresses = ",".join([address, *(fake.address for fake, _ in answers)])
    with serve(address), learn(tmp_path, addresses) as learner:
        missing = {fake.address: message for fake, message in answers}
        while missing:
            line = learner.wait_for(": no stream (reconnects: ")
            bad = re.search(r"(\S+): no stream", line)[1]
            assert missing.pop(bad) in line, line
            assert line[:-1].isprintable()
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for garbage in (b"\0" * 10, preface, preface + rng.bytes(10**5)):
            for _ in range(10):
                with socket.create_connection(("127.0.0.1", port)) as s:
                    with contextlib.suppress(OSError):  # Hung up on.
                        s.sendall(garbage)
                        s.sendall(rng.bytes(10**5))
        wait_for_steps(tmp_path, 1000)
        learner.stop()
    for fake, _ in answers:
        fake.close()
    assert f"{address}: no stream" not in learner.output
    assert "Traceback" not in learner.output


def test_a_compressed_answer_is_not_unpacked():
    answer = cartpoles_first_response().SerializeToString()
    fake = FakeGrpcServer(answer, compression=grpc.Compression.Gzip)
    with Learner([fake.address]) as learner:
        learner.wait_for(lambda: learner.status()[fake.address]["last_error"])
        error = learner.status()[fake.address]["last_error"]
    fake.close()
    # Whichever gRPC tells first.
    assert "'gzip' is disabled" in error or "cannot be parsed" in error


def test_of_a_long_error_4000_bytes_are_kept():
    fake = FakeGrpcServer(RuntimeError("long" * 1500))  # gRPC sends up to 8 KB.
    with Learner([fake.address]) as learner:
        learner.wait_for(lambda: learner.status()[fake.address]["last_error"])
        error = learner.status()[fake.address]["last_error"]
    fake.close()
    assert "longlong" in error and len(error) == 4000


# Memory.


def rss_mb(pid):
    with open(f"/proc/{pid}/statm") as f:
        return int(f.read().split()[1]) * 4096 / 2**20


@pytest.mark.long
def test_memory_is_flat_over_a_million_steps(tmp_path):
    args = ["--num_servers", 2, "--envs_per_server", 16, "--unroll_length", 80,
            "--batch_size", 4, "--total_steps", 10**6, "--savedir", tmp_path,
            "--xpid", "x"]  # fmt: skip
    env = "tests.envs:torchbeast/Mock-v0"
    args += ["--agent", "benchmarks.mock", "--env", env]
    with Program(*args, module="polybeast") as learner:
        wait_for_steps(tmp_path, 200_000)
        pids = learner.workers()
        servers = {pid: rss_mb(pid) for pid in pids}
        assert len(servers) == 2
        wait_for_steps(tmp_path, 700_000, timeout_s=300)
        for pid, before in servers.items():
            assert rss_mb(pid) < before + 16
        assert learner.end() == 0
    assert delivered_and_learned(learner.output) == (12500, 12500)
    rows = [row for row in read_logs(tmp_path / "x") if int(row["step"]) > 200_000]
    growth = float(rows[-1]["rss_mb"]) - float(rows[0]["rss_mb"])
    # A batch has 9 MB; how many there are at a time differs. 800,000 steps: 100 bytes
    # lost in each would make 76.
    assert growth < 30
