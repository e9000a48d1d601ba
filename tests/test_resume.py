"""MonoBeast, the program: runs that are resumed, their checkpoints and their tests."""

import json
import shlex
import threading

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import monobeast
import polybeast
from tests.programs import SERIAL, load, main, read_logs, refusal, succeeds
from tests.test_program import LOG, STATISTICS, serial_run, small_run
from torchbeast import ranks
from torchbeast import run as run_module
from torchbeast.log_writer import COLUMNS, LogWriter
from torchbeast.messages import Stop
from torchbeast.run import Run


def test_same_command_resumes_where_it_was(trained):
    def steps_of_the_optimizer():
        return load(trained)["agent"]["optimizer"]["state"][0]["step"]

    before = steps_of_the_optimizer()
    result = succeeds(*serial_run(trained, *LOG, steps=600))
    assert "resuming" in result.stderr and "at step 400" in result.stderr
    rows = read_logs(trained / "x")
    assert [int(r["step"]) for r in rows] == [400, 440, 480, 520, 560, 600]
    assert [int(r["updates"]) for r in rows] == [10, 11, 12, 13, 14, 15]
    seconds = [float(r["seconds"]) for r in rows]
    assert seconds == sorted(seconds)
    assert steps_of_the_optimizer() == 1.5 * before
    meta = json.loads((trained / "x" / "meta.json").read_text())
    assert meta["first_step"] == 400 and len(meta["earlier_sessions"]) == 1


def test_a_run_that_was_saved_before_its_first_step_goes_on_and_not_anew(trained):
    checkpoint = load(trained)
    checkpoint["step"] = checkpoint["updates"] = 0
    torch.save(checkpoint, trained / "x" / "model.tar")
    result = main(*serial_run(trained, steps=80))
    assert result.returncode == 0 and "resuming" in result.stderr, result.stderr
    assert "begins anew" not in result.stderr
    assert not list((trained / "x").glob("attempt-*"))


def test_flags_that_differ_from_the_checkpoints_are_named(trained):
    checkpoint = load(trained)
    del checkpoint["flags"]["entropy_cost"]  # It is of before there was such a flag.
    torch.save(checkpoint, trained / "x" / "model.tar")
    result = succeeds(*serial_run(trained, "--discounting", 0.5, *LOG, steps=440))
    (line,) = [x for x in result.stderr.splitlines() if "that differ" in x]
    assert "--discounting 0.5 (before: --discounting 0.99), --entropy_cost" in line
    assert "(before: no such flag), --log_interval_steps" in line


def test_flags_that_only_another_program_has_are_not_named(trained):
    checkpoint = load(trained)
    checkpoint["flags"]["command"][0] = "polybeast"
    del checkpoint["flags"]["num_actors"]
    torch.save(checkpoint, trained / "x" / "model.tar")
    result = succeeds(*serial_run(trained, "--discounting", 0.5, steps=440))
    (line,) = [x for x in result.stderr.splitlines() if "that differ" in x]
    assert "--discounting 0.5 (before: --discounting 0.99)" in line
    assert "num_actors" not in line


def test_a_resumed_run_adds_its_columns_to_those_its_log_began_with(trained):
    path = trained / "x" / "logs.csv"
    path.write_text("step,total_loss,of_another_version\n400,1.5,7\n")
    succeeds(*serial_run(trained, *LOG, steps=480))
    first, *others = read_logs(trained / "x")
    assert {name: x for name, x in first.items() if x} == {
        "step": "400", "total_loss": "1.5", "of_another_version": "7",
    }  # fmt: skip
    assert list(first)[:3] == ["step", "total_loss", "of_another_version"]
    assert set(first) == {"of_another_version", *COLUMNS, *STATISTICS}
    assert [int(row["step"]) for row in others] == [440, 480]
    for row in others:
        assert float(row["total_loss"]) and row["grad_norm"]
        assert row["of_another_version"] == ""


def test_resumed_run_takes_the_learning_rate_of_its_own_command(trained):
    flags = ("--learning_rate", 1e-3, "--num_epochs", 1, *LOG)
    assert main(*serial_run(trained, *flags, steps=1000)).returncode == 0
    rates = [float(row["learning_rate"]) for row in read_logs(trained / "x")[1:]]
    expected = [  # Falling from 1e-3 over 1,000 steps of 40 an update, the 11th first.
        1e-3 * (1 - update * 40 / 1000) * (1 - 0.99 ** (update + 1)) ** 0.5
        for update in range(10, 25)
    ]
    assert rates == pytest.approx(expected)


def test_what_a_killed_save_left_is_removed(trained):
    half = trained / "x" / "replay.bin.tmp"
    half.write_bytes(b"half")
    succeeds(*serial_run(trained, *LOG, steps=440))
    assert not half.exists()


def test_finished_run_is_not_trained_further(trained):
    result = main(*serial_run(trained, steps=400))
    assert result.returncode == 0 and load(trained)["step"] == 400


def test_disable_checkpoint_writes_none_and_leaves_a_run_that_has_one_alone(trained):
    logs, flags = read_logs(trained / "x"), ("--disable_checkpoint", *LOG)
    line = refusal(*serial_run(trained, *flags, steps=80))
    assert "--xpid x has one, " in line and "use another --xpid" in line
    assert read_logs(trained / "x") == logs
    result = succeeds(*serial_run(trained, *flags, "--xpid", "other", steps=80))
    assert "to resume" not in result.stderr
    assert [int(row["step"]) for row in read_logs(trained / "other")] == [40, 80]
    assert not (trained / "other" / "model.tar").exists()


def test_a_checkpoint_is_written_at_intervals_and_always_a_whole_one(savedir):
    steps, done = set(), threading.Event()

    def read():
        while not done.is_set():
            if (savedir / "x" / "model.tar").exists():
                steps.add(load(savedir)["step"])

    thread = threading.Thread(target=read)
    thread.start()
    try:
        flags = ("--checkpoint_interval_seconds", 1e-9)
        assert main(*serial_run(savedir, *flags, steps=2000)).returncode == 0
    finally:
        done.set()
        thread.join()
    assert len(steps) >= 2 and all(step % 40 == 0 for step in steps)


@pytest.mark.parametrize("flags", [(), ("--disable_checkpoint",)])
def test_logs_of_an_attempt_without_checkpoint_are_kept_aside(savedir, flags):
    flags = (*flags, *LOG, *SERIAL)
    for _ in range(2):
        result = succeeds(*small_run(savedir, *flags, steps=200))
        (savedir / "x" / "model.tar").unlink(missing_ok=True)
    assert "this run was begun before, and goes on from no checkpoint" in result.stderr
    for path in (savedir / "x", savedir / "x" / "attempt-1"):
        assert [int(row["step"]) for row in read_logs(path)] == [40, 80, 120, 160, 200]
        assert len(list(path.glob("events.out.*"))) == 1
        assert json.loads((path / "meta.json").read_text())["first_step"] == 0


def test_the_newest_checkpoints_and_the_best_one_are_kept(savedir, monkeypatch):
    returns = iter([5.0] * 100 + [1.0] * 10**6)  # Better, then worse for ever.
    update = run_module.Run.update

    def update_with_returns(self, num_steps, statistics, episodes, *rest, **more):
        total = sum(next(returns) for _ in range(50))
        episodes = {**episodes, "episode_return": (total, 50)}
        update(self, num_steps, statistics, episodes, *rest, **more)

    monkeypatch.setattr(run_module.Run, "update", update_with_returns)
    flags = ("--checkpoint_interval_seconds", 1e-9, "--keep_checkpoints", 3)
    succeeds(*serial_run(savedir, *flags, steps=400))
    path = savedir / "x"
    assert load(savedir)["step"] == 400
    kept = sorted(p.name for p in path.glob("model-*.tar"))
    steps = [int(name[6:-4]) for name in kept]
    assert len(steps) == 2 and steps == sorted(steps) and steps[-1] < 400
    for step, name in zip(steps, kept):
        assert torch.load(path / name, weights_only=True)["step"] == step
    assert torch.load(path / "best.tar", weights_only=True)["step"] == 80
    test = ("--savedir", savedir, "--mode", "test", "--num_test_episodes", 1)
    result = main(*test, "--checkpoint", path / "best.tar")
    assert result.returncode == 0 and "best.tar: step 80" in result.stdout
    result = main(*test)
    assert result.returncode == 0 and "model.tar: step 400" in result.stdout
    found = json.loads((path / "test.json").read_text())
    assert [(x["checkpoint"], x["step"]) for x in found] == [
        ("best.tar", 80),
        ("model.tar", 400),
    ]


def test_a_test_takes_environment_and_agent_from_the_checkpoint(savedir):
    env = "tests.envs:torchbeast/CatchPixels-v0"
    flags = ("--net", "deep", "--use_lstm")
    assert main(*serial_run(savedir, *flags, env=env, steps=40)).returncode == 0
    result = succeeds("--savedir", savedir, "--mode", "test", "--num_test_episodes", 1)
    assert "episode 1: return" in result.stdout


def test_a_resumed_run_names_the_flags_that_differ_and_takes_them(trained):
    flags = ("--momentum", 0.9, "--epsilon", 1e-3)
    result = succeeds(*serial_run(trained, *flags, steps=480))
    [line] = [x for x in result.stderr.splitlines() if "differ from" in x]
    assert "--epsilon 0.001 (before: --epsilon 1e-05)" in line
    assert "--momentum 0.9 (before: --momentum 0.0)" in line
    [group] = load(trained)["agent"]["optimizer"]["param_groups"]
    assert (group["momentum"], group["eps"]) == (0.9, 1e-3)
    assert main(*serial_run(trained, *flags, steps=560)).returncode == 0


def test_what_is_somebody_elses_in_the_directories_of_a_run_stays(savedir):
    path = savedir / "x"
    path.mkdir(parents=True)
    latest, *files = savedir / "latest", path / "best.tar", path / "meta.json"
    for file in (latest, *files):
        file.write_text("not a run's")
    result = main(*serial_run(savedir, steps=40))
    assert result.returncode == 0
    assert "no link" in result.stderr
    for file in (latest, *(path / "attempt-1" / file.name for file in files)):
        assert file.read_text() == "not a run's"


def test_a_run_that_cannot_start_does_not_become_the_latest(trained):
    path = trained / "y" / "model.tar"
    path.parent.mkdir()
    path.write_text("no checkpoint")
    assert "not a checkpoint" in refusal(*serial_run(trained), "--xpid", "y")
    assert (trained / "latest").resolve() == trained / "x"


def test_names_that_begin_with_a_dash_are_in_the_printed_commands(savedir):
    result = succeeds(*small_run(savedir, *SERIAL, "--xpid=-foo", steps=40))
    words = shlex.split(result.stderr.splitlines()[-1].partition("test it: ")[2])
    succeeds(*words[3:], "--num_test_episodes", 1)


def test_an_optimizer_of_several_groups_resumes(savedir, monkeypatch):
    def make_optimizer(self):
        first, *others = self.net.parameters()
        groups = [{"params": [first], "alpha": 0.9}, {"params": others}]
        return torch.optim.RMSprop(groups, lr=1e-3)

    monkeypatch.setattr(polybeast.Agent, "make_optimizer", make_optimizer)
    for steps in (80, 160):
        succeeds(*serial_run(savedir, steps=steps))
    groups = load(savedir)["agent"]["optimizer"]["param_groups"]
    assert [group["alpha"] for group in groups] == [0.9, 0.99]


def test_tensorboard_shows_the_rows_of_logs_csv_after_a_resumption(tmp_path):
    (tmp_path / "logs.csv").touch()
    for resumed_at, steps in ((0, (10, 20, 30)), (20, (40, 50))):
        writer = LogWriter(tmp_path, resumed_at, [])
        for step in steps:
            writer.write({"step": step, "loss": 1.0})
        writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    steps = [int(row["step"]) for row in read_logs(tmp_path)]
    assert [x.step for x in events.Scalars("loss")] == steps == [10, 20, 40, 50]


def test_a_rank_that_is_lost_while_a_row_is_written_costs_no_row(tmp_path, monkeypatch):
    def lose(x):
        monkeypatch.undo()  # As all_gather() then gives this rank's alone.
        raise Stop("another rank is gone")

    args = ["--savedir", str(tmp_path), "--xpid", "x", "--log_interval_steps", "40"]
    flags = monobeast.program_parser().parse_args(args)
    flags.command = ["monobeast", *args]
    run = Run(flags)
    run.open()
    run.start()
    update = dict(num_steps=40, statistics={"loss": 1.0}, policy_lag=0)
    update["episodes"] = {"episode_return": (0.0, 0)}
    run.update(**update)
    monkeypatch.setattr(ranks.current, "all_gather", lose)
    with pytest.raises(Stop, match="another rank is gone"):
        run.update(**update)
    run.save(torch.nn.Linear(1, 1))
    run.close()
    assert [row["step"] for row in read_logs(tmp_path / "x")] == ["40", "80"]
    assert load(tmp_path)["step"] == 80


def test_the_first_row_after_a_resumption_has_all_episodes_since_the_row_before(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("torchbeast.checkpoint.load_agent_state", lambda *_: None)
    args = ["--savedir", str(tmp_path), "--xpid", "x", "--log_interval_steps", "40"]
    flags = monobeast.program_parser().parse_args(args)
    flags.command = ["monobeast", *args]
    net = torch.nn.Linear(1, 1)
    for returns in ([1.0, 2.0, 4.0], [9.0]):  # The third one is in no row yet.
        run = Run(flags)
        run.open()
        run.restore(net)
        run.start()
        for x in returns:
            episodes = {"episode_return": (x, 1)}
            run.update(20, {"loss": x}, episodes, policy_lag=0)
            if x == 4:
                run.add_evaluation({"eval_return": 7.0})
        run.save(net)
        run.close()
    first, second = read_logs(tmp_path / "x")
    assert (first["episodes"], first["episode_return"]) == ("2", "1.5")
    assert (second["step"], second["episodes"]) == ("80", "2")
    assert second["episode_return"] == second["loss"] == "6.5"
    assert second["eval_return"] == "7.0"
