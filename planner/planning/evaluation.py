"""Evaluates decisions: averaging, compute times and predicted step of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from planner.planning.averaging.stage_averaging import averaging_rounds
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Shape
from planner.planning.straight.schedules import straight_schedule
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan
from planner.simulator.simulator import first_of_two_steps_s, predict, step_s
from planner.training_plan.averaging_group import StageAveraging
from planner.training_plan.choices import Codec
from planner.training_plan.model import Predicted, TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.workload.compute_times import ComputeTimes


def straight_plan(
    problem: PlanningProblem, shape: Shape, assignment: AssignmentPlan
) -> TrainingPlan:
    """The plan of straight pipelines for an assignment with a grid."""
    return _simulated(_straight(problem, shape, assignment))


def straight_step_s(problem: PlanningProblem, shape: Shape, assignment: AssignmentPlan) -> float:
    """Predicted seconds of a step of `straight_plan`."""
    return step_s(_straight(problem, shape, assignment))


def _straight(problem: PlanningProblem, shape: Shape, assignment: AssignmentPlan) -> TrainingPlan:
    times = compute_times(problem, shape, assignment)
    schedule = straight_schedule(problem, shape, assignment, times)
    return _unsimulated(problem, shape, assignment, times, (schedule,))


def compute_times(
    problem: PlanningProblem, shape: Shape, assignment: AssignmentPlan
) -> ComputeTimes:
    """Seconds of every device on its stage: measured if there is a calibration, else by FLOPs."""
    cluster, workload, groups = problem.cluster, problem.workload, assignment.groups
    calibration = problem.request.calibration
    if calibration is None:
        return ComputeTimes.from_flops(cluster, workload, groups, shape.layers, shape.recompute)
    try:
        return calibration.compute_times(
            cluster.network.ids, workload, groups, shape.layers, shape.recompute, shape.head_stage
        )
    except ValueError as error:  # what this shape needs was not measured
        raise ProblemError(str(error)) from None


def stage_averaging(
    problem: PlanningProblem, shape: Shape, groups: Sequence[Sequence[int]]
) -> list[tuple[StageAveraging, float]]:
    """Averaging of every stage with the bytes of its vector, and at last that of tied parameters.

    If embedding and head share a matrix, are on two stages, and devices take no steps of their own,
    the matrix is averaged over both stages in a separate round, or hierarchically.
    """
    cluster, request = problem.cluster, problem.request
    codec, stages = Codec(request.codec), len(groups)
    tied_apart = not request.sync.local_steps
    sizes = problem.workload.averaged_bytes(shape.layers, shape.head_stage, apart=tied_apart)
    may_be_hierarchical, two_frequency = request.may_be_hierarchical, request.within is not None
    w = problem.workload
    averaging = [
        (
            averaging_rounds(
                cluster,
                group,
                request.shares,
                request.group_size,
                size,
                codec,
                hierarchical=may_be_hierarchical,
                two_frequency=two_frequency,
                optimizer_shards=w.optimizer_shards,
                optimizer_copies=request.optimizer_copies,
                spread_dtype=w.spread_dtype(start),
            ),
            size,
        )
        for group, size, (start, _) in zip(groups, sizes, shape.layers, strict=False)
    ]
    for size in sizes[stages:]:
        members = tuple(sorted((*groups[0], *groups[shape.head_stage])))
        try:
            # groups of this size may not exist for the devices of both stages
            rounds = averaging_rounds(
                cluster,
                members,
                request.shares,
                None,
                size,
                codec,
                hierarchical=may_be_hierarchical,
                optimizer_shards=w.optimizer_shards,
                optimizer_copies=request.optimizer_copies,
                # the first stage has it too
                spread_dtype=w.spread_dtype(0),
            )
        except ProblemError as error:
            raise ProblemError(
                f"embedding and head share a matrix, which the devices of stages 0 and "
                f"{shape.head_stage} average: {error}"
            ) from None
        averaging.append((rounds, size))
    return averaging


def evaluated(
    problem: PlanningProblem,
    shape: Shape,
    assignment: AssignmentPlan,
    times: ComputeTimes,
    schedules: tuple[Schedule, ...],
) -> TrainingPlan:
    """The plan with these schedules, its averaging and its simulated times."""
    return _simulated(_unsimulated(problem, shape, assignment, times, schedules))


def two_step_estimate_s(
    problem: PlanningProblem,
    shape: Shape,
    assignment: AssignmentPlan,
    times: ComputeTimes,
    schedule: Schedule,
) -> float:
    """Estimate of the plan's step by `planner.simulator.simulator.first_of_two_steps_s`."""
    return first_of_two_steps_s(_unsimulated(problem, shape, assignment, times, (schedule,)))


def _unsimulated(
    problem: PlanningProblem,
    shape: Shape,
    assignment: AssignmentPlan,
    times: ComputeTimes,
    schedules: tuple[Schedule, ...],
) -> TrainingPlan:
    request = problem.request
    return TrainingPlan(
        cluster=problem.cluster,
        network_name=request.network_name,
        workload=problem.workload,
        seed=problem.seed,
        compute_times=times,
        assignment=assignment,
        stage_layers=shape.layers,
        recompute=shape.recomputed(),
        schedules=schedules,
        cycle=request.cycle(shape.stages),
        averaging=tuple(rounds for rounds, _ in stage_averaging(problem, shape, assignment.groups)),
        codec=Codec(request.codec),
        clip=request.clip,
        sync=request.sync,
        predicted=Predicted(0.0, 0.0, 0.0),
        certificates={},
    )


def _simulated(plan: TrainingPlan) -> TrainingPlan:
    return plan.replace(predicted=predict(plan))
