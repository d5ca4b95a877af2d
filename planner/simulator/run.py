"""Runs the compiled simulator: allocates its arrays and reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.simulator.averaging_rounds import AveragingRounds
from planner.simulator.pairs import Pairs
from planner.simulator.program import KINDS, OperationTable, Program
from planner.simulator.resources import MOST_SHARED, NONE, Ints
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
    """Some steps of a program, from rest.

    Attributes
    ----------
    stuck
        Device, schedule and place in its order of what can never begin; None: all was done.
    """

    work: OperationTable
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
        """Devices work in the planned order."""
        rules = RunOptions(
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
        if queues and len(program.within.size) and not rules.averages.any():
            rounds = program.within
            rules.averages[:] = True
        return cls._of(program.pairs, program.work, rounds, rules)

    @classmethod
    def chosen(cls, pairs: Pairs, work: OperationTable, room: Ints, message_s: float = 0.0) -> Run:
        """One recorded step in which devices choose: B before H before F, first come first served.

        Parameters
        ----------
        room
            ``int[N]``: microbatches that each device may hold between their F and B.
        """
        rules = RunOptions(
            np.zeros(1, dtype=np.int64),
            np.zeros(1, dtype=bool),
            False,
            message_s,
            0.0,
            True,
            room,
            1,
        )
        return cls._of(pairs, work, _no_rounds(len(room)), rules)

    @classmethod
    def _of(
        cls, pairs: Pairs, work: OperationTable, rounds: AveragingRounds, rules: RunOptions
    ) -> Run:
        from planner.simulator.kernel import run  # numba, where it is, takes a while to load

        n, ops, groups = len(work.update_s), len(work.device), len(rounds.size)
        devices = _device_state(n, ops * len(rules.steps), groups)
        times = _event_times(len(rules.steps), rules.recorded, ops, n, groups)
        flows = _flow_state(pairs, len(devices.there))
        averaging = _averaging_state(rounds, len(pairs.capacity), len(rules.steps))
        processors = _processor_state(n)
        # at a time at most two events of a device, one of a message and of a group, and forecasts
        slots = len(pairs.source) + groups + 1  # as the kernel numbers them
        queue = EventQueue.of(2 * n + groups + len(devices.there) + slots, slots)
        run(pairs, work, rounds, rules, devices, flows, averaging, times, processors, queue)
        stuck, d = None, int(times.stuck[0])
        if d != NONE:
            stuck = (d, int(rules.steps[devices.step[d]]), int(devices.place[d]))
        return cls(work, times, stuck)

    def order(self) -> tuple[tuple[Operation, ...], ...]:
        """What every device chose to do, in order."""
        work, times = self.work, self.times
        name = [
            (KINDS[kind], b)
            for kind, b in zip(work.kind.tolist(), work.microbatch.tolist(), strict=True)
        ]
        return tuple(
            tuple(name[o] for o in times.chosen[first : first + count].tolist())
            for first, count in zip(work.first.tolist(), times.done.tolist(), strict=False)
        )

    def operations(self, schedule: int) -> Ints:
        """Numbers of a schedule's operations, by device."""
        n = len(self.work.update_s)
        first = self.work.first
        return self.work.order[first[schedule * n] : first[(schedule + 1) * n]]


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
        for name in ("begin", "end", "handed", "leaves", "left", "arrived")
    }
    by_device = {name: np.zeros((recorded, n)) for name in ("ready", "update_begin", "update_end")}
    by_group = {name: np.zeros((recorded, groups)) for name in ("round_begin", "round_end")}
    return EventTimes(
        step_end=np.zeros(steps),
        **by_operation,
        **by_device,
        **by_group,
        chosen=np.zeros(ops, dtype=np.int64),
        done=np.zeros(n, dtype=np.int64),
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
        np.zeros(int(pairs.first[-1]), dtype=np.int64),
        np.zeros(resources, dtype=np.int64),
        np.zeros(resources),
        np.zeros((count, MOST_SHARED), dtype=np.int64),
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
        np.zeros(len(rounds.need)),
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
