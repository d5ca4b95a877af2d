"""Compiled list scheduling: times of all operations for given paths (TC1 with live memory, TC2).

Step k of a microbatch's chain: F on ``path[k]`` for k < L, H on the start device for k = L, B on
``path[2 L - k]`` after it. Operations are appended one by one to their devices; the next is that
with the smallest key ``earliest start - pull * (rest of the chain) + nudge``. With no nudges and a
small pull a free device takes the most urgent operation; nudges let it wait for a better one.

Where links queue, messages leave in the order in which the operations before them end. A link is
fed by one device, and operations are appended to a device in the order of their ends: so a message
takes its link as soon as the operation before it is appended.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from planner.mapf.arrays import Floats, Ints, PathArrays
from planner.problems.answers import PathOp, PathPlan

LATE = 1e300
PULL = 0.01
"""Weight of the rest of the chain against an earlier start."""


class Links(NamedTuple):
    """Links that queue; 0 x 0 where they do not.

    Attributes
    ----------
    busy
        Seconds for which a message keeps its link busy.
    free, last
        Work of a scheduler: when the link is free for its next message, and the step that waits for
        its last one, as ``b * steps + k``.
    """

    busy: Floats
    free: Floats
    last: Ints

    @classmethod
    def of(cls, arrays: PathArrays) -> Links:
        """Copies, as in `Numbers`; no message has left."""
        link = arrays.link
        return cls(link.copy(), np.zeros(link.shape), np.zeros(link.shape, dtype=np.int64))


class Numbers(NamedTuple):
    """The problem's numbers that compiled code reads; as in `PathArrays`."""

    hop: Floats
    links: Links
    forward: Floats
    backward: Floats
    head: Floats
    memory: Ints

    @classmethod
    def of(cls, arrays: PathArrays) -> Numbers:
        """Copies of the arrays' arrays, as exchanging devices changes them."""
        return cls(
            arrays.hop.copy(),
            Links.of(arrays),
            arrays.forward.copy(),
            arrays.backward.copy(),
            arrays.head.copy(),
            arrays.memory.copy(),
        )


class Scratch(NamedTuple):
    """What a scheduler needs while it works, per device and per microbatch."""

    free: Floats
    live: Ints
    before: Ints
    step: Ints
    since: Floats
    aside: NDArray[np.bool_]


class State(NamedTuple):
    """Paths, priorities and times, changed in place; rows are microbatches, columns steps.

    Attributes
    ----------
    tail
        See `fill_tail`.
    nudge
        Seconds by which a step is put off against others.
    begin, ready
        When the step starts, and when its chain and transfer allowed it.
    before
        The step that its device did before, as ``b * steps + k``, or -1.
    behind
        Where links queue: the step whose message made this step's wait for the link, or -1.
    device_of
        The device in each role; the roles are the devices themselves unless they are exchanged.
    key, order, scratch
        Work of `follow`: steps in ascending order of their keys.
    """

    paths: Ints
    tail: Floats
    nudge: Floats
    begin: Floats
    ready: Floats
    before: Ints
    behind: Ints
    device_of: Ints
    key: Floats
    order: Ints
    scratch: Scratch

    @classmethod
    def of(cls, arrays: PathArrays, paths: Ints, nudge: Floats | None = None) -> State:
        """A state with given paths and nudges."""
        shape = (arrays.microbatches, arrays.steps)
        return cls(
            paths.copy(),
            np.zeros(shape),
            np.zeros(shape) if nudge is None else nudge.copy(),
            np.zeros(shape),
            np.zeros(shape),
            np.zeros(shape, dtype=np.int64),
            np.full(shape if arrays.queueing else (0, 0), -1, dtype=np.int64),
            np.arange(len(arrays.stage)),
            np.zeros(shape[0] * shape[1]),
            np.arange(shape[0] * shape[1]),
            Scratch(
                np.zeros(len(arrays.stage)),
                np.zeros(len(arrays.stage), dtype=np.int64),
                np.zeros(len(arrays.stage), dtype=np.int64),
                np.zeros(shape[0], dtype=np.int64),
                np.zeros(shape[0]),
                np.zeros(shape[0], dtype=np.bool_),
            ),
        )


@njit(cache=True, nogil=True)
def device_at(path: Ints, k: int) -> Any:
    """The device of step k of a path."""
    length = len(path)
    if k < length:
        return path[k]
    return path[0] if k == length else path[2 * length - k]


@njit(cache=True, nogil=True)
def seconds_at(num: Any, d: int, k: int, length: int) -> Any:
    """How long step k takes on its device; ``num`` has ``forward``, ``head`` and ``backward``."""
    if k < length:
        return num.forward[d]
    return num.head[d] if k == length else num.backward[d]


@njit(cache=True, nogil=True)
def fill_tail(num: Numbers, path: Ints, tail: Floats) -> None:
    """Seconds from the start of each step to the end of the chain, nobody in the way."""
    length = len(path)
    at = path[0]
    rest = num.backward[at]
    tail[2 * length] = rest
    for k in range(2 * length - 1, -1, -1):
        d = device_at(path, k)
        rest += seconds_at(num, d, k, length) + num.hop[d, at]
        tail[k] = rest
        at = d


@njit(cache=True, nogil=True)
def leave(links: Links, behind: Ints, b: int, k: int, u: int, v: int, end: float) -> Any:
    """When the message for step k of b, handed over at ``end``, takes the link from u to v."""
    free = links.free[u, v]
    if free > end:
        behind[b, k] = links.last[u, v]
        end = free
    else:
        behind[b, k] = -1
    links.free[u, v] = end + links.busy[u, v]
    links.last[u, v] = b * behind.shape[1] + k
    return end


@njit(cache=True, nogil=True)
def least_key(key: Floats) -> int:
    """The microbatch whose next step comes first, -1 if all are done or wait for memory."""
    b, least = -1, LATE
    for c in range(len(key)):
        if key[c] < least:
            b, least = c, key[c]
    return b


@njit(cache=True, nogil=True)
def decode(num: Numbers, state: State, pull: float, limit: float) -> float:
    """Latest end; above ``limit`` or in a deadlock (live memory), LATE.

    Reads ``paths``, ``tail`` and ``nudge`` of the state, fills the rest.
    """
    paths, tail, nudge = state.paths, state.tail, state.nudge
    count, length = paths.shape
    steps = 2 * length + 1
    # per device: when it is free, what it holds, what it did last
    free = np.zeros(len(num.memory))
    live = np.zeros(len(num.memory), dtype=np.int64)
    latest = np.full(len(num.memory), -1, dtype=np.int64)
    # per microbatch: its next step, where, since when it could begin, and its place in the queue
    step = np.zeros(count, dtype=np.int64)
    device = paths[:, 0].copy()
    since = np.zeros(count)
    key = np.empty(count)
    makespan = 0.0
    queueing = len(num.links.busy) > 0
    if queueing:
        num.links.free[:] = 0.0
    for b in range(count):
        key[b] = nudge[b, 0] - pull * tail[b, 0] if num.memory[device[b]] > 0 else LATE
    for _ in range(count * steps):
        b = least_key(key)
        if b < 0:
            return LATE
        k, d = step[b], device[b]
        start = max(since[b], free[d])
        if start + tail[b, k] > limit:
            return LATE
        state.begin[b, k] = start
        state.ready[b, k] = since[b]
        state.before[b, k] = latest[d]
        latest[d] = b * steps + k
        full = live[d] >= num.memory[d]
        end = start + seconds_at(num, d, k, length)
        free[d] = end
        if k < length:
            live[d] += 1
        elif k > length:
            live[d] -= 1
        k += 1
        step[b] = k
        if k == steps:
            key[b] = LATE
            device[b] = -1
            makespan = max(makespan, end)
        else:
            v = device_at(paths[b], k)
            if queueing:
                since[b] = leave(num.links, state.behind, b, k, d, v, end)
                since[b] += num.hop[d, v]
            else:
                since[b] = end + num.hop[d, v]
            device[b] = v
            if k < length and live[v] >= num.memory[v]:
                key[b] = LATE
            else:
                key[b] = max(since[b], free[v]) - pull * tail[b, k] + nudge[b, k]
        # only what waits for this device has another key now
        changed = full != (live[d] >= num.memory[d])
        for c in range(count):
            if device[c] == d and (since[c] < end or changed):
                j = step[c]
                if j < length and live[d] >= num.memory[d]:
                    key[c] = LATE
                else:
                    key[c] = max(since[c], end) - pull * tail[c, j] + nudge[c, j]
    return makespan


def plan_of(arrays: PathArrays, paths: Ints, begin: Floats) -> PathPlan:
    """The plan with given starts."""
    ops = []
    for b, path in enumerate(paths.tolist()):
        chain = [*(("F", d) for d in path), ("H", path[0]), *(("B", d) for d in path[::-1])]
        for (kind, d), start in zip(chain, begin[b].tolist(), strict=True):
            seconds = {"F": arrays.forward, "H": arrays.head, "B": arrays.backward}[kind]
            ops.append(PathOp(b, d, kind, start, start + float(seconds[d])))
    return PathPlan.of(paths.tolist(), ops)
