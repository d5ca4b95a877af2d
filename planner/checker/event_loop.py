"""The checker's clock at work: what happens next, until nothing does; compiled where numba is.

Written from the definition (docs/explanation/step-time-model.md), apart from the simulator that it
judges. Rates are settled line by line: every scarce line has a level at which its own pairs just
fill it; the pairs of the lowest such line get that level, or their most, and the other lines share
what then is left.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, NamedTuple

import numpy as np

from planner.search.arrays import Bools, Floats, Ints, Ints2
from planner.search.compiled import allocating, allocating_entry

NOTHING = -1
"""No operation, no pair, no line."""
EQUAL = 1e-9
"""Relative: a line whose pairs want no more beyond what it has is not scarce."""
KEPT = 2.0**21 + 1
"""Leaves 32 binary places of a number."""
DONE, JOINS, LEAVES, ARRIVES, FLOWN, AVERAGED, NORM, UPDATED = range(8)
"""An operation ends; a message joins its queue, may have left it, is there; a round may have sent
its last byte, is over; the norm is known to a device; an update ends."""

NONE, READY, INSIDE = range(3)
"""Of a device, with what is averaged beside its operations: nothing, before a round, in one."""


class CheckerOperations(NamedTuple):
    """Operations of all schedules.

    Attributes
    ----------
    device, seconds
        ``[O]``: who does each, and how long.
    after, pair, size
        ``[O]``: the microbatch's next operation; the pair and the bytes of the message that goes
        there, if it is on another device.
    begins
        ``bool[O]``: whether it waits for no other.
    order, first
        ``int[O]``, ``int[K * N + 1]``: operations in the order of schedule k's device d begin at
        ``first[k * N + d]``.
    update_s
        ``float[N]``.
    message_s
        Seconds before a message joins its queue.
    """

    device: Ints
    seconds: Floats
    after: Ints
    pair: Ints
    size: Floats
    begins: Bools
    order: Ints
    first: Ints
    update_s: Floats
    message_s: float


class CheckerLinks(NamedTuple):
    """Pairs that carry messages, and the lines that they share.

    Attributes
    ----------
    latency_s, most
        ``float[P]``: ``most`` is what a pair has by itself, in bytes per second.
    lines
        ``int[P, 4]``: lines of every pair.
    room
        ``float[L]``: capacity of every line.
    """

    latency_s: Floats
    most: Floats
    lines: Ints2
    room: Floats


class CheckerRounds(NamedTuple):
    """Averaging groups, in the order in which a device goes through them.

    Attributes
    ----------
    size
        ``int[G]``: members.
    first_of, of
        ``int[N + 1]``, and the groups of every device.
    alone_s, back_s
        ``float[G]``: bytes over bandwidth of the slowest pair, and the longest latency there and
        back.
    first, line, load
        ``int[G + 1]``, and the lines of every group with its bytes over them.
    to_sum_s, from_sum_s
        ``float[N]``: the way to where the norm is summed, negative for who has no part of it, and
        from there. Where updates wait for it, the last group is that in which they do.
    """

    size: Ints
    first_of: Ints
    of: Ints
    alone_s: Floats
    back_s: Floats
    first: Ints
    line: Ints
    load: Floats
    to_sum_s: Floats
    from_sum_s: Floats


class Happened(NamedTuple):
    """What a run tells.

    Attributes
    ----------
    step_end
        ``float[T]``.
    round_begin, round_end
        ``float[G]``: of the last step.
    last_operation_s
        ``float[1]``.
    steps
        ``int[N]``: steps that each device has done.
    """

    step_end: Floats
    round_begin: Floats
    round_end: Floats
    last_operation_s: Floats
    steps: Ints


@allocating
def _kept(x: float) -> float:
    """The nearest number of 32 binary places, which does not hang on the order of sums."""
    wide = x * KEPT
    return wide - (wide - x)


@allocating
def _level(using: Any, most: Any, settled: Any, left: float) -> float:
    """Where those pairs of a line that are not settled just fill what is left of it."""
    level, before = 0.0, -1
    while True:
        rest, over, under = left, 0, 0
        for p in using:
            if not settled[p]:
                if most[p] <= level:
                    rest -= most[p]
                    under += 1
                else:
                    over += 1
        if over == 0:
            return math.inf
        if under == before:
            return level
        before = under
        level = max(rest / over, 0.0)


@allocating
def _together(
    count: int,
    found: Any,
    scarce: Any,
    lines: Any,
    begin: Any,
    users: Any,
    active: Any,
    wanted: Any,
    room: Any,
    met: Any,
    met_line: Any,
    turn: int,
) -> tuple[int, int]:
    """All pairs that hang together with the first ``count`` through scarce lines."""
    full, k = 0, 0
    while k < count:
        p = found[k]
        k += 1
        for place in range(lines.shape[1]):
            line = lines[p, place]
            if line == NOTHING or met_line[line] == turn:
                continue
            met_line[line] = turn
            if wanted[line] <= room[line] * (1 + EQUAL):
                continue
            scarce[full] = line
            full += 1
            for q in active[begin[line] : begin[line] + users[line]]:
                if met[q] != turn:
                    met[q] = turn
                    found[count] = q
                    count += 1
    return count, full


@allocating
def _fair(
    count: int,
    full: int,
    found: Any,
    scarce: Any,
    lines: Any,
    begin: Any,
    users: Any,
    active: Any,
    most: Any,
    room: Any,
    settled: Any,
    left: Any,
    waits: Any,
    fair: Any,
    lowest: Any,
) -> None:
    """Max-min fair rates of pairs that share nothing scarce with others."""
    for k in range(count):
        settled[found[k]] = False
    for k in range(full):
        line = scarce[k]
        left[line] = room[line]
        waits[line] = True
        using = active[begin[line] : begin[line] + users[line]]
        heapq.heappush(lowest, (_level(using, most, settled, room[line]), line))
    floor = 0.0
    while len(lowest) > 0:
        before, line = heapq.heappop(lowest)
        if not waits[line]:
            continue
        # pairs settled since then took no more than before: the level can only have risen
        using = active[begin[line] : begin[line] + users[line]]
        level = _level(using, most, settled, left[line])
        if level > before and len(lowest) > 0 and level > lowest[0][0]:
            heapq.heappush(lowest, (level, line))
            continue
        waits[line] = False
        floor = level = max(level, floor)
        for p in using:
            if settled[p]:
                continue
            settled[p] = True
            share = min(level, most[p])
            fair[p] = _kept(share)
            for place in range(lines.shape[1]):
                other = lines[p, place]
                if other != NOTHING:
                    left[other] = left[other] - share
    for k in range(count):
        p = found[k]
        if not settled[p]:
            fair[p] = _kept(most[p])


@allocating
def _queued(using: Any, to_go: Any, behind: Any, rate: Any, since: Any, now: float) -> float:
    """Bytes that the pairs of a line still have to send."""
    total = 0.0
    for p in using:
        total += max(to_go[p] - rate[p] * (now - since[p]), 0.0) + behind[p]
    return total


@allocating
def _noted(changed: Any, which: Any, count: int, line: int) -> int:
    """A line on which something has changed, if there is one, is in the list once."""
    if line != NOTHING and not changed[line]:
        changed[line] = True
        which[count] = line
        return count + 1
    return count


@allocating_entry
def run(
    work: CheckerOperations,
    links: CheckerLinks,
    rounds: CheckerRounds,
    steps: Ints,
    averages: Bools,
    happened: Happened,
    delayed: bool,
) -> None:
    """Some steps from rest.

    Parameters
    ----------
    steps
        ``int[T]``: the schedule of every step.
    averages
        ``bool[T]``: whether they end with averaging.
    """
    # an array that is taken out of a tuple is counted each time: so once
    device, seconds, after, pair = work.device, work.seconds, work.after, work.pair
    size, order, first, update_s = work.size, work.order, work.first, work.update_s
    latency_s, most, lines, room = links.latency_s, links.most, links.lines, links.room
    of, first_of, members = rounds.of, rounds.first_of, rounds.size
    load_first, load_line, load = rounds.first, rounds.line, rounds.load
    step_end, finished = happened.step_end, happened.steps
    n, total, pairs, groups = len(update_s), len(device), len(most), len(members)

    there = np.zeros(total * len(steps), np.bool_)
    for m in range(len(there)):
        there[m] = work.begins[m % total]
    place, turn_of = np.zeros(n, np.int64), np.zeros(n, np.int64)
    doing = np.full(n, NOTHING, np.int64)
    # of what is averaged beside operations: none, ready for a round, in one; and who waits for it
    aside, closing = np.zeros(n, np.int64), np.zeros(n, np.bool_)
    busy, stirred = np.zeros(n, np.bool_), np.ones(n, np.bool_)
    stir, stirs = np.arange(n), n

    head, tail = np.full(pairs, NOTHING, np.int64), np.full(pairs, NOTHING, np.int64)
    behind_it = np.full(len(there), NOTHING, np.int64)
    joined = np.zeros(len(there))
    to_go, behind, rate = np.zeros(pairs), np.zeros(pairs), np.zeros(pairs)
    since, ends, asked = np.zeros(pairs), np.zeros(pairs), np.full(pairs, math.inf)
    fair, settled, met = np.zeros(pairs), np.zeros(pairs, np.bool_), np.zeros(pairs, np.int64)

    # the active pairs of a line are the first so many from its begin
    begin, users = np.zeros(len(room) + 1, np.int64), np.zeros(len(room), np.int64)
    for p in range(pairs):
        for k in range(lines.shape[1]):
            if lines[p, k] != NOTHING:
                begin[lines[p, k] + 1] += 1
    begin = np.cumsum(begin)
    active = np.zeros(begin[-1], np.int64)
    wanted, left = np.zeros(len(room)), np.zeros(len(room))
    waits, met_line = np.zeros(len(room), np.bool_), np.zeros(len(room), np.int64)
    found, scarce = np.zeros(pairs + 1, np.int64), np.zeros(len(room), np.int64)
    lowest = [(0.0, 0)]
    lowest.pop()
    turn = 0

    # lines on which something has changed since rounds were looked at, and rounds that they touch
    changed, changes = np.zeros(len(room), np.bool_), 0
    changed_ones = np.zeros(len(room), np.int64)
    touch_first = np.zeros(len(room) + 1, np.int64)
    for k in range(len(load_line)):
        touch_first[load_line[k] + 1] += 1
    touch_first = np.cumsum(touch_first)
    touch, filled = np.zeros((len(load_line), 2), np.int64), touch_first.copy()
    for g in range(groups):
        for k in range(load_first[g], load_first[g + 1]):
            touch[filled[load_line[k]]] = (g, k)
            filled[load_line[k]] += 1
    ready = np.zeros(groups, np.int64)
    sends, again = np.zeros(groups, np.bool_), np.zeros(groups, np.bool_)
    running, sending = np.zeros(groups, np.int64), 0
    begun, alone_s, over_s = np.zeros(groups), np.zeros(groups), np.zeros(groups)
    pace, paced, flies = np.zeros(groups), np.zeros(groups), np.zeros(groups)
    carried, allowed = np.zeros(len(load_line)), np.zeros(len(load_line))
    member_first = np.zeros(groups + 1, np.int64)
    for k in range(len(of)):
        member_first[of[k] + 1] += 1
    member_first = np.cumsum(member_first)
    member, filled = np.zeros(len(of), np.int64), member_first.copy()
    for d in range(n):
        for k in range(first_of[d], first_of[d + 1]):
            member[filled[of[k]]] = d
            filled[of[k]] += 1

    norm, parts = NOTHING, 0
    to_sum_s, from_sum_s = rounds.to_sum_s, rounds.from_sum_s
    for d in range(n):
        if to_sum_s[d] >= 0:
            norm, parts = groups - 1, parts + 1
    # by step: parts of the norm that were sent, and when the last of them has come
    sent, summed_s = np.zeros(len(steps), np.int64), np.zeros(len(steps))
    asks = np.full(n, -1.0)

    number = 0
    events = [(0.0, 0, 0, 0)]
    events.pop()
    now = 0.0
    while True:
        for s in range(stirs):
            d = stir[s]
            stirred[d] = False
            while aside[d] == READY or (not busy[d] and finished[d] < len(steps)):
                t, averages_now = finished[d], False
                number += 1
                if aside[d] == READY:
                    averages_now = first_of[d] + turn_of[d] < first_of[d + 1]
                    aside[d] = INSIDE if averages_now else NONE
                elif closing[d]:
                    if aside[d] != NONE:
                        break
                    closing[d] = False
                    step_end[t] = max(step_end[t], now)
                    finished[d], place[d], turn_of[d] = t + 1, 0, 0
                    aside[d] = READY if averages[t] else NONE
                elif first[steps[t] * n + d] + place[d] < first[steps[t] * n + d + 1]:
                    o = order[first[steps[t] * n + d] + place[d]]
                    if not there[t * total + o]:
                        break
                    place[d] += 1
                    busy[d] = True
                    doing[d] = o
                    heapq.heappush(events, (now + seconds[o], number, DONE, d))
                elif averages[t] and not delayed and first_of[d] + turn_of[d] < first_of[d + 1]:
                    averages_now = busy[d] = True
                elif update_s[d] > 0:
                    busy[d] = True
                    heapq.heappush(events, (now + update_s[d], number, UPDATED, d))
                elif delayed:
                    closing[d] = True
                else:
                    step_end[t] = max(step_end[t], now)
                    finished[d], place[d], turn_of[d] = t + 1, 0, 0
                if averages_now:
                    g = of[first_of[d] + turn_of[d]]
                    if g == norm:
                        asks[d] = now
                        if to_sum_s[d] >= 0:
                            sent[t] += 1
                            summed_s[t] = max(summed_s[t], now + to_sum_s[d])
                        if sent[t] < parts:
                            continue
                        for e in range(n):
                            waiting = asks[e] >= 0 and finished[e] == t
                            # once: those who wait when the sum is sure, then each who comes
                            if waiting and (e == d or to_sum_s[d] >= 0):
                                known_s = max(now, summed_s[t] + from_sum_s[e])
                                number += 1
                                heapq.heappush(events, (known_s, number, NORM, e))
                        continue
                    ready[g] += 1
                    if ready[g] < members[g]:
                        continue
                    ready[g] = 0
                    begun[g] = now
                    happened.round_begin[g] = now
                    alone = rounds.alone_s[g]
                    for k in range(load_first[g], load_first[g + 1]):
                        line = load_line[k]
                        using = active[begin[line] : begin[line] + users[line]]
                        queue = _queued(using, to_go, behind, rate, since, now)
                        carried[k] = _kept(load[k] + queue)
                        alone = max(alone, carried[k] / room[line])
                        allowed[k] = math.inf
                    alone_s[g], over_s[g] = _kept(alone), 0.0
                    pace[g], paced[g], flies[g] = 1.0, now, now + alone_s[g]
                    sends[g] = True
                    for k in range(load_first[g], load_first[g + 1]):
                        line = load_line[k]
                        changes = _noted(changed, changed_ones, changes, line)
                    running[sending] = g
                    sending += 1
                    heapq.heappush(events, (flies[g], number, FLOWN, g))
        stirs = 0
        # messages that joined after a round's begin keep their rates; rounds share the rest
        for c in range(changes):
            line = changed_ones[c]
            changed[line] = False
            for k in range(touch_first[line], touch_first[line + 1]):
                g, entry = touch[k]
                if not sends[g]:
                    continue
                taken, others, company = 0.0, 0.0, False
                for j in range(touch_first[line], touch_first[line + 1]):
                    other, its = touch[j]
                    if sends[other] and other != g:
                        company = True
                        if alone_s[other] > 0:
                            others += _kept(load[its] / alone_s[other])
                for p in active[begin[line] : begin[line] + users[line]]:
                    if joined[head[p]] > begun[g]:
                        taken += rate[p]
                allowed[entry] = math.inf
                if taken > 0 or company:
                    rest = max(room[line] - taken, 0.0)
                    all_of_them = carried[entry] + others * alone_s[g]
                    allowed[entry] = rest * alone_s[g] / all_of_them
                again[g] = True
        changes = 0
        for k in range(sending):
            g = running[k]
            if not again[g]:
                continue
            again[g] = False
            most_now = 1.0
            for entry in range(load_first[g], load_first[g + 1]):
                most_now = min(most_now, allowed[entry])
            if most_now == pace[g]:
                continue
            over_s[g] += pace[g] * (now - paced[g])
            pace[g], paced[g], flies[g] = most_now, now, math.inf
            if most_now > 0:
                flies[g] = now + max(alone_s[g] - over_s[g], 0.0) / most_now
                number += 1
                heapq.heappush(events, (flies[g], number, FLOWN, g))
        if len(events) == 0:
            break
        now = events[0][0]
        while len(events) > 0 and events[0][0] == now:
            _, _, kind, what = heapq.heappop(events)
            number += 1
            joins, wakes, count = NOTHING, NOTHING, 0
            if kind == DONE:
                d, o = what, doing[what]
                busy[d], wakes = False, d
                happened.last_operation_s[0] = max(happened.last_operation_s[0], now)
                message = finished[d] * total + o
                if after[o] == NOTHING:
                    pass
                elif pair[o] == NOTHING:
                    there[message - o + after[o]] = True
                elif work.message_s > 0:
                    heapq.heappush(events, (now + work.message_s, number, JOINS, message))
                else:
                    joins = message
            elif kind == JOINS:
                joins = what
            elif kind == LEAVES:
                p = what
                if asked[p] != now:
                    continue
                asked[p] = math.inf
                if ends[p] > now:
                    asked[p] = ends[p]
                    heapq.heappush(events, (ends[p], number, LEAVES, p))
                    continue
                message = head[p]
                heapq.heappush(events, (now + latency_s[p], number, ARRIVES, message))
                head[p] = behind_it[message]
                for k in range(lines.shape[1]):
                    line = lines[p, k]
                    changes = _noted(changed, changed_ones, changes, line)
                if head[p] != NOTHING:
                    to_go[p], since[p] = size[head[p] % total], now
                    behind[p] = max(behind[p] - to_go[p], 0.0)
                    ends[p] = now + to_go[p] / rate[p]
                    asked[p] = ends[p]
                    number += 1
                    heapq.heappush(events, (ends[p], number, LEAVES, p))
                else:
                    # those that shared what was scarce get more
                    turn += 1
                    to_go[p], rate[p], behind[p] = 0.0, 0.0, 0.0
                    met[p] = turn
                    for k in range(lines.shape[1]):
                        line = lines[p, k]
                        if line == NOTHING:
                            continue
                        was_scarce = wanted[line] > room[line] * (1 + EQUAL)
                        users[line] -= 1
                        wanted[line] = wanted[line] - most[p] if users[line] > 0 else 0.0
                        for a in range(begin[line], begin[line] + users[line]):
                            if active[a] == p:
                                active[a] = active[begin[line] + users[line]]
                            q = active[a]
                            if was_scarce and met[q] != turn:
                                met[q] = turn
                                found[count] = q
                                count += 1
            elif kind == ARRIVES:
                o = what % total
                there[what - o + after[o]] = True
                wakes = device[after[o]]
            elif kind == FLOWN:
                if not sends[what] or flies[what] != now:
                    continue
                sends[what] = False
                for k in range(load_first[what], load_first[what + 1]):
                    line = load_line[k]
                    changes = _noted(changed, changed_ones, changes, line)
                sending -= 1
                for k in range(sending):
                    if running[k] == what:
                        running[k] = running[sending]
                happened.round_end[what] = now + rounds.back_s[what]
                heapq.heappush(events, (happened.round_end[what], number, AVERAGED, what))
            elif kind == AVERAGED:
                for k in range(member_first[what], member_first[what + 1]):
                    d = member[k]
                    if delayed:
                        aside[d] = READY
                    else:
                        busy[d] = False
                    turn_of[d] += 1
                    if not stirred[d]:
                        stirred[d] = True
                        stir[stirs] = d
                        stirs += 1
            elif kind == NORM:
                busy[what], wakes, asks[what] = False, what, -1.0
                turn_of[what] += 1
            else:
                d, t = what, finished[what]
                busy[d], wakes = False, d
                if delayed:
                    closing[d] = True
                else:
                    step_end[t] = max(step_end[t], now)
                    finished[d], place[d], turn_of[d] = t + 1, 0, 0
            if wakes != NOTHING and not stirred[wakes]:
                stirred[wakes] = True
                stir[stirs] = wakes
                stirs += 1
            if joins != NOTHING:
                p = pair[joins % total]
                joined[joins] = now
                behind_it[joins] = NOTHING
                if head[p] != NOTHING:
                    behind_it[tail[p]] = joins
                    tail[p] = joins
                    behind[p] += size[joins % total]
                else:
                    head[p], tail[p] = joins, joins
                    to_go[p], rate[p], since[p] = size[joins % total], 0.0, now
                    for k in range(lines.shape[1]):
                        line = lines[p, k]
                        if line != NOTHING:
                            active[begin[line] + users[line]] = p
                            users[line] += 1
                            wanted[line] += most[p]
                    turn += 1
                    met[p] = turn
                    found[0] = p
                    count = 1
            if count == 0:
                continue
            count, full = _together(
                count, found, scarce, lines, begin, users, active, wanted, room, met, met_line, turn
            )
            _fair(
                count,
                full,
                found,
                scarce,
                lines,
                begin,
                users,
                active,
                most,
                room,
                settled,
                left,
                waits,
                fair,
                lowest,
            )
            for k in range(count):
                p = found[k]
                if fair[p] == rate[p]:
                    continue
                to_go[p] = max(to_go[p] - rate[p] * (now - since[p]), 0.0)
                since[p], rate[p] = now, fair[p]
                ends[p] = now + to_go[p] / rate[p]
                if ends[p] < asked[p]:
                    # an event that comes too early is asked again; one too late would be missed
                    asked[p] = ends[p]
                    number += 1
                    heapq.heappush(events, (ends[p], number, LEAVES, p))
                for place_of in range(lines.shape[1]):
                    line = lines[p, place_of]
                    changes = _noted(changed, changed_ones, changes, line)
