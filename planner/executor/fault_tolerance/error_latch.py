"""The first error of any thread, with callbacks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ErrorLatch:
    """Holds the first error of any thread, to be raised by the main thread."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._threads: list[threading.Thread] = []

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Register a callback for the first error; called at once if there is one."""
        with self._lock:
            self._callbacks.append(callback)
            failed = self.error is not None
        if failed:
            callback()

    def notify_on_failure(self, condition: threading.Condition) -> None:
        """Wake all threads that wait on a condition at the first error."""

        def notify() -> None:
            with condition:
                condition.notify_all()

        self.on_failure(notify)

    @contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """Context in which a callback is registered."""
        self.on_failure(callback)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)

    def fail(self, error: Exception) -> None:
        """Record an error."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()

    def add_thread(self, thread: threading.Thread) -> None:
        """Register a thread that ends after an error."""
        self._threads.append(thread)

    def join_threads(self, timeout_s: float) -> None:
        """Wait until all registered threads have ended, with a timeout for all of them."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error
