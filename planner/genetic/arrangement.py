"""Devices in slots, the matchings between stages, and what they cost; compiled.

A slot is a place in a stage; ``device_at[slot]`` fills it. Every boundary carries one matching:
``after[slot]`` is the partner in the next stage (-1 for a slot left over) and ``before`` its
inverse. With equal groups that is the paper's grid of pipelines x stages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.genetic.tables import Tables
from planner.matching.bottleneck import fill_matching
from planner.search.arrays import Floats2, Ints
from planner.search.compiled import allocating, allocating_entry


class Arrangement(NamedTuple):
    """Who sits where, and who is whose partner.

    Attributes
    ----------
    device_at
        ``int[N]``, the device of every slot.
    after, before
        ``int[N]``, the partner of every slot in the next and in the previous stage, -1 for none.
    """

    device_at: Ints
    after: Ints
    before: Ints

    @classmethod
    def of(cls, slots: Ints) -> Arrangement:
        """The slots themselves (not a copy), not matched yet."""
        return cls(slots, np.full_like(slots, -1), np.full_like(slots, -1))


def cost_of(tables: Tables, slots: Ints) -> float:
    """Eq. 1 in seconds for the groups that the slots make.

    Parameters
    ----------
    slots
        ``int[N]``, the device of every slot.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), eq. 1-4.
    """
    return float(exact_cost(tables, Arrangement.of(slots)))


@allocating
def solve_boundary(tables: Tables, arrangement: Arrangement, boundary: int) -> None:
    """Replace one boundary's matching by a bottleneck matching (eq. 3).

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), eq. 3.
    """
    device_at, after, before = arrangement
    hop = tables.hop[tables.hop_of[boundary]]
    left, middle = tables.first[boundary], tables.first[boundary + 1]
    right = tables.first[boundary + 2]
    after[left:middle] = -1
    before[middle:right] = -1
    k, m = middle - left, right - middle
    flip = k > m
    rows, columns = (m, k) if flip else (k, m)
    cost = np.empty((rows, columns))
    for r in range(rows):
        for c in range(columns):
            a, b = (left + c, middle + r) if flip else (left + r, middle + c)
            cost[r, c] = hop[device_at[a], device_at[b]]
    column_of = np.full(rows, -1, dtype=np.int64)
    row_of = np.full(columns, -1, dtype=np.int64)
    fill_matching(cost, column_of, row_of)
    for r in range(rows):
        a, b = (left + column_of[r], middle + r) if flip else (left + r, middle + column_of[r])
        after[a] = b
        before[b] = a


@allocating_entry
def solve_matchings(tables: Tables, arrangement: Arrangement) -> None:
    """Bottleneck matchings at every boundary."""
    arrangement.after[:] = -1
    arrangement.before[:] = -1
    for boundary in range(len(tables.sizes) - 1):
        solve_boundary(tables, arrangement, boundary)


@allocating_entry
def exchange_cost(tables: Tables, device_at: Ints) -> float:
    """Eq. 2 and its maximum over the stages.

    Parameters
    ----------
    device_at
        ``int[N]``, the device of every slot.
    """
    worst = 0.0
    for j in range(len(tables.sizes)):
        exchange = tables.exchange[tables.exchange_of[j]]
        for p in range(tables.first[j], tables.first[j + 1]):
            total = 0.0
            for q in range(tables.first[j], tables.first[j + 1]):
                total += exchange[device_at[p], device_at[q]]
            worst = max(worst, total)
    return worst


@allocating_entry
def current_cost(tables: Tables, arrangement: Arrangement) -> float:
    """Eq. 1 with the arrangement's own matchings instead of the best ones."""
    device_at, after, _ = arrangement
    cost: float = exchange_cost(tables, device_at)
    for j in range(len(tables.sizes) - 1):
        hop = tables.hop[tables.hop_of[j]]
        level = 0.0
        for p in range(tables.first[j], tables.first[j + 1]):
            if after[p] >= 0:
                level = max(level, hop[device_at[p], device_at[after[p]]])
        cost += level
    return cost


@allocating_entry
def exact_cost(tables: Tables, arrangement: Arrangement) -> float:
    """Eq. 1 for the groups in their order; leaves bottleneck matchings behind."""
    solve_matchings(tables, arrangement)
    cost: float = current_cost(tables, arrangement)
    return cost


@allocating_entry
def group_levels(tables: Tables, device_at: Ints) -> Floats2:
    """S x S bottleneck costs between equal groups: the coarsened graph of eq. 4.

    Parameters
    ----------
    device_at
        ``int[N]``, the device of every slot.

    Returns
    -------
    ndarray
        ``float[S, S]``, seconds.
    """
    stages = len(tables.sizes)
    k = tables.sizes[0]
    hop = tables.hop[0]
    levels = np.zeros((stages, stages))
    cost = np.empty((k, k))
    for i in range(stages):
        for j in range(i):
            for r in range(k):
                for c in range(k):
                    cost[r, c] = hop[device_at[i * k + r], device_at[j * k + c]]
            levels[i, j] = fill_matching(
                cost, np.full(k, -1, dtype=np.int64), np.full(k, -1, dtype=np.int64)
            )
            levels[j, i] = levels[i, j]
    return levels
