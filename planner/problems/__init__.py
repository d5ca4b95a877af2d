"""Optimisation problems as frozen data with their exact cost."""

from planner.problems.arranged_paths import ArrangedPathProblem
from planner.problems.assignment import AssignmentProblem
from planner.problems.averaging import AveragingProblem
from planner.problems.error import ProblemError
from planner.problems.group_averaging import GroupAveraging
from planner.problems.paths import PathProblem

__all__ = [
    "ArrangedPathProblem",
    "AssignmentProblem",
    "AveragingProblem",
    "GroupAveraging",
    "PathProblem",
    "ProblemError",
]
