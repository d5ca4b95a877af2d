"""The rest of a plan around a given assignment: order of operations, averaging, simulated times."""

from __future__ import annotations

from dataclasses import dataclass

from planner.clock.simulator import simulate_cycle
from planner.compose.averaging import averaging_rounds
from planner.compose.schedules import ORDERS, eager_schedule, fixed_schedule
from planner.compose.shape import Shape, memory_room
from planner.network.cluster import Cluster
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan
from planner.training_plan.model import CODECS, Predicted, Schedule, TrainingPlan
from planner.workload.calibration import Calibration
from planner.workload.compute_times import ComputeTimes
from planner.workload.workload import Workload

DEFAULT_ORDER = ORDERS[0]


@dataclass(frozen=True)
class Setting:
    """What a plan is made for, and how microbatches shall be ordered.

    Attributes
    ----------
    schedule, head, in_flight, calibration, averaging, group_size, codec
        As in `planner.training_plan.model`.
    """

    cluster: Cluster
    workload: Workload
    schedule: str = DEFAULT_ORDER
    head: str = "last"
    in_flight: int | None = None
    seed: int = 0
    calibration: Calibration | None = None
    network_name: str = ""
    averaging: str = "equal"
    group_size: int | None = None
    codec: str = "none"


def plan_for_assignment(setting: Setting, shape: Shape, assignment: AssignmentPlan) -> TrainingPlan:
    """A whole plan, without certificates, for an assignment with a grid."""
    times = compute_times(setting, shape, assignment)
    order = _schedule(setting, shape, assignment, times)
    return priced(setting, shape, assignment, times, (order,), (0,))


def compute_times(setting: Setting, shape: Shape, assignment: AssignmentPlan) -> ComputeTimes:
    """Seconds of every device on its stage: measured if there is a calibration, else by FLOPs."""
    cluster, workload, groups = setting.cluster, setting.workload, assignment.groups
    if setting.calibration is None:
        return ComputeTimes.from_flops(cluster, workload, groups, shape.layers)
    ids = cluster.network.ids
    return setting.calibration.compute_times(ids, workload, groups, shape.layers)


def priced(
    setting: Setting,
    shape: Shape,
    assignment: AssignmentPlan,
    times: ComputeTimes,
    schedules: tuple[Schedule, ...],
    cycle: tuple[int, ...],
) -> TrainingPlan:
    """The plan with these schedules, its averaging and its simulated times; no certificates."""
    if setting.codec not in CODECS:
        raise ProblemError(f"codec {setting.codec!r} is unknown; choose one of {', '.join(CODECS)}")
    cluster = setting.cluster
    unpriced = TrainingPlan(
        cluster=cluster,
        network_name=setting.network_name,
        workload=setting.workload,
        seed=setting.seed,
        compute_times=times,
        assignment=assignment,
        stage_layers=shape.layers,
        schedules=schedules,
        cycle=cycle,
        averaging=tuple(
            averaging_rounds(cluster, group, setting.averaging, setting.group_size)
            for group in assignment.groups
        ),
        codec=setting.codec,
        predicted=Predicted(0.0, 0.0, 0.0),
        certificates={},
    )
    return unpriced.replace(predicted=simulate_cycle(unpriced)[0])


def _schedule(
    setting: Setting, shape: Shape, assignment: AssignmentPlan, times: ComputeTimes
) -> Schedule:
    name, in_flight = setting.schedule, setting.in_flight
    cluster, workload = setting.cluster, setting.workload
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
    for d, held in enumerate(made.most_live()):
        if d in room and held > room[d]:
            raise ProblemError(
                f"{name} keeps {held} microbatches on device {cluster.network.ids[d]!r}, whose "
                f"memory holds {room[d]}; use eager-1f1b, more stages or smaller microbatches"
            )
    return made
