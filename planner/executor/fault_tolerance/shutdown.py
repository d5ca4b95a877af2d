"""Why a process ends before its work is done: one line, said once, and then it is gone soon."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

FAILED = 3
"""Exit code where the run has failed, whoever's fault it was."""
PREFIX = "planner.executor: ended: "
"""Of the line that says why."""
REFUSED = 2
"""Exit code where this process was given what cannot be used."""
LEFT = 4
"""Exit code where others may go on without this process, which may be started again."""


class RunAborted(RuntimeError):
    """The run is over; `Shutdown` has the reason."""


class Shutdown:
    """The first reason counts; whoever waits is woken.

    Attributes
    ----------
    line
        The reason, None as long as the run goes on.
    code
        What the process ends with.
    hint
        Said behind the reason.
    """

    def __init__(self) -> None:
        self.line: str | None = None
        self.hint = ""
        self.code = FAILED
        self._known = threading.Event()
        self._lock, self._out = threading.Lock(), threading.Lock()
        self._said = False
        self._wake: list[Callable[[], None]] = []
        self._undo: list[Callable[[], None]] = []

    def because(self, line: str, code: int = FAILED) -> None:
        """End, for this reason unless there is one already."""
        with self._lock:
            if self.line is not None:
                return
            self.line, self.code = line, code
            wake = list(self._wake)
        self._known.set()
        for call in wake:
            call()

    def on_end(self, wake: Callable[[], None]) -> None:
        """Call this when the run ends; at once if it has."""
        with self._lock:
            self._wake.append(wake)
            over = self.line is not None
        if over:
            wake()

    def forget(self, wake: Callable[[], None]) -> None:
        """Do not call this any more, nor keep what it holds."""
        with self._lock:
            if wake in self._wake:
                self._wake.remove(wake)

    def before_end(self, undo: Callable[[], None]) -> None:
        """Call this also where the process cannot go the usual way out; twice must do no harm."""
        self._undo.append(undo)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a reason; returns whether there is one."""
        return self._known.wait(timeout_s)

    def leave(self) -> int:
        """Say the reason, unless that was done; returns the exit code."""
        with self._out:
            if not self._said:
                for undo in self._undo:
                    with suppress(Exception):
                        undo()
                if self.line:
                    # straight to the descriptor: a thread may hold what Python writes through
                    with suppress(OSError):
                        os.write(2, f"{PREFIX}{self.line}{self.hint}\n".encode())
            self._said = True
        return self.code

    def force(self) -> None:
        """Leave from any thread, whatever the others are blocked in."""
        os._exit(self.leave())
