"""What blocks in libtorchbeast lets other threads run, and ends when it should.

Each case is a process of its own: one that held the GIL could not even time itself out.
"""

import signal
import subprocess
import sys
import time

import pytest

from tests.programs import ROOT

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # It would take two seconds to load.
"""
PRELUDE = """
import ctypes, threading, time
import numpy as np
import libtorchbeast

row = np.zeros((1, 3), np.float32)
queue = libtorchbeast.BatchingQueue(
    0, minimum_batch_size=1, maximum_batch_size=1, maximum_queue_size=1)
batcher = libtorchbeast.DynamicBatcher(0)
taken = []  # Batches that no one answers.
"""

# Setup and the call that then blocks.
CALLS = {
    "enqueue": ("queue.enqueue(row)", "queue.enqueue(row)"),
    "dequeue_many": ("", "queue.dequeue_many()"),
    "next_item": ("", "next(queue)"),
    "compute": ("", "batcher.compute(row)"),
    "compute_of_a_batch_being_evaluated": (
        "threading.Thread(target=lambda: taken.append(next(batcher)),"
        " daemon=True).start()",
        "batcher.compute(row)",
    ),
    "next_batch": ("", "next(batcher)"),
}
every_call = pytest.mark.parametrize("call", CALLS)


def start(code, torch=False):
    prelude = PRELUDE if torch else WITHOUT_TORCH + PRELUDE
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout_s=60):
    """(exit code, stdout, stderr). TimeoutError if the process hangs."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise TimeoutError("the process hangs") from None
    return process.returncode, out, err


# A thread blocks; the main thread goes on, closes everything, and sees it end.
BLOCKED_BESIDE_MAIN = """
def blocked():
    started.set()
    try:
        {block}
        print("returned")
    except (libtorchbeast.ClosedBatchingQueue, StopIteration) as e:
        print("ended by", type(e).__name__)

{setup}
started = threading.Event()
thread = threading.Thread(target=blocked)
thread.start()
started.wait()
for _ in range(10):
    time.sleep(0.01)  # Gives the GIL away, and gets it back.
print("main runs", thread.is_alive())
queue.close()
batcher.close()
thread.join()
"""


@every_call
def test_other_threads_run_meanwhile_and_close_ends_it(call):
    setup, block = CALLS[call]
    code, out, err = finish(start(BLOCKED_BESIDE_MAIN.format(setup=setup, block=block)))
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "main runs True" and lines[1].startswith("ended by")


def test_a_call_that_keeps_the_gil_is_noticed():
    """PyDLL calls functions without releasing the GIL: the intended deadlock."""
    block = "ctypes.PyDLL(None).pause()"
    with pytest.raises(TimeoutError):
        finish(start(BLOCKED_BESIDE_MAIN.format(setup="", block=block)), timeout_s=5)


@every_call
def test_ctrl_c_ends_it(call):
    setup, block = CALLS[call]
    process = start(f"""
{setup}
print("blocking", flush=True)
try:
    {block}
except KeyboardInterrupt:
    print("interrupted")
# What the interrupted call left behind is in no one's way.
thread = threading.Thread(
    target=lambda: [b.set_outputs(b.get_inputs()) for b in batcher])
thread.start()
batcher.compute(row)
batcher.close()
thread.join()
while queue.size():
    queue.dequeue_many()
queue.enqueue(row)
queue.dequeue_many()
""")
    assert process.stdout.readline() == "blocking\n"
    time.sleep(0.5)  # Until it does.
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out) == (0, "interrupted\n"), err


@every_call
def test_a_daemon_thread_that_blocks_does_not_disturb_the_end(call):
    setup, block = CALLS[call]
    code, out, err = finish(
        start(
            f"""
def blocked():
    {block}

{setup}
for _ in range(3):
    threading.Thread(target=blocked, daemon=True).start()
time.sleep(0.2)
print("end")
""",
            torch=call == "compute",  # It takes seconds to load.
        )
    )
    assert (code, out, err) == (0, "end\n", "")


@every_call
def test_daemon_threads_that_close_wakes_at_the_end_do_not_disturb_it(call):
    setup, block = CALLS[call]
    for _ in range(3):
        code, out, err = finish(
            start(f"""
def blocked():
    try:
        {block}
    except (libtorchbeast.ClosedBatchingQueue, StopIteration):
        pass

{setup}
for _ in range(5):
    threading.Thread(target=blocked, daemon=True).start()
time.sleep(0.2)
queue.close()
batcher.close()
print("end")
""")
        )
        assert (code, out, err) == (0, "end\n", "")


def test_memory_is_flat_whatever_the_sizes_of_batches():
    code, out, err = finish(
        start("""
def rss_kb():
    return int(open("/proc/self/statm").read().split()[1]) * 4

def serve():
    for batch in batcher:
        batch.set_outputs(np.zeros((len(batch), 4096), np.float32))

thread = threading.Thread(target=serve)
thread.start()
batcher.compute(np.zeros(256))
begin = rss_kb()
for n in range(1, 257):
    batcher.compute(np.zeros(n))
print("grown by kB:", rss_kb() - begin)
batcher.close()
thread.join()
""")
    )
    assert code == 0, err
    assert int(out.split(":")[1]) < 40_000  # The largest outputs have 4 MB.


@pytest.mark.slow
def test_memory_is_flat_over_many_items():
    code, out, err = finish(
        start("""
def rss_kb():
    return int(open("/proc/self/statm").read().split()[1]) * 4

item = {"observation": np.zeros((1, 2, 50), np.float32), "rest": (row, [row])}
queue = libtorchbeast.BatchingQueue(0, minimum_batch_size=8, maximum_batch_size=8)

def serve():
    for batch in batcher:
        batch.set_outputs(batch.get_inputs())

thread = threading.Thread(target=serve)
thread.start()
for i in range(300_000):
    queue.enqueue(item)
    if i % 8 == 7:
        queue.dequeue_many()
    if i % 10 == 0:
        batcher.compute(item)
    if i == 100_000:
        begin = rss_kb()
print("grown by kB:", rss_kb() - begin)
batcher.close()
thread.join()
"""),
        timeout_s=500,
    )
    assert code == 0, err
    # 200,000 items: the least that malloc() loses, 16 bytes per item, is 3,200 kB.
    assert int(out.split(":")[1]) < 2000
