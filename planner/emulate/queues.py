"""Packet queues, one per pair, served at max-min fair rates, with latency.

Packets without payload (acknowledgements) skip the queue. Otherwise two large windows in opposite
directions would delay each other's acknowledgements and leave the link idle, which fair queueing in
routers prevents and measured rates do not include.

All times are times of the emulated network, not of this machine: if the switch runs late, it
catches up, and no rate is lost.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.emulate.fair_rates import fair_rates
from planner.emulate.links import EmulatedLinks
from planner.search.compiled import at_first_use

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FREE, TRAVELLING, ACTIVE, BUSY, LOST, ORDER, NUMBERS = range(7)
"""Indices into `Queues.numbers`: free slots, packets in transit, active pairs, recorded busy times,
dropped packets, sequence number, and length."""
MERGE_S = 1e-3
"""Idle time below which two busy times of a pair are recorded as one."""


class Queues(NamedTuple):
    """All packets inside the network; a packet keeps its slot.

    Attributes
    ----------
    numbers
        Counters, indexed by `FREE` and the constants beside it.
    free
        Stack of free slots.
    pair, payload, due, order, behind
        By slot: pair, bytes to serve, arrival time, sequence number, and next slot in the queue (-1
        at the end).
    travelling
        Heap of slots of packets in transit, by arrival time.
    first, last
        By pair: ends of its queue, -1 if empty.
    left, since, rate
        By pair: remaining bytes of its first packet at time ``since``, and the rate since then.
    active, place
        Indices of active pairs; by pair its position in ``active``, or -1.
    lag, latest
        By pair: current jitter, and arrival time of its last packet.
    busy, entry
        ``float[k, 4]``: pair, start, end and bytes of busy times; by pair its latest entry, or -1.
    """

    numbers: Ints
    free: Ints
    pair: Ints
    payload: Floats
    due: Floats
    order: Ints
    behind: Ints
    travelling: Ints
    first: Ints
    last: Ints
    left: Floats
    since: Floats
    rate: Floats
    active: Ints
    place: Ints
    lag: Floats
    latest: Floats
    room: Floats
    load: Ints
    busy: Floats
    entry: Ints


def empty_queues(links: EmulatedLinks, slots: int, records: int) -> Queues:
    """Allocate empty queues."""
    pairs, limits = len(links.rate), len(links.capacity)
    assert len(links.uses) == pairs
    numbers = np.zeros(NUMBERS, dtype=np.int64)
    numbers[FREE] = slots
    return Queues(
        numbers=numbers,
        free=np.arange(slots, dtype=np.int64)[::-1].copy(),
        pair=np.zeros(slots, dtype=np.int64),
        payload=np.zeros(slots),
        due=np.zeros(slots),
        order=np.zeros(slots, dtype=np.int64),
        behind=np.full(slots, -1, dtype=np.int64),
        travelling=np.zeros(slots, dtype=np.int64),
        first=np.full(pairs, -1, dtype=np.int64),
        last=np.full(pairs, -1, dtype=np.int64),
        left=np.zeros(pairs),
        since=np.zeros(pairs),
        rate=np.zeros(pairs),
        active=np.zeros(pairs, dtype=np.int64),
        place=np.full(pairs, -1, dtype=np.int64),
        lag=np.zeros(pairs),
        latest=np.zeros(pairs),
        room=np.zeros(limits),
        load=np.zeros(limits, dtype=np.int64),
        busy=np.zeros((records, 4)),
        entry=np.full(pairs, -1, dtype=np.int64),
    )


@at_first_use
def earlier(q: Queues, a: int, b: int) -> bool:
    """Whether the packet in slot ``a`` arrives before that in ``b``; ties by sequence number."""
    if q.due[a] != q.due[b]:
        return bool(q.due[a] < q.due[b])
    return bool(q.order[a] < q.order[b])


@at_first_use
def push(q: Queues, slot: int) -> None:
    """Add a packet in transit to the heap."""
    heap = q.travelling
    slot_index = q.numbers[TRAVELLING]
    q.numbers[TRAVELLING] += 1
    while slot_index > 0:
        parent = (slot_index - 1) // 2
        if not earlier(q, slot, heap[parent]):
            break
        heap[slot_index] = heap[parent]
        slot_index = parent
    heap[slot_index] = slot


@at_first_use
def pop(q: Queues) -> int:
    """Remove the packet that arrives first."""
    heap = q.travelling
    top = heap[0]
    q.numbers[TRAVELLING] -= 1
    count = q.numbers[TRAVELLING]
    slot = heap[count]
    index = 0
    while True:
        child = 2 * index + 1
        if child >= count:
            break
        if child + 1 < count and earlier(q, heap[child + 1], heap[child]):
            child += 1
        if not earlier(q, heap[child], slot):
            break
        heap[index] = heap[child]
        index = child
    heap[index] = slot
    return int(top)


@at_first_use
def travel(links: EmulatedLinks, q: Queues, slot: int, pair: int, now: float) -> None:
    """Send a packet on its way; it does not overtake packets of its pair."""
    arrival_s = now + max(links.latency[pair] + q.lag[pair], 0.0)
    q.due[slot] = q.latest[pair] = max(arrival_s, q.latest[pair])
    push(q, slot)


@at_first_use
def release(q: Queues, slot: int) -> None:
    """Free a packet's slot."""
    q.free[q.numbers[FREE]] = slot
    q.numbers[FREE] += 1


@at_first_use
def settle(links: EmulatedLinks, q: Queues, now: float) -> None:
    """Recompute rates after a pair became active or idle."""
    active = q.active[: q.numbers[ACTIVE]]
    for pair in active:
        q.left[pair] -= q.rate[pair] * (now - q.since[pair])
        q.since[pair] = now
    fair_rates(links, active, q.room, q.load, q.rate)


@at_first_use
def note_begin(q: Queues, pair: int, now: float) -> None:
    """Record that a pair is busy from now on."""
    entry = q.entry[pair]
    if entry >= 0 and now - q.busy[entry, 2] < MERGE_S:
        return
    entry = q.numbers[BUSY]
    if entry == len(q.busy):
        return
    q.numbers[BUSY] += 1
    q.entry[pair] = entry
    q.busy[entry, 0] = pair
    q.busy[entry, 1] = now
    q.busy[entry, 2] = now


@at_first_use
def depart(links: EmulatedLinks, q: Queues, pair: int, now: float) -> None:
    """Remove a fully served packet from the front of its queue."""
    slot = q.first[pair]
    q.first[pair] = q.behind[slot]
    if q.entry[pair] >= 0:
        q.busy[q.entry[pair], 2] = now
        q.busy[q.entry[pair], 3] += q.payload[slot]
    travel(links, q, slot, pair, now)


@at_first_use
def advance(links: EmulatedLinks, q: Queues, now: float) -> None:
    """Process all departures up to ``now``."""
    while q.numbers[ACTIVE] > 0:
        pair, at = -1, np.inf
        for candidate in q.active[: q.numbers[ACTIVE]]:
            end = q.since[candidate] + max(q.left[candidate], 0.0) / q.rate[candidate]
            if end < at:
                pair, at = candidate, end
        if at > now:
            return
        depart(links, q, pair, at)
        q.left[pair], q.since[pair] = 0.0, at
        if q.first[pair] >= 0:
            q.left[pair] = q.payload[q.first[pair]]
            continue
        q.last[pair] = -1
        q.numbers[ACTIVE] -= 1
        moved, place = q.active[q.numbers[ACTIVE]], q.place[pair]
        q.active[place] = moved
        q.place[moved] = place
        q.place[pair] = -1
        settle(links, q, at)


@at_first_use
def arrive(
    links: EmulatedLinks, q: Queues, slot: int, pair: int, payload: float, now: float
) -> bool:
    """Add a packet to its queue, after `advance` to the same time."""
    q.pair[slot], q.payload[slot], q.behind[slot] = pair, payload, -1
    q.order[slot] = q.numbers[ORDER]
    q.numbers[ORDER] += 1
    if payload <= 0.0:
        travel(links, q, slot, pair, now)
        return False
    if q.last[pair] >= 0:
        q.behind[q.last[pair]] = slot
        q.last[pair] = slot
        return False
    q.first[pair] = q.last[pair] = slot
    q.left[pair], q.since[pair], q.rate[pair] = payload, now, 0.0
    q.place[pair] = q.numbers[ACTIVE]
    q.active[q.numbers[ACTIVE]] = pair
    q.numbers[ACTIVE] += 1
    if links.jitter[pair] > 0.0:
        q.lag[pair] = links.jitter[pair] * (2.0 * random.random() - 1.0)
    note_begin(q, pair, now)
    return True


@at_first_use
def next_event(q: Queues) -> float:
    """Return the time of the next departure or arrival."""
    at = np.inf
    if q.numbers[TRAVELLING] > 0:
        at = q.due[q.travelling[0]]
    for pair in q.active[: q.numbers[ACTIVE]]:
        at = min(at, q.since[pair] + max(q.left[pair], 0.0) / q.rate[pair])
    return at
