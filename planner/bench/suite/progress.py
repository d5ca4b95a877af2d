"""One line that says how far a run is."""

from __future__ import annotations

import sys
import time

from planner.bench.suite.work import Done

QUIET_S = 30.0
"""Between two lines where they cannot be overwritten."""


class Progress:
    """On stderr.

    Parameters
    ----------
    total
        Rows to come.
    kept
        Rows that are there already.
    """

    def __init__(self, total: int, kept: int) -> None:
        self._total, self._kept, self._done = total, kept, 0
        self._began = self._last = time.perf_counter()
        self._tty = sys.stderr.isatty()

    def step(self, done: Done) -> None:
        """A row more.

        Parameters
        ----------
        done
            What it was.
        """
        self._done += 1
        now = time.perf_counter()
        if not self._tty and now - self._last < QUIET_S and self._done < self._total:
            return
        self._last = now
        left = (now - self._began) / self._done * (self._total - self._done)
        text = (
            f"{self._done}/{self._total} rows, about {left / 60:.0f} min left; "
            f"{done.row.instance}, {done.row.method}"
        )
        if self._kept:
            text = f"{self._kept} kept, {text}"
        print(f"\r\x1b[K{text[:100]}" if self._tty else text, end="" if self._tty else "\n",
              file=sys.stderr, flush=True)  # fmt: skip

    def end(self) -> None:
        """Leave the line."""
        if self._tty and self._done:
            print(file=sys.stderr)
