"""The first error of any thread, and who is woken by it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ErrorLatch:
    """The first error of any thread, raised where the operations run."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._wake: list[Callable[[], None]] = []

    def on_failure(self, wake: Callable[[], None]) -> None:
        """Call this when something failed; at once if it has."""
        with self._lock:
            self._wake.append(wake)
            failed = self.error is not None
        if failed:
            wake()

    def __call__(self, error: Exception) -> None:
        """Note an error."""
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
