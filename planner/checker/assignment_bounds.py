"""Recomputes bounds on DT-FM's cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.checker.packing_bound import packing_s
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
    matches = (
        bool(sizes)
        and min(sizes) >= 1
        and sum(sizes) == n
        and len(activation_bytes) == len(sizes) - 1
        and len(gradient_bytes) == len(sizes)
    )
    if not matches or witness.get("kind") not in ("star and forest", "packing"):
        return None
    latency = (network.latency_s + network.latency_s.T) / 2
    bandwidth = (network.bandwidth_bytes_per_s + network.bandwidth_bytes_per_s.T) / 2
    star_s = _star_s(latency, bandwidth, sizes, gradient_bytes)
    if witness["kind"] == "star and forest":
        return star_s + _forest_s(latency, bandwidth, sizes, activation_bytes)
    if any(len(set(values)) != 1 for values in (sizes, activation_bytes, gradient_bytes)):
        return None
    hop_s = 2 * (latency + activation_bytes[0] / bandwidth)
    exchange_s = 2 * (latency + gradient_bytes[0] / (sizes[0] * bandwidth))
    return packing_s(witness, hop_s, exchange_s, len(sizes), star_s)


def _star_s(
    latency: Floats, bandwidth: Floats, sizes: Sequence[int], gradient_bytes: Sequence[float]
) -> float:
    """Bound on eq. 2: the most expensive device in its cheapest stage with cheapest partners."""
    max_cost_s = 0.0
    for d in range(len(latency)):
        min_cost_s = np.inf
        for size, gradient in {*zip(sizes, gradient_bytes, strict=True)}:
            pair_s = 2 * (latency[d] + gradient / (size * bandwidth[d]))
            partners = sorted(np.delete(pair_s, d).tolist())[: size - 1]
            min_cost_s = min(min_cost_s, sum(partners))
        max_cost_s = max(max_cost_s, min_cost_s)
    return float(max_cost_s)


def _forest_s(
    latency: Floats, bandwidth: Floats, sizes: Sequence[int], activation_bytes: Sequence[float]
) -> float:
    """Bound on eq. 4: add links from the fastest on; boundaries fill as early as possible.

    The hops of a plan form disjoint paths. So c devices that are linked with each other hold at
    most c - 1 of them, and at most half as many as they have ends, of which a device has two.
    """
    boundary_sizes = sorted(min(a, b) for a, b in pairwise(sizes))
    if not boundary_sizes:
        return 0.0
    n = len(latency)
    hop = 2 * (latency + min(activation_bytes) / bandwidth)
    rows, columns = np.triu_indices(n, 1)
    hop_s = hop[rows, columns]
    parent, members, ends, degree = list(range(n)), [1] * n, [0] * n, [0] * n

    def find(d: int) -> int:
        while parent[d] != d:
            parent[d] = parent[parent[d]]
            d = parent[d]
        return d

    def capacity(d: int) -> int:
        return min(members[d] - 1, ends[d] // 2)

    total = 0.0
    num_hops, num_needed, num_filled = 0, boundary_sizes[0], 0
    for edge in np.argsort(hop_s, kind="stable").tolist():
        a, b = int(rows[edge]), int(columns[edge])
        x, y = find(a), find(b)
        num_hops -= capacity(x) + (capacity(y) if x != y else 0)
        for d, root in ((a, x), (b, y)):
            ends[root] += degree[d] < 2
            degree[d] += 1
        if x != y:
            parent[y] = x
            members[x] += members[y]
            ends[x] += ends[y]
        num_hops += capacity(x)
        while num_hops >= num_needed:
            total += float(hop_s[edge])
            num_filled += 1
            if num_filled == len(boundary_sizes):
                return total
            num_needed += boundary_sizes[num_filled]
    return total
