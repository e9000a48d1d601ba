"""torchbeast.plot: curves over seeds, pictures, thin copies of logs."""

import ast
import csv
import json
import logging
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.programs import ROOT, SERIAL, args, read_logs, succeeds
from torchbeast import logs, plot
from torchbeast.messages import BadInput


def make_run(path, rows=((10, 0.0), (20, 1.0)), **flags):
    """Writes a run whose rows are (step, episode_return), of one episode each."""
    path.mkdir(parents=True)
    with open(path / "logs.csv", "w", newline="") as f:
        print("step,seconds,episodes,episode_return,loss", file=f)
        for step, x in rows:
            print(f"{step},{step * 36},1,{x},{-x}", file=f)
    if flags:
        flags = {"env": "E-v0", "xpid": path.name, "command": [path.name], **flags}
        (path / "meta.json").write_text(json.dumps({"flags": flags}))
    return path


def run(path, column="loss", by="steps"):
    return plot.RunLog(path, column, by)


def main_of_plot(*words):
    return plot.plot(plot.parser().parse_args([str(word) for word in words]))


# Curves.


def test_runs_that_differ_in_their_seed_are_one_curve(tmp_path):
    runs = [
        run(make_run(tmp_path / f"{rate}-{seed}", seed=seed, learning_rate=rate))
        for rate in (0.1, 0.2)
        for seed in (1, 2, 3)
    ]
    assert plot.group(runs) == {
        "learning_rate=0.1": runs[:3],
        "learning_rate=0.2": runs[3:],
    }
    assert plot.group(runs[:3]) == {"": runs[:3]}


def test_curves_of_some_flags_take_all_values_of_the_others_together(tmp_path):
    flags = [dict(a=1, b=1), dict(a=1, b=2), dict(a=2, b=1)]
    runs = [run(make_run(tmp_path / str(i), **f)) for i, f in enumerate(flags)]
    assert list(plot.group(runs)) == ["a=1, b=1", "a=1, b=2", "a=2, b=1"]
    assert plot.group(runs, ["a"]) == {"a=1": runs[:2], "a=2": runs[2:]}
    with pytest.raises(BadInput, match="--curves c: the runs have no such flag"):
        plot.group(runs, ["c"])


def test_labels_leave_out_flags_that_follow_from_the_agent(tmp_path):
    flags = [dict(agent="x", x_cost=1, rate=1), dict(agent="y", y_cost=1, rate=2)]
    runs = [run(make_run(tmp_path / str(i), **f)) for i, f in enumerate(flags)]
    assert list(plot.group(runs)) == ["agent=x", "agent=y"]
    runs.append(run(make_run(tmp_path / "2", agent="y", y_cost=2, rate=2)))
    assert list(plot.group(runs)) == [
        "agent=x",
        "agent=y, y_cost=1",
        "agent=y, y_cost=2",
    ]


def test_labels_leave_out_flags_that_nobody_gave(tmp_path):
    runs = []
    for i, (rate, lstm, cost) in enumerate([(1, 0, 5), (2, 1, 6), (2, 0, 5)]):
        flags = dict(rate=rate, lstm=lstm, cost=cost, chosen={"cost": cost})
        runs.append(run(make_run(tmp_path / str(i), **flags)))
    labels = ["lstm=0, rate=1", "lstm=1, rate=2", "lstm=0, rate=2"]
    assert list(plot.group(runs)) == labels
    assert list(plot.group(runs, ["cost", "lstm"])) == [
        "cost=5, lstm=0",
        "cost=6, lstm=1",
    ]
    # But where they alone tell the curves apart.
    flags = dict(rate=1, lstm=0, cost=6, chosen={"cost": 6})
    runs.append(run(make_run(tmp_path / "3", **flags)))
    assert list(plot.group(runs))[::3] == [
        "cost=5, lstm=0, rate=1",
        "cost=6, lstm=0, rate=1",
    ]


def test_an_agent_without_presets_has_none(tmp_path):
    flags = [dict(agent="x", rate=1), dict(agent="x", rate=2, preset=None)]
    runs = [run(make_run(tmp_path / str(i), **f)) for i, f in enumerate(flags)]
    assert list(plot.group(runs)) == ["rate=1", "rate=2"]


def test_curves_tell_what_they_end_with(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(plot.log, "handlers", [caplog.handler])
    monkeypatch.setattr(plot.log, "level", logging.INFO)
    runs = [RunOf(tmp_path / name, y) for name, y in (("a", 1), ("b", 3), ("c", 12345))]
    plot.tell_last({"x": runs[:2], "": runs[2:]}, "loss")
    told = ["x, 2 runs: loss 2.00 ± 1.00", "c: loss 12,345.00"]
    assert [record.getMessage() for record in caplog.records] == told


class RunOf:
    def __init__(self, path, *y):
        self.path, self.y = path, y


def test_a_run_without_flags_is_a_curve_of_its_own(tmp_path):
    runs = [run(make_run(tmp_path / "a2c")), run(make_run(tmp_path / "x", seed=1))]
    assert plot.group(runs) == {"a2c": runs[:1], "": runs[1:]}


@pytest.mark.parametrize("num", [2, 3, 4, 9])
def test_the_middle_and_the_band_of_several_runs(tmp_path, num):
    ys = np.random.default_rng(0).normal(size=num)
    runs = [
        run(make_run(tmp_path / str(i), [(10 + i, -y), (100 + i, -y)]))
        for i, y in enumerate(ys)
    ]
    x, middle, low, high, name = plot.spread(runs)
    assert (x[0], x[-1]) == (10 + num - 1, 100)  # Where all have points.
    if num < 4:
        expected = np.mean(ys), np.min(ys), np.max(ys)
        assert name == f"mean of {num} runs, min to max"
    else:
        inner = {4: slice(1, 3), 9: slice(2, 7)}[num]
        expected = np.mean(np.sort(ys)[inner]), *np.quantile(ys, (0.25, 0.75))
        assert name == f"interquartile mean and range of {num} runs"
    for got, y in zip((middle, low, high), expected):
        np.testing.assert_allclose(got, y)


def test_points_between_rows_are_on_the_line_between_them(tmp_path):
    rows = [(0, 0), (10, -1), (30, 0)]
    runs = [run(make_run(tmp_path / str(i), rows)) for i in range(2)]
    x, middle, *_ = plot.spread(runs)
    np.testing.assert_allclose(middle, np.interp(x, (0, 10, 30), (0, 1, 0)))


def test_a_curve_is_by_steps_or_by_hours(tmp_path):
    path = make_run(tmp_path / "x", [(100, 1), (200, 2)])
    np.testing.assert_array_equal(run(path).x, (100, 200))
    np.testing.assert_array_equal(run(path, by="hours").x, (1, 2))
    np.testing.assert_array_equal(run(path).y, (-1, -2))


def test_an_evaluation_stands_at_the_step_of_its_weights(tmp_path):
    path = make_run(tmp_path / "x", [])
    lines = "step,eval_return,eval_step", "200,0.5,100", "300,,", "400,0.7,250"
    (path / "logs.csv").write_text("\n".join(lines) + "\n")
    np.testing.assert_array_equal(run(path, "eval_return").x, (100, 250))


# Logs.


def test_returns_are_means_over_the_last_hundred_episodes():
    rng = np.random.default_rng(0)
    rows = [
        dict(step=i, episodes=int(n)) for i, n in enumerate(rng.integers(0, 30, 50))
    ]
    episodes, expected = [], []
    for row in rows:
        if row["episodes"]:
            row["episode_return"] = rng.normal()
            episodes += [row["episode_return"]] * row["episodes"]
        if episodes:
            expected.append((row, np.mean(episodes[-100:])))
    got = logs.moving_average(rows, "episode_return")
    assert [row for row, _ in got] == [row for row, _ in expected]
    np.testing.assert_allclose([x for _, x in got], [x for _, x in expected])


def test_rows_of_a_later_session_take_the_place_of_those_not_saved(tmp_path):
    rows = [(10, 0), (20, 0), (30, 0), (20, 1), (40, 1)]
    rows = logs.read(make_run(tmp_path / "x", rows) / "logs.csv")
    assert [(r["step"], r["episode_return"]) for r in rows] == [
        (10, 0),
        (20, 1),
        (40, 1),
    ]


def test_what_is_not_a_row_is_skipped(tmp_path):
    path = tmp_path / "logs.csv"
    lines = ["step,a,b", "10,1,", "20,nan,2", "\xff", ",1,2", "30,x,2", "40,1,2,3"]
    lines += ["5\x000,1,2", "60,"]
    path.write_text("\n".join(lines), encoding="latin1")
    expected = [dict(step=10, a=1), dict(step=20, b=2), dict(step=50, a=1, b=2)]
    assert logs.read(path) == expected
    assert logs.read(path, last_bytes=12) == expected[-1:]
    path.write_text("step,a\n1000,1\n2000,2\n3000,3\n")
    expected = [dict(step=step, a=step / 1000) for step in (1000, 2000, 3000)]
    for num, rows in ((6, 0), (7, 1), (13, 1), (14, 2), (20, 2), (21, 3), (99, 3)):
        assert logs.read(path, last_bytes=num) == expected[3 - rows :]
    path.write_text("")
    assert logs.read(path) == []


# The command.


def test_a_single_run_has_a_picture_and_a_thin_copy_of_its_log(tmp_path):
    rows = [(i + 1, i % 3) for i in range(1200)]
    path = make_run(tmp_path / "x", rows, seed=1)
    assert main_of_plot(path, "--out", tmp_path / "new/x.svg") == 0
    assert (tmp_path / "new/x.svg").read_bytes().startswith(b"<?xml")
    with open(tmp_path / "new/x.csv", newline="") as f:
        copy = list(csv.DictReader(f))
    assert list(copy[0]) == ["step", "seconds", "episodes", "episode_return", "loss"]
    assert [float(row["step"]) for row in copy] == list(range(3, 1201, 3))
    assert {float(row["episode_return"]) for row in copy} == {1}
    assert {float(row["episodes"]) for row in copy} == {3}


def test_metrics_that_came_before_their_episodes_were_counted_have_a_mean():
    rows = [
        {"step": 1, "episodes": 0, "episode/success": 1.0},
        {"step": 2, "episodes": 3, "episode/success": 0.0},
    ]
    (line,) = logs.thin(rows, ["step", "episodes", "episode/success"], 1)
    assert line == {"step": 2, "episodes": 3, "episode/success": 0.25}
    *_, line = logs.thin(rows, ["step", "episodes", "episode/success"], 2)
    assert line == rows[1]


def test_small_numbers_keep_their_digits_in_a_thin_copy():
    rows = [{"step": i, "learning_rate": 2.5e-4, "loss": 3e-5} for i in (1, 2)]
    (line,) = logs.thin(rows, ["step", "learning_rate", "loss"], 1)
    assert line == {"step": 2, "learning_rate": 2.5e-4, "loss": 3e-5}


def test_the_link_to_the_newest_run_does_not_count_twice(tmp_path, monkeypatch):
    for seed in (1, 2):
        make_run(tmp_path / f"x{seed}", seed=seed)
    (tmp_path / "latest").symlink_to("x2")
    labels = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: labels.extend(
        self.axes[0].get_legend_handles_labels()[1]))  # fmt: skip
    main_of_plot(*tmp_path.iterdir(), "--out", tmp_path / "plot.png")
    assert labels == ["mean of 2 runs, min to max"]


def test_a_run_without_the_column_is_left_out(tmp_path):
    runs = [make_run(tmp_path / "x", seed=1), make_run(tmp_path / "y", (), seed=2)]
    assert main_of_plot(*runs, "--out", tmp_path / "plot.png") == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words, message",
    [
        (["nothing"], "nothing is not the directory of a run: .*No such file"),
        (["x", "--out", "plot.jpeg"], "--out plot.jpeg: expected a name that ends in"),
        (["x", "--out", "x/logs.png"], "--out x/logs.png: logs.csv is a run's: exp"),
        (["x", "--out", "x/logs.csv/plot.png"], "--out x/logs.csv/plot.png: "),
        (["x", "--column", "speed"], "no run has the column speed"),
        (["x", "--column", "los"], "no run has the column los; did you mean loss?"),
        (["no_time", "--by", "hours"], "no run has the column seconds: --by hours"),
        (["x", "--curves", "speed"], "--curves speed: the runs have no such flag"),
        (["empty"], "no run has the column episode_return"),
    ],
)
def test_bad_input_is_named(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "x", seed=1)
    make_run(tmp_path / "empty", ())
    (tmp_path / "no_time").mkdir()
    (tmp_path / "no_time" / "logs.csv").write_text("step,episode_return\n1,2\n")
    with pytest.raises(BadInput, match=message):
        main_of_plot(*words)


@pytest.mark.slow
def test_three_seeds_of_a_real_run(savedir, tmp_path):
    for seed in (1, 2, 3):
        flags = ("--seed", seed, "--xpid", f"x{seed}", "--log_interval_steps", 40)
        succeeds(*args("monobeast", savedir, *SERIAL, *flags, steps=400))
    out = tmp_path / "plot.png"
    words = [*savedir.iterdir(), "--out", out]  # Also savedir/latest.
    result = subprocess.run(
        [sys.executable, "-m", "torchbeast.plot", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0
    assert result.stderr.endswith(f"{out}\n")
    assert out.read_bytes().startswith(b"\x89PNG")
    x, *_ = plot.spread([run(savedir / f"x{i}", "total_loss") for i in (1, 2, 3)])
    assert x[-1] == 400 == int(read_logs(savedir / "x1")[-1]["step"])


def test_no_other_module_imports_matplotlib():
    for path in (ROOT / "torchbeast").glob("*.py"):
        names = {
            name.partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in [getattr(node, "module", None), *(a.name for a in node.names)]
            if name
        }
        assert ("matplotlib" in names) == (path.name == "plot.py"), path


def test_a_damaged_line_of_a_single_run_is_left_out(tmp_path):
    path = make_run(tmp_path / "x")
    with open(path / "logs.csv", "ab") as f:
        f.write(b"30,\xff\xfe\n40,1440,1,2,3\n")
    assert main_of_plot(path, "--out", tmp_path / "x.png") == 0
    assert (tmp_path / "x.csv").read_text().splitlines()[-1].startswith("40")
