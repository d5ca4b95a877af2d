"""Handling of termination signals, so that a command keeps the plan found so far.

Only commands install these handlers. In the library Ctrl-C raises `KeyboardInterrupt` as usual; a
search that has a plan catches it, and returns the plan.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
FORCE_AFTER = 3
"""Number of signals after which a command ends unconditionally."""


class Interrupts:
    """Signals received, and how the next one is handled.

    The first signal raises `KeyboardInterrupt` if nothing was found yet, or within `may_raise`;
    otherwise it is recorded, and searches stop at their next check. The second is only recorded, so
    that the plan is written. The third always raises.

    Attributes
    ----------
    number
        Number of the first signal received, or 0.
    has_plan
        Whether a plan has been found that must not be lost.
    finishing
        Whether an interrupted search is building its result.
    """

    def __init__(self) -> None:
        self._raise_allowed = 0
        self._reset()

    def _reset(self) -> None:
        self.number = 0
        self.has_plan = self.finishing = False
        self._count = 0
        self._notice = ""

    @property
    def requested(self) -> bool:
        """Whether a signal has asked the command to end."""
        return self.number != 0

    @property
    def forced(self) -> bool:
        """Whether further signals demand an immediate end."""
        return self._count >= FORCE_AFTER or (
            self._count > 1 and not (self.has_plan or self.finishing)
        )

    @contextmanager
    def handling(self, notice: str) -> Iterator[None]:
        """Install the handlers for the block; does nothing outside the main thread."""
        self._reset()
        self._notice = notice
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous_handlers, hook = {}, sys.unraisablehook
        sys.unraisablehook = lambda error: _ignore_interrupt(error, hook)
        for name in NAMES:
            known = getattr(signal, name, None)
            # keep ignoring signals that the process was started to ignore, as by nohup
            if known is not None and signal.getsignal(known) is not signal.SIG_IGN:
                previous_handlers[known] = signal.signal(known, self._handle)
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
            sys.unraisablehook = hook
            self._reset()

    @contextmanager
    def may_raise(self) -> Iterator[None]:
        """Allow the first signal to raise in the block: the caller keeps the plan found so far."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._raise_allowed += in_main_thread
        try:
            yield
        finally:
            self._raise_allowed -= in_main_thread

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._count += 1
        first = not self.number
        self.number = self.number or number
        if self.forced or (first and (self._raise_allowed > 0 or not self.has_plan)):
            raise KeyboardInterrupt
        with suppress(OSError):  # not print: the stream may be in use in the interrupted code
            os.write(2, f"{self._notice}\n".encode())


def _ignore_interrupt(error: Any, hook: Callable[[Any], object]) -> None:
    """Suppress the message for an interrupt that was raised where Python discards exceptions."""
    if error.exc_type is not KeyboardInterrupt:
        hook(error)


INTERRUPTS = Interrupts()
"""The process-wide instance."""
