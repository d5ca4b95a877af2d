"""Lower bounds by queueing links: all messages from or to a device or stage share its links.

A microbatch sends two messages out of its start device (after F and after H) and two into it; every
visit of another stage receives one message and sends one on the forward pass, and again on the
backward pass. Each message occupies its link, leaves no earlier than F can end on the sender, and
is followed by a B on the receiver and the return to the start device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.entry_times import min_feasible_span
from planner.search.arrays import Floats
from planner.search.certificate import Witness


def link_bounds(
    arrays: PathArrays, entry_s: Floats, return_s: Floats
) -> Iterator[tuple[float, str, Witness]]:
    """Bound in seconds, basis and witness for every start device and stage, in both directions."""
    if not arrays.queueing or arrays.path_stages == 1:
        return
    starts, counts = np.unique(arrays.starts, return_counts=True)
    groups = [
        ("device", int(d), [int(d)], int(count)) for d, count in zip(starts, counts, strict=True)
    ]
    for s in range(1, len(arrays.min_visits)):
        members = arrays.members[arrays.stage_ptr[s] : arrays.stage_ptr[s + 1]].tolist()
        groups.append(("stage", s, members, int(arrays.min_visits[s])))
    for kind, number, devices, visits in groups:
        for direction in ("out of", "into"):
            seconds = _span_s(arrays, devices, direction == "out of", 2 * visits, entry_s, return_s)
            yield (
                seconds,
                f"links {direction} {'start device' if kind == 'device' else kind} {number}: "
                f"{2 * visits} messages",
                {"kind": f"links {direction}", kind: number},
            )


def _span_s(
    arrays: PathArrays,
    group: Sequence[int],
    out: bool,
    messages: int,
    entry_s: Floats,
    return_s: Floats,
) -> float:
    """Least time in which the group's links can carry ``messages`` messages."""
    usable = arrays.capacity > 0
    in_group = np.zeros(len(usable), dtype=np.bool_)
    in_group[group] = True
    pairs = (in_group[:, None] if out else in_group[None, :]) & usable[:, None] & usable[None, :]
    # a path visits a stage once
    pairs &= arrays.stage[:, None] != arrays.stage[None, :]
    u, v = np.nonzero(pairs)
    if messages == 0 or len(u) == 0:
        return 0.0
    head_s = np.where(arrays.stage[u] == 0, 0.0, entry_s[u]) + arrays.forward[u]
    tail_s = arrays.backward[v] + np.where(arrays.stage[v] == 0, 0.0, return_s[v])
    busy = arrays.link[u, v]
    other_s = head_s + (arrays.transfer[u, v] - busy) + tail_s
    max_messages = 2 * np.minimum(arrays.capacity[u], arrays.capacity[v])

    def fits(span: float) -> bool:
        time_left = span - other_s
        with np.errstate(divide="ignore", invalid="ignore"):
            messages_by_time = np.where(busy > 0, np.floor(time_left / busy + 1e-9), max_messages)
        return bool(
            np.where(time_left >= 0, np.minimum(messages_by_time, max_messages), 0).sum()
            >= messages
        )

    return min_feasible_span(fits)
