"""The real program: faults, signals, resume, bad input, what it prints and leaves."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch

import experiment
import monobeast
from command_line import SIGNALS
from tests import programs
from tests.programs import ROOT, Program, read_logs, run

FAULTY = "tests.faulty_envs:"
SMALL = ("--num_actors", 2, "--envs_per_actor", 2, "--batch_size", 2)


@pytest.fixture
def savedir(tmp_path):
    return tmp_path / "logs"


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    savedir = tmp_path_factory.mktemp("trained") / "logs"
    assert run(*serial_run(savedir, steps=400)).returncode == 0
    return savedir


@pytest.fixture
def trained(trained_once, savedir):
    """A savedir of its own, with run "x" of CartPole, 400 steps, serial."""
    shutil.copytree(trained_once, savedir, symlinks=True)
    return savedir


def small_run(savedir, *args, env="CartPole-v1", steps=4000):
    return ("--env", env, "--savedir", savedir, "--xpid", "x", "--total_steps", steps,
            *SMALL, *args)  # fmt: skip


def serial_run(savedir, *args, **kwargs):
    return small_run(savedir, "--num_actors", 0, *args, **kwargs)


def load(savedir):
    return torch.load(savedir / "x" / "model.tar", weights_only=True)


# A whole run.


def test_run_writes_everything_it_promises(savedir):
    result = run(*small_run(savedir, "--seed", 7))
    assert result.returncode == 0, result.stderr
    path = savedir / "x"
    assert (savedir / "latest").resolve() == path.resolve()
    meta = json.loads((path / "meta.json").read_text())
    assert meta["flags"]["seed"] == 7 and meta["flags"]["total_steps"] == 4000
    assert meta["flags"]["precision"] == "float32"  # By default: there is no image.
    assert meta["versions"]["torch"] == torch.__version__
    assert {"git", "host", "cpu", "gpu", "command", "num_cores"} <= meta.keys()
    rows = read_logs(path)
    assert list(rows[0]) == list(experiment.COLUMNS)
    assert [int(r["step"]) for r in rows] == [1000, 2000, 3000, 4000]
    for row in rows:
        for name in ("total_loss", "pg_loss", "baseline_loss", "entropy_loss"):
            assert float(row[name]) == pytest.approx(float(row[name]), abs=1e9)
        assert float(row["policy_lag"]) >= 0 and float(row["rss_mb"]) > 10
    assert any(r["episode_return"] for r in rows)
    assert list(path.glob("events.out.tfevents.*"))
    assert "step 4000" in (path / "out.log").read_text()
    checkpoint = load(savedir)
    assert checkpoint["step"] == 4000 and checkpoint["flags"]["env"] == "CartPole-v1"
    assert {"model", "optimizer", "scheduler", "rng"} <= checkpoint.keys()
    # The last line is the command that tests the agent: it works as it stands.
    words = result.stderr.strip().splitlines()[-1].split("test it: python -m monobeast")
    test = run(*words[1].split(), "--num_test_episodes", 3)
    assert test.returncode == 0, test.stderr
    assert len(re.findall(r"^episode \d: ", test.stdout, re.M)) == 3
    assert "mean return" in test.stdout and "standard error" in test.stdout
    assert len(json.loads((path / "test.json").read_text())["returns"]) == 3


def test_same_seed_in_serial_mode_writes_identical_losses(tmp_path):
    rows = []
    for name in ("a", "b"):
        result = run(*serial_run(tmp_path / name, "--seed", 3, "--use_lstm"))
        assert result.returncode == 0, result.stderr
        rows.append(read_logs(tmp_path / name / "x"))
    timed = {"seconds", "sps", "rss_mb", "learner_wait", "update"}
    for a, b in zip(*rows, strict=True):
        assert {k: a[k] for k in a.keys() - timed} == {
            k: b[k] for k in b.keys() - timed
        }
    other = run(*serial_run(tmp_path / "c", "--seed", 4, "--use_lstm"))
    assert other.returncode == 0
    assert read_logs(tmp_path / "c" / "x")[0]["total_loss"] != rows[0][0]["total_loss"]


@pytest.mark.parametrize("args", [[], ["--use_lstm"]])
def test_nested_observations_and_actions_train(savedir, args):
    result = run(*serial_run(savedir, *args, env=FAULTY + "Nested-v0", steps=500))
    assert result.returncode == 0, result.stderr


def test_several_learner_threads_learn_every_step_once(savedir):
    result = run(*small_run(savedir, "--num_threads", 3, "--log_interval_steps", 40))
    assert result.returncode == 0, result.stderr
    steps = [int(row["step"]) for row in read_logs(savedir / "x")]
    assert steps == list(range(40, 4001, 40))


def test_atari_trains_tests_and_records_a_video(savedir, tmp_path):
    import cv2

    env = "BreakoutNoFrameskip-v4"
    result = run(*small_run(savedir, env=env, steps=600))
    assert result.returncode == 0, result.stderr
    video = tmp_path / "game.mp4"
    args = ("--num_test_episodes", 2, "--sample_actions", "--video", video)
    result = run("--env", env, "--savedir", savedir, "--mode", "test", *args)
    assert result.returncode == 0, result.stderr
    lengths = json.loads((savedir / "x" / "test.json").read_text())["steps"]
    frames = cv2.VideoCapture(str(video))
    assert frames.get(cv2.CAP_PROP_FRAME_COUNT) == lengths[0] + 1
    assert frames.get(cv2.CAP_PROP_FRAME_HEIGHT) == 210


def test_terminal_shows_a_live_line(savedir):
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        programs.command(*serial_run(savedir, steps=20000)),
        cwd=ROOT, stderr=follower, stdout=follower, stdin=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(follower)
    output = b""
    while True:
        try:
            output += os.read(leader, 65536)
        except OSError:  # The other end is closed.
            break
    assert process.wait() == 0
    text = output.decode()
    assert re.search(r"step [\d,]+ of 20,000 .* steps/s .* ETA .* return .* loss", text)
    assert "\x1b[?25h" in text  # The cursor is shown again.


def test_help_comes_in_sections_with_defaults():
    text = run("--help").stdout
    for section in ("run", "environment", "training", "loss", "actors", "test"):
        assert re.search(rf"^{section}.*:$", text, re.M)
    assert "(default: 0.99)" in text


# Resume.


def test_same_command_resumes_where_it_was(savedir):
    assert run(*small_run(savedir)).returncode == 0
    optimizer_steps = load(savedir)["optimizer"]["state"][0]["step"]
    result = run(*small_run(savedir, steps=6000))
    assert result.returncode == 0, result.stderr
    assert "resuming" in result.stderr and "at step 4000" in result.stderr
    rows = read_logs(savedir / "x")
    assert [int(r["step"]) for r in rows] == [1000, 2000, 3000, 4000, 5000, 6000]
    seconds = [float(r["seconds"]) for r in rows]
    assert seconds == sorted(seconds)
    checkpoint = load(savedir)
    assert checkpoint["optimizer"]["state"][0]["step"] == 1.5 * optimizer_steps
    meta = json.loads((savedir / "x" / "meta.json").read_text())
    assert meta["first_step"] == 4000 and len(meta["earlier_sessions"]) == 1


def test_resumed_run_keeps_the_columns_its_log_began_with(trained):
    path = trained / "x" / "logs.csv"
    path.write_text("step,total_loss,of_another_version\n400,1.5,7\n")
    result = run(*serial_run(trained, "--log_interval_steps", 80, steps=800))
    assert result.returncode == 0, result.stderr
    first, *others = read_logs(trained / "x")
    assert first == {"step": "400", "total_loss": "1.5", "of_another_version": "7"}
    assert others and all(int(row["step"]) > 400 for row in others)
    assert all(float(row["total_loss"]) for row in others)
    assert {row["of_another_version"] for row in others} == {""}


def test_resumed_run_takes_the_learning_rate_of_its_own_command(trained):
    args = ("--learning_rate", 1e-3, "--log_interval_steps", 40)
    assert run(*serial_run(trained, *args, steps=1000)).returncode == 0
    rates = [float(row["learning_rate"]) for row in read_logs(trained / "x")]
    expected = [  # Falling from 1e-3 over 1,000 steps of 40 an update, the 11th first.
        1e-3 * (1 - update * 40 / 1000) * (1 - 0.99 ** (update + 1)) ** 0.5
        for update in range(10, 25)
    ]
    assert rates == pytest.approx(expected)


def test_finished_run_is_not_trained_further(trained):
    result = run(*serial_run(trained, steps=400))
    assert result.returncode == 0 and load(trained)["step"] == 400


def test_disable_checkpoint_neither_reads_nor_writes_one(savedir):
    assert run(*serial_run(savedir, "--disable_checkpoint", steps=400)).returncode == 0
    assert not (savedir / "x" / "model.tar").exists()


def test_checkpoint_is_written_at_intervals(savedir):
    args = ("--checkpoint_interval_seconds", 0.5)
    with Program(*small_run(savedir, *args, steps=10**8)) as program:
        program.wait_for("return")
        steps = set()
        while len(steps) < 2:  # Each time a whole one, whenever it is looked at.
            if (savedir / "x" / "model.tar").exists():
                steps.add(load(savedir)["step"])
        program.signal(signal.SIGTERM)
        assert program.end() == 128 + signal.SIGTERM
    assert load(savedir)["step"] >= max(steps)


# Faults.


def test_killed_actor_is_replaced_and_training_goes_on(savedir):
    args = ("--log_interval_steps", 100)
    with Program(*small_run(savedir, *args, steps=10**8)) as program:
        program.wait_for("return")
        for _ in range(3):  # At any moment: also one that has just been started.
            os.kill(program.workers()[0], signal.SIGKILL)
            assert "SIGKILL" in program.wait_for("died")
            program.wait_for("is restarted")
        before = len(read_logs(savedir / "x"))
        program.wait_for("return")
        program.wait_for("return")
        assert len(read_logs(savedir / "x")) > before
        program.signal(signal.SIGINT)
        assert program.end(timeout_s=10) == 128 + signal.SIGINT


def test_exception_in_an_actor_is_shown_and_the_run_ends_after_the_last_restart(
    savedir,
):
    args = ("--max_actor_restarts", 2)
    result = run(*small_run(savedir, *args, env=FAULTY + "Raises-v0", steps=10**8))
    assert result.returncode == 1
    assert result.stderr.count("RuntimeError: the ball went through the floor") == 3
    assert "died after 2 restarts of actors (--max_actor_restarts)" in result.stderr
    assert load(savedir)["step"] > 0


@pytest.mark.parametrize("start", [serial_run, small_run])
def test_connection_error_of_an_environment_is_its_own(savedir, start):
    args = ("--max_actor_restarts", 0)
    result = run(*start(savedir, *args, env=FAULTY + "LosesItsServer-v0", steps=10**6))
    assert result.returncode == 1
    assert "ConnectionResetError: the game server hung up" in result.stderr


def test_infinite_loss_stops_the_run_and_keeps_the_last_checkpoint(savedir):
    args = ("--reward_clipping", "none")
    env = FAULTY + "HugeReward-v0"
    assert run(*serial_run(savedir, *args, env=env, steps=400)).returncode == 0
    before = (savedir / "x" / "model.tar").read_bytes()
    for start in (serial_run, small_run):
        result = run(*start(savedir, *args, env=env, steps=10**6))
        assert result.returncode == 1
        assert re.search(r"total_loss is (-?inf|nan) at step \d+", result.stderr)
        assert str(savedir / "x" / "model.tar") in result.stderr
        assert "Traceback" not in result.stderr
        assert (savedir / "x" / "model.tar").read_bytes() == before


def test_reward_that_is_not_a_number_is_an_exception_in_the_actor(savedir):
    args = ("--max_actor_restarts", 0)
    result = run(*small_run(savedir, *args, env=FAULTY + "NaNReward-v0", steps=10**6))
    assert result.returncode == 1
    assert "reward of environment 0 is nan" in result.stderr
    weights = load(savedir)["model"].values()
    assert all(torch.isfinite(w).all() for w in weights)


# Signals.


@pytest.mark.parametrize("signum", SIGNALS)
def test_signal_saves_and_ends_within_seconds(savedir, signum):
    with Program(*small_run(savedir, steps=10**8)) as program:
        program.wait_for("return")
        program.signal(signum)
        assert program.end(timeout_s=10) == 128 + signum
        assert f"stopped by {signum.name}" in program.output
        assert "Traceback" not in program.output
    assert load(savedir)["step"] > 0


@pytest.mark.parametrize("signum", SIGNALS)
def test_signal_to_the_whole_group_saves_and_actors_do_not_see_it(savedir, signum):
    args = ("--max_actor_restarts", 0)
    with Program(*small_run(savedir, *args, steps=10**8)) as program:
        program.wait_for("return")
        os.killpg(program.process.pid, signum)
        assert program.end(timeout_s=10) == 128 + signum
        assert "Traceback" not in program.output and "died" not in program.output
    assert load(savedir)["step"] > 0


def test_ctrl_c_while_actors_start_is_no_traceback(savedir):
    with Program(*small_run(savedir, steps=10**8)) as program:
        program.wait_for("results in")
        while len(program.workers()) < 2:
            time.sleep(0.01)
        os.killpg(program.process.pid, signal.SIGINT)
        assert program.end(timeout_s=10) == 128 + signal.SIGINT
        assert "Traceback" not in program.output and "died" not in program.output


def test_signal_in_serial_mode_saves(savedir):
    with Program(*serial_run(savedir, steps=10**8)) as program:
        program.wait_for("return")
        program.signal(signal.SIGINT)
        assert program.end(timeout_s=10) == 128 + signal.SIGINT
    assert load(savedir)["step"] > 0


def test_actor_stuck_in_its_environment_is_restarted_after_the_time_out(savedir):
    args = ("--env_timeout_seconds", 1)
    args = small_run(savedir, *args, env=FAULTY + "Stuck-v0", steps=2000)
    result = run(*args)
    assert result.returncode == 0, result.stderr
    assert "Stuck-v0 did not answer for 1 s (--env_timeout_seconds)" in result.stderr
    assert re.search(r"actor \d is restarted", result.stderr)


# Bad input: one line, exit code 2, nothing started.


@pytest.mark.parametrize(
    "args, words",
    [
        (["--env", "PongNoFramskip-v4"], ["PongNoFramskip-v4", "PongNoFrameskip-v4"]),
        (["--env", "Pong"], ["unknown environment 'Pong'", "Pong-v4"]),
        (["--env", "no.such.module:Env-v0"], ["no.such.module"]),
        (["--num_actors", "0", "--num_buffers", "8"], ["--num_buffers 8", "batch"]),
        (["--learning_rate", "-1"], ["--learning_rate", "-1", "> 0"]),
        (["--learning_rate", "fast"], ["--learning_rate", "'fast'", "not a number"]),
        (["--batch_size", "0"], ["--batch_size", "0", ">= 1"]),
        (["--discounting", "1.5"], ["--discounting", "1.5", "<= 1"]),
        (["--unroll_length", "nan"], ["--unroll_length", "not an integer"]),
        (["--entropy_cost", "nan"], ["--entropy_cost", "nan"]),
        (["--batchsize", "3"], ["--batchsize"]),
        (["--num_actors", "3", "--envs_per_actor", "4", "--num_buffers", "8"],
         ["--num_buffers 8", "--num_actors 3", "--batch_size"]),
        (["--num_buffers", "2000000000"], ["shared memory", "bytes", "/dev/shm"]),
        (["--video", "x.mp4"], ["--video", "--mode test"]),
        (["--mode", "test"], ["no checkpoint at", "model.tar"]),
        (["--mode", "test", "--xpid", "absent"], ["absent/model.tar"]),
        (["--mode", "test_render"], ["DISPLAY"]),
        (["--xpid", "a/b"], ["--xpid", "a/b"]),
        (["--env", FAULTY + "Continuous-v0"], ["action space Box", "Discrete"]),
        (["--env", FAULTY + "Text-v0"], ["observation space Text"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    savedir, args, words, capfd, monkeypatch
):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    defaults = [] if "--env" in args else ["--env", "CartPole-v1"]
    with pytest.raises(SystemExit) as exit:
        monobeast.main(["--savedir", str(savedir), *defaults, *args])
    assert exit.value.code == 2
    stderr = capfd.readouterr().err
    assert len(stderr.strip().splitlines()) == 1, stderr
    for word in words:
        assert word in stderr
    assert not savedir.exists()


def test_create_env_that_makes_another_number_is_told_so(savedir, capfd, monkeypatch):
    create_env = monobeast.create_env
    monkeypatch.setattr(monobeast, "create_env", lambda flags, n: create_env(flags, 1))
    with pytest.raises(SystemExit):
        monobeast.main([str(a) for a in small_run(savedir)])
    assert "made 1 environments, expected num_envs = 2" in capfd.readouterr().err


def test_savedir_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")  # Root may write anywhere, but not in a file.
    result = run("--env", "CartPole-v1", "--savedir", tmp_path / "file" / "logs")
    assert result.returncode == 2
    assert str(tmp_path / "file") in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "args, words",
    [
        (["--env", "Acrobot-v1"], ["CartPole-v1", "Acrobot-v1"]),
        (["--use_lstm"], ["another network", "core.weight_ih", "not there"]),
    ],
)
@pytest.mark.parametrize("mode", ["train", "test"])
def test_checkpoint_that_does_not_fit_is_refused_naming_the_mismatch(
    trained, mode, args, words
):
    result = run(*serial_run(trained, "--mode", mode, *args))
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in result.stderr
