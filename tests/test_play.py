"""--mode test: what is printed and written, and how it ends."""

import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import threading

import cv2
import numpy as np
import pytest

from tests.programs import ROOT, SERIAL, args, command, main, refusal, succeeds
from torchbeast import play
from torchbeast.flags import run_parser
from torchbeast.messages import BadInput
from torchbeast.play import Video

HOSTILE = "tests.hostile_envs:"


def trained_on(env, savedir):
    flags = (*args("monobeast", savedir, env=env, steps=40), *SERIAL)
    assert main(*flags).returncode == 0
    return ("--savedir", savedir, "--mode", "test")


def test_ctrl_c_in_a_test_reports_the_episodes_so_far(savedir):
    flags = trained_on(HOSTILE + "Interrupts-v0", savedir)
    result = main(*flags, "--num_test_episodes", 100)
    assert result.returncode == 128 + signal.SIGINT
    assert "14 episodes: mean return 10.00" in result.stdout  # At their 150th step.
    [found] = json.loads((savedir / "x" / "test.json").read_text())
    assert found["returns"] == [10.0] * 14


def test_a_test_whose_output_nobody_reads_ends_without_a_word(trained):
    reading, writing = os.pipe()
    os.close(reading)
    flags = ("--savedir", trained, "--mode", "test")
    process = subprocess.Popen(
        command(*flags), cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert process.communicate(timeout=300)[1] == ""
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_video_of_another_kind_is_refused_before_the_game(trained):
    flags = ("--savedir", trained, "--mode", "test", "--video", trained / "pong")
    assert "pong: expected a name that ends in .mp4" in refusal(*flags)


def test_a_film_has_every_frame_in_the_size_of_the_first_one(tmp_path):
    path = str(tmp_path / "x.mp4")
    video = Video(path, 30)
    for height, channels in ((64, 3), (66, 3), (64, 4)):
        video.write(np.full((height, 64, channels), 100, np.uint8))
    video.close()
    film = cv2.VideoCapture(path)
    assert [film.read()[0] for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("frame", "what"),
    [
        (np.zeros((64, 64, 3)), r"float64 \[64, 64, 3\]"),
        (np.zeros((3, 64, 64), np.uint8), r"uint8 \[3, 64, 64\]"),
        ([1, 2], "list"),
    ],
)
def test_a_frame_of_another_kind_is_named(frame, what, tmp_path):
    video = Video(str(tmp_path / "x.mp4"), 30)
    with pytest.raises(
        BadInput, match=rf"returned {what}, expected an array \[H, W, 3"
    ):
        video.write(frame)


def test_results_of_earlier_tests_stay(trained):
    flags = ("--savedir", trained, "--mode", "test", "--num_test_episodes")
    for n in (1, 2):
        assert main(*flags, n).returncode == 0
    found = json.loads((trained / "x" / "test.json").read_text())
    assert [len(x["returns"]) for x in found] == [1, 2]


def test_a_test_says_what_it_takes_from_the_checkpoint_and_what_is_given_wins(savedir):
    given = ("--env_args", "sutton_barto_reward=True", "--use_lstm")
    flags = args("monobeast", savedir, *SERIAL, *given, steps=40)
    assert main(*flags).returncode == 0
    test = ("--savedir", savedir, "--mode", "test", "--num_test_episodes", 1)
    test += ("--env", "CartPole-v1", "--agent", "polybeast")
    result = main(*test)
    [taken] = re.findall("^from the checkpoint: (.*)", result.stdout)
    assert "--env_args sutton_barto_reward=True --use_lstm" in taken
    assert "--env " not in taken and "--agent" not in taken
    assert "mean return -1.00" in result.stdout
    result = main(*test, "--env_args")
    [taken] = re.findall("^from the checkpoint: (.*)", result.stdout)
    assert "--use_lstm" in taken and "--env_args" not in taken
    assert result.returncode == 0 and "mean return -1.00" not in result.stdout


def test_tests_at_the_same_time_lose_no_result(trained, monkeypatch):
    flags = run_parser().parse_args(["--mode", "test"])
    flags.env = "CartPole-v1"
    writing, path = threading.Barrier(2), trained / "x" / "model.tar"
    write = play.write_atomically

    def write_late(*args):
        with contextlib.suppress(threading.BrokenBarrierError):
            writing.wait(1)  # The other one should not come here meanwhile.
        write(*args)

    monkeypatch.setattr(play, "write_atomically", write_late)
    threads = [
        threading.Thread(target=play.report, args=(flags, path, 0, [x], [1], []))
        for x in (1.0, 2.0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = json.loads((trained / "x" / "test.json").read_text())
    assert sorted(x["mean_return"] for x in found) == [1.0, 2.0]


@pytest.mark.parametrize("text", ["my own notes", '{"mine": 1}', "[1, 2]", "null"])
def test_a_file_that_is_no_result_of_tests_is_not_written_over(trained, text):
    flags = ("--savedir", trained, "--mode", "test", "--num_test_episodes", 1)
    path = trained / "x" / "test.json"
    path.write_text(text)
    result = main(*flags)
    assert result.returncode == 0
    assert "test.json: not written: " in result.stderr
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("NoFrames", r"render() returned NoneType"),
        ("RaisesInRender", "cannot be shown: NotImplementedError: no renderer"),
        ("Exits", "cannot be shown: "),
    ],
)
def test_a_video_of_what_cannot_be_shown_is_refused_in_one_line(env, words, savedir):
    flags = trained_on(f"{HOSTILE}{env}-v0", savedir)
    assert words in refusal(*flags, "--video", savedir / "x.mp4")


def test_a_loop_of_links_is_no_directory_of_runs(tmp_path):
    (tmp_path / "latest").symlink_to("latest")
    line = refusal("--savedir", tmp_path, "--mode", "test", "--env", "CartPole-v1")
    assert str(tmp_path) in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "game, flags, least",
    [  # By chance, the score is one or two, -21, and about 0.
        ("breakout", ["--num_test_episodes", 1], 10),
        ("pong", ["--num_test_episodes", 1], 10),
        ("connect-four", ["--num_test_episodes", 20, "--opponent", "random"], 0.7),
    ],
)
def test_an_agent_that_comes_with_the_repository_plays(game, flags, least, tmp_path):
    agent = tmp_path / "agent.tar"  # test.json is written beside it.
    shutil.copy(ROOT / f"docs/results/{game}.tar", agent)
    assert agent.stat().st_size < 1_500_000
    words = "--mode", "test", "--seed", 1, *flags
    succeeds(*words, "--checkpoint", agent)
    returns = json.loads((tmp_path / "test.json").read_text())[0]["returns"]
    assert statistics.mean(returns) > least
