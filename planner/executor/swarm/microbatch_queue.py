"""A shared queue of microbatches, from which devices take the next one while they compute."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch.distributed.distributed_c10d import Store


class MicrobatchQueue:
    """The queue of a step in the store, as one rank sees it.

    One microbatch is prefetched, so that a device waits for the store only at the start of a step.
    At the end of a step a slow device may hold one more than it would take otherwise.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asking = ThreadPoolExecutor(1, "tickets")

    def of(self, serial: int, microbatches: int) -> Iterator[int]:
        """Microbatches of a step, each taken by one rank only."""
        ahead = self._ask(serial)
        while (ticket := ahead.result()) <= microbatches:
            ahead = self._ask(serial)
            yield ticket - 1

    def _ask(self, serial: int) -> Future[int]:
        return self._asking.submit(self._store.add, f"tickets/{serial}", 1)
