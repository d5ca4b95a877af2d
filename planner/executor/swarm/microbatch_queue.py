"""Microbatches that any device may do: each takes its next one while it works on one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch.distributed.distributed_c10d import Store


class MicrobatchQueue:
    """What a rank takes from a store that all share.

    One ahead: no device waits for the store but at a step's begin. At a step's end a slow device
    may hold one more than it would have taken then.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asking = ThreadPoolExecutor(1, "tickets")

    def of(self, serial: int, microbatches: int) -> Iterator[int]:
        """Microbatches of a step that nobody else takes."""
        ahead = self._ask(serial)
        while (ticket := ahead.result()) <= microbatches:
            ahead = self._ask(serial)
            yield ticket - 1

    def _ask(self, serial: int) -> Future[int]:
        return self._asking.submit(self._store.add, f"tickets/{serial}", 1)
