"""Simulates a large fleet: many streams from a few processes of this machine dial one
learner, and answer each action with the same step of a mock environment.

    python benchmarks/streams.py --streams 16 200 1000

Prints JSON: seconds until each stream has had an action; the learner's steps/s, us of
processor time a step, MB and threads; the same after a fifth of the hosts were killed.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from subprocess import PIPE

import grpc.aio
import psutil

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENV = "tests.envs:torchbeast/Mock-v0"


def messages():
    """Returns the method that hosts call, what they send first, and then each time."""
    sys.path.insert(0, str(ROOT))
    import polybeast_env  # Here: hosts are to start within a moment.
    from torchbeast.remote import protocol, server
    from torchbeast.remote import torchbeast_pb2 as pb

    flags = polybeast_env.parser().parse_args(["--env", ENV])
    env = polybeast_env.create_env(flags, 1)
    step = env.initial(1)
    welcome = pb.Response(welcome=server.make_welcome(env, step)).SerializeToString()
    first = welcome + protocol.encode_step(step)
    later = protocol.encode_step(env.step(0 * step["last_action"]))
    return f"/{protocol.LEARNER_SERVICE}/Stream", first, later


async def dial(address, method, first, later, acted):
    """Opens one stream after the other. Sets acted after the first action."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    while True:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            async with grpc.aio.insecure_channel(address, options) as channel:
                call = channel.stream_stream(method)()
                await call.read()  # Hello
                await call.write(first)
                while await call.read() is not grpc.aio.EOF:
                    acted.set()
                    await call.write(later)
        await asyncio.sleep(1)


async def host(num_streams):
    """A process with so many streams. Prints a line when each has had an action."""
    args = pickle.load(sys.stdin.buffer)
    acted = [asyncio.Event() for _ in range(num_streams)]
    streams = asyncio.gather(*(dial(*args, event) for event in acted))
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in acted)), 300)
    print("all", flush=True)
    await streams


@contextlib.contextmanager
def child(*args, **kwargs):
    """A Python process that ends with the context, or when this process is killed."""
    process = subprocess.Popen(
        [sys.executable, *map(str, args)],
        cwd=ROOT,
        env={"GRPC_VERBOSITY": "NONE", **os.environ},
        # It is killed when its parent ends.
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),
        **kwargs,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def measure(num_streams, options, dialing, stack):
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    with socket.create_server(("127.0.0.1", 0)) as s:
        address = f"127.0.0.1:{s.getsockname()[1]}"
    flags = (
        "--agent", "benchmarks.mock", "--env", ENV, "--listen", address,
        "--max_streams", 2 * num_streams, "--savedir", directory, "--xpid", "x",
        "--total_steps", 10**9, "--batch_size", 32, "--precision", "float32",
    )  # fmt: skip
    learner = stack.enter_context(child("-m", "polybeast", *flags, stderr=PIPE))
    assert any(b"to resume" in line for line in learner.stderr), "the learner has ended"
    logs = pathlib.Path(directory, "x", "logs.csv")
    status, hosts = psutil.Process(learner.pid), {}

    def start(numbers):
        """Returns after how many seconds all streams of these hosts are there."""
        began_at = time.monotonic()
        for i in numbers:
            n = num_streams // options.hosts + (i < num_streams % options.hosts)
            new = child(__file__, "--host", n, stdin=PIPE, stdout=PIPE)
            hosts[i] = stack.enter_context(new)
            pickle.dump((address, *dialing), hosts[i].stdin)
            hosts[i].stdin.flush()
        for i in numbers:
            assert hosts[i].stdout.readline() == b"all\n", "a host has ended"
        return round(time.monotonic() - began_at, 1)

    def counters():
        step = logs.read_text().splitlines()[-1].partition(",")[0]
        return time.monotonic(), int(step), sum(status.cpu_times()[:2])

    def measured():
        before = counters()
        time.sleep(options.seconds)
        s, steps, cpu_s = (x - y for x, y in zip(counters(), before))
        rates = {"steps_per_s": round(steps / s), "us": round(1e6 * cpu_s / steps)}
        rates["mb"] = round(status.memory_info().rss / 1e6)
        return rates | {"threads": status.num_threads()}

    connected_s = start(range(options.hosts))
    while logs.read_text().count("\n") < 10:
        assert learner.poll() is None, learner.stderr.read().decode()
        time.sleep(1)
    result = {"streams": num_streams, "connected_s": connected_s, **measured()}
    for i in range(options.hosts // 5):
        hosts[i].kill()
    result |= {"back_s": start(range(options.hosts // 5)), "then": measured()}
    learner.send_signal(signal.SIGINT)
    assert learner.stderr.read() and learner.wait() == 130
    return result


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--streams", type=int, nargs="+", default=[16, 200, 1000])
    p.add_argument("--hosts", type=int, default=10, help="processes, at least 5")
    p.add_argument("--seconds", type=float, default=20)
    p.add_argument("--host", type=int, help=argparse.SUPPRESS)
    if (flags := p.parse_args()).host:
        return asyncio.run(host(flags.host))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    dialing = messages()
    for n in flags.streams:
        with contextlib.ExitStack() as stack:
            print(json.dumps(measure(n, flags, dialing, stack)), flush=True)


if __name__ == "__main__":
    main()
