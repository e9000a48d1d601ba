"""Environments that take their time: it is said what is waited for."""

import argparse
import logging
import re
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import pytest

from tests import envs
from tests.faulty_envs import Base
from tests.programs import SMALL, run
from torchbeast import calls
from torchbeast.environment import Environment, make, probe
from torchbeast.messages import log
from torchbeast.remote import server
from torchbeast.remote import torchbeast_pb2 as pb
from torchbeast.remote.protocol import PROTOCOL_VERSION

TIMEOUT_S = 60


class Lines(logging.Handler):
    """Log lines, which can be waited for."""

    def __init__(self):
        super().__init__()
        self.lines, self.arrived = [], threading.Condition()

    def emit(self, record):
        with self.arrived:
            self.lines.append(record.getMessage())
            self.arrived.notify_all()

    def wait_for(self, words):
        with self.arrived:
            said = self.arrived.wait_for(
                lambda: any(words in line for line in self.lines), TIMEOUT_S
            )
        assert said, (words, self.lines)


@pytest.fixture
def lines(monkeypatch):
    """Log lines of a process that tells at once."""
    lines = Lines()
    monkeypatch.setattr(log, "handlers", [lines])
    monkeypatch.setattr(calls, "SLOW_S", 0.01)
    return lines


@pytest.fixture
def slow(monkeypatch, lines):
    """The id of an environment each call of which waits until it is told of."""

    class Slow(Base):
        def __init__(self):
            lines.wait_for("waits for the constructor of Slow-v0")

        def reset(self, *, seed=None, options=None):
            lines.wait_for("waits for reset() of Slow-v0")
            return super().reset(seed=seed)

        def step(self, action):
            if self.num_steps == 2:
                lines.wait_for("2 steps in the first")
            return super().step(action)

    spec = gymnasium.envs.registration.EnvSpec("Slow-v0", entry_point=Slow)
    monkeypatch.setitem(gymnasium.registry, "Slow-v0", spec)
    return "Slow-v0"


def create_env(flags, num_envs, render_mode, seed):
    return Environment(make(flags.env, num_envs))


def flags_of(env_id):
    return types.SimpleNamespace(
        env=env_id, env_args=[], envs_per_server=1, seed=None, unroll_length=20
    )


def test_the_probe_tells_what_it_waits_for(slow, lines):
    probe(create_env, flags_of(slow), 1)  # Raises unless the innermost call is named.
    for call in ("the constructor", "reset()"):
        assert any(f"waits for {call} of Slow-v0" in line for line in lines.lines)


def test_a_server_tells_of_its_first_stream_alone(slow, lines):
    def requests(stream):
        hello = pb.Hello(version=PROTOCOL_VERSION, seed=1, stream=stream)
        yield pb.Request(hello=hello).SerializeToString()
        action = pb.Arrays(data=[b"\0" * 8])
        for _ in range(4):
            yield pb.Request(action=action).SerializeToString()

    flags = flags_of(slow)
    assert len(list(server.converse(create_env, flags, requests(0), "x"))) == 5
    assert any(line.startswith("x: 2 steps in the first") for line in lines.lines)
    list(server.converse(create_env, flags, requests(1), "y"))
    assert not any(line.startswith(("y: waits", "y: 2")) for line in lines.lines)


def test_first_rollouts_of_one_episode_are_expected_after_any_step(slow, lines):
    flags = flags_of(slow)
    assert calls.first_rollouts(flags, 4)[0] == 80
    flags.one_episode_rollouts = True

    def waiting(*args):
        lines.wait_for("z: waits for create_env()")
        return create_env(*args)

    told = calls.tell_slow(*calls.first_rollouts(flags, 4), "z: ")
    probe(waiting, flags, 1)
    told.set()
    assert not any("rollouts" in line for line in lines.lines)


def test_where_acting_waits_a_batch_is_needed(monkeypatch):
    flags = types.SimpleNamespace(unroll_length=20, envs_per_actor=4, num_actors=2)
    need = "; the first rollouts need 80 steps: with a smaller --envs_per_actor fewer"
    assert calls.first_rollouts(flags, 4) == (80, need)
    vars(flags).update({"batch_size": 32, "async": False})
    num_steps, need = calls.first_rollouts(flags, 4)
    assert num_steps == 20 * 32 / 2
    assert need.startswith("; its part of the first batch needs 320 steps")
    assert need.endswith("with a smaller --batch_size or --unroll_length fewer")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert calls.first_rollouts(flags, 4)[0] == 20 * 32 / 4
    flags.num_actors = 0
    assert calls.first_rollouts(flags, 4)[0] == 20 * 32 / 2


def test_it_ends_with_the_number_of_steps(lines):
    before = set(threading.enumerate())
    calls.tell_slow(3, "; 3 are needed", "a: ")
    [telling] = set(threading.enumerate()) - before
    calls.count_steps(1)
    lines.wait_for("a: 1 steps in the first")
    lines.wait_for(" s; 3 are needed")
    calls.count_steps(2)
    telling.join(TIMEOUT_S)
    assert not telling.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("module, who", [("monobeast", "actor 0"), ("polybeast", ".*")])
def test_programs_tell(module, who, tmp_path):
    result = run(
        *("--env", "tests.faulty_envs:Late-v0", "--savedir", tmp_path, *SMALL[module]),
        *("--total_steps", 40, "--batch_size", 2, "--unroll_length", 20),
        module=module,
    )
    assert result.returncode == 0, result.stderr
    waits = r"waits for reset\(\) of Late-v0 \(\d+ s since the start\)"
    steps = r"\d+ steps in the first \d+ s"
    need = "; the first rollouts need 40 steps: .*"
    for what in (waits, f"{who}: {waits}{need}", f"{who}: {steps}{need}"):
        assert re.search(rf"^\[.{{8}}\] {what}$", result.stderr, re.M), result.stderr
    test = "--savedir", tmp_path, "--mode", "test", "--num_test_episodes", 1
    result = run(*test, module=module)
    assert result.returncode == 0, result.stderr
    assert re.search(rf"\] ({waits}|{steps})$", result.stderr, re.M), result.stderr


def test_environments_are_made_while_another_thread_imports_torch(monkeypatch):
    """As in a server, whose streams each have a thread."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    flags = argparse.Namespace(env="Counter")

    def create_env(flags, num_envs, render_mode, seed):
        return Environment([envs.Counter() for _ in range(num_envs)])

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(calls.create, create_env, flags, 2).result()
    assert made.num_envs == 2
