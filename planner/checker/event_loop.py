"""Event loop of the checker's own step simulation; compiled if numba is installed.

Written from the definition (docs/explanation/step-time-model.md), independently of the simulator
that it verifies. A line is a shared up- or downlink. Max-min fair rates are computed line by line:
every bottleneck has a level at which its pairs fill it; the pairs of the bottleneck with the lowest
level get that level, or their own maximum, and the other lines share their residual capacities.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from planner.search.arrays import Bools, Floats, Ints, Ints2
from planner.search.compiled import allocating, allocating_entry, force_inlined, kernel

NOTHING = -1
"""Marks a missing operation, pair or line."""
TOLERANCE = 1e-9
"""Relative: a line whose demand exceeds its capacity by no more than this is no bottleneck."""
SPLIT32 = 2.0**21 + 1
"""Factor of Veltkamp's splitting that keeps the upper 32 bits of a significand."""
(
    OPERATION_END,
    MESSAGE_QUEUED,
    MESSAGE_SENT,
    MESSAGE_ARRIVED,
    ROUND_SENT,
    ROUND_END,
    NORM_RECEIVED,
    UPDATE_END,
) = range(8)
"""Event kinds. `MESSAGE_SENT` and `ROUND_SENT` may be outdated and are then ignored or repeated."""

NOT_AVERAGING, READY, IN_ROUND = range(3)
"""States of a device with delayed averaging, which overlaps with operations."""


class CheckerOperations(NamedTuple):
    """Operations of all schedules.

    Attributes
    ----------
    device, seconds
        ``[O]``: the device and duration of each operation.
    successor, pair, message_bytes
        ``[O]``: the microbatch's next operation; the pair and the bytes of the message to it, if it
        is on another device.
    is_first
        ``bool[O]``: whether it is the first of its microbatch.
    order, order_ptr
        ``int[O]``, ``int[K * N + 1]``: the operations of schedule k on device d begin in ``order``
        at ``order_ptr[k * N + d]``.
    update_s
        ``float[N]``.
    message_s
        Seconds between an operation's end and the moment its message is queued.
    """

    device: Ints
    seconds: Floats
    successor: Ints
    pair: Ints
    message_bytes: Floats
    is_first: Bools
    order: Ints
    order_ptr: Ints
    update_s: Floats
    message_s: float


class CheckerLinks(NamedTuple):
    """Pairs that carry messages, and the lines (shared up- and downlinks) that they use.

    Attributes
    ----------
    latency_s, max_rate
        ``float[P]``: ``max_rate`` is a pair's bytes per second without other traffic.
    lines
        ``int[P, k]``: lines of every pair, padded with `NOTHING`.
    capacity
        ``float[L]``: bytes per second of every line.
    """

    latency_s: Floats
    max_rate: Floats
    lines: Ints2
    capacity: Floats


class CheckerRounds(NamedTuple):
    """Averaging groups, in the order in which a device goes through them.

    Attributes
    ----------
    size
        ``int[G]``: members.
    device_ptr, device_groups
        ``int[N + 1]``, and the groups of every device (compressed rows).
    pair_s, round_trip_s
        ``float[G]``: bytes / bandwidth of the slowest pair, and the longest round-trip latency.
    load_ptr, load_line, load_bytes
        ``int[G + 1]``, and the lines of every group with its bytes over them (compressed rows).
    norm_send_s, norm_receive_s
        ``float[N]``: latency to the device that sums the gradient norm, negative for devices that
        send no part, and latency back. With clipping, the last group exchanges the norm.
    """

    size: Ints
    device_ptr: Ints
    device_groups: Ints
    pair_s: Floats
    round_trip_s: Floats
    load_ptr: Ints
    load_line: Ints
    load_bytes: Floats
    norm_send_s: Floats
    norm_receive_s: Floats


class RunTimes(NamedTuple):
    """Results of a run.

    Attributes
    ----------
    step_end
        ``float[T]``.
    round_begin, round_end
        ``float[G]``: of the last step.
    pipeline_end_s
        ``float[1]``: end of the last operation.
    finished_steps
        ``int[N]``: steps that each device has finished.
    """

    step_end: Floats
    round_begin: Floats
    round_end: Floats
    pipeline_end_s: Floats
    finished_steps: Ints


(PUSHED, NUM_DIRTY, NUM_CHANGED, NUM_SENDING, STAMP) = range(5)
"""Entries of ``counters``: order of events at the same time; lengths of `DeviceState.dirty`,
`RoundState.changed_lines` and `RoundState.running`; and the last value in `RateState.seen_pair`."""


class DeviceState(NamedTuple):
    """State of the devices.

    Attributes
    ----------
    position, round_of, current
        ``int[N]``: operations started, groups left and the running operation, in this step.
    busy, is_dirty, dirty
        Whether a device is occupied; devices that may have something to start, and their list.
    delayed_state, awaits_averaging
        State of delayed averaging, and devices that have updated and wait for its end.
    inputs_ready
        ``bool[T * O]``: by step and operation.
    waiting_since_s
        ``float[N]``: since when a device waits for the norm; negative if it does not.
    parts_sent, norm_sum_s
        By step: number of parts of the norm sent, and when the last of them arrives.
    norm_group, norm_parts
        The group that exchanges the norm, or `NOTHING`, and the number of its parts.
    """

    position: Ints
    round_of: Ints
    current: Ints
    busy: Bools
    is_dirty: Bools
    dirty: Ints
    delayed_state: Ints
    awaits_averaging: Bools
    inputs_ready: Bools
    waiting_since_s: Floats
    parts_sent: Ints
    norm_sum_s: Floats
    norm_group: int
    norm_parts: int


class MessageState(NamedTuple):
    """Queues of messages; a message is ``step * O + operation``.

    Attributes
    ----------
    head, tail, next_message
        ``int[P]``, ``int[P]``, ``int[T * O]``: the queue of every pair.
    queued_s
        ``float[T * O]``.
    remaining_bytes, queued_bytes
        ``float[P]``: of the first message at ``updated_s``, and of those after it.
    rate, updated_s, send_end_s, scheduled_s
        ``float[P]``: current rate and since when; when the first message will be sent at this rate,
        and when the next event checks it.
    """

    head: Ints
    tail: Ints
    next_message: Ints
    queued_s: Floats
    remaining_bytes: Floats
    queued_bytes: Floats
    rate: Floats
    updated_s: Floats
    send_end_s: Floats
    scheduled_s: Floats


class RateState(NamedTuple):
    """Active pairs of the lines, and work arrays of max-min fair rates.

    Attributes
    ----------
    active_ptr, num_active, active
        The active pairs of line r are ``active[active_ptr[r] : active_ptr[r] + num_active[r]]``.
    demand
        ``float[R]``: sum of the maximum rates of a line's active pairs.
    residual
        ``float[R]``: a bottleneck's capacity that its pairs with fixed rates leave.
    unsaturated
        ``bool[R]``: bottlenecks that still have pairs without fixed rates.
    seen_line, seen_pair
        Lines and pairs that the present search for connected pairs has visited, by its stamp.
    bottlenecks, affected
        Results of that search: lines with more demand than capacity, and pairs whose rates change.
    fair
        ``float[P]``: max-min fair rate of a pair, in bytes per second.
    fixed
        ``bool[P]``: whether the rate of an affected pair is final.
    """

    active_ptr: Ints
    num_active: Ints
    active: Ints
    demand: Floats
    residual: Floats
    unsaturated: Bools
    seen_line: Ints
    bottlenecks: Ints
    affected: Ints
    seen_pair: Ints
    fair: Floats
    fixed: Bools


class Heap(NamedTuple):
    """Binary heap, least key first, then least order, kind and subject.

    Attributes
    ----------
    size
        ``int[1]``: number of entries in use.
    key, order, kind, subject
        The entries.
    """

    size: Ints
    key: Floats
    order: Ints
    kind: Ints
    subject: Ints


class RoundState(NamedTuple):
    """State of the averaging groups.

    Attributes
    ----------
    is_changed, changed_lines
        Lines changed since the speeds of the groups were computed.
    line_rounds_ptr, line_rounds
        (group, entry of ``load_line``) by line (compressed rows).
    member_ptr, member
        Members of every group (compressed rows).
    ready, is_sending, is_stale, running
        Members that are ready; groups that send, whose speed may change, and the list of the first.
    begin_s, nominal_s, progress_s
        Start, seconds without later traffic, and how many of these have passed.
    speed, speed_since_s, sent_s
        Current speed and since when; when everything will be sent at this speed.
    total_bytes, max_speed
        By entry of ``load_line``: bytes with those queued before, and the speed that it allows.
    """

    is_changed: Bools
    changed_lines: Ints
    line_rounds_ptr: Ints
    line_rounds: Ints2
    member_ptr: Ints
    member: Ints
    ready: Ints
    is_sending: Bools
    is_stale: Bools
    running: Ints
    begin_s: Floats
    nominal_s: Floats
    progress_s: Floats
    speed: Floats
    speed_since_s: Floats
    sent_s: Floats
    total_bytes: Floats
    max_speed: Floats


@kernel
def _round32(x: float) -> float:
    """Round to 32 significant bits, so that the order of sums does not matter."""
    wide = x * SPLIT32
    return wide - (wide - x)


@kernel
def _saturation_level(active_pairs: Ints, max_rate: Floats, fixed: Bools, residual: float) -> float:
    """The level at which a line's pairs without fixed rates fill its residual capacity."""
    level, previous = 0.0, -1
    while True:
        residual_rate, num_above, num_below = residual, 0, 0
        for p in active_pairs:
            if not fixed[p]:
                if max_rate[p] <= level:
                    residual_rate -= max_rate[p]
                    num_below += 1
                else:
                    num_above += 1
        if num_above == 0:
            return math.inf
        if num_below == previous:
            return level
        previous = num_below
        level = max(residual_rate / num_above, 0.0)


@allocating
def _heap(capacity: int) -> Heap:
    return Heap(
        np.zeros(1, np.int64),
        np.zeros(capacity),
        np.zeros(capacity, np.int64),
        np.zeros(capacity, np.int64),
        np.zeros(capacity, np.int64),
    )


@allocating
def _enlarged(heap: Heap) -> Heap:
    """A copy with twice the capacity."""
    copy = _heap(2 * len(heap.key))
    size = copy.size[0] = heap.size[0]
    for k in range(size):
        copy.key[k], copy.order[k] = heap.key[k], heap.order[k]
        copy.kind[k], copy.subject[k] = heap.kind[k], heap.subject[k]
    return copy


@force_inlined
def _precedes(heap: Heap, i: int, j: int) -> bool:
    """Whether entry i comes before entry j."""
    if heap.key[i] != heap.key[j]:
        return bool(heap.key[i] < heap.key[j])
    if heap.order[i] != heap.order[j]:
        return bool(heap.order[i] < heap.order[j])
    if heap.kind[i] != heap.kind[j]:
        return bool(heap.kind[i] < heap.kind[j])
    return bool(heap.subject[i] < heap.subject[j])


@force_inlined
def _swap(heap: Heap, i: int, j: int) -> None:
    heap.key[i], heap.key[j] = heap.key[j], heap.key[i]
    heap.order[i], heap.order[j] = heap.order[j], heap.order[i]
    heap.kind[i], heap.kind[j] = heap.kind[j], heap.kind[i]
    heap.subject[i], heap.subject[j] = heap.subject[j], heap.subject[i]


@kernel
def _push(heap: Heap, key: float, order: int, kind: int, subject: int) -> None:
    """Add an entry; the heap must have room for it."""
    k = heap.size[0]
    heap.size[0] += 1
    heap.key[k], heap.order[k], heap.kind[k], heap.subject[k] = key, order, kind, subject
    while k > 0 and _precedes(heap, k, (k - 1) // 2):
        _swap(heap, k, (k - 1) // 2)
        k = (k - 1) // 2


@kernel
def _pop(heap: Heap) -> None:
    """Remove the first entry."""
    heap.size[0] -= 1
    size, k = heap.size[0], 0
    _swap(heap, 0, size)
    while 2 * k + 1 < size:
        child = 2 * k + 1
        if child + 1 < size and _precedes(heap, child + 1, child):
            child += 1
        if not _precedes(heap, child, k):
            break
        _swap(heap, k, child)
        k = child


@allocating
def _row_ends(rows: Ints, count: int) -> Ints:
    """Ends of compressed rows: ``rows`` has the row of every entry."""
    ends = np.zeros(count + 1, np.int64)
    for k in range(len(rows)):
        ends[rows[k] + 1] += 1
    return np.cumsum(ends)


@allocating
def _device_state(operations: CheckerOperations, rounds: CheckerRounds, steps: int) -> DeviceState:
    n, total = len(operations.update_s), len(operations.device)
    inputs_ready = np.zeros(total * steps, np.bool_)
    for m in range(len(inputs_ready)):
        inputs_ready[m] = operations.is_first[m % total]
    norm_group, norm_parts = NOTHING, 0
    for d in range(n):
        if rounds.norm_send_s[d] >= 0:
            norm_group, norm_parts = len(rounds.size) - 1, norm_parts + 1
    return DeviceState(
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.full(n, NOTHING, np.int64),
        np.zeros(n, np.bool_),
        np.ones(n, np.bool_),
        np.arange(n),
        np.zeros(n, np.int64),
        np.zeros(n, np.bool_),
        inputs_ready,
        np.full(n, -1.0),
        np.zeros(steps, np.int64),
        np.zeros(steps),
        norm_group,
        norm_parts,
    )


@allocating
def _message_state(pairs: int, messages: int) -> MessageState:
    return MessageState(
        np.full(pairs, NOTHING, np.int64),
        np.full(pairs, NOTHING, np.int64),
        np.full(messages, NOTHING, np.int64),
        np.zeros(messages),
        np.zeros(pairs),
        np.zeros(pairs),
        np.zeros(pairs),
        np.zeros(pairs),
        np.zeros(pairs),
        np.full(pairs, math.inf),
    )


@allocating
def _rate_state(links: CheckerLinks) -> RateState:
    pairs, lines = len(links.max_rate), len(links.capacity)
    used = links.lines.copy().reshape(-1)
    active_ptr = _row_ends(used[used != NOTHING], lines)
    return RateState(
        active_ptr,
        np.zeros(lines, np.int64),
        np.zeros(active_ptr[-1], np.int64),
        np.zeros(lines),
        np.zeros(lines),
        np.zeros(lines, np.bool_),
        np.zeros(lines, np.int64),
        np.zeros(lines, np.int64),
        np.zeros(pairs + 1, np.int64),
        np.zeros(pairs, np.int64),
        np.zeros(pairs),
        np.zeros(pairs, np.bool_),
    )


@allocating
def _round_state(rounds: CheckerRounds, lines: int) -> RoundState:
    groups, loads = len(rounds.size), len(rounds.load_line)
    line_rounds_ptr = _row_ends(rounds.load_line, lines)
    line_rounds, filled = np.zeros((loads, 2), np.int64), line_rounds_ptr.copy()
    for g in range(groups):
        for k in range(rounds.load_ptr[g], rounds.load_ptr[g + 1]):
            line_rounds[filled[rounds.load_line[k]]] = (g, k)
            filled[rounds.load_line[k]] += 1
    member_ptr = _row_ends(rounds.device_groups, groups)
    member, filled = np.zeros(len(rounds.device_groups), np.int64), member_ptr.copy()
    for d in range(len(rounds.device_ptr) - 1):
        for k in range(rounds.device_ptr[d], rounds.device_ptr[d + 1]):
            member[filled[rounds.device_groups[k]]] = d
            filled[rounds.device_groups[k]] += 1
    return RoundState(
        np.zeros(lines, np.bool_),
        np.zeros(lines, np.int64),
        line_rounds_ptr,
        line_rounds,
        member_ptr,
        member,
        np.zeros(groups, np.int64),
        np.zeros(groups, np.bool_),
        np.zeros(groups, np.bool_),
        np.zeros(groups, np.int64),
        np.zeros(groups),
        np.zeros(groups),
        np.zeros(groups),
        np.zeros(groups),
        np.zeros(groups),
        np.zeros(groups),
        np.zeros(loads),
        np.zeros(loads),
    )


@force_inlined
def _connected_pairs(
    links: CheckerLinks, rates: RateState, num_affected: int, stamp: int
) -> tuple[int, int]:
    """Add all pairs connected with the first ``num_affected`` through bottlenecks."""
    num_bottlenecks, k = 0, 0
    while k < num_affected:
        p = rates.affected[k]
        k += 1
        for j in range(links.lines.shape[1]):
            line = links.lines[p, j]
            if line == NOTHING or rates.seen_line[line] == stamp:
                continue
            rates.seen_line[line] = stamp
            if rates.demand[line] <= links.capacity[line] * (1 + TOLERANCE):
                continue
            rates.bottlenecks[num_bottlenecks] = line
            num_bottlenecks += 1
            first = rates.active_ptr[line]
            for a in range(first, first + rates.num_active[line]):
                q = rates.active[a]
                if rates.seen_pair[q] != stamp:
                    rates.seen_pair[q] = stamp
                    rates.affected[num_affected] = q
                    num_affected += 1
    return num_affected, num_bottlenecks


@kernel
def _max_min_rates(
    links: CheckerLinks, rates: RateState, num_affected: int, num_bottlenecks: int, levels: Heap
) -> None:
    """Max-min fair rates of the affected pairs, which share no bottleneck with others."""
    affected, bottlenecks, fixed, fair = rates.affected, rates.bottlenecks, rates.fixed, rates.fair
    residual, unsaturated = rates.residual, rates.unsaturated
    max_rate, lines, capacity = links.max_rate, links.lines, links.capacity
    active, active_ptr, num_active = rates.active, rates.active_ptr, rates.num_active
    for k in range(num_affected):
        fixed[affected[k]] = False
    for k in range(num_bottlenecks):
        line = bottlenecks[k]
        residual[line] = capacity[line]
        unsaturated[line] = True
        active_pairs = active[active_ptr[line] : active_ptr[line] + num_active[line]]
        level = _saturation_level(active_pairs, max_rate, fixed, capacity[line])
        _push(levels, level, line, 0, line)
    floor = 0.0
    while levels.size[0] > 0:
        stored_level, line = levels.key[0], levels.subject[0]
        _pop(levels)
        if not unsaturated[line]:
            continue
        # pairs fixed since then took at most the old level: the level can only have risen
        active_pairs = active[active_ptr[line] : active_ptr[line] + num_active[line]]
        level = _saturation_level(active_pairs, max_rate, fixed, residual[line])
        if level > stored_level and levels.size[0] > 0 and level > levels.key[0]:
            _push(levels, level, line, 0, line)
            continue
        unsaturated[line] = False
        floor = level = max(level, floor)
        for p in active_pairs:
            if fixed[p]:
                continue
            fixed[p] = True
            share = min(level, max_rate[p])
            fair[p] = _round32(share)
            for j in range(lines.shape[1]):
                other = lines[p, j]
                if other != NOTHING:
                    residual[other] = residual[other] - share
    for k in range(num_affected):
        p = affected[k]
        if not fixed[p]:
            fair[p] = _round32(max_rate[p])


@force_inlined
def _queued_bytes(messages: MessageState, rates: RateState, line: int, now: float) -> float:
    """Unsent bytes of a line's pairs."""
    total, first = 0.0, rates.active_ptr[line]
    for a in range(first, first + rates.num_active[line]):
        p = rates.active[a]
        sent = messages.rate[p] * (now - messages.updated_s[p])
        total += max(messages.remaining_bytes[p] - sent, 0.0) + messages.queued_bytes[p]
    return total


@force_inlined
def _mark_changed(state: RoundState, counters: Ints, line: int) -> None:
    """Add a line to the list of changed lines unless it is in it; `NOTHING` is ignored."""
    if line != NOTHING and not state.is_changed[line]:
        state.is_changed[line] = True
        state.changed_lines[counters[NUM_CHANGED]] = line
        counters[NUM_CHANGED] += 1


@force_inlined
def _mark_pair_changed(links: CheckerLinks, state: RoundState, counters: Ints, pair: int) -> None:
    """Mark all lines of a pair as changed."""
    for j in range(links.lines.shape[1]):
        _mark_changed(state, counters, links.lines[pair, j])


@force_inlined
def _mark_dirty(devices: DeviceState, counters: Ints, device: int) -> None:
    """Add a device to the list of those that may have something to start."""
    if not devices.is_dirty[device]:
        devices.is_dirty[device] = True
        devices.dirty[counters[NUM_DIRTY]] = device
        counters[NUM_DIRTY] += 1


@force_inlined
def _end_step(devices: DeviceState, times: RunTimes, device: int, now: float) -> None:
    """The device is done with its step."""
    t = times.finished_steps[device]
    times.step_end[t] = max(times.step_end[t], now)
    times.finished_steps[device] = t + 1
    devices.position[device] = devices.round_of[device] = 0


@force_inlined
def _start_ready_devices(
    operations: CheckerOperations,
    links: CheckerLinks,
    rounds: CheckerRounds,
    steps: Ints,
    averages: Bools,
    times: RunTimes,
    delayed: bool,
    devices: DeviceState,
    messages: MessageState,
    rates: RateState,
    state: RoundState,
    counters: Ints,
    events: Heap,
    now: float,
) -> None:
    """Start what the devices in the list can start: operations, rounds, updates, next steps."""
    n, total, finished = len(operations.update_s), len(operations.device), times.finished_steps
    delayed_state, busy = devices.delayed_state, devices.busy
    for k in range(counters[NUM_DIRTY]):
        d = devices.dirty[k]
        devices.is_dirty[d] = False
        while delayed_state[d] == READY or (not busy[d] and finished[d] < len(steps)):
            t, averages_now = finished[d], False
            counters[PUSHED] += 1
            has_group = rounds.device_ptr[d] + devices.round_of[d] < rounds.device_ptr[d + 1]
            if delayed_state[d] == READY:
                averages_now = has_group
                delayed_state[d] = IN_ROUND if averages_now else NOT_AVERAGING
            elif devices.awaits_averaging[d]:
                if delayed_state[d] != NOT_AVERAGING:
                    break
                devices.awaits_averaging[d] = False
                _end_step(devices, times, d, now)
                delayed_state[d] = READY if averages[t] else NOT_AVERAGING
            else:
                place = operations.order_ptr[steps[t] * n + d] + devices.position[d]
                if place < operations.order_ptr[steps[t] * n + d + 1]:
                    o = operations.order[place]
                    if not devices.inputs_ready[t * total + o]:
                        break
                    devices.position[d] += 1
                    busy[d] = True
                    devices.current[d] = o
                    end_s = now + operations.seconds[o]
                    _push(events, end_s, counters[PUSHED], OPERATION_END, d)
                elif averages[t] and not delayed and has_group:
                    averages_now = busy[d] = True
                elif operations.update_s[d] > 0:
                    busy[d] = True
                    end_s = now + operations.update_s[d]
                    _push(events, end_s, counters[PUSHED], UPDATE_END, d)
                elif delayed:
                    devices.awaits_averaging[d] = True
                else:
                    _end_step(devices, times, d, now)
            if averages_now:
                g = rounds.device_groups[rounds.device_ptr[d] + devices.round_of[d]]
                if g == devices.norm_group:
                    _send_norm_part(rounds, times, devices, counters, events, d, now)
                    continue
                state.ready[g] += 1
                if state.ready[g] == rounds.size[g]:
                    _begin_round(links, rounds, times, messages, rates, state, counters, g, now)
                    _push(events, state.sent_s[g], counters[PUSHED], ROUND_SENT, g)
    counters[NUM_DIRTY] = 0


@kernel
def _send_norm_part(
    rounds: CheckerRounds,
    times: RunTimes,
    devices: DeviceState,
    counters: Ints,
    events: Heap,
    d: int,
    now: float,
) -> None:
    """A device sends its part of the gradient norm, if it has one, and waits for the sum."""
    t, sends = times.finished_steps[d], rounds.norm_send_s[d] >= 0
    devices.waiting_since_s[d] = now
    if sends:
        devices.parts_sent[t] += 1
        devices.norm_sum_s[t] = max(devices.norm_sum_s[t], now + rounds.norm_send_s[d])
    if devices.parts_sent[t] < devices.norm_parts:
        return
    for e in range(len(devices.waiting_since_s)):
        waiting = devices.waiting_since_s[e] >= 0 and times.finished_steps[e] == t
        # send once to all that wait when the sum is complete, then to each later device
        if waiting and (e == d or sends):
            known_s = max(now, devices.norm_sum_s[t] + rounds.norm_receive_s[e])
            counters[PUSHED] += 1
            _push(events, known_s, counters[PUSHED], NORM_RECEIVED, e)


@force_inlined
def _begin_round(
    links: CheckerLinks,
    rounds: CheckerRounds,
    times: RunTimes,
    messages: MessageState,
    rates: RateState,
    state: RoundState,
    counters: Ints,
    g: int,
    now: float,
) -> None:
    """Start a group whose members are all ready, after the messages that are queued already."""
    state.ready[g] = 0
    state.begin_s[g] = now
    times.round_begin[g] = now
    nominal_s = rounds.pair_s[g]
    for k in range(rounds.load_ptr[g], rounds.load_ptr[g + 1]):
        line = rounds.load_line[k]
        queue = _queued_bytes(messages, rates, line, now)
        state.total_bytes[k] = _round32(rounds.load_bytes[k] + queue)
        nominal_s = max(nominal_s, state.total_bytes[k] / links.capacity[line])
        state.max_speed[k] = math.inf
        _mark_changed(state, counters, line)
    state.nominal_s[g], state.progress_s[g] = _round32(nominal_s), 0.0
    state.speed[g], state.speed_since_s[g], state.sent_s[g] = 1.0, now, now + state.nominal_s[g]
    state.is_sending[g] = True
    state.running[counters[NUM_SENDING]] = g
    counters[NUM_SENDING] += 1


@force_inlined
def _limit_speeds(
    links: CheckerLinks,
    rounds: CheckerRounds,
    messages: MessageState,
    rates: RateState,
    state: RoundState,
    line: int,
) -> None:
    """Speeds of groups that a changed line allows.

    Messages queued after a group's start keep their rates; groups share the residual.
    """
    first, last = state.line_rounds_ptr[line], state.line_rounds_ptr[line + 1]
    for k in range(first, last):
        g, entry = state.line_rounds[k, 0], state.line_rounds[k, 1]
        if not state.is_sending[g]:
            continue
        message_rate, other_rates, shared_line = 0.0, 0.0, False
        for j in range(first, last):
            other, other_entry = state.line_rounds[j, 0], state.line_rounds[j, 1]
            if state.is_sending[other] and other != g:
                shared_line = True
                if state.nominal_s[other] > 0:
                    other_rates += _round32(rounds.load_bytes[other_entry] / state.nominal_s[other])
        for a in range(rates.active_ptr[line], rates.active_ptr[line] + rates.num_active[line]):
            p = rates.active[a]
            if messages.queued_s[messages.head[p]] > state.begin_s[g]:
                message_rate += messages.rate[p]
        state.max_speed[entry] = math.inf
        if message_rate > 0 or shared_line:
            residual_rate = max(links.capacity[line] - message_rate, 0.0)
            shared_bytes = state.total_bytes[entry] + other_rates * state.nominal_s[g]
            state.max_speed[entry] = residual_rate * state.nominal_s[g] / shared_bytes
        state.is_stale[g] = True


@force_inlined
def _update_round_speeds(
    links: CheckerLinks,
    rounds: CheckerRounds,
    messages: MessageState,
    rates: RateState,
    state: RoundState,
    counters: Ints,
    events: Heap,
    now: float,
) -> None:
    """Speeds of the groups over lines that have changed, and when they will have sent all."""
    for c in range(counters[NUM_CHANGED]):
        line = state.changed_lines[c]
        state.is_changed[line] = False
        _limit_speeds(links, rounds, messages, rates, state, line)
    counters[NUM_CHANGED] = 0
    for k in range(counters[NUM_SENDING]):
        g = state.running[k]
        if not state.is_stale[g]:
            continue
        state.is_stale[g] = False
        new_speed = 1.0
        for entry in range(rounds.load_ptr[g], rounds.load_ptr[g + 1]):
            new_speed = min(new_speed, state.max_speed[entry])
        if new_speed == state.speed[g]:
            continue
        state.progress_s[g] += state.speed[g] * (now - state.speed_since_s[g])
        state.speed[g], state.speed_since_s[g], state.sent_s[g] = new_speed, now, math.inf
        if new_speed > 0:
            remaining_s = max(state.nominal_s[g] - state.progress_s[g], 0.0)
            state.sent_s[g] = now + remaining_s / new_speed
            counters[PUSHED] += 1
            _push(events, state.sent_s[g], counters[PUSHED], ROUND_SENT, g)


@force_inlined
def _end_operation(
    operations: CheckerOperations,
    times: RunTimes,
    devices: DeviceState,
    counters: Ints,
    events: Heap,
    d: int,
    now: float,
) -> int:
    """Returns the message that joins its queue at once, or `NOTHING`."""
    o = devices.current[d]
    devices.busy[d] = False
    _mark_dirty(devices, counters, d)
    times.pipeline_end_s[0] = max(times.pipeline_end_s[0], now)
    message = times.finished_steps[d] * len(operations.device) + o
    if operations.successor[o] == NOTHING:
        return NOTHING
    if operations.pair[o] == NOTHING:
        devices.inputs_ready[message - o + operations.successor[o]] = True
        return NOTHING
    if operations.message_s > 0:
        queued_s = now + operations.message_s
        _push(events, queued_s, counters[PUSHED], MESSAGE_QUEUED, message)
        return NOTHING
    return int(message)


@force_inlined
def _queue_message(
    operations: CheckerOperations,
    links: CheckerLinks,
    messages: MessageState,
    rates: RateState,
    counters: Ints,
    message: int,
    now: float,
) -> int:
    """Append a message to its pair's queue; returns the number of pairs whose rates may change."""
    o = message % len(operations.device)
    p = operations.pair[o]
    messages.queued_s[message] = now
    messages.next_message[message] = NOTHING
    if messages.head[p] != NOTHING:
        messages.next_message[messages.tail[p]] = message
        messages.tail[p] = message
        messages.queued_bytes[p] += operations.message_bytes[o]
        return 0
    messages.head[p] = messages.tail[p] = message
    messages.remaining_bytes[p] = operations.message_bytes[o]
    messages.rate[p], messages.updated_s[p] = 0.0, now
    for k in range(links.lines.shape[1]):
        line = links.lines[p, k]
        if line != NOTHING:
            rates.active[rates.active_ptr[line] + rates.num_active[line]] = p
            rates.num_active[line] += 1
            rates.demand[line] += links.max_rate[p]
    counters[STAMP] += 1
    rates.seen_pair[p] = counters[STAMP]
    rates.affected[0] = p
    return 1


@force_inlined
def _end_sending(
    operations: CheckerOperations,
    links: CheckerLinks,
    messages: MessageState,
    rates: RateState,
    state: RoundState,
    counters: Ints,
    events: Heap,
    p: int,
    now: float,
) -> int:
    """Send a pair's next message; returns the number of pairs whose rates may change."""
    if messages.scheduled_s[p] != now:
        return 0
    messages.scheduled_s[p] = math.inf
    if messages.send_end_s[p] > now:
        messages.scheduled_s[p] = messages.send_end_s[p]
        _push(events, messages.send_end_s[p], counters[PUSHED], MESSAGE_SENT, p)
        return 0
    message = messages.head[p]
    arrival_s = now + links.latency_s[p]
    _push(events, arrival_s, counters[PUSHED], MESSAGE_ARRIVED, message)
    messages.head[p] = messages.next_message[message]
    _mark_pair_changed(links, state, counters, p)
    if messages.head[p] == NOTHING:
        return _leave_lines(links, messages, rates, counters, p)
    size = operations.message_bytes[messages.head[p] % len(operations.device)]
    messages.remaining_bytes[p], messages.updated_s[p] = size, now
    messages.queued_bytes[p] = max(messages.queued_bytes[p] - size, 0.0)
    messages.send_end_s[p] = now + size / messages.rate[p]
    messages.scheduled_s[p] = messages.send_end_s[p]
    counters[PUSHED] += 1
    _push(events, messages.send_end_s[p], counters[PUSHED], MESSAGE_SENT, p)
    return 0


@force_inlined
def _leave_lines(
    links: CheckerLinks, messages: MessageState, rates: RateState, counters: Ints, p: int
) -> int:
    """A pair has nothing to send; returns the number of pairs that may get more."""
    counters[STAMP] += 1
    stamp, num_affected = counters[STAMP], 0
    messages.remaining_bytes[p] = messages.rate[p] = messages.queued_bytes[p] = 0.0
    rates.seen_pair[p] = stamp
    for k in range(links.lines.shape[1]):
        line = links.lines[p, k]
        if line == NOTHING:
            continue
        was_scarce = rates.demand[line] > links.capacity[line] * (1 + TOLERANCE)
        rates.num_active[line] -= 1
        rates.demand[line] -= links.max_rate[p]
        if rates.num_active[line] == 0:
            rates.demand[line] = 0.0
        first, last = rates.active_ptr[line], rates.active_ptr[line] + rates.num_active[line]
        for a in range(first, last):
            if rates.active[a] == p:
                rates.active[a] = rates.active[last]
            q = rates.active[a]
            if was_scarce and rates.seen_pair[q] != stamp:
                rates.seen_pair[q] = stamp
                rates.affected[num_affected] = q
                num_affected += 1
    return num_affected


@force_inlined
def _end_round_sending(
    rounds: CheckerRounds,
    times: RunTimes,
    state: RoundState,
    counters: Ints,
    events: Heap,
    g: int,
    now: float,
) -> None:
    """A group has sent everything, unless the event is outdated; the last messages still travel."""
    if not state.is_sending[g] or state.sent_s[g] != now:
        return
    state.is_sending[g] = False
    for k in range(rounds.load_ptr[g], rounds.load_ptr[g + 1]):
        _mark_changed(state, counters, rounds.load_line[k])
    counters[NUM_SENDING] -= 1
    last = counters[NUM_SENDING]
    for k in range(last):
        if state.running[k] == g:
            state.running[k] = state.running[last]
    times.round_end[g] = now + rounds.round_trip_s[g]
    _push(events, times.round_end[g], counters[PUSHED], ROUND_END, g)


@force_inlined
def _end_round(
    devices: DeviceState, state: RoundState, counters: Ints, delayed: bool, g: int
) -> None:
    """All members of a group have its result."""
    for k in range(state.member_ptr[g], state.member_ptr[g + 1]):
        d = state.member[k]
        if delayed:
            devices.delayed_state[d] = READY
        else:
            devices.busy[d] = False
        devices.round_of[d] += 1
        _mark_dirty(devices, counters, d)


@force_inlined
def _update_rates(
    links: CheckerLinks,
    messages: MessageState,
    rates: RateState,
    state: RoundState,
    counters: Ints,
    events: Heap,
    levels: Heap,
    num_affected: int,
    now: float,
) -> None:
    """New rates for the affected pairs and those connected with them."""
    num_affected, num_bottlenecks = _connected_pairs(links, rates, num_affected, counters[STAMP])
    _max_min_rates(links, rates, num_affected, num_bottlenecks, levels)
    for k in range(num_affected):
        p = rates.affected[k]
        if rates.fair[p] == messages.rate[p]:
            continue
        sent = messages.rate[p] * (now - messages.updated_s[p])
        messages.remaining_bytes[p] = max(messages.remaining_bytes[p] - sent, 0.0)
        messages.updated_s[p], messages.rate[p] = now, rates.fair[p]
        messages.send_end_s[p] = now + messages.remaining_bytes[p] / messages.rate[p]
        if messages.send_end_s[p] < messages.scheduled_s[p]:
            # an early event is scheduled again when popped; a late one would be missed
            messages.scheduled_s[p] = messages.send_end_s[p]
            counters[PUSHED] += 1
            _push(events, messages.send_end_s[p], counters[PUSHED], MESSAGE_SENT, p)
        _mark_pair_changed(links, state, counters, p)


@force_inlined
def _handle_event(
    operations: CheckerOperations,
    links: CheckerLinks,
    rounds: CheckerRounds,
    times: RunTimes,
    delayed: bool,
    devices: DeviceState,
    messages: MessageState,
    rates: RateState,
    state: RoundState,
    counters: Ints,
    events: Heap,
    kind: int,
    subject: int,
    now: float,
) -> int:
    """Returns the number of pairs in `RateState.affected`, whose rates may change."""
    joining = NOTHING
    if kind == OPERATION_END:
        joining = _end_operation(operations, times, devices, counters, events, subject, now)
    elif kind == MESSAGE_QUEUED:
        joining = subject
    elif kind == MESSAGE_SENT:
        return _end_sending(
            operations, links, messages, rates, state, counters, events, subject, now
        )
    elif kind == MESSAGE_ARRIVED:
        o = subject % len(operations.device)
        successor = operations.successor[o]
        devices.inputs_ready[subject - o + successor] = True
        _mark_dirty(devices, counters, operations.device[successor])
    elif kind == ROUND_SENT:
        _end_round_sending(rounds, times, state, counters, events, subject, now)
    elif kind == ROUND_END:
        _end_round(devices, state, counters, delayed, subject)
    elif kind == NORM_RECEIVED:
        devices.busy[subject], devices.waiting_since_s[subject] = False, -1.0
        devices.round_of[subject] += 1
        _mark_dirty(devices, counters, subject)
    else:
        devices.busy[subject] = False
        _mark_dirty(devices, counters, subject)
        if delayed:
            devices.awaits_averaging[subject] = True
        else:
            _end_step(devices, times, subject, now)
    if joining == NOTHING:
        return 0
    return _queue_message(operations, links, messages, rates, counters, joining, now)


@kernel
def _simulate(
    operations: CheckerOperations,
    links: CheckerLinks,
    rounds: CheckerRounds,
    steps: Ints,
    averages: Bools,
    times: RunTimes,
    delayed: bool,
    devices: DeviceState,
    messages: MessageState,
    rates: RateState,
    state: RoundState,
    counters: Ints,
    events: Heap,
    levels: Heap,
    clock_s: Floats,
    max_new_events: int,
) -> bool:
    """Handle events until there are none; False, to be called again, if the heap must be larger."""
    while events.size[0] + max_new_events <= len(events.key):
        if events.size[0] == 0 or events.key[0] > clock_s[0]:
            # all events of this moment are handled
            _start_ready_devices(
                operations,
                links,
                rounds,
                steps,
                averages,
                times,
                delayed,
                devices,
                messages,
                rates,
                state,
                counters,
                events,
                clock_s[0],
            )
            _update_round_speeds(
                links, rounds, messages, rates, state, counters, events, clock_s[0]
            )
            if events.size[0] == 0:
                return True
            clock_s[0] = events.key[0]
        now, kind, subject = clock_s[0], events.kind[0], events.subject[0]
        _pop(events)
        counters[PUSHED] += 1
        num_affected = _handle_event(
            operations,
            links,
            rounds,
            times,
            delayed,
            devices,
            messages,
            rates,
            state,
            counters,
            events,
            kind,
            subject,
            now,
        )
        if num_affected > 0:
            _update_rates(
                links, messages, rates, state, counters, events, levels, num_affected, now
            )
    return False


@allocating_entry
def run(
    operations: CheckerOperations,
    links: CheckerLinks,
    rounds: CheckerRounds,
    steps: Ints,
    averages: Bools,
    times: RunTimes,
    delayed: bool,
) -> None:
    """Simulate steps on an initially idle system.

    Parameters
    ----------
    steps
        ``int[T]``: the schedule of every step.
    averages
        ``bool[T]``: whether each step ends with averaging.
    """
    n, pairs, groups = len(operations.update_s), len(links.max_rate), len(rounds.size)
    devices = _device_state(operations, rounds, len(steps))
    messages = _message_state(pairs, len(devices.inputs_ready))
    rates, state = _rate_state(links), _round_state(rounds, len(links.capacity))
    counters, clock_s = np.zeros(5, np.int64), np.zeros(1)
    counters[NUM_DIRTY] = n
    # at one moment a device starts an operation and a round and is sent the norm, a group gets
    # another speed, and a pair another rate
    max_new_events = 4 * n + 2 * groups + pairs + 16
    events, levels = _heap(2 * max_new_events), _heap(len(links.capacity) + 1)
    while not _simulate(
        operations,
        links,
        rounds,
        steps,
        averages,
        times,
        delayed,
        devices,
        messages,
        rates,
        state,
        counters,
        events,
        levels,
        clock_s,
        max_new_events,
    ):
        events = _enlarged(events)
