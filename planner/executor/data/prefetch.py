"""Prefetches the next item of an infinite iterator."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterates on a separate thread, one item ahead.

    The first item is computed when it is requested. The thread ends with this object or with the
    process.

    Parameters
    ----------
    items
        Used by nothing else.
    """

    def __init__(self, items: Iterator[T]) -> None:
        requests, results = SimpleQueue[bool](), SimpleQueue[T | BaseException]()
        self._requests, self._results = requests, results
        self._started = False
        self._error: BaseException | None = None
        weakref.finalize(self, requests.put, False).atexit = False
        arguments = (items, requests, results)
        threading.Thread(
            target=_run_iterator, args=arguments, name="reads ahead", daemon=True
        ).start()

    def next_item(self) -> T:
        """The next item; starts the one after it."""
        if self._error is not None:
            raise self._error
        if not self._started:
            self._started = True
            self._requests.put(True)
        item = self._results.get()
        if isinstance(item, BaseException):
            self._error = item
            raise item
        self._requests.put(True)
        return item


def _run_iterator(
    items: Iterator[T], requests: SimpleQueue[bool], results: SimpleQueue[T | BaseException]
) -> None:
    while requests.get():
        try:
            results.put(next(items))
        except BaseException as error:
            results.put(error)
            return
