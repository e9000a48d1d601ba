"""torchbeast.tune, with real processes."""

import re
import shlex
import shutil
import sys

import pytest

from tests.programs import Program, run
from torchbeast import logs, tune
from torchbeast.messages import BadInput

slow = pytest.mark.slow  # make test-slow installs Optuna.
TINY = (sys.executable, "-m", "tests.tiny_program", "--total_steps", "1000")


def words(*args, savedir, more=()):
    return *args, "--", *TINY, "--savedir", savedir, *more


def tuned(*args, code=0, **kwargs):
    """Runs the command to its end."""
    pytest.importorskip("optuna")
    result = run(*words(*args, **kwargs), module="torchbeast.tune")
    assert result.returncode == code, result.stderr
    return result


def rows(result):
    """The cells of the table, without its head."""
    lines = re.findall(r"^\| (.*) \|$", result.stdout, re.M)
    return [line.split(" | ") for line in lines[2:]]


def commands(savedir, name):
    """Those of a trial's sessions."""
    lines = (savedir / name / "launch.log").read_text().splitlines()
    return [shlex.split(line[2:]) for line in lines if line[:2] == "$ "]


def test_the_objective_is_the_mean_over_episodes_of_some_steps():
    some = [
        {"step": 800, "episodes": 9, "episode_return": 99},
        {"step": 900, "episodes": 1, "episode_return": 1},
        {"step": 950, "episodes": 0},
        {"step": 1000, "episodes": 3, "episode_return": 5},
        {"step": 1020, "episodes": 1, "episode_return": 9},
    ]
    assert logs.mean_return(some, 800) == (1 + 3 * 5 + 9) / 5
    assert logs.mean_return(some, 800, 1000) == (1 + 3 * 5) / 4
    assert logs.mean_return(some, 1020) is None


def test_without_optuna_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tune, "optuna", None)
    with pytest.raises(BadInput, match="needs: pip install optuna"):
        tune.tune(["--trials", "1", "--rate", "1:2", "--", *TINY])


@slow
def test_ranges_are_floats_integers_logarithms_and_choices():
    kinds = pytest.importorskip("optuna").distributions
    for text, expected in {
        "1:3": kinds.IntDistribution(1, 3),
        "-1:3.0": kinds.FloatDistribution(-1, 3),
        "log:1e-4:1e-2": kinds.FloatDistribution(1e-4, 1e-2, log=True),
        "log:1:1000": kinds.IntDistribution(1, 1000, log=True),
        "1,4,a": kinds.CategoricalDistribution(["1", "4", "a"]),
        "1:3,7": kinds.CategoricalDistribution(["1", "2", "3", "7"]),
        "m:A-v0": kinds.CategoricalDistribution(["m:A-v0"]),
    }.items():
        assert tune.parse_range("--x", text) == expected


@slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--rate 2:1", "--rate 2:1: expected LOW < HIGH"),
        ("--rate 1:1e999", "--rate 1:1e999: expected LOW < HIGH"),
        ("--rate log:0:1", "--rate log:0:1: expected 0 < LOW < HIGH"),
        ("--rate log:a:1", "expected log:LOW:HIGH"),
        ("--rate", "--rate '': expected values"),
        ("--speed 1:2", "--speed is not a flag of"),
        ("--rate 1,fast", "invalid float value: 'fast'"),
        ("--xpid a,b", "--xpid is the beginning of all names"),
        ("", "nothing varies"),
    ],
)
def test_bad_input_is_refused_by_its_name(args, message, savedir):
    pytest.importorskip("optuna")
    args = "--trials", "2", *args.split()
    with pytest.raises(BadInput, match=message):
        tune.tune([str(x) for x in words(*args, savedir=savedir)])
    assert not savedir.exists()


@slow
def test_the_same_command_goes_on_and_the_best_is_found(savedir):
    args = "--rate", "log:1e-2:1", "--fast", "on,off"
    first = tuned("--trials", 3, *args, savedir=savedir, more=["--do", "learn"])
    result = tuned("--trials", 5, *args, savedir=savedir, more=["--do", "learn"])
    table = rows(result)
    assert sorted(row[0] for row in table) == ["0", "1", "2", "3", "4"]
    assert {*map(tuple, rows(first))} < {*map(tuple, table)}
    for number, state, objective, rate, fast, _ in table:
        [command] = commands(savedir, f"tune,trial={number}")
        flag, _, value = command[-2 - (fast == "on")].partition("=")
        assert (flag, f"{float(value):.4g}") == ("--rate", rate)
        assert ("--fast" in command) == (fast == "on")
        # The last four of 20 rows: 3, 2, 1 and 0 below the end.
        assert float(objective) == pytest.approx(10 * float(rate) - 1.5, abs=0.01)
        assert state == "complete"
    assert [float(row[2]) for row in table] == sorted(
        (float(row[2]) for row in table), reverse=True
    )
    best = f"tune,trial={table[0][0]}"
    assert f"is the best: {shlex.join(commands(savedir, best)[0])}\n" in result.stdout
    assert (savedir / "tune/trials.png").stat().st_size > 0


@slow
def test_trials_of_another_command_are_refused(savedir):
    args = "--trials", 1, "--rate", "0.1:1"
    tuned(*args, savedir=savedir, more=["--do", "learn"])
    result = tuned(*args, savedir=savedir, more=["--do", "lag"], code=2)
    assert (
        "is of another command, which had --do learn, has --do lag: give"
        in result.stderr
    )
    more = "--do", "lag", "--xpid", "y"
    tuned(*args, savedir=savedir, more=more)
    (savedir / "y/trials.journal").unlink()
    result = tuned(*args, savedir=savedir, more=more, code=2)
    assert "y,trial=0 is there, but no trial of" in result.stderr


@slow
def test_a_trial_that_fails_is_recorded_with_its_line(savedir):
    args = "--trials", 2, "--rate", "0.1:1"
    for _ in range(2):  # It is not tried again.
        result = tuned(*args, savedir=savedir, more=["--do", "fail"], code=1)
        assert len(rows(result)) == 2
        for number, state, objective, _, line in rows(result):
            assert (state, objective) == ("failed", "")
            assert line.startswith("exit code 1: it does not work; ")
            assert len(commands(savedir, f"tune,trial={number}")) == 1
    assert "no trial is complete" in result.stderr


@slow
def test_a_trial_below_the_median_of_the_others_is_pruned(savedir):
    more = "--do", "lag"
    result = tuned("--trials", 7, "--rate", "1:2", savedir=savedir, more=more)
    states = {row[0]: (row[1], row[2]) for row in rows(result)}
    assert states.pop("6") == ("pruned", "-1.00")
    assert {state for state, _ in states.values()} == {"complete"}
    text = (savedir / "tune,trial=6/launch.log").read_text()
    assert text.count("got SIGTERM") == 1


@slow
def test_a_trial_reports_each_twentieth_once_and_trains_with_the_value_of_its_study(
    savedir, recwarn
):
    pytest.importorskip("optuna")
    flags = tune.parser().parse_args(["--trials", "1"])
    command = [*TINY, "--savedir", str(savedir)]
    study = tune.Study(flags, {"--rate": "0.9:0.99999"}, command)
    assert study.words({"--rate": 0.99997}, "x")[-2] == "--rate=0.99997"
    [trial] = study.trials
    trial.trial = study.optuna.ask(study.distributions)
    trial.path.mkdir()
    lines = ["step,episodes,episode_return", *(f"{50 * i},1,{i}" for i in range(21))]
    found = []
    for num in 10, 6, 8, 12:  # Resumed where a checkpoint was.
        (trial.path / "logs.csv").write_text("\n".join(lines[: num + 2]) + "\n")
        trial.look()
        found.append(trial._report())
    assert found == [True, False, False, True]
    assert [*study.optuna.trials[0].intermediate_values] == [*range(1, 13)]
    assert not [w for w in recwarn if "already reported" in str(w.message)]


@slow
def test_a_trial_that_ctrl_c_has_stopped_goes_on_with_its_values(savedir):
    pytest.importorskip("optuna")
    args = "--trials", 2, "--rate", "1.5:2"
    for _ in range(2):
        all_words = words(*args, savedir=savedir, more=["--do", "wait"])
        with Program(*all_words, module="torchbeast.tune") as program:
            program.wait_for("trial=0: runs")
            locked = tuned(*args, savedir=savedir, more=["--do", "wait"], code=2)
            assert "is being tuned by process" in locked.stderr
            program.stop()
        assert "2 runs: 1 stopped, 1 waits" in program.output
    first, second = commands(savedir, "tune,trial=0")
    assert first == second
    assert not (savedir / "tune,trial=1").exists()


@slow
def test_a_study_goes_on_after_the_disk_was_full(savedir):
    """It ends with one line, and half a line in its journal."""
    args, more = ("--trials", 1, "--rate", "0.1:1"), ["--do", "learn"]
    pytest.importorskip("optuna")
    all_words, ends = words(*args, savedir=savedir, more=more), []
    for kilobytes in (2, 1):
        full = ("bash", "-c", f'ulimit -f {kilobytes} && exec "$0" "$@"')
        result = run(*all_words, module="torchbeast.tune", prefix=full)
        assert result.returncode == 2, result.stderr
        assert result.stderr.endswith(f"tune: error: {savedir}/tune: File too large\n")
        assert "Traceback" not in result.stderr
        ends.append((savedir / "tune/trials.journal").read_bytes()[-1:])
    assert ends[0] != b"\n"
    [[_, state, *_]] = rows(tuned(*args, savedir=savedir, more=more))
    assert state == "complete"


@slow
def test_a_study_that_was_killed_while_it_chose_values_chooses_the_others(savedir):
    args = "--trials", 1, "--rate", "0.1:1", "--fast", "on,off"
    more = ["--do", "learn"]
    [[_, _, _, rate, *_]] = rows(tuned(*args, savedir=savedir, more=more))
    journal = savedir / "tune/trials.journal"
    lines = journal.read_text().splitlines(keepends=True)
    [end] = [i for i, line in enumerate(lines) if '"param_name":"--fast"' in line]
    journal.write_text("".join(lines[:end]))
    shutil.rmtree(savedir / "tune,trial=0")
    [[*_, again, fast, _]] = rows(tuned(*args, savedir=savedir, more=more))
    assert again == rate
    [command] = commands(savedir, "tune,trial=0")
    assert ("--fast" in command) == (fast == "on")
