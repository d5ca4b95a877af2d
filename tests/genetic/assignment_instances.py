"""Assignment problems small enough to enumerate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import numpy as np

from planner.network.network import Network
from planner.problems import AssignmentProblem

Groups = list[tuple[int, ...]]

SHAPES: list[dict[str, object]] = [
    {"stages": 1, "pipelines": 4},
    {"stages": 4, "pipelines": 1},
    {"stages": 2, "pipelines": 3},
    {"stages": 3, "pipelines": 2},
    {"stages": 2, "pipelines": 4},
    {"stage_sizes": (3, 2, 1)},
    {"stage_sizes": (1, 3, 1)},
    {"stage_sizes": (2, 1, 2), "activation_bytes": (1e8, 9e8), "gradient_bytes": (1e8, 4e8, 9e8)},
    {"stages": 2, "pipelines": 2, "gradient_bytes": (1e7, 9e8)},
]


def random_network(n: int, seed: int, *, sites: int | None = None) -> Network:
    """Random pairs, or ``sites`` groups of interchangeable devices."""
    rng = np.random.default_rng(seed)
    at = np.arange(n) if sites is None else rng.integers(0, sites, n)
    latency = rng.uniform(0.001, 0.1, (n, n))[np.ix_(at, at)]
    bandwidth = rng.uniform(1e8, 5e9, (n, n))[np.ix_(at, at)]
    return Network((latency + latency.T) / 2, (bandwidth + bandwidth.T) / 2)


def partitions(devices: Sequence[int], sizes: Sequence[int]) -> Iterator[Groups]:
    """All ways to fill stages of the given sizes in order."""
    if not sizes:
        yield []
        return
    for group in combinations(devices, sizes[0]):
        rest = [d for d in devices if d not in group]
        for tail in partitions(rest, sizes[1:]):
            yield [group, *tail]


def best_groups(
    problem: AssignmentProblem, cost: Callable[[Groups], float] | None = None
) -> Groups:
    """The best plan of all by the definitions of `AssignmentProblem`, or by another cost."""
    devices = list(range(len(problem.network)))
    return min(partitions(devices, problem.stage_sizes), key=cost or problem.cost)


def brute_force(problem: AssignmentProblem) -> float:
    """Cost of the best plan by the definitions of `AssignmentProblem`."""
    return problem.cost(best_groups(problem))


def problem_of(shape: dict[str, object], seed: int, sites: int | None = None) -> AssignmentProblem:
    sizes = shape.get("stage_sizes")
    n = sum(sizes) if sizes else shape["stages"] * shape["pipelines"]  # type: ignore
    data: dict[str, object] = {"activation_bytes": 3e8, "gradient_bytes": 5e8, **shape}
    return AssignmentProblem(random_network(n, seed, sites=sites), **data)  # type: ignore[arg-type]
