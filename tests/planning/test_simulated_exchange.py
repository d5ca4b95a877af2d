"""Exchanges of devices that shorten the simulated step of straight pipelines."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest

import planner as pl
from planner.planning.evaluation import straight_step_s
from planner.planning.problem import PlanningProblem
from planner.planning.shape import shape_of
from planner.planning.straight.simulated_exchange import _pairs
from planner.problems.answers import AssignmentPlan
from tests.conftest import tiny_workload
from tests.planning.test_plan import cluster_of

STOP = pl.Effort(5)


@pytest.mark.parametrize("stages", [2, 4])
def test_no_exchange_of_two_devices_shortens_the_step(stages: int) -> None:
    """After a limit that is not reached."""
    cluster, workload = cluster_of(8), tiny_workload()
    plan = pl.plan(cluster, workload, stages=stages, stop=STOP).plan
    assert plan is not None and plan.assignment.grid is not None
    problem = PlanningProblem(cluster, workload, pl.PlanRequest(stages=stages))
    shape, grid = shape_of(problem), plan.assignment.grid
    for a, b in combinations(range(grid.size), 2):
        exchanged = grid.copy()
        exchanged.flat[[a, b]] = grid.flat[[b, a]]
        step_s = straight_step_s(problem, shape, AssignmentPlan.of_grid(exchanged))
        assert step_s >= plan.predicted.step_s * (1 - 1e-9)


def test_the_order_of_devices_does_not_matter() -> None:
    """Several optima of eq. 1, of which one is fastest: four devices with latencies alone."""
    latency = np.array([[0, 9, 70, 41], [9, 0, 60, 33], [70, 60, 0, 24], [41, 33, 24, 0]]) * 1e-3
    steps = []
    for order in permutations(range(4)):
        network = pl.Network(latency[np.ix_(order, order)], np.full((4, 4), 1e8))
        cluster = pl.Cluster(network, pl.Devices.of_gpu("A100"))
        steps.append(pl.plan(cluster, tiny_workload(), stages=2, stop=STOP).objective)
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_limits_may_be_combined() -> None:
    """Effort and iterations: each exchange counts once."""
    cluster, workload = cluster_of(8), tiny_workload()
    steps = [
        pl.plan(cluster, workload, stages=4, stop=stop).objective
        for stop in (STOP, pl.AnyOf(STOP, pl.NoImprovement(10**6)))
    ]
    assert steps[0] == steps[1]


def test_pairs_of_many_places_are_drawn() -> None:
    """All pairs of few places, once each."""
    rng = np.random.default_rng(0)
    assert sorted(map(tuple, _pairs(5, rng).tolist())) == list(combinations(range(5), 2))
    drawn = _pairs(10_000, rng)
    assert drawn.shape == (256**2, 2) and drawn.max() > 9_000
