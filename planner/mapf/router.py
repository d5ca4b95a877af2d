"""Low level of SkipPipe's search: compiled A* over time for one microbatch (3.4).

Exactly ``path_stages`` stages under CC1 and CC2, forward, head and backward costed. The backward
pass waits where the forward pass need not, so a path is costed in full when its forward half is
complete, and put back with its true end; it is final when it comes out again (the paper's
re-insertion).
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
from planner.mapf.chains import Path
from planner.mapf.dispatch import device_at, seconds_at
from planner.mapf.intervals import Forbidden, Stay
from planner.mapf.moves import in_order
from planner.search.arrays import Bools2, Floats, Floats2, Ints
from planner.search.compiled import allocating_entry, entry, kernel

REMEMBERED = 1 << 16
"""Routes kept, so that the same question is not searched twice."""

ALWAYS = (-math.inf, math.inf)

SWAPS = -1
"""Stands for swapping where a rule names a place: who may not be there may not swap (D.2)."""


@dataclass(frozen=True)
class Route:
    """A microbatch's path with the times it is on each device, step by step: F, H, B.

    Attributes
    ----------
    messages
        Where links queue: the times it is on each link between its steps, at `link_place`.
    """

    path: Path
    stays: tuple[Stay, ...]
    messages: tuple[Stay, ...] = ()

    @property
    def end_s(self) -> float:
        """End of the last B."""
        return self.stays[-1].end


def link_place(devices: int, u: int, v: int) -> int:
    """The place that stands for the link from u to v; devices are the first places."""
    return devices + u * devices + v


class Ways(NamedTuple):
    """The numbers that the compiled search reads; ``link`` as in `PathArrays`.

    Attributes
    ----------
    allowed
        Whether a path may go from one device straight to another, CC2 aside.
    rest
        ``rest[k, d]``: least seconds of transfers and work after d with k devices to come.
    """

    hop: Floats2
    link: Floats2
    forward: Floats
    backward: Floats
    head: Floats
    stage: Ints
    allowed: Bools2
    rest: Floats2
    max_swaps: int


class Blocks(NamedTuple):
    """Times to avoid, those of place d at ``first[d]:first[d + 1]``, ascending."""

    first: Ints
    low: Floats
    high: Floats

    @classmethod
    def of(cls, rules: Iterable[Forbidden], places: int) -> Blocks:
        """From the rules of one microbatch."""
        ordered = sorted(rules)
        count = np.zeros(places + 1, dtype=np.int64)
        for rule in ordered:
            count[rule.place + 1] += 1
        return cls(
            np.cumsum(count),
            np.array([rule.begin for rule in ordered], dtype=np.float64),
            np.array([rule.end for rule in ordered], dtype=np.float64),
        )


class PathRouter:
    """Fastest routes; the rest of a chain is never longer than the heuristic says."""

    def __init__(self, arrays: PathArrays) -> None:
        self.arrays = arrays
        both = arrays.hop + arrays.hop.T
        busy = arrays.forward + arrays.backward
        gap = arrays.stage[None, :] - arrays.stage[:, None]
        back = (gap == -1) & (arrays.max_swaps > 0)
        allowed = ((gap > 0) | back) & ((arrays.room > 0) & (arrays.stage > 0))[None, :]
        arcs = np.where(allowed, both, math.inf)
        self.ways: dict[int, Ways] = {}
        for start in dict.fromkeys(arrays.starts.tolist()):
            rows = [both[:, start]]
            for _ in range(arrays.path_stages - 1):
                rows.append((arcs + busy[None, :] + rows[-1][None, :]).min(axis=1))
            self.ways[start] = Ways(
                arrays.hop,
                arrays.link,
                arrays.forward,
                arrays.backward,
                arrays.head,
                arrays.stage,
                allowed,
                np.array(rows),
                arrays.max_swaps,
            )
        self._remembered = lru_cache(maxsize=REMEMBERED)(self._search)

    def route(self, agent: int, rules: Iterable[Forbidden]) -> Route | None:
        """The fastest path under the agent's rules, None if there is none."""
        return self._remembered(agent, tuple(sorted(set(rules))))

    def _search(self, agent: int, rules: tuple[Forbidden, ...]) -> Route | None:
        t = self.arrays
        start = int(t.starts[agent])
        path = np.full(t.path_stages, -1, dtype=np.int64)
        begin, leaves = np.zeros(t.steps), np.zeros(t.steps)
        ways, places = self.ways[start], [rule for rule in rules if rule.place != SWAPS]
        if len(places) < len(rules):
            ways = ways._replace(max_swaps=0)
        devices = len(t.stage)
        blocks = Blocks.of(places, devices * (devices + 1) if t.queueing else devices)
        found = fastest(ways, blocks, start, path, begin, leaves)
        if not found:
            return None
        stops = path.tolist()
        chain = [*((d, t.forward) for d in stops), (start, t.head)]
        chain += [(d, t.backward) for d in reversed(stops)]
        stays = tuple(
            Stay(agent, d, at, at + float(seconds[d]))
            for (d, seconds), at in zip(chain, begin.tolist(), strict=True)
        )
        if not t.queueing:
            return Route(tuple(stops), stays)
        messages = tuple(
            Stay(agent, link_place(devices, u, v), at, at + float(t.link[u, v]))
            for ((u, _), (v, _)), at in zip(pairwise(chain), leaves[1:].tolist(), strict=True)
            if u != v
        )
        return Route(tuple(stops), stays, messages)


@kernel
def clear(blocks: Blocks, d: int, begin: float, length: float) -> float:
    """First time from ``begin`` on with ``length`` clear of all blocks of a place, or infinity."""
    at = begin
    if length > 0:
        for k in range(blocks.first[d], blocks.first[d + 1]):
            if at < blocks.high[k] and blocks.low[k] < at + length:
                at = blocks.high[k]
    return at


@kernel
def leave(ways: Ways, blocks: Blocks, u: int, v: int, ready: float) -> float:
    """First time from ``ready`` on when a message from u to v has its link for itself."""
    devices = len(ways.link)
    if devices == 0 or u == v:
        return ready
    return clear(blocks, devices + u * devices + v, ready, ways.link[u, v])


@entry
def timed(ways: Ways, blocks: Blocks, path: Ints, begin: Floats, leaves: Floats) -> float:
    """Fill the earliest starts of all steps, and when the messages before them leave.

    Returns the end, infinite if there is none.
    """
    length = len(path)
    ready, at = 0.0, path[0]
    for k in range(2 * length + 1):
        d = device_at(path, k)
        seconds = seconds_at(ways, d, k, length)
        leaves[k] = leave(ways, blocks, at, d, ready)
        ready = clear(blocks, d, leaves[k] + ways.hop[at, d], seconds)
        if math.isinf(ready):
            return ready
        begin[k] = ready
        ready += seconds
        at = d
    return ready


@allocating_entry
def fastest(
    ways: Ways, blocks: Blocks, start: int, path: Ints, begin: Floats, leaves: Floats
) -> bool:
    """Fill in the fastest path and its times, as `timed` does; False if there is none."""
    length = len(path)
    fixed = ways.head[start] + ways.backward[start]
    room = 256
    paths = np.empty((room, length), dtype=np.int64)
    size = np.empty(room, dtype=np.int64)
    out = np.empty(room)  # end of the last F
    behind = np.empty(room)  # the way back along the path, nobody in the way
    done = np.zeros(room, dtype=np.bool_)
    count = 1
    paths[0, 0] = start
    size[0] = 1
    out[0] = clear(blocks, start, 0.0, ways.forward[start]) + ways.forward[start]
    behind[0] = 0.0
    queue = [(out[0] + ways.rest[length - 1, start] + fixed, 0)]
    while len(queue) > 0:
        cost, at = heapq.heappop(queue)
        if math.isinf(cost):
            return False
        if done[at]:
            path[:] = paths[at]
            timed(ways, blocks, path, begin, leaves)
            return True
        if size[at] == length:
            done[at] = True
            heapq.heappush(queue, (timed(ways, blocks, paths[at], begin, leaves), at))
            continue
        k = size[at]
        u = paths[at, k - 1]
        for v in range(len(ways.stage)):
            if not ways.allowed[u, v]:
                continue
            if count == room:
                paths = np.concatenate((paths, np.empty_like(paths)))
                size = np.concatenate((size, np.empty_like(size)))
                out = np.concatenate((out, np.empty_like(out)))
                behind = np.concatenate((behind, np.empty_like(behind)))
                done = np.concatenate((done, np.zeros_like(done)))
                room *= 2
            paths[count, :k] = paths[at, :k]
            paths[count, k] = v
            if not in_order(paths[count, : k + 1], ways.stage, ways.max_swaps):
                continue
            there = leave(ways, blocks, u, v, out[at]) + ways.hop[u, v]
            enter = clear(blocks, v, there, ways.forward[v])
            if math.isinf(enter):
                continue
            size[count] = k + 1
            out[count] = enter + ways.forward[v]
            behind[count] = behind[at] + ways.hop[v, u] + ways.backward[v]
            estimate = out[count] + ways.rest[length - 1 - k, v] + behind[count] + fixed
            heapq.heappush(queue, (estimate, count))
            count += 1
    return False
