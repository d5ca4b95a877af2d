"""Compiled: devices in slots, matchings between stages, and their cost.

A slot is a position in a stage; ``device_at[slot]`` is its device. Every boundary has a matching:
``next_slot[slot]`` is the partner in the next stage (-1 for an unmatched slot) and ``prev_slot``
the inverse. With equal groups this is the paper's grid of pipelines x stages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.genetic.data import AssignmentData
from planner.matching.bottleneck import fill_matching
from planner.search.arrays import Floats2, Ints
from planner.search.compiled import allocating, allocating_entry


class MatchedAssignment(NamedTuple):
    """An assignment of devices to slots, with a matching at every boundary.

    Attributes
    ----------
    device_at
        ``int[N]``, the device of every slot.
    next_slot, prev_slot
        ``int[N]``, the partner of every slot in the next and in the previous stage, -1 for none.
    """

    device_at: Ints
    next_slot: Ints
    prev_slot: Ints

    @classmethod
    def of(cls, slots: Ints) -> MatchedAssignment:
        """An assignment without matchings that shares the slots' array."""
        return cls(slots, np.full_like(slots, -1), np.full_like(slots, -1))


def cost_of(data: AssignmentData, slots: Ints) -> float:
    """Eq. 1 in seconds for the groups given by the slots.

    Parameters
    ----------
    slots
        ``int[N]``, the device of every slot.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), eq. 1-4.
    """
    return float(exact_cost(data, MatchedAssignment.of(slots)))


@allocating
def solve_boundary(data: AssignmentData, assignment: MatchedAssignment, boundary: int) -> None:
    """Replace one boundary's matching by a bottleneck matching (eq. 3).

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), eq. 3.
    """
    device_at, next_slot, prev_slot = assignment
    pp_cost = data.pp_cost[data.pp_kind[boundary]]
    left, middle = data.stage_ptr[boundary], data.stage_ptr[boundary + 1]
    right = data.stage_ptr[boundary + 2]
    next_slot[left:middle] = -1
    prev_slot[middle:right] = -1
    k, m = middle - left, right - middle
    flip = k > m
    rows, columns = (m, k) if flip else (k, m)
    cost = np.empty((rows, columns))
    for r in range(rows):
        for c in range(columns):
            a, b = (left + c, middle + r) if flip else (left + r, middle + c)
            cost[r, c] = pp_cost[device_at[a], device_at[b]]
    column_of = np.full(rows, -1, dtype=np.int64)
    row_of = np.full(columns, -1, dtype=np.int64)
    fill_matching(cost, column_of, row_of)
    for r in range(rows):
        a, b = (left + column_of[r], middle + r) if flip else (left + r, middle + column_of[r])
        next_slot[a] = b
        prev_slot[b] = a


@allocating_entry
def solve_matchings(data: AssignmentData, assignment: MatchedAssignment) -> None:
    """Solve the bottleneck matching at every boundary."""
    assignment.next_slot[:] = -1
    assignment.prev_slot[:] = -1
    for boundary in range(len(data.sizes) - 1):
        solve_boundary(data, assignment, boundary)


@allocating_entry
def data_parallel_cost(data: AssignmentData, device_at: Ints) -> float:
    """Eq. 2 and its maximum over the stages.

    Parameters
    ----------
    device_at
        ``int[N]``, the device of every slot.
    """
    worst = 0.0
    for j in range(len(data.sizes)):
        dp_cost = data.dp_cost[data.dp_kind[j]]
        for p in range(data.stage_ptr[j], data.stage_ptr[j + 1]):
            total = 0.0
            for q in range(data.stage_ptr[j], data.stage_ptr[j + 1]):
                total += dp_cost[device_at[p], device_at[q]]
            worst = max(worst, total)
    return worst


@allocating_entry
def matched_cost(data: AssignmentData, assignment: MatchedAssignment) -> float:
    """Eq. 1 with the assignment's own matchings instead of the best ones."""
    device_at, next_slot, _ = assignment
    cost: float = data_parallel_cost(data, device_at)
    for j in range(len(data.sizes) - 1):
        pp_cost = data.pp_cost[data.pp_kind[j]]
        bottleneck = 0.0
        for p in range(data.stage_ptr[j], data.stage_ptr[j + 1]):
            if next_slot[p] >= 0:
                bottleneck = max(bottleneck, pp_cost[device_at[p], device_at[next_slot[p]]])
        cost += bottleneck
    return cost


@allocating_entry
def exact_cost(data: AssignmentData, assignment: MatchedAssignment) -> float:
    """Eq. 1 for the groups in their order; stores the bottleneck matchings."""
    solve_matchings(data, assignment)
    cost: float = matched_cost(data, assignment)
    return cost


@allocating_entry
def group_bottlenecks(data: AssignmentData, device_at: Ints) -> Floats2:
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
    stages = len(data.sizes)
    k = data.sizes[0]
    pp_cost = data.pp_cost[0]
    bottlenecks = np.zeros((stages, stages))
    cost = np.empty((k, k))
    for i in range(stages):
        for j in range(i):
            for r in range(k):
                for c in range(k):
                    cost[r, c] = pp_cost[device_at[i * k + r], device_at[j * k + c]]
            bottlenecks[i, j] = fill_matching(
                cost, np.full(k, -1, dtype=np.int64), np.full(k, -1, dtype=np.int64)
            )
            bottlenecks[j, i] = bottlenecks[i, j]
    return bottlenecks
