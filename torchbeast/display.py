"""What the user sees of a run that trains."""

import contextlib
import datetime
import logging
import math
import sys
import time
from collections import deque

from torchbeast.process import log


class Display:
    """Shows one live line on a terminal, or logs a line every few seconds in a pipe."""

    INTERVAL_S = 5

    def __init__(self, run):
        self.run = run
        self._live = None
        self._line_at = time.monotonic()
        self._recent = deque([(self._line_at, run.step)], maxlen=20)
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._live = Progress(
                BarColumn(bar_width=20),
                TextColumn("{task.fields[text]}"),
                console=Console(stderr=True),
            )
            self._task = self._live.add_task(
                "", total=run.flags.total_steps, completed=run.step, text="starting"
            )
            self._live.start()
            self._move_log_lines()

    def _move_log_lines(self):
        """Has log lines go to sys.stderr, which rich replaces in order to print them
        above the live line."""
        for handler in log.handlers:
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)

    def update(self):
        now = time.monotonic()
        if now - self._line_at < (0.5 if self._live else self.INTERVAL_S):
            return
        self._line_at = now
        self._recent.append((now, self.run.step))
        if self._live:
            with contextlib.suppress(OSError):  # The terminal is closed.
                self._live.update(self._task, completed=self.run.step, text=self.text())
        else:
            log.info("%s", self.text())

    def text(self):
        run = self.run
        (t0, s0), (t1, s1) = self._recent[0], self._recent[-1]
        sps = (s1 - s0) / (t1 - t0) if t1 > t0 else 0.0
        left = run.flags.total_steps - run.step
        seconds = left / sps if sps else math.inf
        eta = datetime.timedelta(seconds=int(seconds)) if seconds < 1e9 else "?"
        mean = f"{sum(run.returns) / len(run.returns):.1f}" if run.returns else "-"
        return (
            f"step {run.step:,} of {run.flags.total_steps:,}  {sps:,.0f} steps/s  "
            f"ETA {eta}  return {mean}  loss {run.loss:.3g}"
        )

    def close(self):
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None
            self._move_log_lines()
