"""Bounds on the makespan that take no search: chains, loads, memory."""

from __future__ import annotations

import math

import numpy as np

from planner.mapf.tables import Floats, Tables
from planner.mapf.turnover import turnover_s

ROUNDING = 1 - 1e-9
"""Sums of floats may come out too high by far less than this."""


def shortest_chain_s(tables: Tables, start: int) -> float:
    """Least F, H and B with transfers over ``path_stages`` devices, alone; exact (CC1, CC2).

    Dynamic programming over places. ``plain`` is the cost of paths that end at a device of their
    highest stage, ``wide`` of those among them that left out the stage before it, and ``back`` of
    those that end with that stage, swapped; each by the number of swaps so far.
    """
    both = tables.hop + tables.hop.T
    busy = tables.forward + tables.backward
    gap = tables.stage[None, :] - tables.stage[:, None]
    usable = (tables.room > 0)[None, :] & (tables.stage > 0)[None, :]
    up1, up2, up3 = (np.where((gap >= least) & usable, both, math.inf) for least in (1, 2, 3))
    down = np.where((gap == -1) & usable, both, math.inf)
    swaps = min(tables.max_swaps, (tables.path_stages - 1) // 2)
    plain = np.full((swaps + 1, len(tables.stage)), math.inf)
    wide, back = plain.copy(), plain.copy()
    plain[0, start] = 0.0
    for _ in range(tables.path_stages - 1):
        swapped = np.full_like(plain, math.inf)
        swapped[1:] = _step(wide, down)[:-1]
        # after a swap the highest stage is one above the device's own
        further = np.minimum(_step(plain, up2), _step(back, up3))
        plain = np.minimum(_step(plain, up1), _step(back, up2)) + busy
        wide, back = further + busy, swapped + busy
    home = float((np.minimum(plain, back) + both[:, start]).min())
    return float(home + busy[start] + tables.head[start])


def _step(cost: Floats, arcs: Floats) -> Floats:
    """Cheapest cost at every device after one more arc."""
    found: Floats = (cost[:, :, None] + arcs[None]).min(axis=1)
    return found


def simple_bound_s(tables: Tables) -> float:
    """The largest of the bounds of every start device and every stage."""
    best = 0.0
    starts = list(dict.fromkeys(tables.starts.tolist()))
    for start in starts:
        count = int((tables.starts == start).sum())
        chain = shortest_chain_s(tables, start)
        span = turnover_s(
            float(tables.forward[start]),
            float(tables.head[start]),
            float(tables.backward[start]),
            int(tables.memory[start]),
            count,
            chain,
        )
        best = max(best, span)
    near, back = _ways(tables, starts)
    for s in range(1, len(tables.fewest)):
        group = [
            d
            for d in tables.members[tables.first[s] : tables.first[s + 1]].tolist()
            if tables.room[d] > 0
        ]
        if group and tables.fewest[s] > 0:
            best = max(best, _stage_bound_s(tables, group, int(tables.fewest[s]), near, back))
    return best * ROUNDING


def _ways(tables: Tables, starts: list[int]) -> tuple[Floats, Floats]:
    """Least seconds before F can begin on each device, and after B has ended there.

    Over any devices on the way: links need not satisfy the triangle inequality.
    """
    forward, backward, hop = tables.forward, tables.backward, tables.hop
    near = (forward[starts, None] + hop[starts]).min(axis=0)
    back = (hop[:, starts] + backward[starts]).min(axis=1)
    for _ in range(tables.path_stages - 2):
        near = np.minimum(near, (near[:, None] + forward[:, None] + hop).min(axis=0))
        back = np.minimum(back, (hop + backward + back).min(axis=1))
    return near, back


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
