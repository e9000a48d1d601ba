"""Writes tests/csrc/corpus: what servers answer, for fuzz_stream.cc to begin with.

    python -m tests.csrc.make_corpus

A file is an Arrays message, each of whose data is a Response, as bytes.
"""

import pathlib

import numpy as np

from torchbeast.environment import Environment, make
from torchbeast.remote import torchbeast_pb2 as pb
from torchbeast.remote.protocol import PROTOCOL_VERSION, encode_spec, encode_step
from torchbeast.remote.server import make_welcome

CORPUS = pathlib.Path(__file__).parent / "corpus"


def answers(env, num_envs, num_steps=4):
    """[Response] of a server of this environment."""
    env = Environment(make(env, num_envs))
    step = env.initial(1)
    welcome = make_welcome(env, step)
    responses = [pb.Response.FromString(encode_step(step))]
    responses[0].welcome.CopyFrom(welcome)
    for _ in range(num_steps):
        step = env.step(env.actions.zeros())
        responses.append(pb.Response.FromString(encode_step(step)))
    env.close()
    return responses


def hand_made(step, num_envs=1, num_steps=3, action=None):
    """The same of a step that no environment makes."""
    action = np.zeros(num_envs, np.int64) if action is None else action
    responses = [pb.Response.FromString(encode_step(step)) for _ in range(num_steps)]
    responses[0].welcome.version = PROTOCOL_VERSION
    responses[0].welcome.num_envs = num_envs
    responses[0].welcome.step.CopyFrom(encode_spec(step))
    responses[0].welcome.action.CopyFrom(encode_spec(action))
    return responses


def corpus():
    """{name: [Response]}"""
    x = np.zeros((1, 2), np.int32)
    deep = x
    for _ in range(40):
        deep = (deep,)
    dtypes = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32"
    result = {
        "counter": answers("tests.envs:torchbeast/Counter-v0", 2),
        "cartpole": answers("CartPole-v1", 1),
        "turns": answers("tests.turn_envs:Two", 2),
        "no_waits": hand_made({"observation": x, "waits": np.zeros(1, np.int8)}),
        "dtypes": hand_made({name: np.zeros(1, name) for name in dtypes.split()}),
        "leaf": hand_made(x),
        "tuple": hand_made((x, x)),
        "list": hand_made({"observation": [x, [x]]}),
        "nothing": hand_made({}),
        "deep": hand_made({"observation": deep}),
        "wide": hand_made({str(i): x for i in range(1030)}, num_steps=1),
        "rank": hand_made({"observation": np.zeros((1,) * 7)}),
        "empty": hand_made({"observation": np.zeros((1, 0, 3))}),
        "no_action": hand_made({"observation": x}, action=()),
        "two_actions": hand_made({"observation": x}, action=(x[0, :1], x[0, :1])),
        "keys": hand_made({"action": x, "core_state": x}),
        "no_rows": hand_made({"observation": x[:0]}, num_envs=0),
    }
    overflow = hand_made({"observation": np.zeros((1, 0))})
    overflow[0].welcome.step.arrays[0].shape.extend([2**28] * 4)
    result["overflow"] = overflow
    no_bool = hand_made({"done": np.zeros(1, bool)})
    no_bool[1].step.data[0] = b"\2"
    result["no_bool"] = no_bool
    for name, error in (("error", b"It failed."), ("no_error", b"\0It failed.")):
        result[name] = [*hand_made({"observation": x}), pb.Response(error=error)]
    return result


def main():
    found = corpus()
    CORPUS.mkdir(exist_ok=True)
    for file in CORPUS.iterdir():
        file.unlink()
    for name, responses in found.items():
        data = [response.SerializeToString() for response in responses]
        message = pb.Arrays(data=data).SerializeToString()
        (CORPUS / name).write_bytes(message)


if __name__ == "__main__":
    main()
