"""Progress of a benchmark run."""

from __future__ import annotations

import time

from planner.bench.task import TaskResult
from planner.cli.progress import PROGRESS

KNOWN = 0.1
"""Fraction of rows after which the remaining time is estimated."""


class BenchProgress:
    """Finished rows and estimated remaining time.

    Parameters
    ----------
    total
        Rows to run.
    resumed
        Rows that exist already.
    """

    def __init__(self, total: int, resumed: int) -> None:
        self._total, self._resumed, self._done = total, resumed, 0
        self._began = time.perf_counter()
        PROGRESS.start(f"{total} rows to come")

    def step(self, done: TaskResult) -> None:
        """Count a finished row."""
        self._done += 1
        spent_s = time.perf_counter() - self._began
        left_s = spent_s / self._done * (self._total - self._done)
        resumed = f"{self._resumed} kept, " if self._resumed else ""
        # the first rows include compilation
        is_estimated = self._done >= KNOWN * self._total
        estimate = f", about {left_s / 60:.0f} min left" if is_estimated else ""
        PROGRESS.show(
            f"{resumed}{self._done}/{self._total} rows{estimate}; {done.row.instance}, "
            f"{done.row.method}"
        )

    def end(self) -> None:
        """Erase the progress line."""
        PROGRESS.clear()
