"""Event queue of the compiled simulator: a binary heap in arrays.

Ties in time are broken by push order. An event whose time may change, such as the end of a
message's transfer, has a slot by which it is rescheduled in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.search.compiled import kernel
from planner.simulator.state import ABSENT, EventQueue

ROOT: Any = np.int64(0)
"""Typed constant: numba would compile another version for a literal argument."""


@kernel
def _sift_up(queue: EventQueue, k: int, time: float, number: int, event: int, slot: int) -> None:
    """Insert an event at heap index k or nearer to the root."""
    # local names: reading a tuple's field in the loop costs time
    times, numbers, events, slots, at = queue.time, queue.number, queue.event, queue.slot, queue.at
    while k > 0:
        up = (k - 1) >> 1
        if times[up] < time or (times[up] == time and numbers[up] < number):
            break
        times[k], numbers[k], events[k], slots[k] = times[up], numbers[up], events[up], slots[up]
        if slots[k] != ABSENT:
            at[slots[k]] = k
        k = up
    times[k], numbers[k], events[k], slots[k] = time, number, event, slot
    if slot != ABSENT:
        at[slot] = k


@kernel
def _sift_down(queue: EventQueue, k: int, time: float, number: int, event: int, slot: int) -> None:
    """Insert an event at heap index k or farther from the root."""
    times, numbers, events, slots, at = queue.time, queue.number, queue.event, queue.slot, queue.at
    size = queue.size[0]
    while True:
        down = 2 * k + 1
        if down >= size:
            break
        other = down + 1
        if other < size and (
            times[other] < times[down]
            or (times[other] == times[down] and numbers[other] < numbers[down])
        ):
            down = other
        if times[down] > time or (times[down] == time and numbers[down] > number):
            break
        times[k], numbers[k], events[k] = times[down], numbers[down], events[down]
        slots[k] = slots[down]
        if slots[k] != ABSENT:
            at[slots[k]] = k
        k = down
    times[k], numbers[k], events[k], slots[k] = time, number, event, slot
    if slot != ABSENT:
        at[slot] = k


@kernel
def push(queue: EventQueue, time: float, event: int) -> None:
    """Add an event."""
    queue.pushed[0] += 1
    k = queue.size[0]
    queue.size[0] = k + 1
    _sift_up(queue, k, time, queue.pushed[0], event, ABSENT)


@kernel
def reschedule(queue: EventQueue, slot: int, time: float, event: int) -> None:
    """Set the time and event of a slot; time infinity means never."""
    queue.pushed[0] += 1
    number, k = queue.pushed[0], queue.at[slot]
    if k == ABSENT:
        k = queue.size[0]
        queue.size[0] = k + 1
        _sift_up(queue, k, time, number, event, slot)
    elif time < queue.time[k]:
        _sift_up(queue, k, time, number, event, slot)
    else:
        _sift_down(queue, k, time, number, event, slot)


@kernel
def pop(queue: EventQueue) -> Any:
    """Remove the first event and return it."""
    first, slot = queue.event[0], queue.slot[0]
    if slot != ABSENT:
        queue.at[slot] = ABSENT
    last = queue.size[0] - 1
    queue.size[0] = last
    if last > 0:
        _sift_down(
            queue, ROOT, queue.time[last], queue.number[last], queue.event[last], queue.slot[last]
        )
    return first
