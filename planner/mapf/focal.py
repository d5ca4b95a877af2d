"""The high-level queue of a conflict-based search: best first, or the best of nearly best."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any, Generic, TypeVar

ItemT = TypeVar("ItemT")


class FocalQueue(Generic[ItemT]):
    """Items with a cost; pops that of least ``order`` among the nearly cheapest.

    Nearly cheapest is a cost of at most ``slack`` times the least of all items (the focal list of
    Barer et al. 2014). With ``slack = 1`` this is best first, ``order`` breaking ties.
    """

    def __init__(self, slack: float = 1.0) -> None:
        if not slack >= 1.0:
            raise ValueError(f"slack must be at least 1, found {slack}; 1 is best first")
        self._slack = slack
        self._count = itertools.count()
        self._limit = -math.inf
        # name -> item, cost, order; what has left is skipped when a heap comes upon its name
        self._items: dict[int, tuple[ItemT, float, tuple[Any, ...]]] = {}
        self._costs: list[tuple[float, int]] = []
        self._waiting: list[tuple[float, int]] = []
        self._focal: list[tuple[tuple[Any, ...], int]] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def least(self) -> float:
        """Least cost of all items; infinite if there are none."""
        while self._costs and self._costs[0][1] not in self._items:
            heapq.heappop(self._costs)
        return self._costs[0][0] if self._costs else math.inf

    def push(self, item: ItemT, cost: float, order: tuple[Any, ...] = ()) -> None:
        """Add an item; equal orders leave in the order of their coming."""
        name = next(self._count)
        self._items[name] = item, cost, order
        heapq.heappush(self._costs, (cost, name))
        heapq.heappush(self._waiting, (cost, name))

    def pop(self) -> ItemT:
        """Remove the item of least order among the nearly cheapest."""
        limit = self._slack * self.least
        if limit < self._limit:
            # something cheaper came: who is nearly cheapest is asked anew
            self._waiting = sorted((cost, name) for name, (_, cost, _) in self._items.items())
            self._focal = []
        self._limit = limit
        while self._waiting and self._waiting[0][0] <= limit:
            _, name = heapq.heappop(self._waiting)
            heapq.heappush(self._focal, (self._items[name][2], name))
        _, name = heapq.heappop(self._focal)
        return self._items.pop(name)[0]
