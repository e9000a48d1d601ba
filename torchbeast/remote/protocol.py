"""What crosses the network between environment servers and learners.

csrc/torchbeast.proto defines the messages; csrc/wire.h reads them in the learner.
"""

import json

import numpy as np

from torchbeast.nests import leaves
from torchbeast.remote import MAX_MESSAGE_BYTES, MAX_STEP_BYTES
from torchbeast.remote import torchbeast_pb2 as pb

PROTOCOL_VERSION = 3
SERVICE = "torchbeast.protocol.EnvironmentServer"
LEARNER_SERVICE = "torchbeast.protocol.Learner"
MAX_REQUEST_BYTES = 2**22
MAX_METRICS_BYTES = 2**20  # A response has no more.
# gRPC's, at both ends of a connection.
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # No compression: a few bytes could become any number of them.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    # Both ask each other every 10 s: one that is gone without a word, as when its
    # host's power fails, is noticed after half a minute.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
]


def encode_structure(nest):
    if isinstance(nest, dict):
        children = map(encode_structure, nest.values())
        return pb.Structure(kind=pb.Structure.DICT, keys=nest, children=children)
    if isinstance(nest, (tuple, list)):
        kind = pb.Structure.TUPLE if isinstance(nest, tuple) else pb.Structure.LIST
        return pb.Structure(kind=kind, children=map(encode_structure, nest))
    return pb.Structure(kind=pb.Structure.LEAF)


DTYPE_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}  # DLPack's.


def encode_spec(nest):
    """Returns the Spec of a nest of arrays. Raises ValueError for arrays that cannot be
    sent."""
    arrays = []
    size = 0
    for path, x in leaves(nest):
        x = np.asarray(x)
        if x.dtype.kind not in DTYPE_CODES or not x.dtype.isnative or x.ndim > 7:
            raise ValueError(
                f"{path} is {x.dtype} {list(x.shape)}, expected numbers or bool, of at "
                "most 7 dimensions, in this machine's byte order"
            )
        code = DTYPE_CODES[x.dtype.kind]
        arrays.append(pb.ArraySpec(code=code, bits=8 * x.itemsize, shape=x.shape))
        size += x.nbytes
    if size > MAX_STEP_BYTES:
        raise ValueError(
            f"a step has {size} bytes, expected at most {MAX_STEP_BYTES}: take smaller "
            "--envs_per_server"
        )
    return pb.Spec(structure=encode_structure(nest), arrays=arrays)


def encode_step(step, metrics=()):
    """Returns a serialised Response that holds the step's arrays, and the metrics of
    episodes, dicts of numbers, as many as fit. (protobuf produces the same bytes, but
    copies every array three times more.)"""
    arrays = []
    for _, x in leaves(step):
        x = np.asarray(x).reshape(-1).view(np.uint8)
        arrays += [prefix(pb.Arrays.DATA_FIELD_NUMBER, len(x)), x]
    size = sum(map(len, arrays))
    parts = [prefix(pb.Response.STEP_FIELD_NUMBER, size), *arrays]
    size = 0
    for text in (json.dumps(m).encode() for m in metrics):
        size += len(text) + 40  # As the learner counts.
        if size > MAX_METRICS_BYTES:
            break
        parts += [prefix(pb.Response.METRICS_FIELD_NUMBER, len(text)), text]
    return b"".join(parts)


def prefix(field, size):
    """Returns what stands before a field of `size` bytes in a serialised message."""
    result = bytearray([field << 3 | 2])
    while size > 127:
        result.append(size & 127 | 128)
        size >>= 7
    result.append(size)
    return result
