"""What a run writes while it trains: logs.csv, and the same for TensorBoard and
--track. torchbeast/logs.py reads it.
"""

import csv
import io
import math

from torchbeast import logs
from torchbeast.files import write_atomically
from torchbeast.messages import log
from torchbeast.tracking import Trackers

MAX_COLUMNS = 1000
# What a row has. Beside these columns: the agent's statistics, means over the updates
# since the line before; and episode/NAME for each NAME in the environment's
# info["episode_metrics"], means over the episodes that have it; and eval_rating, of
# self-play (torchbeast/ratings.py).
COLUMNS = {
    "step": "agent steps learned from (T * B an update)",
    "frames": "frames of the game: step times the environment's frame skip",
    "seconds": "seconds of training so far, earlier sessions of the run included",
    "sps": "steps per second since the line before",
    "updates": "batches learned from so far",
    "episodes": "reported episodes that ended since the line before",
    "episode_return": "mean return of these episodes, unclipped; empty without one",
    "episode_step": "mean length of these episodes in agent steps",
    "training_episode_return": "mean return of the training episodes that ended; on "
    "Atari each life is one",
    "eval_return": "mean return of episodes beside training (--eval_interval_steps)",
    "eval_step": "step of the weights that played; the mean, if two ended",
    "padding": "share of steps in batches that are none (--one_episode_rollouts); "
    "step and sps count them",
    "policy_lag": "updates between the weights a rollout began with and those it is "
    "learned by, mean",
    "environment_wait": "share of the time of a stream (PolyBeast) or an actor "
    "(MonoBeast) in which environments stepped, or messages were on their way",
    "inference_queue": "share in which the stream waited for an inference thread",
    "inference": "share in which the network was evaluated",
    "rollout_queue": "share in which the stream or actor waited for the learner",
    "learner_wait": "share of the learner's time in which it waited for a batch",
    "vote": "share in which it waited for the other learners",
    "update": "share in which it learned",
    "reduction": "share in which gradients were summed over the learners (NCCL: in "
    "which that was launched)",
    "rss_mb": "resident memory of the learner process, MiB; of several, of the first",
}


class LogWriter:
    """Writes rows, {name: number or None}, to a run's logs.csv, to TensorBoard and to
    trackers, names of --track.

    path: the run's directory. step: of the run, which may be resumed; what was logged
    after it is cut off. All methods raise OSError, except for close().
    """

    def __init__(self, path, step, trackers):
        from torch.utils.tensorboard import SummaryWriter  # Slow to import.

        self._path = path / "logs.csv"
        self._csv = None
        self._full = False  # There are MAX_COLUMNS.
        self._open(step)
        # (TensorBoard hides the steps from purge_step on.)
        self._tensorboard = SummaryWriter(path, purge_step=step + 1)
        self._trackers = Trackers(trackers, path, step)

    def _open(self, step=math.inf, new_columns=()):
        if self._csv is not None:
            self._csv.close()
        columns = cut_log(self._path, step, new_columns)
        self._csv = open(self._path, "a", newline="", buffering=1)
        self._writer = csv.DictWriter(self._csv, columns)

    def write(self, row):
        """Writes a row, which has a `step`. Adds columns that are new."""
        if new := [name for name in row if name not in self._writer.fieldnames]:
            row = self._add_columns(new, row)
        self._writer.writerow(row)
        row = {name: x for name, x in row.items() if x is not None}
        self._trackers.call("log", row)
        for name, x in row.items():
            if name != "step":
                self._tensorboard.add_scalar(name, x, row["step"])

    def _add_columns(self, new, row):
        """Returns the row without those columns that are too many."""
        free = max(0, MAX_COLUMNS - len(self._writer.fieldnames))
        if len(new) > free and not self._full:
            self._full = True
            log.warning("%d columns are logged: %s is not", MAX_COLUMNS, new[free])
        if free > 0:
            self._open(new_columns=new[:free])
        return {name: x for name, x in row.items() if name in self._writer.fieldnames}

    def close(self, exit_code=0):
        """Closes the files, whatever state the disk is in, and ends the trackers."""
        for file in (self._tensorboard, self._csv):
            try:
                file.close()
            except OSError as e:
                log.error("%s: %s", self._path.parent, e.strerror)
        self._trackers.finish(exit_code)


def cut_log(path, step, new_columns):
    """Cuts logs.csv back to the whole rows up to a step, and adds columns that are
    empty in these rows. Returns the columns.

    Rows after that step are of a run that was killed: their updates are made again.
    """
    with open(path, newline="", errors="replace") as f:
        reader = logs.reader(f)
        columns = list(reader.fieldnames or ())
        rows = [
            row
            for row in reader
            if None not in row.values()
            and row.get("step", "").isdecimal()
            and int(row["step"]) <= step
        ]
    if "step" not in columns:
        if path.stat().st_size > 0:
            aside = path.with_name(f"{path.name}.damaged")
            path.replace(aside)
            log.warning("%s has no column step: %s from now on", path, aside.name)
        columns, rows = [], []
    columns += new_columns
    text = io.StringIO(newline="")
    if columns:
        writer = csv.DictWriter(text, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())
    return columns
