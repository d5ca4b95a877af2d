"""Placement of stages on devices for straight pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from planner.matching.stages import match_stages
from planner.planning.baselines.rank_order import Outermost, ranks_grid, region_order
from planner.planning.evaluation import straight_plan
from planner.planning.layer_split import balanced_split, is_uniform
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Shape, assignment_problem, memory_room
from planner.planning.straight.heterogeneous_assignment import (
    Groups,
    improve_groups,
    sorted_by_speed,
)
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan
from planner.search.certificate import Certificate
from planner.search.incumbent import Incumbent
from planner.search.result import Result
from planner.search.stop import MaxIterations, SearchRun, StoppingCriterion, started
from planner.training_plan.model import TrainingPlan

TRIALS_PER_EFFORT = 200.0
"""Exchanges of two different devices tried per unit of effort."""


class Placement(NamedTuple):
    """An assignment with its layers and its certificate by eq. 1.

    Attributes
    ----------
    shape
        With the chosen layers.
    assignment
        Devices of every stage.
    certificate
        Cost and bound by eq. 1.
    plan
        Its plan, if it was simulated.
    """

    shape: Shape
    assignment: AssignmentPlan
    certificate: Certificate
    plan: TrainingPlan | None = None


def place_stages(problem: PlanningProblem, shape: Shape, stop: StoppingCriterion) -> Placement:
    """Place stages by DT-FM's cost alone; layers stay as in the shape.

    Parameters
    ----------
    problem, shape
        What is planned, and the stages with their sizes and layers.
    stop
        When the assignment solver stops.

    Returns
    -------
    Placement
        The assignment with its certificate; its plan is not simulated.

    Raises
    ------
    ProblemError
        A stage does not fit in memory.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), section 3.
    """
    if is_uniform(problem.cluster, problem.workload):
        # equal devices all hold a stage or none does: refuse before searching
        anyone = [[j] for j in range(shape.stages)]
        memory_room(problem.cluster, problem.workload, shape, anyone)
    solved = _solve(problem, shape, stop)
    assert solved.plan is not None
    return Placement(shape, solved.plan, solved.certificate())


def place_heterogeneous(
    problem: PlanningProblem, shape: Shape, stop: StoppingCriterion
) -> Placement:
    """Place stages of straight pipelines on heterogeneous devices, or with unequal layers.

    Initial solutions by network alone and by speed alone are improved for both; layers follow the
    devices. The plan with the fastest predicted step is taken.
    """
    third = stop.portion(1 / 3)
    by_network = _solve(problem, shape, third)
    assert by_network.plan is not None
    starts = [by_network.plan.groups, sorted_by_speed(problem, shape)]
    if problem.request.sync_every > 1:
        # pipelines matter more than averaging then
        order = region_order(problem.cluster.network)
        starts += [
            AssignmentPlan.of_grid(ranks_grid(order, shape.stages, outermost)).groups
            for outermost in Outermost
        ]
    run = third.start(TRIALS_PER_EFFORT)
    tried = [*starts, *(improve_groups(problem, shape, groups, run) for groups in starts)]
    fastest = min(_evaluated(problem, shape, tried), key=lambda plan: plan.predicted.step_s)
    # the certificate is about the layers that were chosen: bound them, and take better groups
    fitted = shape.with_layers(fastest.stage_layers)
    interrupted = "interrupted" in (by_network.stop_reason, run.reason)
    second_solve = _solve(problem, fitted, MaxIterations(0) if interrupted else third)
    assert second_solve.plan is not None
    refined = _evaluated_or_none(problem, fitted, second_solve.plan)
    reason = "interrupted" if interrupted else second_solve.stop_reason
    if refined is not None and refined.predicted.step_s < fastest.predicted.step_s:
        certificate = replace(second_solve.certificate(), stop_reason=reason)
        return Placement(fitted, second_solve.plan, certificate, refined)
    certificate = _certificate(
        problem, fitted, fastest.assignment, second_solve.certificate(), "speed and network", run
    )
    certificate = replace(certificate, stop_reason=reason_when_slower(reason))
    return Placement(fitted, fastest.assignment, certificate, fastest)


def reason_when_slower(reason: str) -> str:
    """Why a search stopped whose answer, perhaps the optimum of eq. 1, takes longer than another.

    Without this, a certificate of the other placement would claim its optimality.
    """
    stem = reason.removesuffix("optimal")
    return reason if stem == reason else f"{stem}the optimum of eq. 1 is slower"


def evaluate_placement(
    problem: PlanningProblem, shape: Shape, assignment: AssignmentPlan, reason: str
) -> Certificate:
    """Certificate of eq. 1 for an assignment that was found in another way."""
    bounded = _solve(problem, shape, MaxIterations(0)).certificate()
    certificate = _certificate(problem, shape, assignment, bounded, "by simulated step")
    return replace(certificate, stop_reason=reason_when_slower(reason))


def _certificate(
    problem: PlanningProblem,
    shape: Shape,
    assignment: AssignmentPlan,
    bounded: Certificate,
    how: str,
    run: SearchRun | None = None,
) -> Certificate:
    """Certificate of eq. 1 for an assignment, with the bound of another one."""
    subproblem = assignment_problem(problem.cluster, problem.workload, shape)
    incumbent: Incumbent[AssignmentPlan] = Incumbent(
        run or started(MaxIterations(0)),
        subproblem,
        method=f"{problem.request.method}, {how}",
        seed=problem.seed,
    )
    incumbent.offer(subproblem.cost(assignment.groups), assignment)
    if bounded.bound is not None:
        incumbent.offer_bound(bounded.bound, bounded.basis, bounded.witness, rounding=0.0)
    return incumbent.result().certificate()


def _evaluated(
    problem: PlanningProblem, shape: Shape, tried: list[Groups]
) -> Iterator[TrainingPlan]:
    """A plan for every placement that fits in memory; raises if there is none."""
    refused: ProblemError | None = None
    any_fits = False
    for groups in dict.fromkeys(tried):
        try:
            fitted = shape
            if problem.request.stage_layers is None:
                fitted = shape.with_layers(
                    balanced_split(
                        problem.cluster,
                        problem.workload,
                        groups,
                        shape.head_stage,
                        shape.recompute,
                    )
                )
            subproblem = assignment_problem(problem.cluster, problem.workload, fitted)
            plan = straight_plan(problem, fitted, match_stages(subproblem, groups))
        except ProblemError as error:
            refused = refused or error
            continue
        any_fits = True
        yield plan
    if not any_fits:
        raise refused or ProblemError("no placement of these devices fits their memory")


def _solve(
    problem: PlanningProblem, shape: Shape, stop: StoppingCriterion
) -> Result[AssignmentPlan]:
    from planner.genetic.solve import solve_assignment

    subproblem = assignment_problem(problem.cluster, problem.workload, shape)
    return solve_assignment(subproblem, stop, problem.seed, problem.request.method)


def _evaluated_or_none(
    problem: PlanningProblem, shape: Shape, assignment: AssignmentPlan
) -> TrainingPlan | None:
    """`straight_plan`, or None if memory is too small."""
    try:
        return straight_plan(problem, shape, assignment)
    except ProblemError:
        return None
