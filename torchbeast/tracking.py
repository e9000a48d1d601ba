"""Experiment trackers: --track wandb mlflow my_tracker.

A tracker is a class with four methods: see Tracker. Each tracker of a run has a process
of its own, of low priority, which gets what to call through a pipe. So a tracker that
is slow, fails or hangs does not hold training up; at the end of the run it has
FINISH_S.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import NamedTuple

from torchbeast import logs
from torchbeast.flags import import_module
from torchbeast.messages import BadInput, log
from torchbeast.process import kill_group, start_python

FINISH_S = 30  # From the end of training to the end of a tracker.
MAX_CALLS = 10_000  # That wait for a tracker. Calls beyond are dropped.


class TrackedRun(NamedTuple):
    id: str  # Stays the same when the run is resumed, and for its tests.
    name: str  # --xpid
    path: pathlib.Path  # The run's directory.
    config: dict  # The flags, {name: JSON}.
    step: int  # At which this session begins.


class Tracker:
    """Does nothing. A module for --track has a class of this name, with these methods;
    what they print goes to track-NAME.log in the run's directory."""

    package = None  # What the tracker imports in start(): pip install PACKAGE.

    def start(self, run): ...  # A TrackedRun. To be resumed if its id is known.

    def log(self, row): ...  # A line of logs.csv, {column: number}, with its "step".

    def video(self, path, step): ...  # By --mode test --video; step: the checkpoint's.

    def finish(self, exit_code): ...  # The program's: 0 if training is complete.


class Wandb(Tracker):
    package = "wandb"

    def start(self, run):
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "torchbeast"),
            id=run.id,
            name=run.name,
            config=run.config,
            dir=run.path,
            resume="allow",
            settings=wandb.Settings(console="off", disable_git=True),
        )

    def log(self, row):
        self._run.log(row, step=int(row["step"]))

    def video(self, path, step):
        step = max(step, self._run.step)  # W&B drops what is of a step before its last.
        video = self._wandb.Video(path, format="mp4")
        self._run.log({"video": video}, step=step)

    def finish(self, exit_code):
        self._run.finish(exit_code=exit_code)


class Mlflow(Tracker):
    """Writes to files in <savedir>/mlruns, or where MLFLOW_TRACKING_URI says."""

    package = "mlflow"

    def start(self, run):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault(
            "MLFLOW_TRACKING_URI", f"{run.path.parent.as_uri()}/mlruns"
        )
        import mlflow

        self._entities = mlflow.entities
        self._client = client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "torchbeast")
        experiment = client.get_experiment_by_name(name)
        number = (
            experiment.experiment_id if experiment else client.create_experiment(name)
        )
        found = client.search_runs([number], f"tags.torchbeast_id = '{run.id}'")
        if not found:
            tags = {"torchbeast_id": run.id}
            found = [client.create_run(number, tags=tags, run_name=run.name)]
        self._id = found[0].info.run_id
        client.update_run(self._id, "RUNNING")
        for name, x in run.config.items():
            if name not in found[0].data.params:  # They cannot be changed.
                client.log_param(self._id, name, str(x)[:500])

    def log(self, row):
        now, step = int(1000 * time.time()), int(row["step"])
        names = (re.sub(r"[^\w/. :-]", "-", name) for name in row)  # It takes these.
        pairs = zip(names, row.values())
        metrics = [self._entities.Metric(k, x, now, step) for k, x in pairs]
        self._client.log_batch(self._id, metrics)

    def video(self, path, step):
        self._client.log_artifact(self._id, path, f"video-{step}")

    def finish(self, exit_code):
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")


TRACKERS = {"wandb": Wandb, "mlflow": Mlflow}


def find(name):
    """Returns the tracker's class. Raises BadInput if it or its package is missing."""
    expected = "expected wandb, mlflow, or a module with a class Tracker"
    tracker = TRACKERS.get(name)
    try:
        tracker = tracker or getattr(import_module(name), "Tracker", None)
    except BadInput as e:
        raise BadInput(f"--track {name}: {e}; {expected}") from e
    if tracker is None:
        raise BadInput(f"--track {name}: it has no class Tracker; {expected}")
    package = getattr(tracker, "package", None)
    # W&B's users have a directory wandb here, which is no package.
    spec = package and importlib.util.find_spec(package)
    if package and (spec is None or spec.origin is None):
        raise BadInput(f"--track {name} needs: pip install {package}")
    return tracker


class Trackers:
    """All trackers of a run. Only finish() waits for them. Raises OSError if the run's
    directory cannot be written to."""

    def __init__(self, names, path, step):
        names = dict.fromkeys(names or ())
        meta = {}
        with contextlib.suppress(OSError, ValueError):  # There may be none.
            meta = json.loads((path / "meta.json").read_text())
        config = meta.get("flags", {})
        name = config.get("xpid", path.name)
        run = TrackedRun(meta.get("id", name), name, path, config, step)
        self._processes = [_Process(name, path) for name in names]
        self.call("start", run)

    def call(self, method, *args):
        """Has all trackers call this method of theirs."""
        for process in self._processes:
            process.call(method, *args)

    def finish(self, exit_code):
        self.call("finish", exit_code)
        deadline = time.monotonic() + FINISH_S
        for process in self._processes:
            process.join(deadline)


class _Process:
    """The learner's side of a tracker's process."""

    def __init__(self, name, path):
        self.name, self.output = name, path / f"track-{name}.log"
        self._queue = queue.SimpleQueue()
        self._told = False  # That something is wrong.
        with open(self.output, "a") as output:
            self._process, self._connection = start_python(
                __name__, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the learner's.
            )  # fmt: skip
        self._queue.put(name)
        self._thread = threading.Thread(target=self._send, name=name, daemon=True)
        self._thread.start()

    def call(self, method, *args):
        if self._queue.qsize() >= MAX_CALLS and method != "finish":
            self._warn(f"is {MAX_CALLS} lines late, and gets no more")
        else:
            self._queue.put((method, *args))

    def _send(self):
        with contextlib.suppress(OSError):  # The process has ended.
            while (call := self._queue.get())[0] != "finish":
                self._connection.send(call)
            self._connection.send(call)
        failed = self._process.wait() != 0
        # Not later: the number of its process group may be another's by then.
        kill_group(self._process)  # And what it has started.
        if failed:
            self._warn(f"ends: {logs.last_line(self.output, str.strip).strip()[:300]}")

    def join(self, deadline):
        self._thread.join(max(0, deadline - time.monotonic()))
        if self._thread.is_alive():
            what = f"did not finish within {FINISH_S} s, and was killed"
            self._warn(f"{what}: the newest lines may be missing")
            kill_group(self._process)
            self._process.wait()  # Not the thread: who holds the pipe may go on.

    def _warn(self, what):
        if not self._told:
            self._told = True
            log.warning("--track %s %s; %s", self.name, what, self.output)


def main(parent):
    """Is a tracker's process. Does not outlive the learner by more than FINISH_S."""

    learner = os.getppid()

    def follow():
        while os.getppid() == learner:
            time.sleep(1)
        time.sleep(FINISH_S)
        os.killpg(os.getpid(), signal.SIGKILL)

    def calls():
        with contextlib.suppress(EOFError):
            while True:
                yield parent.recv()
        yield "finish", 1  # The learner was killed.

    threading.Thread(target=follow, daemon=True).start()
    os.nice(5)  # Not more: on busy cores it would not finish in time.
    try:
        tracker = find(parent.recv())()
        for method, *args in calls():
            getattr(tracker, method)(*args)
            if method == "finish":
                return
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # Without exit handlers, which may print, or hang.
