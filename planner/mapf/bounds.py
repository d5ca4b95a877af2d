"""Bounds on the makespan that take no search: chains, loads, memory, links."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.link_bounds import link_bounds
from planner.mapf.spans import least_span, least_ways
from planner.mapf.start_turnover import turnover_s
from planner.search.arrays import Floats
from planner.search.certificate import Witness


class PathBound(NamedTuple):
    """Seconds that no plan undercuts, and what shows it."""

    seconds: float
    basis: str
    witness: Witness


def shortest_chain_s(arrays: PathArrays, start: int) -> float:
    """Least F, H and B with transfers over ``path_stages`` devices, alone; exact (CC1, CC2).

    Dynamic programming over places. ``plain`` is the cost of paths that end at a device of their
    highest stage, ``wide`` of those among them that left out the stage before it, and ``back`` of
    those that end with that stage, swapped; each by the number of swaps so far.
    """
    both = arrays.hop + arrays.hop.T
    busy = arrays.forward + arrays.backward
    gap = arrays.stage[None, :] - arrays.stage[:, None]
    usable = (arrays.room > 0)[None, :] & (arrays.stage > 0)[None, :]
    up1, up2, up3 = (np.where((gap >= least) & usable, both, math.inf) for least in (1, 2, 3))
    down = np.where((gap == -1) & usable, both, math.inf)
    swaps = min(arrays.max_swaps, (arrays.path_stages - 1) // 2)
    plain = np.full((swaps + 1, len(arrays.stage)), math.inf)
    wide, back = plain.copy(), plain.copy()
    plain[0, start] = 0.0
    for _ in range(arrays.path_stages - 1):
        swapped = np.full_like(plain, math.inf)
        swapped[1:] = _step(wide, down)[:-1]
        # after a swap the highest stage is one above the device's own
        further = np.minimum(_step(plain, up2), _step(back, up3))
        plain = np.minimum(_step(plain, up1), _step(back, up2)) + busy
        wide, back = further + busy, swapped + busy
    home = float((np.minimum(plain, back) + both[:, start]).min())
    return float(home + busy[start] + arrays.head[start])


def _step(cost: Floats, arcs: Floats) -> Floats:
    """Cheapest cost at every device after one more arc."""
    found: Floats = (cost[:, :, None] + arcs[None]).min(axis=1)
    return found


def simple_bound(arrays: PathArrays) -> PathBound:
    """The largest of the bounds of every start device and every stage.

    Notes
    -----
    Links that queue only delay: what holds without them holds with them. The witness names the
    device or the stage; `planner.checker.path_bounds` recomputes the bound
    from that and the problem.
    """
    starts = list(dict.fromkeys(arrays.starts.tolist()))
    found = [_start_bound(arrays, start) for start in starts]
    near, back = least_ways(arrays, starts)
    for s in range(1, len(arrays.fewest)):
        group = [
            d
            for d in arrays.members[arrays.first[s] : arrays.first[s + 1]].tolist()
            if arrays.room[d] > 0
        ]
        if group and arrays.fewest[s] > 0:
            span = _stage_bound_s(arrays, group, int(arrays.fewest[s]), near, back)
            witness = {"kind": "stage visits", "stage": s}
            found.append(PathBound(span, f"visits of stage {s}", witness))
    found += [PathBound(*bound) for bound in link_bounds(arrays, near, back)]
    return max(found, key=lambda bound: bound.seconds)


def _start_bound(arrays: PathArrays, start: int) -> PathBound:
    """What a start device needs to let in its microbatches and to see them end."""
    count, memory = int((arrays.starts == start).sum()), int(arrays.memory[start])
    span = turnover_s(
        float(arrays.forward[start]),
        float(arrays.head[start]),
        float(arrays.backward[start]),
        memory,
        count,
        shortest_chain_s(arrays, start),
    )
    basis = f"turnover of start device {start}: {count} microbatches, {min(count, memory)} at once"
    return PathBound(span, basis, {"kind": "turnover", "device": start})


def _stage_bound_s(
    arrays: PathArrays, group: list[int], visits: int, near: Floats, back: Floats
) -> float:
    """Least time in which a stage's devices can take so many visits, found by bisection."""
    head = float(arrays.head.min())

    def fits(span: float) -> bool:
        total = 0
        for d in group:
            busy = float(arrays.forward[d] + arrays.backward[d])
            room = span - float(near[d] + back[d])
            if room < busy + head:
                continue
            total += min(int(arrays.room[d]), int(room / busy + 1e-9) if busy > 0 else visits)
        return total >= visits

    return least_span(fits)
