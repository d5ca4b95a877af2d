"""From a cluster and a workload to one checked plan: calls the solvers, in order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.bounds import step_bound_s
from planner.cluster import Cluster
from planner.compute_times import Calibration, ComputeTimes
from planner.parts import AssignmentPlan
from planner.plan import AveragingGroup, Predicted, Schedule, TrainingPlan
from planner.problems import AssignmentProblem, ProblemError
from planner.result import Result
from planner.schedules import ORDERS, eager_schedule, fixed_schedule, most_live
from planner.simulate import simulate
from planner.stop import StoppingCriterion
from planner.workload import Workload

DEFAULT_ORDER = ORDERS[0]


@dataclass(frozen=True)
class Shape:
    """Stages, pipelines and microbatches of a plan, validated against its cluster."""

    layers: tuple[tuple[int, int], ...]
    pipelines: int
    microbatches: int
    head: str

    @property
    def stages(self) -> int:
        """S, the number of stages."""
        return len(self.layers)

    @property
    def head_stage(self) -> int:
        """The stage that runs head and loss."""
        return self.stages - 1 if self.head == "last" else 0


def shape_of(
    cluster: Cluster, workload: Workload, stages: int, pipelines: int | None, head: str
) -> Shape:
    """Cut the layers evenly and count microbatches.

    Raises
    ------
    NetworkError
        A pair of devices is not measured.
    ProblemError
        Devices, stages, layers and batch do not fit together.
    """
    cluster.network.require_complete()
    n = len(cluster)
    if stages < 1 or stages > n:
        raise ProblemError(f"stages must be 1 to the {n} devices, found {stages}; ask for fewer")
    if pipelines is None:
        if n % stages:
            fits = [s for s in range(1, n + 1) if n % s == 0 and s <= len(workload.layers)]
            raise ProblemError(
                f"{n} devices cannot be divided into {stages} equal stages; ask for one of {fits}, "
                "or plan on a subset of the devices"
            )
        pipelines = n // stages
    if workload.batch_samples % workload.microbatch_samples:
        raise ProblemError(
            f"batch_samples must be a multiple of microbatch_samples, found "
            f"{workload.batch_samples} and {workload.microbatch_samples}; change one"
        )
    microbatches = workload.batch_samples // workload.microbatch_samples
    if microbatches < pipelines:
        raise ProblemError(
            f"{microbatches} microbatches leave some of the {pipelines} pipelines idle; raise the "
            "batch, or lower microbatch_samples"
        )
    return Shape(workload.even_split(stages), pipelines, microbatches, head)


def assignment_problem(cluster: Cluster, workload: Workload, shape: Shape) -> AssignmentProblem:
    """DT-FM's question for this workload.

    c_PP is one microbatch's activations, as the paper defines it: once the pipeline is full,
    transfers of further microbatches overlap, so counting all of them (as its public code does)
    would trade slow averaging for hops that cost little. c_DP is the gradients of one stage.
    """
    samples = workload.microbatch_samples
    return AssignmentProblem(
        cluster.network,
        shape.stages,
        shape.pipelines,
        activation_bytes=[b * samples for b in workload.activation_bytes(shape.layers)],
        gradient_bytes=workload.gradient_bytes(shape.layers, shape.head_stage),
    )


def plan(
    cluster: Cluster,
    workload: Workload,
    *,
    stages: int,
    stop: StoppingCriterion,
    pipelines: int | None = None,
    schedule: str = DEFAULT_ORDER,
    head: str = "last",
    in_flight: int | None = None,
    seed: int = 0,
    method: str = "auto",
    calibration: Calibration | None = None,
    network_name: str = "",
) -> Result[TrainingPlan]:
    """Plan a training run.

    Parameters
    ----------
    cluster, workload
        Where and what to train.
    stages, pipelines
        Their product must be the number of devices; pipelines defaults to the rest.
    stop
        When to stop searching for an assignment.
    schedule
        ``"eager-1f1b"``, ``"1f1b"`` or ``"gpipe"``; see `planner.schedules`.
    head
        Whether the ``"last"`` or the ``"first"`` device of a pipeline runs head and loss.
    in_flight
        For eager 1F1B: microbatches a device may hold between F and B, by default what its memory
        holds.
    method
        Of `planner.solve_assignment`.
    calibration
        Measured compute times; by default they follow from FLOPs.

    Returns
    -------
    Result
        ``plan`` is a `TrainingPlan`, ``objective`` its predicted step time in seconds and
        ``bound`` a time that no placement with these stages and pipelines can beat.
    """
    from planner.genetic import solve_assignment

    started = time.perf_counter()
    shape = shape_of(cluster, workload, stages, pipelines, head)
    solved = solve_assignment(assignment_problem(cluster, workload, shape), stop, seed, method)
    if solved.plan is None:
        return Result(
            None,
            solved.status,
            None,
            None,
            solved.runtime_s,
            solved.stop_reason,
            seed,
            solved.method,
        )
    result = plan_for_assignment(
        cluster,
        workload,
        shape,
        solved.plan,
        schedule=schedule,
        in_flight=in_flight,
        seed=seed,
        calibration=calibration,
        network_name=network_name,
    )
    bound = (
        step_bound_s(cluster, workload, shape.layers, shape.pipelines, shape.microbatches, head)
        if calibration is None
        else None
    )
    step = Result.of(
        result,
        result.predicted.step_s,
        bound,
        runtime_s=time.perf_counter() - started,
        stop_reason=solved.stop_reason,
        seed=seed,
        method=f"{solved.method}, {schedule}",
        history=solved.history,
    )
    certified = result.replace(
        certificates={"assignment": solved.certificate(), "step": step.certificate()}
    )
    return Result.of(
        certified,
        result.predicted.step_s,
        bound,
        runtime_s=step.runtime_s,
        stop_reason=step.stop_reason,
        seed=seed,
        method=step.method,
        history=step.history,
    )


def plan_for_assignment(
    cluster: Cluster,
    workload: Workload,
    shape: Shape,
    assignment: AssignmentPlan,
    *,
    schedule: str = DEFAULT_ORDER,
    in_flight: int | None = None,
    seed: int = 0,
    calibration: Calibration | None = None,
    network_name: str = "",
) -> TrainingPlan:
    """The rest of a plan around a given assignment, with its simulated times."""
    groups = assignment.groups
    times = (
        ComputeTimes.from_flops(cluster, workload, groups, shape.layers)
        if calibration is None
        else calibration.compute_times(cluster.network.ids, workload, groups, shape.layers)
    )
    order = _schedule(schedule, cluster, workload, shape, assignment, times, in_flight)
    unpriced = TrainingPlan(
        cluster=cluster,
        network_name=network_name,
        workload=workload,
        seed=seed,
        compute_times=times,
        assignment=assignment,
        stage_layers=shape.layers,
        schedules=(order,),
        averaging=tuple(((AveragingGroup.equal(group),),) for group in groups),
        predicted=Predicted(0.0, 0.0, 0.0),
        certificates={},
    )
    timeline = simulate(unpriced)
    return unpriced.replace(
        predicted=Predicted(timeline.makespan_s, timeline.averaging_s, timeline.step_s)
    )


def memory_room(
    cluster: Cluster,
    workload: Workload,
    shape: Shape,
    groups: Sequence[Sequence[int]],
) -> dict[int, int]:
    """Microbatches that each device can hold between their F and B.

    Raises
    ------
    ProblemError
        A device cannot hold its stage and one microbatch.
    """
    room: dict[int, int] = {}
    for j, group in enumerate(groups):
        stage = workload.stage(*shape.layers[j])
        with_head = j == shape.head_stage
        parameters = stage.parameters + (workload.head.parameters if with_head else 0)
        state = parameters * workload.state_bytes_per_parameter
        scratch = workload.head.saved_bytes * workload.microbatch_samples if with_head else 0.0
        each = stage.saved_bytes * workload.microbatch_samples
        for d in group:
            left = cluster.memory_bytes[d] - state - scratch
            if left < each:
                raise ProblemError(
                    f"device {cluster.network.ids[d]!r} has {cluster.memory_bytes[d] / 1e9:.2f} GB "
                    f"but stage {j} needs {(state + scratch + each) / 1e9:.2f} GB for its state "
                    "and one microbatch; use more stages, smaller microbatches or larger devices"
                )
            room[d] = shape.microbatches if each == 0 else min(int(left // each), 1 << 30)
    return room


def _schedule(
    name: str,
    cluster: Cluster,
    workload: Workload,
    shape: Shape,
    assignment: AssignmentPlan,
    times: ComputeTimes,
    in_flight: int | None,
) -> Schedule:
    if name not in ORDERS:
        raise ProblemError(f"schedule {name!r} is unknown; choose one of {', '.join(ORDERS)}")
    if in_flight is not None and (in_flight < 1 or name != "eager-1f1b"):
        raise ProblemError(
            f"in_flight is {in_flight} with schedule {name}; give at least 1, and only with "
            "eager-1f1b"
        )
    assert assignment.grid is not None
    room = memory_room(cluster, workload, shape, assignment.groups)
    grid = assignment.grid.tolist()
    if name == "eager-1f1b":
        if in_flight is not None:
            room = {d: min(count, in_flight) for d, count in room.items()}
        stage_of = {d: j for j, group in enumerate(assignment.groups) for d in group}
        sent = [
            workload.stage(*part).output_bytes * workload.microbatch_samples
            for part in shape.layers
        ]
        hops = [cluster.network.transfer_s(size).tolist() for size in sent]
        return eager_schedule(
            grid,
            shape.microbatches,
            shape.head,
            times,
            lambda d, e, owner: float(hops[stage_of[owner]][d][e]),
            room,
        )
    made = fixed_schedule(name, grid, shape.microbatches, shape.head, len(cluster))
    for d, held in enumerate(most_live(made)):
        if d in room and held > room[d]:
            raise ProblemError(
                f"{name} keeps {held} microbatches on device {cluster.network.ids[d]!r}, whose "
                f"memory holds {room[d]}; use eager-1f1b, more stages or smaller microbatches"
            )
    return made


@dataclass(frozen=True)
class RandomPlacements:
    """Means over random grids, whose rows are taken as they fall (nothing re-matched)."""

    count: int
    mean_cost_s: float
    mean_step_s: float


def random_placements(
    cluster: Cluster,
    workload: Workload,
    shape: Shape,
    *,
    count: int = 20,
    schedule: str = DEFAULT_ORDER,
    in_flight: int | None = None,
    seed: int = 0,
    calibration: Calibration | None = None,
) -> RandomPlacements:
    """What a user without a planner gets: random placement, same schedule."""
    rng = np.random.default_rng(seed)
    problem = assignment_problem(cluster, workload, shape)
    hops = [problem.hop_s(j) for j in range(shape.stages - 1)]
    costs, steps = [], []
    for _ in range(count):
        grid = rng.permutation(len(cluster)).reshape(shape.pipelines, shape.stages)
        drawn = AssignmentPlan.of_grid(grid)
        pipeline = sum(
            2 * float(hop[grid[:, j], grid[:, j + 1]].max()) for j, hop in enumerate(hops)
        )
        costs.append(problem.data_parallel_s(drawn.groups) + pipeline)
        placed = plan_for_assignment(
            cluster,
            workload,
            shape,
            drawn,
            schedule=schedule,
            in_flight=in_flight,
            seed=seed,
            calibration=calibration,
        )
        steps.append(placed.predicted.step_s)
    return RandomPlacements(count, float(np.mean(costs)), float(np.mean(steps)))
