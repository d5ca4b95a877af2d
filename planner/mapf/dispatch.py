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

from planner.mapf.arrays import PathArrays
from planner.problems.answers import PathOp, PathPlan
from planner.search.arrays import Bools, Floats, Floats2, Ints, Ints2
from planner.search.compiled import entry, kernel

LATE = 1e300
PULL = 0.01
"""Weight of the rest of the chain against an earlier start."""


class LinkQueues(NamedTuple):
    """Links that queue; 0 x 0 where they do not.

    Attributes
    ----------
    busy
        Seconds for which a message keeps its link busy.
    free, last
        Work of a scheduler: when the link is free for its next message, and the step that waits for
        its last one, as ``b * steps + k``.
    """

    busy: Floats2
    free: Floats2
    last: Ints2

    @classmethod
    def of(cls, arrays: PathArrays) -> LinkQueues:
        """Copies, as in `Numbers`; no message has left."""
        link = arrays.link
        return cls(link.copy(), np.zeros(link.shape), np.zeros(link.shape, dtype=np.int64))


class Numbers(NamedTuple):
    """The problem's numbers that compiled code reads; as in `PathArrays`."""

    hop: Floats2
    links: LinkQueues
    forward: Floats
    backward: Floats
    head: Floats
    memory: Ints

    @classmethod
    def of(cls, arrays: PathArrays) -> Numbers:
        """Copies of the arrays' arrays, as exchanging devices changes them."""
        return cls(
            arrays.hop.copy(),
            LinkQueues.of(arrays),
            arrays.forward.copy(),
            arrays.backward.copy(),
            arrays.head.copy(),
            arrays.memory.copy(),
        )


class DispatchScratch(NamedTuple):
    """What a scheduler needs while it works.

    Attributes
    ----------
    free, live, before
        Per device: when it is free, what it holds, what it did last.
    step, device, since, aside
        Per microbatch: its next step, where, since when it could begin, whether it waits for
        memory.
    key, heap, place
        Per microbatch: what `decode` chooses by, a binary heap by it, and where each is in there.
    here, after, ahead
        Microbatches at each device as a list: its first one, and who comes after and before each.
    first, last
        Per stage, for `planner.mapf.stage_spans.longest_span`.
    """

    free: Floats
    live: Ints
    before: Ints
    step: Ints
    device: Ints
    since: Floats
    aside: Bools
    key: Floats
    heap: Ints
    place: Ints
    here: Ints
    after: Ints
    ahead: Ints
    first: Floats
    last: Floats

    @classmethod
    def of(cls, arrays: PathArrays) -> DispatchScratch:
        """Room for a problem."""
        n, count, stages = len(arrays.stage), arrays.microbatches, len(arrays.fewest)
        by_device, others = np.zeros((3, n), dtype=np.int64), np.zeros((6, count), dtype=np.int64)
        live, before, here = by_device
        step, device, heap, place, after, ahead = others
        since, key = np.zeros((2, count))
        first, last = np.zeros((2, stages))
        return cls(
            free=np.zeros(n),
            live=live,
            before=before,
            step=step,
            device=device,
            since=since,
            aside=np.zeros(count, dtype=np.bool_),
            key=key,
            heap=heap,
            place=place,
            here=here,
            after=after,
            ahead=ahead,
            first=first,
            last=last,
        )


class DispatchState(NamedTuple):
    """Paths, priorities and times, changed in place; rows are microbatches, columns steps.

    Attributes
    ----------
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

    paths: Ints2
    tail: Floats2
    nudge: Floats2
    begin: Floats2
    ready: Floats2
    before: Ints2
    behind: Ints2
    device_of: Ints
    key: Floats
    order: Ints
    scratch: DispatchScratch

    @classmethod
    def of(cls, arrays: PathArrays, paths: Ints, nudge: Floats | None = None) -> DispatchState:
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
            DispatchScratch.of(arrays),
        )


@kernel
def device_at(path: Ints, k: int) -> Any:
    """The device of step k of a path."""
    length = len(path)
    if k < length:
        return path[k]
    return path[0] if k == length else path[2 * length - k]


@kernel
def seconds_at(num: Any, d: int, k: int, length: int) -> Any:
    """How long step k takes on its device; ``num`` has ``forward``, ``head`` and ``backward``."""
    if k < length:
        return num.forward[d]
    return num.head[d] if k == length else num.backward[d]


@entry
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


@kernel
def leave(links: LinkQueues, behind: Ints, b: int, k: int, u: int, v: int, end: float) -> Any:
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


@kernel
def earlier(key: Floats, b: int, c: int) -> bool:
    """Whether b comes before c: by key, then by number."""
    return bool(key[b] < key[c] or (key[b] == key[c] and b < c))


@kernel
def sift_up(scratch: DispatchScratch, b: int) -> None:
    """Bring a microbatch whose key has fallen nearer the root of the heap."""
    key, heap, place = scratch.key, scratch.heap, scratch.place
    k = place[b]
    while k > 0 and earlier(key, b, heap[(k - 1) >> 1]):
        heap[k] = heap[(k - 1) >> 1]
        place[heap[k]] = k
        k = (k - 1) >> 1
    heap[k], place[b] = b, k


@kernel
def sift_down(scratch: DispatchScratch, b: int) -> None:
    """Bring a microbatch whose key has risen farther from the root of the heap."""
    key, heap, place = scratch.key, scratch.heap, scratch.place
    k = place[b]
    while 2 * k + 1 < len(heap):
        down = 2 * k + 1
        if down + 1 < len(heap) and earlier(key, heap[down + 1], heap[down]):
            down += 1
        if not earlier(key, heap[down], b):
            break
        heap[k] = heap[down]
        place[heap[k]] = k
        k = down
    heap[k], place[b] = b, k


@kernel
def change_key(scratch: DispatchScratch, b: int, key: float) -> None:
    """Give a microbatch another key."""
    before = scratch.key[b]
    scratch.key[b] = key
    if key < before:
        sift_up(scratch, b)
    elif key > before:
        sift_down(scratch, b)


@kernel
def move_to(scratch: DispatchScratch, b: int, d: int) -> None:
    """Take a microbatch from its device's list to that of another, or of none (-1)."""
    here, after, ahead = scratch.here, scratch.after, scratch.ahead
    if after[b] >= 0:
        ahead[after[b]] = ahead[b]
    if ahead[b] >= 0:
        after[ahead[b]] = after[b]
    elif scratch.device[b] >= 0:
        here[scratch.device[b]] = after[b]
    scratch.device[b] = d
    ahead[b] = after[b] = -1
    if d >= 0:
        after[b] = here[d]
        if here[d] >= 0:
            ahead[here[d]] = b
        here[d] = b


@kernel
def decode(num: Numbers, state: DispatchState, pull: float, limit: float) -> float:
    """Latest end; above ``limit`` or in a deadlock (live memory), LATE.

    Reads ``paths``, ``tail`` and ``nudge`` of the state, fills the rest.
    """
    paths, tail, nudge, scratch = state.paths, state.tail, state.nudge, state.scratch
    count, length = paths.shape
    steps = 2 * length + 1
    free, live, before, step = scratch.free, scratch.live, scratch.before, scratch.step
    since, key, memory = scratch.since, scratch.key, num.memory
    free[:] = 0.0
    live[:] = 0
    before[:] = -1
    step[:] = 0
    since[:] = 0.0
    scratch.here[:] = -1
    makespan = 0.0
    queueing = len(num.links.busy) > 0
    if queueing:
        num.links.free[:] = 0.0
    for b in range(count):
        scratch.device[b] = scratch.ahead[b] = scratch.after[b] = -1
        scratch.place[b] = b
        move_to(scratch, b, paths[b, 0])
        key[b] = nudge[b, 0] - pull * tail[b, 0] if memory[paths[b, 0]] > 0 else LATE
        sift_up(scratch, b)
    for _ in range(count * steps):
        b = scratch.heap[0]
        if key[b] >= LATE:
            return LATE
        k, d = step[b], scratch.device[b]
        start = max(since[b], free[d])
        if start + tail[b, k] > limit:
            return LATE
        state.begin[b, k] = start
        state.ready[b, k] = since[b]
        state.before[b, k] = before[d]
        before[d] = b * steps + k
        full = live[d] >= memory[d]
        end = start + seconds_at(num, d, k, length)
        free[d] = end
        if k < length:
            live[d] += 1
        elif k > length:
            live[d] -= 1
        k += 1
        step[b] = k
        if k == steps:
            change_key(scratch, b, LATE)
            move_to(scratch, b, -1)
            makespan = max(makespan, end)
        else:
            v = device_at(paths[b], k)
            if queueing:
                since[b] = leave(num.links, state.behind, b, k, d, v, end)
                since[b] += num.hop[d, v]
            else:
                since[b] = end + num.hop[d, v]
            move_to(scratch, b, v)
            if k < length and live[v] >= memory[v]:
                change_key(scratch, b, LATE)
            else:
                change_key(scratch, b, max(since[b], free[v]) - pull * tail[b, k] + nudge[b, k])
        # only what waits for this device has another key now
        changed = full != (live[d] >= memory[d])
        c = scratch.here[d]
        while c >= 0:
            if since[c] < end or changed:
                j = step[c]
                if j < length and live[d] >= memory[d]:
                    change_key(scratch, c, LATE)
                else:
                    change_key(scratch, c, max(since[c], end) - pull * tail[c, j] + nudge[c, j])
            c = scratch.after[c]
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
