"""Incumbent of an assignment search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.genetic.data import AssignmentData, groups_of
from planner.genetic.matched_assignment import MatchedAssignment, solve_matchings
from planner.problems import AssignmentProblem
from planner.problems.answers import AssignmentPlan
from planner.search.arrays import Ints
from planner.search.incumbent import Incumbent


class IncumbentAssignment(NamedTuple):
    """The best slots so far, as passed to the progress callback of a stopping criterion.

    Attributes
    ----------
    slots
        ``int[N]``, the device of every slot.
    """

    problem: AssignmentProblem
    data: AssignmentData
    slots: Ints

    def assignment_plan(self) -> AssignmentPlan:
        """The slots as an `AssignmentPlan`."""
        return build_plan(self.problem, self.data, self.slots)


class AssignmentIncumbent(Incumbent[Ints]):
    """Best slots and best bound.

    Attributes
    ----------
    data
        The problem's costs as arrays.
    """

    problem: AssignmentProblem
    data: AssignmentData

    def _callback_value(self, plan: Ints) -> IncumbentAssignment:
        return IncumbentAssignment(self.problem, self.data, plan)


def build_plan(problem: AssignmentProblem, data: AssignmentData, slots: Ints) -> AssignmentPlan:
    """Build a plan from slots; with equal groups its grid realises the bottleneck matchings.

    Parameters
    ----------
    slots
        ``int[N]``, the device of every slot.
    """
    groups = groups_of(data, slots)
    if problem.pipelines is None:
        return AssignmentPlan.of_groups(groups)
    # canonical order: the same groups give the same grid
    ordered = np.concatenate([np.sort(group) for group in groups])
    assignment = MatchedAssignment.of(ordered)
    solve_matchings(data, assignment)
    grid = np.empty((problem.pipelines, problem.stages), dtype=np.int64)
    slots_of_stage = np.arange(problem.pipelines)
    for j in range(problem.stages):
        grid[:, j] = ordered[slots_of_stage]
        slots_of_stage = assignment.next_slot[slots_of_stage]
    return AssignmentPlan.of_grid(grid)
