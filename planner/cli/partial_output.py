"""File with the best solution so far, in case a search is killed before it ends."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from planner.utils.atomic_write import write_text

EVERY_S = 10.0
"""Least time between two writes, in seconds; a shorter search writes nothing."""
WRITING_INTERVAL = 20.0
"""Least time between two writes, in multiples of the time that a write takes."""


def partial_path(out: Path) -> Path:
    """Return the path of the incumbent file of an output: ``NAME.part.json``."""
    return out.with_suffix(f".part{out.suffix}")


def _free(out: Path) -> Path:
    """Return an unused name under which to keep the incumbent of a search that was killed."""
    names = (f".killed{k or ''}{out.suffix}" for k in count())
    return next(path for name in names if not (path := out.with_suffix(name)).exists())


class IncumbentFile:
    """Save the incumbent as ``NAME.part.json`` until ``NAME.json`` is written.

    Parameters
    ----------
    out
        Output file of the command.
    is_complete
        Whether a solution is complete, rather than one part of a decomposed problem.
    to_text
        Serializes a complete solution.
    """

    def __init__(
        self, out: Path, is_complete: Callable[[Any], bool], to_text: Callable[[Any], str]
    ) -> None:
        self.path = partial_path(out)
        self._is_complete, self._to_text = is_complete, to_text
        self._last_write_s = time.perf_counter()
        self._unsaved: Any = None
        self._build: Callable[[], tuple[float, Any]] | None = None
        self._interval_s = EVERY_S
        self._best: float | None = None
        self._lock = threading.Lock()
        if self.path.exists():
            # this search may not find a plan that is as good
            other = _free(out)
            self.path.rename(other)
            print(
                f"{other}: best result of an earlier search that was killed; delete it if you do "
                "not need it",
                file=sys.stderr,
            )

    def offer(self, objective: float, plan: Any) -> None:
        """Keep a new incumbent, or a function that builds one, for the next write."""
        with self._lock:
            if callable(plan):
                self._build = plan
                return
            improves = self._best is None or objective < self._best
            if improves and self._is_complete(plan):
                self._best, self._unsaved = objective, plan

    def write_if_due(self) -> None:
        """Write the newest incumbent if enough time has passed since the last write."""
        now = time.perf_counter()
        up_to_date = self._unsaved is None and self._build is None
        if up_to_date or now - self._last_write_s < self._interval_s:
            return
        build, self._build = self._build, None
        if build is not None:
            # an incumbent that cannot be completed is not saved
            with suppress(ValueError):
                self.offer(*build())
        with self._lock:
            plan, self._unsaved = self._unsaved, None
            if plan is not None:
                # a full disk must not end the search
                with suppress(OSError):
                    write_text(self.path, self._to_text(plan))
        self._last_write_s = time.perf_counter()
        self._interval_s = max(EVERY_S, WRITING_INTERVAL * (self._last_write_s - now))

    def remove(self) -> None:
        """Delete the file once the output has been written."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
