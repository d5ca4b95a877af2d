"""Open list with a focal list (ECBS): best-first, or bounded-suboptimal by a secondary rank."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any, Generic, TypeVar

ItemT = TypeVar("ItemT")


class FocalQueue(Generic[ItemT]):
    """Priority queue that pops the item of least rank in its focal list.

    The focal list holds the items that cost at most ``suboptimality`` times the least cost. With
    ``suboptimality = 1`` the cheapest item is popped first, and the rank breaks ties.

    References
    ----------
    Barer, Sharon, Stern and Felner, "Suboptimal
    Variants of the Conflict-Based Search Algorithm", 2014.
    """

    def __init__(self, suboptimality: float = 1.0) -> None:
        if not suboptimality >= 1.0:
            raise ValueError(
                f"suboptimality must be at least 1, found {suboptimality}; 1 is best-first"
            )
        self._suboptimality = suboptimality
        self._count = itertools.count()
        # item, cost and rank by a serial number
        self._items: dict[int, tuple[ItemT, float, tuple[Any, ...]]] = {}
        # open list by cost; numbers of popped items are dropped lazily in `least`
        self._by_cost: list[tuple[float, int]] = []
        # the focal list by rank, and the other items by cost
        self._near: list[tuple[tuple[Any, ...], int]] = []
        self._others: list[tuple[float, int]] = []
        # the largest cost that the focal list admitted at the last pop
        self._limit = -math.inf

    def __len__(self) -> int:
        return len(self._items)

    @property
    def least(self) -> float:
        """Least cost of all items; infinite if there are none."""
        while self._by_cost and self._by_cost[0][1] not in self._items:
            heapq.heappop(self._by_cost)
        return self._by_cost[0][0] if self._by_cost else math.inf

    def push(self, item: ItemT, cost: float, rank: tuple[Any, ...] = ()) -> None:
        """Add an item; equal ranks are popped in insertion order."""
        number = next(self._count)
        self._items[number] = item, cost, rank
        heapq.heappush(self._by_cost, (cost, number))
        heapq.heappush(self._others, (cost, number))

    def pop(self) -> ItemT:
        """Remove and return the item of least rank in the focal list."""
        limit = self._suboptimality * self.least
        if limit < self._limit:
            # a cheaper item was added, which shrinks the focal list: rebuild it
            self._others = sorted((cost, k) for k, (_, cost, _) in self._items.items())
            self._near = []
        self._limit = limit
        while self._others and self._others[0][0] <= limit:
            _, number = heapq.heappop(self._others)
            heapq.heappush(self._near, (self._items[number][2], number))
        _, number = heapq.heappop(self._near)
        return self._items.pop(number)[0]
