"""The queue of a conflict-based search: cheapest first, or the best of the nearly cheapest."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any, Generic, TypeVar

ItemT = TypeVar("ItemT")


class FocalQueue(Generic[ItemT]):
    """Items with a cost and a rank. Pops the item of least rank among the nearly cheapest.

    An item is nearly cheapest if it costs at most ``slack`` times the least cost in the queue.
    With ``slack = 1`` the cheapest comes first, and the rank decides between equal costs.

    References
    ----------
    The nearly cheapest items are the focal list of Barer, Sharon, Stern and Felner, "Suboptimal
    Variants of the Conflict-Based Search Algorithm", 2014.
    """

    def __init__(self, slack: float = 1.0) -> None:
        if not slack >= 1.0:
            raise ValueError(f"slack must be at least 1, found {slack}; 1 is best first")
        self._slack = slack
        self._count = itertools.count()
        # every item in the queue has a number: item, cost and rank by number
        self._items: dict[int, tuple[ItemT, float, tuple[Any, ...]]] = {}
        # all items by cost; it keeps numbers of popped items, which `least` drops
        self._by_cost: list[tuple[float, int]] = []
        # the nearly cheapest by rank, and the others by cost
        self._near: list[tuple[tuple[Any, ...], int]] = []
        self._others: list[tuple[float, int]] = []
        # the largest cost that counted as nearly cheapest at the last pop
        self._limit = -math.inf

    def __len__(self) -> int:
        return len(self._items)

    @property
    def least(self) -> float:
        """Least cost of all items; infinite if there are none."""
        while self._by_cost and self._by_cost[0][1] not in self._items:
            heapq.heappop(self._by_cost)
        return self._by_cost[0][0] if self._by_cost else math.inf

    def push(self, item: ItemT, cost: float, order: tuple[Any, ...] = ()) -> None:
        """Add an item with its rank ``order``; equal ranks leave in the order they came."""
        number = next(self._count)
        self._items[number] = item, cost, order
        heapq.heappush(self._by_cost, (cost, number))
        heapq.heappush(self._others, (cost, number))

    def pop(self) -> ItemT:
        """Remove the item of least rank among the nearly cheapest."""
        limit = self._slack * self.least
        if limit < self._limit:
            # a cheaper item came, so some of the nearly cheapest are so no longer: sort anew
            self._others = sorted((cost, k) for k, (_, cost, _) in self._items.items())
            self._near = []
        self._limit = limit
        while self._others and self._others[0][0] <= limit:
            _, number = heapq.heappop(self._others)
            heapq.heappush(self._near, (self._items[number][2], number))
        _, number = heapq.heappop(self._near)
        return self._items.pop(number)[0]
