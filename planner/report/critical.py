"""Critical path of a step's pipeline."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from planner.simulator.timeline import Op, Timeline, Transfer

TOLERANCE = 1e-9
"""Fraction of the makespan within which an end and the start that waited for it coincide."""


def critical_path(timeline: Timeline) -> list[Op | Transfer]:
    """Return the operations and messages of the critical path, in order of time.

    The path is followed backwards from the last operation. An operation's predecessor is the later
    of its device's previous operation and the message it waits for; a message's predecessor is the
    operation that sent it.
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
    event: Op | Transfer | None = max(timeline.ops, key=lambda op: op.end_s)
    path: list[Op | Transfer] = []
    visited: set[Op | Transfer] = set()
    while event is not None and event not in visited:
        visited.add(event)
        path.append(event)
        if isinstance(event, Transfer):
            event = _last_ended(
                mine.get((event.source, event.microbatch), []), event.start_s + slack, visited
            )
            continue
        earlier = _last_ended(devices[event.device], event.start_s + slack, visited)
        message = arriving.get((event.device, event.microbatch, event.kind))
        waits = message is not None and (earlier is None or message.end_s > earlier.end_s)
        event = message if waits else earlier
    return path[::-1]


def _last_ended(ops: Sequence[Op], time_s: float, visited: set[Op | Transfer]) -> Op | None:
    """Return the last operation that ended by ``time_s`` and is not in ``visited``."""
    k = bisect_right(ops, time_s, key=lambda op: op.end_s) - 1
    # operations of no length may end where they begin
    while k >= 0 and ops[k] in visited:
        k -= 1
    return ops[k] if k >= 0 else None
