"""Orderly shutdown: one reason, printed once, then a prompt exit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

FAILED = 3
"""Exit code of a failed run, whatever the cause."""
PREFIX = "planner.executor: ended: "
"""Prefix of the line with the reason."""
REFUSED = 2
"""Exit code for invalid input of this process."""
LEFT = 4
"""Exit code when others continue without this process, which may be restarted."""


class RunAborted(RuntimeError):
    """The run has ended; `Shutdown` has the reason."""


class Shutdown:
    """The first reason counts, and wakes all waiting threads.

    Attributes
    ----------
    line
        The reason; None while the run continues.
    code
        Exit code.
    hint
        Printed after the reason.
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
        """End for this reason, unless there is one already."""
        with self._lock:
            if self.line is not None:
                return
            self.line, self.code = line, code
            wake = list(self._wake)
        self._known.set()
        for call in wake:
            call()

    def on_end(self, wake: Callable[[], None]) -> None:
        """Register a callback for the end of the run; called at once if it has ended."""
        with self._lock:
            self._wake.append(wake)
            over = self.line is not None
        if over:
            wake()

    def forget(self, wake: Callable[[], None]) -> None:
        """Remove a callback."""
        with self._lock:
            if wake in self._wake:
                self._wake.remove(wake)

    def before_end(self, undo: Callable[[], None]) -> None:
        """Register an idempotent callback that also runs if the process cannot exit normally."""
        self._undo.append(undo)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a reason; returns whether there is one."""
        return self._known.wait(timeout_s)

    def leave(self) -> int:
        """Print the reason once; returns the exit code."""
        with self._out:
            if not self._said:
                for undo in self._undo:
                    with suppress(Exception):
                        undo()
                if self.line:
                    # write to the descriptor: another thread may hold Python's lock on the stream
                    with suppress(OSError):
                        os.write(2, f"{PREFIX}{self.line}{self.hint}\n".encode())
            self._said = True
        return self.code

    def force(self) -> None:
        """Exit from any thread, even if others are blocked."""
        os._exit(self.leave())
