"""How a device runs its operations of a step: the interface, and the planned order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from planner.executor.comm.connections import Connection
from planner.executor.comm.device_backend import DeviceBackend, Event
from planner.executor.comm.p2p import ReceivedMessage, Receiver, Sender, expected_messages
from planner.executor.comm.p2p_schedule import Message, P2PSchedule
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.runtime.records import StepRecord
from planner.executor.runtime.stage_runtime import Operations, StageRuntime
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Operation


class PipelineLinks(NamedTuple):
    """Connections of a pipeline: from each peer, and to all of them."""

    incoming: Mapping[int, Connection]
    sender: Sender
    error_latch: ErrorLatch


class Pipeline(Protocol):
    """Runs the operations of a device, step by step.

    Attributes
    ----------
    peers
        Ranks with which it exchanges messages.
    loss_ranks
        Ranks of the plan that have losses.
    fixed_order
        Whether every step with a schedule has the same operations in the same order.
    """

    peers: set[int]
    loss_ranks: set[int]
    fixed_order: bool

    def open(self, links: PipelineLinks, schedule_ids: Sequence[int]) -> None:
        """Get ready for steps with these schedules."""

    def run(
        self,
        step_index: int,
        schedule_id: int,
        record: StepRecord,
        on_operation_end: Callable[[float], None],
    ) -> None:
        """Run a step with a schedule; ``on_operation_end`` is called with each operation's end."""

    def finish(self) -> None:
        """Called after the last step."""


class FixedPipeline:
    """Operations in the planned order, along planned paths."""

    fixed_order = True

    def __init__(self, plan: TrainingPlan, rank: int, compute: StageRuntime) -> None:
        self._schedules, self._rank, self._compute = plan.schedules, rank, compute
        self._p2p_schedules = {
            schedule_id: P2PSchedule(plan.schedules[schedule_id], rank)
            for schedule_id in set(plan.cycle)
        }
        self.peers = {
            d for p2p_schedule in self._p2p_schedules.values() for d in p2p_schedule.peers
        }
        self.loss_ranks = head_ranks(plan)

    def open(self, links: PipelineLinks, schedule_ids: Sequence[int]) -> None:
        """See `Pipeline`."""
        self._sender = links.sender
        expected = expected_messages(
            [self._p2p_schedules[schedule_id] for schedule_id in schedule_ids]
        )
        self._receiver = Receiver(links.incoming, expected, self._compute.buffer, links.error_latch)

    def run(
        self,
        step_index: int,
        schedule_id: int,
        record: StepRecord,
        on_operation_end: Callable[[float], None],
    ) -> None:
        """See `Pipeline`."""
        run_operations(
            self._schedules[schedule_id].order[self._rank],
            self._p2p_schedules[schedule_id],
            self._compute,
            self._receiver,
            self._sender,
            step_index,
            self._rank,
            record,
            on_operation_end,
        )

    def finish(self) -> None:
        """Does nothing: all messages have been received."""


def head_ranks(plan: TrainingPlan) -> set[int]:
    """Ranks that run the head of a microbatch, and so have losses."""
    used = [plan.schedules[schedule_id] for schedule_id in set(plan.cycle)]
    return {s.head_device(microbatch) for s in used for microbatch in range(len(s.paths))}


def run_operations(
    order: tuple[Operation, ...],
    p2p_schedule: P2PSchedule,
    compute: Operations,
    receiver: Receiver,
    sender: Sender,
    step_index: int,
    rank: int,
    record: StepRecord,
    on_operation_end: Callable[[float], None] = lambda end: None,
) -> None:
    """Run F, H and B of one device; messages leave as soon as their operation is done.

    On a GPU the next operation is issued before the previous one has ended, if its input is there.
    """
    backend = compute.backend
    issued: deque[IssuedOperation] = deque()

    def drain(max_pending: int) -> None:
        while len(issued) > max_pending:
            operation = issued.popleft()
            end_s = operation.wait_and_record(backend, rank, record)
            if operation.sent is not None:
                sender.mark_computed(operation.sent[0].destination, operation.sent[1], end_s)
            on_operation_end(end_s)

    for operation in order:
        kind, microbatch = operation
        received = None
        if (needed := p2p_schedule.needs.get(operation)) is not None:
            if issued and not receiver.has_arrived(step_index, needed):
                drain(0)
            received = receiver.receive(step_index, needed)
        start_event = backend.record_event()
        output = compute.run_op(kind, microbatch, None if received is None else received.tensor)
        end_event = backend.record_event()
        if (sent_message := p2p_schedule.sends.get(operation)) is not None:
            sender.send(output, sent_message.destination)
        sent = None if sent_message is None else (sent_message, output.nbytes)
        issued.append(IssuedOperation(operation, start_event, end_event, sent, received))
        drain(backend.max_pending)
    drain(0)


class IssuedOperation(NamedTuple):
    """An operation that may not have ended, with its events and messages."""

    operation: Operation
    start_event: Event
    end_event: Event
    sent: tuple[Message, int] | None = None
    received: ReceivedMessage | None = None

    def wait_and_record(self, backend: DeviceBackend, rank: int, record: StepRecord) -> float:
        """Wait for its end, record it, and return the time."""
        start_s, end_s = (
            backend.wait_for_event(self.start_event),
            backend.wait_for_event(self.end_event),
        )
        if self.sent is not None:
            record.sent(*self.sent, end_s)
        kind, microbatch = self.operation
        record.ops.append((microbatch, rank, kind, start_s, end_s))
        if self.received is not None:
            received = self.received
            record.received(received.message, received.tensor.nbytes, received.arrived_s)
        return end_s
