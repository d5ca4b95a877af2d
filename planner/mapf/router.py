"""Low level of SkipPipe's CBS: compiled A* over time for one microbatch (3.4).

Routes visit exactly ``path_stages`` stages under CC1 and CC2, and cost F, H and B. The backward
pass may have to wait where the forward pass does not, so a path is scheduled in full when its
forward half is complete, and reinserted with its true end; it is final when popped again (the
paper's re-insertion).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.intervals import Constraint, Occupancy
from planner.mapf.list_scheduling import device_at, duration_at
from planner.mapf.moves import in_order
from planner.mapf.path_enumeration import Path
from planner.search.arrays import Bools2, Floats, Floats2, Ints
from planner.search.compiled import allocating_entry, entry, kernel

CACHE_SIZE = 1 << 16
"""Maximum number of cached routes."""

ALWAYS = (-math.inf, math.inf)

NO_SWAPS = -1
"""Pseudo-resource of a constraint that forbids the agent to swap stages (D.2)."""


@dataclass(frozen=True)
class Route:
    """A microbatch's path with its occupancy of each device, step by step: F, H, B.

    Attributes
    ----------
    messages
        Where links queue: its occupancy of each link between steps, at `link_resource`.
    """

    path: Path
    occupancies: tuple[Occupancy, ...]
    messages: tuple[Occupancy, ...] = ()

    @property
    def end_s(self) -> float:
        """End of the last B."""
        return self.occupancies[-1].end


def link_resource(devices: int, u: int, v: int) -> int:
    """Resource index of the link from u to v; resources below ``devices`` are devices."""
    return devices + u * devices + v


class RouterData(NamedTuple):
    """Arrays that the compiled search reads; durations as in `PathArrays`.

    Attributes
    ----------
    allowed
        Whether a path may go directly from one device to another, ignoring CC2.
    cost_to_go
        ``cost_to_go[k, d]``: admissible heuristic, least seconds of transfers and work after d
        with k devices to come.
    """

    transfer: Floats2
    link: Floats2
    forward: Floats
    backward: Floats
    head: Floats
    stage: Ints
    allowed: Bools2
    cost_to_go: Floats2
    max_swaps: int


class BlockedTimes(NamedTuple):
    """Forbidden intervals, those of resource d at ``ptr[d]:ptr[d + 1]``, ascending."""

    ptr: Ints
    low: Floats
    high: Floats

    @classmethod
    def of(cls, constraints: Iterable[Constraint], num_resources: int) -> BlockedTimes:
        """From the constraints of one microbatch."""
        ordered = sorted(constraints)
        count = np.zeros(num_resources + 1, dtype=np.int64)
        for constraint in ordered:
            count[constraint.resource + 1] += 1
        return cls(
            np.cumsum(count),
            np.array([constraint.begin for constraint in ordered], dtype=np.float64),
            np.array([constraint.end for constraint in ordered], dtype=np.float64),
        )


class PathRouter:
    """Fastest routes by A* with an admissible heuristic."""

    def __init__(self, arrays: PathArrays) -> None:
        self.arrays = arrays
        round_trip = arrays.transfer + arrays.transfer.T
        busy = arrays.forward + arrays.backward
        gap = arrays.stage[None, :] - arrays.stage[:, None]
        back = (gap == -1) & (arrays.max_swaps > 0)
        allowed = ((gap > 0) | back) & ((arrays.capacity > 0) & (arrays.stage > 0))[None, :]
        arcs = np.where(allowed, round_trip, math.inf)
        self.data: dict[int, RouterData] = {}
        for start in dict.fromkeys(arrays.starts.tolist()):
            cost_to_go = [round_trip[:, start]]
            for _ in range(arrays.path_stages - 1):
                cost_to_go.append((arcs + busy[None, :] + cost_to_go[-1][None, :]).min(axis=1))
            self.data[start] = RouterData(
                arrays.transfer,
                arrays.link,
                arrays.forward,
                arrays.backward,
                arrays.head,
                arrays.stage,
                allowed,
                np.array(cost_to_go),
                arrays.max_swaps,
            )
        self._cached_search = lru_cache(maxsize=CACHE_SIZE)(self._search)

    def route(self, agent: int, constraints: Iterable[Constraint]) -> Route | None:
        """The fastest route under the agent's constraints, None if there is none."""
        return self._cached_search(agent, tuple(sorted(set(constraints))))

    def _search(self, agent: int, constraints: tuple[Constraint, ...]) -> Route | None:
        t = self.arrays
        start = int(t.starts[agent])
        path = np.full(t.path_stages, -1, dtype=np.int64)
        begin, departs = np.zeros(t.steps), np.zeros(t.steps)
        data, intervals = (
            self.data[start],
            [constraint for constraint in constraints if constraint.resource != NO_SWAPS],
        )
        if len(intervals) < len(constraints):
            data = data._replace(max_swaps=0)
        devices = len(t.stage)
        blocks = BlockedTimes.of(intervals, devices * (devices + 1) if t.queueing else devices)
        route = fastest_path(data, blocks, start, path, begin, departs)
        if not route:
            return None
        devices_of_path = path.tolist()
        chain = [*((d, t.forward) for d in devices_of_path), (start, t.head)]
        chain += [(d, t.backward) for d in reversed(devices_of_path)]
        occupancies = tuple(
            Occupancy(agent, d, at, at + float(seconds[d]))
            for (d, seconds), at in zip(chain, begin.tolist(), strict=True)
        )
        if not t.queueing:
            return Route(tuple(devices_of_path), occupancies)
        messages = tuple(
            Occupancy(agent, link_resource(devices, u, v), at, at + float(t.link[u, v]))
            for ((u, _), (v, _)), at in zip(pairwise(chain), departs[1:].tolist(), strict=True)
            if u != v
        )
        return Route(tuple(devices_of_path), occupancies, messages)


@kernel
def earliest_clear(blocks: BlockedTimes, resource: int, begin: float, length: float) -> float:
    """Earliest start from ``begin`` on of ``length`` unblocked seconds on a resource, or inf."""
    at = begin
    if length > 0:
        for k in range(blocks.ptr[resource], blocks.ptr[resource + 1]):
            if at < blocks.high[k] and blocks.low[k] < at + length:
                at = blocks.high[k]
    return at


@kernel
def earliest_departure(
    data: RouterData, blocks: BlockedTimes, u: int, v: int, ready: float
) -> float:
    """Earliest departure from ``ready`` on of a message from u to v on its link."""
    devices = len(data.link)
    if devices == 0 or u == v:
        return ready
    return earliest_clear(blocks, devices + u * devices + v, ready, data.link[u, v])


@entry
def earliest_schedule(
    data: RouterData, blocks: BlockedTimes, path: Ints, begin: Floats, departs: Floats
) -> float:
    """Fill the earliest starts of all steps and the departures of their messages.

    Returns the end of the route, infinite if there is none.
    """
    length = len(path)
    ready, at = 0.0, path[0]
    for k in range(2 * length + 1):
        d = device_at(path, k)
        seconds = duration_at(data, d, k, length)
        departs[k] = earliest_departure(data, blocks, at, d, ready)
        ready = earliest_clear(blocks, d, departs[k] + data.transfer[at, d], seconds)
        if math.isinf(ready):
            return ready
        begin[k] = ready
        ready += seconds
        at = d
    return ready


@allocating_entry
def fastest_path(
    data: RouterData, blocks: BlockedTimes, start: int, path: Ints, begin: Floats, departs: Floats
) -> bool:
    """Fill in the fastest path and its times; False if there is none."""
    length = len(path)
    fixed = data.head[start] + data.backward[start]
    capacity = 256
    paths = np.empty((capacity, length), dtype=np.int64)
    size = np.empty(capacity, dtype=np.int64)
    out = np.empty(capacity)  # end of the last F
    return_s = np.empty(capacity)  # backward pass along the path, without waiting
    done = np.zeros(capacity, dtype=np.bool_)
    count = 1
    paths[0, 0] = start
    size[0] = 1
    out[0] = earliest_clear(blocks, start, 0.0, data.forward[start]) + data.forward[start]
    return_s[0] = 0.0
    queue = [(out[0] + data.cost_to_go[length - 1, start] + fixed, 0)]
    while len(queue) > 0:
        cost, at = heapq.heappop(queue)
        if math.isinf(cost):
            return False
        if done[at]:
            path[:] = paths[at]
            earliest_schedule(data, blocks, path, begin, departs)
            return True
        if size[at] == length:
            done[at] = True
            heapq.heappush(queue, (earliest_schedule(data, blocks, paths[at], begin, departs), at))
            continue
        k = size[at]
        u = paths[at, k - 1]
        for v in range(len(data.stage)):
            if not data.allowed[u, v]:
                continue
            if count == capacity:
                paths = np.concatenate((paths, np.empty_like(paths)))
                size = np.concatenate((size, np.empty_like(size)))
                out = np.concatenate((out, np.empty_like(out)))
                return_s = np.concatenate((return_s, np.empty_like(return_s)))
                done = np.concatenate((done, np.zeros_like(done)))
                capacity *= 2
            paths[count, :k] = paths[at, :k]
            paths[count, k] = v
            if not in_order(paths[count, : k + 1], data.stage, data.max_swaps):
                continue
            there = earliest_departure(data, blocks, u, v, out[at]) + data.transfer[u, v]
            enter = earliest_clear(blocks, v, there, data.forward[v])
            if math.isinf(enter):
                continue
            size[count] = k + 1
            out[count] = enter + data.forward[v]
            return_s[count] = return_s[at] + data.transfer[v, u] + data.backward[v]
            estimate = out[count] + data.cost_to_go[length - 1 - k, v] + return_s[count] + fixed
            heapq.heappush(queue, (estimate, count))
            count += 1
    return False
