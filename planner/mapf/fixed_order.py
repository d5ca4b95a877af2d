"""Compiled schedule for a given order of operations, in linear time.

Operations are scheduled in ascending order of their keys: the times to follow, made non-decreasing
along each chain. An operation whose device has no free memory (TC1, live memory) is blocked until
an earlier microbatch ends there. Successive candidates differ little, so insertion sort is fast.
"""

from __future__ import annotations

import math

from planner.mapf.arrays import PathArrays
from planner.mapf.list_scheduling import (
    DEFAULT_TAIL_WEIGHT,
    INFINITE_S,
    ScheduleData,
    ScheduleScratch,
    ScheduleState,
    device_at,
    duration_at,
    enqueue_message,
    fill_tail,
    list_schedule,
)
from planner.search.arrays import Floats, Ints
from planner.search.compiled import entry, kernel

FOLLOW_TIMES = -1.0
"""Value of ``tail_weight`` that schedules operations in the order of the times in ``offset``."""


@kernel
def sort_steps(key: Floats, order: Ints) -> None:
    """Insertion sort of steps by key, then by number."""
    for i in range(1, len(order)):
        step = order[i]
        step_key = key[step]
        j = i
        while j > 0 and (
            key[order[j - 1]] > step_key or (key[order[j - 1]] == step_key and order[j - 1] > step)
        ):
            order[j] = order[j - 1]
            j -= 1
        order[j] = step


@kernel
def fill_keys(offset: Floats, key: Floats) -> None:
    """Fill the keys: the times to follow, made non-decreasing along each chain."""
    count, steps = offset.shape
    for b in range(count):
        latest = offset[b, 0]
        for k in range(steps):
            latest = max(latest, offset[b, k])
            key[b * steps + k] = latest


@kernel
def first_unblocked(paths: Ints, memory: Ints, key: Floats, scratch: ScheduleScratch) -> int:
    """The first by key of the blocked microbatches that can continue now, or -1."""
    count, length = paths.shape
    steps = 2 * length + 1
    live, next_step, blocked = scratch.live, scratch.next_step, scratch.blocked
    b = -1
    for c in range(count):
        if not blocked[c] or live[paths[c, next_step[c]]] >= memory[paths[c, next_step[c]]]:
            continue
        if b < 0 or key[c * steps + next_step[c]] < key[b * steps + next_step[b]]:
            b = c
    return b


@kernel
def fixed_order_schedule(data: ScheduleData, state: ScheduleState, limit: float) -> float:
    """Makespan with every device working in the order of ``offset``, as by `list_schedule`.

    Reads ``paths``, ``tail``, ``offset`` and, as a first guess, ``order``; fills the rest.
    """
    paths, tail, key, order = state.paths, state.tail, state.key, state.order
    count, length = paths.shape
    steps = 2 * length + 1
    fill_keys(state.offset, key)
    sort_steps(key, order)
    scratch = state.scratch
    free, live, last_step, next_step = (
        scratch.free,
        scratch.live,
        scratch.last_step,
        scratch.next_step,
    )
    ready, blocked = scratch.ready, scratch.blocked
    free[:] = 0.0
    live[:] = 0
    last_step[:] = -1
    next_step[:] = 0
    ready[:] = 0.0
    blocked[:] = False
    blocked_count, makespan = 0, 0.0
    queueing = len(data.links.busy) > 0
    if queueing:
        data.links.free[:] = 0.0
    for i in range(len(order)):
        current = order[i]
        b = current // steps
        if next_step[b] != current - b * steps:
            continue
        while b >= 0:
            # b's steps up to this key; more than one only after it was blocked
            k = next_step[b]
            blocked[b] = False
            while k < steps:
                step_index = b * steps + k
                if key[step_index] > key[current] or (
                    key[step_index] == key[current] and step_index > current
                ):
                    break
                d = device_at(paths[b], k)
                if k < length:
                    if live[d] >= data.memory[d]:
                        blocked[b] = True
                        blocked_count += 1
                        break
                    live[d] += 1
                elif k > length:
                    live[d] -= 1
                start = max(ready[b], free[d])
                if start + tail[b, k] > limit:
                    return INFINITE_S
                state.begin[b, k] = start
                state.ready[b, k] = ready[b]
                state.device_pred[b, k] = last_step[d]
                last_step[d] = step_index
                end = start + duration_at(data, d, k, length)
                free[d] = end
                k += 1
                if k == steps:
                    makespan = max(makespan, end)
                else:
                    v = device_at(paths[b], k)
                    if queueing:
                        ready[b] = enqueue_message(data.links, state.link_pred, b, k, d, v, end)
                        ready[b] += data.transfer[d, v]
                    else:
                        ready[b] = end + data.transfer[d, v]
            next_step[b] = k
            b = first_unblocked(paths, data.memory, key, scratch) if blocked_count > 0 else -1
            if b >= 0:
                blocked_count -= 1
    for b in range(count):
        if next_step[b] < steps:
            return INFINITE_S
    return makespan


@entry
def compute_schedule(
    data: ScheduleData, state: ScheduleState, tail_weight: float, limit: float
) -> float:
    """Makespan by `list_schedule`, or `fixed_order_schedule` if ``tail_weight`` is FOLLOW_TIMES."""
    if tail_weight < 0.0:
        return fixed_order_schedule(data, state, limit)
    return list_schedule(data, state, tail_weight, limit)


def schedule_paths(
    arrays: PathArrays,
    paths: Ints,
    offset: Floats | None = None,
    tail_weight: float = DEFAULT_TAIL_WEIGHT,
) -> tuple[float, Floats]:
    """Makespan, infinite in a deadlock, and the start of every step."""
    state = ScheduleState.of(arrays, paths, offset)
    data = ScheduleData.of(arrays)
    for b in range(arrays.microbatches):
        fill_tail(data, state.paths[b], state.tail[b])
    makespan = float(compute_schedule(data, state, tail_weight, math.inf))
    return (makespan if makespan < INFINITE_S else math.inf), state.begin
