"""The best so far beside the output, for whoever's search is killed before its end."""

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
"""Between two files: a short search writes none."""
PART = 20.0
"""Nor does it take more than one second in so many."""


def part_of(out: Path) -> Path:
    """The spare file of an output."""
    return out.with_suffix(f".part{out.suffix}")


def _free(out: Path) -> Path:
    """A name for the spare file of a search that was killed, which no file has."""
    names = (f".killed{k or ''}{out.suffix}" for k in count())
    return next(path for name in names if not (path := out.with_suffix(name)).exists())


class Spare:
    """A file ``NAME.part.json`` beside ``NAME.json``, gone again once that is written.

    Parameters
    ----------
    whole
        Whether a plan is an answer by itself, and no part of one.
    text
        What the file has of such a plan.
    """

    def __init__(self, out: Path, whole: Callable[[Any], bool], text: Callable[[Any], str]) -> None:
        self.path = part_of(out)
        self._whole, self._text = whole, text
        self._wrote_s = time.perf_counter()
        self._waiting: Any = None
        self._later: Callable[[], tuple[float, Any]] | None = None
        self._wait_s = EVERY_S
        self._best: float | None = None
        self._lock = threading.Lock()
        if self.path.exists():
            # this search may find none that is as good
            other = _free(out)
            self.path.rename(other)
            print(
                f"{other}: the best of an earlier search, which was killed; remove it when you "
                "have no use for it",
                file=sys.stderr,
            )

    def offer(self, objective: float, plan: Any) -> None:
        """Take a plan that is the best of its search."""
        with self._lock:
            if callable(plan):
                self._later = plan
                return
            better = self._best is None or objective < self._best
            if better and self._whole(plan):
                self._best, self._waiting = objective, plan

    def look(self) -> None:
        """Write, if it is time and there is something new."""
        now = time.perf_counter()
        nothing = self._waiting is None and self._later is None
        if nothing or now - self._wrote_s < self._wait_s:
            return
        later, self._later = self._later, None
        if later is not None:
            # what cannot be made whole is no answer
            with suppress(ValueError):
                self.offer(*later())
        with self._lock:
            plan, self._waiting = self._waiting, None
            if plan is not None:
                # a disk that is full costs this file, and not the search
                with suppress(OSError):
                    write_text(self.path, self._text(plan))
        self._wrote_s = time.perf_counter()
        self._wait_s = max(EVERY_S, PART * (self._wrote_s - now))

    def done(self) -> None:
        """The output is there."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
