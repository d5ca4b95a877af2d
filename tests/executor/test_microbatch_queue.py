"""Own pace: every microbatch once, and the next one is there when it is wanted."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planner.executor.swarm.microbatch_queue import MicrobatchQueue  # noqa: E402


class Counting:
    """A store that tells how often it was asked."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.asked = threading.Semaphore(0)
        self._lock = threading.Lock()

    def add(self, key: str, by: int) -> int:
        """As a store does."""
        with self._lock:
            self.counts[key] = self.counts.get(key, 0) + by
            self.asked.release()
            return self.counts[key]

    def delete_key(self, key: str) -> None:
        """As the store's."""
        with self._lock:
            del self.counts[key]


def test_the_next_one_is_asked_for_while_one_is_worked_on() -> None:
    """Nobody goes on in the generator, and the store is asked again all the same."""
    store: Any = Counting()
    taken = MicrobatchQueue(store, 2).take(3, 2)
    assert next(taken) == 0
    assert store.asked.acquire(timeout=60) and store.asked.acquire(timeout=60)
    assert list(taken) == [1] and store.counts == {"tickets/3": 3}


def test_devices_share_a_step_without_gaps() -> None:
    """Two that take turns as they like, and a step of its own after it."""
    store: Any = Counting()
    takers = [MicrobatchQueue(store, 2) for _ in range(2)]
    for serial in (0, 1):
        found: list[int] = []
        walks = [taker.take(serial, 7) for taker in takers]
        for turn in (0, 1, 1, 0, 1, 0, 0, 1, 1, 0):
            found += [b for b in [next(walks[turn], None)] if b is not None]
        assert sorted(found) == list(range(7))
    for taker in takers:
        taker._executor.shutdown()
    # whoever finds a queue empty last deletes it
    assert store.counts == {}
