"""PolyBeast's C++ core: nests, and queues that batch nests of tensors.

    from libtorchbeast import BatchingQueue, DynamicBatcher, nest

nest            map, flatten, zip, ... of nested tuples, lists and dicts
BatchingQueue   items in, batches out: what learns
DynamicBatcher  many threads compute(), one evaluates a batch: what acts
ActorPool       steps environment servers, and puts their rollouts into a queue

Tensors cross by DLPack, so this is built for no particular PyTorch; where there is
none, NumPy arrays come out. help(libtorchbeast.BatchingQueue) says what blocks, and
what ends it.
"""

try:
    from _libtorchbeast import (
        ActorPool,
        AsyncError,
        Batch,
        BatchingQueue,
        ClosedBatchingQueue,
        DynamicBatcher,
        nest,
    )
except ModuleNotFoundError as error:
    if error.name != "_libtorchbeast":
        raise
    raise ImportError(
        f"libtorchbeast's C++ part is not built ({error}). In the repository, type "
        "`make setup`; elsewhere install gRPC's C++ files, as docs/cpp.md says, and "
        "type `pip install -e .`"
    ) from error

__all__ = [
    "ActorPool",
    "AsyncError",
    "Batch",
    "BatchingQueue",
    "ClosedBatchingQueue",
    "DynamicBatcher",
    "nest",
]
