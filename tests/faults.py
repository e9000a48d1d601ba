"""Both programs, and what their machine does to them, where that takes more than a few
seconds. pytest does not find it by itself: make test-faults.
"""

import contextlib
import os
import queue
import random
import re
import resource
import signal
import socket
import threading
import time
from concurrent import futures

import grpc
import pytest

import polybeast_env
from tests.programs import (
    CALM,
    TIMEOUT_S,
    Program,
    args,
    both,
    disk,
    load,
    marked,
    mono_first,
    poly_first,
    private_mounts,
    read_logs,
    rollouts,
    run,
    step,
    succeeds,
    wait_for_steps,
)
from tests.test_polybeast_env import free_port
from tests.test_polybeast_faults import learn, serve
from torchbeast import files
from torchbeast.remote.server import EnvironmentServer

LOG = ("--log_interval_steps", 40)  # A line for every update.
SAVE = ("--checkpoint_interval_seconds", 1e-9)  # A checkpoint, too.


def start(module, savedir, *others, **kwargs):
    return Program(*args(module, savedir, *LOG, *others, **kwargs), module=module)


@pytest.fixture
def savedir(tmp_path):
    return tmp_path / "logs"


@pytest.fixture(autouse=True)
def empty_temporary_directory(tmp_path_factory, monkeypatch):
    """Sockets' paths must be short. Nothing is left in it."""
    path = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(path))
    yield path
    assert list(path.glob(f"{files.SOCKETS}*")) == []


# Kills.


@pytest.mark.survives("learner-killed")
@mono_first
def test_a_run_that_is_killed_over_and_over_loses_no_more_than_it_had_not_saved(
    savedir, module
):
    """At random moments: while it starts, learns, or writes a checkpoint."""
    rng = random.Random(module)
    saved = 0
    for _ in range(10):
        with start(module, savedir, *SAVE) as program:
            if rng.random() < 0.2:
                time.sleep(rng.uniform(0, 3))
            else:
                wait_for_steps(savedir, 40 * rng.randint(1, 10))
                time.sleep(rng.uniform(0, 0.1))
            program.signal(signal.SIGKILL)
            assert program.end() == -signal.SIGKILL
        if not (savedir / "x" / "model.tar").exists():
            continue
        resumed = re.search(r"resuming .* at step (\d+)", program.output)
        assert not resumed or int(resumed[1]) == saved
        last = load(savedir)["step"]
        assert last >= saved
        assert step(savedir) - last in (0, 40)  # Logged first, then saved.
        saved = last
    assert saved > 400
    with start(module, savedir, steps=saved + 400) as program:
        assert program.end() == 0
    # Every update is there once, those of all the killed runs included.
    steps = [int(row["step"]) for row in read_logs(savedir / "x")]
    assert steps == list(range(40, saved + 401, 40))


@pytest.mark.survives("learner-killed")
@both
def test_a_killed_run_leaves_no_process_no_file_and_no_lock(
    savedir, module, empty_temporary_directory
):
    """Not even actors and servers that are in the middle of a step."""
    with start(module, savedir, env="tests.faulty_envs:Stuck-v0") as program:
        program.wait_for("sleeps for an hour")
        with pytest.raises(files.Locked, match=f"process {program.process.pid} on "):
            files.lock(savedir / "x" / "lock")
        program.signal(signal.SIGKILL)
        assert program.end() == -signal.SIGKILL
    files.lock(savedir / "x" / "lock").close()
    assert not list(empty_temporary_directory.iterdir())


@pytest.mark.survives("run-in-use")
@poly_first
def test_a_run_is_tested_while_it_is_trained(savedir, module):
    with start(module, savedir, "--checkpoint_interval_seconds", 0.1) as program:
        wait_for_steps(savedir, 40)
        succeeds(*args(module, savedir), "--mode", "test", "--num_test_episodes", 1,
                 module=module)  # fmt: skip
        program.stop(signal.SIGTERM)


@pytest.mark.survives("run-directory-deleted")
@poly_first
def test_a_run_whose_directory_is_deleted_ends_with_one_error(savedir, module):
    with start(module, savedir, "--checkpoint_interval_seconds", 0.5) as program:
        wait_for_steps(savedir, 40)
        (savedir / "x").rename(savedir / "y")
        assert program.end() == 1
    assert "No such file or directory" in program.output, program.output
    assert "Traceback" not in program.output


# A machine that sleeps.


@pytest.mark.survives("machine-sleeps")
@mono_first
def test_a_machine_that_sleeps_and_wakes_goes_on_where_it_was(savedir, module):
    with start(module, savedir) as program:
        wait_for_steps(savedir, 400)
        before = program.workers()
        processes = marked(program.mark)
        for signum in (signal.SIGSTOP, signal.SIGCONT):
            for pid in processes:
                os.kill(pid, signum)
            time.sleep(40 if signum == signal.SIGSTOP else 0)  # Keepalive's is 30.
        wait_for_steps(savedir, 1000)
        assert program.workers() == before
        program.stop(signal.SIGTERM)
    for word in ("Traceback", "died", "started again", "no stream"):
        assert word not in program.output
    steps = [int(row["step"]) for row in read_logs(savedir / "x")]
    assert steps == list(range(40, steps[-1] + 1, 40))


# Memory, and the clock.


@pytest.mark.survives("shared-memory-too-small")
def test_too_little_shared_memory_is_one_line(tmp_path):
    """To the byte: with as much as it says, it trains."""

    def limited_to(size):
        mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
        return run(*args("monobeast", tmp_path / "logs", steps=40),
                   prefix=private_mounts(mount))  # fmt: skip

    result = limited_to("100k")
    [line] = result.stderr.splitlines()
    needed = re.search("need ([0-9,]+) bytes of shared memory, /dev/shm has", line)[1]
    needed = int(needed.replace(",", ""))
    result = limited_to(needed - resource.getpagesize())
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "logs").exists()
    result = limited_to(needed)
    assert result.returncode == 0, result.stderr


@pytest.mark.survives("clock-set-back")
@mono_first
def test_a_clock_that_is_set_back_changes_nothing(savedir, module):
    others = (*LOG, "--checkpoint_interval_seconds", 0.5)
    flags = args(module, savedir, *others, env=CALM)
    with Program(module, *flags, module="tests.clock") as program:
        wait_for_steps(savedir, 800)
        assert load(savedir)["step"] > 0
        program.stop(signal.SIGTERM)
    rows = read_logs(savedir / "x")
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds) and seconds[0] >= 0
    assert all(float(row["sps"]) > 0 for row in rows)


# Signals.


@pytest.mark.survives("signal-at-start")
@poly_first
def test_a_signal_at_any_moment_of_the_start_is_no_traceback(savedir, module):
    with start(module, savedir) as program:
        began = time.monotonic()
        wait_for_steps(savedir, 40)
        seconds = time.monotonic() - began
        os.killpg(program.process.pid, signal.SIGTERM)
        assert program.end() == 128 + signal.SIGTERM
    for i in range(8):
        with start(module, savedir) as program:
            time.sleep(seconds * i / 8)
            os.killpg(program.process.pid, signal.SIGTERM)
            # Before the program deals with signals, it is the system that ends it.
            assert program.end() in (128 + signal.SIGTERM, -signal.SIGTERM)
        for word in ("Traceback", "error:", "ended while", "died"):
            assert word not in program.output


@pytest.mark.survives("signal-at-start")
def test_ctrl_c_while_servers_start_is_no_traceback(savedir):
    for i in range(3):
        with start("polybeast", savedir) as program:
            while not program.workers():
                time.sleep(0.01)
            time.sleep(0.3 * i)
            os.killpg(program.process.pid, signal.SIGINT)
            assert program.end() == 128 + signal.SIGINT
        for word in ("Traceback", "error:", "ended while"):
            assert word not in program.output


@pytest.mark.survives("signal-while-waiting", "environment-hangs")
@poly_first
def test_a_signal_ends_a_run_whose_learner_waits_for_rollouts(savedir, module):
    with start(module, savedir, env="tests.faulty_envs:Stuck-v0") as program:
        program.wait_for("sleeps for an hour")
        program.stop(signal.SIGTERM)
    assert "Traceback" not in program.output
    assert load(savedir)["step"] > 0


@pytest.mark.survives("second-signal")
@poly_first
def test_a_second_signal_ends_it_at_once(savedir, module):
    with start(module, savedir) as program:
        wait_for_steps(savedir, 40)
        os.mkfifo(savedir / "x" / "model.tar.tmp")  # Nobody reads what is saved.
        program.signal(signal.SIGTERM)
        time.sleep(1.5)
        program.stop()
    assert "quit without saving" in program.output
    assert "Traceback" not in program.output


@pytest.mark.survives("signal")
@poly_first
def test_a_signal_that_comes_twice_is_one(savedir, module):
    """As under timeout(1), which passes on what its process group got, too."""
    with start(module, savedir) as program:
        wait_for_steps(savedir, 40)
        program.signal(signal.SIGTERM)
        program.stop(signal.SIGTERM)
    assert load(savedir)["step"] == int(read_logs(savedir / "x")[-1]["step"])


@pytest.mark.survives("signal-while-saving")
@both
def test_a_signal_while_a_checkpoint_is_written_leaves_a_whole_one(savedir, module):
    with start(module, savedir, *SAVE) as program:
        wait_for_steps(savedir, 40)
        temporary = savedir / "x" / "model.tar.tmp"
        deadline = time.monotonic() + TIMEOUT_S
        while not temporary.exists():
            assert time.monotonic() < deadline
        program.stop(signal.SIGTERM)
    assert load(savedir)["step"] == int(read_logs(savedir / "x")[-1]["step"])
    assert not temporary.exists()


# What is left behind.


@pytest.mark.survives("learner-and-servers-killed")
def test_the_next_run_removes_sockets_of_a_learner_and_servers_killed_together(
    savedir, empty_temporary_directory
):
    def directories():
        return set(empty_temporary_directory.glob(f"{files.SOCKETS}*"))

    with start("polybeast", savedir) as program:
        wait_for_steps(savedir, 40)
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # None sees another's end.
            program.signal_all(signum)
        program.end()
    [killed] = directories()
    another = empty_temporary_directory / f"{files.SOCKETS}of-somebody"
    another.mkdir()
    with start("polybeast", savedir, "--xpid", "y", env=CALM) as program:
        program.wait_for("results in")
        [running] = directories() - {another}
        assert running != killed
        with start("polybeast", savedir) as other:
            other.wait_for("results in")
            assert running in directories()
            other.stop(signal.SIGTERM)
        program.stop(signal.SIGTERM)
    assert directories() == {another}
    another.rmdir()


# The network.


class Link:
    """Between a learner and a server at a port: hands on what comes, later."""

    def __init__(self, port, delay_s=0.0):
        self.delay_s = delay_s
        self.cut = threading.Event()  # What is on its way stays there.
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.port = port
        self.connections = []
        self._run(self._accept)

    def _run(self, target, *args):
        threading.Thread(target=target, args=args, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):  # Closed.
            while True:
                ours, _ = self.socket.accept()
                theirs = socket.create_connection(("127.0.0.1", self.port))
                self.connections += [ours, theirs]
                for source, sink in ((ours, theirs), (theirs, ours)):
                    on_its_way = queue.Queue()
                    self._run(self._take, source, on_its_way)
                    self._run(self._give, sink, on_its_way)

    def _take(self, source, on_its_way):
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                on_its_way.put((time.monotonic() + self.delay_s, data))
        on_its_way.put((0, b""))

    def _give(self, sink, on_its_way):
        with contextlib.suppress(OSError):
            while True:
                at, data = on_its_way.get()
                time.sleep(max(0, at - time.monotonic()))
                while self.cut.is_set():
                    time.sleep(0.1)
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        for connection in self.connections:
            connection.close()


def end(learner, savedir):
    """Of a run with servers: everything that was begun is accounted for."""
    learner.stop(signal.SIGTERM)
    counts = rollouts(learner.output)
    assert f"step {20 * counts['learned from']} of" in learner.output
    return counts["lost with their stream"]


@pytest.mark.survives("network-slow")
def test_a_slow_network_makes_steps_late_and_loses_none(tmp_path):
    port = free_port()
    with (
        serve(f"127.0.0.1:{port}", num_envs=8),
        Link(port, delay_s=0.2) as link,
        learn(tmp_path, link.address) as learner,
    ):
        wait_for_steps(tmp_path, 160)
        link.cut.set()  # For less than it takes to be given up.
        time.sleep(10)
        link.cut.clear()
        wait_for_steps(tmp_path, 160)
        assert end(learner, tmp_path) == 0
    assert "no stream" not in learner.output


@pytest.mark.survives("connection-half-open")
def test_a_half_open_connection_is_given_up_by_both_sides(tmp_path):
    port = free_port()
    with (
        serve(f"127.0.0.1:{port}") as server,
        Link(port) as link,
        learn(tmp_path, link.address) as learner,
    ):
        wait_for_steps(tmp_path, 1000)
        link.cut.set()  # Both sides' connections stay open.
        learner.wait_for("no stream")
        server.wait_for("disconnected")
        link.cut.clear()
        learner.wait_for(": connected")
        wait_for_steps(tmp_path, 1000)
        assert end(learner, tmp_path) >= 2


@pytest.mark.survives("connection-half-open")
def test_a_stream_outlives_a_long_step_and_not_a_host_that_vanishes_in_one(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    env = "tests.faulty_envs:Stuck-v0"
    with (
        serve(address, env=env, num_envs=1) as server,
        learn(tmp_path, address, "--batch_size", 1, env=env) as learner,
    ):
        server.wait_for("sleeps for an hour")
        with pytest.raises(AssertionError, match="no 'no stream' within"):
            # Pings go to and fro meanwhile.
            learner.wait_for("no stream", timeout_s=45)
        server.signal_all(signal.SIGSTOP)
        learner.wait_for("no stream")
        server.signal_all(signal.SIGCONT)
        assert end(learner, tmp_path) == 1


@pytest.mark.survives("server-stopped")
def test_a_server_that_stops_for_40_s_costs_its_rollouts_and_comes_back(tmp_path):
    one, two = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with (
        serve(one, env=CALM) as server,
        serve(two, env=CALM),
        learn(tmp_path, f"{one},{two}", env=CALM) as learner,
    ):
        wait_for_steps(tmp_path, 400)
        [pid] = server.workers()
        os.kill(pid, signal.SIGSTOP)
        wait_for_steps(tmp_path, 400)  # The other one goes on.
        time.sleep(40)
        os.kill(pid, signal.SIGCONT)
        learner.wait_for(f"{one}: connected")
        wait_for_steps(tmp_path, 400)
        assert end(learner, tmp_path) == 2
    assert f"{two}: no stream" not in learner.output


@pytest.mark.survives("other-environment")
def test_another_environment_at_the_same_address_is_refused(tmp_path):
    one, two = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with (
        serve(two, env=CALM),
        learn(tmp_path, f"{one},{two}", env=CALM) as learner,
    ):
        with serve(one, env=CALM):
            wait_for_steps(tmp_path, 400)
        with serve(one, env="MountainCar-v0"):
            line = learner.wait_for("the observation space differs")
            assert line.count("Box(") == 2 and one in line
            wait_for_steps(tmp_path, 400)
        with serve(one, env=CALM):
            learner.wait_for(f"{one}: connected")
        end(learner, tmp_path)


@pytest.mark.long
@pytest.mark.survives("many-servers")
def test_two_hundred_servers_that_start_at_once_are_all_learned_from(tmp_path):
    flags = polybeast_env.parser().parse_args(["--env", "CartPole-v1"])
    flags.envs_per_server = 1
    servers, addresses = [], []
    for _ in range(200):
        server = grpc.server(futures.ThreadPoolExecutor(2))
        stub = EnvironmentServer(polybeast_env.create_env, flags)
        server.add_generic_rpc_handlers(stub.handlers())
        port = server.add_insecure_port("127.0.0.1:0")
        servers.append(server)
        addresses.append(f"127.0.0.1:{port}")
    with learn(tmp_path, ",".join(addresses)) as learner:
        learner.wait_for("200 streams")
        time.sleep(5)  # Long enough to wait for them in earnest.
        for server in servers:
            server.start()
        wait_for_steps(tmp_path, 200 * 20 * 2)
        end(learner, tmp_path)
    for server in servers:
        server.stop(None)


# Several learners.


# python -m tests.constants sets it: a rank that does not vote is gone after this time.
VOTE = "torchbeast.ranks.VOTE_TIMEOUT_S=15"


def start_ranks(module, savedir, num, *others, restarts=0):
    flags = args(module, savedir, *LOG, "--batch_size", 6, *others)
    torchrun = ("--standalone", "--max-restarts", str(restarts))
    return Program(
        VOTE, module, *flags, module="tests.constants", ranks=num, torchrun=torchrun
    )


@pytest.mark.survives("rank-killed")
def test_each_rank_is_killed_in_turn_and_the_run_goes_on(savedir):
    with start_ranks("polybeast", savedir, 2, *SAVE, restarts=2) as program:
        for rank in range(2):
            wait_for_steps(savedir, 480)
            before = program.ranks()
            killed_at = time.monotonic()
            os.kill(before[rank], signal.SIGKILL)
            while set(program.ranks()) & set(before):
                assert time.monotonic() < killed_at + TIMEOUT_S
                time.sleep(0.1)
        wait_for_steps(savedir, 480)
        program.signal(signal.SIGTERM)
        program.end()
    steps = [int(row["step"]) for row in read_logs(savedir / "x")]
    assert steps == list(range(120, steps[-1] + 1, 120))
    assert load(savedir)["step"] == steps[-1]


@pytest.mark.long
@pytest.mark.survives("rank-stopped")
def test_a_rank_that_is_stopped_is_given_up_and_the_run_is_resumed(savedir):
    with start_ranks("monobeast", savedir, 2, restarts=1) as program:
        wait_for_steps(savedir, 480)
        pid = program.ranks()[1]
        os.kill(pid, signal.SIGSTOP)
        program.wait_for("another rank is gone: ")
        program.wait_for("; results in")  # It is saved.
        saved = load(savedir)["step"]
        program.wait_for(f"resuming {savedir}/x/model.tar at step {saved}")
        wait_for_steps(savedir, 480)
        program.signal(signal.SIGTERM)
        program.end()


@pytest.mark.survives("rank-without-rollouts")
def test_a_rank_without_servers_holds_the_others_up_and_says_so(savedir):
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    flags = ("--env", "CartPole-v1", "--savedir", savedir, "--xpid", "x", *LOG,
             "--server_addresses", ",".join(addresses), "--batch_size", 2)  # fmt: skip
    with (
        serve(addresses[0]),
        serve(addresses[1]) as second,
        Program(
            VOTE, "polybeast", *flags, module="tests.constants", ranks=2
        ) as program,
    ):
        wait_for_steps(savedir, 480)
        second.signal(signal.SIGTERM)
        second.end()
        program.wait_for("rank 1 has no rollouts: 0 of 1 streams are connected")
        reached = step(savedir)
        time.sleep(30)  # Twice as long as a rank that does not vote is waited for.
        assert step(savedir) - reached <= 40
        with serve(addresses[1]):
            program.wait_for("rank 1 has rollouts again")
            wait_for_steps(savedir, 480)
            program.signal(signal.SIGTERM)
            program.end()
    log = (savedir / "x" / "out.rank1.log").read_text()
    n = rollouts(program.output + log)
    assert n["learned from"] > 20


@pytest.mark.survives("rank-disk-full")
def test_a_full_disk_of_the_first_rank_ends_all(tmp_path):
    with disk(tmp_path / "disk", "size=2m") as path:
        with start_ranks("monobeast", path, 2, "--num_actors", 0) as program:
            wait_for_steps(path, 1200)
            rest = bytes(os.statvfs(path).f_bavail * 4096)
            with contextlib.suppress(OSError):  # The program may have written, too.
                (path / "other").write_bytes(rest)
            program.end()
    assert "No space left on device" in program.output
    assert program.output.count("Traceback") <= 1  # Torchrun's own.
