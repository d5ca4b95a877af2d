"""Something that takes long, done on a thread beside the operations."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundTask:
    """A job that has begun.

    Parameters
    ----------
    job
        Gives the moment at which it was done.
    """

    def __init__(self, job: Callable[[], float]) -> None:
        self._job = job
        self._end_s = 0.0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="averaging", daemon=True)
        self._thread.start()

    def wait(self) -> float:
        """Until it is done; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._end_s

    def _run(self) -> None:
        try:
            self._end_s = self._job()
        except Exception as error:  # raised again where it is waited for
            self._error = error
