"""A long job on a thread, beside the operations."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundTask:
    """A running job.

    Parameters
    ----------
    job
        Returns the time at which it finished.
    """

    def __init__(self, job: Callable[[], float]) -> None:
        self._job = job
        self._end_s = 0.0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="averaging", daemon=True)
        self._thread.start()

    def wait(self) -> float:
        """Wait until it is done; raises its exception."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._end_s

    def _run(self) -> None:
        try:
            self._end_s = self._job()
        except Exception as error:  # raised again where it is waited for
            self._error = error
