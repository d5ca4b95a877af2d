"""How a device runs its operations of a step: the interface, and the planned order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from planner.executor.comm.connections import Connection
from planner.executor.comm.device_backend import DeviceBackend, Mark
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
    failure: ErrorLatch


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

    def open(self, links: PipelineLinks, walk: Sequence[int]) -> None:
        """Get ready for steps with these schedules."""

    def run(self, serial: int, k: int, record: StepRecord, ended: Callable[[float], None]) -> None:
        """Run a step with schedule k; ``ended`` is called with the end of each operation."""

    def finish(self) -> None:
        """Called after the last step."""


class FixedPipeline:
    """Operations in the planned order, along planned paths."""

    fixed_order = True

    def __init__(self, plan: TrainingPlan, rank: int, compute: StageRuntime) -> None:
        self._schedules, self._rank, self._compute = plan.schedules, rank, compute
        self._traffic = {k: P2PSchedule(plan.schedules[k], rank) for k in set(plan.cycle)}
        self.peers = {d for traffic in self._traffic.values() for d in traffic.peers}
        self.loss_ranks = head_ranks(plan)

    def open(self, links: PipelineLinks, walk: Sequence[int]) -> None:
        """See `Pipeline`."""
        self._sender = links.sender
        expected = expected_messages([self._traffic[k] for k in walk])
        self._receiver = Receiver(links.incoming, expected, self._compute.buffer, links.failure)

    def run(self, serial: int, k: int, record: StepRecord, ended: Callable[[float], None]) -> None:
        """See `Pipeline`."""
        run_operations(
            self._schedules[k].order[self._rank],
            self._traffic[k],
            self._compute,
            self._receiver,
            self._sender,
            serial,
            self._rank,
            record,
            ended,
        )

    def finish(self) -> None:
        """Does nothing: all messages have been received."""


def head_ranks(plan: TrainingPlan) -> set[int]:
    """Ranks that run the head of a microbatch, and so have losses."""
    used = [plan.schedules[k] for k in set(plan.cycle)]
    return {s.head_device(b) for s in used for b in range(len(s.paths))}


def run_operations(
    order: tuple[Operation, ...],
    traffic: P2PSchedule,
    compute: Operations,
    receiver: Receiver,
    sender: Sender,
    serial: int,
    rank: int,
    record: StepRecord,
    ended: Callable[[float], None] = lambda end: None,
) -> None:
    """Run F, H and B of one device; messages leave as soon as their operation is done.

    On a GPU the next operation is issued before the previous one has ended, if its input is there.
    """
    backend = compute.backend
    issued: deque[IssuedOperation] = deque()

    def drain(max_pending: int) -> None:
        while len(issued) > max_pending:
            one = issued.popleft()
            end_s = one.wait_and_record(backend, rank, record)
            if one.sent is not None:
                sender.made(one.sent[0].destination, one.sent[1], end_s)
            ended(end_s)

    for operation in order:
        kind, b = operation
        arrival = None
        if (before := traffic.before.get(operation)) is not None:
            if issued and not receiver.has(serial, before):
                drain(0)
            arrival = receiver.take(serial, before)
        start = backend.mark()
        output = compute.run_op(kind, b, None if arrival is None else arrival.tensor)
        stop = backend.mark()
        if (after := traffic.after.get(operation)) is not None:
            sender.send(output, after.destination)
        sent = None if after is None else (after, output.nbytes)
        issued.append(IssuedOperation(operation, start, stop, sent, arrival))
        drain(backend.max_pending)
    drain(0)


class IssuedOperation(NamedTuple):
    """An operation that may not have ended: what it is, what it sent and received."""

    operation: Operation
    start: Mark
    stop: Mark
    sent: tuple[Message, int] | None = None
    arrival: ReceivedMessage | None = None

    def wait_and_record(self, backend: DeviceBackend, rank: int, record: StepRecord) -> float:
        """Wait for its end, record it, and return the time."""
        start_s, end_s = backend.wait_time_s(self.start), backend.wait_time_s(self.stop)
        if self.sent is not None:
            record.sent(*self.sent, end_s)
        kind, b = self.operation
        record.ops.append((b, rank, kind, start_s, end_s))
        if self.arrival is not None:
            arrival = self.arrival
            record.received(arrival.message, arrival.tensor.nbytes, arrival.arrived_s)
        return end_s
