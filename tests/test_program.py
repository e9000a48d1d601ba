"""MonoBeast, the program: a whole run, resume, actors, signals, bad input."""

import argparse
import itertools
import json
import os
import pty
import random
import re
import shlex
import signal
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch

import monobeast
import polybeast_env
from tests.programs import (
    SERIAL,
    Program,
    args,
    both,
    cmdline,
    load,
    main,
    marked,
    poly_first,
    read_logs,
    refusal,
    run,
    succeeds,
    wait_for_steps,
)
from torchbeast import actors, display, gradients
from torchbeast.log_writer import COLUMNS
from torchbeast.messages import first_line, log, setup_logging
from torchbeast.stages import STAGES

FAULTY = "tests.faulty_envs:"
LOSSES = {"total_loss", "pg_loss", "baseline_loss", "entropy_loss"}
STATISTICS = {*LOSSES, "grad_norm", "learning_rate"}  # The default agent's.
LOG = ("--log_interval_steps", 40)  # A line for every update.


def small_run(savedir, *others, **kwargs):
    return args("monobeast", savedir, *others, **kwargs)


def serial_run(savedir, *others, **kwargs):
    return small_run(savedir, *SERIAL, *others, **kwargs)


# Log lines.


def test_a_runs_log_has_what_was_said_before_there_was_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "handlers", [])
    setup_logging()
    log.warning("%s", error := ValueError("early"))
    assert sys.getrefcount(error) == 2  # Whose frames may hold an environment.
    setup_logging(tmp_path / "out.log")
    log.info("late")
    lines = (tmp_path / "out.log").read_text().splitlines()
    assert [line.partition("] ")[2] for line in lines] == ["early", "late"]


def test_an_error_without_a_message_is_told_by_its_type():
    assert first_line(AssertionError()) == "AssertionError"
    assert first_line(AssertionError("\nno")) == "AssertionError: no"


# A whole run.


def test_run_writes_everything_it_promises(savedir):
    flags = ("--seed", 7, "--log_interval_steps", 200)
    result = run(*small_run(savedir, *flags, steps=1000))
    assert result.returncode == 0, result.stderr
    path = savedir / "x"
    assert (savedir / "latest").resolve() == path.resolve()
    meta = json.loads((path / "meta.json").read_text())
    assert meta["flags"]["seed"] == 7 and meta["flags"]["total_steps"] == 1000
    assert meta["flags"]["precision"] == "float32"  # By default: there is no image.
    assert meta["versions"]["torch"] == torch.__version__
    assert {"git", "host", "cpu", "gpu", "command", "num_cores"} <= meta.keys()
    rows = read_logs(path)
    assert list(rows[0])[: len(COLUMNS)] == list(COLUMNS)
    assert set(rows[0]) == {*COLUMNS, *STATISTICS}
    assert [int(r["step"]) for r in rows] == [200, 400, 600, 800, 1000]
    for row in rows:
        for name in STATISTICS:
            assert float(row[name]) == pytest.approx(float(row[name]), abs=1e9)
        assert float(row["policy_lag"]) >= 0 and float(row["rss_mb"]) > 10
    assert any(r["episode_return"] for r in rows)
    assert list(path.glob("events.out.tfevents.*"))
    assert "step 1000" in (path / "out.log").read_text()
    checkpoint = load(savedir)
    assert checkpoint["step"] == 1000 and checkpoint["flags"]["env"] == "CartPole-v1"
    assert {"agent", "flags", "updates", "episodes", "seconds", "rng"} <= set(
        checkpoint
    )
    # The last line is the command that tests the agent: it works as it stands.
    line = result.stderr.strip().splitlines()[-1].partition("test it: ")[2]
    python, *words = shlex.split(line)
    assert python == "python" and words[:2] == ["-m", "monobeast"]
    assert words[-2:] == ["--mode", "test"] and "--seed" in words
    test = succeeds(*words[2:], "--num_test_episodes", 3)
    assert len(re.findall(r"^episode \d: ", test.stdout, re.M)) == 3
    assert "mean return" in test.stdout and "standard error" in test.stdout
    [found] = json.loads((path / "test.json").read_text())
    assert len(found["returns"]) == 3 and found["step"] == 1000


def test_same_seed_in_serial_mode_writes_identical_losses(tmp_path):
    def rows(name, seed):
        flags = ("--seed", seed, "--use_lstm", "--log_interval_steps", 200)
        succeeds(*serial_run(tmp_path / name, *flags, steps=600))
        timed = {"seconds", "sps", "rss_mb", *itertools.chain(*STAGES.values())}
        return [
            {name: x for name, x in row.items() if name not in timed}
            for row in read_logs(tmp_path / name / "x")
        ]

    first = rows("a", seed=3)
    assert len(first) == 3 and first == rows("b", seed=3)
    assert first[0]["total_loss"] != rows("c", seed=4)[0]["total_loss"]


def test_an_actor_seeds_all_random_numbers_that_environments_may_use(monkeypatch):
    found = []

    def create(*_, **__):
        found.append((random.random(), np.random.random(), torch.rand(()).item()))
        raise actors.NoMoreOrders

    monkeypatch.setattr(monobeast, "create", create)
    for seed in (1, 1, 2):
        with pytest.raises(actors.NoMoreOrders):
            monobeast.act(types.SimpleNamespace(envs_per_actor=1), seed, *3 * [None])
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])


@pytest.mark.parametrize("flags", [[], ["--use_lstm"]])
def test_nested_observations_and_actions_train(savedir, flags):
    succeeds(*serial_run(savedir, *flags, env=FAULTY + "Nested-v0", steps=400))


@both
def test_metrics_of_episodes_are_logged(module, savedir):
    flags = ("--log_interval_steps", 200)
    env = FAULTY + "Metrics-v0"
    succeeds(*args(module, savedir, *flags, env=env, steps=800), module=module)
    rows = [row for row in read_logs(savedir / "x") if row["episode/depth"]]
    assert {float(row["episode/depth"]) for row in rows} == {10.0}
    successes = [float(row["episode/success"]) for row in rows]
    assert 0.2 < sum(successes) / len(successes) < 0.8


def test_every_step_is_learned_once(savedir, monkeypatch):
    """With a BatchNorm, which counts its calls, and batches of two slices each."""
    monkeypatch.setattr(gradients, "SLICE_BYTES", 1)  # A slice for each rollout.
    flags = ("--agent", "tests.batch_norm_agent", "--num_epochs", 1, *LOG)
    succeeds(*small_run(savedir, *flags, steps=2000))
    steps = [int(row["step"]) for row in read_logs(savedir / "x")]
    assert steps == list(range(40, 2001, 40))
    weights = load(savedir)["agent"]["model"]
    assert weights["encoder.encoder.1.num_batches_tracked"] == 50 * 2


def test_atari_trains_tests_and_records_a_video(savedir, tmp_path):
    import cv2

    env = "BreakoutNoFrameskip-v4"
    succeeds(*serial_run(savedir, env=env, steps=200))
    video = tmp_path / "game.mp4"
    flags = ("--num_test_episodes", 2, "--sample_actions", "--video", video)
    succeeds("--env", env, "--savedir", savedir, "--mode", "test", *flags)
    [found] = json.loads((savedir / "x" / "test.json").read_text())
    lengths = found["steps"]
    frames = cv2.VideoCapture(str(video))
    assert frames.get(cv2.CAP_PROP_FRAME_COUNT) == lengths[0] + 1
    assert frames.get(cv2.CAP_PROP_FRAME_HEIGHT) == 210


def test_a_film_without_a_display_prints_no_error(savedir, tmp_path, monkeypatch):
    names = "DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR", "SDL_VIDEODRIVER"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    env = "--env", "CartPole-v1", "--savedir", savedir
    succeeds(*serial_run(savedir, env="CartPole-v1", steps=40))
    film = "--num_test_episodes", 1, "--video", tmp_path / "cart.mp4"
    result = run(*env, "--mode", "test", *film)  # What C prints is in it.
    assert result.returncode == 0 and "error" not in result.stderr, result.stderr


@pytest.mark.slow
def test_terminal_shows_a_live_line(savedir, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ours, its = pty.openpty()
    output = b""

    def read():
        nonlocal output
        try:
            while True:
                output += os.read(ours, 65536)
        except OSError:  # The other end is closed.
            pass

    thread = threading.Thread(target=read)
    thread.start()
    with open(its, "w") as terminal:
        result = main(*serial_run(savedir, steps=8000), stderr=terminal)
    thread.join()
    os.close(ours)
    assert result.returncode == 0
    text = output.decode()
    assert re.search(
        r"step [\d,]+ of 8,000 .* steps/s .* ETA .* return .* total_loss", text
    )
    assert "\x1b[?25h" in text  # The cursor is shown again.


def test_the_line_of_a_run_has_a_speed_from_the_second_on_and_never_less_than_no_time(
    monkeypatch,
):
    run = types.SimpleNamespace(
        step=90, returns=[], shown=("total_loss", 0.0), num_agents=1,
        flags=argparse.Namespace(total_steps=100),
    )  # fmt: skip
    shown = display.Display(run)
    now = iter([1e9, 2e9])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    run.step = 110
    shown.update()
    assert shown.text() == "step 110 of 100  return -  total_loss 0"
    run.step = 120  # The last batch went beyond the end.
    shown.update()
    assert "step 120 of 100" in shown.text() and "ETA 0:00:00" in shown.text()
    shown.close()


def test_a_test_that_is_to_be_shown_needs_a_display(trained, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert "DISPLAY" in refusal("--savedir", trained, "--mode", "test_render")


@both
@pytest.mark.survives("memory-too-small")
def test_rollouts_that_need_more_memory_than_there_is_are_refused(module, savedir):
    flags = args(module, savedir, "--unroll_length", 10**6, "--batch_size", 10**6)
    line = refusal(*flags, module=module)
    assert re.search(r"need [\d,]+ bytes of (shared )?memory, .* has [\d,]+: use", line)


def test_help_comes_in_sections_with_defaults():
    text = main("--help", "--mode", "test", "--xpid", "not-there").stdout
    for section in ("run", "environment", "training", "loss", "actors", "test"):
        assert re.search(rf"^{section}.*:$", text, re.M)
    assert "(default: 0.99)" in text


def test_help_comes_after_all_flags_were_looked_at():
    line = refusal("--help", "--learning_rte", 1)
    assert "unrecognized arguments: --learning_rte 1; did you mean --lea" in line


def test_a_run_that_is_shorter_than_the_interval_of_its_log_has_a_row(savedir):
    flags = ("--log_interval_steps", 1000)
    assert main(*serial_run(savedir, *flags, steps=80)).returncode == 0
    [row] = read_logs(savedir / "x")
    assert row["step"] == "80" and row["updates"] == "2"


# Actors.


@pytest.mark.survives("actor-killed")
def test_killed_actor_is_replaced_and_training_goes_on(savedir):
    with Program(*small_run(savedir, *LOG)) as program:
        wait_for_steps(savedir, 40)
        for _ in range(2):  # At any moment: also one that has just been started.
            while not program.workers():
                time.sleep(0.01)
            os.kill(program.workers()[0], signal.SIGKILL)
            assert "SIGKILL" in program.wait_for("died")
            program.wait_for("is restarted")
        wait_for_steps(savedir, 200)
        program.stop()
    steps = [int(row["step"]) for row in read_logs(savedir / "x")]
    assert steps == list(range(40, steps[-1] + 1, 40))


@pytest.mark.long
def test_killed_actor_whose_environment_has_forked_is_replaced(savedir):
    """What it forked keeps the actor's end of the pipe open."""
    with Program(
        *small_run(savedir, *LOG, env="tests.hostile_envs:Forks-v0")
    ) as program:
        wait_for_steps(savedir, 40)
        os.kill(program.workers()[0], signal.SIGKILL)
        assert "SIGKILL" in program.wait_for("died")
        program.wait_for("is restarted")
        program.stop()


@pytest.mark.slow
@poly_first
@pytest.mark.survives("signal-at-start")
def test_a_signal_while_an_environment_is_made_ends_what_it_has_started(
    module, savedir
):
    flags = args(module, savedir, env="tests.hostile_envs:SlowStart-v0")
    with Program(*flags, module=module) as program:
        while not any("sleep 1000.25" in cmdline(p) for p in marked(program.mark)):
            time.sleep(0.01)
        program.stop(signal.SIGTERM)
    assert "Traceback" not in program.output


def test_an_actor_ends_when_its_learner_is_gone_whatever_was_ordered(monkeypatch):
    class Connection:
        orders = iter([[1], [2], [3]])

        def recv(self):
            try:
                return next(self.orders)
            except StopIteration:
                received.set()
                raise EOFError from None

    received, ended, closes = (threading.Event() for _ in range(3))
    monkeypatch.setattr(actors.calls, "end", closes.set)
    monkeypatch.setattr(actors.calls, "RETURN_S", 0)
    monkeypatch.setattr(actors.calls, "end_group", ended.set)
    orders = actors.Orders(Connection())
    assert received.wait(60) and closes.wait(60) and ended.wait(60)
    with pytest.raises(actors.NoMoreOrders):
        orders.take(1)


@pytest.mark.slow
@pytest.mark.survives("agent-raises")
def test_what_the_agent_raises_in_an_actor_ends_the_run(savedir, tmp_path, monkeypatch):
    (tmp_path / "raises_late.py").write_text("""
import polybeast
from polybeast import parser

class Agent(polybeast.Agent):
    calls = 0

    def act(self, step, core_state, greedy=False):
        self.calls += 1
        if self.calls > 100:
            raise KeyError("my key")
        return super().act(step, core_state, greedy)
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = run(*small_run(savedir, "--agent", "raises_late"))
    assert result.returncode == 1
    assert "actor 0 cannot go on:" in result.stderr
    assert result.stderr.count("KeyError: 'my key'") == 1
    assert "KeyError: 'my key'" in (savedir / "x" / "out.log").read_text()


@pytest.mark.slow
@pytest.mark.survives("environment-raises")
def test_an_actor_that_dies_now_and_then_does_not_end_the_run(savedir):
    flags = ("--max_actor_restarts", 1)
    env = FAULTY + "LosesItsServer-v0"
    result = succeeds(*small_run(savedir, *flags, env=env, steps=3000))
    # Each time after 300 steps of two environments.
    assert result.stderr.count("actor 0 is restarted (1 of 1)") >= 3
    assert "ConnectionResetError: the game server hung up" in result.stderr


@pytest.mark.slow
def test_an_actor_that_dies_without_a_rollout_in_between_ends_the_run(savedir):
    env = "tests.hostile_envs:AlwaysRaises-v0"
    result = main(*small_run(savedir, "--max_actor_restarts", 1, env=env))
    assert result.returncode == 1
    assert "died after 1 restarts without a rollout" in result.stderr
    assert result.stderr.count("Traceback") == 1
    assert "(this traceback came 2 times)" in result.stderr
    assert load(savedir)["step"] == 0
    assert all(
        torch.isfinite(x).all() for x in load(savedir)["agent"]["model"].values()
    )


@pytest.mark.survives("environment-nan", "observation-shape-changes")
@pytest.mark.parametrize(
    ("env", "exception", "message"),
    [
        ("LosesItsServer", ConnectionResetError, "the game server hung up"),
        ("NaNReward", ValueError, "reward of environment 0 is nan"),
        ("WrongShape", ValueError, r"observation is float32 \[4\], expected .* \[3\]"),
    ],
)
def test_exception_of_an_environment_in_serial_mode_is_its_own(
    savedir, env, exception, message
):
    """For a debugger: nothing wraps it. In an actor it is an exception like another."""
    with pytest.raises(exception, match=message):
        main(*serial_run(savedir, env=FAULTY + env + "-v0"))


@pytest.mark.survives("environment-hangs")
def test_actor_stuck_in_its_environment_is_restarted_after_the_time_out(savedir):
    flags = ("--env_timeout_seconds", 1)
    result = succeeds(*small_run(savedir, *flags, env=FAULTY + "Stuck-v0", steps=800))
    assert "Stuck-v0 did not answer for 1 s (--env_timeout_seconds)" in result.stderr
    assert re.search(r"actor \d is restarted", result.stderr)


@pytest.mark.survives("infinite-loss")
@pytest.mark.parametrize(
    "start", [serial_run, pytest.param(small_run, marks=pytest.mark.slow)]
)
def test_infinite_loss_stops_the_run_and_keeps_the_last_checkpoint(savedir, start):
    flags = ("--reward_clipping", "none")
    env = FAULTY + "HugeReward-v0"
    assert main(*serial_run(savedir, *flags, env=env, steps=400)).returncode == 0
    before = (savedir / "x" / "model.tar").read_bytes()
    result = main(*start(savedir, *flags, env=env))
    assert result.returncode == 1
    assert re.search(r"total_loss is (-?inf|nan) at step \d+", result.stderr)
    assert str(savedir / "x" / "model.tar") in result.stderr
    assert "Traceback" not in result.stderr
    assert (savedir / "x" / "model.tar").read_bytes() == before


# Signals.


@pytest.mark.survives("signal")
@pytest.mark.parametrize(
    "signum", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_saves_and_ends_within_seconds_and_actors_do_not_see_it(
    savedir, signum
):
    flags = ("--max_actor_restarts", 0, *LOG)
    with Program(*small_run(savedir, *flags)) as program:
        wait_for_steps(savedir, 40)
        if signum == signal.SIGTERM:
            program.signal(signum)
        else:  # A terminal sends it to all processes.
            os.killpg(program.process.pid, signum)
        assert program.end() == 128 + signum
    assert f"stopped by {signum.name}" in program.output
    assert "Traceback" not in program.output and "died" not in program.output
    assert program.output.count("to resume: python -m monobeast --env") == 2
    assert load(savedir)["step"] == int(read_logs(savedir / "x")[-1]["step"]) > 0


@pytest.mark.slow
@pytest.mark.survives("signal-at-start")
def test_ctrl_c_while_actors_start_is_no_traceback(savedir):
    with Program(*small_run(savedir)) as program:
        program.wait_for("results in")
        while not program.workers():
            time.sleep(0.01)
        os.killpg(program.process.pid, signal.SIGINT)
        assert program.end() == 128 + signal.SIGINT
    assert "Traceback" not in program.output and "died" not in program.output


def test_signal_in_serial_mode_saves(savedir):
    def interrupt():
        wait_for_steps(savedir, 400)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    result = main(*serial_run(savedir, *LOG))
    thread.join()
    assert result.returncode == 128 + signal.SIGINT
    assert load(savedir)["step"] >= 400


# Bad input: one line, exit code 2, nothing started.


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--env", "PongNoFramskip-v4"], ["PongNoFramskip-v4", "PongNoFrameskip-v4"]),
        (["--env", "Pong"], ["unknown environment 'Pong'", "Pong-v4"]),
        (["--env", "no.such.module:Env-v0"], ["no.such.module"]),
        (["--learning_rate", "-1"], ["--learning_rate", "-1", "> 0"]),
        (["--learning_rate", "fast"], ["--learning_rate", "'fast'", "not a number"]),
        (["--batch_size", "0"], ["--batch_size", "0", ">= 1"]),
        (["--discounting", "1.5"], ["--discounting", "1.5", "<= 1"]),
        (["--unroll_length", "nan"], ["--unroll_length", "not an integer"]),
        (["--entropy_cost", "nan"], ["--entropy_cost", "nan"]),
        (["--batchsize", "3"], ["--batchsize", "did you mean --batch_size?"]),
        (["--replay_ratio", "3"],
         ["--replay_ratio 3; there is one for --agent r2d2 or sac or td3"]),
        (["--preset", "dqn"],
         ["'dqn' (choose from 'a2c'); there is one for --agent r2d2"]),
        (["--agent", "impala"], ["expected polybeast (IMPALA), ppo, pqn, r2d2 (also"]),
        (["--total", "3"], ["--total"]),  # Nothing is abbreviated.
        (["--video", "x.mp4"], ["--video", "--mode test"]),
        (["--mode", "test"], ["no checkpoint at", "model.tar"]),
        (["--mode", "test", "--xpid", "absent"], ["absent/model.tar"]),
        (["--xpid", "a/b"], ["--xpid", "a/b"]),
        (["--env", "PongNoFrameskip-v4", "--env_args", "mode=1"],
         ["--env_args", "--sticky_actions"]),
        (["--agent", "r2d2", "--env", FAULTY + "Table-v0"],
         ["MultiDiscrete([[2 3] [4 5]]): use --agent polybeast or ppo"]),
        (["--env", FAULTY + "Text-v0"], ["observation space Text"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(savedir, flags, words):
    defaults = [] if "--env" in flags else ["--env", "CartPole-v1"]
    line = refusal("--savedir", savedir, *defaults, *flags)
    for word in words:
        assert word in line
    assert not savedir.exists()


def test_create_env_that_makes_another_number_is_told_so(savedir, monkeypatch):
    create_env = polybeast_env.create_env
    monkeypatch.setattr(
        polybeast_env, "create_env", lambda flags, *_: create_env(flags, 1)
    )
    line = refusal(*small_run(savedir))
    assert "made 1 rows, expected num_envs * num_agents = 2 * 1" in line


def test_savedir_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")  # Root may write anywhere, but not in a file.
    line = refusal("--env", "CartPole-v1", "--savedir", tmp_path / "file" / "logs")
    assert str(tmp_path / "file") in line


@pytest.mark.survives("checkpoint-does-not-fit")
@pytest.mark.parametrize(
    "flags, words",
    [
        (["--env", "Acrobot-v1"], ["CartPole-v1", "Acrobot-v1"]),
        (["--no-separate_value"], ["another network", "encoder", "not there"]),
        (["--agent", "tests.batch_norm_agent"], ["--agent polybeast, not tests.batch"]),
    ],
)
@pytest.mark.parametrize("mode", ["train", "test"])
def test_checkpoint_that_does_not_fit_is_refused_naming_the_mismatch(
    trained, mode, flags, words
):
    line = refusal(*serial_run(trained, "--mode", mode, *flags))
    for word in words:
        assert word in line


def test_a_process_ends_with_the_exit_code_and_the_line():
    """As main() does, which the other tests call in their own process."""
    result = run("--env", "CartPole-v1", "--batch_size", 0)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == refusal("--env", "CartPole-v1", "--batch_size", 0) + "\n"
