"""Signals that ask a command to end, so that what it has found is not lost.

Outside the command line nobody listens here, and Ctrl-C is what Python makes of it.
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
MOST = 3
"""The signal of this number ends a command whatever it has."""


class Interrupts:
    """What has come, and what becomes of the next.

    The first signal raises `KeyboardInterrupt` where nothing was found yet, or where the command
    said that it may (`may_raise`); elsewhere it is noted, and every search that looks ends. The
    second is noted, so that what was found is written. The third raises wherever it comes.

    Attributes
    ----------
    number
        Of the first signal that came, 0: none did.
    found
        Whether there is something to lose.
    ending
        Whether a search makes an answer of what it has, which it was interrupted in.
    """

    def __init__(self) -> None:
        self._places = 0
        self._forget()

    def _forget(self) -> None:
        self.number = 0
        self.found = self.ending = False
        self._count = 0
        self._notice = ""

    @property
    def asked(self) -> bool:
        """Whether the command was told to end."""
        return self.number != 0

    @property
    def insisted(self) -> bool:
        """Whether it was told so again, and nothing is there that would be worth a wait."""
        return self._count >= MOST or (self._count > 1 and not (self.found or self.ending))

    @contextmanager
    def heeded(self, notice: str) -> Iterator[None]:
        """Listen until the block ends; in another thread than the main one, do nothing."""
        self._forget()
        self._notice = notice
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before, hook = {}, sys.unraisablehook
        sys.unraisablehook = lambda what: _unless_noted(what, hook)
        for name in NAMES:
            known = getattr(signal, name, None)
            # who was started to ignore one, as by nohup, goes on ignoring it
            if known is not None and signal.getsignal(known) is not signal.SIG_IGN:
                before[known] = signal.signal(known, self._take)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            sys.unraisablehook = hook
            self._forget()

    @contextmanager
    def may_raise(self) -> Iterator[None]:
        """Where a signal may raise, since whoever is outside of the block keeps what was found."""
        here = threading.current_thread() is threading.main_thread()
        self._places += here
        try:
            yield
        finally:
            self._places -= here

    def _take(self, number: int, _: FrameType | None) -> None:
        self._count += 1
        first = not self.number
        self.number = self.number or number
        if self.insisted or (first and (self._places > 0 or not self.found)):
            raise KeyboardInterrupt
        with suppress(OSError):  # what Python writes through may be in use just now
            os.write(2, f"{self._notice}\n".encode())


def _unless_noted(what: Any, hook: Callable[[Any], object]) -> None:
    """Where Python drops what a handler raises, the signal is noted all the same."""
    if what.exc_type is not KeyboardInterrupt:
        hook(what)


INTERRUPTS = Interrupts()
"""A process has one set of signals."""
