"""benchmarks/results.py: experiments, what is kept of their runs, documents' tables."""

import csv
import importlib
import json
import subprocess
import types

import numpy as np
import pytest

from benchmarks import results, sb3, tables
from benchmarks.experiments import EXPERIMENTS, TABLES
from torchbeast import logs
from torchbeast.flags import parse_args
from torchbeast.messages import BadInput

POLE = EXPERIMENTS["impala-cartpole"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty docs/results."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "docs")
    tables.RESULTS.mkdir()
    return tables.RESULTS


def make_run(savedir, rows, seed=1, date="2026-11-25", command=(), earlier=()):
    """Makes the directory of a run. rows: (step, episodes, mean return or "")."""
    directory = savedir / f"impala-cartpole-{seed}"
    directory.mkdir(parents=True, exist_ok=True)
    argv = [
        *POLE.command(seed),
        "--savedir",
        "/x",
        f"--xpid={directory.name}",
        *command,
    ]
    flags = dict(command=argv, log_interval_steps=1000, precision="bfloat16")
    git = [dict(commit=c, dirty=False) for c in (*earlier, "c0ffee")]
    meta = dict(flags=flags, git=git[-1], date=f"{date}T01:00:00+00:00", num_cores=2,
                cpu="EPYC", gpu=None,
                earlier_sessions=[dict(git=x) for x in git[:-1]])  # fmt: skip
    (directory / "meta.json").write_text(json.dumps(meta))
    with open(directory / "logs.csv", "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["step", "seconds", "episodes", "episode_return"])
        writer.writerows([(step, step / 100, *others) for step, *others in rows])


def rows_of(folder, seed=1):
    with open(folder / f"impala-cartpole-{seed}.csv", newline="") as f:
        return list(csv.DictReader(f))


# Declarations and documents.


def test_tables_of_documents_are_what_the_csv_files_say():
    curves = tables.read_curves()
    for path in tables.DOCUMENTS:
        text = path.read_text()
        assert tables.made(text, curves) == text, (
            f"{path.name}: type python benchmarks/results.py --make"
        )


def test_every_table_is_in_a_document():
    texts = [path.read_text() for path in tables.DOCUMENTS]
    names = [m[2] for text in texts for m in tables.MARKED.finditer(text)]
    assert sorted(names) == sorted(TABLES)


def test_each_program_parses_the_commands_of_its_experiments():
    for x in EXPERIMENTS.values():
        program, *argv = x.command(7)
        agent = argv[argv.index("--agent") + 1] if "--agent" in argv else "polybeast"
        if program == "benchmarks.sb3":
            flags = sb3.parser().parse_args(argv)
        else:
            parser = importlib.import_module(program).program_parser(agent)
            flags = parse_args(parser, argv)
        assert (flags.total_steps, flags.seed) == (x.total_steps, 7)


def test_each_record_has_a_curve_and_the_declared_command():
    records = tables.read_records()
    files = {path.stem for path in tables.RESULTS.glob("*.csv")}
    assert files == {*records}
    for x in EXPERIMENTS.values():
        for run, seed in x.runs().items():
            if run in records:
                words = records[run]["command"].split()
                assert sorted(words) == sorted(["python", "-m", *x.command(seed)])


# What is kept of runs.


def test_a_curve_has_few_rows_of_the_moving_average_and_the_last_one(tmp_path):
    rng = np.random.default_rng(1)
    rows = [(1000, 0, "")]
    rows += [(1000 * i, i % 5 + 1, rng.normal()) for i in range(2, 601)]
    make_run(tmp_path, rows)
    _, kept = results.read(tmp_path / "impala-cartpole-1", POLE, 1)
    assert 100 <= len(kept) <= results.NUM_ROWS
    assert kept[-1]["step"] == 600_000
    for row in kept:
        before = [r for r in rows if r[0] <= row["step"]]
        episodes = [x for _, n, x in before for _ in range(n)]
        assert row["episodes"] == len(episodes)
        assert float(row["mean_return"]) == pytest.approx(
            np.mean(episodes[-100:]), rel=1e-4, abs=1e-4
        )


def test_a_record_says_what_ran_where_and_on_which_commit_it_began(tmp_path):
    flags = ["--keep_checkpoints", "9"]
    make_run(tmp_path, [(299_040, 1, 9)], earlier=["f00d"], command=flags)
    record, _ = results.read(tmp_path / "impala-cartpole-1", POLE, 1)
    assert record == dict(
        command="python -m monobeast --env CartPole-v1 --total_steps 300000 --seed 1",
        commit="f00d",
        dirty=False,
        date="2026-11-25",
        machine="2 cores of EPYC, bfloat16",
        steps=299_040,
        seconds=2990,
        finished=True,
    )
    make_run(tmp_path, [(299_000, 1, 9)])
    record, _ = results.read(tmp_path / "impala-cartpole-1", POLE, 1)
    assert not record["finished"]


def test_a_run_with_another_command_is_not_taken(tmp_path, folder, caplog):
    make_run(tmp_path, [(300_000, 1, 9)], command=["--learning_rate", "1"])
    with pytest.raises(BadInput, match="-1: its command had --learning_rate 1$"):
        results.read(tmp_path / "impala-cartpole-1", POLE, 1)
    results.collect(["impala-cartpole"], tmp_path)
    assert tables.read_records() == {}


def test_what_is_finished_or_newer_or_longer_is_kept(tmp_path, folder):
    def collected(step, date):
        make_run(tmp_path, [(step, 1, 9)], date=date)
        results.collect(["impala-cartpole"], tmp_path)
        record = tables.read_records()["impala-cartpole-1"]
        assert [int(row["step"]) for row in rows_of(folder)] == [record["steps"]]
        return record["steps"], record["date"][-2:]

    assert collected(5_000, "2026-11-02") == (5_000, "02")
    assert collected(4_000, "2026-11-03") == (5_000, "02")
    assert collected(6_000, "2026-11-01") == (6_000, "01")
    assert collected(300_000, "2026-11-04") == (300_000, "04")
    assert collected(290_000, "2026-11-05") == (300_000, "04")
    assert collected(300_080, "2026-11-03") == (300_000, "04")
    assert collected(300_040, "2026-11-06") == (300_040, "06")
    # On the same day, and on another commit.
    make_run(tmp_path, [(300_040, 1, 9)], earlier=["f00d"], date="2026-11-06")
    results.collect(["impala-cartpole"], tmp_path)
    assert tables.read_records()["impala-cartpole-1"]["commit"] == "f00d"


def test_a_pattern_that_names_nothing_leaves_docs_results_as_it_is(tmp_path, folder):
    make_run(tmp_path, [(5_000, 1, 9)])
    with pytest.raises(BadInput, match="'impala-pnog' is no experiment"):
        results.collect(["impala-cartpole", "impala-pnog"], tmp_path)
    assert not [*folder.iterdir()]


def test_files_that_matter_are_those_of_program_agent_and_environment(
    tmp_path, monkeypatch
):
    def git(*words):
        identity = "-c", "user.name=x", "-c", "user.email=x@x"
        command = ["git", "-C", tmp_path, *identity, *words]
        return subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout

    names = ["monobeast.py", "ppo.py", "pqn.py", "torchbeast/run.py", "warpbeast.py",
             "torchbeast/launch.py", "torchbeast/remote/x.py", "atari_wrappers.py",
             "examples/minatar/env.py"]  # fmt: skip
    git("init", "-q")
    for text in "1", "2":
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        git("add", "-A")
        git("commit", "-qm", text)
    monkeypatch.setattr(results, "ROOT", tmp_path)

    def changed(name, commit="HEAD~1"):
        return {*results.changed_files(commit, EXPERIMENTS[name])}

    common = {"monobeast.py", "torchbeast/run.py"}
    assert changed("ppo-pong") == common | {"ppo.py", "atari_wrappers.py"}
    assert changed("pqn-cartpole") == common | {"pqn.py"}
    assert changed("impala-minatar-asterix") == common | {"examples/minatar/env.py"}
    assert changed("ppo-pong", "HEAD") == set()
    assert changed("sb3-ppo-qbert") == set()
    with pytest.raises(OSError):
        changed("ppo-pong", "0" * 40)


# What is run.


def test_a_run_of_stable_baselines3_goes_on_where_it_saved(tmp_path, monkeypatch):
    class Model:
        def __init__(self, steps):
            self.num_timesteps = steps

        def learn(self, num_steps, callback, reset_num_timesteps):
            assert reset_num_timesteps == (self.num_timesteps == 0)
            going = True
            while going:
                self.num_timesteps += 16
                games = [{"episode": dict(r=r, l=9)} for r in (5.0, 7.0)]
                going = callback(dict(self=self, infos=[*games, {}]), {})

    flags = ["--algorithm", "ppo", "--env", "QbertNoFrameskip-v4", "--seed", "2"]
    for saved, end in (0, 48), (16, 64):
        monkeypatch.setattr(sb3, "make_model", lambda *_, saved=saved: Model(saved))
        words = ["sb3", *flags, "--total_steps", str(end), "--savedir", str(tmp_path)]
        monkeypatch.setattr("sys.argv", words)
        sb3.main()
    [run] = tmp_path.iterdir()
    rows = logs.read(run / "logs.csv")
    assert [row["step"] for row in rows] == [16, 32, 48, 64]
    assert all((row["episodes"], row["episode_return"]) == (2, 6) for row in rows)
    meta = json.loads((run / "meta.json").read_text())
    assert meta["flags"]["command"][-3:] == ["48", "--savedir", str(tmp_path)]


def test_what_is_missing_is_run(tmp_path, folder, monkeypatch):
    make_run(tmp_path / "elsewhere", [(300_000, 1, 9)])
    make_run(tmp_path / "elsewhere", [(5_000, 1, 9)], seed=2)
    results.collect([], tmp_path / "elsewhere")
    jobs = []
    monkeypatch.setattr(results.launch, "run_all", lambda new, slots: jobs.extend(new))
    results.run(["impala-cart*"], tmp_path, slots=1, again=False)
    assert [job.name for job in jobs] == ["impala-cartpole-2", "impala-cartpole-3"]
    assert jobs[0].command[1:] == ["-m", *POLE.command(2), f"--savedir={tmp_path}",
                                   "--xpid=impala-cartpole-2"]  # fmt: skip
    jobs.clear()
    results.run(["impala-cartpole"], tmp_path, slots=1, again=True)
    assert len(jobs) == 3


def test_patterns_name_experiments_runs_and_groups():
    def names(*patterns):
        return [name for name, _, _ in results.selected(patterns)]

    assert names("*-cartpole-2", "pqn-cartpole") == [
        "impala-cartpole-2", "ppo-cartpole-2", "dqn-cartpole-2", "r2d2-cartpole-2",
        "pqn-cartpole-1", "pqn-cartpole-2", "pqn-cartpole-3",
    ]  # fmt: skip
    assert {"sac-hopper-1", "td3-halfcheetah-3"} < {*names("mujoco")}
    assert names("mujoco/TD3") == [f"td3-halfcheetah-{i}" for i in (1, 2, 3)] + [
        f"td3-hopper-{i}" for i in (1, 2, 3)
    ]
    assert {"impala-pong-2", "impala-pong-sticky-1", "a2c-pong-1"} < {*names("pong")}
    assert names("Pong") == names("pong")
    assert not any("breakout" in name for name in names("pong"))
    assert len(names()) == sum(len(x.seeds) for x in EXPERIMENTS.values())
    with pytest.raises(
        BadInput, match="'nonsense' is no experiment, run, environment or group"
    ):
        names("pqn-*", "nonsense")


def test_a_list_says_how_far_runs_are(tmp_path, folder, capsys):
    make_run(tmp_path, [(5_000, 1, 9)])
    make_run(tmp_path, [(5_000, 1, 9)], seed=2, command=["--use_lstm"])
    results.list_runs(["impala-cartpole"], tmp_path)
    title, *runs = capsys.readouterr().out.splitlines()
    assert title.startswith("impala-cartpole: monobeast --env CartPole-v1")
    assert "5,000 steps, 2026-11-25, commit c0ffee, not in this repository" in runs[0]
    assert runs[1].endswith("impala-cartpole-2: its command had --use_lstm")
    assert runs[2] == "    impala-cartpole-3: not run"


# Tables.


def curves_of(savedir, ends):
    """Collects runs of CartPole whose last 100 episodes have these means."""
    for seed, end in enumerate(ends, 1):
        make_run(savedir, [(100_000, 100, 0), (300_000, 100, end)], seed)
    results.collect([], savedir)
    return tables.read_curves()


def test_a_cell_is_the_median_over_seeds_or_mean_and_standard_error(tmp_path, folder):
    curves = curves_of(tmp_path, [100, 200, 450])
    row = [x for x in tables.grid(curves, "matrix", True).splitlines() if "Cart" in x]
    assert row[0].split(" | ")[2:4] == ["200 (3) / 475", "not run / 475"]
    # The deviation of 100, 200, 450 is 180.3, and 180.3 / sqrt(3) is 104.1.
    row = [x for x in tables.grid(curves, "matrix").splitlines() if "Cart" in x]
    assert row == ["| CartPole-v1 | 300,000 | 250 ± 104 (3) |"]


def test_a_run_that_was_stopped_counts_where_none_is_finished(tmp_path, folder):
    make_run(tmp_path, [(50_000, 100, 20)])
    results.collect([], tmp_path)
    text = tables.grid(tables.read_curves(), "matrix")
    assert "| 20.0 (1, after 50,000) |" in text
    make_run(tmp_path, [(300_000, 100, 30)], seed=2)
    results.collect([], tmp_path)
    assert "| 30.0 (1) |" in tables.grid(tables.read_curves(), "matrix")


def test_returns_after_steps_and_steps_until_returns(tmp_path, folder):
    curves = curves_of(tmp_path, [100])
    run = "impala-cartpole-1"
    text = tables.after(curves, (50_000, 299_999, 300_000, 300_001), {"x": run})
    assert f"| [x](results/{run}.csv) |  | 0.00 | 100 |  |" in text
    text = tables.milestones(curves, {"x": (run, (-5, 100, 101))})
    assert "| -5: 100,000; 100: 300,000 (50.0 minutes) | 100 after 300,000 |" in text


def test_experiments_stand_beside_what_is_published_of_them():
    def run(end, seconds=5400, env="x"):
        command = f"python -m monobeast --env {env}"
        record = dict(finished=True, seconds=seconds, machine="m", date="2026-11-25",
                      command=command)  # fmt: skip
        return types.SimpleNamespace(y=[0, end], record=record)

    ends = dict(qbert=4068, seaquest=1721, beamrider=363.9, spaceinvaders=1668.7,
                phoenix=7242.6, breakout=1.7)  # fmt: skip
    curves = {f"impala-{game}-1": run(end) for game, end in ends.items()}
    curves["impala-breakout-10m-1"] = run(1000)
    pong = "PongNoFrameskip-v4"
    curves["impala-pong-1"] = run(21.0, env=pong)
    curves["impala-pong-2"] = run(11.0, seconds=1800, env=pong)
    text = tables.beside(curves, "atari")
    rows = [row for row in text.splitlines() if "| Qbert" in row or "| Pong" in row]
    # A human's (4068 - 163.9) / (13455 - 163.9) is 0.29, and (16 + 20.7) / 35.3 1.04.
    assert rows == [
        "| Pong | IMPALA | 1,000,000 | 16.0 ± 5.00 (2); 104% | 1.00 | "
        "17.3 (RL Zoo's A2C, 10,000,000 steps) |",
        "| Qbert | IMPALA | 3,000,000 | 4,068 (1); 29% | 1.50 | "
        "4,068 (RLlib, 10,000,000 steps) |",
    ]
    # Scores are 0, 0, 3.9, 29, 100, 100 and Pong's 90 and 118%, which count half each.
    # Without a quarter of 7, 1.75, at both ends, 0.25 * 0, 3.9, 29, 0.5 * 90 and 0.75 *
    # 100 remain. One of 100 is Phoenix's, which RL Zoo has not: without it, 1.5 are
    # cut: 0.5 * 0, 3.9, 29 and 0.5 * 90 remain, and of theirs, 3.9, 15, 28, 31, 108 and
    # 966%, 0.5 * 15, 28, 31 and 0.5 * 108.
    text = " ".join(text.split())
    assert (
        "IMPALA's interquartile mean of human-normalised scores over 7 games (steps: "
        "3,000,000; Pong: 1,000,000) is 44% (6 of 7 games have one run, hence no "
        "interval). On the 6 that are published of RL Zoo's A2C, 10,000,000 steps, it "
        "is 26% (5 of 6 games have one run, hence no interval), theirs 40%."
    ) in text
    assert "Of Atari: actions are not sticky" in text and "MinAtar" not in text


def test_a_sentence_says_when_runs_pass_returns(tmp_path, folder):
    curves = curves_of(tmp_path, [100, 200])
    names = [f"impala-cartpole-{seed}" for seed in (1, 2, 3)]
    text = tables.passes(curves, names, (0, 100, 150), 299_999)
    assert " ".join(text.split()) == (
        "The mean return of the last 100 games passes 0 after 100,000 agent steps and "
        "100 after 300,000 (50 minutes), and is 0 after 299,999 (2 runs; 25 November "
        "2026, on 2 cores of EPYC, bfloat16)."
    )
    assert tables.passes(curves, names, (201,)) == ""
    assert tables.passes(curves, names, (0,), 300_001) == ""
    text = tables.passes(curves, names[:1], (0,))
    assert "steps (17 minutes; 25 November" in text


def test_what_was_not_run_has_a_row_where_that_is_asked_for(tmp_path, folder):
    curves = curves_of(tmp_path, [100])
    rows = tables.beside(curves, "matrix", True).splitlines()
    assert "| CartPole-v1 | PPO | 300,000 | not run | not run |  |" in rows
    assert not any("not run" in row for row in tables.beside(curves, "matrix"))


def test_documents_and_pictures_are_written(tmp_path, folder, monkeypatch):
    curves_of(tmp_path, [100, 200, 450])
    tables_ = {
        "a": ("grid", "matrix"),
        "b": ("beside", "matrix"),
        "c": ("race", (300_000,), {"one": "impala-cartpole-1"}, "raced"),
    }
    monkeypatch.setattr(tables, "TABLES", tables_)
    document = tmp_path / "x.md"
    document.write_text("".join(f"<!-- table: {x} -->\n<!-- end -->\n" for x in "abc"))
    monkeypatch.setattr(tables, "DOCUMENTS", [document])
    both = "Two runs", {"": ["impala-cartpole-1", "impala-cartpole-2"]}
    one = "One run", {"x": ["impala-cartpole-1"], "y": ["impala-cartpole-9"]}
    none = "None", {"": ["impala-cartpole-9"]}
    pictures = {"mean": both, "one": one, "none": none}
    monkeypatch.setattr(tables, "PICTURES", pictures)
    drawn = {}
    monkeypatch.setattr(tables, "save", lambda f, name: drawn.update({name: f}))
    tables.write()
    text = document.read_text()
    assert "(results/raced.png)" in text and "250 ± 104 (3) | 0.83 |" in text
    assert drawn.keys() == {"matrix-curves", "raced", "mean", "one"}
    [axes] = drawn["one"].axes
    assert axes.lines[0].get_ydata()[-1] == 100
    [axes] = drawn["mean"].axes
    assert axes.get_title() == "Two runs" and axes.lines[0].get_ydata()[-1] == 150
    by_steps, by_hours = drawn["raced"].axes
    assert by_steps.lines[0].get_xdata().tolist() == [100_000, 300_000]
    assert by_hours.lines[0].get_xdata().tolist() == [1000 / 3600, 3000 / 3600]
    assert drawn["matrix-curves"].axes[0].lines[0].get_ydata()[-1] == 250


@pytest.mark.parametrize("table", TABLES)
def test_without_a_run_a_table_is_empty(table):
    text = f"a\n<!-- table: {table} -->\n| 1 |\n<!-- end -->\nb\n"
    expected = f"a\n<!-- table: {table} -->\n<!-- end -->\nb\n"
    assert tables.made(text, {}) == expected


def test_a_table_that_is_not_declared_is_refused():
    with pytest.raises(BadInput, match="table: x -->: expected one of matrix, "):
        tables.made("<!-- table: x -->\n<!-- end -->\n", {})


def test_the_interquartile_mean_is_of_the_middle_half_of_all_runs():
    games = [np.array([1.0, 2, 3, 4]), np.array([5.0, 6, 7, 800])]
    text = tables.iqm(games)
    assert text.startswith("450% (95% interval ")
    low, high = [float(x.strip("%)")) for x in text.split("val ")[1].split(" to ")]
    assert 300 <= low < 450 < high
    assert tables.iqm([games[0][:1], games[1][:1]]) == (
        "300% (2 of 2 games have one run, hence no interval)"
    )


def test_a_game_counts_alike_in_the_interquartile_mean_however_many_its_runs():
    few, many = np.array([1.0]), np.array([5.0, 6.0])
    assert tables.iqm([few, many]).startswith("300% ")  # Of 1, 1, 5 and 6.
    assert tables.iqm([few, many.repeat(3)]).startswith("300% ")
