"""torchbeast.launch, with real processes."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
import torch

from tests.programs import ROOT, TIMEOUT_S, Program, command, run
from torchbeast import combinations
from torchbeast.launch import Job, launch
from torchbeast.messages import BadInput

TINY = (sys.executable, "-m", "tests.tiny_program")
CATCH = ("--env", "tests.envs:torchbeast/Catch-v0", "--num_actors", 0,
         "--batch_size", 2, "--log_interval_steps", 40)  # fmt: skip
CORES = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def launched(*args, program=TINY, savedir):
    """Runs the launcher to its end."""
    words = *args, "--", *program, "--savedir", savedir
    return run(*words, module="torchbeast.launch")


def launching(*args, savedir):
    words = *args, "--", *TINY, "--savedir", savedir
    return Program(*words, module="torchbeast.launch")


def output(savedir, name):
    return (savedir / name / "launch.log").read_text()


def wait_for_output(program, savedir, name, text):
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            if text in output(savedir, name):
                return
        assert program.process.poll() is None, program.output
        assert time.monotonic() < deadline, f"{name} has no {text!r}"
        time.sleep(0.05)


def states(result):
    """{run: its last state}."""
    return dict(re.findall(r"\] (\S+): (\w+), step", result.stderr))


# What varies.


def test_values_are_lists_and_ranges():
    words = "--env A-v0,m:B-v0 --seed=1:3,7 --rate 1e-3,-1 --fast on,off".split()
    assert combinations.parse_varied(words) == {
        "--env": ["A-v0", "m:B-v0"],
        "--seed": ["1", "2", "3", "7"],
        "--rate": ["1e-3", "-1"],
        "--fast": ["on", "off"],
    }


def test_commands_in_which_flags_have_each_others_values_differ():
    before, now = (f"python -m x --a {i} --b {j}".split() for i, j in ("12", "21"))
    found = combinations.difference(before, now)
    assert found == "had --a 1 --b 2, has --a 2 --b 1"
    before, now = "p -m x --b -1 --a".split(), "q -m x --a --b -1".split()
    assert combinations.difference(before, now) == ""


def test_list_prints_the_command_of_each_combination(capsys):
    varied = ("--do", "a b/c,d", "--fast", "on,off", "--clip", "off")
    assert launch(["--list", *varied, "--", *TINY, "--xpid", "x y"]) == 0
    start = f"{sys.executable} -m tests.tiny_program --xpid 'x y'"
    assert capsys.readouterr().out.splitlines() == [
        f"{start} '--do=a b/c' --fast --no-clip --xpid=x-y,do=a-b-c,fast=on,clip=off",
        f"{start} '--do=a b/c' --no-clip --xpid=x-y,do=a-b-c,fast=off,clip=off",
        f"{start} --do=d --fast --no-clip --xpid=x-y,do=d,fast=on,clip=off",
        f"{start} --do=d --no-clip --xpid=x-y,do=d,fast=off,clip=off",
    ]


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "expected -- and a command"),
        ("--seed 1:3", "expected -- and a command"),
        ("--seed 1:3 --", "expected -- and a command"),
        ("-- tiny", "nothing varies"),
        ("seed 1:3 -- tiny", "'seed': expected a flag that varies"),
        ("--seed -- tiny", "--seed '': expected values"),
        ("--seed --rate 1 -- tiny", "--seed '--rate': expected values"),
        ("--seed 1,,2 -- tiny", "--seed '1,,2': expected values"),
        ("--seed 3:1 -- tiny", "--seed 3:1: expected FIRST:LAST"),
        ("--seed 1:999999999 -- tiny", "--seed 1:999999999: expected FIRST:LAST"),
        ("--seed 1:999 --rate 1:999 -- tiny", "more than 10000 combinations"),
        ("--seed 1 --seed 2 -- tiny", "--seed is given twice"),
        ("--seed 1,1 -- tiny", "seed=1 is the name of two runs"),
        ("--do a/b,a-b -- tiny", "do=a-b is the name of two runs"),
        ("--xpid a,b -- tiny", "--xpid is the beginning of all names"),
        ("--seed 1:3 -- tiny --seed=4", "--seed is given before and after --"),
        ("--speed 1:3 -- tiny", "--speed is not a flag of .* tests.tiny_program"),
        ("--rate 1,fast -- tiny", "invalid float value: 'fast'"),
        ("--rate 1,2 -- tiny --do", "argument --do: expected one argument"),
        ("--rate on,off -- tiny", "argument --rate: expected one argument"),
        ("--seed 1:3 -- no-such-program", "no-such-program: No such file"),
        ("--seed 1:3 -- python3 -m no_such_module", "No module named"),
        ("--seed 1:3 -- true", "true .* --help prints no usage"),
        (f"--slots {len(CORES) + 1} --seed 1 -- tiny", "more than the .* cores here"),
        ("--slots 1 --gpus 0,1 --seed 1 -- tiny", "--gpus 0,1: expected one for each"),
        ("--gpus , --seed 1 -- tiny", "--gpus ,: expected one for each"),
    ],
)
def test_bad_input_is_refused_by_its_name(words, message):
    words = words.split()
    if words[-1:] != ["--"] and "tiny" in words:
        i = words.index("tiny")
        words[i : i + 1] = TINY
    with pytest.raises(BadInput, match=message):
        launch(words)


@pytest.mark.parametrize("args", [("--slots", "0"), ("--rate", "1,x")])
def test_bad_input_is_one_line_and_exit_code_2(args, savedir):
    result = launched("--seed", "1:3", *args, savedir=savedir)
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("launch: error: ")
    assert not savedir.exists()


# What runs.


@pytest.mark.long
def test_a_run_is_resumed_until_it_is_complete_and_then_skipped(savedir):
    def again(steps, *others, code=0):
        words = *command(*CATCH), "--total_steps", steps, *others
        result = launched("--seed", "1", program=words, savedir=savedir)
        assert result.returncode == code, result.stderr
        return result.stderr

    assert "seed=1: ended, step 400; return" in again(400)
    assert "resuming" not in output(savedir, "seed=1")
    text = again(800)
    assert "; its command had --total_steps 400, has --total_steps 800" in text
    assert "seed=1: ended, step 800; return" in text
    before = output(savedir, "seed=1")
    assert "resuming" in before
    assert "seed=1: complete, step 800; return" in again(800)
    # A run of the same name, but of another experiment.
    text = again(800, "--use_lstm", code=1)
    assert "seed=1: failed, step 800; return" in text
    assert "complete, but its command has --use_lstm: name these runs" in text
    assert output(savedir, "seed=1") == before


def test_a_run_that_has_the_steps_of_its_agent_or_preset_is_complete(tmp_path):
    run = tmp_path / "x"
    run.mkdir()
    (run / "meta.json").write_text('{"flags": {"total_steps": 400}}')
    torch.save({"step": 400, "flags": {"env": "e", "agent": "a"}}, run / "model.tar")
    words = ["python", "-m", "monobeast", "--savedir", str(tmp_path)]
    assert Job("x", words).state == "complete"
    assert Job("x", [*words, "--total_steps", "401"]).state == "waits"


def test_runs_that_fail_do_not_stop_the_others(savedir):
    result = launched("--do", "fail,die,leave,end", savedir=savedir)
    assert result.returncode == 1
    assert states(result) == {
        "do=fail": "failed", "do=die": "failed", "do=leave": "ended", "do=end": "ended"
    }  # fmt: skip
    path = savedir / "do=fail/launch.log"
    assert f"step 0; exit code 1: it does not work; {path}" in result.stderr
    assert "do=die: failed, step 0; SIGKILL: " in result.stderr
    assert "4 runs: 2 failed, 2 ended" in result.stderr


def test_tests_of_runs_have_an_output_of_their_own(savedir):
    assert launched("--seed", "1", savedir=savedir).returncode == 0
    before = output(savedir, "seed=1")
    results = '[{"mean_return": 1}, {"mean_return": 2.5}]'
    (savedir / "seed=1/test.json").write_text(results)
    for _ in range(2):  # They are never complete.
        words = *TINY, "--mode", "test"
        result = launched("--seed", "1", program=words, savedir=savedir)
        assert states(result) == {"seed=1": "ended"}
        assert "ended, step 0; return 2.50" in result.stderr
    assert output(savedir, "seed=1") == before
    assert (savedir / "seed=1/test.log").read_text().count("--mode test") == 2


def test_a_directory_that_cannot_be_written_fails_its_run_alone(savedir):
    savedir.mkdir()
    (savedir / "seed=1").touch()
    result = launched("--seed", "1,2", savedir=savedir)
    assert result.returncode == 1
    assert states(result) == {"seed=1": "failed", "seed=2": "ended"}


def test_what_a_run_leaves_behind_is_killed(savedir):
    with launching("--do", "leave", savedir=savedir) as program:
        assert program.end() == 0


@two_cores
def test_each_slot_has_cores_and_a_gpu_of_its_own(savedir):
    result = launched("--gpus", "a,b", "--seed", "1,2", savedir=savedir)
    assert result.returncode == 0, result.stderr
    texts = [output(savedir, f"seed={seed}").split() for seed in (1, 2)]
    cores, gpus = zip(*((text[-3].split(","), text[-1]) for text in texts))
    assert gpus == ("a", "b")
    assert len(cores[0]) == len(cores[1]) == len(CORES) // 2
    assert {*cores[0]} | {*cores[1]} <= {*map(str, CORES)}
    assert not {*cores[0]} & {*cores[1]}


# Signals.


@two_cores
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_no_run_is_started_after_it(savedir, signum):
    with launching(
        "--slots", 2, "--do", "wait", "--seed", "1:3", savedir=savedir
    ) as program:
        names = "do=wait,seed=1", "do=wait,seed=2"
        for name in names:
            wait_for_output(program, savedir, name, "waits")
        program.signal_all(signum)
        assert program.end() == 128 + signum
    assert "3 runs: 2 stopped, 1 waits" in program.output
    for name in names:
        assert output(savedir, name).count("got") == 1
    assert not (savedir / "do=wait,seed=3").exists()


def test_a_second_signal_kills_all(savedir):
    with launching("--do", "ignore", savedir=savedir) as program:
        wait_for_output(program, savedir, "do=ignore", "waits")
        program.signal(signal.SIGINT)
        program.wait_for("do=ignore: ends")
        time.sleep(1.1)  # What comes within a second is the first one again.
        program.stop()
    assert "got SIGINT" in output(savedir, "do=ignore")
    assert "quit without saving" in program.output


def test_runs_end_when_the_launcher_is_killed(savedir):
    with launching("--do", "wait", savedir=savedir) as program:
        wait_for_output(program, savedir, "do=wait", "waits")
        program.signal(signal.SIGKILL)
        assert program.end() == -signal.SIGKILL
    assert "got SIGTERM" in output(savedir, "do=wait")


@pytest.mark.slow
def test_a_terminal_has_a_table_and_ctrl_c_saves(savedir):
    ours, theirs = pty.openpty()
    program = (*command(*CATCH, "--savedir", savedir, "--total_steps", 10**8),)
    process = subprocess.Popen(
        command("--seed", "1,2", "--", *program, module="torchbeast.launch"),
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    text = ""
    try:
        deadline = time.monotonic() + TIMEOUT_S
        sent = False
        while select.select([ours], [], [], deadline - time.monotonic())[0]:
            try:
                text += os.read(ours, 10_000).decode(errors="replace")
            except OSError:  # The terminal is closed.
                break
            if not sent and re.search(r"seed=1 +runs +[1-9][0-9,]* +100,000,000", text):
                os.write(ours, b"\x03")  # Ctrl-C
                sent = True
        assert process.wait(10) == 130, text
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert re.search("seed=1 +stopped", text)
    assert re.search("seed=2 +waits", text)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # The cursor is back.
    assert "2 runs: 1 stopped, 1 waits" in text
    assert (savedir / "seed=1/model.tar").exists()
    assert "Traceback" not in output(savedir, "seed=1") + text


def test_a_run_that_a_signal_without_a_name_ends_has_failed(tmp_path):
    job = Job("x", ["bash", "-c", "kill -40 $$", "x", "--savedir", str(tmp_path)])
    job.start(CORES, None)
    job.process.wait()
    assert job.has_ended(None)
    assert job.state == "failed" and job.note.startswith("signal 40: ")
