"""Learning, inference and whole runs on a GPU: frames and steps per second.

    python benchmarks/gpu.py --out DIR [--parts NAME ...] [--seconds 4]

Adds its results to DIR/gpu.json, each as it comes. See gpu.sh.
"""

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402

from benchmarks import limit, throughput  # noqa: E402
from torchbeast import logs, machine  # noqa: E402
from torchbeast.files import write_atomically  # noqa: E402

PONG = ["--env", "PongNoFrameskip-v4"]
PENDULUM = ["--env", "Pendulum-v1"]
NOW = ["--replay_start", "0"]
ON_GPU = ["--replay_device", "cuda"]
PRECISIONS = "float32", "tf32", "bfloat16"


def rate(function, num_steps, seconds):
    """Steps per second of the function, which waits for the GPU itself."""
    for _ in range(5):
        function()
    calls, start = 0, time.monotonic()
    while time.monotonic() - start < seconds:
        function()
        calls += 1
    return calls * num_steps / (time.monotonic() - start)


def learner(seconds, compiled=False):
    """Frames per second of updates alone, deep network."""
    for B in (8, 32) if compiled else (4, 8, 32, 80, 320):
        for precision in PRECISIONS:
            args = [*PONG, "--batch_size", str(B), "--precision", precision]
            args += ["--compile"] * compiled
            torch._dynamo.reset()  # Or it takes what it compiled for the last variant.
            yield f"{B} x 20, {precision}", functools.partial(learn, args, seconds)


def compiled(seconds):
    yield from learner(seconds, compiled=True)


def inference(seconds):
    """Steps per second of the deep network alone, from host memory and back."""
    for precision in PRECISIONS:
        flags = limit.parse("polybeast", [*PONG, "--precision", precision])
        for n in (1, 4, 16, 32, 64, 128, 256, 512):
            stage = functools.partial(limit.inference_stage, flags, n)
            yield f"{n}, {precision}", lambda s=stage, n=n: rate(s(), n, seconds / 4)


def environments(seconds):
    """Steps per second of the environments of this machine alone, by processes."""
    cores = os.cpu_count()
    args = [*PONG, "--envs_per_server", "16"]
    for n in sorted({cores // 2, cores - 2, cores, 2 * cores}):
        if n > 0:
            yield (
                f"{n} processes",
                functools.partial(
                    limit.rate, "polybeast", args, "environment", seconds, n
                ),
            )


def kernels(seconds):
    """Of the deep network: {kernel: [microseconds, number of launches]} of an update of
    32 rollouts, and of acting on 128 images."""
    for precision in PRECISIONS:
        args = [*PONG, "--precision", precision, "--batch_size", "32"]
        flags = limit.parse("polybeast", [*args, "--no-cuda_graphs"])
        for name, stage in (
            ("update", functools.partial(limit.update_stage, flags)),
            ("act", functools.partial(limit.inference_stage, flags, 128)),
        ):
            yield f"{name}, {precision}", lambda stage=stage: profile(stage())


def profile(function, num=3):
    for _ in range(5):
        function()
    with torch.profiler.profile() as found:
        for _ in range(num):
            function()
        torch.cuda.synchronize()
    of_gpu = [x for x in found.key_averages() if x.device_type != DeviceType.CPU]
    of_gpu.sort(key=lambda x: -x.self_device_time_total)
    return {
        x.key[:150]: [round(x.self_device_time_total / num), x.count / num]
        for x in of_gpu[:20]
    }


# Mostly launches: what graphs are for.
AGENTS = {
    "IMPALA, Pong": [*PONG, "--batch_size", "4"],
    "IMPALA, CartPole": ["--env", "CartPole-v1"],
    "IMPALA, CartPole, LSTM": ["--env", "CartPole-v1", "--use_lstm"],
    "PPO atari, Pong": [*PONG, "--agent", "ppo", "--preset", "atari"],
    "PPO mujoco, Pendulum": [*PENDULUM, "--agent", "ppo", "--preset", "mujoco"],
    "R2D2, Pong": [*PONG, "--agent", "r2d2", "--preset", "r2d2", *NOW],
    "DQN, Pong": [*PONG, "--agent", "r2d2", "--preset", "dqn", *NOW],
    "SAC mujoco, Pendulum": [*PENDULUM, "--agent", "sac", "--preset", "mujoco", *NOW],
    "PQN, Pong": [*PONG, "--agent", "pqn"],
    "TD3, Pendulum": [*PENDULUM, "--agent", "td3", *NOW],
}


def agents(seconds):
    """Steps per second that each agent learns from, by its own replay ratio and number
    of epochs; without graphs, with them, and with the replay on the GPU."""
    for name, args in AGENTS.items():
        for more in (("--no-cuda_graphs",), (), ON_GPU):
            if ON_GPU[0] in more and "--replay_start" not in args:
                continue
            flags = [*args, *more, "--precision", "float32"]
            yield " ".join((name, *more)), functools.partial(learn, flags, seconds)


def learn(args, seconds):
    flags = limit.parse("polybeast", args)
    update = limit.update_stage(flags)
    return rate(update, flags.unroll_length * flags.batch_size, seconds)


def runs(seconds):
    """Steps per second of PolyBeast on Pong, deep network: with the defaults, without
    graphs, with more servers, also of more environments in all, and with other
    batches; and of MonoBeast."""
    num = str(2 * os.cpu_count())
    more = (["--num_servers", num, "--envs_per_server", n] for n in ("8", "16"))
    sizes = (["--batch_size", size] for size in ("4", "32"))
    for args in ([], ["--no-cuda_graphs"], *more, *sizes):
        name = " ".join(args) or "defaults"
        yield name, functools.partial(run, "polybeast", [*PONG, *args], seconds)
    yield "MonoBeast", functools.partial(run, "monobeast", PONG, seconds)


def run(program, args, seconds):
    return throughput.measure(program, args, 5 * seconds, warm_up=2 * seconds)


def streams(seconds):
    """Steps per second of PolyBeast with an environment that does nothing."""
    for n in (16, 64, 256):
        yield f"{n} streams of 1", functools.partial(many_streams, n, seconds)


def many_streams(num, seconds):
    args = [*throughput.MOCK_ENV, "--num_servers", "16", *throughput.ONE]
    with throughput.servers(args, num // 16) as addresses:
        return run("polybeast", [*throughput.MOCK, *addresses], seconds)


PONG_RUNS = "--seed 1", "--seed 2", "--seed 1 --precision bfloat16"


def pong(seconds):
    """Of PolyBeast, every 10 s: [seconds, steps, mean return of the last 100 games],
    and how the run ended."""
    for args in PONG_RUNS:
        yield args, functools.partial(learn_pong, args.split())


def learn_pong(args, timeout_s=165):
    """Trains until the mean return is 20, or for so long."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as savedir:
        args = [*PONG, *args, "--savedir", savedir, "--xpid", "x"]
        args += ["--disable_checkpoint", "--total_steps", "3000000"]
        process = subprocess.Popen(throughput.command("polybeast", args), cwd=ROOT)
        path = pathlib.Path(savedir, "x", "logs.csv")
        start, curve, end = time.monotonic(), {}, "time is over"
        try:
            while time.monotonic() - start < timeout_s:
                time.sleep(1)
                rows = logs.read_if_there(path)
                new = means_of_100(rows)
                if new.keys() - curve.keys():  # What an end by force leaves.
                    print(*new.values(), flush=True)
                curve = new
                if curve and list(curve.values())[-1][2] >= 20:
                    end = "20 is reached"
                    break
                if process.poll() is not None:
                    end = f"exit code {process.returncode}"
                    break
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return [*curve.values(), end]


def means_of_100(rows):
    """Returns {tens of seconds: their last [seconds, steps, mean return]}."""
    points, games = {}, 0
    for row, mean in logs.moving_average(rows, "episode_return"):
        games += row.get("episodes", 0)
        if games >= 100:
            point = [row["seconds"], int(row["step"]), round(mean, 2)]
            points[row["seconds"] // 10] = point
    return points


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    p.add_argument("--seconds", type=float, default=4)
    options = p.parse_args()
    path = options.out / "gpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text()) if path.exists() else {}
    results["machine"] = machine.meta(limit.parse("polybeast", PONG))
    results["machine"]["cuda"] = torch.version.cuda
    for part in options.parts:
        for name, function in PARTS[part](options.seconds):
            results.setdefault(part, {})[name] = x = attempt(function)
            text = json.dumps(results, indent=1) + "\n"
            write_atomically(path, text.encode())  # So far.
            if isinstance(x, dict):
                x = x.get("steps_per_second", str(x))
            text = f"{x:,.1f}" if isinstance(x, float) else x
            print(f"{part}, {name}: {text}")


def attempt(function):
    """Its result; or its error: one that fails does not cost the others."""
    try:
        return function()
    except (Exception, SystemExit) as e:
        traceback.print_exc()
        return f"{type(e).__name__}: {e}"


PARTS = {
    part.__name__: part
    for part in (
        inference,
        learner,
        kernels,
        agents,
        compiled,
        environments,
        runs,
        streams,
        pong,
    )
}

if __name__ == "__main__":
    main()
