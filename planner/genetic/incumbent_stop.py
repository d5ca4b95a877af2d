"""What a stopping criterion sees while an assignment is searched."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.genetic.arrangement import Arrangement, solve_matchings
from planner.genetic.tables import Tables, groups_of
from planner.problems import AssignmentProblem
from planner.problems.answers import AssignmentPlan
from planner.search.arrays import Ints
from planner.search.incumbent import Incumbent


class FoundAssignment(NamedTuple):
    """The best so far.

    Attributes
    ----------
    slots
        ``int[N]``, the device of every slot.
    """

    problem: AssignmentProblem
    tables: Tables
    slots: Ints

    def assignment_plan(self) -> AssignmentPlan:
        """As an answer."""
        return plan_of(self.problem, self.tables, self.slots)


class AssignmentIncumbent(Incumbent[Ints]):
    """The best slots, with the best bound.

    Attributes
    ----------
    tables
        The problem's costs as arrays.
    """

    problem: AssignmentProblem
    tables: Tables

    def _told(self, plan: Ints) -> FoundAssignment:
        return FoundAssignment(self.problem, self.tables, plan)


def plan_of(problem: AssignmentProblem, tables: Tables, slots: Ints) -> AssignmentPlan:
    """A plan from slots; with equal groups its grid realises the bottleneck matchings.

    Parameters
    ----------
    slots
        ``int[N]``, the device of every slot.
    """
    groups = groups_of(tables, slots)
    if problem.pipelines is None:
        return AssignmentPlan.of_groups(groups)
    # the same groups give the same grid, whatever order the search left them in
    ordered = np.concatenate([np.sort(group) for group in groups])
    arrangement = Arrangement.of(ordered)
    solve_matchings(tables, arrangement)
    grid = np.empty((problem.pipelines, problem.stages), dtype=np.int64)
    at = np.arange(problem.pipelines)
    for j in range(problem.stages):
        grid[:, j] = ordered[at]
        at = arrangement.after[at]
    return AssignmentPlan.of_grid(grid)
