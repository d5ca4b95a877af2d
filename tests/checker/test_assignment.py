"""Checker of assignments: recomputed costs against brute force, and every rule can fail."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.checker.assignment import assignment_cost_s, smallest_bottleneck
from planner.checker.dispatch import check
from planner.problems import AssignmentProblem
from planner.problems.answers import AssignmentPlan
from tests.conftest import random_network


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 10_000))
def test_smallest_bottleneck_against_all_matchings(rows: int, columns: int, seed: int) -> None:
    """Also for rectangular matrices with ties."""
    cost = np.random.default_rng(seed).integers(0, 6, (rows, columns)).astype(float)
    small = cost if rows <= columns else cost.T
    best = min(
        max(small[i, j] for i, j in enumerate(chosen))
        for chosen in permutations(range(small.shape[1]), small.shape[0])
    )
    assert smallest_bottleneck(cost) == best


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 10_000))
def test_cost_agrees_with_the_problem(stages: int, pipelines: int, seed: int) -> None:
    """Two implementations of eq. 1-4, with bytes that differ per stage and boundary."""
    rng = np.random.default_rng(seed)
    n = stages * pipelines
    network = random_network(n, seed)
    activations = rng.uniform(1e6, 1e8, stages - 1).tolist()
    gradients = rng.uniform(1e6, 1e8, stages).tolist()
    problem = AssignmentProblem(network, stages, pipelines, activations, gradients)
    groups = rng.permutation(n).reshape(stages, pipelines).tolist()
    assert assignment_cost_s(groups, network, activations, gradients) == pytest.approx(
        problem.cost(groups), rel=1e-12
    )


def problem4() -> AssignmentProblem:
    """Four devices, 2 x 2."""
    return AssignmentProblem(random_network(4), 2, 2, 1e8, 1e8)


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (AssignmentPlan.of_groups([[0, 1, 2], [3]]), "eq. 1"),
        (AssignmentPlan(((0, 1), (1, 3)), np.array([[0, 1], [1, 3]])), "eq. 1"),
        (AssignmentPlan(((0, 1), (2, 3)), None), "grid"),
        (AssignmentPlan(((0, 1), (2, 3)), np.array([[0, 1], [2, 3]])), "grid"),
    ],
)
def test_broken_assignments(plan: AssignmentPlan, rule: str) -> None:
    """Wrong sizes, a duplicate device, a missing grid, another grid."""
    assert rule in {v.rule for v in check(plan, problem4())}


def test_rows_must_realise_the_bottleneck_matching() -> None:
    """Of the two grids over the same groups exactly one has the smaller bottleneck."""
    grids = [[[0, 2], [1, 3]], [[0, 3], [1, 2]]]
    found = [check(AssignmentPlan.of_grid(grid), problem4()) for grid in grids]
    assert sorted(len(violations) for violations in found) == [0, 1]
    assert next(v for vs in found for v in vs).rule == "eq. 3"
