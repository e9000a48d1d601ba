"""Learning, inference and whole runs on a GPU: frames and steps per second.

    python benchmarks/gpu.py --out DIR [--parts NAME ...] [--seconds 4]

Adds its results to DIR/gpu.json, each as it comes. See gpu.sh.
"""

import argparse
import functools
import json
import os
import pathlib
import sys
import time
import traceback

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch._dynamo  # noqa: E402

from benchmarks import limit, throughput  # noqa: E402
from torchbeast import machine  # noqa: E402

PONG = ["--env", "PongNoFrameskip-v4"]
PRECISIONS = "float32", "bfloat16"


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
    for B in (4, 32, 80):
        for precision in PRECISIONS:
            args = [*PONG, "--batch_size", str(B), "--precision", precision]
            flags = limit.parse("polybeast", args + ["--compile"] * compiled)
            torch._dynamo.reset()  # Or it takes what it compiled for the last variant.
            num_steps = flags.unroll_length * flags.batch_size
            update = functools.partial(limit.update_stage, flags)
            yield (
                f"{B} x 20, {precision}",
                lambda u=update, n=num_steps: rate(u(), n, seconds),
            )


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


def runs(seconds):
    """Steps per second of PolyBeast on Pong, deep network: with the defaults, and with
    more environments and larger batches."""
    cores = os.cpu_count()
    variants = [[]]
    # Few CPUs are fast in bfloat16.
    for precision in PRECISIONS[: 1 + torch.cuda.is_available()]:
        for num_servers in (cores, 2 * cores - 4):
            args = ["--num_servers", str(num_servers), "--envs_per_server", "16"]
            variants.append([*args, "--batch_size", "32", "--precision", precision])
    for args in variants:
        name = " ".join(args) or "defaults"
        yield (
            name,
            functools.partial(
                throughput.measure, "polybeast", [*PONG, *args], 10 * seconds
            ),
        )


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
            path.write_text(json.dumps(results, indent=1) + "\n")  # So far.
            if isinstance(x, dict):
                x = x["steps_per_second"]
            print(f"{part}, {name}: {x if isinstance(x, str) else f'{x:,.1f}'}")


def attempt(function):
    """Its result; or its error: one that fails does not cost the others."""
    try:
        return function()
    except Exception as e:
        traceback.print_exc()
        return f"{type(e).__name__}: {e}"


PARTS = {
    part.__name__: part for part in (inference, learner, compiled, environments, runs)
}

if __name__ == "__main__":
    main()
