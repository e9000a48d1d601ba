"""Bad bytes for environment servers: what learners send, changed at random.

    python -m tests.fuzz_requests --seconds 60 --seed 1

Each input is one stream: a Hello and actions, as bytes, of which some are other than
they should be. Whatever comes, the server answers it, or refuses it with a code and a
text that say that it was the learner's mistake.
"""

import argparse
import math
import random
import resource
import time
from collections import Counter
from unittest import mock

import grpc
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from torchbeast.environment import Environment
from torchbeast.messages import log
from torchbeast.remote import torchbeast_pb2 as pb
from torchbeast.remote.protocol import PROTOCOL_VERSION
from torchbeast.remote.server import EnvironmentServer

E = 2


class Env(VectorEnv):
    """Costs nothing, but takes its seed and its actions seriously."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    num_envs = E
    single_observation_space = spaces.Box(0, 1, (3,), np.float32)
    single_action_space = spaces.MultiDiscrete([2, 5])
    observation = np.zeros((E, 3), np.float32)
    num_open = 0

    def __init__(self):
        type(self).num_open += 1

    def reset(self, *, seed=None, options=None):
        assert 0 <= seed < seed + E < 2**31  # ALE takes 32 bits, signed.
        return self.observation, {}

    def step(self, actions):
        assert actions.dtype == np.int64 and actions.shape == (E, 2)
        assert (0 <= actions).all() and (actions < [2, 5]).all()
        zeros = np.zeros(E, bool)
        return self.observation, np.zeros(E), zeros, zeros, {}

    def close(self, **kwargs):
        type(self).num_open -= 1


class Aborted(Exception):
    pass


class Context:
    """As much of a grpc.ServicerContext as a stream needs."""

    def peer(self):
        return "unix:"

    def is_active(self):
        return True

    def abort(self, code, text):
        raise Aborted(code, text)


# Numbers at the limits of types and bounds.
NUMBERS = [0, 1, 2, 4, 5, -1, 2**30, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]


def request(rng, first):
    """A valid one, most of the time."""
    message = pb.Request()
    if first or rng.random() < 0.02:
        version = PROTOCOL_VERSION
        wrong = rng.choice([0, 2, -1, 2**31 - 1, -(2**31)])
        message.hello.version = version if rng.random() < 0.9 else wrong
        message.hello.seed = rng.choice(NUMBERS)
    if not first or rng.random() < 0.02:
        action = [rng.randrange(n) for n in (2, 5) * E]
        if rng.random() < 0.1:
            action[rng.randrange(len(action))] = rng.choice(NUMBERS)
        data = np.array(action, np.int64).tobytes()
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data))] + rng.randbytes(rng.randrange(20))
        n = rng.choice([0, 2, 3, 1000]) if rng.random() < 0.05 else 1
        message.action.data.extend([data] * n)
    return message.SerializeToString()


def change(rng, data):
    """The bytes, of which one was flipped, left out or put in, or a part doubled."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        i = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[i : i + 1] = bytes([rng.randrange(256)])
            case 1:
                data[i:i] = rng.randbytes(rng.randrange(1, 12))
            case 2:
                del data[i : i + rng.randrange(1, 12)]
            case 3:
                data[i:i] = data[rng.randrange(len(data) + 1) :]
            case 4:  # A length or a number that does not end, or is too large.
                data[i:i] = b"\xff" * rng.randrange(1, 11)
    return bytes(data)


def stream(rng):
    """The requests of one stream: [bytes]."""
    requests = [request(rng, i == 0) for i in range(rng.randrange(10))]
    if requests and rng.random() < 0.5:
        i = rng.randrange(len(requests))
        requests[i] = change(rng, requests[i])
    return requests


def fuzz(seed, num_streams=math.inf, seconds=math.inf):
    """(Counter of how streams ended, how many requests they read). AssertionError if
    one did not end as it should have."""
    rng = random.Random(seed)
    flags = argparse.Namespace(env="fuzz", env_args=[], seed=None, envs_per_server=E)
    server = EnvironmentServer(lambda *_: Environment(Env()), flags)
    ends = Counter()
    num_read = 0
    start = time.monotonic()
    with mock.patch.object(log, "disabled", True):  # It logs a line for each stream.
        while ends.total() < num_streams and time.monotonic() - start < seconds:
            requests = stream(rng)
            left = iter(requests)
            ends[run(server, requests, left)] += 1
            num_read += len(requests) - len(list(left))
            assert Env.num_open == 0 and server.num_streams == 0, requests
    return ends, num_read


def run(server, requests, left):
    """How the stream ended."""
    num_answers = 0
    try:
        for response in server.stream(left, Context()):
            response = pb.Response.FromString(response)
            assert response.HasField("welcome") == (num_answers == 0)
            assert response.step.data
            num_answers += 1
    except Aborted as e:
        code, text = e.args
        assert code in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.FAILED_PRECONDITION,
        ), (code, text, requests)
        assert text and len(text) < 500 and len(text.splitlines()) == 1, (
            text,
            requests,
        )
        return code.name
    assert num_answers == len(requests), requests
    return "OK"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--seconds", type=float, default=60)
    p.add_argument("--seed", type=int, default=random.randrange(2**31))
    flags = p.parse_args()
    print(f"seed {flags.seed}", flush=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    ends, num_read = fuzz(flags.seed, seconds=flags.seconds)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"{num_read:,} requests of {ends.total():,} streams in "
        f"{time.monotonic() - start:.0f} s: {dict(ends)}; memory grew by {grown:.1f} MB"
    )


if __name__ == "__main__":
    main()
