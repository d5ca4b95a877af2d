"""One device's part of an iteration: its operations in the planned order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from planner.executor.compute import Operations
from planner.executor.messages import Traffic
from planner.executor.records import StepRecord
from planner.executor.transport import Inbox, Outbox
from planner.training_plan.model import Operation


def run_operations(
    order: tuple[Operation, ...],
    traffic: Traffic,
    compute: Operations,
    inbox: Inbox,
    outbox: Outbox,
    serial: int,
    rank: int,
    record: StepRecord,
    ended: Callable[[float], None] = lambda end: None,
) -> None:
    """Do F, H and B of one device; messages leave as soon as their operation is done.

    Parameters
    ----------
    order
        The device's operations.
    traffic
        Its messages.
    compute
        What an operation does.
    inbox, outbox
        Where messages come from and go to.
    serial
        Number of the step among all of this run.
    rank
        This process.
    record
        Takes times, monotonic clock.
    ended
        Called after each operation with the moment of its end, monotonic clock.
    """
    for kind, b in order:
        arrival = None
        if (before := traffic.before.get((kind, b))) is not None:
            arrival = inbox.take(serial, before)
        start = time.monotonic()
        made = compute.operate(kind, b, None if arrival is None else arrival.tensor)
        end = time.monotonic()
        if (after := traffic.after.get((kind, b))) is not None:
            outbox.send(made, after.destination)
            record.sent(after, made.nbytes, end)
        record.ops.append((b, rank, kind, start, end))
        if before is not None and arrival is not None:
            record.received(before, arrival.tensor.nbytes, arrival.arrived_s)
        ended(end)


def run_alone(
    microbatches: Iterable[int], compute: Operations, rank: int, record: StepRecord
) -> None:
    """Take microbatches through the whole model on this device, whatever their planned path.

    Parameters
    ----------
    microbatches
        One after the other.
    compute
        What an operation does.
    rank
        This process.
    record
        Takes times, monotonic clock.
    """
    for b in microbatches:
        for kind in "FHB":
            start = time.monotonic()
            compute.operate(kind, b, None)
            record.ops.append((b, rank, kind, start, time.monotonic()))
