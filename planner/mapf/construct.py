"""Paths that satisfy CC1, CC2, CC3 and TC1 by construction, one microbatch after the other.

Every stage has a share of visits. A path must take the stages whose remaining share equals the
number of microbatches that are left, and may take those with any share left; so the shares come
out exactly (CC3). Among these the cheapest path by dynamic programming over the stages, in
ascending order: without swaps (CC2), live memory cannot deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.search.arrays import Floats, Ints


def construct(
    arrays: PathArrays, order: Sequence[int], toll: float, hop: Floats | None = None
) -> Ints:
    """Paths, microbatches in the given order; a device costs ``toll`` seconds per earlier visit."""
    count, length = arrays.microbatches, arrays.path_stages
    hops = arrays.hop if hop is None else hop
    share = arrays.shares()
    room = arrays.room.copy()
    load = np.zeros(len(room))
    paths = np.empty((count, length), dtype=np.int64)
    left = count
    for b in order:
        paths[b] = _cheapest(arrays, int(arrays.starts[b]), share, room, load * toll, hops, left)
        share[arrays.stage[paths[b]]] -= 1
        room[paths[b]] -= 1
        load[paths[b]] += 1
        left -= 1
    return paths


def _cheapest(
    arrays: PathArrays, start: int, share: Ints, room: Ints, fee: Floats, hop: Floats, left: int
) -> list[int]:
    """Cheapest ascending path through every stage that cannot wait."""
    stages = len(arrays.first) - 1
    # best[k][d]: cost of a path with k stages that ends at d, and the device before
    best: list[dict[int, tuple[float, int]]] = [{} for _ in range(arrays.path_stages)]
    best[0][start] = (0.0, -1)
    last = 0
    for s in range(1, stages):
        if share[s] <= 0:
            continue
        group = arrays.members[arrays.first[s] : arrays.first[s + 1]]
        devices = [d for d in group.tolist() if room[d] > 0]
        for k in range(arrays.path_stages - 1, 0, -1):
            for d in devices:
                # a stage that cannot wait is never jumped over
                options = [
                    (cost + hop[u, d] + hop[d, u], u)
                    for u, (cost, _) in best[k - 1].items()
                    if arrays.stage[u] >= last and arrays.stage[u] < s
                ]
                if options:
                    cost, u = min(options)
                    busy = arrays.forward[d] + arrays.backward[d]
                    best[k][d] = (cost + busy + fee[d], u)
        if share[s] >= left:
            last = s
    ends = [
        (cost + hop[d, start] + hop[start, d], d)
        for d, (cost, _) in best[-1].items()
        if arrays.stage[d] >= last
    ]
    _, at = min(ends, default=(math.inf, start))
    path = [at]
    for k in range(arrays.path_stages - 1, 0, -1):
        path.append(best[k][path[-1]][1])
    return path[::-1]


def by_chain(arrays: PathArrays, rng: np.random.Generator | None = None) -> list[int]:
    """Order of microbatches to build in: start devices far from everything first, or shuffled."""
    if rng is not None:
        return [int(b) for b in rng.permutation(arrays.microbatches)]
    reach = np.sort(arrays.hop + arrays.hop.T, axis=1)[:, : arrays.path_stages + 1].sum(axis=1)
    return sorted(range(arrays.microbatches), key=lambda b: (-reach[arrays.starts[b]], b))
