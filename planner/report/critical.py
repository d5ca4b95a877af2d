"""Critical path of a step's pipeline."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from planner.simulator.timeline import Op, Timeline, Transfer

TOLERANCE = 1e-9
"""Of the makespan: as near are an end and the begin that waited for it."""


def critical_path(timeline: Timeline) -> list[Op | Transfer]:
    """Operations and messages from the begin to the last operation's end, in order of time.

    Before an operation comes what ended last of its device's operation before and the message it
    waits for; before a message comes the operation that handed it over.
    """
    if not timeline.ops:
        return []
    slack = TOLERANCE * timeline.makespan_s
    devices: dict[int, list[Op]] = {}
    mine: dict[tuple[int, int], list[Op]] = {}
    arriving: dict[tuple[int, int, str], Transfer] = {}
    for op in sorted(timeline.ops, key=lambda op: (op.end_s, op.start_s)):
        devices.setdefault(op.device, []).append(op)
        mine.setdefault((op.device, op.microbatch), []).append(op)
    for t in timeline.transfers:
        arriving[t.destination, t.microbatch, t.kind] = t
    at: Op | Transfer | None = max(timeline.ops, key=lambda op: op.end_s)
    found: list[Op | Transfer] = []
    seen: set[Op | Transfer] = set()
    while at is not None and at not in seen:
        seen.add(at)
        found.append(at)
        if isinstance(at, Transfer):
            at = _before(mine.get((at.source, at.microbatch), []), at.start_s + slack, seen)
            continue
        earlier = _before(devices[at.device], at.start_s + slack, seen)
        message = arriving.get((at.device, at.microbatch, at.kind))
        waits = message is not None and (earlier is None or message.end_s > earlier.end_s)
        at = message if waits else earlier
    return found[::-1]


def _before(ops: Sequence[Op], time_s: float, seen: set[Op | Transfer]) -> Op | None:
    """The last operation that has ended then."""
    k = bisect_right(ops, time_s, key=lambda op: op.end_s) - 1
    # operations of no length may end where they begin
    while k >= 0 and ops[k] in seen:
        k -= 1
    return ops[k] if k >= 0 else None
