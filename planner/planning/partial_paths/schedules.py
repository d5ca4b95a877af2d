"""Schedules with partial paths, and full iterations between them (SkipPipe)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from planner.network.cluster import Cluster, Devices
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Shape, memory_room
from planner.problems import ArrangedPathProblem, GroupAveraging, PathProblem, ProblemError
from planner.problems.answers import AssignmentPlan, PathPlan
from planner.search.certificate import Certificate, Status
from planner.search.incumbent import Incumbent
from planner.search.result import Result
from planner.search.stop import SearchRun, StoppingCriterion
from planner.simulator.simulator import simulate_cycle
from planner.training_plan.choices import Codec
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.workload.compute_times import ComputeTimes

MEAN = 1e-12
"""Relative rounding of a mean of bounds."""

NextStop = Callable[[Sequence[Result[PathPlan]]], StoppingCriterion]
"""Limit of the next schedule's search, from the results so far."""


def partial_path_schedules(
    problem: PlanningProblem,
    shape: Shape,
    assignment: AssignmentPlan,
    times: ComputeTimes,
    next_stop: NextStop,
    before: Sequence[Result[PathPlan]] = (),
) -> tuple[tuple[Schedule, ...], list[Result[PathPlan]]]:
    """One schedule for each kind of iteration in the cycle, with the results of the path solver.

    Returns
    -------
    tuple[tuple[Schedule, ...], list[Result[PathPlan]]]
        Schedules, and results of the path solver.

    References
    ----------
    "SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in Heterogeneous
    Networks" (2025), section 3.6.
    """
    from planner.mapf.solve import solve_paths

    usual = path_problem(problem, shape, assignment, times)
    problems = [usual]
    if 1 in problem.request.cycle(shape.stages):
        problems.append(usual.replace(path_stages=shape.stages, max_swaps=0))
    solved: list[Result[PathPlan]] = []
    schedules = []
    method = problem.request.path_method
    for k, subproblem in enumerate(problems):
        first = before[k].plan if before else None
        result = solve_paths(subproblem, next_stop(solved), problem.seed, method, first)
        if result.plan is None:
            remedy = "give stages more devices, or devices more memory"
            if result.status != Status.INFEASIBLE:
                remedy = f"'{method}' found none; give it more effort, or take 'auto'"
            raise ProblemError(
                f"no paths of {subproblem.path_stages} stages: {result.stop_reason}; {remedy}"
            )
        solved.append(result)
        schedules.append(
            Schedule(
                _name(subproblem), shape.head, result.plan.paths, result.plan.order(len(subproblem))
            )
        )
    return tuple(schedules), solved


def path_problem(
    problem: PlanningProblem, shape: Shape, assignment: AssignmentPlan, times: ComputeTimes
) -> PathProblem:
    """An iteration's path problem: the plan's compute times, live memory, links that queue."""
    cluster, workload, request = problem.cluster, problem.workload, problem.request
    assert request.path_stages is not None
    room = memory_room(cluster, workload, shape, assignment.groups, request.in_flight)
    subproblem = PathProblem.from_assignment(
        cluster,
        workload,
        assignment,
        path_stages=request.path_stages,
        microbatches_per_start=shape.microbatches // shape.sizes[0],
        memory=[room[d] for d in range(len(cluster))],
        max_swaps=request.swaps,
        live_memory=True,
        queueing=True,
        stage_layers=shape.layers,
        recompute=shape.recompute,
    )
    return subproblem.replace(
        forward_s=times.forward_s, backward_s=times.backward_s, head_s=times.head_s
    )


def arranged_problem(problem: PlanningProblem, shape: Shape) -> ArrangedPathProblem:
    """`path_problem` with open placement, fixed stage sizes, and averaging in the objective.

    Compute times follow from FLOPs: a calibration has one stage per device.
    """
    cluster, workload, request = problem.cluster, problem.workload, problem.request
    assert request.path_stages is not None
    wire = Codec(request.codec).wire_ratio
    vectors = [costs.gradient_bytes * wire for costs in shape.costs(workload)]
    subproblem = ArrangedPathProblem.from_workload(
        cluster,
        workload,
        shape.sizes,
        path_stages=request.path_stages,
        microbatches_per_start=shape.microbatches // shape.sizes[0],
        max_swaps=request.swaps,
        live_memory=True,
        queueing=True,
        stage_layers=shape.layers,
        recompute=shape.recompute,
    )
    max_live = shape.microbatches if request.in_flight is None else request.in_flight
    return subproblem.replace(
        memory=np.minimum(subproblem.memory, max_live),
        fixed_sizes=True,
        averaging=GroupAveraging.of(cluster, vectors, request.sync_every),
    )


def _name(subproblem: PathProblem) -> str:
    stages = len(subproblem.stage_devices)
    full = subproblem.path_stages == stages and subproblem.max_swaps == 0
    return "full" if full else f"{subproblem.path_stages} of {stages} stages"


def paths_certificate(
    problem: PlanningProblem, plan: TrainingPlan, solved: Sequence[Result[PathPlan]], run: SearchRun
) -> Certificate:
    """Mean over the cycle in the path solver's seconds, with its bounds for this placement."""
    incumbent: Incumbent[TrainingPlan] = Incumbent(
        run, plan.content_hash, method=str(solved[0].method), seed=plan.seed
    )
    incumbent.offer(path_solver_s(plan), plan)
    witness = None
    if all(result.witness is not None for result in solved):
        witness = {
            "kind": "cycle",
            "in_flight": problem.request.in_flight,
            "max_swaps": problem.request.swaps,
            "schedules": [dict(result.witness or {}) for result in solved],
        }
    share = [plan.cycle.count(k) / len(plan.cycle) for k in range(len(solved))]
    incumbent.offer_bound(
        sum(part * (result.bound or 0.0) for part, result in zip(share, solved, strict=True)),
        "; ".join(dict.fromkeys(result.basis for result in solved if result.basis)),
        witness,
        rounding=MEAN,
    )
    reasons = dict.fromkeys(result.stop_reason for result in solved)
    result = incumbent.result()
    return replace(
        result.certificate(),
        stop_reason=", ".join(reasons),
        runtime_s=sum(result.runtime_s for result in solved),
    )


def path_solver_s(plan: TrainingPlan) -> float:
    """Mean makespan over the cycle with the path solver's transfers: both directions averaged.

    Simulated on such a network, whose pairs share nothing, it is the time of the planned orders,
    never more than the solver's own makespans.
    """
    w = plan.workload
    largest = max(layer.output_bytes for layer in w.layers)
    uniform = w.replace(layers=tuple(replace(layer, output_bytes=largest) for layer in w.layers))
    mean = plan.cluster.limited_network().symmetrised()
    unlimited = float(
        np.where(np.eye(len(mean), dtype=bool), 0.0, mean.bandwidth_bytes_per_s).sum()
    )
    devices = Devices(
        plan.cluster.flops, plan.cluster.memory_bytes, unlimited or None, unlimited or None
    )
    times = replace(plan.compute_times, operation_s=0.0, message_s=0.0)
    without_overhead = plan.replace(compute_times=times)
    return simulate_cycle(without_overhead, Cluster(mean, devices), uniform)[0].pipeline_s
