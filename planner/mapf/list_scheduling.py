"""Compiled list scheduling: times of all operations for given paths (TC1 with live memory, TC2).

Step k of a microbatch's chain: F on ``path[k]`` for k < L, H on the start device for k = L, B on
``path[2 L - k]`` after it. Operations are appended one by one to their devices; the next is that
with the smallest key ``earliest start - tail_weight * tail + offset``, where the tail is the
duration of the remaining chain. With zero offsets and a small weight a free device runs the most
urgent operation; offsets can make it wait for a better one.

Where links queue, messages leave in the order in which their operations end. All messages of a link
come from one device, whose operations are appended in the order of their ends, so a message takes
its link as soon as the sending operation is appended.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.problems.answers import PathOp, PathPlan
from planner.search.arrays import Bools, Floats, Floats2, Ints, Ints2
from planner.search.compiled import entry, kernel

INFINITE_S = 1e300
"""Makespan of an infeasible schedule, and key of a step that cannot run yet."""

DEFAULT_TAIL_WEIGHT = 0.01
"""Default weight of the tail in the key."""


class LinkQueues(NamedTuple):
    """State of queueing links; arrays are 0 x 0 if links do not queue.

    Attributes
    ----------
    busy
        Seconds for which a message occupies its link.
    free, last
        Scratch: when the link becomes free, and the step that its last message is for, as
        ``b * steps + k``.
    """

    busy: Floats2
    free: Floats2
    last: Ints2

    @classmethod
    def of(cls, arrays: PathArrays) -> LinkQueues:
        """Copies of the arrays, with all links free."""
        link = arrays.link
        return cls(link.copy(), np.zeros(link.shape), np.zeros(link.shape, dtype=np.int64))


class ScheduleData(NamedTuple):
    """Durations and memory that the schedulers read; as in `PathArrays`."""

    transfer: Floats2
    links: LinkQueues
    forward: Floats
    backward: Floats
    head: Floats
    memory: Ints

    @classmethod
    def of(cls, arrays: PathArrays) -> ScheduleData:
        """Copies of the arrays, since exchanging devices modifies them."""
        return cls(
            arrays.transfer.copy(),
            LinkQueues.of(arrays),
            arrays.forward.copy(),
            arrays.backward.copy(),
            arrays.head.copy(),
            arrays.memory.copy(),
        )


class ScheduleScratch(NamedTuple):
    """Working arrays of the schedulers.

    Attributes
    ----------
    free, live, last_step
        Per device: when it becomes free, its live microbatches, and its last step.
    next_step, device, ready, blocked
        Per microbatch: its next step, the device of that step, when it is ready, and whether it
        waits for memory.
    key, heap, heap_index
        Per microbatch: its priority, a binary heap by key, and the index in the heap.
    first_at, next_at, prev_at
        Doubly linked list of the microbatches whose next step is on each device.
    stage_first, stage_last
        Per stage: first F and last B, for `planner.mapf.stage_spans.longest_span`.
    """

    free: Floats
    live: Ints
    last_step: Ints
    next_step: Ints
    device: Ints
    ready: Floats
    blocked: Bools
    key: Floats
    heap: Ints
    heap_index: Ints
    first_at: Ints
    next_at: Ints
    prev_at: Ints
    stage_first: Floats
    stage_last: Floats

    @classmethod
    def of(cls, arrays: PathArrays) -> ScheduleScratch:
        """Allocate for a problem."""
        n, count, stages = len(arrays.stage), arrays.microbatches, len(arrays.min_visits)
        by_device, others = np.zeros((3, n), dtype=np.int64), np.zeros((6, count), dtype=np.int64)
        live, last_step, first_at = by_device
        next_step, device, heap, heap_index, next_at, prev_at = others
        ready, key = np.zeros((2, count))
        stage_first, stage_last = np.zeros((2, stages))
        return cls(
            free=np.zeros(n),
            live=live,
            last_step=last_step,
            next_step=next_step,
            device=device,
            ready=ready,
            blocked=np.zeros(count, dtype=np.bool_),
            key=key,
            heap=heap,
            heap_index=heap_index,
            first_at=first_at,
            next_at=next_at,
            prev_at=prev_at,
            stage_first=stage_first,
            stage_last=stage_last,
        )


class ScheduleState(NamedTuple):
    """Paths, priorities and times, updated in place; rows are microbatches, columns steps.

    Attributes
    ----------
    tail
        Seconds from the start of the step to the end of its chain, without waiting.
    offset
        Seconds added to a step's key; with `FOLLOW_TIMES` the times that define the order.
    begin, ready
        When the step starts, and when its input has arrived.
    device_pred
        The preceding step on its device, as ``b * steps + k``, or -1.
    link_pred
        Where links queue: the step whose message delayed this step's message on the link, or -1.
    device_of
        The device of each role; the roles are the devices themselves unless they are exchanged.
    key, order, scratch
        Keys of `fixed_order_schedule`, steps in ascending order of their keys, and working arrays.
    """

    paths: Ints2
    tail: Floats2
    offset: Floats2
    begin: Floats2
    ready: Floats2
    device_pred: Ints2
    link_pred: Ints2
    device_of: Ints
    key: Floats
    order: Ints
    scratch: ScheduleScratch

    @classmethod
    def of(cls, arrays: PathArrays, paths: Ints, offset: Floats | None = None) -> ScheduleState:
        """A state with given paths and offsets."""
        shape = (arrays.microbatches, arrays.steps)
        return cls(
            paths.copy(),
            np.zeros(shape),
            np.zeros(shape) if offset is None else offset.copy(),
            np.zeros(shape),
            np.zeros(shape),
            np.zeros(shape, dtype=np.int64),
            np.full(shape if arrays.queueing else (0, 0), -1, dtype=np.int64),
            np.arange(len(arrays.stage)),
            np.zeros(shape[0] * shape[1]),
            np.arange(shape[0] * shape[1]),
            ScheduleScratch.of(arrays),
        )


@kernel
def device_at(path: Ints, k: int) -> Any:
    """The device of step k of a path."""
    length = len(path)
    if k < length:
        return path[k]
    return path[0] if k == length else path[2 * length - k]


@kernel
def duration_at(data: Any, d: int, k: int, length: int) -> Any:
    """Duration of step k on device d; ``data`` has ``forward``, ``head`` and ``backward``."""
    if k < length:
        return data.forward[d]
    return data.head[d] if k == length else data.backward[d]


@entry
def fill_tail(data: ScheduleData, path: Ints, tail: Floats) -> None:
    """Fill the tail: seconds from each step's start to the chain's end, without waiting."""
    length = len(path)
    at = path[0]
    rest = data.backward[at]
    tail[2 * length] = rest
    for k in range(2 * length - 1, -1, -1):
        d = device_at(path, k)
        rest += duration_at(data, d, k, length) + data.transfer[d, at]
        tail[k] = rest
        at = d


@kernel
def enqueue_message(
    links: LinkQueues, link_pred: Ints, b: int, k: int, u: int, v: int, end: float
) -> Any:
    """Departure on link (u, v) of the message for step k of b, which is sent at ``end``."""
    free = links.free[u, v]
    if free > end:
        link_pred[b, k] = links.last[u, v]
        end = free
    else:
        link_pred[b, k] = -1
    links.free[u, v] = end + links.busy[u, v]
    links.last[u, v] = b * link_pred.shape[1] + k
    return end


@kernel
def precedes(key: Floats, b: int, c: int) -> bool:
    """Whether b precedes c: by key, then by index."""
    return bool(key[b] < key[c] or (key[b] == key[c] and b < c))


@kernel
def sift_up(scratch: ScheduleScratch, b: int) -> None:
    """Restore the heap after a microbatch's key decreased."""
    key, heap, heap_index = scratch.key, scratch.heap, scratch.heap_index
    k = heap_index[b]
    while k > 0 and precedes(key, b, heap[(k - 1) >> 1]):
        heap[k] = heap[(k - 1) >> 1]
        heap_index[heap[k]] = k
        k = (k - 1) >> 1
    heap[k], heap_index[b] = b, k


@kernel
def sift_down(scratch: ScheduleScratch, b: int) -> None:
    """Restore the heap after a microbatch's key increased."""
    key, heap, heap_index = scratch.key, scratch.heap, scratch.heap_index
    k = heap_index[b]
    while 2 * k + 1 < len(heap):
        down = 2 * k + 1
        if down + 1 < len(heap) and precedes(key, heap[down + 1], heap[down]):
            down += 1
        if not precedes(key, heap[down], b):
            break
        heap[k] = heap[down]
        heap_index[heap[k]] = k
        k = down
    heap[k], heap_index[b] = b, k


@kernel
def update_key(scratch: ScheduleScratch, b: int, key: float) -> None:
    """Change the key of a microbatch."""
    old_key = scratch.key[b]
    scratch.key[b] = key
    if key < old_key:
        sift_up(scratch, b)
    elif key > old_key:
        sift_down(scratch, b)


@kernel
def move_to_device(scratch: ScheduleScratch, b: int, d: int) -> None:
    """Move a microbatch to the list of another device, or out of all lists (-1)."""
    first_at, next_at, prev_at = scratch.first_at, scratch.next_at, scratch.prev_at
    if next_at[b] >= 0:
        prev_at[next_at[b]] = prev_at[b]
    if prev_at[b] >= 0:
        next_at[prev_at[b]] = next_at[b]
    elif scratch.device[b] >= 0:
        first_at[scratch.device[b]] = next_at[b]
    scratch.device[b] = d
    prev_at[b] = next_at[b] = -1
    if d >= 0:
        next_at[b] = first_at[d]
        if first_at[d] >= 0:
            prev_at[first_at[d]] = b
        first_at[d] = b


@kernel
def list_schedule(
    data: ScheduleData, state: ScheduleState, tail_weight: float, limit: float
) -> float:
    """Makespan by list scheduling; INFINITE_S in a deadlock (live memory) or above ``limit``.

    Reads ``paths``, ``tail`` and ``offset`` of the state, fills the rest.
    """
    paths, tail, offset, scratch = state.paths, state.tail, state.offset, state.scratch
    count, length = paths.shape
    steps = 2 * length + 1
    free, live, last_step, next_step = (
        scratch.free,
        scratch.live,
        scratch.last_step,
        scratch.next_step,
    )
    ready, key, memory = scratch.ready, scratch.key, data.memory
    free[:] = 0.0
    live[:] = 0
    last_step[:] = -1
    next_step[:] = 0
    ready[:] = 0.0
    scratch.first_at[:] = -1
    makespan = 0.0
    queueing = len(data.links.busy) > 0
    if queueing:
        data.links.free[:] = 0.0
    for b in range(count):
        scratch.device[b] = scratch.prev_at[b] = scratch.next_at[b] = -1
        scratch.heap_index[b] = b
        move_to_device(scratch, b, paths[b, 0])
        key[b] = offset[b, 0] - tail_weight * tail[b, 0] if memory[paths[b, 0]] > 0 else INFINITE_S
        sift_up(scratch, b)
    for _ in range(count * steps):
        b = scratch.heap[0]
        if key[b] >= INFINITE_S:
            return INFINITE_S
        k, d = next_step[b], scratch.device[b]
        start = max(ready[b], free[d])
        if start + tail[b, k] > limit:
            return INFINITE_S
        state.begin[b, k] = start
        state.ready[b, k] = ready[b]
        state.device_pred[b, k] = last_step[d]
        last_step[d] = b * steps + k
        full = live[d] >= memory[d]
        end = start + duration_at(data, d, k, length)
        free[d] = end
        if k < length:
            live[d] += 1
        elif k > length:
            live[d] -= 1
        k += 1
        next_step[b] = k
        if k == steps:
            update_key(scratch, b, INFINITE_S)
            move_to_device(scratch, b, -1)
            makespan = max(makespan, end)
        else:
            v = device_at(paths[b], k)
            if queueing:
                ready[b] = enqueue_message(data.links, state.link_pred, b, k, d, v, end)
                ready[b] += data.transfer[d, v]
            else:
                ready[b] = end + data.transfer[d, v]
            move_to_device(scratch, b, v)
            if k < length and live[v] >= memory[v]:
                update_key(scratch, b, INFINITE_S)
            else:
                update_key(
                    scratch, b, max(ready[b], free[v]) - tail_weight * tail[b, k] + offset[b, k]
                )
        # only the keys of steps that wait for this device have changed
        changed = full != (live[d] >= memory[d])
        c = scratch.first_at[d]
        while c >= 0:
            if ready[c] < end or changed:
                j = next_step[c]
                if j < length and live[d] >= memory[d]:
                    update_key(scratch, c, INFINITE_S)
                else:
                    update_key(
                        scratch, c, max(ready[c], end) - tail_weight * tail[c, j] + offset[c, j]
                    )
            c = scratch.next_at[c]
    return makespan


def build_plan(arrays: PathArrays, paths: Ints, begin: Floats) -> PathPlan:
    """The plan with the given paths and start times."""
    ops = []
    for b, path in enumerate(paths.tolist()):
        chain = [*(("F", d) for d in path), ("H", path[0]), *(("B", d) for d in path[::-1])]
        for (kind, d), start in zip(chain, begin[b].tolist(), strict=True):
            seconds = {"F": arrays.forward, "H": arrays.head, "B": arrays.backward}[kind]
            ops.append(PathOp(b, d, kind, start, start + float(seconds[d])))
    return PathPlan.of(paths.tolist(), ops)
