"""Assignments made of groups alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import planner as pl
from tests.genetic.assignment_instances import SHAPES, random_network


@pytest.mark.parametrize("shape", SHAPES)
def test_checker_accepts_matched_groups(shape: dict[str, Any]) -> None:
    """Whatever the groups, also where neither rows in order nor the first match is best."""
    fields = {"activation_bytes": 3e8, "gradient_bytes": 5e8, **shape}
    for seed in range(5):
        sizes = shape.get("stage_sizes") or (shape["pipelines"],) * shape["stages"]
        problem = pl.AssignmentProblem(random_network(sum(sizes), seed), **fields)
        order = np.random.default_rng(seed).permutation(sum(sizes))
        groups = [part.tolist() for part in np.split(order, np.cumsum(sizes)[:-1])]
        plan = pl.match_stages(problem, groups)
        assert pl.check(plan, problem) == []
        assert plan.groups == tuple(tuple(sorted(group)) for group in groups)
        assert plan == pl.match_stages(problem, [group[::-1] for group in groups])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0, 1], [2]], "the problem's stages have"),
        ([[0, 1], [2, 2]], "give each device from 0 to 3 once"),
        ([[0, 1], [2, 3.0]], "must be a whole number, found 3.0"),
        ([[0, True], [2, 3]], "must be a whole number, found True"),
        (7, "give a list of devices for every stage"),
    ],
)
def test_what_is_no_assignment_is_refused(groups: Any, message: str) -> None:
    """One line, with the value."""
    problem = pl.AssignmentProblem(random_network(4, 0), 2, 2, 1e8, 1e8)
    with pytest.raises(pl.ProblemError, match=message):
        pl.match_stages(problem, groups)
    with pytest.raises(pl.ProblemError, match=message):
        problem.cost(groups)


@pytest.mark.parametrize("grid", [[0, 1], [], [[0, 2.9], [1, 3]], [[0, 1], [2]], "ab"])
def test_a_grid_is_a_matrix_of_whole_numbers(grid: Any) -> None:
    """Device 2.9 is not device 2."""
    with pytest.raises(pl.ProblemError, match="give a row of whole numbers for every pipeline"):
        pl.AssignmentPlan.of_grid(grid)
