"""How a device runs its operations of a step: the interface, and the planned order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from planner.executor.comm.device_backend import DeviceBackend, Event
from planner.executor.comm.p2p import ReceivedMessage, Receiver, Sender, expected_messages
from planner.executor.comm.p2p_schedule import Message, P2PSchedule
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.runtime.records import OperationRecord, StepRecord
from planner.executor.runtime.stage_runtime import Operations, StageRuntime
from planner.executor.transport.connections import Connection
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Operation

EndCallback = Callable[[float], None]
"""Called with the end of an operation on the monotonic clock."""


class PipelineConnections(NamedTuple):
    """Connections of a pipeline: one from each peer, and a sender to all of them."""

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

    def open(self, connections: PipelineConnections, schedule_ids: Sequence[int]) -> None:
        """Open connections, before steps with these schedules."""

    def run(self, index: int, schedule_id: int, record: StepRecord, on_end: EndCallback) -> None:
        """Run a step of this index with a schedule; ``on_end`` is called for each operation."""

    def finish(self) -> None:
        """Finish sending and receiving, after the last step."""


class FixedPipeline:
    """Operations in the planned order, along planned paths."""

    fixed_order = True

    def __init__(self, plan: TrainingPlan, rank: int, runtime: StageRuntime) -> None:
        self._runtime = runtime
        self._p2p_schedules = {k: P2PSchedule(plan.schedules[k], rank) for k in set(plan.cycle)}
        self.peers = {peer for p2p in self._p2p_schedules.values() for peer in p2p.peers}
        self.loss_ranks = head_ranks(plan)

    def open(self, connections: PipelineConnections, schedule_ids: Sequence[int]) -> None:
        """See `Pipeline`."""
        self._sender = connections.sender
        expected = expected_messages([self._p2p_schedules[k] for k in schedule_ids])
        self._receiver = Receiver(
            connections.incoming, expected, self._runtime.buffer, connections.error_latch
        )

    def run(self, index: int, schedule_id: int, record: StepRecord, on_end: EndCallback) -> None:
        """See `Pipeline`."""
        schedule, order = self._p2p_schedules[schedule_id], self._order(index, schedule_id)
        ends = self._receiver, self._sender
        run_operations(schedule, self._runtime, *ends, index, record, on_end, order=order)

    def finish(self) -> None:
        """Nothing is left to do: the last step has received all messages."""

    def _order(self, index: int, schedule_id: int) -> Iterable[Operation]:
        """Operations of this device in a step."""
        return self._p2p_schedules[schedule_id].order


def head_ranks(plan: TrainingPlan) -> set[int]:
    """Ranks that run the head of a microbatch, and so have losses."""
    used = [plan.schedules[schedule_id] for schedule_id in set(plan.cycle)]
    return {s.head_device(microbatch) for s in used for microbatch in range(len(s.paths))}


def run_operations(
    p2p_schedule: P2PSchedule,
    runtime: Operations,
    receiver: Receiver,
    sender: Sender,
    index: int,
    record: StepRecord,
    on_end: EndCallback = lambda end_s: None,
    *,
    order: Iterable[Operation] | None = None,
) -> None:
    """Run F, H and B of one device; messages are sent as soon as their operation has ended.

    On a GPU the next operation is issued before the previous one has ended, if its input has
    arrived.
    """
    backend, rank = runtime.backend, p2p_schedule.device
    issued: deque[IssuedOperation] = deque()

    def drain(max_pending: int) -> None:
        while len(issued) > max_pending:
            operation = issued.popleft()
            end_s = operation.wait_and_record(backend, rank, record)
            if operation.sent is not None:
                sender.mark_computed(operation.sent[0].destination, operation.sent[1], end_s)
            on_end(end_s)

    for operation in p2p_schedule.order if order is None else order:
        kind, microbatch = operation
        received = None
        if (needed := p2p_schedule.needs.get(operation)) is not None:
            if issued and not receiver.has_arrived(index, needed):
                drain(0)
            received = receiver.receive(index, needed)
        start_event = backend.record_event()
        output = runtime.run_op(kind, microbatch, None if received is None else received.tensor)
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
        start_s = backend.wait_for_event(self.start_event)
        end_s = backend.wait_for_event(self.end_event)
        if self.sent is not None:
            record.record_sent(*self.sent, end_s)
        kind, microbatch = self.operation
        record.ops.append(OperationRecord(microbatch, rank, kind, start_s, end_s))
        if self.received is not None:
            received = self.received
            record.record_received(received.message, received.tensor.nbytes, received.arrived_s)
        return end_s
