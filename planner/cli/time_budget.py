"""What is left of a command's ``--seconds``, and parts of it that end when that is spent."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from planner.search.stop import TimeLimitReached

OVER, OVER_S = 1.1, 1.0
"""Parts are cut off this factor and so many seconds beyond what was asked: ends take a while."""


class TimeLeft:
    """Seconds of a command, from its begin.

    Parameters
    ----------
    seconds
        What the whole command may take; None: as long as it needs.
    began
        On `time.perf_counter`; None: now.
    """

    def __init__(self, seconds: float | None, began: float | None = None) -> None:
        self.seconds = seconds
        self.began = time.perf_counter() if began is None else began

    @property
    def spent_s(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self.began

    @property
    def left_s(self) -> float | None:
        """Seconds until the end, at least 0; None without a limit."""
        return None if self.seconds is None else max(0.0, self.seconds - self.spent_s)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Something that raises `TimeLimitReached` in itself a little after what is left is spent.

        Only in the main thread, and where the system has alarms; elsewhere it takes what it takes.
        """
        main = threading.current_thread() is threading.main_thread()
        if self.seconds is None or not main or not hasattr(signal, "setitimer"):
            yield
            return
        most_s = OVER * self.seconds + OVER_S - self.spent_s
        if most_s <= 0:
            raise TimeLimitReached
        before = signal.signal(signal.SIGALRM, _ring)
        signal.setitimer(signal.ITIMER_REAL, most_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def more(self) -> str:
        """The remedy for what was left out."""
        return f"no time left; give --seconds of more than {self.seconds:g}"


def _ring(_: int, __: FrameType | None) -> None:
    raise TimeLimitReached
