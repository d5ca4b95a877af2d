"""The first error of any thread, with callbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ErrorLatch:
    """Holds the first error of any thread, to be raised by the main thread."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._wake: list[Callable[[], None]] = []

    def on_failure(self, wake: Callable[[], None]) -> None:
        """Register a callback for the first error; called at once if there is one."""
        with self._lock:
            self._wake.append(wake)
            failed = self.error is not None
        if failed:
            wake()

    def __call__(self, error: Exception) -> None:
        """Record an error."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            wakes = list(self._wake)
        for wake in wakes:
            wake()

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error
