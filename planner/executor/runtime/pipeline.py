"""One device's part of an iteration: its operations in the planned order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from planner.executor.comm.p2p import ReceivedMessage, Receiver, Sender
from planner.executor.runtime.device_backend import DeviceBackend, Mark
from planner.executor.runtime.p2p_schedule import Message, P2PSchedule
from planner.executor.runtime.records import StepRecord
from planner.executor.runtime.stage_runtime import Operations
from planner.training_plan.schedule import Operation


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
    backend = compute.side
    issued: deque[_IssuedOperation] = deque()

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
        made = compute.run_op(kind, b, None if arrival is None else arrival.tensor)
        stop = backend.mark()
        if (after := traffic.after.get(operation)) is not None:
            sender.send(made, after.destination)
        sent = None if after is None else (after, made.nbytes)
        issued.append(_IssuedOperation(operation, start, stop, sent, arrival))
        drain(backend.max_pending)
    drain(0)


class _IssuedOperation(NamedTuple):
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


def run_whole_model(
    microbatches: Iterable[int], compute: Operations, rank: int, record: StepRecord
) -> None:
    """Run microbatches through the whole model on this device."""
    backend = compute.side
    issued: deque[_IssuedOperation] = deque()
    for b in microbatches:
        for kind in "FHB":
            start = backend.mark()
            compute.run_op(kind, b, None)
            issued.append(_IssuedOperation((kind, b), start, backend.mark()))
            if len(issued) > backend.max_pending:
                issued.popleft().wait_and_record(backend, rank, record)
    for one in issued:
        one.wait_and_record(backend, rank, record)
