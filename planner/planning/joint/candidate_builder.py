"""Builds, simulates and evaluates candidates; keeps what it needed for the last ones."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from planner.planning.evaluation import evaluated, two_step_estimate_s
from planner.planning.joint.candidate import CandidatePlan, CandidateSpec
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.flow_plan import LayoutContext, ServedFlow
from planner.planning.joint.layout import Layout
from planner.planning.problem import PlanningProblem
from planner.planning.request import ShareRule
from planner.problems import ProblemError
from planner.training_plan.model import TrainingPlan

KEPT_PAIRS, MAX_KEPT = 1 << 22, 32
"""Pairs of devices in all contexts that are kept, and contexts at most."""
KEPT_SCHEDULES = 16
"""Candidates whose simulated step is kept, for a second one or the evaluation."""


class CandidateBuilder:
    """Makes candidates from their specifications; the same specification gives the same plan.

    Parameters
    ----------
    problem, classes
        What is planned, and its device classes.
    """

    def __init__(self, problem: PlanningProblem, classes: DeviceClasses) -> None:
        self.problem, self.classes = problem, classes
        num_kept = max(1, min(MAX_KEPT, KEPT_PAIRS // len(problem.cluster) ** 2))
        self._context = lru_cache(num_kept)(self._make_context)
        self._served = lru_cache(min(num_kept, KEPT_SCHEDULES))(self._serve)

    def __reduce__(self) -> tuple[type[CandidateBuilder], tuple[PlanningProblem, DeviceClasses]]:
        """Pickled without what is kept."""
        return CandidateBuilder, (self.problem, self.classes)

    def build(self, spec: CandidateSpec) -> CandidatePlan | ProblemError:
        """The candidate, or why memory is too small."""
        try:
            context = self._context(spec.layout, spec.shares)
            complete = context.completed(spec)
            return context.candidate(complete, self._served(complete))
        except ProblemError as error:
            return error

    def with_next_step(self, candidate: CandidatePlan) -> CandidatePlan:
        """The same candidate, simulated with a next step."""
        if candidate.two_steps:
            return candidate
        context = self._context(candidate.layout, candidate.spec.shares)
        schedule = self._served(candidate.spec).schedule()
        with_next = two_step_estimate_s(
            context.problem, context.shape, context.assignment, context.times, schedule
        )
        return replace(candidate, seconds=max(candidate.seconds, with_next), two_steps=True)

    def plan(self, candidate: CandidatePlan) -> TrainingPlan:
        """The plan with its simulated times."""
        context = self._context(candidate.layout, candidate.spec.shares)
        schedule = self._served(candidate.spec).schedule()
        return evaluated(
            context.problem, context.shape, context.assignment, context.times, (schedule,)
        )

    def _make_context(self, layout: Layout, shares: ShareRule | None) -> LayoutContext:
        problem = self.problem
        if shares is not None:
            problem = replace(problem, request=problem.request.replace(averaging=shares))
        return LayoutContext.of(problem, self.classes, layout)

    def _serve(self, spec: CandidateSpec) -> ServedFlow:
        return self._context(spec.layout, spec.shares).serve(spec)
