"""Recomputes bounds on DT-FM's cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.network.network import Network

Floats = NDArray[np.float64]


def recomputed_bound_s(
    witness: Mapping[str, Any],
    network: Network,
    stage_sizes: Sequence[int],
    activation_bytes: Sequence[float],
    gradient_bytes: Sequence[float],
) -> float | None:
    """The bound on eq. 1 that a witness proves, computed from the problem alone."""
    sizes, n = list(stage_sizes), len(network)
    fits = (
        bool(sizes)
        and min(sizes) >= 1
        and sum(sizes) == n
        and len(activation_bytes) == len(sizes) - 1
        and len(gradient_bytes) == len(sizes)
    )
    if not fits or witness.get("kind") != "star and forest":
        return None
    latency = (network.latency_s + network.latency_s.T) / 2
    bandwidth = (network.bandwidth_bytes_per_s + network.bandwidth_bytes_per_s.T) / 2
    return _star_s(latency, bandwidth, sizes, gradient_bytes) + _forest_s(
        latency, bandwidth, sizes, activation_bytes
    )


def _star_s(
    latency: Floats, bandwidth: Floats, sizes: Sequence[int], gradient_bytes: Sequence[float]
) -> float:
    """Bound on eq. 2: the most expensive device in its cheapest stage with cheapest partners."""
    dearest = 0.0
    for d in range(len(latency)):
        cheapest = np.inf
        for size, gradient in {*zip(sizes, gradient_bytes, strict=True)}:
            pays = 2 * (latency[d] + gradient / (size * bandwidth[d]))
            partners = sorted(np.delete(pays, d).tolist())[: size - 1]
            cheapest = min(cheapest, sum(partners))
        dearest = max(dearest, cheapest)
    return float(dearest)


def _forest_s(
    latency: Floats, bandwidth: Floats, sizes: Sequence[int], activation_bytes: Sequence[float]
) -> float:
    """Bound on eq. 4: add links from the fastest on; boundaries fill as early as possible.

    The hops of a plan form disjoint paths. So c devices that are linked with each other hold at
    most c - 1 of them, and at most half as many as they have ends, of which a device has two.
    """
    waiting = sorted(min(a, b) for a, b in pairwise(sizes))
    if not waiting:
        return 0.0
    n = len(latency)
    hop = 2 * (latency + min(activation_bytes) / bandwidth)
    rows, columns = np.triu_indices(n, 1)
    prices = hop[rows, columns]
    leader, members, ends, degree = list(range(n)), [1] * n, [0] * n, [0] * n

    def lead(d: int) -> int:
        while leader[d] != d:
            leader[d] = leader[leader[d]]
            d = leader[d]
        return d

    def room(d: int) -> int:
        return min(members[d] - 1, ends[d] // 2)

    total = 0.0
    held, needed, filled = 0, waiting[0], 0
    for at in np.argsort(prices, kind="stable").tolist():
        a, b = int(rows[at]), int(columns[at])
        x, y = lead(a), lead(b)
        held -= room(x) + (room(y) if x != y else 0)
        for d, leads in ((a, x), (b, y)):
            ends[leads] += degree[d] < 2
            degree[d] += 1
        if x != y:
            leader[y] = x
            members[x] += members[y]
            ends[x] += ends[y]
        held += room(x)
        while held >= needed:
            total += float(prices[at])
            filled += 1
            if filled == len(waiting):
                return total
            needed += waiting[filled]
    return total
