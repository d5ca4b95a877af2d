"""Run the compiled simulator: allocates its arrays and reads the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.simulator.averaging_rounds import AveragingRounds
from planner.simulator.pairs import Pairs
from planner.simulator.program import OPERATION_KINDS, OperationTable, Program
from planner.simulator.resources import NONE, Ints
from planner.simulator.state import (
    IDLE,
    AveragingState,
    DeviceState,
    EventQueue,
    EventTimes,
    FlowState,
    ProcessorState,
    RunOptions,
)
from planner.training_plan.schedule import Operation


@dataclass(frozen=True)
class Run:
    """A simulated run of some steps on an initially idle system.

    Attributes
    ----------
    stuck
        On a deadlock, the device, schedule and index in the device's order of the operation that
        can never begin; else None.
    """

    operations: OperationTable
    times: EventTimes
    stuck: tuple[int, int, int] | None

    @classmethod
    def planned(
        cls,
        program: Program,
        steps: Sequence[int],
        *,
        averages: bool | Sequence[bool],
        delayed: bool = False,
        message_s: float = 0.0,
        queues: bool = True,
        cores: float = 0.0,
        recorded: int = 0,
    ) -> Run:
        """Run with each device following its planned order."""
        options = RunOptions(
            np.array(steps, dtype=np.int64),
            np.broadcast_to(np.asarray(averages, dtype=bool), len(steps)).copy(),
            delayed,
            message_s,
            cores,
            queues,
            np.zeros(0, dtype=np.int64),
            recorded,
        )
        rounds = program.rounds
        if queues and len(program.within.size) and not options.averages.any():
            rounds = program.within
            options.averages[:] = True
        return cls._of(program.pairs, program.operations, rounds, options)

    @classmethod
    def chosen(
        cls, pairs: Pairs, operations: OperationTable, room: Ints, message_s: float = 0.0
    ) -> Run:
        """Run one recorded step with dynamic dispatch: B, H, F; then first come first served.

        Parameters
        ----------
        room
            ``int[N]``: microbatches that may be between their F and B on each device.
        """
        options = RunOptions(
            np.zeros(1, dtype=np.int64),
            np.zeros(1, dtype=bool),
            False,
            message_s,
            0.0,
            True,
            room,
            1,
        )
        return cls._of(pairs, operations, _no_rounds(len(room)), options)

    @classmethod
    def _of(
        cls, pairs: Pairs, operations: OperationTable, rounds: AveragingRounds, options: RunOptions
    ) -> Run:
        from planner.simulator.compiled_event_loop import run  # importing numba is slow

        n, ops, groups = len(operations.update_s), len(operations.device), len(rounds.size)
        devices = _device_state(n, ops * len(options.steps), groups)
        times = _event_times(len(options.steps), options.recorded, ops, n, groups)
        flows = _flow_state(pairs, len(devices.inputs_ready))
        averaging = _averaging_state(rounds, len(pairs.capacity), len(options.steps))
        processors = _processor_state(n)
        # at most two events per device and one per message, group and slot at a time
        slots = len(pairs.source) + groups + 1  # in the order that `kernel.EVENT_STRIDE` documents
        queue = EventQueue.of(2 * n + groups + len(devices.inputs_ready) + slots, slots)
        run(pairs, operations, rounds, options, devices, flows, averaging, times, processors, queue)
        stuck, d = None, int(times.stuck[0])
        if d != NONE:
            stuck = (d, int(options.steps[devices.step[d]]), int(devices.position[d]))
        return cls(operations, times, stuck)

    def order(self) -> tuple[tuple[Operation, ...], ...]:
        """The operations that every device chose, in order."""
        operations, times = self.operations, self.times
        name = [
            (OPERATION_KINDS[kind], b)
            for kind, b in zip(
                operations.kind.tolist(), operations.microbatch.tolist(), strict=True
            )
        ]
        return tuple(
            tuple(name[o] for o in times.chosen[first : first + count].tolist())
            for first, count in zip(
                operations.order_ptr.tolist(), times.num_done.tolist(), strict=False
            )
        )

    def operation_ids(self, schedule: int) -> Ints:
        """Indices of a schedule's operations, by device."""
        n = len(self.operations.update_s)
        first = self.operations.order_ptr
        return self.operations.order[first[schedule * n] : first[(schedule + 1) * n]]


def _device_state(n: int, messages: int, groups: int) -> DeviceState:
    return DeviceState(
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.full(n, IDLE, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.full(n, NONE, dtype=np.int64),
        np.zeros(n, dtype=np.bool_),
        np.zeros(n, dtype=np.int64),
        np.full((n, 3), NONE, dtype=np.int64),
        np.full((n, 3), NONE, dtype=np.int64),
        np.full(messages, NONE, dtype=np.int64),
        np.zeros(groups, dtype=np.int64),
        np.zeros(messages, dtype=np.bool_),
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.bool_),
    )


def _event_times(steps: int, recorded: int, ops: int, n: int, groups: int) -> EventTimes:
    by_operation = {
        name: np.zeros((recorded, ops))
        for name in ("begin", "end", "enqueued", "send_begin", "send_end", "arrived")
    }
    by_device = {name: np.zeros((recorded, n)) for name in ("ready", "update_begin", "update_end")}
    by_group = {name: np.zeros((recorded, groups)) for name in ("round_begin", "round_end")}
    return EventTimes(
        step_end=np.zeros(steps),
        **by_operation,
        **by_device,
        **by_group,
        chosen=np.zeros(ops, dtype=np.int64),
        num_done=np.zeros(n, dtype=np.int64),
        stuck=np.full(1, NONE, dtype=np.int64),
    )


def _flow_state(pairs: Pairs, messages: int) -> FlowState:
    count, resources = len(pairs.source), len(pairs.capacity)
    return FlowState(
        np.full(count, NONE, dtype=np.int64),
        np.full(count, NONE, dtype=np.int64),
        np.full(messages, NONE, dtype=np.int64),
        np.zeros(count),
        np.zeros(count),
        np.zeros(count),
        np.zeros(count),
        np.zeros(count),
        np.zeros(int(pairs.resource_ptr[-1]), dtype=np.int64),
        np.zeros(resources, dtype=np.int64),
        np.zeros(resources),
        np.zeros(pairs.shared.shape, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
        np.zeros(resources, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        np.zeros(count + 1, dtype=np.int64),
        np.zeros(resources, dtype=np.int64),
        np.zeros(resources),
        np.zeros(resources, dtype=np.int64),
        np.zeros(resources),
        np.zeros(messages),
        np.zeros(1, dtype=np.int64),
    )


def _averaging_state(rounds: AveragingRounds, resources: int, steps: int) -> AveragingState:
    groups = len(rounds.size)
    return AveragingState(
        np.zeros(groups, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        np.zeros(groups, dtype=np.int64),
        np.zeros(groups),
        np.zeros(groups),
        np.zeros(groups),
        np.zeros(groups),
        np.zeros(groups),
        np.zeros(len(rounds.resource_bytes)),
        np.zeros(resources),
        np.zeros(resources, dtype=np.int64),
        np.zeros(groups, dtype=np.int64),
        np.zeros(steps, dtype=np.int64),
        np.zeros(steps),
    )


def _processor_state(n: int) -> ProcessorState:
    number, event = (np.zeros(n, dtype=np.int64) for _ in range(2))
    return ProcessorState(np.zeros(n), number, event, np.zeros(1, dtype=np.int64), np.zeros(2))


def _no_rounds(n: int) -> AveragingRounds:
    none, nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
    return AveragingRounds(
        none,
        np.zeros(n + 1, dtype=np.int64),
        none,
        nothing,
        nothing,
        np.zeros(1, dtype=np.int64),
        none,
        nothing,
        np.zeros(1, dtype=np.int64),
        none,
        nothing,
        none,
        none,
        NONE,
        0,
        np.full(n, -1.0),
        nothing,
    )
