"""Greedy construction of paths that satisfy CC1, CC2, CC3 and TC1, one microbatch at a time.

Every stage has a quota of visits. A path must visit the stages whose remaining quota equals the
number of remaining microbatches, and may visit those with any quota left, so the quotas are met
exactly (CC3). Among these paths the cheapest is found by dynamic programming over ascending stages;
without swaps (CC2), live memory cannot deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.search.arrays import Floats, Ints


def construct(
    arrays: PathArrays, order: Sequence[int], visit_cost: float, transfer: Floats | None = None
) -> Ints:
    """Construct paths for microbatches in the given order.

    A device costs ``visit_cost`` additional seconds per earlier visit, which spreads the load.
    """
    count, length = arrays.microbatches, arrays.path_stages
    transfers = arrays.transfer if transfer is None else transfer
    quota = arrays.visits_per_stage()
    capacity = arrays.capacity.copy()
    load = np.zeros(len(capacity))
    paths = np.empty((count, length), dtype=np.int64)
    visits_left = count
    for b in order:
        paths[b] = _cheapest(
            arrays,
            int(arrays.starts[b]),
            quota,
            capacity,
            load * visit_cost,
            transfers,
            visits_left,
        )
        quota[arrays.stage[paths[b]]] -= 1
        capacity[paths[b]] -= 1
        load[paths[b]] += 1
        visits_left -= 1
    return paths


def _cheapest(
    arrays: PathArrays,
    start: int,
    share: Ints,
    capacity: Ints,
    visit_costs: Floats,
    transfer: Floats,
    visits_left: int,
) -> list[int]:
    """Cheapest ascending path through every stage whose quota requires a visit now."""
    stages = len(arrays.stage_ptr) - 1
    # best[k][d]: cost of a path with k stages that ends at d, and the device before
    best: list[dict[int, tuple[float, int]]] = [{} for _ in range(arrays.path_stages)]
    best[0][start] = (0.0, -1)
    last = 0
    for s in range(1, stages):
        if share[s] <= 0:
            continue
        group = arrays.members[arrays.stage_ptr[s] : arrays.stage_ptr[s + 1]]
        devices = [d for d in group.tolist() if capacity[d] > 0]
        for k in range(arrays.path_stages - 1, 0, -1):
            for d in devices:
                # a stage that requires a visit is never skipped
                options = [
                    (cost + transfer[u, d] + transfer[d, u], u)
                    for u, (cost, _) in best[k - 1].items()
                    if arrays.stage[u] >= last and arrays.stage[u] < s
                ]
                if options:
                    cost, u = min(options)
                    busy = arrays.forward[d] + arrays.backward[d]
                    best[k][d] = (cost + busy + visit_costs[d], u)
        if share[s] >= visits_left:
            last = s
    ends = [
        (cost + transfer[d, start] + transfer[start, d], d)
        for d, (cost, _) in best[-1].items()
        if arrays.stage[d] >= last
    ]
    _, at = min(ends, default=(math.inf, start))
    path = [at]
    for k in range(arrays.path_stages - 1, 0, -1):
        path.append(best[k][path[-1]][1])
    return path[::-1]


def construction_order(arrays: PathArrays, rng: np.random.Generator | None = None) -> list[int]:
    """Order in which paths are constructed: remote start devices first, or shuffled by ``rng``."""
    if rng is not None:
        return [int(b) for b in rng.permutation(arrays.microbatches)]
    reach = np.sort(arrays.transfer + arrays.transfer.T, axis=1)[:, : arrays.path_stages + 1].sum(
        axis=1
    )
    return sorted(range(arrays.microbatches), key=lambda b: (-reach[arrays.starts[b]], b))
