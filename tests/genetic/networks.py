"""Small networks and an independent brute force for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from planner.network import Network
from planner.problems import AssignmentProblem


def random_network(n: int, seed: int, *, sites: int | None = None) -> Network:
    """Every pair different, or ``sites`` groups of interchangeable devices."""
    rng = np.random.default_rng(seed)
    at = np.arange(n) if sites is None else rng.integers(0, sites, n)
    latency = rng.uniform(0.001, 0.1, (n, n))[np.ix_(at, at)]
    bandwidth = rng.uniform(1e8, 5e9, (n, n))[np.ix_(at, at)]
    return Network((latency + latency.T) / 2, (bandwidth + bandwidth.T) / 2)


def partitions(devices: Sequence[int], sizes: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """All ways to fill stages of the given sizes in order."""
    if not sizes:
        yield []
        return
    for group in combinations(devices, sizes[0]):
        rest = [d for d in devices if d not in group]
        for tail in partitions(rest, sizes[1:]):
            yield [group, *tail]


def brute_force(problem: AssignmentProblem) -> float:
    """Cost of the best plan by the definitions of `AssignmentProblem`."""
    devices = range(len(problem.network))
    return min(problem.cost(groups) for groups in partitions(list(devices), problem.stage_sizes))
