"""Remaining time of a command with ``--seconds``, and a timeout for its parts."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from planner.search.stop import TimeLimitReached

OVER, OVER_S = 1.1, 1.0
"""Parts are cancelled at this multiple of the limit plus this many seconds."""


class TimeLeft:
    """Remaining time of a command.

    Parameters
    ----------
    seconds
        Time limit of the whole command; None: no limit.
    began
        Start of the command, from `time.perf_counter`; None: now.
    """

    def __init__(self, seconds: float | None, began: float | None = None) -> None:
        self.seconds = seconds
        self.began = time.perf_counter() if began is None else began

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    @property
    def left_s(self) -> float | None:
        """Seconds until the limit, at least 0; None without a limit."""
        return None if self.seconds is None else max(0.0, self.seconds - self.spent_s)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Raise `TimeLimitReached` in the body shortly after the limit.

        Works in the main thread on systems with alarm signals; elsewhere the body is not
        interrupted.
        """
        main = threading.current_thread() is threading.main_thread()
        if self.seconds is None or not main or not hasattr(signal, "setitimer"):
            yield
            return
        most_s = OVER * self.seconds + OVER_S - self.spent_s
        if most_s <= 0:
            raise TimeLimitReached
        previous_handler = signal.signal(signal.SIGALRM, _ring)
        signal.setitimer(signal.ITIMER_REAL, most_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous_handler)

    def describe_skip(self) -> str:
        """Return the reason and remedy for a part that was skipped."""
        return f"no time left; give --seconds of more than {self.seconds:g}"


def _ring(_: int, __: FrameType | None) -> None:
    raise TimeLimitReached
