"""SAILOR's rule: stages within regions along the widest order, by its own estimate."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.planning.baselines.sailor import _costs, _estimate_s, _grids, _orders, sailor_rule
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.problems import ProblemError
from tests.conftest import random_network, regional_network, tiny_workload


def regions_of(sizes: list[int], seed: int = 0, **devices: object) -> PlanningProblem:
    """Regions with several devices and different links between them."""
    fields: dict[str, object] = {"flops": 1e9, "memory_bytes": 16e9} | devices
    cluster = pl.Cluster(regional_network(sizes, seed), pl.Devices(**fields))  # type: ignore[arg-type]
    return PlanningProblem.of(cluster, tiny_workload(), PlanRequest(), 0, {})


@settings(max_examples=20)
@given(st.integers(0, 100), st.integers(2, 5))
def test_each_set_of_regions_has_its_widest_order(seed: int, count: int) -> None:
    """Compared with all permutations."""
    network = random_network(count, seed)
    bandwidth = network.bandwidth_bytes_per_s
    wide = np.minimum(bandwidth, bandwidth.T)

    def narrowest(order: tuple[int, ...]) -> float:
        return min((float(wide[a, b]) for a, b in pairwise(order)), default=np.inf)

    orders = list(_orders(range(count), network.bandwidth_table))
    assert sorted(map(sorted, orders)) == sorted(
        sorted(r for r in range(count) if chosen >> r & 1) for chosen in range(1, 1 << count)
    )
    for order in orders:
        assert narrowest(order) == max(map(narrowest, permutations(order)))


def test_stages_stay_within_regions() -> None:
    """Of equal width; regions with too few remaining devices are skipped."""
    problem = regions_of([5, 3])
    regions = problem.cluster.network.regions
    grids = list(_grids([range(5), range(5, 8)], _costs(problem), problem))
    found = {(len(grid), len(grid[0])) for grid in grids}
    # one wide: the second region from the sixth stage on, but there are four layers
    assert found == {(2, 3), (3, 2)}
    for grid in grids:
        for j in range(len(grid[0])):
            assert len({regions[d] for d in grid[:, j]}) == 1


def test_the_estimate_by_hand() -> None:
    """Two stages of two: compute, messages, slowest stage per microbatch, ring all-reduce."""
    problem = regions_of([2, 2])
    costs = _costs(problem)[2]
    grid = np.array([[0, 2], [1, 3]])
    net, size = problem.cluster.network, costs[0].output_bytes
    hop = max(
        net.latency_s[a, b] + size / net.bandwidth_bytes_per_s[a, b]
        for a, b in ((0, 2), (2, 0), (1, 3), (3, 1))
    )
    own = [cost.busy_s(1e9) for cost in costs]
    ring = max(2 * (cost.gradient_bytes / 2 / 1e9 + 0.001) for cost in costs)
    by_hand = sum(own) + 2 * hop + 3 * max(own[0] + hop, own[1]) + ring
    assert _estimate_s(grid, costs, problem) == pytest.approx(by_hand)


def test_lowest_estimate_is_simulated() -> None:
    """Deterministic; a plan on fewer devices."""
    problem = regions_of([4, 2, 3])
    found = sailor_rule(problem)
    assert found == sailor_rule(problem)
    assert found.plan.devices == found.plan.stages * found.plan.pipelines <= 9
    best = pl.plan(problem.cluster, problem.workload, stop=pl.Effort(2))
    assert best.objective is not None and best.objective <= found.plan.step_s * 1.02


def test_infeasible_requests_are_rejected() -> None:
    """In one line."""
    small = regions_of([2, 2], memory_bytes=1e3)
    with pytest.raises(ProblemError, match="no shape of SAILOR's rule fits"):
        sailor_rule(small)
