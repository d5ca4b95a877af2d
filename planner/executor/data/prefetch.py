"""The next item of what never ends, made while the one before is in use."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Goes through an iterator in a thread of its own, one item ahead of who takes them.

    The first item is begun when it is asked for. The thread ends with this object, or with the
    process: what takes for ever holds nobody up that has no need of it.

    Parameters
    ----------
    items
        Used by nobody else from here on.
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
        """The next item, and the one after it is begun."""
        if self._error is not None:
            raise self._error
        if not self._begun:
            self._begun = True
            self._asked.put(True)
        found = self._made.get()
        if isinstance(found, BaseException):
            self._error = found
            raise found
        self._asked.put(True)
        return found


def _work(
    items: Iterator[T], asked: SimpleQueue[bool], made: SimpleQueue[T | BaseException]
) -> None:
    while asked.get():
        try:
            made.put(next(items))
        except BaseException as error:
            made.put(error)
            return
