"""libtorchbeast.BatchingQueue, and arrays on their way through it.

Runs with and without torch: where it is not installed, arrays come out as NumPy's.
"""

import importlib.util
import threading
import time

import numpy as np
import pytest

from libtorchbeast import BatchingQueue, ClosedBatchingQueue

LIBRARIES = ["numpy"]
if importlib.util.find_spec("torch"):
    import torch

    LIBRARIES.append("torch")

DTYPES = [
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64",
]  # fmt: skip


@pytest.fixture(params=LIBRARIES)
def array(request):
    """NumPy array -> array of the library under test."""
    return np.asarray if request.param == "numpy" else torch.tensor


def one(batch_dim=0, **kwargs):
    """A queue whose batches are single rows."""
    return BatchingQueue(
        batch_dim, minimum_batch_size=1, maximum_batch_size=1, **kwargs
    )


def through(x, batch_dim=0):
    """x, in one piece, in and out of a queue."""
    queue = BatchingQueue(batch_dim)
    queue.enqueue(x)
    return queue.dequeue_many()


def test_items_are_joined_along_the_second_dimension_by_default():
    queue = BatchingQueue()
    queue.enqueue(np.zeros((2, 1, 3)))
    assert queue.dequeue_many().shape == (2, 1, 3)
    with pytest.raises(ValueError):
        queue.enqueue(np.zeros((3, 5, 3)))
    queue.enqueue(np.zeros((2, 5, 3)))
    assert queue.dequeue_many().shape == (2, 5, 3)


def test_what_comes_out_is_torchs_where_there_is_torch(array):
    x = through(array(np.zeros((2, 3), np.float32)))
    if "torch" in LIBRARIES:
        assert isinstance(x, torch.Tensor) and x.is_contiguous()
    else:
        assert isinstance(x, np.ndarray) and x.flags.c_contiguous and x.flags.writeable


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_passes_unchanged(array, dtype):
    x = np.array([[0, 1, 2], [100, 3, 4]]).astype(dtype)
    y = np.asarray(through(array(x)))
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x)


@pytest.mark.skipif("torch" not in LIBRARIES, reason="NumPy has no bfloat16")
def test_bfloat16_passes_unchanged():
    x = torch.randn(3, 4).bfloat16()
    y = through(x)
    assert y.dtype == torch.bfloat16 and torch.equal(x, y)


def test_nests_keep_their_structure(array):
    item = {"b": array(np.ones((1, 2))), "a": (array(np.zeros((1,))), [], {})}
    queue = one()
    queue.enqueue(item)
    result = queue.dequeue_many()
    assert list(result) == ["b", "a"]
    assert isinstance(result["a"], tuple) and result["a"][1:] == ([], {})


@pytest.mark.parametrize("batch_dim", [0, 1, 2])
def test_a_batch_is_the_concatenation_of_its_items(array, batch_dim):
    rng = np.random.default_rng(1)
    rows = [1, 3, 2]
    items = []
    for n in rows:
        shape = [4, 5, 6]
        shape[batch_dim] = n
        items.append({"x": rng.normal(size=shape), "y": rng.normal(size=[*shape, 2])})
    queue = BatchingQueue(batch_dim, minimum_batch_size=6, maximum_batch_size=9)
    for item in items:
        queue.enqueue({k: array(v) for k, v in item.items()})
    batch = queue.dequeue_many()
    for key in ("x", "y"):
        np.testing.assert_array_equal(
            np.asarray(batch[key]),
            np.concatenate([item[key] for item in items], batch_dim),
        )


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2],
        lambda x: x[1:, 1:],
        lambda x: x.swapaxes(0, 2),
        lambda x: x[:, 2:3].repeat(4, 1),
        lambda x: x[::2, 0],
        lambda x: np.broadcast_to(x[:1], x.shape),  # Strides of 0, and read-only.
        lambda x: x[::-1],
    ],
)
def test_non_contiguous_arrays_are_copied_right(view):
    x = view(np.arange(60).reshape(3, 4, 5))
    np.testing.assert_array_equal(np.asarray(through(x)), x)


@pytest.mark.skipif("torch" not in LIBRARIES, reason="about torch's views")
def test_non_contiguous_tensors_are_copied_right():
    x = torch.arange(60).reshape(3, 4, 5)
    for view in (x[:, ::2], x.permute(2, 0, 1), x[:1].expand(3, 4, 5), x[2:, 1]):
        assert torch.equal(through(view), view)


def test_the_item_may_be_changed_after_enqueue(array):
    queue = one()
    x = array(np.ones((1, 3)))
    queue.enqueue(x)
    x[:] = 7
    np.testing.assert_array_equal(np.asarray(queue.dequeue_many()), np.ones((1, 3)))


def test_batches_outlive_the_queue_and_are_not_written_over(array):
    queue = one()
    batches = []
    for i in range(20):
        queue.enqueue(array(np.full((1, 1000), i)))
        batches.append(queue.dequeue_many())
    del queue
    for i, batch in enumerate(batches):
        np.testing.assert_array_equal(np.asarray(batch), np.full((1, 1000), i))


def test_a_batch_has_what_waits_up_to_its_maximum(array):
    queue = BatchingQueue(0, minimum_batch_size=2, maximum_batch_size=3)
    for _ in range(5):
        queue.enqueue(array(np.zeros(1)))
    assert queue.size() == 5
    assert len(queue.dequeue_many()) == 3
    assert len(next(queue)) == 2
    assert queue.size() == 0


def test_a_time_out_hands_out_fewer_than_the_minimum(array):
    queue = BatchingQueue(0, minimum_batch_size=3, maximum_batch_size=3, timeout_ms=50)
    begin = time.monotonic()
    queue.enqueue(array(np.zeros(1)))
    assert len(queue.dequeue_many()) == 1
    assert time.monotonic() - begin > 0.045


def test_an_item_too_large_for_memory_is_refused_and_leaves_no_trace():
    queue = BatchingQueue(0, maximum_batch_size=2**30)
    huge = np.broadcast_to(np.zeros((1, 1), np.int8), (1, 2**34))
    with pytest.raises(ValueError, match=r"^the array: no memory for a batch"):
        queue.enqueue(huge)
    queue.enqueue(np.ones(1))  # Another shape and dtype: it is the first.
    assert queue.dequeue_many().tolist() == [1]


class Foreign:
    """Something else that speaks DLPack, or says so."""

    def __init__(self, capsule, device=(1, 0)):
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return self.device


def test_arrays_of_other_libraries_are_taken_and_nonsense_is_refused():
    assert through(Foreign(np.arange(3).__dlpack__())).tolist() == [0, 1, 2]
    taken = np.arange(3).__dlpack__()
    np.from_dlpack(Foreign(taken))
    for bad, message in [
        (Foreign(None), "cannot be read"),
        (Foreign(taken), "cannot be read"),
        (Foreign(np.arange(3).__dlpack__(), ("a", 1)), "cannot be read"),
        (Foreign(np.arange(3).__dlpack__(), (2, 0)), "is on"),
    ]:
        with pytest.raises(ValueError, match=f"^leaf 'x' {message}"):
            through({"x": bad})


def test_iteration_ends_when_the_queue_is_closed_and_drained(array):
    queue = BatchingQueue(0, minimum_batch_size=2, maximum_batch_size=2)
    for _ in range(3):
        queue.enqueue(array(np.zeros(1)))
    assert not queue.is_closed()
    queue.close()
    queue.close()
    assert queue.is_closed()
    assert [len(batch) for batch in queue] == [2, 1]
    with pytest.raises(ClosedBatchingQueue, match="closed and drained"):
        queue.dequeue_many()
    with pytest.raises(ClosedBatchingQueue, match="enqueue to a closed queue"):
        queue.enqueue(array(np.zeros(1)))
    assert issubclass(ClosedBatchingQueue, RuntimeError)


def test_close_can_discard(array):
    queue = one()
    queue.enqueue(array(np.zeros(1)))
    queue.close(discard=True)
    assert queue.size() == 0 and list(queue) == []


def test_enqueue_blocks_while_the_queue_is_full(array):
    queue = one(maximum_queue_size=2)
    entered, passed = threading.Event(), threading.Event()

    def fill():
        for i in range(3):
            if i == 2:
                entered.set()
            queue.enqueue(array(np.full(1, i)))
        passed.set()

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    assert entered.wait(10) and not passed.wait(0.1)
    assert [int(queue.dequeue_many()[0]) for _ in range(3)] == [0, 1, 2]
    assert passed.wait(10)


def test_items_unlike_the_first_are_refused_by_name_and_the_queue_lives_on(array):
    queue = BatchingQueue(batch_dim=1, minimum_batch_size=2, maximum_batch_size=4)

    def item(shape=(3, 1, 2), dtype=np.float32):
        return {
            "obs": (array(np.zeros((3, shape[1]), np.uint8)),),
            "x": array(np.zeros(shape, dtype)),
        }

    queue.enqueue(item())
    for bad, message in [
        (item(dtype=np.float64), r"leaf 'x' is float64 \[3, 1, 2\], expected float32"),
        (item((3, 1, 5)), r"leaf 'x' is float32 \[3, 1, 5\], expected float32"),
        (item((3, 1)), r"leaf 'x' is float32 \[3, 1\], expected"),
        (item((3, 5, 2)), "the item has 5 rows along batch_dim=1, expected 1 to"),
        (item((3, 0, 2)), "the item has 0 rows"),
        ({**item(), "x": array(np.zeros((3, 2, 2)))}, "leaf 'x' .* 2 rows .*/0' has 1"),
        ({**item(), "x": array(np.zeros(3))}, "leaf 'x' has shape .* more than 1"),
        ({"x": item()["x"]}, "nests differ: expected .*'obs', 'x'.*, got .*{'x'}"),
        ({**item(), "x": "y"}, "leaf 'x' is of type str, expected a torch tensor or"),
        ({**item(), "x": None}, "leaf 'x' is of type NoneType"),
        ({**item(), "x": 1.5}, "leaf 'x' is of type float"),
        ({**item(), "x": np.zeros(3, "S3")}, "leaf 'x' cannot be read"),
        ({**item(), "x": np.zeros((3, 1, 2), ">f4")}, "leaf 'x' cannot be read"),
        ({**item(), "x": np.zeros((3, 1, 2), complex)}, "leaf 'x' has elements of"),
        ({**item(), "x": np.zeros([1] * 9)}, "leaf 'x' has 9 dimensions, expected at"),
        ((), "at least one array"),
        ({1: array(np.zeros(1))}, "strings for keys, got 1"),
        ({"\ud800": array(np.zeros(1))}, "text for keys, got"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            queue.enqueue(bad)
    assert queue.size() == 1
    queue.enqueue(dict(reversed(item().items())))  # Another order of the keys is fine.
    assert queue.dequeue_many()["x"].shape == (3, 2, 2)


@pytest.mark.skipif("torch" not in LIBRARIES, reason="about torch's tensors")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(1, device="meta"), "is on meta, .* call .cpu"),
        (lambda: torch.zeros(1, requires_grad=True), "requires grad, .* call .detach"),
        (lambda: torch.zeros(1, 2).to_sparse(), "cannot be read"),
        (lambda: torch.zeros(1, dtype=torch.complex64), "has elements of complex64"),
        (lambda: torch.ones(2, dtype=torch.cfloat).conj().imag, "is a negated view"),
        (lambda: torch._efficientzerotensor((1,)), "has elements, but no memory"),
    ],
)
def test_tensors_that_cannot_be_read_say_what_to_do(make, message):
    with pytest.raises(ValueError, match=f"^leaf 'a/0' {message}"):
        one().enqueue({"a": [make()]})


def test_without_the_check_other_items_go_into_batches_of_their_own(array):
    queue = BatchingQueue(0, check_inputs=False)
    for shape in [(1, 2), (1, 2), (1, 3)]:
        queue.enqueue(array(np.zeros(shape)))
    queue.close()
    assert [tuple(batch.shape) for batch in queue] == [(2, 2), (1, 3)]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(batch_dim=-1), "batch_dim is -1"),
        (dict(batch_dim=0, minimum_batch_size=0), "minimum_batch_size is 0"),
        (
            dict(batch_dim=0, minimum_batch_size=3, maximum_batch_size=2),
            r"maximum_batch_size is 2, expected at least minimum_batch_size \(3\)",
        ),
        (dict(batch_dim=0, timeout_ms=-1), "timeout_ms is -1"),
        (dict(batch_dim=0, timeout_ms=10**13), "timeout_ms is 10000000000000"),
        (dict(batch_dim=0, maximum_queue_size=0), "maximum_queue_size is 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        BatchingQueue(**kwargs)


def test_pinned_memory_without_a_gpu_is_refused():
    if "torch" in LIBRARIES and torch.cuda.is_available():
        queue = one(pin_memory=True)
        queue.enqueue(torch.arange(3.0).reshape(1, 3))
        batch = queue.dequeue_many()
        assert batch.is_pinned() and batch.tolist() == [[0, 1, 2]]
    else:
        with pytest.raises(ValueError, match="pin_memory is True, but"):
            one(pin_memory=True)


@pytest.mark.skipif("torch" not in LIBRARIES, reason="it is PyTorch's memory")
def test_page_locked_memory_is_taken_for_the_rows_there_are_and_used_again(monkeypatch):
    taken, empty = [], torch.empty

    def pretend(num_bytes, dtype, pin_memory):
        assert pin_memory
        taken.append(num_bytes)
        return empty(num_bytes, dtype=dtype)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", pretend)
    queue = BatchingQueue(0, maximum_batch_size=4096, pin_memory=True)
    for num in 10 * [1] + 10 * [3]:
        for i in range(num):
            queue.enqueue(torch.full((1, 256), i, dtype=torch.uint8))
        rows = 0
        while rows < num:
            batch = queue.dequeue_many()
            assert batch[:, 0].tolist() == list(range(rows, rows + len(batch)))
            rows += len(batch)
    assert sum(taken) <= 8 * 1024  # And not 4096 rows of 256.
    assert len(batch) == 3


def test_many_threads_lose_and_double_nothing(array):
    queue = BatchingQueue(0, minimum_batch_size=1, maximum_batch_size=16)
    received = [[] for _ in range(2)]

    def produce(p):
        for i in range(500):
            rows = 1 + i % 3
            queue.enqueue({"id": array(np.full(rows, 1000 * p + i))})

    def consume(ids):
        for batch in queue:
            ids.extend(np.asarray(batch["id"]).tolist())

    consumers = [threading.Thread(target=consume, args=[ids]) for ids in received]
    producers = [threading.Thread(target=produce, args=[p]) for p in range(4)]
    for thread in consumers + producers:
        thread.start()
    for thread in producers:
        thread.join()
    queue.close()
    for thread in consumers:
        thread.join()
    expected = [
        1000 * p + i for p in range(4) for i in range(500) for _ in range(1 + i % 3)
    ]
    assert sorted(received[0] + received[1]) == sorted(expected)
