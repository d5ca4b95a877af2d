"""Lower bounds on the makespan that need no search: chains, loads, memory, links."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.entry_times import entry_and_return_s, min_feasible_span
from planner.mapf.link_bounds import link_bounds
from planner.mapf.start_turnover import turnover_s
from planner.search.arrays import Floats
from planner.search.certificate import Witness


class PathBound(NamedTuple):
    """A lower bound in seconds with its basis and witness."""

    seconds: float
    basis: str
    witness: Witness


def shortest_chain_s(arrays: PathArrays, start: int) -> float:
    """Shortest possible chain of F, H, B and transfers for one microbatch; exact (CC1, CC2).

    Dynamic programming over positions on the path. ``plain`` is the cost of paths that end at a
    device of their highest stage, ``wide`` of those among them that left out the stage before it,
    and ``back`` of those that end with that stage, swapped; each by the number of swaps so far.
    """
    round_trip = arrays.transfer + arrays.transfer.T
    busy = arrays.forward + arrays.backward
    gap = arrays.stage[None, :] - arrays.stage[:, None]
    usable = (arrays.capacity > 0)[None, :] & (arrays.stage > 0)[None, :]
    up1, up2, up3 = (np.where((gap >= least) & usable, round_trip, math.inf) for least in (1, 2, 3))
    down = np.where((gap == -1) & usable, round_trip, math.inf)
    swaps = min(arrays.max_swaps, (arrays.path_stages - 1) // 2)
    plain = np.full((swaps + 1, len(arrays.stage)), math.inf)
    wide, back = plain.copy(), plain.copy()
    plain[0, start] = 0.0
    for _ in range(arrays.path_stages - 1):
        swapped = np.full_like(plain, math.inf)
        swapped[1:] = _extend(wide, down)[:-1]
        # after a swap the highest stage visited is one above the current one
        further = np.minimum(_extend(plain, up2), _extend(back, up3))
        plain = np.minimum(_extend(plain, up1), _extend(back, up2)) + busy
        wide, back = further + busy, swapped + busy
    round_trips = float((np.minimum(plain, back) + round_trip[:, start]).min())
    return float(round_trips + busy[start] + arrays.head[start])


def _extend(cost: Floats, arcs: Floats) -> Floats:
    """Least cost at every device after one more arc."""
    shortest: Floats = (cost[:, :, None] + arcs[None]).min(axis=1)
    return shortest


def simple_bound(arrays: PathArrays) -> PathBound:
    """The largest of the bounds of every start device and every stage.

    Notes
    -----
    Queueing on links only delays, so bounds that ignore it hold. The witness names the device or
    the stage; `planner.checker.path_bounds` recomputes the bound from it and the problem.
    """
    starts = list(dict.fromkeys(arrays.starts.tolist()))
    bounds = [_start_bound(arrays, start) for start in starts]
    entry_s, return_s = entry_and_return_s(arrays, starts)
    for s in range(1, len(arrays.min_visits)):
        group = [
            d
            for d in arrays.members[arrays.stage_ptr[s] : arrays.stage_ptr[s + 1]].tolist()
            if arrays.capacity[d] > 0
        ]
        if group and arrays.min_visits[s] > 0:
            span = _stage_bound_s(arrays, group, int(arrays.min_visits[s]), entry_s, return_s)
            witness = {"kind": "stage visits", "stage": s}
            bounds.append(PathBound(span, f"visits of stage {s}", witness))
    bounds += [PathBound(*bound) for bound in link_bounds(arrays, entry_s, return_s)]
    return max(bounds, key=lambda bound: bound.seconds)


def _start_bound(arrays: PathArrays, start: int) -> PathBound:
    """Least time for a start device to start and finish all of its microbatches."""
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
    arrays: PathArrays, group: list[int], visits: int, entry_s: Floats, return_s: Floats
) -> float:
    """Least time in which a stage's devices can process ``visits`` visits, by bisection."""
    head = float(arrays.head.min())

    def fits(span: float) -> bool:
        total = 0
        for d in group:
            busy = float(arrays.forward[d] + arrays.backward[d])
            time_left = span - float(entry_s[d] + return_s[d])
            if time_left < busy + head:
                continue
            total += min(
                int(arrays.capacity[d]), int(time_left / busy + 1e-9) if busy > 0 else visits
            )
        return total >= visits

    return min_feasible_span(fits)
