"""Bounds on the makespan that take no search: chains, loads, memory."""

from __future__ import annotations

import math

import numpy as np

from planner.mapf.relax import waits
from planner.mapf.tables import Floats, Tables

ROUNDING = 1 - 1e-9
"""Sums of floats may come out too high by far less than this."""


def shortest_chain_s(tables: Tables, start: int) -> float:
    """Least F, H and B with transfers over ``path_stages`` devices, alone.

    Stages ascend in the relaxation's order of places, and a swap is an arc one stage back; visits
    of a stage twice are not excluded, which only lowers the bound.
    """
    cost = np.full(len(tables.stage), math.inf)
    cost[start] = 0.0
    both = tables.hop + tables.hop.T
    arc = _arcs(tables)
    busy = tables.forward + tables.backward
    for _ in range(tables.path_stages - 1):
        cost = (cost[:, None] + both + arc).min(axis=0) + busy
    home = float((cost + both[:, start]).min())
    return float(home + busy[start] + tables.head[start])


def _arcs(tables: Tables) -> Floats:
    """0 where a path may go from a device to another, infinite elsewhere."""
    gap = tables.stage[None, :] - tables.stage[:, None]
    allowed = (gap > 0) | ((gap == -1) & (tables.max_swaps > 0) & (tables.stage[None, :] > 0))
    allowed &= (tables.room > 0)[None, :]
    return np.where(allowed, 0.0, math.inf)


def simple_bound_s(tables: Tables) -> float:
    """The largest of the bounds of every start device and every stage."""
    best = 0.0
    starts = list(dict.fromkeys(tables.starts.tolist()))
    for start in starts:
        count = int((tables.starts == start).sum())
        chain = shortest_chain_s(tables, start)
        first = waits(tables, start, count, chain, last=False)
        last = waits(tables, start, count, chain, last=True)
        # the order of F and B that suits best: first in, first out or the other way, or between;
        # the largest of sums of two sequences is least when one ascends and the other descends
        best = max(best, max(a + b for a, b in zip(first, reversed(last), strict=True)) + chain)
        busy = tables.forward[start] + tables.head[start] + tables.backward[start]
        best = max(best, count * float(busy))
    near = tables.hop[starts].min(axis=0) + float(tables.forward[starts].min())
    back = tables.hop[:, starts].min(axis=1) + float(tables.backward[starts].min())
    for s in range(1, len(tables.fewest)):
        group = [
            d
            for d in tables.members[tables.first[s] : tables.first[s + 1]].tolist()
            if tables.room[d] > 0
        ]
        if group and tables.fewest[s] > 0:
            best = max(best, _stage_bound_s(tables, group, int(tables.fewest[s]), near, back))
    return best * ROUNDING


def _stage_bound_s(
    tables: Tables, group: list[int], visits: int, near: Floats, back: Floats
) -> float:
    """Least time in which a stage's devices can take so many visits, found by bisection."""
    head = float(tables.head.min())

    def fits(span: float) -> bool:
        total = 0
        for d in group:
            busy = float(tables.forward[d] + tables.backward[d])
            room = span - float(near[d] + back[d])
            if room < busy + head:
                continue
            total += min(int(tables.room[d]), int(room / busy + 1e-9) if busy > 0 else visits)
        return total >= visits

    low, high = 0.0, 1.0
    while not fits(high):
        high *= 2
        if high > 1e15:
            return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low
