"""Straight pipelines: assignment of microbatches and order of operations.

Three orders: GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019), and eager 1F1B, which takes
backward passes first and starts forward passes as long as memory holds them, so that slow links are
hidden behind more microbatches in flight (Zhuang et al. 2023 use the same idea between clusters).
Its order comes from the simulator, where messages wait for links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.planning.problem import PlanningProblem
from planner.planning.request import OperationOrder
from planner.planning.shape import Shape, memory_room, sent_bytes
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan
from planner.simulator.program import compile_schedules
from planner.simulator.resources import LinkResources
from planner.simulator.run import Run
from planner.training_plan.choices import Head
from planner.training_plan.schedule import Operation, Schedule
from planner.workload.compute_times import ComputeTimes

Paths = tuple[tuple[int, ...], ...]


def straight_schedule(
    problem: PlanningProblem, shape: Shape, assignment: AssignmentPlan, times: ComputeTimes
) -> Schedule:
    """Every microbatch along a row of the grid, in the requested order."""
    assert assignment.grid is not None
    grid, gpipe = assignment.grid.tolist(), problem.request.schedule == OperationOrder.GPIPE
    # S - j fill a pipeline whose transfers are free
    flight = {
        d: shape.microbatches if gpipe else shape.stages - j
        for row in grid
        for j, d in enumerate(row)
    }
    paths = straight_paths(grid, shape.microbatches)
    return path_schedule(problem, shape, assignment, times, paths, flight)


def path_schedule(
    problem: PlanningProblem,
    shape: Shape,
    assignment: AssignmentPlan,
    times: ComputeTimes,
    paths: Paths,
    flight: Mapping[int, int],
) -> Schedule:
    """Microbatches along paths that visit every stage, in the requested order."""
    cluster, workload, request = problem.cluster, problem.workload, problem.request
    order, groups = OperationOrder(request.schedule), assignment.groups
    room = memory_room(cluster, workload, shape, groups, request.in_flight)
    blank = Schedule(order, shape.head, paths, ())
    if order is OperationOrder.EAGER_1F1B:
        sent = sent_bytes(shape.costs(workload), groups, len(cluster))
        return eagerly_ordered(blank, times, sent, LinkResources.of(cluster), room)
    ordered = _in_order_of_microbatches(blank, flight, len(cluster))
    for d, live in enumerate(ordered.most_live()):
        if d in room and live > room[d]:
            raise ProblemError(
                f"{order} keeps {live} microbatches on device {cluster.network.ids[d]!r}, whose "
                f"memory holds {room[d]}; use eager-1f1b, more stages or smaller microbatches"
            )
    return ordered


def straight_paths(grid: Sequence[Sequence[int]], microbatches: int) -> Paths:
    """Microbatch b takes pipeline ``b mod pipelines``.

    Parameters
    ----------
    grid
        ``int[pipelines, stages]``.
    """
    rows = [tuple(int(d) for d in row) for row in grid]
    return tuple(rows[b % len(rows)] for b in range(microbatches))


def _in_order_of_microbatches(
    schedule: Schedule, flight: Mapping[int, int], devices: int
) -> Schedule:
    """Each device's microbatches by number, with ``flight`` of them in flight."""
    paths = schedule.paths
    orders: list[tuple[Operation, ...]] = [()] * devices
    stages = len(paths[0])
    for j in range(stages):
        microbatches_of: dict[int, list[int]] = {}
        for b, path in enumerate(paths):
            microbatches_of.setdefault(path[j], []).append(b)
        head = _head_here(j, stages, schedule.head)
        for d, microbatches in microbatches_of.items():
            orders[d] = _device_order(microbatches, flight[d], head)
    return replace(schedule, order=tuple(orders))


def _head_here(stage: int, stages: int, head: Head) -> str | None:
    """When H runs on a stage: after F, when the microbatch returns, or not at all."""
    if head is Head.LAST or stages == 1:
        return "after" if stage == stages - 1 else None
    return "before" if stage == 0 else None


def _device_order(microbatches: list[int], flight: int, head: str | None) -> tuple[Operation, ...]:
    ops: list[Operation] = []
    done = 0
    for k, b in enumerate(microbatches):
        ops.append(("F", b))
        if head == "after":
            ops.append(("H", b))
        if k + 1 >= flight:
            ops += _backward(microbatches[done], head)
            done += 1
    for b in microbatches[done:]:
        ops += _backward(b, head)
    return tuple(ops)


def _backward(b: int, head: str | None) -> list[Operation]:
    return [("H", b), ("B", b)] if head == "before" else [("B", b)]


def eagerly_ordered(
    schedule: Schedule,
    times: ComputeTimes,
    sent_bytes: NDArray[np.float64],
    links: LinkResources,
    room: Mapping[int, int],
) -> Schedule:
    """List scheduling in the simulator: devices prefer B to H to F, first come first served.

    Parameters
    ----------
    sent_bytes
        ``float[N]``: a microbatch's activations sent by each device.
    """
    return replace(schedule, order=eager_run(schedule, times, sent_bytes, links, room).order())


def eager_run(
    schedule: Schedule,
    times: ComputeTimes,
    sent_bytes: NDArray[np.float64],
    links: LinkResources,
    room: Mapping[int, int],
) -> Run:
    """The run of one step from an idle system that `eagerly_ordered` takes its order from."""
    pairs, work = compile_schedules([replace(schedule, order=())], times, sent_bytes, links)
    live = np.array([room.get(d, 0) for d in range(len(links))], dtype=np.int64)
    return Run.chosen(pairs, work, live, times.message_s)
