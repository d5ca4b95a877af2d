"""Orderly shutdown: one reason, printed once, then a prompt exit."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from planner.executor.fault_tolerance.error_latch import ErrorLatch

FAILED = 3
"""Exit code of a failed run, whatever the cause."""
PREFIX = "planner.executor: ended: "
"""Prefix of the line with the reason."""
HINT = "; continue after "
"""Between a reason and the checkpoint to continue from."""
REFUSED = 2
"""Exit code for invalid input of this process."""
LEFT = 4
"""Exit code when others continue without this process, which may be restarted."""


class RunAborted(RuntimeError):
    """The run has ended; `Shutdown` has the reason."""


class Shutdown(ErrorLatch):
    """The first reason counts, and wakes all waiting threads; fails with `RunAborted`.

    Attributes
    ----------
    reason
        The reason of the end; None while the run continues.
    code
        Exit code.
    hint
        Printed after the reason.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None
        self.hint = ""
        self.code = FAILED
        self._requested = threading.Event()
        self._print_lock = threading.Lock()
        self._printed = False

    def request(self, reason: str, code: int = FAILED) -> None:
        """End for this reason, unless there is one already."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason, self.code = reason, code
        self._requested.set()
        self.fail(RunAborted())

    def wait(self, timeout_s: float) -> bool:
        """Wait for a reason; returns whether there is one."""
        return self._requested.wait(timeout_s)

    def print_reason(self) -> int:
        """Print the reason once; returns the exit code."""
        with self._print_lock:
            if not self._printed and self.reason:
                # write to the descriptor: another thread may hold Python's lock on the stream
                with suppress(OSError):
                    os.write(2, f"{PREFIX}{self.reason}{self.hint}\n".encode())
            self._printed = True
        return self.code

    def exit_process(self) -> None:
        """Exit from any thread, even if others are blocked."""
        os._exit(self.print_reason())
