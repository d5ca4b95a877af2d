"""Independent verifier of any plan: recomputes it from the definitions.

Imports no solver and shares no code with the solvers it judges.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from typing import Any

from planner.checker.answer_types import answer_type_violations, result_type_violations
from planner.checker.assignment import assignment_cost_s, check_assignment
from planner.checker.averaging import check_averaging
from planner.checker.certificates import TOLERANCE, check_certificate, compare_stored
from planner.checker.paths import check_arrangement, check_paths, stage_spans_s
from planner.checker.rebalancing import check_rebalancing
from planner.checker.result_bounds import bound_violations
from planner.checker.training_plan import check_training_plan
from planner.checker.violation import Violation
from planner.network.cluster import Cluster
from planner.problems import (
    ArrangedPathProblem,
    AssignmentProblem,
    AveragingProblem,
    PathProblem,
)
from planner.problems.answers import ArrangedPathPlan, AssignmentPlan, AveragingPlan, PathPlan
from planner.problems.rebalancing import RebalancingPlan, RebalancingProblem
from planner.search.certificate import Status
from planner.search.result import Result
from planner.training_plan.model import TrainingPlan

ANSWERS: dict[type, type] = {
    AssignmentPlan: AssignmentProblem,
    AveragingPlan: AveragingProblem,
    PathPlan: PathProblem,
    ArrangedPathPlan: ArrangedPathProblem,
    RebalancingPlan: RebalancingProblem,
    TrainingPlan: Cluster,
}
"""Problem type that each plan type is checked against."""


def check(plan: Any, problem_or_cluster: Any = None) -> list[Violation]:
    """Verify a plan, a part of one, or a solver's result.

    Parameters
    ----------
    plan
        A `TrainingPlan`, `AssignmentPlan`, `AveragingPlan`, `PathPlan` or `ArrangedPathPlan`, or
        a `Result` with one.
    problem_or_cluster
        The problem that a part answers; for a `TrainingPlan` the cluster it is meant
        for, by default the one it holds.

    Returns
    -------
    list of Violation
        Empty: valid.

    Raises
    ------
    TypeError
        There is nothing to check in such an object, or the second argument is of another type.
    """
    subject = plan.plan if isinstance(plan, Result) else plan
    kind = next((kind for kind in ANSWERS if isinstance(subject, kind)), None)
    answer_class = None if kind is None else ANSWERS[kind]
    optional = isinstance(subject, TrainingPlan) and problem_or_cluster is None
    if (
        answer_class is not None
        and not optional
        and not isinstance(problem_or_cluster, answer_class)
    ):
        raise TypeError(
            f"{type(subject).__name__} is checked against {answer_class.__name__}, found "
            f"{type(problem_or_cluster).__name__}; pass it as the second argument"
        )
    # validated by the plan's constructor
    type_violations = () if kind in (None, TrainingPlan) else answer_type_violations(subject, kind)
    if isinstance(plan, Result):
        return list(
            type_violations or result_type_violations(plan) or _result(plan, problem_or_cluster)
        )
    return list(type_violations or _check(subject, problem_or_cluster))


@singledispatch
def _check(plan: Any, _: Any) -> Iterator[Violation]:
    kinds = [kind.__name__ for kind in ANSWERS]
    raise TypeError(
        f"cannot check a {type(plan).__name__}; give one of {', '.join(kinds)}, or a "
        "Result with one"
    )


@_check.register
def _(plan: AssignmentPlan, problem: AssignmentProblem) -> Iterator[Violation]:
    yield from check_assignment(plan, problem)


@_check.register
def _(plan: AveragingPlan, problem: AveragingProblem) -> Iterator[Violation]:
    yield from check_averaging(plan, problem)


@_check.register
def _(plan: PathPlan, problem: PathProblem) -> Iterator[Violation]:
    yield from check_paths(plan, problem)


@_check.register
def _(plan: ArrangedPathPlan, problem: ArrangedPathProblem) -> Iterator[Violation]:
    wrong = check_arrangement(plan, problem)
    yield from wrong or check_paths(plan.paths, problem.arranged(plan.groups))


@_check.register
def _(plan: RebalancingPlan, problem: RebalancingProblem) -> Iterator[Violation]:
    yield from check_rebalancing(plan, problem)


@_check.register
def _(plan: TrainingPlan, cluster: Cluster | None) -> Iterator[Violation]:
    yield from check_training_plan(plan, cluster)


def _step_of(result: Result[Any], plan: TrainingPlan) -> Iterator[Violation]:
    """Check that a plan's result agrees with the certificate of its step."""
    step = plan.certificates.get("step")
    for name in ("objective", "bound", "status", "witness"):
        value = getattr(result, name)
        if step is not None and value != getattr(step, name):
            expected = getattr(step, name)
            yield Violation("step", f"result.{name}", f"the plan's is {expected}, found {value}")


def _bound_side(result: Result[Any]) -> Iterator[Violation]:
    """Check that the bound is on the right side of the objective."""
    if result.objective is None or result.bound is None:
        return
    rates = isinstance(result.plan, AveragingPlan | RebalancingPlan)
    low, high = result.bound, result.objective
    if rates:
        low, high = high, low
    if low > high * (1 + TOLERANCE):
        side = "least" if rates else "most"
        yield Violation(
            "bound",
            "result.bound",
            f"must be at {side} the objective {result.objective:g}, found {result.bound:g}",
        )


def _result(result: Result[Any], problem: Any) -> Iterator[Violation]:
    yield from check_certificate(result.certificate(), "result")
    if result.plan is None:
        if result.status in (Status.OPTIMAL, Status.FEASIBLE):
            yield Violation("status", "result", f"status {result.status} needs a plan, found none")
        return
    if result.status not in (Status.OPTIMAL, Status.FEASIBLE):
        yield Violation("status", "result", f"a plan is there, found status {result.status}")
    wrong = list(_check(result.plan, problem))
    yield from wrong
    if isinstance(result.plan, TrainingPlan):
        yield from _step_of(result, result.plan)
        return
    yield from _bound_side(result)
    yield from bound_violations(result.bound, result.witness, problem)
    if not wrong:  # the objective of an invalid plan may be undefined
        yield from _objective(result, problem)


def _objective(result: Result[Any], problem: Any) -> Iterator[Violation]:
    """Check a result's objective against the recomputed one of its (valid) plan."""
    if isinstance(result.plan, AssignmentPlan):
        cost = assignment_cost_s(
            result.plan.groups, problem.network, problem.activation_bytes, problem.gradient_bytes
        )
        yield from compare_stored(cost, result.objective, "eq. 1", "result.objective", 1e-9)
    if isinstance(result.plan, PathPlan | ArrangedPathPlan):
        paths = result.plan if isinstance(result.plan, PathPlan) else result.plan.paths
        seconds = paths.makespan_s
        if isinstance(result.plan, ArrangedPathPlan) and problem.averaging is not None:
            seconds = stage_spans_s(result.plan, problem)
        yield from compare_stored(seconds, result.objective, "timeline", "result.objective", 1e-9)
    if isinstance(result.plan, AveragingPlan) and result.objective != result.plan.steps_per_s:
        yield Violation(
            "steps per second",
            "result.objective",
            f"the plan makes {result.plan.steps_per_s} steps/s, found {result.objective}",
        )
