"""From groups of devices to an assignment: bottleneck matchings between neighbouring stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.matching.bottleneck import bottleneck_assignment
from planner.problems import AssignmentProblem
from planner.problems.answers import AssignmentPlan


def match_stages(problem: AssignmentProblem, groups: Sequence[Sequence[int]]) -> AssignmentPlan:
    """The assignment of these groups, with the best matching at every boundary (DT-FM, eq. 3).

    For solvers of your own, which choose groups and their order.

    Parameters
    ----------
    problem
        The assignment problem.
    groups
        Devices of every stage, in pipeline order.

    Returns
    -------
    AssignmentPlan
        Its cost is ``problem.cost(groups)``. If stages differ in size, it has no grid.

    Raises
    ------
    ProblemError
        The groups have other sizes than the stages, or not every device once.
    """
    matched = problem.require_groups(groups)
    if problem.pipelines is None:
        return AssignmentPlan.of_groups(matched)
    grid = np.empty((problem.pipelines, problem.stages), dtype=np.int64)
    grid[:, 0] = matched[0]
    for j in range(problem.stages - 1):
        right = np.array(matched[j + 1])
        _, columns = bottleneck_assignment(problem.hop_s(j)[np.ix_(grid[:, j], right)])
        grid[:, j + 1] = right[columns]
    return AssignmentPlan.of_grid(grid)
