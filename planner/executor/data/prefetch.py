"""Prefetches the next item of an infinite iterator."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterates on a separate thread, one item ahead; the thread ends with this object.

    The first item is computed when it is requested. After an error, every request raises it.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._executor = ThreadPoolExecutor(1, "prefetch")
        self._next: Future[T] | None = None

    def next_item(self) -> T:
        """The next item; starts the one after it."""
        if self._next is None:
            self._next = self._executor.submit(next, self._items)
        item = self._next.result()
        self._next = self._executor.submit(next, self._items)
        return item
