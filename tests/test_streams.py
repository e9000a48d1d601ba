"""What the learner does about its streams; the pool and the clock are not real."""

import argparse
import json
import logging
import os
import re

import numpy as np
import pytest
import torch

import polybeast_env
from torchbeast import machine, process
from torchbeast.environment import MAX_METRICS
from torchbeast.messages import BadInput, Stop
from torchbeast.remote import addresses, server, sources, streams
from torchbeast.remote import torchbeast_pb2 as pb


class Pool:
    """As much of an ActorPool as is needed here."""

    def __init__(self, *addresses):
        self.streams = []
        self.num_added = 0
        self.delivered = 1
        self.departed = []
        for address in addresses:
            self.add(address)

    def add(self, address):
        self.streams.append(
            {
                "stream": self.num_added,
                "address": address,
                "environment": "",
                "state": "running",
                "reconnects": 0,
                "failures": 0,
                "last_error": "",
                "dialed_in": False,
            }
        )
        self.num_added += 1

    def remove(self, address):
        self.streams = [s for s in self.streams if s["address"] != address]

    def status(self):
        return [dict(s) for s in self.streams]

    def rollouts(self):
        return {"delivered": self.delivered}

    def take_departed(self):
        departed, self.departed = self.departed, []
        return departed

    def addresses(self):
        return sorted(s["address"] for s in self.streams)


def flags(server_addresses=None, insecure=True):
    return argparse.Namespace(
        server_addresses=server_addresses,
        listen=None,
        tls_cert=None,
        insecure=insecure,
    )


@pytest.fixture
def lines():
    """What was logged, a list that grows."""
    result = []
    handler = logging.Handler()
    handler.emit = lambda record: result.append(record.getMessage())
    level = streams.log.level
    streams.log.setLevel(logging.INFO)
    streams.log.addHandler(handler)
    yield result
    streams.log.removeHandler(handler)
    streams.log.setLevel(level)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:1", ["a:1"]),
        (" a:1 , b:2,a:1,", ["a:1", "b:2", "a:1"]),
        ("a:1  # one\n\n# b:2, c:3\n d:4,\r\nunix:/x", ["a:1", "d:4", "unix:/x"]),
        ("# nothing\n,\n", []),
    ],
)
def test_addresses_stand_in_lines_or_between_commas(text, expected):
    assert addresses.parse(text) == expected


def test_the_pool_has_each_address_as_often_as_the_file(tmp_path, lines):
    path = tmp_path / "hosts"
    path.write_text("a:1\nb:1\nb:1\nc:1")
    pool = Pool("a:1", "b:1", "b:1", "c:1")
    watched = streams.Streams(pool, flags(f"@{path}"), "Env-v0")
    watched.check()
    assert lines == []
    path.write_text("b:1\nc:1\nc:1\nc:1\nd:1\nd:1")
    watched.check()
    assert pool.addresses() == ["b:1", "c:1", "c:1", "c:1", "d:1", "d:1"]
    assert lines == [
        f"{path}: a:1 has 0 streams, 1 before",
        f"{path}: b:1 has 1 streams, 2 before",
        f"{path}: c:1 has 3 streams, 1 before",
        f"{path}: d:1 has 2 streams, 0 before",
    ]
    watched.check()
    assert len(lines) == 4
    assert pool.streams[0]["address"] == "c:1"  # More of it: the first one stays.


@pytest.mark.survives("bad-address-file")
def test_a_file_that_is_not_there_changes_nothing_and_is_told_of_once(tmp_path, lines):
    path = tmp_path / "hosts"
    pool = Pool("a:1")
    watched = streams.Streams(pool, flags(f"@{path}"), "Env-v0")
    for n in (1, 2):
        for _ in range(5):
            watched.check()
        assert len(lines) == n and "No such file or directory" in lines[-1]
        assert pool.addresses() == ["a:1"]
        path.write_text("a:1")
        watched.check()
        path.unlink()


@pytest.mark.survives("bad-address-file")
def test_a_file_with_another_host_changes_nothing_without_tls(tmp_path, lines):
    path = tmp_path / "hosts"
    path.write_text("localhost:1\nhostA:1")
    pool = Pool("localhost:2")
    watched = streams.Streams(pool, flags(f"@{path}", insecure=False), "Env-v0")
    for _ in range(5):
        watched.check()
    assert pool.addresses() == ["localhost:2"]
    assert len(lines) == 1 and "hostA:1 is not of this host only" in lines[0]
    path.write_text("localhost:1")
    watched.check()
    assert pool.addresses() == ["localhost:1"]


@pytest.mark.parametrize(
    "text",
    ["a", "a:", ":1", "a:0", "a:65536", "a:99999", "a:1 b:2", "a:1\nb", "unix:", "a:b"],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(BadInput, match="expected HOST:PORT or unix:PATH"):
        addresses.parse(text)


@pytest.mark.survives("bad-address-file")
def test_a_file_of_too_many_addresses_changes_nothing(tmp_path, lines, monkeypatch):
    path = tmp_path / "hosts"
    path.write_text(1000 * "a:1\n")
    monkeypatch.setattr(process.resource, "getrlimit", lambda _: (1024, 4096))
    pool = Pool("a:1")
    streams.Streams(pool, flags(f"@{path}"), "Env-v0").check()
    assert pool.addresses() == ["a:1"]
    assert len(lines) == 1 and "open files, the limit is 4096" in lines[0]


def test_many_changes_of_a_file_are_a_few_lines(tmp_path, lines):
    path = tmp_path / "hosts"
    path.write_text("\n".join(f"a:{i}" for i in range(1, 101)))
    pool = Pool()
    streams.Streams(pool, flags(f"@{path}"), "Env-v0").check()
    assert len(pool.addresses()) == 100
    assert len(lines) == 11 and lines[-1] == f"{path}: and so on: 100 addresses"


def test_a_file_may_be_of_another_editor_but_not_a_pipe(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes("\ufeffa:1\r\nb:2".encode())
    assert sources.addresses(flags(f"@{path}")) == ["a:1", "b:2"]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadInput, match="expected a file"):
        sources.addresses(flags(f"@{path}"))


def fail(stream, error="Socket closed", state="waiting to reconnect"):
    stream.update(reconnects=stream["reconnects"] + 1, last_error=error, state=state)


def test_a_stream_that_stays_away_is_told_of_ever_more_rarely(monkeypatch, lines):
    now = 0.0
    monkeypatch.setattr(streams.time, "monotonic", lambda: now)
    pool = Pool("a", "b")
    watched = streams.Streams(pool, flags(), "Env-v0")
    told_at = []
    while now < 1000:
        if now >= 5 and now % 10 == 0:  # It tries every 10 s.
            fail(pool.streams[0])
        watched.check()
        if len(lines) > len(told_at):
            told_at.append(now)
        now += 1
    assert told_at == [10, 70, 190, 430, 910]
    pool.streams[0]["state"] = "running"
    watched.check()
    watched.check()
    assert lines[0] == "a: no stream (reconnects: 1): Socket closed"
    assert lines[5:] == ["a: connected (reconnects: 99)"]


def test_a_stream_that_fails_over_and_over_does_not_flood_the_log(monkeypatch, lines):
    now = 0.0
    monkeypatch.setattr(streams.time, "monotonic", lambda: now)
    pool = Pool("a")
    watched = streams.Streams(pool, flags(), "Env-v0")
    while now < 100:
        fail(pool.streams[0], state="running")  # And is back at once.
        watched.check()
        now += 0.2
    assert 10 <= len(lines) <= 2 * 100 / streams.QUIET_S + 2
    assert lines[:2] == [
        "a: no stream (reconnects: 1): Socket closed",
        "a: connected (reconnects: 2)",
    ]


def test_a_new_stream_to_an_old_address_has_a_log_of_its_own(lines):
    pool = Pool("a")
    watched = streams.Streams(pool, flags(), "Env-v0")
    fail(pool.streams[0])
    watched.check()
    pool.remove("a")
    pool.add("a")
    watched.check()
    assert len(lines) == 1
    fail(pool.streams[0])
    watched.check()
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("", ""),
        ("Traceback:\n  File x\nValueError: no\n\n", "ValueError: no"),
        ("a\x1b[31m\tb\r", "a?[31m?b"),
        (5000 * "x", streams.MAX_ERROR_CHARACTERS * "x"),
    ],
)
def test_of_what_a_server_said_the_last_line_is_logged(error, expected):
    assert streams.last_line(error) == expected


@pytest.mark.survives("environment-always-fails")
def test_a_run_ends_when_each_stream_has_failed_and_nothing_was_ever_delivered():
    pool = Pool("a:1", "b:2")
    pool.delivered = 0
    watched = streams.Streams(pool, flags(), "Env-v0")
    first, second = pool.streams
    first.update(failures=streams.MAX_FAILURES, last_error="Traceback\nit raised")
    watched.check()
    second.update(failures=streams.MAX_FAILURES)
    pool.delivered = 1
    watched.check()
    pool.delivered = 0
    with pytest.raises(Stop, match="^no rollout was delivered, .* 8 times: it raised$"):
        watched.check()


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([b'{"a": 1, "b/c": 2.5}', b'{"a": true}'], [{"a": 1, "b/c": 2.5}, {"a": 1}]),
        ([b'{"a": NaN, "b": Infinity, "c": -1}'], [{"c": -1}]),
        ([b"", b"\xff", b"3", b"[1]", b'{"a": "b"}', b'{"a": {}}', b"[" * 10**5], []),
        ([b'{"a b": 1, "": 2, "c,d": 3}'], [{}]),
        ([b'{"a": 1' + b"0" * 400 + b"}"], []),
        ([b'{"\\ud800": 1, "\\u0000": 2, "a": 3}'], [{"a": 3}]),
    ],
)
def test_metrics_of_servers_are_taken_as_far_as_they_are_numbers(texts, expected):
    assert streams.decode_metrics(texts) == expected


def test_a_server_sends_no_more_metrics_than_an_episode_may_have():
    [metrics] = streams.decode_metrics([json.dumps({f"m{i}": i for i in range(1000)})])
    assert list(metrics) == [f"m{i}" for i in range(MAX_METRICS)]


def test_streams_for_which_there_are_no_threads_are_told_of(tmp_path, lines):
    class Full(Pool):
        most = 3

        def add(self, address):
            if len(self.streams) == self.most:
                raise RuntimeError("Resource temporarily unavailable")
            super().add(address)

    path = tmp_path / "hosts"
    path.write_text("a:1")
    pool = Full("a:1")
    watched = streams.Streams(pool, flags(f"@{path}"), "Env-v0")
    path.write_text("a:1\nb:1\nb:1\nb:1")
    for _ in range(3):
        watched.check()
    assert pool.addresses() == ["a:1", "b:1", "b:1"]
    expected = "Resource temporarily unavailable; goes on with fewer streams"
    assert lines == [f"{path}: {expected}"]
    pool.most = 4
    watched.check()
    assert pool.addresses() == ["a:1", "b:1", "b:1", "b:1"] and len(lines) == 2


def test_hosts_that_dial_in_are_logged_by_their_number_of_streams(lines):
    guests, pool = streams.Guests(), Pool("10.0.0.1:5", "10.0.0.1:6", "10.0.0.2:5")
    for s in pool.streams:
        s["dialed_in"] = True
    start = guests.alone_since
    for t in range(100):
        guests.update(pool.status(), pool.take_departed(), start + t)
    assert sorted(lines) == [
        "host 10.0.0.1: 2 streams, 0 before",
        "host 10.0.0.2: 1 streams, 0 before",
    ]
    lines.clear()
    for error in 5 * ["boom"] + ["the host is gone"]:
        pool.departed.append({"address": "10.0.0.2:7", "last_error": f"a\n{error}"})
    pool.remove("10.0.0.2:5")
    guests.update(pool.status(), pool.take_departed(), start + 101)
    assert lines == [
        "host 10.0.0.2: 0 streams, 1 before",
        "host 10.0.0.2: no stream (1 so far): boom",
    ]
    lines.clear()
    pool.departed.append({"address": "10.0.0.2:8", "last_error": "boom"})
    guests.update(pool.status(), pool.take_departed(), start + 200)
    assert lines == ["host 10.0.0.2: no stream (6 so far): boom"]
    lines.clear()
    pool.streams.clear()
    for t in range(200, 500, 5):
        guests.update(pool.status(), pool.take_departed(), start + t)
    assert lines[0] == "host 10.0.0.1: 0 streams, 2 before"
    assert lines[1:] == 3 * ["no host has dialed in"]  # After 60, 120 and 240 s.


def test_a_host_whose_streams_come_and_go_is_logged_once_a_minute(lines):
    guests, pool = streams.Guests(), Pool()
    start = guests.alone_since
    for t in range(600):
        pool.streams.clear()
        if t // 7 % 2:
            pool.add("10.0.0.1:5")
            pool.streams[0]["dialed_in"] = True
        elif t % 7 == 0:
            error = f"KeyError: {t} at 0x7f{t:x}"  # The same but for its numbers.
            pool.departed.append({"address": "10.0.0.1:5", "last_error": error})
        guests.update(pool.status(), pool.take_departed(), start + t)
    counts = [line for line in lines if "before" in line]
    errors = [line for line in lines if "no stream" in line]
    assert len(counts) < 3 + 600 / 60 and counts[0].endswith("1 streams, 0 before")
    assert [re.search(r"\d+ so far", e)[0] for e in errors] == [
        "1 so far",
        "6 so far",
        "15 so far",
        "33 so far",
    ]
    pool.streams.clear()
    for t in range(600, 1000):
        guests.update(pool.status(), pool.take_departed(), start + t)
    assert not guests.hosts


def words(n):
    """n texts that differ in letters."""
    letters = "abcdefghijklmnopqrst"
    return ["".join(letters[int(c, 16)] for c in f"{i:x}") for i in range(n)]


def test_errors_that_are_all_different_do_not_flood_the_log(lines):
    guests, pool = streams.Guests(), Pool()
    start = guests.alone_since
    for t, word in enumerate(words(600)):
        pool.departed.append({"address": "10.0.0.1:5", "last_error": f"no {word}"})
        guests.update(pool.status(), pool.take_departed(), start + t)
    errors = [line for line in lines if "no stream" in line]
    assert len(errors) <= 5 * 4 + 5  # Some each time, then ever more rarely.
    assert errors[:2] == [
        "host 10.0.0.1: no stream (1 so far): no a",
        "host 10.0.0.1: no stream (1 so far): no b",
    ]
    # What is beyond is counted together.
    assert max(int(re.search(r"(\d+) so far", e)[1]) for e in errors) > 200


def test_hosts_that_are_all_different_do_not_flood_the_log(lines):
    guests, pool = streams.Guests(), Pool()
    start = guests.alone_since
    for t in range(30):
        pool.streams.clear()
        for i in range(100):
            address = f"10.0.{t}.{i}:5"
            pool.add(address)
            pool.streams[-1]["dialed_in"] = True
            pool.departed.append({"address": address, "last_error": "boom"})
        guests.update(pool.status(), pool.take_departed(), start + t)
    assert len([line for line in lines if "no stream" in line]) == 100 + 1
    assert len([line for line in lines if "before" in line]) < 2 * 1000 + 10
    assert any(line.startswith("host others: 100 streams") for line in lines)


def test_a_file_says_nothing_of_hosts_that_dial_in(tmp_path, lines):
    path = tmp_path / "hosts"
    path.write_text("localhost:1")
    pool = Pool("localhost:1", "10.0.0.1:5")
    pool.streams[1]["dialed_in"] = True
    streams.Streams(pool, flags(f"@{path}"), "Env-v0").check()
    assert pool.addresses() == ["10.0.0.1:5", "localhost:1"] and lines == []


def test_an_environment_of_another_name_is_warned_of_once(lines):
    pool = Pool("a:1", "b:1", "c:1")
    for stream, name in zip(pool.streams, ("Env-v0", "Other-v0", "")):
        stream["environment"] = name
    watched = streams.Streams(pool, flags(), "Env-v0")
    for _ in range(3):
        watched.check()
    assert lines == [
        "b:1 steps Other-v0, the learner was told of Env-v0: both are learned from"
    ]


def test_servers_name_their_environment_with_its_arguments():
    args = ["--env", "CartPole-v1", "--env_args", "sutton_barto_reward=True"]
    args = polybeast_env.parser().parse_args(args)
    hello = pb.Request(hello=pb.Hello(version=server.PROTOCOL_VERSION))
    requests = iter([hello.SerializeToString()])
    responses = server.converse(polybeast_env.create_env, args, requests, "x")
    welcome = pb.Response.FromString(next(responses)).welcome
    assert welcome.environment == "CartPole-v1 sutton_barto_reward=True"
    responses.close()


def sizes(monkeypatch, row_bytes=28_000, memory=16 * 2**30, num_streams=0, **changes):
    """check_sizes() of a learner with so much memory."""
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: memory)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 2 * memory)
    flags = {"server_addresses": None, "listen": "a:1", "max_streams": 1024,
             "num_servers": 0, "envs_per_server": 32, "batch_size": 4}  # fmt: skip
    flags = argparse.Namespace(**{**flags, **changes})
    step = {"observation": np.zeros((2, row_bytes), np.uint8)}
    specs = {
        "observation": torch.empty(21, row_bytes, device="meta", dtype=torch.uint8)
    }
    return sources.check_sizes(flags, step, specs, 1, num_streams)


@pytest.mark.survives("streams-too-large")
@pytest.mark.parametrize("row_bytes", [16, 28_000, 500_000])
@pytest.mark.parametrize("memory_gb", [16, 64, 512])
def test_all_streams_that_hosts_may_open_fit_into_the_memory(
    monkeypatch, row_bytes, memory_gb
):
    memory = memory_gb * 2**30
    limits = sizes(monkeypatch, row_bytes, memory)
    assert 2**21 + row_bytes <= limits["max_message_bytes"] <= 2**28
    assert 2 * 1024 * limits["max_message_bytes"] <= memory / 2
    assert 100 < limits["max_envs"] * 21 * row_bytes <= memory / 4
    # Nor is there room for more than a stream can have.
    assert limits["max_message_bytes"] <= 2**21 + 4096 * row_bytes


def test_the_step_of_its_own_servers_fits_whatever_hosts_may_send(monkeypatch):
    own = {"num_servers": 2, "envs_per_server": 2000}
    limits = sizes(monkeypatch, num_streams=2, **own)
    assert limits["max_message_bytes"] == 2**21 + 2000 * 28_000
    assert limits["max_envs"] == sizes(monkeypatch)["max_envs"]  # Hosts' limit alone.


def test_a_step_that_no_host_could_send_is_refused_at_the_start(monkeypatch):
    with pytest.raises(BadInput, match="3,000,000 bytes.* use a smaller --max_streams"):
        sizes(monkeypatch, row_bytes=3_000_000)
    sizes(monkeypatch, row_bytes=3_000_000, max_streams=64)
    one = {"row_bytes": 3_000_000, "num_streams": 1024}
    with pytest.raises(BadInput, match="streams: use fewer --server_addresses$"):
        sizes(monkeypatch, **one, listen=None, server_addresses="a:1")
    both = "streams: use a smaller --max_streams, or fewer --server_addresses$"
    with pytest.raises(BadInput, match=both):
        sizes(monkeypatch, **one, server_addresses="a:1")
