"""Stopping criterion for the search of a part, evaluated on the whole plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.planning.evaluation import straight_plan
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Shape
from planner.search.stop import DelegatingCriterion
from planner.training_plan.model import TrainingPlan


@dataclass(frozen=True)
class PlanAwareStop(DelegatingCriterion):
    """Reports assignments to the inner criterion as the straight plans that they make.

    Instead of a plan it passes a function that makes one, which takes a while, and returns the
    plan's step in seconds and the plan.
    """

    problem: PlanningProblem
    shape: Shape

    def found(self, objective: float, plan: Any) -> None:
        from planner.genetic.incumbent import IncumbentAssignment  # numba takes a while to load

        if not isinstance(plan, IncumbentAssignment):
            self.inner.found(objective, plan)
            return

        def later() -> tuple[float, TrainingPlan]:
            straight = straight_plan(self.problem, self.shape, plan.assignment_plan())
            return straight.predicted.step_s, straight

        self.inner.found(objective, later)
