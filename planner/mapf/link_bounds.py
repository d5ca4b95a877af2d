"""Bounds by links that queue: messages out of a device or stage, or into it, share its links.

A microbatch sends two messages out of its start device (after F and after H) and two into it; every
visit of a device of another stage takes one in and sends one out on the way forward, and again on
the way back. Each keeps its link busy, begins no earlier than F can end on the sender, and is
followed by a B on the receiver and the way home.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.spans import least_span
from planner.search.arrays import Floats
from planner.search.certificate import Witness


def link_bounds(
    arrays: PathArrays, near: Floats, back: Floats
) -> Iterator[tuple[float, str, Witness]]:
    """Seconds, basis and witness for every start device and stage, out of it and into it."""
    if not arrays.queueing or arrays.path_stages == 1:
        return
    starts, counts = np.unique(arrays.starts, return_counts=True)
    groups = [
        ("device", int(d), [int(d)], int(count)) for d, count in zip(starts, counts, strict=True)
    ]
    for s in range(1, len(arrays.fewest)):
        members = arrays.members[arrays.first[s] : arrays.first[s + 1]].tolist()
        groups.append(("stage", s, members, int(arrays.fewest[s])))
    for kind, number, devices, visits in groups:
        for way in ("out of", "into"):
            seconds = _span_s(arrays, devices, way == "out of", 2 * visits, near, back)
            yield (
                seconds,
                f"links {way} {'start device' if kind == 'device' else kind} {number}: "
                f"{2 * visits} messages",
                {"kind": f"links {way}", kind: number},
            )


def _span_s(
    arrays: PathArrays, group: Sequence[int], out: bool, messages: int, near: Floats, back: Floats
) -> float:
    """Least time in which the group's links can carry so many messages."""
    usable = arrays.room > 0
    here = np.zeros(len(usable), dtype=np.bool_)
    here[group] = True
    pairs = (here[:, None] if out else here[None, :]) & usable[:, None] & usable[None, :]
    # a path visits a stage once
    pairs &= arrays.stage[:, None] != arrays.stage[None, :]
    u, v = np.nonzero(pairs)
    if messages == 0 or len(u) == 0:
        return 0.0
    before = np.where(arrays.stage[u] == 0, 0.0, near[u]) + arrays.forward[u]
    after = arrays.backward[v] + np.where(arrays.stage[v] == 0, 0.0, back[v])
    busy = arrays.link[u, v]
    around = before + (arrays.hop[u, v] - busy) + after
    most = 2 * np.minimum(arrays.room[u], arrays.room[v])

    def fits(span: float) -> bool:
        room = span - around
        with np.errstate(divide="ignore", invalid="ignore"):
            many = np.where(busy > 0, np.floor(room / busy + 1e-9), most)
        return bool(np.where(room >= 0, np.minimum(many, most), 0).sum() >= messages)

    return least_span(fits)
