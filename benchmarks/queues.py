"""What libtorchbeast's queues cost, beside the same work in Python and a bare memcpy.

    python benchmarks/queues.py [--seconds 1] [--rounds 5] [--json FILE]

Three parts, each row the median of the rounds, in which all rows take turns:

    observations   28 KB each (uint8 [4, 84, 84]), enqueued by 1 or 4 threads, in
                   batches of 32
    rollouts       20 x 28 KB each, enqueued by 1 or 4 threads, in batches of 8 along
                   dimension 1: what a learner takes
    compute        round trips of 1, 16 and 64 callers through a DynamicBatcher whose
                   batches are answered at once: what it costs beside the network

`python` is a queue.Queue with torch.cat of what it gives, `memcpy` one thread that
copies the same items into the same place again and again: the limit.
"""

import argparse
import ctypes
import json
import os
import queue
import statistics
import threading
import time

import torch

from libtorchbeast import BatchingQueue, DynamicBatcher
from torchbeast.machine import cpu_name

OBSERVATION = (4, 84, 84)
T = 20


def through_queue(items, batch_dim, batch_size, num_producers, seconds):
    """Batches per second through a BatchingQueue."""
    batches = BatchingQueue(
        batch_dim,
        minimum_batch_size=batch_size,
        maximum_batch_size=batch_size,
        maximum_queue_size=2 * batch_size,
    )
    count = 0

    def produce(i):
        try:
            while True:
                for item in items[i::num_producers]:
                    batches.enqueue(item)
        except RuntimeError:
            pass  # Closed.

    def consume():
        nonlocal count
        for _ in batches:
            count += 1

    producers = [lambda i=i: produce(i) for i in range(num_producers)]
    stop = lambda: batches.close(discard=True)  # noqa: E731
    return count_rate(lambda: count, [consume, *producers], seconds, stop)


def through_python(items, batch_dim, batch_size, num_producers, seconds):
    """Batches per second through a queue.Queue and torch.cat."""
    waiting = queue.Queue(maxsize=2 * batch_size)
    stopped = threading.Event()
    count = 0

    def produce(i):
        while True:
            for item in items[i::num_producers]:
                if stopped.is_set():
                    return
                try:
                    waiting.put(item, timeout=1)
                except queue.Full:
                    return

    def consume():
        nonlocal count
        try:
            while not stopped.is_set():
                batch = [waiting.get(timeout=1) for _ in range(batch_size)]
                torch.cat(batch, batch_dim)
                count += 1
        except queue.Empty:
            pass  # Stopped.

    producers = [lambda i=i: produce(i) for i in range(num_producers)]
    return count_rate(lambda: count, [consume, *producers], seconds, stopped.set)


def count_rate(count, targets, seconds, stop):
    """How much count() grows per second, after a tenth of the time to warm up."""
    counted = []

    def measure():
        time.sleep(seconds / 10)
        begin, before = time.perf_counter(), count()
        time.sleep(seconds * 9 / 10)
        counted.append((count() - before) / (time.perf_counter() - begin))
        stop()

    threads = [threading.Thread(target=t) for t in [*targets, measure]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counted[0]


def by_memcpy(items, batch_size, seconds):
    """Batches per second if copying each item once were all there is to do."""
    nbytes = items[0].numel() * items[0].element_size()
    target = torch.zeros(batch_size * nbytes, dtype=torch.uint8)
    sources = [item.data_ptr() for item in items]
    batches = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for i in range(batch_size):
            source = sources[(batches * batch_size + i) % len(sources)]
            ctypes.memmove(target.data_ptr() + i * nbytes, source, nbytes)
        batches += 1
    return batches / (time.perf_counter() - begin)


def round_trips(num_callers, seconds):
    """Calls of compute() per second."""
    batcher = DynamicBatcher(batch_dim=1)
    action = torch.zeros(1, 1024, dtype=torch.int64)
    counts = [0] * num_callers

    def call(c):
        inputs = torch.zeros(1, 1, *OBSERVATION, dtype=torch.uint8)
        try:
            while True:
                batcher.compute(inputs)
                counts[c] += 1
        except RuntimeError:
            pass  # Closed.

    def serve():
        for batch in batcher:
            batch.set_outputs(action[:, : batch.get_inputs().shape[1]])

    callers = [lambda c=c: call(c) for c in range(num_callers)]
    return count_rate(lambda: sum(counts), [serve, *callers], seconds, batcher.close)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1, help="per row and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the figures here, too")
    args = parser.parse_args()

    torch.set_num_threads(1)
    observations = [
        torch.randint(256, (1, *OBSERVATION), dtype=torch.uint8) for _ in range(256)
    ]
    rollouts = [
        torch.randint(256, (T, 1, *OBSERVATION), dtype=torch.uint8) for _ in range(32)
    ]
    rows = {}  # (part, how) -> a function, its rate per second.
    for part, items, dim, size in [
        ("observations", observations, 0, 32),
        ("rollouts", rollouts, 1, 8),
    ]:
        for n in (1, 4):
            for how, f in [("queue", through_queue), ("python", through_python)]:
                rows[part, f"{how}, {n} producers"] = (
                    lambda f=f, i=items, d=dim, s=size, n=n: f(i, d, s, n, args.seconds)
                )
        rows[part, "memcpy"] = lambda i=items, s=size: by_memcpy(i, s, args.seconds)
    for n in (1, 16, 64):
        rows["compute", f"{n} callers"] = lambda n=n: round_trips(n, args.seconds)

    samples = {key: [] for key in rows}
    for _ in range(args.rounds):
        for key, row in rows.items():
            samples[key].append(row())
    median = {key: statistics.median(values) for key, values in samples.items()}

    result = {"machine": f"{os.cpu_count()} cores, {cpu_name()}", "rows": []}
    print(f"{result['machine']}; median of {args.rounds} rounds of {args.seconds:g} s")
    batch_sizes = {"observations": 32, "rollouts": 8}
    for (part, how), rate in median.items():
        row = {"part": part, "row": how}
        if part == "compute":
            row |= {"calls_per_s": rate, "us_per_call": 1e6 / rate}
            text = f"{rate:10,.0f} calls/s   {1e6 / rate:8.1f} us each"
            callers = int(how.split()[0])
            row["us_round_trip"] = callers * 1e6 / rate
            text += f"   {row['us_round_trip']:8.1f} us round trip"
        else:
            row |= {"batches_per_s": rate, "items_per_s": rate * batch_sizes[part]}
            limit = median[part, "memcpy"]
            row["of_memcpy"] = rate / limit
            text = f"{row['items_per_s']:10,.0f} items/s   {rate:8,.0f} batches/s"
            text += f"   {rate / limit:5.2f} x memcpy"
            if how.startswith("queue"):
                row["of_python"] = rate / median[part, how.replace("queue", "python")]
                text += f"   {row['of_python']:5.2f} x python"
        result["rows"].append(row)
        print(f"{part:14}{how:22}{text}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
