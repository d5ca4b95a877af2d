"""Evaluation of solutions: validated by `planner.checker`, objective recomputed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from planner.bench.problem import PlanProblem, ProblemFamily
from planner.bench.solution_files import AnswerError, answer_of
from planner.checker.assignment import assignment_cost_s
from planner.checker.dispatch import check
from planner.checker.rebalancing import mean_rate, mean_rate_bound
from planner.checker.result_bounds import bound_violations
from planner.checker.step_simulation import simulated_times
from planner.checker.violation import Violation
from planner.matching.stages import match_stages
from planner.problems.answers import AssignmentPlan, AveragingPlan, PathPlan
from planner.problems.rebalancing import RebalancingPlan
from planner.search.result import Result
from planner.training_plan.averaging_group import has_phases
from planner.training_plan.choices import Codec, Head, Wiring
from planner.training_plan.model import TrainingPlan
from planner.workload.compute_times import FROM_FLOPS, ComputeTimes

KINDS: dict[ProblemFamily, type] = {
    ProblemFamily.ASSIGNMENT: AssignmentPlan,
    ProblemFamily.AVERAGING: AveragingPlan,
    ProblemFamily.PATHS: PathPlan,
    ProblemFamily.PLANS: TrainingPlan,
    ProblemFamily.REBALANCING: RebalancingPlan,
}


@dataclass(frozen=True)
class Bound:
    """Bound on the objective of an instance.

    Attributes
    ----------
    value
        In the family's unit.
    recomputed
        Whether the checker recomputed it; otherwise it is unverified.
    basis
        Basis of the bound.
    """

    value: float
    recomputed: bool
    basis: str


@dataclass(frozen=True)
class EvaluatedSolution:
    """Solution that passes the checker.

    Attributes
    ----------
    objective
        In the family's unit, recomputed.
    bound
        Bound of the method; None without one.
    """

    plan: Any
    objective: float
    bound: Bound | None


def evaluate(family: ProblemFamily, problem: Any, answer: Any) -> EvaluatedSolution:
    """Validate a solution and compute its objective."""
    try:
        return _evaluate(family, problem, answer)
    except AnswerError:
        raise
    except Exception as error:  # a solution may be any object
        message = " ".join(str(error).split())[:200]
        raise AnswerError(f"cannot be checked: {type(error).__name__}: {message}") from error


def _evaluate(family: ProblemFamily, problem: Any, answer: Any) -> EvaluatedSolution:
    result = answer if isinstance(answer, Result) else None
    plan = answer.plan if isinstance(answer, Result) else answer
    if result is not None and plan is None:
        raise AnswerError(f"no answer: {result.status}, {result.stop_reason}")
    if isinstance(plan, dict):
        plan = answer_of(family, problem, plan)
    if not isinstance(plan, KINDS[family]):
        raise AnswerError(
            f"an answer to {family} is a {KINDS[family].__name__} or its JSON form, found "
            f"{type(plan).__name__}"
        )
    if isinstance(plan, AssignmentPlan) and plan.grid is None:
        wrong = [violation for violation in check(plan, problem) if violation.rule != "grid"]
        # which devices are matched is no decision of a solver
        plan = plan if wrong else match_stages(problem, plan.groups)
    violations = check(plan, problem.cluster if isinstance(problem, PlanProblem) else problem)
    if isinstance(plan, TrainingPlan):
        violations += _other_training(plan, problem)
    if violations:
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        raise AnswerError(f"{violations[0]}{more}")
    objective = objective_of(plan, problem)
    if not 0 < objective < math.inf:
        raise AnswerError(f"the objective is {objective:g} {family.unit}: no work is done")
    return EvaluatedSolution(plan, objective, _bound(plan, problem, result))


def objective_of(plan: Any, problem: Any) -> float:
    """Compute the objective of a valid solution with the checker's own formulas."""
    match plan:
        case AssignmentPlan():
            return assignment_cost_s(
                plan.groups, problem.network, problem.activation_bytes, problem.gradient_bytes
            )
        case AveragingPlan():
            return float(plan.steps_per_s)
        case PathPlan():
            return plan.makespan_s
        case TrainingPlan():
            return _step_s(plan)
    return mean_rate(plan, problem)


def _step_s(plan: TrainingPlan) -> float:
    """Compute the step time with the checker, from recomputed compute times."""
    groups, layers = plan.assignment.groups, plan.stage_layers
    exact = ComputeTimes.from_flops(plan.cluster, plan.workload, groups, layers, plan.recompute)
    times = simulated_times(plan.replace(compute_times=exact))
    assert times is not None
    return times.step_s


def _bound(plan: Any, problem: Any, result: Result[Any] | None) -> Bound | None:
    if isinstance(plan, RebalancingPlan):
        return Bound(mean_rate_bound(problem), True, "all peers spread at best at every moment")
    if result is None or result.bound is None:
        return None
    if isinstance(plan, TrainingPlan):
        # the checker has recomputed bounds with a witness
        return Bound(result.bound, result.witness is not None, result.basis)
    if any(bound_violations(result.bound, result.witness, problem)):
        return None
    return Bound(result.bound, result.witness is not None, result.basis)


def _other_training(plan: TrainingPlan, problem: PlanProblem) -> list[Violation]:
    """Reject decisions that are valid in a plan but would change training."""
    expected, actual = problem.workload, plan.workload
    same = actual.replace(microbatch_samples=expected.microbatch_samples) == expected
    stages = range(len(plan.assignment.groups))
    stage_of = plan.stage_of
    straight = all(
        [stage_of[d] for d in path] == list(stages) for s in plan.schedules for path in s.paths
    )
    same_step = all(
        len(s.paths) * actual.microbatch_samples == expected.batch_samples for s in plan.schedules
    )
    rules = (
        (same, "workload", "only microbatch_samples may differ from the problem's"),
        (plan.compute_times.source == FROM_FLOPS, "compute_times", "must follow from FLOPs"),
        (
            plan.compute_times.operation_s == plan.compute_times.message_s == 0.0,
            "compute_times",
            "operations and messages cost nothing extra here",
        ),
        (plan.sync.every_steps == 1, "sync", "gradients are averaged in every step"),
        (plan.sync.outer is None and not plan.sync.delayed, "sync", "has no outer step"),
        (plan.codec is Codec.NONE, "averaging.codec", "must be none"),
        (plan.clip is None, "averaging.clip", "must be none"),
        (plan.wiring is Wiring.FIXED, "wiring", "must be fixed"),
        (plan.schedules[0].head is Head.LAST, "paths.head", "is on the last stage"),
        (straight, "paths", "every microbatch visits every stage once, in order"),
        (same_step, "paths", "the microbatches of a step are the batch"),
        (
            all(len(rounds) <= 1 or has_phases(rounds) for rounds in plan.averaging),
            "averaging",
            "is one round, or in two levels",
        ),
    )
    return [Violation("question", field, message) for holds, field, message in rules if not holds]
