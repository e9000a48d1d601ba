"""Learning, inference and whole runs on a GPU: frames and steps per second.

    python benchmarks/gpu.py --out DIR [--seconds 4] [--run_seconds 30]
    python benchmarks/gpu.py --out DIR --plot

Writes DIR/gpu.json and, where matplotlib is installed, DIR/gpu.png; --plot makes only
the latter, from the former. See gpu.sh.
"""

import argparse
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
import torch._inductor.config  # noqa: E402

import vtrace  # noqa: E402
from benchmarks import limit, throughput  # noqa: E402
from torchbeast import machine  # noqa: E402

PONG = ["--env", "PongNoFrameskip-v4"]
LEARNERS = [  # Precision, compiled?, as CUDA graphs?
    ("float32", False, False),
    ("float32", True, False),
    ("float32", True, True),
    ("bfloat16", False, False),
    ("bfloat16", True, False),
    ("bfloat16", True, True),
]


def rate(function, num_steps, seconds):
    """Steps per second of the function, which waits for the GPU itself."""
    for _ in range(5):
        function()
    calls, start = 0, time.monotonic()
    while time.monotonic() - start < seconds:
        function()
        calls += 1
    return calls * num_steps / (time.monotonic() - start)


def learners(seconds):
    """Frames per second of updates alone, deep network."""
    results = {}
    for B in (32, 80):
        for precision, compiled, graphs in LEARNERS:
            args = [*PONG, "--batch_size", str(B), "--precision", precision]
            flags = limit.parse("polybeast", args + ["--compile"] * compiled)
            torch._dynamo.reset()  # Or it takes what it compiled for the last variant.
            torch._inductor.config.triton.cudagraphs = graphs
            name = precision + ", compiled" * compiled + ", CUDA graphs" * graphs
            results[f"{B} x 20, {name}"] = attempt(
                lambda flags=flags: rate(
                    limit.update_stage(flags),
                    flags.unroll_length * flags.batch_size,
                    seconds,
                )
            )
    torch._inductor.config.triton.cudagraphs = False
    return results


def inference(seconds):
    """Steps per second of the deep network alone, from host memory and back."""
    results = {}
    for precision in ("float32", "bfloat16"):
        flags = limit.parse("polybeast", [*PONG, "--precision", precision])
        for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            evaluate = limit.inference_stage(flags, n)
            results[f"{n}, {precision}"] = rate(evaluate, n, seconds / 4)
    return results


def vtrace_variants(seconds):
    """Microseconds of V-trace at 20 x 32: as it is, compiled, and as a loop."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = {
        name: torch.rand(20, 32, device=device)
        for name in ("log_rhos", "discounts", "rewards", "values")
    }
    x["bootstrap_value"] = torch.rand(32, device=device)

    def loop(log_rhos, discounts, rewards, values, bootstrap_value):
        rhos = log_rhos.exp().clamp(max=1)
        next_values = torch.cat([values[1:], bootstrap_value[None]])
        deltas = rhos * (rewards + discounts * next_values - values)
        acc, vs = torch.zeros_like(bootstrap_value), []
        for s in reversed(range(20)):
            acc = deltas[s] + discounts[s] * rhos[s] * acc
            vs.append(acc + values[s])
        return torch.stack(vs[::-1])

    def wait(function):
        def call():
            function(**x)
            if device == "cuda":
                torch.cuda.synchronize()

        return call

    variants = {
        "scan (as it is)": vtrace.from_importance_weights,
        "compiled": torch.compile(vtrace.from_importance_weights),
        "loop": loop,
    }
    return {
        name: attempt(lambda f=function: 1e6 / rate(wait(f), 1, seconds / 4))
        for name, function in variants.items()
    }


def end_to_end(seconds):
    """PolyBeast on Pong, deep network, servers on all cores; and what the environments
    of this machine do alone."""
    cores = os.cpu_count()
    results = {}
    results["environments alone"] = limit.rate(
        "polybeast", [*PONG, "--envs_per_server", "16"], "environment", 5, cores
    )
    # Few CPUs are fast in bfloat16.
    for precision in ("float32", "bfloat16")[: 1 + torch.cuda.is_available()]:
        for E in (16, 32):
            args = [*PONG, "--num_servers", str(cores), "--envs_per_server", str(E)]
            args += ["--batch_size", "32", "--precision", precision]
            run = attempt(
                lambda args=args: throughput.measure("polybeast", args, seconds)
            )
            name = f"{cores} servers of {E}, {precision}"
            results[name] = run if isinstance(run, str) else run["steps_per_second"]
            results[f"{name}: details"] = run
    return results


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = [part for part in ("learner", "inference", "end to end") if results[part]]
    figure, axes = plt.subplots(
        1, len(parts), figsize=(5 * len(parts), 4), layout="constrained", squeeze=False
    )
    for axis, part in zip(axes[0], parts):
        values = {k: v for k, v in results[part].items() if isinstance(v, float)}
        axis.barh(list(values), list(values.values()))
        axis.set_title(f"{part}: steps per second")
        axis.invert_yaxis()
    figure.savefig(path)


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--seconds", type=float, default=4)
    p.add_argument("--run_seconds", type=float, default=30)
    p.add_argument("--plot", action="store_true")
    options = p.parse_args()
    path = options.out / "gpu.json"
    if not options.plot:
        measure(options, path)
    try:
        plot(json.loads(path.read_text()), options.out / "gpu.png")
    except ImportError as e:
        print(f"{e}: --plot elsewhere makes the plot of {path}")


def measure(options, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    on_gpu = torch.cuda.is_available()
    results = {"machine": machine.meta(limit.parse("polybeast", PONG))}
    results["machine"]["cuda"] = torch.version.cuda
    parts = {"vtrace_us": vtrace_variants}
    if on_gpu:
        parts.update({"learner": learners, "inference": inference})
    else:
        print("no GPU here: learner and inference are left out")
        results.update(learner={}, inference={})
    parts["end to end"] = end_to_end
    for name, part in parts.items():
        seconds = options.run_seconds if part is end_to_end else options.seconds
        results[name] = part(seconds)
        path.write_text(json.dumps(results, indent=1) + "\n")  # So far.
    print(json.dumps({k: v for k, v in results.items() if k != "machine"}, indent=1))


def attempt(function):
    """Its result; or its error: one that fails does not cost the others."""
    try:
        return function()
    except Exception as e:
        traceback.print_exc()
        return f"{type(e).__name__}: {e}"


if __name__ == "__main__":
    main()
