"""torchbeast.tracking: trackers in processes of their own."""

import json
import os
import pathlib
import re
import sqlite3
import struct
import subprocess
import sys
import time
import types

import pytest

import monobeast
from tests import programs
from tests.programs import ROOT, SERIAL, args, main, read_logs, refusal, succeeds
from torchbeast import tracking
from torchbeast.messages import BadInput, log
from torchbeast.run import Run

# Notes each call in a file.
NOTES = """
import time
class Tracker:
    def start(self, run):
        self.file = open(run.path / "notes", "a", buffering=1)
        self.write("start", run.name, run.step)
    def log(self, row):
        self.write("log", row["step"])
        if row["step"] == 13:
            raise OSError("the disk\\nof the tracker is full")
        if row["step"] == 99:
            self.write("hangs")
            time.sleep(300)
    def finish(self, exit_code):
        self.write("finish", exit_code)
    def write(self, *words):
        print(*words, file=self.file)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Where modules of the user's are looked for."""
    path = tmp_path / "modules"
    path.mkdir()
    (path / "notes_tracker.py").write_text(NOTES)
    monkeypatch.syspath_prepend(path)
    yield path
    sys.modules.pop("notes_tracker", None)


@pytest.fixture
def lines(monkeypatch, caplog):
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    return lambda: [record.getMessage() for record in caplog.records]


def tracked(path, *steps, exit_code=0):
    trackers = tracking.Trackers(["notes_tracker"], path, 7)
    for step in steps:
        trackers.call("log", {"step": step})
    trackers.finish(exit_code)
    return notes(path)


def notes(path):
    return (path / "notes").read_text().splitlines()


def flags(savedir, *others, steps=400):
    intervals = "--log_interval_steps", 40
    return args("monobeast", savedir, *SERIAL, *intervals, *others, steps=steps)


def test_a_tracker_gets_every_call_in_order(tmp_path, lines):
    expected = [f"start {tmp_path.name} 7", "log 1", "log 2", "finish 5"]
    assert tracked(tmp_path, 1, 2, exit_code=5) == expected
    assert lines() == []


def test_a_tracker_that_fails_is_one_warning(tmp_path, lines):
    assert tracked(tmp_path, 1, 13, 2)[-1] == "log 13"
    path = tmp_path / "track-notes_tracker.log"
    expected = f"of the tracker is full; {path}"
    assert lines() == [f"--track notes_tracker ends: {expected}"]
    assert "OSError: the disk" in path.read_text()


def test_what_a_tracker_started_is_killed_when_it_ends_and_nobody_later(
    tmp_path, lines, monkeypatch
):
    killed = []
    monkeypatch.setattr(tracking, "kill_group", killed.append)
    trackers = tracking.Trackers(["notes_tracker"], tmp_path, 7)
    trackers.call("log", {"step": 13})  # It raises.
    [process] = trackers._processes
    while process._thread.is_alive():
        trackers.call("log", {"step": 14})
        time.sleep(0.05)
    assert killed == [process._process]
    trackers.finish(0)
    assert len(killed) == 1


def test_a_tracker_that_hangs_is_killed_after_a_while(tmp_path, lines, monkeypatch):
    monkeypatch.setattr(tracking, "FINISH_S", 1)
    assert tracked(tmp_path, 99, 100)[-1] in ("log 99", "hangs")
    [line] = lines()
    assert "did not finish within 1 s, and was killed" in line


def test_who_logs_never_waits_for_a_tracker(tmp_path, lines, monkeypatch):
    monkeypatch.setattr(tracking, "FINISH_S", 0)
    monkeypatch.setattr(tracking, "MAX_CALLS", 1000)
    row = {"step": 99, **{f"column{i}": 0.5 for i in range(50)}}
    trackers = tracking.Trackers(["notes_tracker"], tmp_path, 0)
    for _ in range(5000):  # More than the queue and the pipe hold.
        trackers.call("log", row)
    trackers.finish(0)
    [line] = lines()
    assert "notes_tracker is 1000 lines late, and gets no more" in line


def test_a_tracker_that_is_late_finishes_if_it_has_the_time(
    tmp_path, modules, lines, monkeypatch
):
    waits = "while not (run.path / 'go').exists(): time.sleep(0.01)"
    text = NOTES.replace(
        "def start(self, run):", f"def start(self, run):\n        {waits}"
    )
    (modules / "notes_tracker.py").write_text(text)
    monkeypatch.setattr(tracking, "MAX_CALLS", 1000)
    row = {"step": 1, **{f"column{i}": 0.5 for i in range(50)}}
    trackers = tracking.Trackers(["notes_tracker"], tmp_path, 0)
    for _ in range(3000):  # More than the queue and the pipe hold.
        trackers.call("log", row)
    trackers.call("finish", 0)
    (tmp_path / "go").touch()
    [process] = trackers._processes
    process.join(time.monotonic() + 60)
    assert notes(tmp_path)[-1] == "finish 0"
    [line] = lines()
    assert "notes_tracker is 1000 lines late, and gets no more" in line


def test_mlflow_gets_names_that_it_takes():
    tracker, found = tracking.Mlflow(), []
    tracker._entities = types.SimpleNamespace(Metric=lambda name, *_: name)
    tracker._client = types.SimpleNamespace(
        log_batch=lambda _, names: found.extend(names)
    )
    tracker._id = "1"
    tracker.log({"step": 1, "episode/hit(%)": 0.5, "a.b-c: d": 2})
    assert found == ["step", "episode/hit---", "a.b-c: d"]


def test_a_tracker_finishes_when_the_learner_is_killed(tmp_path, modules):
    code = f"""import os, pathlib, sys
sys.path[:0] = {[str(modules), str(ROOT)]}
from torchbeast import tracking
path = pathlib.Path({str(tmp_path)!r})
trackers = tracking.Trackers(["notes_tracker"], path, 0)
trackers.call("log", {{"step": 1}})
while "log 1" not in (path / "notes").read_text() if (path / "notes").exists() else 1:
    pass
os._exit(9)"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    deadline = time.monotonic() + 60
    while notes(tmp_path)[-1] != "finish 1":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_such_tracker",
            "No module named 'no_such_tracker'; expected wandb, mlflow",
        ),
        (".x", "--track .x: .*; expected wandb, mlflow, or a module"),
        ("torchbeast.logs", "it has no class Tracker; expected wandb"),
        ("needs", "--track needs needs: pip install no_such_package"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused_by_its_name(name, message, modules):
    text = "class Tracker:\n    package = 'no_such_package'\n"
    (modules / "needs.py").write_text(text)
    with pytest.raises(BadInput, match=message):
        tracking.find(name)


def test_what_a_trackers_module_raises_is_its_own(modules):
    (modules / "faulty.py").write_text("int.no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        tracking.find("faulty")


def test_a_directory_of_a_packages_name_is_no_package(modules):
    (modules / "no_such_package").mkdir()  # W&B makes one.
    (modules / "needs.py").write_text("class Tracker:\n    package='no_such_package'")
    with pytest.raises(BadInput, match="pip install no_such_package"):
        tracking.find("needs")


def test_a_bad_name_is_one_line_before_anything_starts(savedir):
    line = refusal(*flags(savedir, "--track", "no_such_tracker"))
    assert line.startswith("monobeast: error: --track no_such_tracker: No module")
    assert not savedir.exists()


def documented():
    """The tracker in docs/experiments.md."""
    text = (ROOT / "docs/experiments.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    [code] = [block for block in blocks if "class Tracker" in block]
    return code


def test_the_tracker_in_the_document_has_a_run_its_resumption_and_its_video(
    savedir, modules
):
    (modules / "runs_db.py").write_text(documented())
    track = "--track", "runs_db"
    for steps in (400, 800):
        succeeds(*flags(savedir, *track, steps=steps))
        assert (savedir / "x/track-runs_db.log").read_text() == ""
    video = "--num_test_episodes", 1, "--video", savedir / "a.mp4"
    succeeds(*flags(savedir, *track, "--mode", "test", *video))
    db = sqlite3.connect(savedir / "runs.db")
    [(number, name, config)] = db.execute("select * from runs").fetchall()
    meta = json.loads((savedir / "x/meta.json").read_text())
    assert (number, name) == (meta["id"], "x")
    assert json.loads(config) == meta["flags"]
    found = db.execute("select * from rows order by rowid").fetchall()
    assert found[-1] == (number, 800, "video", str(savedir / "a.mp4"))
    expected = [
        (number, int(row["step"]), name, float(x))
        for row in read_logs(savedir / "x")
        for name, x in row.items()
        if x != ""
    ]
    assert sorted(found[:-2]) == sorted(expected)


def test_a_run_that_begins_anew_has_another_id(tmp_path):
    argv = ["--savedir", str(tmp_path), "--xpid", "x"]
    flags = monobeast.program_parser().parse_args(argv)
    flags.command = ["monobeast", *argv]
    ids = []
    for step in (0, 80, 0):
        run = Run(flags)
        run.open()
        run.step, run._saved_step = step, step or None  # As a checkpoint sets them.
        run.start()
        run.close()
        ids.append(json.loads((tmp_path / "x/meta.json").read_text())["id"])
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.long
def test_of_several_learners_the_first_one_tracks(savedir, modules):
    env = {**os.environ, "PYTHONPATH": f"{modules}"}
    track = flags(savedir, "--track", "notes_tracker")
    result = programs.run(*track, ranks=2, env=env)
    assert result.returncode == 0, result.stderr
    steps = [f"log {row['step']}" for row in read_logs(savedir / "x")]
    assert notes(savedir / "x") == ["start x 0", *steps, "finish 0"]


# The packages themselves.


def wandb_records(path):
    """The records of a file of W&B's offline mode: blocks of 32 KiB with parts, each
    with a checksum, a length, and whether it is a whole record, or the last part."""
    from wandb.proto.wandb_internal_pb2 import Record

    [data] = [p.read_bytes() for p in path.glob("*.wandb")]
    i, parts = 7, b""  # After the file's own header.
    while i + 7 <= len(data):
        if 32768 - i % 32768 < 7:
            i += 32768 - i % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[i : i + 7])
        parts += data[i + 7 : i + 7 + length]
        i += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def wandb_session(path):
    """The runs, [{name: number}] of the history, and exit codes of a session."""
    records = list(wandb_records(path))
    runs = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    rows = [
        {
            ".".join(x.nested_key) or x.key: json.loads(x.value_json)
            for x in r.history.item
        }
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    exits = [r.exit.exit_code for r in records if r.HasField("exit")]
    return runs[0], rows, exits


@pytest.mark.slow
def test_wandb_has_config_columns_resumption_and_video(savedir, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    track = "--track", "wandb"
    for steps in (400, 800):
        succeeds(*flags(savedir, *track, steps=steps))
    video = "--num_test_episodes", 1, "--video", savedir / "a.mp4"
    assert main(*flags(savedir, *track, "--mode", "test", *video)).returncode == 0
    meta = json.loads((savedir / "x/meta.json").read_text())
    paths = sorted((savedir / "x/wandb").glob("offline-run-*"), key=os.path.getctime)
    sessions = [wandb_session(path) for path in sorted(paths)]
    assert len(sessions) == 3
    found = []
    for session, rows, exits in sessions:
        assert (session.run_id, session.display_name) == (meta["id"], "x")
        assert session.project == "torchbeast"
        config = {x.key: json.loads(x.value_json) for x in session.config.update}
        assert config.items() >= {"env": "CartPole-v1", "batch_size": 2}.items()
        assert exits == [0]
        found += rows
    assert found[-1]["_step"] == 800
    videos = [p for path in paths for p in (path / "files/media/videos").glob("*")]
    assert [p.read_bytes() for p in videos] == [(savedir / "a.mp4").read_bytes()]
    expected = [
        {name: float(x) for name, x in row.items() if x != ""}
        for row in read_logs(savedir / "x")
    ]
    own = ("_step", "_runtime", "_timestamp")
    assert [row["_step"] for row in found[:-1]] == [row["step"] for row in found[:-1]]
    rows = [{k: x for k, x in row.items() if k not in own} for row in found[:-1]]
    assert rows == expected


@pytest.mark.slow
def test_a_run_ends_normally_when_wandb_cannot_be_reached(savedir, monkeypatch):
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(savedir))  # There is no .netrc.
    result = succeeds(*flags(savedir, "--track", "wandb"))
    [line] = [x for x in result.stderr.splitlines() if "--track wandb ends" in x]
    assert "UsageError: No API key configured" in line
    # Nobody answers there, and W&B tries again and again.
    monkeypatch.setattr(tracking, "FINISH_S", 5)
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    result = succeeds(*flags(savedir, "--track", "wandb", steps=800))
    [line] = [
        x for x in result.stderr.splitlines() if "--track wandb " in x and "; " in x
    ]
    assert "did not finish within 5 s" in line


@pytest.mark.long
def test_mlflow_has_config_columns_resumption_and_video(savedir, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    track = "--track", "mlflow"
    for steps in (400, 800):
        succeeds(*flags(savedir, *track, steps=steps))
    video = "--num_test_episodes", 1, "--video", savedir / "a.mp4"
    assert main(*flags(savedir, *track, "--mode", "test", *video)).returncode == 0
    client = mlflow.MlflowClient(f"{savedir.as_uri()}/mlruns")
    number = client.get_experiment_by_name("torchbeast").experiment_id
    [found] = client.search_runs([number])
    meta = json.loads((savedir / "x/meta.json").read_text())
    assert found.data.tags["torchbeast_id"] == meta["id"]
    assert (found.info.run_name, found.info.status) == ("x", "FINISHED")
    assert found.data.params["env"] == "CartPole-v1"
    [folder] = client.list_artifacts(found.info.run_id)
    [artifact] = client.list_artifacts(found.info.run_id, folder.path)
    path = pathlib.Path(client.download_artifacts(found.info.run_id, artifact.path))
    assert path.read_bytes() == (savedir / "a.mp4").read_bytes()
    rows = read_logs(savedir / "x")
    for name in rows[0]:
        history = client.get_metric_history(found.info.run_id, name)
        expected = [(int(r["step"]), float(r[name])) for r in rows if r[name] != ""]
        assert [(x.step, x.value) for x in history] == expected
