"""Events to come, as a binary heap in arrays, for compiled code.

Of events at the same moment, the one that was announced first comes first. Some events are
forecasts that others change, such as when a message will have left: each of them has a slot, and is
moved in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from planner.search.arrays import Floats, Ints
from planner.search.compiled import kernel

# no literals: as arguments they are types of their own, for which numba compiles once more
ABSENT: Any = np.int64(-1)
ROOT: Any = np.int64(0)


class EventQueue(NamedTuple):
    """A heap of events, and where in it the forecasts are.

    Attributes
    ----------
    time, number, event, slot
        Entries of the heap: when, in which order they were announced, what the caller knows them
        by, and the slot of a forecast, else `ABSENT`.
    at
        ``int[slots]``: where in the heap each forecast is, `ABSENT` if nowhere.
    size, announced
        ``int[1]``: how many there are, and were announced.
    """

    time: Floats
    number: Ints
    event: Ints
    slot: Ints
    at: Ints
    size: Ints
    announced: Ints

    @classmethod
    def of(cls, most: int, slots: int) -> EventQueue:
        """An empty queue for at most so many events at a time."""
        # pages that are never touched cost nothing
        number, event, slot = (np.empty(most, dtype=np.int64) for _ in range(3))
        at = np.full(slots, ABSENT, dtype=np.int64)
        size, announced = (np.zeros(1, dtype=np.int64) for _ in range(2))
        return cls(np.empty(most), number, event, slot, at, size, announced)


@kernel
def _rise(queue: EventQueue, k: int, time: float, number: int, event: int, slot: int) -> None:
    """Put an event at place k of the heap, or nearer its root."""
    # arrays by themselves: taking one from a tuple takes time
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
def _sink(queue: EventQueue, k: int, time: float, number: int, event: int, slot: int) -> None:
    """Put an event at place k of the heap, or farther from its root."""
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
def announce(queue: EventQueue, time: float, event: int) -> None:
    """Add an event."""
    queue.announced[0] += 1
    k = queue.size[0]
    queue.size[0] = k + 1
    _rise(queue, k, time, queue.announced[0], event, ABSENT)


@kernel
def forecast(queue: EventQueue, slot: int, time: float, event: int) -> None:
    """Add the event of a slot, in place of the one that is there; never, at time infinity."""
    queue.announced[0] += 1
    number, k = queue.announced[0], queue.at[slot]
    if k == ABSENT:
        k = queue.size[0]
        queue.size[0] = k + 1
        _rise(queue, k, time, number, event, slot)
    elif time < queue.time[k]:
        _rise(queue, k, time, number, event, slot)
    else:
        _sink(queue, k, time, number, event, slot)


@kernel
def take(queue: EventQueue) -> Any:
    """Remove the first event and return it."""
    first, slot = queue.event[0], queue.slot[0]
    if slot != ABSENT:
        queue.at[slot] = ABSENT
    last = queue.size[0] - 1
    queue.size[0] = last
    if last > 0:
        _sink(
            queue, ROOT, queue.time[last], queue.number[last], queue.event[last], queue.slot[last]
        )
    return first
