"""What the user sees of a run that trains, or of several."""

import contextlib
import datetime
import logging
import math
import sys
import time
from collections import Counter, deque

from torchbeast.messages import log


class Display:
    """Shows one live line on a terminal, or logs a line every few seconds in a pipe."""

    INTERVAL_S = 5

    def __init__(self, run):
        self.run = run
        self._live = None
        self._line_at = -math.inf
        self._recent = deque(maxlen=20)  # From the first update on: a start takes time.
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
        parts = [f"step {run.step:,} of {run.flags.total_steps:,}"]
        if t1 > t0:
            sps, agents = (s1 - s0) / (t1 - t0), run.num_agents
            left = max(0, run.flags.total_steps - run.step)
            seconds = left / sps if sps else math.inf
            eta = datetime.timedelta(seconds=int(seconds)) if seconds < 1e9 else "?"
            speed = f"{sps:,.0f} steps/s"
            if agents > 1:
                speed = f"{sps:,.0f} agent steps/s, {sps / agents:,.0f} env steps/s"
            parts += [speed, f"ETA {eta}"]
        mean = f"{sum(run.returns) / len(run.returns):.1f}" if run.returns else "-"
        name, x = run.shown
        return "  ".join([*parts, f"return {mean}", f"{name} {x:.3g}"])

    def close(self):
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None
            self._move_log_lines()


class Table:
    """Shows runs in one table on a terminal, or logs a line at each change elsewhere.

    runs: objects with name, flags, state, step, mean_return and note, and with look(),
    which brings step and mean_return up to date.
    """

    INTERVAL_S = 1
    STATES = (
        "runs",
        "ends",
        "failed",
        "stopped",
        "ended",
        "pruned",
        "complete",
        "waits",
    )

    def __init__(self, runs):
        self.runs = runs
        self._live = None
        self._shown = dict.fromkeys(runs, "waits")  # State of each.
        self._updated_at = -math.inf

    def __enter__(self):
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            # Without a thread, because this process forks.
            self._live = Live(console=Console(stderr=True), auto_refresh=False)
            self._live.start()
        self.update()
        return self

    def update(self):
        changed = [run for run in self.runs if run.state != self._shown[run]]
        self._shown.update((run, run.state) for run in changed)
        now = time.monotonic()
        if not self._live:
            for run in changed:
                log.info("%s", self._line(run))
        elif changed or now - self._updated_at > self.INTERVAL_S:
            self._updated_at = now
            for run in self.runs:
                if run.state in ("runs", "ends"):
                    run.look()
            self._show(max(1, self._live.console.height - 5))

    def _line(self, run):
        texts = [f"{run.name}: {run.state}, step {run.step:,}"]
        if run.mean_return is not None:
            texts.append(f"return {run.mean_return:.2f}")
        return "; ".join([*texts, *filter(None, [run.note])])

    def _show(self, height=None):
        """Shows all runs; or at most height of them, the running ones first, in a line
        each."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD)
        for name in ("run", "state", "step", "of", "return"):
            right = name in ("step", "of", "return")
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        table.add_column(no_wrap=height is not None)
        runs = self.runs
        if height is not None and len(runs) > height:
            runs = sorted(runs, key=lambda run: self.STATES.index(run.state))[:height]
            table.caption = f"and {len(self.runs) - height} more"
        for run in runs:
            mean = "" if run.mean_return is None else f"{run.mean_return:.2f}"
            total = f"{run.flags.total_steps:,}"
            texts = run.name, run.state, f"{run.step:,}", total, mean, run.note
            table.add_row(*map(Text, texts))
        with contextlib.suppress(OSError):  # The terminal is closed.
            self._live.update(table, refresh=True)

    def __exit__(self, *_):
        if self._live:
            self._show()
            with contextlib.suppress(OSError):
                self._live.stop()
        counts = Counter(run.state for run in self.runs)
        texts = [f"{counts[state]} {state}" for state in self.STATES if counts[state]]
        log.info("%d runs: %s", len(self.runs), ", ".join(texts))
