"""libtorchbeast.DynamicBatcher. Runs with and without torch."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from libtorchbeast import AsyncError, Batch, ClosedBatchingQueue, DynamicBatcher


@contextlib.contextmanager
def callers(batcher, inputs):
    """Threads that compute() the inputs, in this order: their futures."""
    with ThreadPoolExecutor(len(inputs)) as pool:
        futures = []
        for x in inputs:
            waiting = batcher.size()
            futures.append(pool.submit(batcher.compute, x))
            while batcher.size() == waiting and not futures[-1].done():
                pass
        try:
            yield futures
        finally:
            batcher.close()


@contextlib.contextmanager
def serving(batcher, model):
    """A thread that answers every batch with model(inputs)."""

    def serve():
        for batch in batcher:
            batch.set_outputs(model(batch.get_inputs()))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        batcher.close()
        thread.join()


def rows(*values):
    return np.array(values, np.float32).reshape(-1, 1)


@pytest.mark.parametrize("batch_dim", [0, 1, 2])
def test_each_caller_gets_its_rows(batch_dim):
    def shaped(x):
        shape = [1, 1, 1]
        shape[batch_dim] = -1
        return np.tile(x.reshape(shape), [1 if i == batch_dim else 2 for i in range(3)])

    batcher = DynamicBatcher(batch_dim, minimum_batch_size=3, maximum_batch_size=3)
    inputs = [shaped(rows(1, 2)), shaped(rows(3))]
    with callers(batcher, inputs) as futures:
        batch = next(batcher)
        assert isinstance(batch, Batch) and len(batch) == 3
        x = np.asarray(batch.get_inputs())
        np.testing.assert_array_equal(x, np.concatenate(inputs, batch_dim))
        batch.set_outputs({"twice": 2 * x, "same": (x,)})
        for sent, future in zip(inputs, futures):
            result = future.result(10)
            np.testing.assert_array_equal(np.asarray(result["twice"]), 2 * sent)
            np.testing.assert_array_equal(np.asarray(result["same"][0]), sent)


def test_many_callers_get_answers_of_their_own():
    batcher = DynamicBatcher(0, maximum_batch_size=16)

    def call(c):
        for i in range(200):
            x = np.full((1 + i % 3, 2), 1000 * c + i)
            np.testing.assert_array_equal(np.asarray(batcher.compute(x)), x + 1)
        return True

    with serving(batcher, lambda x: x + 1), ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(8)))


def test_outputs_may_be_changed_after_set_outputs():
    batcher = DynamicBatcher(0)
    with callers(batcher, [rows(1)]) as [future]:
        outputs = rows(5)
        next(batcher).set_outputs(outputs)
        outputs[:] = 0
        assert float(future.result(10)[0, 0]) == 5


def test_outputs_of_the_wrong_batch_size_are_refused_and_right_ones_still_taken():
    batcher = DynamicBatcher(0, minimum_batch_size=2)
    with callers(batcher, [rows(1, 2)]) as [future]:
        batch = next(batcher)
        with pytest.raises(ValueError, match=r"3 rows along batch_dim=0, expected 2"):
            batch.set_outputs(rows(1, 2, 3))
        with pytest.raises(ValueError, match="leaf 'b' .* 1 rows .* leaf 'a' has 2"):
            batch.set_outputs({"a": rows(1, 2), "b": rows(1)})
        with pytest.raises(ValueError, match="the array is of type int"):
            batch.set_outputs(3)
        batch.set_outputs(rows(7, 8))
        assert np.asarray(future.result(10)).tolist() == [[7], [8]]


def test_outputs_can_be_set_once():
    batcher = DynamicBatcher(0)
    with callers(batcher, [rows(1)]):
        batch = next(batcher)
        batch.set_outputs(rows(1))
        with pytest.raises(RuntimeError, match="twice"):
            batch.set_outputs(rows(1))


@pytest.mark.parametrize("check", [True, False])
def test_outputs_unlike_the_first_are_refused_if_checked(check):
    batcher = DynamicBatcher(0, check_outputs=check)
    with callers(batcher, [rows(1)]) as [future]:
        next(batcher).set_outputs({"a": rows(1)})
        future.result(10)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(batcher.compute, rows(1))
            batch = next(batcher)
            if check:
                with pytest.raises(ValueError, match=r"expected .*{'a'}, got .*{'b'}"):
                    batch.set_outputs({"b": rows(1)})
                batch.set_outputs({"a": rows(2)})
            else:
                batch.set_outputs({"b": rows(2)})
            assert next(iter(future.result(10).values())).item() == 2


def test_a_dropped_batch_is_an_error_for_its_callers_at_once():
    batcher = DynamicBatcher(0, minimum_batch_size=2)
    with callers(batcher, [rows(1), rows(2)]) as futures:
        batch = next(batcher)
        del batch
        for future in futures:
            with pytest.raises(AsyncError, match=r"dropped without set_outputs\(\)"):
                future.result(10)


def test_a_model_that_raises_is_an_error_for_its_callers():
    batcher = DynamicBatcher(0)

    def serve():
        for batch in batcher:
            batch.set_outputs(batch.get_inputs() @ "not a matrix")

    with callers(batcher, [rows(1)]) as [future]:
        with pytest.raises(TypeError):
            serve()
        with pytest.raises(AsyncError):
            future.result(10)


def test_set_error_tells_the_callers_what_went_wrong():
    batcher = DynamicBatcher(0)
    with callers(batcher, [rows(1)]) as [future]:
        batch = next(batcher)
        batch.set_error("the model is on strike")
        with pytest.raises(AsyncError, match="the model is on strike"):
            future.result(10)


def test_close_ends_calls_that_wait_and_calls_being_evaluated():
    batcher = DynamicBatcher(0, maximum_batch_size=1)
    with callers(batcher, [rows(1)]) as [evaluated]:
        batch = next(batcher)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(batcher.compute, rows(2))
            while batcher.size() == 0:
                pass
            batcher.close()
            for future in (evaluated, waiting):
                with pytest.raises(ClosedBatchingQueue, match="batcher is closed"):
                    future.result(10)
        batch.set_outputs(rows(1))  # Too late, and no error.
    assert batcher.is_closed() and list(batcher) == []
    with pytest.raises(ClosedBatchingQueue):
        batcher.compute(rows(1))


def test_inputs_that_cannot_be_batched_are_their_callers_error_alone():
    batcher = DynamicBatcher(0)
    with serving(batcher, lambda x: x):
        batcher.compute(rows(1))
        with pytest.raises(
            ValueError, match="the array is float32 .* expected float32"
        ):
            batcher.compute(np.zeros((1, 5), np.float32))
        assert float(batcher.compute(rows(3))[0, 0]) == 3


def test_a_batch_outlives_its_batcher():
    batcher = DynamicBatcher(0)
    with callers(batcher, [rows(4)]):
        batch = next(batcher)
    del batcher
    assert float(batch.get_inputs()[0, 0]) == 4
    batch.set_outputs(rows(1))


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(batch_dim=-2),
        dict(batch_dim=0, minimum_batch_size=0),
        dict(batch_dim=0, minimum_batch_size=5, maximum_batch_size=4),
        dict(batch_dim=0, timeout_ms=-1),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(kwargs):
    with pytest.raises(ValueError, match=list(kwargs)[-1]):
        DynamicBatcher(**kwargs)
