"""Compiled schedule for a fixed order of operations, in linear time.

Operations are taken in ascending order of their keys, a key being a time to follow but never less
than that of the step before. One whose device is full (TC1, live memory) stands aside until an
earlier microbatch ends there. Between schedules that differ little the order is nearly sorted.
"""

from __future__ import annotations

import math

from planner.mapf.arrays import PathArrays
from planner.mapf.dispatch import (
    LATE,
    PULL,
    DispatchScratch,
    DispatchState,
    Numbers,
    decode,
    device_at,
    fill_tail,
    leave,
    seconds_at,
)
from planner.search.arrays import Floats, Ints
from planner.search.compiled import entry, kernel

FOLLOW = -1.0
"""Instead of a pull: operations in the order of given times."""


@kernel
def sort_steps(key: Floats, order: Ints) -> None:
    """Insertion sort of steps by key, then by number."""
    for i in range(1, len(order)):
        at = order[i]
        mine = key[at]
        j = i
        while j > 0 and (
            key[order[j - 1]] > mine or (key[order[j - 1]] == mine and order[j - 1] > at)
        ):
            order[j] = order[j - 1]
            j -= 1
        order[j] = at


@kernel
def fill_keys(nudge: Floats, key: Floats) -> None:
    """The times to follow, none less than that of the step before."""
    count, steps = nudge.shape
    for b in range(count):
        latest = nudge[b, 0]
        for k in range(steps):
            latest = max(latest, nudge[b, k])
            key[b * steps + k] = latest


@kernel
def first_aside(paths: Ints, memory: Ints, key: Floats, scratch: DispatchScratch) -> int:
    """Of the microbatches that stand aside and could go on now, the first by key; or -1."""
    count, length = paths.shape
    steps = 2 * length + 1
    live, step, aside = scratch.live, scratch.step, scratch.aside
    b = -1
    for c in range(count):
        if not aside[c] or live[paths[c, step[c]]] >= memory[paths[c, step[c]]]:
            continue
        if b < 0 or key[c * steps + step[c]] < key[b * steps + step[b]]:
            b = c
    return b


@kernel
def follow(num: Numbers, state: DispatchState, limit: float) -> float:
    """Latest end with every device working in the order of ``nudge``, as `decode` returns it.

    Reads ``paths``, ``tail``, ``nudge`` and, as a first guess, ``order``; fills the rest.
    """
    paths, tail, key, order = state.paths, state.tail, state.key, state.order
    count, length = paths.shape
    steps = 2 * length + 1
    fill_keys(state.nudge, key)
    sort_steps(key, order)
    scratch = state.scratch
    free, live, before, step = scratch.free, scratch.live, scratch.before, scratch.step
    since, aside = scratch.since, scratch.aside
    free[:] = 0.0
    live[:] = 0
    before[:] = -1
    step[:] = 0
    since[:] = 0.0
    aside[:] = False
    waiting, makespan = 0, 0.0
    queueing = len(num.links.busy) > 0
    if queueing:
        num.links.free[:] = 0.0
    for i in range(len(order)):
        last = order[i]
        b = last // steps
        if step[b] != last - b * steps:
            continue
        while b >= 0:
            # b's steps up to this key; more than one only after it stood aside
            k = step[b]
            aside[b] = False
            while k < steps:
                at = b * steps + k
                if key[at] > key[last] or (key[at] == key[last] and at > last):
                    break
                d = device_at(paths[b], k)
                if k < length:
                    if live[d] >= num.memory[d]:
                        aside[b] = True
                        waiting += 1
                        break
                    live[d] += 1
                elif k > length:
                    live[d] -= 1
                start = max(since[b], free[d])
                if start + tail[b, k] > limit:
                    return LATE
                state.begin[b, k] = start
                state.ready[b, k] = since[b]
                state.before[b, k] = before[d]
                before[d] = at
                end = start + seconds_at(num, d, k, length)
                free[d] = end
                k += 1
                if k == steps:
                    makespan = max(makespan, end)
                else:
                    v = device_at(paths[b], k)
                    if queueing:
                        since[b] = leave(num.links, state.behind, b, k, d, v, end)
                        since[b] += num.hop[d, v]
                    else:
                        since[b] = end + num.hop[d, v]
            step[b] = k
            b = first_aside(paths, num.memory, key, scratch) if waiting > 0 else -1
            if b >= 0:
                waiting -= 1
    for b in range(count):
        if step[b] < steps:
            return LATE
    return makespan


@entry
def timed(num: Numbers, state: DispatchState, pull: float, limit: float) -> float:
    """`decode` with a pull, or `follow` with FOLLOW."""
    if pull < 0.0:
        return follow(num, state, limit)
    return decode(num, state, pull, limit)


def scheduled(
    arrays: PathArrays, paths: Ints, nudge: Floats | None = None, pull: float = PULL
) -> tuple[float, Floats]:
    """Makespan and start of every step; infinite in a deadlock. ``pull`` as in `timed`."""
    state = DispatchState.of(arrays, paths, nudge)
    num = Numbers.of(arrays)
    for b in range(arrays.microbatches):
        fill_tail(num, state.paths[b], state.tail[b])
    makespan = float(timed(num, state, pull, math.inf))
    return (makespan if makespan < LATE else math.inf), state.begin
