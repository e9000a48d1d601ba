"""Several learners, which torchrun starts."""

import json
import os
import platform
import re
import signal
import subprocess
import threading
import time

import pytest

import polybeast
from tests.programs import (
    SERIAL,
    Program,
    args,
    load,
    main,
    marked,
    mono_first,
    private_mounts,
    read_logs,
    run,
    succeeds,
    wait_for_steps,
)
from tests.supervisor import stat
from tests.test_polybeast_env import free_port
from torchbeast import ranks, torchrun
from torchbeast.messages import BadInput, Stop
from torchbeast.process import Signals

LOG = ("--log_interval_steps", 40)  # A line for every update.
RESTARTS = ("--standalone", "--max-restarts", "2")
EXTRA = r"the statistic extra is \[\] on rank 1, missing on rank 0"
long = pytest.mark.long


def serial(savedir, *others, **kwargs):
    return args("monobeast", savedir, *SERIAL, *LOG, "--seed", 1, *others, **kwargs)


def lines(result):
    """What the programs print, without torchrun's own."""
    return [
        line
        for line in result.stderr.splitlines()
        if re.match(r"\[..:..:..\]|monobeast: error|polybeast: error", line)
    ]


def refusal(*args, **kwargs):
    """The one line with which the first rank refuses these arguments."""
    result = run(*args, **kwargs)
    assert re.search("exitcode +: 2", result.stderr), result.stderr
    [line] = set(lines(result))  # Twice, if torchrun starts them again.
    return line


def test_what_two_ranks_put_together_is_what_one_with_both_batches_has():
    result = run(module="tests.sums", ranks=2)
    assert result.returncode == 0, result.stderr


@long
def test_ranks_of_one_host_listen_on_loopback_whatever_address_the_host_has(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.0.2 {platform.node()}\n")
    prefix = private_mounts(f"mount --bind {hosts} /etc/hosts")
    result = run(module="tests.sums", ranks=2, prefix=prefix)
    assert result.returncode == 0, result.stderr


@long
def test_a_run_goes_on_with_another_number_of_ranks(savedir):
    result = run(*serial(savedir, steps=800), ranks=2)
    assert result.returncode == 0, result.stderr
    path = savedir / "x"
    rows = read_logs(path)
    assert [int(row["step"]) for row in rows] == list(range(40, 801, 40))
    assert all(float(row["vote"]) > 0 and float(row["reduction"]) > 0 for row in rows)
    assert load(savedir)["step"] == 800 and load(savedir)["updates"] == 20
    # Both act: each update's 40 steps are of two environments.
    episodes = sum(int(row["episodes"]) for row in rows)
    assert load(savedir)["episodes"] == episodes >= 20
    assert len(json.loads((path / "meta.json").read_text())["ranks"]) == 2
    assert "rank 1: " in (path / "out.rank1.log").read_text()
    assert not any("rank 1" in line for line in lines(result))

    succeeds(*serial(savedir, steps=1200))
    result = run(*serial(savedir, "--batch_size", 3, steps=1500), ranks=3)
    assert result.returncode == 0, result.stderr
    assert "resuming" in result.stderr
    assert "--batch_size 3 (before: --batch_size 2)" in result.stderr
    assert load(savedir)["step"] == 1500
    assert [int(row["step"]) for row in read_logs(path)][-3:] == [1380, 1440, 1500]


@long
def test_the_same_seed_gives_the_same_losses(tmp_path):
    losses = []
    for name in ("a", "b"):
        result = run(*serial(tmp_path / name, steps=800), ranks=2)
        assert result.returncode == 0, result.stderr
        losses.append([row["total_loss"] for row in read_logs(tmp_path / name / "x")])
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.survives("rank-signal")
@mono_first
def test_a_signal_to_one_rank_ends_all_at_the_same_update(savedir, module):
    flags = args(module, savedir, *LOG)
    with Program(*flags, module=module, ranks=2) as program:
        wait_for_steps(savedir, 400)
        [_, second] = program.ranks()
        subprocess.run(["kill", "-TERM", str(second)], check=True)
        program.end()
    step = load(savedir)["step"]
    assert int(read_logs(savedir / "x")[-1]["step"]) == step
    for name in ("out.log", "out.rank1.log"):
        assert "rank 1: stopped by SIGTERM" in (savedir / "x" / name).read_text()
    assert f"step {step} of" in program.output


@long
@pytest.mark.survives("rank-signal")
def test_a_signal_to_torchrun_ends_all_with_a_checkpoint(savedir):
    with Program(*serial(savedir), ranks=2) as program:
        wait_for_steps(savedir, 400)
        program.signal(signal.SIGTERM)
        program.end()
    assert load(savedir)["step"] == int(read_logs(savedir / "x")[-1]["step"])
    assert "stopped by SIGTERM" in program.output


@long
@pytest.mark.survives("rank-killed")
def test_a_rank_that_is_killed_ends_the_others_and_the_run_is_resumed(savedir):
    flags = serial(savedir, "--checkpoint_interval_seconds", 1e-9, steps=6000)
    with Program(*flags, ranks=2, torchrun=RESTARTS) as program:
        wait_for_steps(savedir, 400)
        subprocess.run(["kill", "-KILL", str(program.ranks()[1])], check=True)
        assert program.end() == 0, program.output
    assert load(savedir)["step"] == 6000
    assert "resuming" in program.output
    steps = [int(row["step"]) for row in read_logs(savedir / "x")]
    assert steps == list(range(40, 6001, 40))
    assert re.search(
        r"another rank is gone: .*\[127.0.0.1\]:\d+\S*( Connection .* by peer)?",
        program.output,
    )
    assert "GLHF" not in program.output


@pytest.mark.slow
@pytest.mark.survives("rank-stopped")
@pytest.mark.parametrize("nccl", [pytest.param(False, marks=long), True])
def test_a_rank_that_is_stopped_in_an_update_is_given_up(savedir, monkeypatch, nccl):
    """Without actor processes, all that the others do waits for its gradients. Those
    that NCCL sums may not be whole."""
    monkeypatch.setenv("FAULT", "stops")
    if nccl:
        monkeypatch.setenv("NCCL", "1")
    flags = serial(savedir, "--agent", "tests.ranks_agent")
    vote = "torchbeast.ranks.VOTE_TIMEOUT_S=5"
    with Program(
        vote, "monobeast", *flags, module="tests.constants", ranks=2
    ) as program:
        program.wait_for("another rank is gone: ")
        program.wait_for("; results in")
        os.kill(program.ranks()[-1], signal.SIGKILL)
        program.end()
    if nccl:
        assert not (savedir / "x" / "model.tar").exists()
    else:
        assert load(savedir)["updates"] == 20


@long
@pytest.mark.survives("rank-stopped")
def test_a_second_signal_ends_a_rank_that_waits_for_one_that_is_stopped(
    savedir, monkeypatch
):
    monkeypatch.setenv("FAULT", "stops")
    with Program(*serial(savedir, "--agent", "tests.ranks_agent"), ranks=2) as program:
        wait_for_steps(savedir, 800)
        first, second = program.ranks()
        while stat(second)[0] != "T":
            time.sleep(0.05)
        os.kill(first, signal.SIGTERM)
        time.sleep(2)  # What comes within a second is the first signal again.
        os.kill(first, signal.SIGTERM)
        program.wait_for("quit without saving")
        os.kill(second, signal.SIGKILL)
        program.end()


@pytest.mark.slow
@pytest.mark.survives("rank-raises")
@pytest.mark.parametrize(
    "fault, message",
    [
        pytest.param("raises", "rank 1: KeyError: 'nothing'", marks=long),
        pytest.param("exits", "rank 1: SystemExit: enough", marks=long),
        (
            "nan",
            r"total_loss is nan at step 840 \(update 21\) on rank 1; no checkpoint",
        ),
        pytest.param("refuses", "error: not on this host", marks=long),
        pytest.param("adds", EXTRA, marks=long),
        pytest.param("renames", EXTRA, marks=long),
        pytest.param(
            "differs", "the weights' hash is [0-9a-f]* on rank 1, ", marks=long
        ),
    ],
)
def test_what_goes_wrong_on_one_rank_ends_all_and_names_it(
    savedir, fault, message, monkeypatch
):
    monkeypatch.setenv("FAULT", fault)
    flags = serial(savedir, "--agent", "tests.ranks_agent", steps=2000)
    result = run(*flags, ranks=2)
    assert result.returncode != 0
    assert any(re.search(message, line) for line in lines(result)), result.stderr
    saved = (savedir / "x" / "model.tar").exists()
    assert saved == (fault in ("raises", "exits"))
    if saved:
        assert load(savedir)["updates"] == 20


@pytest.mark.survives("torchrun-killed")
def test_ranks_whose_torchrun_is_killed_save_and_end(savedir):
    with Program(*serial(savedir), ranks=2, torchrun=RESTARTS) as program:
        wait_for_steps(savedir, 400)
        program.signal(signal.SIGKILL)
        program.process.wait()
        program.wait_for("torchrun is gone")
        program.wait_for("; results in")
        deadline = time.monotonic() + 60
        while marked(program.mark):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert load(savedir)["step"] >= 400
    assert "Traceback" not in program.output


@long
@pytest.mark.survives("torchrun-stopped")
@pytest.mark.parametrize(
    "signum, message",
    [
        (signal.SIGKILL, "another rank is gone: "),
        (signal.SIGTERM, "rank 1: stopped by SIGTERM"),
    ],
)
def test_ranks_end_while_torchrun_does_not_answer(savedir, signum, message):
    """As when the host of torchrun's store has vanished."""
    with Program(*serial(savedir), ranks=2) as program:
        wait_for_steps(savedir, 400)
        second = program.ranks()[1]
        program.signal(signal.SIGSTOP)
        os.kill(second, signum)
        program.wait_for(message, timeout_s=60)
        program.wait_for("; results in")
        program.signal(signal.SIGCONT)
        program.end()
    assert load(savedir)["step"] == int(read_logs(savedir / "x")[-1]["step"]) >= 400


def test_threads_that_lose_a_rank_at_once_get_the_same_reason():
    group = ranks.Ranks(0, 2)
    at_once = threading.Barrier(2)
    results = []

    def lose():
        at_once.wait()
        results.append(group._lose(RuntimeError("Connection closed by peer")))

    threads = [threading.Thread(target=lose) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] is results[1]
    assert str(results[0]) == "another rank is gone: Connection closed by peer"


@pytest.mark.survives("rank-raises")
@pytest.mark.parametrize("nccl", [False, True])
def test_a_rank_that_fails_in_an_update_ends_those_that_wait_for_it(nccl, monkeypatch):
    """NCCL itself would have them wait for ten minutes."""
    group = ranks.Ranks(0, 2)
    group._signals, group._votes = Signals(), None
    group._nccl = object() if nccl else None

    def vote(operation, votes, group):
        votes[1, ranks.LEAVING] = 1

    class Waiting:
        polls = 0

        def is_completed(self):
            self.polls += 1
            assert self.polls < 10
            with pytest.raises(Stop):
                group._vote()
            return False

        def wait(self, timeout):
            self.is_completed()

    failed = True, "KeyError: 'nothing'", 1, True
    monkeypatch.setattr(group, "_gather", lambda mine, _: [mine, failed])
    with pytest.raises(Stop, match="rank 1: KeyError: 'nothing'") as e, group.update():
        with monkeypatch.context() as patch:
            every = group._all
            patch.setattr(group, "_all", vote)
            every(lambda **kwargs: Waiting(), group=group._nccl)
    assert group.lost and group.stuck == nccl
    assert e.value.save == (not nccl)


def test_a_run_has_torchruns_name_with_one_rank_too(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "pong")
    assert torchrun.new_xpid() == "torchbeast-pong"


@pytest.mark.parametrize(
    ("given", "size"), [([], 6), (["--batch_size", "9"], 9), (["--batch_size", "4"], 0)]
)
def test_a_batch_whose_size_nobody_gave_is_shared_by_all_ranks(
    given, size, monkeypatch
):
    def no_others(*_):
        raise Stop("alone")

    for name, x in (("WORLD_SIZE", "3"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, x)
    monkeypatch.setattr(ranks, "current", ranks.current)
    monkeypatch.setattr(torchrun.dist, "rendezvous", no_others)
    flags = polybeast.program_parser().parse_args(given)
    flags.command = ["polybeast", *given]
    with pytest.raises(Stop if size else BadInput, match="alone" if size else "of 3"):
        torchrun.join(flags)
    assert flags.batch_size == (size or 4)


# Bad input.


def test_a_part_of_torchruns_variables_is_one_line(savedir, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = main(*serial(savedir))
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("monobeast: error: WORLD_SIZE is set, as torchrun does it:")


@long
def test_what_ranks_cannot_learn_together_is_refused_in_one_line(savedir):
    line = refusal(*serial(savedir, "--batch_size", 3), ranks=2)
    assert line == (
        "monobeast: error: --batch_size 3 is of all ranks together: expected a "
        "multiple of 2, their number"
    )
    assert "needs no torchrun" in refusal("--mode", "test", ranks=2)
    flags = ("--server_addresses", "localhost:5001")
    line = refusal(*flags, module="polybeast", ranks=2)
    assert line == "polybeast: error: --server_addresses: 1 addresses for 2 learners"
    assert not savedir.exists()


@long
def test_a_run_that_could_not_be_resumed_is_refused(savedir):
    flags = ("--max-restarts", "1", "--master-port", str(free_port()))
    line = refusal("--savedir", savedir, ranks=2, torchrun=flags)
    assert "torchrun could not resume this run: expected --xpid" in line


@pytest.mark.slow
def test_ranks_with_different_flags_are_refused(savedir):
    """As on two hosts whose commands differ."""
    hosts = ("--nnodes", "2", "--master-port", str(free_port()), "--node-rank")
    one = Program(*serial(savedir), ranks=1, torchrun=(*hosts, "0"))
    two = Program(
        *serial(savedir, "--unroll_length", 7), ranks=1, torchrun=(*hosts, "1")
    )
    with one, two:
        for program in (one, two):
            program.wait_for(
                "error: --unroll_length is 7 on rank 1, 20 on rank 0: expected the same"
            )
            assert program.end() == 1
    assert not savedir.exists()


@long
def test_three_ranks_learn(savedir):
    """With gradients of all of them: each alone has a batch of one."""
    flags = ("--env", "tests.envs:torchbeast/Catch-v0", "--savedir", savedir, "--xpid",
             "x", "--seed", 1, *SERIAL, "--envs_per_actor", 4, "--batch_size", 6,
             "--total_steps", 40_000, "--learning_rate", 2e-3)  # fmt: skip
    result = run(*flags, ranks=3)
    assert result.returncode == 0, result.stderr
    assert sum(load(savedir)["returns"]) > 90


@long
def test_ppo_normalizes_alike_on_all_ranks(savedir):
    flags = ["--agent", "ppo", "--envs_per_actor", 1, "--num_minibatches", 2]
    flags += ["--normalize_observations", "--normalize_rewards"]
    flags += ["--env", "CartPole-v1"]
    result = run(*serial(savedir, *flags, steps=400), ranks=2)
    assert result.returncode == 0, result.stderr  # The ranks' hashes were the same.
    saved = load(savedir)
    model = saved["agent"]["model"]
    assert model["encoder.statistics.0.count"] == saved["step"]
