"""libtorchbeast.ActorPool with real environment servers."""

import contextlib
import os
import re
import signal
import threading
import time
from concurrent import futures

import grpc
import numpy as np
import pytest
import torch

import polybeast_env
from libtorchbeast import ActorPool, BatchingQueue, DynamicBatcher
from tests.test_agent import one_episode_rollouts
from tests.test_polybeast_env import COUNTER, free_port, servers
from torchbeast.environment import Environment, make
from torchbeast.remote import dialer
from torchbeast.remote.protocol import SERVICE
from torchbeast.seeds import derive_seed

T = 7


class Learner:
    """An ActorPool, its queue and batcher, and a thread that answers: action 1, and a
    core_state that counts the answers."""

    def __init__(self, addresses, delay_s=0, **kwargs):
        self.queue = BatchingQueue(
            1, minimum_batch_size=1, maximum_batch_size=1, maximum_queue_size=64
        )
        self.batcher = DynamicBatcher(1, timeout_ms=10)
        self.answers = 0
        self.delay_s = delay_s
        self.error = None
        self.pool = ActorPool(
            T,
            self.queue,
            self.batcher,
            addresses,
            initial_state=(torch.zeros(1, 1, 2),),
            **{"connect_timeout_s": 30, **kwargs},
        )
        self.threads = [
            threading.Thread(target=self._run),
            threading.Thread(target=self._answer),
        ]

    def _run(self):
        try:
            self.pool.run()
        except RuntimeError as e:
            self.error = str(e)

    def _answer(self):
        for batch in self.batcher:
            step, (count,) = batch.get_inputs()
            n = step["reward"].shape[1]
            outputs = {
                "action": torch.ones(1, n, dtype=torch.int64),
                "policy_logits": count[..., :1] + torch.zeros(1, n, 2),
            }
            time.sleep(self.delay_s)
            self.answers += n
            batch.set_outputs((outputs, (count + 1,)))

    def rollouts(self, n):
        """The next n of the queue, as NumPy arrays without their second dimension."""
        result = []
        for _ in range(n):
            batch = self.queue.dequeue_many()
            core_state = batch.pop("core_state")[0].numpy()
            result.append({k: x.numpy()[:, 0] for k, x in batch.items()})
            result[-1]["core_state"] = core_state
        return result

    def status(self):
        return {s["address"]: s for s in self.pool.status()}

    def wait_for(self, condition, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.pool.status()
            time.sleep(0.01)

    def drain(self):
        """A thread that throws rollouts away, from now on."""
        thread = threading.Thread(target=lambda: [None for _ in self.queue])
        thread.start()
        self.threads.append(thread)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.pool.stop()
        self.batcher.close()
        self.queue.close()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


@contextlib.contextmanager
def server(num_envs=1, env=COUNTER, num_servers=1, address=None):
    address = address or f"127.0.0.1:{free_port()}"
    flags = ["--num_servers", num_servers, "--envs_per_server", num_envs]
    with servers(*flags, "--address", address, env=env) as program:
        yield address, program


def check_contiguous(rollout):
    """Counter's: each observation follows the one before."""
    total = rollout["observation"][:, 0]
    np.testing.assert_array_equal(np.diff(total), np.ones(T))
    np.testing.assert_array_equal(
        rollout["episode_step"],
        np.where(rollout["done"], 0, rollout["observation"][:, 2]),
    )


@pytest.mark.parametrize("burn_in", [0, 3, 2 * T])
@pytest.mark.parametrize("num_envs", [1, 8])
def test_rollouts_are_what_the_environment_does_step_by_step(num_envs, burn_in):
    n = 12  # Rollouts of each environment: episodes begin and are cut off in them.
    local = Environment(make(COUNTER, num_envs))
    steps = [local.initial(derive_seed(3, 0, 0, 0))]
    for _ in range(burn_in + n * T):
        steps.append(local.step(np.ones(num_envs, np.int64)))
    options = {"seed": 3, "burn_in": burn_in}
    with server(num_envs) as (address, _), Learner([address], **options) as learner:
        rollouts = learner.rollouts(n * num_envs)
        assert learner.status()[address]["num_envs"] == num_envs
    for i, rollout in enumerate(rollouts):
        k, e = divmod(i, num_envs)  # An actor puts its environments' rollouts in order.
        for name in steps[0]:
            # The first steps repeat the last ones of the rollout before.
            end = burn_in + (k + 1) * T + 1
            expected = np.stack([s[name][e] for s in steps[k * T : end]])
            assert rollout[name].dtype == expected.dtype
            np.testing.assert_array_equal(rollout[name], expected, err_msg=name)
        np.testing.assert_array_equal(rollout["action"], np.ones(burn_in + T))
        # What was answered to step t, and the state before the first one.
        np.testing.assert_array_equal(
            rollout["policy_logits"][:, 0], k * T + np.arange(burn_in + T)
        )
        np.testing.assert_array_equal(rollout["core_state"], np.full((1, 1, 2), k * T))


@pytest.mark.parametrize(
    ("env", "num_envs"),
    [
        ("CartPole-v1", 1),  # Its pole falls after 8 to 10 steps to one side.
        ("CartPole-v1", 3),
        ("tests.parallel_envs:Crowd", 2),  # Its agents leave and join.
    ],
)
def test_rollouts_of_one_episode_are_padded_and_masked(env, num_envs):
    num_steps = 200
    local = Environment(make(env, num_envs))
    steps = [local.initial(derive_seed(3, 0, 0, 0))]
    for _ in range(num_steps):
        steps.append(local.step(np.ones(local.num_envs, np.int64)))
    with server(num_envs, env=env) as (address, _):
        with Learner([address], seed=3, one_episode=True) as learner:
            expected = [
                (e, *r)
                for e in range(local.num_envs)
                for r in one_episode_rollouts(steps, e, T)
            ]
            rollouts = learner.rollouts(len(expected))
    # They come in the order of their ends.
    expected.sort(key=lambda x: (x[2], x[0]))
    lengths = set()
    for rollout, (e, begin, end) in zip(rollouts, expected):
        n = end - begin
        lengths.add(n)
        for name in steps[0]:
            real = np.stack([s[name][e] for s in steps[begin : end + 1]])
            np.testing.assert_array_equal(rollout[name][: n + 1], real, err_msg=name)
        assert rollout["mask"].tolist() == [True] * (n + 1) + [False] * (T - n)
        assert rollout["done"][n + 1 :].all() and not rollout["done"][1 : n + 1].any()
        for name in ("reward", "terminated", "truncated", "episode_end"):
            assert not rollout[name][n + 1 :].any()
        np.testing.assert_array_equal(
            rollout["observation"][n:],
            np.repeat(rollout["observation"][n : n + 1], T - n + 1, 0),
        )
        np.testing.assert_array_equal(
            rollout["policy_logits"][:n, 0], begin + np.arange(n)
        )
        assert (rollout["policy_logits"][n:] == rollout["policy_logits"][n - 1]).all()
        assert (rollout["core_state"] == begin).all()
    assert len(lengths) > 2 and max(lengths) == T


@pytest.mark.survives("http-proxy")
def test_a_proxy_for_the_web_is_not_asked(monkeypatch):
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server() as (address, _), Learner([address]) as learner:
        learner.rollouts(1)


def test_no_two_environments_of_a_run_have_the_same_seed():
    """Two streams of two environments, which connect again and again."""
    with server(2, env="tests.faulty_envs:Seeds-v0") as (address, _):
        with Learner([address, address], seed=5) as learner:
            rollouts = learner.rollouts(60)
    seen = {int(r["observation"][0, 0]) for r in rollouts}
    expected = {
        derive_seed(derive_seed(5, stream, connection, 0), index)
        for stream in (0, 1)
        for connection in range(60)
        for index in (0, 1)
    }
    assert len(expected) == 240 and seen <= expected
    assert len(seen) > 8  # Each stream had connected three times.


@pytest.mark.survives("server-killed")
def test_a_killed_server_costs_its_unfinished_rollout_and_nothing_else():
    with server(2) as (address, program), Learner([address]) as learner:
        [pid] = program.workers()
        rollouts = learner.rollouts(10)
        os.kill(pid, signal.SIGKILL)
        learner.drain()
        learner.wait_for(lambda: learner.status()[address]["reconnects"])
        error = learner.status()[address]["last_error"]
        before = learner.status()[address]["rollouts"]
        learner.wait_for(lambda: learner.status()[address]["rollouts"] > before + 10)
        assert learner.status()[address]["state"] == "running"
        assert error
    for rollout in rollouts:
        check_contiguous(rollout)


def test_rollouts_across_reconnects_are_contiguous():
    with server(1, env="tests.faulty_envs:Raises-v0") as (address, _):
        with Learner([address]) as learner:
            rollouts = learner.rollouts(100)  # It raises each 300 steps.
            status = learner.status()[address]
    assert status["reconnects"] >= 2
    assert "RuntimeError: the ball went through the floor" in status["last_error"]
    for rollout in rollouts:
        step = np.where(rollout["done"], 0, rollout["episode_step"])
        np.testing.assert_array_equal(step[1:], (step[:-1] + 1) % 11)
        assert (rollout["core_state"] % T == 0).all()


@pytest.mark.survives("no-server")
def test_no_server_within_the_time_is_an_error_that_says_so():
    address = f"127.0.0.1:{free_port()}"
    with Learner([address], connect_timeout_s=1) as learner:
        learner.threads[0].join(30)
        assert "no environment server could be reached within 1" in learner.error
        assert address in learner.error
        assert learner.queue.is_closed() and learner.batcher.is_closed()


def test_a_server_that_is_reached_may_take_longer_for_its_environments():
    with server(env="tests.faulty_envs:Late-v0") as (address, _):  # 3.5 s.
        with Learner([address], connect_timeout_s=2) as learner:
            learner.wait_for(lambda: learner.answers or learner.error)
            assert learner.error is None


@pytest.mark.survives("other-environment")
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"observation_space": "Box(0, 1, (9,), uint8)"},
            "the observation space differs",
        ),
        (
            {"action_space": "Discrete(77)"},
            "learner has Discrete(77), the server Discr",
        ),
    ],
)
def test_servers_with_other_spaces_are_refused_naming_both(kwargs, message):
    with server() as (address, _):
        with Learner([address], connect_timeout_s=1, **kwargs) as learner:
            learner.threads[0].join(30)
            assert message in learner.error
            assert next(iter(kwargs.values())) in learner.error
            assert learner.answers == 0


@pytest.mark.survives("silent-connection")
def test_a_server_that_says_nothing_is_hung_up_on():
    def stream(requests, context):
        context.add_callback(ended.set)
        ended.wait(120)
        yield from ()

    ended, address = threading.Event(), f"127.0.0.1:{free_port()}"
    silent = grpc.server(futures.ThreadPoolExecutor(8))
    handler = grpc.stream_stream_rpc_method_handler(stream)
    handler = grpc.method_handlers_generic_handler(SERVICE, {"Stream": handler})
    silent.add_generic_rpc_handlers([handler])
    assert silent.add_insecure_port(address)
    silent.start()
    try:
        with (
            server() as (other, _),
            Learner([other, address], welcome_timeout_s=5) as learner,
        ):
            learner.drain()
            learner.wait_for(lambda: learner.status()[address]["last_error"])
            assert learner.status()[address]["last_error"] == (
                "no environments came within 5 s (--env_timeout_seconds)"
            )
            assert ended.wait(30)
            assert learner.status()[other]["reconnects"] == 0
    finally:
        silent.stop(None).wait()


def test_one_bad_server_does_not_disturb_the_others():
    nobody = f"127.0.0.1:{free_port()}"
    with server() as (address, _), Learner([nobody, address]) as learner:
        for rollout in learner.rollouts(20):
            check_contiguous(rollout)
        learner.wait_for(lambda: learner.status()[nobody]["last_error"])
        assert learner.status()[nobody]["reconnects"] >= 1
        assert learner.status()[address]["reconnects"] == 0


def test_a_second_run_is_refused_and_the_first_goes_on():
    with server(2) as (address, _), Learner([address]) as learner:
        learner.rollouts(2)
        with pytest.raises(RuntimeError, match="twice"):
            learner.pool.run()
        learner.rollouts(10)
    assert learner.error is None


def test_a_first_server_may_be_waited_for_without_end():
    with server() as (address, _):
        with Learner([address], connect_timeout_s=1e10) as learner:
            learner.rollouts(1)
    assert learner.error is None


def test_servers_come_and_go_at_run_time():
    with server() as (one, _), server() as (two, _), Learner([one]) as learner:
        learner.drain()
        learner.pool.add(two)
        learner.wait_for(lambda: learner.status()[two]["rollouts"] > 5)
        assert learner.pool.remove(one)
        assert not learner.pool.remove(one) and not learner.pool.remove("nobody:1")
        assert list(learner.status()) == [two]
        before = learner.status()[two]["rollouts"]
        learner.wait_for(lambda: learner.status()[two]["rollouts"] > before + 5)


def test_streams_to_one_address_are_told_apart_and_removed_together():
    with server() as (address, _), Learner([address] * 3) as learner:
        learner.drain()
        assert [s["stream"] for s in learner.pool.status()] == [0, 1, 2]
        assert learner.pool.remove(address)
        assert learner.pool.status() == []
        learner.pool.add(address)
        assert [s["stream"] for s in learner.pool.status()] == [3]
        learner.wait_for(lambda: learner.status()[address]["rollouts"] > 3)


def test_threads_of_removed_streams_do_not_pile_up():
    def num_threads():
        return len(os.listdir("/proc/self/task"))

    with server() as (address, _), Learner([address]) as learner:
        learner.drain()
        for _ in range(3):
            learner.wait_for(lambda: learner.status()[address]["rollouts"] > 3)
            assert learner.pool.remove(address)
            learner.pool.add(address)
        learner.wait_for(lambda: learner.status()[address]["rollouts"] > 3)
        before = num_threads()
        for _ in range(30):
            assert learner.pool.remove(address)
            learner.pool.add(address)
        learner.wait_for(lambda: learner.status()[address]["rollouts"] > 3)
        learner.wait_for(lambda: num_threads() <= before + 5)


@pytest.mark.parametrize("max_rollouts", [0, 1, 50])
def test_streams_together_deliver_exactly_what_is_asked_for(max_rollouts):
    with server(3) as (address, _):
        with Learner([address] * 3, max_rollouts=max_rollouts) as learner:
            learner.rollouts(max_rollouts)
            # All of them are at work on a rollout that nobody asked for, or wait.
            learner.wait_for(
                lambda: all(
                    s["steps"] >= 3 * T and s["steps"] % (3 * T) == 0
                    for s in learner.pool.status()
                )
            )
            assert learner.pool.rollouts()["delivered"] == max_rollouts
            assert sum(s["rollouts"] for s in learner.pool.status()) == max_rollouts
        rollouts = learner.pool.rollouts()
        assert rollouts["delivered"] == max_rollouts and rollouts["lost"] == 0
        assert rollouts["begun"] == max_rollouts + rollouts["ended"]
        assert learner.queue.size() == 0


@pytest.mark.parametrize("num_envs", [1, 3, 6])
def test_no_more_rollouts_are_begun_than_are_allowed(num_envs):
    """But all of a stream's, which begin together."""
    delivered = 0
    with server(num_envs) as (address, _):
        with Learner([address] * 2, allowed_rollouts=4) as learner:
            for allowed in 4, 8, 12, 16:
                expected = -(-allowed // num_envs) * num_envs
                learner.rollouts(expected - delivered)
                delivered = expected
                time.sleep(0.1)  # In which they would begin others.
                counts = learner.pool.rollouts()
                assert counts["begun"] == counts["delivered"] == expected
                if allowed == 8:  # Streams end while they wait.
                    assert learner.pool.remove(address)
                    learner.pool.add(address)
                learner.pool.allow(4)
            learner.rollouts(1)


def test_a_stream_that_ends_gives_back_the_rollouts_it_has_begun():
    slow, quick = "tests.faulty_envs:Slow-v0", "tests.faulty_envs:Quick-v0"
    with server(4, env=slow) as (one, program), server(2, env=quick) as (two, _):
        with Learner([one], allowed_rollouts=4) as learner:
            learner.wait_for(lambda: learner.pool.rollouts()["begun"] == 4)
            learner.pool.add(two)
            learner.wait_for(lambda: learner.status()[two]["state"] == "running")
            program.signal_all(signal.SIGKILL)
            learner.rollouts(4)
            # A stream counts a rollout just after the queue has it.
            learner.wait_for(lambda: learner.status()[two]["rollouts"] == 4)
            assert learner.pool.rollouts() == {
                "begun": 8, "delivered": 4, "lost": 4, "ended": 0
            }  # fmt: skip
            learner.pool.allow(2)
            learner.rollouts(2)


def test_without_a_limit_allow_changes_nothing():
    with server() as (address, _), Learner([address]) as learner:
        learner.pool.allow(1)
        learner.rollouts(3)
    with pytest.raises(ValueError, match="allowed_rollouts is 0, expected at least 1"):
        Learner([], allowed_rollouts=0)


def test_what_removed_streams_delivered_counts():
    with server() as (one, _), server() as (two, _):
        with Learner([one], max_rollouts=40) as learner:
            learner.rollouts(10)
            learner.pool.remove(one)
            learner.pool.add(two)
            learner.rollouts(30)
            assert learner.pool.rollouts()["delivered"] == 40
            assert learner.status()[two]["rollouts"] < 40


def test_a_rollout_that_the_queue_refuses_is_not_counted():
    with server() as (address, _):
        learner = Learner([address], max_rollouts=1)
        learner.queue.enqueue({"unlike a rollout": torch.zeros(1, 1)})
        with learner:
            # Twice: the first one has given its place back.
            learner.wait_for(lambda: learner.status()[address]["reconnects"] == 2)
            assert "unlike a rollout" in learner.status()[address]["last_error"]
        assert learner.pool.rollouts()["delivered"] == 0


def test_a_server_gone_for_a_while_is_taken_up_again():
    with Learner([], connect_timeout_s=60) as learner:
        learner.drain()
        address = f"127.0.0.1:{free_port()}"
        learner.pool.add(address)
        for _ in range(2):
            with server(address=address):
                before = learner.status()[address]["rollouts"]
                learner.wait_for(
                    lambda n=before: learner.status()[address]["rollouts"] > n + 3
                )
            learner.wait_for(lambda: learner.status()[address]["state"] != "running")
    rollouts = learner.pool.rollouts()
    assert rollouts["lost"] == 2 and rollouts["ended"] == 0  # One with each server.
    assert rollouts["begun"] == 2 + rollouts["delivered"]


def test_stop_ends_actors_whatever_they_wait_for():
    with server(2) as (address, _):
        # The queue is full: nothing takes from it.
        with Learner([address] * 3) as learner:
            learner.wait_for(lambda: learner.queue.size() == 64)
        # The batcher does not answer.
        with Learner([address] * 3, delay_s=2):
            pass


def test_stop_ends_actors_of_a_server_that_does_not_answer():
    with server(env="tests.faulty_envs:Stuck-v0") as (address, program):
        with Learner([address]) as learner:
            learner.drain()
            program.wait_for("sleeps for an hour")
        program.stop(signal.SIGTERM)


ACTION = torch.ones(1, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"action": ACTION}, "a dict .* expected .dict of outputs, core_state"),
        (({"act": ACTION}, (ACTION,)), "expected 'action' among them"),
        (
            ({"action": ACTION.float()}, (ACTION,)),
            "the action as float32 .*, expected int",
        ),
        (
            ({"action": ACTION[..., None]}, (ACTION,)),
            r"int64 \[1, 2, 1\], expected int64",
        ),
        (({"action": ACTION}, ()), "core_state as a tuple of 0, expected a tuple of 1"),
        (({"action": ACTION}, (ACTION,)), "leaf '1/0' is int64 .* expected float32"),
        (({"action": 7 * ACTION}, (torch.zeros(1, 2, 2),)), "is out of bounds"),
    ],
)
def test_an_answer_that_is_none_is_in_the_status(outputs, message):
    with server(2) as (address, _):
        learner = Learner([address])

        def answer():
            for batch in learner.batcher:
                batch.set_outputs(outputs)

        learner.threads[1] = threading.Thread(target=answer)
        with learner:
            learner.wait_for(lambda: learner.status()[address]["last_error"])
            error = learner.status()[address]["last_error"]
        assert re.search(message, error), error


def test_outputs_that_change_on_the_way_are_refused():
    """Without check_outputs the batcher lets them pass."""
    with server(1) as (address, _):
        learner = Learner([address])
        learner.batcher = DynamicBatcher(1, check_outputs=False)
        learner.pool = ActorPool(
            T, learner.queue, learner.batcher, [address], (torch.zeros(1, 1, 2),)
        )

        def answer():
            action = torch.ones(1, 1, dtype=torch.int64)
            for n, batch in enumerate(learner.batcher):
                outputs = {"action": action, "extra": torch.zeros(1, 1, 2 + n % 2)}
                batch.set_outputs((outputs, batch.get_inputs()[1]))

        learner.threads[1] = threading.Thread(target=answer)
        with learner:
            learner.wait_for(lambda: learner.status()[address]["last_error"])
            error = learner.status()[address]["last_error"]
        assert "other outputs than for the step before" in error


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"unroll_length": 0}, "unroll_length is 0"),
        ({"max_rollouts": -1}, "max_rollouts is -1, expected at least 0"),
        ({"tls_cert": "x", "tls_ca": "x"}, "tls_ca, expected all three or none"),
        ({"initial_state": torch.zeros(3)}, "initial_state has shape"),
        ({"initial_state": torch.zeros(1, 2, 3)}, "initial_state has shape"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(kwargs, message):
    arguments = {
        "unroll_length": T,
        "learner_queue": BatchingQueue(1),
        "inference_batcher": DynamicBatcher(1),
        "addresses": [],
        "initial_state": (),
    }
    with pytest.raises(ValueError, match=message):
        ActorPool(**{**arguments, **kwargs})


@contextlib.contextmanager
def host(address, num_envs):
    """Dials the learner at the address, in this process."""
    flags = ["--env", COUNTER, "--learner", address, "--envs_per_server", str(num_envs)]
    flags = polybeast_env.parser().parse_args(flags)
    d = dialer.Dialer(polybeast_env.create_env, flags, address)
    thread = threading.Thread(target=d.run)
    thread.start()
    try:
        yield
    finally:
        d.close()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.survives("streams-too-large")
def test_hosts_have_no_more_environments_together_than_memory_is_for():
    address, seen = f"127.0.0.1:{free_port()}", []

    def departed():
        seen.extend(s["last_error"] for s in learner.pool.take_departed())
        return seen

    with (
        server(4) as (own, _),
        Learner([own], max_envs=5, listen=address) as learner,
        host(address, 3),
        host(address, 3),
    ):
        learner.drain()
        learner.wait_for(departed)
        assert seen[0] == (
            "the learner's memory is for 2 more environments, this stream has 3"
        )
        # They do not take the room of the learner's own servers.
        learner.pool.remove(own)
        learner.pool.add(own)
        learner.wait_for(lambda: learner.status()[own]["rollouts"] > 0)
        states = [(s["num_envs"], s["dialed_in"]) for s in learner.pool.status()]
        assert (3, True) in states


@pytest.mark.survives("streams-too-large")
def test_a_message_is_no_larger_than_memory_is_for():
    with (
        server(8) as (address, _),
        Learner([address], max_message_bytes=500) as learner,
    ):
        learner.wait_for(lambda: learner.status()[address]["last_error"])
        error = learner.status()[address]["last_error"]
        assert error.startswith("the server's step is larger than this learner takes")
    for size in (0, 2**28 + 1):
        with pytest.raises(
            ValueError, match=f"max_message_bytes is {size}, expected 1"
        ):
            Learner([], max_message_bytes=size)
