"""Simulates a large fleet: many streams of one environment that costs nothing, from a
few processes of this machine, dial one learner.

    python benchmarks/streams.py --streams 16 1000

For each number of streams: the time until every one of them has made a step, the
learner's memory and threads, and its steps/s; then a fifth of the hosts are killed at
once and started again. JSON lines.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import psutil

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import polybeast_env  # noqa: E402
from tests.programs import Program, step  # noqa: E402
from tests.test_polybeast_env import free_port  # noqa: E402
from torchbeast.process import allow_open_files  # noqa: E402

ENV = "tests.envs:torchbeast/Mock-v0"


def host(address, num_streams):
    """Dials with so many streams. Prints a line when each of them has made a step."""
    from torchbeast.dialer import Dialer

    allow_open_files(16 * num_streams)
    stepped = threading.Semaphore(0)

    def create_env(flags, num_envs):
        env = polybeast_env.create_env(flags, num_envs)
        original = env.step

        def first_step(*args):
            env.step = original
            stepped.release()
            return original(*args)

        env.step = first_step
        return env

    flags = polybeast_env.parser().parse_args(
        ["--env", ENV, "--learner", address, "--envs_per_server", "1"]
    )
    for _ in range(num_streams):
        dialer = Dialer(create_env, flags, address)
        threading.Thread(target=dialer.run, daemon=True).start()
    for _ in range(num_streams):
        stepped.acquire()
    print("all", flush=True)
    threading.Event().wait()


class Host:
    def __init__(self, address, num_streams):
        command = [sys.executable, __file__, "--host", address, str(num_streams)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def wait(self):
        assert self.process.stdout.readline() == "all\n"

    def kill(self):
        self.process.kill()


def measure(num_streams, num_processes, seconds):
    per_process = num_streams // num_processes
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as directory:
        savedir = pathlib.Path(directory)
        learner = Program(
            "--agent", "benchmarks.mock", "--env", ENV, "--listen", address,
            "--batch_size", 32, "--total_steps", 10**9, "--savedir", savedir,
            "--xpid", "x", "--precision", "float32", module="polybeast",
        )  # fmt: skip
        hosts = []
        try:
            with learner:
                learner.wait_for("to resume")
                process = psutil.Process(learner.process.pid)
                rss = process.memory_info().rss

                def start(n):
                    began_at = time.monotonic()
                    new = [Host(address, per_process) for _ in range(n)]
                    hosts.extend(new)
                    for h in new:
                        h.wait()
                    return round(time.monotonic() - began_at, 1)

                def rate():
                    before, began_at = step(savedir), time.monotonic()
                    time.sleep(seconds)
                    steps = step(savedir) - before
                    return round(steps / (time.monotonic() - began_at))

                result = {"streams": num_streams, "processes": num_processes}
                result["connected_s"] = start(num_processes)
                result["steps_per_s"] = rate()
                grown = process.memory_info().rss - rss
                result["kb_per_stream"] = round(grown / num_streams / 1000)
                result["threads"] = process.num_threads()
                dying = hosts[: max(1, num_processes // 5)]
                for h in dying:
                    h.kill()
                time.sleep(5)
                result["killed"] = per_process * len(dying)
                result["steps_per_s_without"] = rate()
                result["back_s"] = start(len(dying))
                result["steps_per_s_again"] = rate()
                learner.signal(2)
                assert learner.end() == 130
                return result
        finally:
            for h in hosts:
                h.kill()


def main():
    p = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    p.add_argument("--streams", type=int, nargs="+", default=[16, 1000])
    p.add_argument("--processes", type=int, default=8)
    p.add_argument("--seconds", type=float, default=20)
    p.add_argument("--host", nargs=2, help=argparse.SUPPRESS)
    flags = p.parse_args()
    if flags.host is not None:
        host(flags.host[0], int(flags.host[1]))
    for num_streams in flags.streams:
        print(json.dumps(measure(num_streams, flags.processes, flags.seconds)))


if __name__ == "__main__":
    main()
