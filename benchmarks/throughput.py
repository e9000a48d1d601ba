"""Agent steps per second of the real programs, beside the machine's limit, in one run.

    python benchmarks/throughput.py [--seconds 60] [--rounds 3] [--runs NAME ...]

Each round measures every run once: first the limit (benchmarks/limit.py), then the
program, WARM_UP_S seconds not counted. Prints a table of medians and writes JSON, with
the machine, versions and flags: steps per second, their share of the limit, processor
microseconds per step of the learner's process and of all others, and the most memory
that all of them used together (pages they share counted once).
"""

import argparse
import collections
import contextlib
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import psutil

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import limit  # noqa: E402
from torchbeast import logs, machine  # noqa: E402

WARM_UP_S = 10
PONG = ["--env", "PongNoFrameskip-v4"]
MOCK_ENV = ["--env", "tests.envs:torchbeast/Mock-v0"]
MOCK = [*MOCK_ENV, "--agent", "benchmarks.mock", "--precision", "float32"]
ONE = ["--envs_per_server", "1"]
# The paper's batches: small updates are mostly Python.
MOCK += ["--batch_size", "32"]

FOUR = [*MOCK_ENV, "--num_servers", "4", *ONE]

# Name: (program, its flags, flags of servers started for it, streams to each of them or
# DIAL: they dial the learner).
DIAL = "dial"
RUNS = {
    "MonoBeast": ("monobeast", PONG, None, 0),
    "PolyBeast, shallow": ("polybeast", [*PONG, "--net", "shallow"], None, 0),
    "PolyBeast, deep": ("polybeast", PONG, None, 0),
    "PolyBeast, deep, TCP": ("polybeast", PONG, PONG, 1),
    "mock, 4 streams of 1": ("polybeast", [*MOCK, "--num_servers", "4", *ONE], None, 0),
    "mock, 4 streams of 16": (
        "polybeast",
        [*MOCK, "--num_servers", "4", "--envs_per_server", "16"],
        None,
        0,
    ),
    "mock, 64 streams of 1": ("polybeast", MOCK, FOUR, 16),
    "mock, 4 streams of 1, TCP": ("polybeast", MOCK, FOUR, 1),
    "mock, 4 streams of 1, dialed": ("polybeast", MOCK, FOUR, DIAL),
}


def command(program, args):
    return [sys.executable, "-m", program, *args]


@contextlib.contextmanager
def servers(args, streams):
    """Starts servers over TCP. Flags with which a learner has them."""
    n = int(args[args.index("--num_servers") + 1])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    address = f"127.0.0.1:{port}"
    program = subprocess.Popen(
        command(
            "polybeast_env",
            [*args, "--learner" if streams == DIAL else "--address", address],
        ),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in program.stderr:
            if "environments for each stream" in line:
                break
        else:
            raise RuntimeError(f"no servers at {address}")
        threading.Thread(target=program.stderr.read, daemon=True).start()
        if streams == DIAL:
            yield ["--listen", address]
        else:
            addresses = [f"127.0.0.1:{port + i}" for i in range(n)] * streams
            yield ["--server_addresses", ",".join(addresses)]
    finally:
        program.terminate()
        program.wait()


def used():
    """{process id: (processor seconds, MB)} of all this benchmark's descendants."""
    result = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times, memory = process.cpu_times(), process.memory_full_info()
            result[process.pid] = times.user + times.system, memory.pss / 2**20
    return result


def of_threads(learner):
    """{(program, thread's name, id): processor seconds [in user mode, in the kernel]}
    of all this benchmark's descendants, of which the learner has this process id."""
    result = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            program = "learner" if process.pid == learner else "others"
            for x in process.threads():
                with contextlib.suppress(OSError):
                    path = pathlib.Path(f"/proc/{process.pid}/task/{x.id}/comm")
                    seconds = np.array([x.user_time, x.system_time])
                    result[program, path.read_text().strip(), x.id] = seconds
    return result


def measure(program, args, seconds, warm_up=WARM_UP_S):
    """Runs the program for as long. A dict of what was measured."""
    with tempfile.TemporaryDirectory() as savedir:
        args = [*args, "--savedir", savedir, "--xpid", "x", "--disable_checkpoint"]
        args += ["--log_interval_steps", "200", "--total_steps", str(10**9)]
        errors = pathlib.Path(savedir, "errors")
        with open(errors, "w") as f:
            process = subprocess.Popen(command(program, args), cwd=ROOT, stderr=f)
        path = pathlib.Path(savedir, "x", "logs.csv")

        def sleep(seconds):
            time.sleep(seconds)
            if process.poll() is not None:
                last = errors.read_text()[-1000:]
                raise RuntimeError(f"ended by itself: {process.args}: {last}")

        try:
            while not logs.read_if_there(path):
                sleep(0.1)
            sleep(warm_up)
            before, first, peak_mb = used(), logs.read(path)[-1], 0
            threads_before = of_threads(process.pid)
            start = time.monotonic()
            # At least to the next line of logs.csv.
            while time.monotonic() - start < seconds or logs.read(path)[-1] == first:
                sleep(min(2, seconds))
                peak_mb = max(peak_mb, sum(mb for _, mb in used().values()))
            after, last = used(), logs.read(path)[-1]
            threads = of_threads(process.pid)
            flags = json.loads(path.with_name("meta.json").read_text())["flags"]
        finally:
            process.terminate()
            process.wait()
    steps = last["step"] - first["step"]
    seconds = {pid: s - before.get(pid, (0, 0))[0] for pid, (s, _) in after.items()}
    learner = seconds.pop(process.pid)
    took = last["seconds"] - first["seconds"]
    busiest, by_name = [], collections.defaultdict(lambda: np.zeros(2))
    for key, x in threads.items():
        x = x - threads_before.get(key, 0)
        by_name[" ".join(key[:2])] += 1e6 * x / steps
        if key[0] == "learner":
            busiest.append(x.sum() / took)
    return {
        "steps_per_second": steps / took,
        # The learner's.
        "busiest_threads": [round(x, 2) for x in sorted(busiest, reverse=True)[:8]],
        # By program and name, where it is at least 1: in user mode, in the kernel.
        "threads_us": {
            n: x.round(1).tolist() for n, x in by_name.items() if sum(x) > 1
        },
        "learner_us": 1e6 * learner / steps,
        "others_us": 1e6 * sum(seconds.values()) / steps,
        "peak_mb": peak_mb,
        "policy_lag": last["policy_lag"],
        "precision": flags["precision"],
    }


def measure_run(name, options):
    program, args, server_args, streams = RUNS[name]
    with contextlib.ExitStack() as stack:
        result = {}
        if args[:2] == PONG:
            rates = limit.measure(program, args, options.limit_seconds)
            result = {"limit": rates["limit"], "rates": rates}
        if server_args is not None:
            if "--num_servers" not in server_args:
                flags = limit.parse("polybeast", args)
                server_args = [*server_args, "--num_servers", str(flags.num_servers)]
                server_args += ["--envs_per_server", str(flags.envs_per_server)]
            args = [*args, *stack.enter_context(servers(server_args, streams))]
        result.update(measure(program, args, options.seconds))
    if "limit" in result:
        result["share"] = result["steps_per_second"] / result["limit"]
    print(f"{name}: {json.dumps(result)}", file=sys.stderr)
    return result


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seconds", type=float, default=60)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--limit_seconds", type=float, default=3)
    p.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    p.add_argument("--out", metavar="FILE.json")
    options = p.parse_args()
    rounds = [
        {name: measure_run(name, options) for name in options.runs}
        for _ in range(options.rounds)
    ]
    runs = {}
    for name in options.runs:
        results = [r[name] for r in rounds]
        others = "rates", "precision", "busiest_threads", "threads_us"
        keys = [key for key in results[0] if key not in others]
        medians = {key: statistics.median(r[key] for r in results) for key in keys}
        runs[name] = {
            **{key: round(x, 3) for key, x in medians.items()},
            "flags": RUNS[name][1],
            "precision": results[0]["precision"],
            "rounds": results,
        }
    print("| run | steps/s | limit | share | learner us | others us | peak MB |")
    print("|---|---|---|---|---|---|---|")
    for name, run in runs.items():
        of_limit = (
            f"{run['limit']:,.0f} | {run['share']:.2f}" if "limit" in run else "|"
        )
        print(
            f"| {name} | {run['steps_per_second']:,.0f} | {of_limit} | "
            f"{run['learner_us']:,.0f} | {run['others_us']:,.0f} | "
            f"{run['peak_mb']:,.0f} |"
        )
    data = {
        "seconds": options.seconds,
        "runs": runs,
        "machine": machine.meta(argparse.Namespace()),
    }
    if options.out:
        pathlib.Path(options.out).write_text(json.dumps(data, indent=1) + "\n")
    else:
        print(json.dumps(data))


if __name__ == "__main__":
    main()
