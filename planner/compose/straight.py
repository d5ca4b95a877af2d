"""Straight pipelines: which microbatch takes which pipeline, and in which order devices work.

Three orders: GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019), and eager 1F1B, which takes
backward passes first and starts forward passes as long as memory holds them, so that slow links are
hidden behind more microbatches in flight (Zhuang et al. 2023 use the same idea between clusters).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from planner.compose.request import Order, Question
from planner.compose.shape import Shape, memory_room
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan
from planner.training_plan.choices import Head
from planner.training_plan.model import Operation, Schedule
from planner.workload.compute_times import ComputeTimes

Paths = tuple[tuple[int, ...], ...]
HopSeconds = Callable[[int, int, int], float]
"""Seconds from one device to another for a message of a third one's activations."""


def straight_schedule(
    question: Question, shape: Shape, assignment: AssignmentPlan, times: ComputeTimes
) -> Schedule:
    """Every microbatch along a row of the grid, in the order that was asked for.

    Parameters
    ----------
    question
        What is asked, of what.
    shape
        Stages, layers and microbatches.
    assignment
        Devices of every stage.
    times
        Seconds of every device on its stage.

    Returns
    -------
    Schedule
        One order a device.

    Raises
    ------
    ProblemError
        Memory does not hold what the order keeps.
    """
    assert assignment.grid is not None
    cluster, workload, request = question.cluster, question.workload, question.request
    room = memory_room(cluster, workload, shape, assignment.groups)
    grid = assignment.grid.tolist()
    if request.schedule == Order.EAGER_1F1B:
        if request.in_flight is not None:
            room = {d: min(count, request.in_flight) for d, count in room.items()}
        stage_of = {d: j for j, group in enumerate(assignment.groups) for d in group}
        hops = [
            cluster.network.transfer_s(costs.output_bytes).tolist()
            for costs in shape.costs(workload)
        ]
        return eager_schedule(
            grid,
            shape.microbatches,
            shape.head,
            times,
            lambda d, e, owner: float(hops[stage_of[owner]][d][e]),
            room,
        )
    order = Order(request.schedule)
    made = fixed_schedule(order, grid, shape.microbatches, shape.head, len(cluster))
    for d, held in enumerate(made.most_live()):
        if d in room and held > room[d]:
            raise ProblemError(
                f"{order} keeps {held} microbatches on device {cluster.network.ids[d]!r}, whose "
                f"memory holds {room[d]}; use eager-1f1b, more stages or smaller microbatches"
            )
    return made


def straight_paths(grid: Sequence[Sequence[int]], microbatches: int) -> Paths:
    """Microbatch b takes pipeline ``b mod pipelines``.

    Parameters
    ----------
    grid
        ``int[pipelines, stages]``.
    microbatches
        Microbatches of an iteration.

    Returns
    -------
    Paths
        One path a microbatch.
    """
    rows = [tuple(int(d) for d in row) for row in grid]
    return tuple(rows[b % len(rows)] for b in range(microbatches))


def fixed_schedule(
    order: Order, grid: Sequence[Sequence[int]], microbatches: int, head: Head, devices: int
) -> Schedule:
    """GPipe or 1F1B over the pipelines of a grid.

    1F1B lets ``S - j`` microbatches be in flight at stage j, what fills a pipeline whose transfers
    are free.

    Parameters
    ----------
    order
        GPipe or 1F1B.
    grid
        ``int[pipelines, stages]``.
    microbatches
        Microbatches of an iteration.
    head
        The place of head and loss.
    devices
        N.

    Returns
    -------
    Schedule
        One order a device.
    """
    paths = straight_paths(grid, microbatches)
    orders: list[tuple[Operation, ...]] = [()] * devices
    pipelines, stages = len(grid), len(grid[0])
    for i, row in enumerate(grid):
        mine = list(range(i, microbatches, pipelines))
        for j, d in enumerate(row):
            flight = len(mine) if order is Order.GPIPE else stages - j
            orders[int(d)] = _device_order(mine, flight, _head_here(j, stages, head))
    return Schedule(order, head, paths, tuple(orders))


def _head_here(stage: int, stages: int, head: Head) -> str | None:
    """How H fits in at a stage: right after F, when the microbatch is back, or not at all."""
    if head is Head.LAST or stages == 1:
        return "after" if stage == stages - 1 else None
    return "before" if stage == 0 else None


def _device_order(mine: list[int], flight: int, head: str | None) -> tuple[Operation, ...]:
    ops: list[Operation] = []
    done = 0
    for k, b in enumerate(mine):
        ops.append(("F", b))
        if head == "after":
            ops.append(("H", b))
        if k + 1 >= flight:
            ops += _backward(mine[done], head)
            done += 1
    for b in mine[done:]:
        ops += _backward(b, head)
    return tuple(ops)


def _backward(b: int, head: str | None) -> list[Operation]:
    return [("H", b), ("B", b)] if head == "before" else [("B", b)]


def eager_schedule(
    grid: Sequence[Sequence[int]],
    microbatches: int,
    head: Head,
    times: ComputeTimes,
    hop_s: HopSeconds,
    room: Mapping[int, int],
) -> Schedule:
    """List scheduling: each device takes B before H before F, first come first served.

    Parameters
    ----------
    grid
        ``int[pipelines, stages]``.
    microbatches
        Microbatches of an iteration.
    head
        The place of head and loss.
    times, hop_s
        What operations and transfers are expected to take.
    room
        Microbatches that each device may hold between their F and B.

    Returns
    -------
    Schedule
        One order a device.
    """
    paths = straight_paths(grid, microbatches)
    blank = Schedule(Order.EAGER_1F1B, head, paths, ())
    run = _ListScheduler(blank, times, hop_s, room)
    return Schedule(blank.name, head, paths, run.orders())


@dataclass
class _Device:
    """A device's waiting operations by kind, and what it holds."""

    waiting: dict[str, deque[tuple[int, int]]]
    live: int = 0
    busy: bool = False


class _ListScheduler:
    """Event loop of `eager_schedule`; an operation is ``(microbatch, place in its chain)``."""

    def __init__(
        self, schedule: Schedule, times: ComputeTimes, hop_s: HopSeconds, room: Mapping[int, int]
    ) -> None:
        self.chains = [schedule.chain(b) for b in range(len(schedule.paths))]
        self.seconds = {"F": times.forward_s, "H": times.head_s, "B": times.backward_s}
        self.hop_s, self.room = hop_s, room
        self.devices = [_Device({kind: deque() for kind in "BHF"}) for _ in times.forward_s]
        self.order: list[list[Operation]] = [[] for _ in times.forward_s]
        self.events: list[tuple[float, int, int, bool]] = []

    def orders(self) -> tuple[tuple[Operation, ...], ...]:
        for b in range(len(self.chains)):
            self._push(0.0, False, b, 0)
        while self.events:
            now = self.events[0][0]
            touched = []
            # take everything that happens at this moment before anybody chooses
            while self.events and self.events[0][0] == now:
                _, b, k, computed = heapq.heappop(self.events)
                touched.append(self.chains[b][k][1])
                if computed:
                    self._computed(now, b, k)
                else:
                    kind, d = self.chains[b][k]
                    self.devices[d].waiting[kind].append((b, k))
            for d in dict.fromkeys(touched):
                self._choose(d, now)
        return tuple(tuple(ops) for ops in self.order)

    def _push(self, time: float, computed: bool, b: int, k: int) -> None:
        # ties by microbatch and place, so that equal times give one order everywhere
        heapq.heappush(self.events, (time, b, k, computed))

    def _computed(self, now: float, b: int, k: int) -> None:
        kind, d = self.chains[b][k]
        device = self.devices[d]
        device.busy = False
        device.live -= kind == "B"
        if k + 1 < len(self.chains[b]):
            next_kind, e = self.chains[b][k + 1]
            if e == d:
                device.waiting[next_kind].append((b, k + 1))
            else:
                hop = self.hop_s(d, e, e if next_kind == "B" else d)
                self._push(now + hop, False, b, k + 1)

    def _choose(self, d: int, now: float) -> None:
        device = self.devices[d]
        if device.busy:
            return
        for kind, queue in device.waiting.items():
            if queue and (kind != "F" or device.live < self.room[d]):
                b, k = queue.popleft()
                device.busy = True
                device.live += kind == "F"
                self.order[d].append((kind, b))
                self._push(now + self.seconds[kind][d], True, b, k)
                return
