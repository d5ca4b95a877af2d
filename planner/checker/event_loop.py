"""Event loop of the checker's own step simulation; compiled if numba is installed.

Written from the definition (docs/explanation/step-time-model.md), independently of the simulator
that it verifies. A line is a shared up- or downlink. Max-min fair rates are computed line by line:
every bottleneck has a level at which its pairs fill it; the pairs of the bottleneck with the lowest
level get that level, or their own maximum, and the other lines share their residual capacities.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, NamedTuple

import numpy as np

from planner.search.arrays import Bools, Floats, Ints, Ints2
from planner.search.compiled import allocating, allocating_entry

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
        ``int[P, 4]``: lines of every pair.
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
    alone_s, round_trip_s
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
    alone_s: Floats
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


@allocating
def _round32(x: float) -> float:
    """Round to 32 significant bits, so that the order of sums does not matter."""
    wide = x * SPLIT32
    return wide - (wide - x)


@allocating
def _saturation_level(active_pairs: Any, max_rate: Any, fixed: Any, residual: float) -> float:
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
def _connected_pairs(
    num_affected: int,
    affected: Any,
    bottlenecks: Any,
    lines: Any,
    active_ptr: Any,
    num_active: Any,
    active: Any,
    demand: Any,
    capacity: Any,
    seen_pair: Any,
    seen_line: Any,
    stamp: int,
) -> tuple[int, int]:
    """Add all pairs connected with the first ``num_affected`` through bottlenecks."""
    num_bottlenecks, k = 0, 0
    while k < num_affected:
        p = affected[k]
        k += 1
        for j in range(lines.shape[1]):
            line = lines[p, j]
            if line == NOTHING or seen_line[line] == stamp:
                continue
            seen_line[line] = stamp
            if demand[line] <= capacity[line] * (1 + TOLERANCE):
                continue
            bottlenecks[num_bottlenecks] = line
            num_bottlenecks += 1
            for q in active[active_ptr[line] : active_ptr[line] + num_active[line]]:
                if seen_pair[q] != stamp:
                    seen_pair[q] = stamp
                    affected[num_affected] = q
                    num_affected += 1
    return num_affected, num_bottlenecks


@allocating
def _max_min_rates(
    num_affected: int,
    num_bottlenecks: int,
    affected: Any,
    bottlenecks: Any,
    lines: Any,
    active_ptr: Any,
    num_active: Any,
    active: Any,
    max_rate: Any,
    capacity: Any,
    fixed: Any,
    residual: Any,
    unsaturated: Any,
    fair: Any,
    level_heap: Any,
) -> None:
    """Max-min fair rates of the affected pairs, which share no bottleneck with others."""
    for k in range(num_affected):
        fixed[affected[k]] = False
    for k in range(num_bottlenecks):
        line = bottlenecks[k]
        residual[line] = capacity[line]
        unsaturated[line] = True
        active_pairs = active[active_ptr[line] : active_ptr[line] + num_active[line]]
        heapq.heappush(
            level_heap, (_saturation_level(active_pairs, max_rate, fixed, capacity[line]), line)
        )
    floor = 0.0
    while len(level_heap) > 0:
        stored_level, line = heapq.heappop(level_heap)
        if not unsaturated[line]:
            continue
        # pairs fixed since then took at most the old level: the level can only have risen
        active_pairs = active[active_ptr[line] : active_ptr[line] + num_active[line]]
        level = _saturation_level(active_pairs, max_rate, fixed, residual[line])
        if level > stored_level and len(level_heap) > 0 and level > level_heap[0][0]:
            heapq.heappush(level_heap, (level, line))
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


@allocating
def _queued_bytes(
    active_pairs: Any,
    remaining_bytes: Any,
    queued_bytes: Any,
    rate: Any,
    updated_s: Any,
    now: float,
) -> float:
    """Unsent bytes of a line's pairs."""
    total = 0.0
    for p in active_pairs:
        total += max(remaining_bytes[p] - rate[p] * (now - updated_s[p]), 0.0) + queued_bytes[p]
    return total


@allocating
def _mark_changed(is_changed: Any, changed_lines: Any, count: int, line: int) -> int:
    """Add a line to the list of changed lines unless it is in it; `NOTHING` is ignored."""
    if line != NOTHING and not is_changed[line]:
        is_changed[line] = True
        changed_lines[count] = line
        return count + 1
    return count


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
    """Simulate steps from an idle start.

    Parameters
    ----------
    steps
        ``int[T]``: the schedule of every step.
    averages
        ``bool[T]``: whether each step ends with averaging.
    """
    # unpacked once: every field access of a tuple would count a reference
    device, seconds, successor, pair = (
        operations.device,
        operations.seconds,
        operations.successor,
        operations.pair,
    )
    message_bytes, order, order_ptr, update_s = (
        operations.message_bytes,
        operations.order,
        operations.order_ptr,
        operations.update_s,
    )
    latency_s, max_rate, lines, capacity = (
        links.latency_s,
        links.max_rate,
        links.lines,
        links.capacity,
    )
    device_groups, device_ptr, members = rounds.device_groups, rounds.device_ptr, rounds.size
    load_ptr, load_line, load_bytes = rounds.load_ptr, rounds.load_line, rounds.load_bytes
    step_end, finished = times.step_end, times.finished_steps
    n, total, pairs, groups = len(update_s), len(device), len(max_rate), len(members)

    inputs_ready = np.zeros(total * len(steps), np.bool_)
    for m in range(len(inputs_ready)):
        inputs_ready[m] = operations.is_first[m % total]
    position, round_of = np.zeros(n, np.int64), np.zeros(n, np.int64)
    current = np.full(n, NOTHING, np.int64)
    # state of delayed averaging, and devices that have updated and wait for its end
    delayed_state, awaits_averaging = np.zeros(n, np.int64), np.zeros(n, np.bool_)
    busy, is_dirty = np.zeros(n, np.bool_), np.ones(n, np.bool_)
    dirty, num_dirty = np.arange(n), n

    head, tail = np.full(pairs, NOTHING, np.int64), np.full(pairs, NOTHING, np.int64)
    next_message = np.full(len(inputs_ready), NOTHING, np.int64)
    queued_s = np.zeros(len(inputs_ready))
    remaining_bytes, queued_bytes, rate = np.zeros(pairs), np.zeros(pairs), np.zeros(pairs)
    updated_s, send_end_s, scheduled_s = np.zeros(pairs), np.zeros(pairs), np.full(pairs, math.inf)
    fair, fixed, seen_pair = np.zeros(pairs), np.zeros(pairs, np.bool_), np.zeros(pairs, np.int64)

    # active pairs of line r: active[active_ptr[r] : active_ptr[r] + num_active[r]]
    active_ptr, num_active = (
        np.zeros(len(capacity) + 1, np.int64),
        np.zeros(len(capacity), np.int64),
    )
    for p in range(pairs):
        for k in range(lines.shape[1]):
            if lines[p, k] != NOTHING:
                active_ptr[lines[p, k] + 1] += 1
    active_ptr = np.cumsum(active_ptr)
    active = np.zeros(active_ptr[-1], np.int64)
    demand, residual = np.zeros(len(capacity)), np.zeros(len(capacity))
    unsaturated, seen_line = np.zeros(len(capacity), np.bool_), np.zeros(len(capacity), np.int64)
    affected, bottlenecks = np.zeros(pairs + 1, np.int64), np.zeros(len(capacity), np.int64)
    level_heap = [(0.0, 0)]
    level_heap.pop()
    stamp = 0

    # lines changed since rounds' speeds were computed, and (round, entry) by line
    is_changed, num_changed = np.zeros(len(capacity), np.bool_), 0
    changed_lines = np.zeros(len(capacity), np.int64)
    line_rounds_ptr = np.zeros(len(capacity) + 1, np.int64)
    for k in range(len(load_line)):
        line_rounds_ptr[load_line[k] + 1] += 1
    line_rounds_ptr = np.cumsum(line_rounds_ptr)
    line_rounds, filled = np.zeros((len(load_line), 2), np.int64), line_rounds_ptr.copy()
    for g in range(groups):
        for k in range(load_ptr[g], load_ptr[g + 1]):
            line_rounds[filled[load_line[k]]] = (g, k)
            filled[load_line[k]] += 1
    ready = np.zeros(groups, np.int64)
    is_sending, is_stale = np.zeros(groups, np.bool_), np.zeros(groups, np.bool_)
    running, num_sending = np.zeros(groups, np.int64), 0
    begin_s, alone_s, progress_s = np.zeros(groups), np.zeros(groups), np.zeros(groups)
    speed, speed_since_s, sent_s = np.zeros(groups), np.zeros(groups), np.zeros(groups)
    total_bytes, max_speed = np.zeros(len(load_line)), np.zeros(len(load_line))
    member_ptr = np.zeros(groups + 1, np.int64)
    for k in range(len(device_groups)):
        member_ptr[device_groups[k] + 1] += 1
    member_ptr = np.cumsum(member_ptr)
    member, filled = np.zeros(len(device_groups), np.int64), member_ptr.copy()
    for d in range(n):
        for k in range(device_ptr[d], device_ptr[d + 1]):
            member[filled[device_groups[k]]] = d
            filled[device_groups[k]] += 1

    norm, parts = NOTHING, 0
    norm_send_s, norm_receive_s = rounds.norm_send_s, rounds.norm_receive_s
    for d in range(n):
        if norm_send_s[d] >= 0:
            norm, parts = groups - 1, parts + 1
    # by step: number of parts of the norm sent, and when the last of them arrives
    parts_sent, norm_sum_s = np.zeros(len(steps), np.int64), np.zeros(len(steps))
    waiting_since_s = np.full(n, -1.0)

    pushed = 0
    events = [(0.0, 0, 0, 0)]
    events.pop()
    now = 0.0
    while True:
        for s in range(num_dirty):
            d = dirty[s]
            is_dirty[d] = False
            while delayed_state[d] == READY or (not busy[d] and finished[d] < len(steps)):
                t, averages_now = finished[d], False
                pushed += 1
                if delayed_state[d] == READY:
                    averages_now = device_ptr[d] + round_of[d] < device_ptr[d + 1]
                    delayed_state[d] = IN_ROUND if averages_now else NOT_AVERAGING
                elif awaits_averaging[d]:
                    if delayed_state[d] != NOT_AVERAGING:
                        break
                    awaits_averaging[d] = False
                    step_end[t] = max(step_end[t], now)
                    finished[d], position[d], round_of[d] = t + 1, 0, 0
                    delayed_state[d] = READY if averages[t] else NOT_AVERAGING
                elif order_ptr[steps[t] * n + d] + position[d] < order_ptr[steps[t] * n + d + 1]:
                    o = order[order_ptr[steps[t] * n + d] + position[d]]
                    if not inputs_ready[t * total + o]:
                        break
                    position[d] += 1
                    busy[d] = True
                    current[d] = o
                    heapq.heappush(events, (now + seconds[o], pushed, OPERATION_END, d))
                elif (
                    averages[t] and not delayed and device_ptr[d] + round_of[d] < device_ptr[d + 1]
                ):
                    averages_now = busy[d] = True
                elif update_s[d] > 0:
                    busy[d] = True
                    heapq.heappush(events, (now + update_s[d], pushed, UPDATE_END, d))
                elif delayed:
                    awaits_averaging[d] = True
                else:
                    step_end[t] = max(step_end[t], now)
                    finished[d], position[d], round_of[d] = t + 1, 0, 0
                if averages_now:
                    g = device_groups[device_ptr[d] + round_of[d]]
                    if g == norm:
                        waiting_since_s[d] = now
                        if norm_send_s[d] >= 0:
                            parts_sent[t] += 1
                            norm_sum_s[t] = max(norm_sum_s[t], now + norm_send_s[d])
                        if parts_sent[t] < parts:
                            continue
                        for e in range(n):
                            waiting = waiting_since_s[e] >= 0 and finished[e] == t
                            # send once to all that wait when the sum is complete, then to each
                            # later device
                            if waiting and (e == d or norm_send_s[d] >= 0):
                                known_s = max(now, norm_sum_s[t] + norm_receive_s[e])
                                pushed += 1
                                heapq.heappush(events, (known_s, pushed, NORM_RECEIVED, e))
                        continue
                    ready[g] += 1
                    if ready[g] < members[g]:
                        continue
                    ready[g] = 0
                    begin_s[g] = now
                    times.round_begin[g] = now
                    alone = rounds.alone_s[g]
                    for k in range(load_ptr[g], load_ptr[g + 1]):
                        line = load_line[k]
                        active_pairs = active[
                            active_ptr[line] : active_ptr[line] + num_active[line]
                        ]
                        queue = _queued_bytes(
                            active_pairs, remaining_bytes, queued_bytes, rate, updated_s, now
                        )
                        total_bytes[k] = _round32(load_bytes[k] + queue)
                        alone = max(alone, total_bytes[k] / capacity[line])
                        max_speed[k] = math.inf
                    alone_s[g], progress_s[g] = _round32(alone), 0.0
                    speed[g], speed_since_s[g], sent_s[g] = 1.0, now, now + alone_s[g]
                    is_sending[g] = True
                    for k in range(load_ptr[g], load_ptr[g + 1]):
                        line = load_line[k]
                        num_changed = _mark_changed(is_changed, changed_lines, num_changed, line)
                    running[num_sending] = g
                    num_sending += 1
                    heapq.heappush(events, (sent_s[g], pushed, ROUND_SENT, g))
        num_dirty = 0
        # messages queued after a round's begin keep their rates; rounds share the residual
        for c in range(num_changed):
            line = changed_lines[c]
            is_changed[line] = False
            for k in range(line_rounds_ptr[line], line_rounds_ptr[line + 1]):
                g, entry = line_rounds[k]
                if not is_sending[g]:
                    continue
                message_rate, other_rates, shared_line = 0.0, 0.0, False
                for j in range(line_rounds_ptr[line], line_rounds_ptr[line + 1]):
                    other, other_entry = line_rounds[j]
                    if is_sending[other] and other != g:
                        shared_line = True
                        if alone_s[other] > 0:
                            other_rates += _round32(load_bytes[other_entry] / alone_s[other])
                for p in active[active_ptr[line] : active_ptr[line] + num_active[line]]:
                    if queued_s[head[p]] > begin_s[g]:
                        message_rate += rate[p]
                max_speed[entry] = math.inf
                if message_rate > 0 or shared_line:
                    residual_rate = max(capacity[line] - message_rate, 0.0)
                    shared_bytes = total_bytes[entry] + other_rates * alone_s[g]
                    max_speed[entry] = residual_rate * alone_s[g] / shared_bytes
                is_stale[g] = True
        num_changed = 0
        for k in range(num_sending):
            g = running[k]
            if not is_stale[g]:
                continue
            is_stale[g] = False
            new_speed = 1.0
            for entry in range(load_ptr[g], load_ptr[g + 1]):
                new_speed = min(new_speed, max_speed[entry])
            if new_speed == speed[g]:
                continue
            progress_s[g] += speed[g] * (now - speed_since_s[g])
            speed[g], speed_since_s[g], sent_s[g] = new_speed, now, math.inf
            if new_speed > 0:
                sent_s[g] = now + max(alone_s[g] - progress_s[g], 0.0) / new_speed
                pushed += 1
                heapq.heappush(events, (sent_s[g], pushed, ROUND_SENT, g))
        if len(events) == 0:
            break
        now = events[0][0]
        while len(events) > 0 and events[0][0] == now:
            _, _, kind, subject = heapq.heappop(events)
            pushed += 1
            joining, woken, num_affected = NOTHING, NOTHING, 0
            if kind == OPERATION_END:
                d, o = subject, current[subject]
                busy[d], woken = False, d
                times.pipeline_end_s[0] = max(times.pipeline_end_s[0], now)
                message = finished[d] * total + o
                if successor[o] == NOTHING:
                    pass
                elif pair[o] == NOTHING:
                    inputs_ready[message - o + successor[o]] = True
                elif operations.message_s > 0:
                    heapq.heappush(
                        events, (now + operations.message_s, pushed, MESSAGE_QUEUED, message)
                    )
                else:
                    joining = message
            elif kind == MESSAGE_QUEUED:
                joining = subject
            elif kind == MESSAGE_SENT:
                p = subject
                if scheduled_s[p] != now:
                    continue
                scheduled_s[p] = math.inf
                if send_end_s[p] > now:
                    scheduled_s[p] = send_end_s[p]
                    heapq.heappush(events, (send_end_s[p], pushed, MESSAGE_SENT, p))
                    continue
                message = head[p]
                heapq.heappush(events, (now + latency_s[p], pushed, MESSAGE_ARRIVED, message))
                head[p] = next_message[message]
                for k in range(lines.shape[1]):
                    line = lines[p, k]
                    num_changed = _mark_changed(is_changed, changed_lines, num_changed, line)
                if head[p] != NOTHING:
                    remaining_bytes[p], updated_s[p] = message_bytes[head[p] % total], now
                    queued_bytes[p] = max(queued_bytes[p] - remaining_bytes[p], 0.0)
                    send_end_s[p] = now + remaining_bytes[p] / rate[p]
                    scheduled_s[p] = send_end_s[p]
                    pushed += 1
                    heapq.heappush(events, (send_end_s[p], pushed, MESSAGE_SENT, p))
                else:
                    # pairs that shared bottlenecks get more
                    stamp += 1
                    remaining_bytes[p], rate[p], queued_bytes[p] = 0.0, 0.0, 0.0
                    seen_pair[p] = stamp
                    for k in range(lines.shape[1]):
                        line = lines[p, k]
                        if line == NOTHING:
                            continue
                        was_scarce = demand[line] > capacity[line] * (1 + TOLERANCE)
                        num_active[line] -= 1
                        demand[line] = demand[line] - max_rate[p] if num_active[line] > 0 else 0.0
                        for a in range(active_ptr[line], active_ptr[line] + num_active[line]):
                            if active[a] == p:
                                active[a] = active[active_ptr[line] + num_active[line]]
                            q = active[a]
                            if was_scarce and seen_pair[q] != stamp:
                                seen_pair[q] = stamp
                                affected[num_affected] = q
                                num_affected += 1
            elif kind == MESSAGE_ARRIVED:
                o = subject % total
                inputs_ready[subject - o + successor[o]] = True
                woken = device[successor[o]]
            elif kind == ROUND_SENT:
                if not is_sending[subject] or sent_s[subject] != now:
                    continue
                is_sending[subject] = False
                for k in range(load_ptr[subject], load_ptr[subject + 1]):
                    line = load_line[k]
                    num_changed = _mark_changed(is_changed, changed_lines, num_changed, line)
                num_sending -= 1
                for k in range(num_sending):
                    if running[k] == subject:
                        running[k] = running[num_sending]
                times.round_end[subject] = now + rounds.round_trip_s[subject]
                heapq.heappush(events, (times.round_end[subject], pushed, ROUND_END, subject))
            elif kind == ROUND_END:
                for k in range(member_ptr[subject], member_ptr[subject + 1]):
                    d = member[k]
                    if delayed:
                        delayed_state[d] = READY
                    else:
                        busy[d] = False
                    round_of[d] += 1
                    if not is_dirty[d]:
                        is_dirty[d] = True
                        dirty[num_dirty] = d
                        num_dirty += 1
            elif kind == NORM_RECEIVED:
                busy[subject], woken, waiting_since_s[subject] = False, subject, -1.0
                round_of[subject] += 1
            else:
                d, t = subject, finished[subject]
                busy[d], woken = False, d
                if delayed:
                    awaits_averaging[d] = True
                else:
                    step_end[t] = max(step_end[t], now)
                    finished[d], position[d], round_of[d] = t + 1, 0, 0
            if woken != NOTHING and not is_dirty[woken]:
                is_dirty[woken] = True
                dirty[num_dirty] = woken
                num_dirty += 1
            if joining != NOTHING:
                p = pair[joining % total]
                queued_s[joining] = now
                next_message[joining] = NOTHING
                if head[p] != NOTHING:
                    next_message[tail[p]] = joining
                    tail[p] = joining
                    queued_bytes[p] += message_bytes[joining % total]
                else:
                    head[p], tail[p] = joining, joining
                    remaining_bytes[p], rate[p], updated_s[p] = (
                        message_bytes[joining % total],
                        0.0,
                        now,
                    )
                    for k in range(lines.shape[1]):
                        line = lines[p, k]
                        if line != NOTHING:
                            active[active_ptr[line] + num_active[line]] = p
                            num_active[line] += 1
                            demand[line] += max_rate[p]
                    stamp += 1
                    seen_pair[p] = stamp
                    affected[0] = p
                    num_affected = 1
            if num_affected == 0:
                continue
            num_affected, num_bottlenecks = _connected_pairs(
                num_affected,
                affected,
                bottlenecks,
                lines,
                active_ptr,
                num_active,
                active,
                demand,
                capacity,
                seen_pair,
                seen_line,
                stamp,
            )
            _max_min_rates(
                num_affected,
                num_bottlenecks,
                affected,
                bottlenecks,
                lines,
                active_ptr,
                num_active,
                active,
                max_rate,
                capacity,
                fixed,
                residual,
                unsaturated,
                fair,
                level_heap,
            )
            for k in range(num_affected):
                p = affected[k]
                if fair[p] == rate[p]:
                    continue
                remaining_bytes[p] = max(remaining_bytes[p] - rate[p] * (now - updated_s[p]), 0.0)
                updated_s[p], rate[p] = now, fair[p]
                send_end_s[p] = now + remaining_bytes[p] / rate[p]
                if send_end_s[p] < scheduled_s[p]:
                    # an early event is scheduled again when popped; a late one would be missed
                    scheduled_s[p] = send_end_s[p]
                    pushed += 1
                    heapq.heappush(events, (send_end_s[p], pushed, MESSAGE_SENT, p))
                for j in range(lines.shape[1]):
                    line = lines[p, j]
                    num_changed = _mark_changed(is_changed, changed_lines, num_changed, line)
