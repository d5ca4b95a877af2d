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
        asked, made = SimpleQueue[bool](), SimpleQueue[T | BaseException]()
        self._asked, self._made = asked, made
        self._begun = False
        self._error: BaseException | None = None
        weakref.finalize(self, asked.put, False).atexit = False
        work = (items, asked, made)
        threading.Thread(target=_work, args=work, name="reads ahead", daemon=True).start()

    def take(self) -> T:
        """The next item; starts the one after it."""
        if self._error is not None:
            raise self._error
        if not self._begun:
            self._begun = True
            self._asked.put(True)
        item = self._made.get()
        if isinstance(item, BaseException):
            self._error = item
            raise item
        self._asked.put(True)
        return item


def _work(
    items: Iterator[T], requests: SimpleQueue[bool], results: SimpleQueue[T | BaseException]
) -> None:
    while requests.get():
        try:
            results.put(next(items))
        except BaseException as error:
            results.put(error)
            return
