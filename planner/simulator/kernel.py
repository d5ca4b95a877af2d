"""The simulator's compiled event loop: devices, links that queue and share, averaging rounds.

Messages wait in one queue a pair; the first of each queue is on its way, at a rate that is max-min
fair among the active pairs of the resources it shares. A pair's rate is changed by others only
through a resource whose pairs together could ask for more than it has, so that only pairs connected
through such resources are looked at when one comes or goes.

Events at the same moment are taken in the order in which they came up; devices choose after all of
them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.search.compiled import entry, inlined, kernel
from planner.simulator.averaging_rounds import AveragingRounds
from planner.simulator.event_queue import pop, push, reschedule
from planner.simulator.pairs import Pairs
from planner.simulator.program import OperationTable
from planner.simulator.resources import MOST_SHARED, NONE
from planner.simulator.state import (
    AVERAGING,
    IDLE,
    UPDATE,
    AveragingState,
    DeviceState,
    EventQueue,
    EventTimes,
    FlowState,
    ProcessorState,
    RunOptions,
)

(
    COMPUTED,
    MESSAGE_QUEUED,
    MESSAGE_SENT,
    MESSAGE_ARRIVED,
    ROUND_SENT,
    ROUND_DONE,
    NORM_RECEIVED,
    UPDATED,
) = range(8)
"""Events: an operation is done; a message joins its queue, has left it, is there; a group's round
has sent its last byte, and is over; a device knows the norm; an optimizer step is done; the first
of the operations that share processors is done."""
KINDS = 16
"""An event is ``KINDS * subject + kind``. Slots of the event queue are for `MESSAGE_SENT` of every
pair, then for `ROUND_SENT` of every group, then for `PROCESSOR`."""

ROUNDING = 1e-9
"""Relative: a resource whose pairs want no more beyond what it has does not bind."""
SAME = 1e-12
"""Relative, of levels that differ by rounding alone."""
BELOW = 1.0 - 1e-6
"""Of a rate: what is below it beyond doubt."""
KEPT = 2.0**21 + 1
"""Leaves 32 binary places of a number."""
ZERO: Any = np.int64(0)
ONE: Any = np.int64(1)
PROCESSOR: Any = np.int64(UPDATED + 1)
"""No literals, for which numba would compile once more."""
SETTLED = -1
"""Value of ``seen_pair[p]`` once the rate of pair p is final in this pass, else its number."""


@kernel
def _round32(x: float) -> float:
    """The nearest number of 32 binary places.

    Queues that share amplify what rounding leaves, from 1e-16 to 1e-4 within four steps: rates are
    computed with all places, and then the same whatever the order of sums.
    """
    wide = x * KEPT
    return wide - (wide - x)


@inlined
def _is_bottleneck(capacity: Any, wanted: Any, r: int) -> bool:
    """Whether a resource's active pairs together could use more than it has."""
    return bool(wanted[r] > capacity[r] * (1 + ROUNDING))


@kernel
def _collect_affected(pairs: Any, flows: Any, found: int, least: float) -> tuple[int, int]:
    """Extend ``found`` pairs by all that are connected with them through resources that bind.

    Pairs with a rate below ``least`` keep it.
    """
    # arrays by themselves: taking one from a tuple takes time
    shared, begin, capacity = pairs.shared, pairs.first, pairs.capacity
    looked, scarce, active, users = flows.found, flows.full, flows.active, flows.users
    seen_resource, seen_pair, fair = flows.seen_resource, flows.seen_pair, flows.fair
    wanted, room, load, level = flows.wanted, flows.room, flows.load, flows.level
    full = 0
    stamp = flows.stamp[0]
    k = 0
    while k < found:
        p = looked[k]
        k += 1
        for place in range(MOST_SHARED):
            r = shared[p, place]
            if r == NONE or seen_resource[r] == stamp:
                continue
            seen_resource[r] = stamp
            if not _is_bottleneck(capacity, wanted, r):
                continue
            left, rising = capacity[r], 0
            for a in range(begin[r], begin[r] + users[r]):
                q = active[a]
                if 0.0 < fair[q] < least:
                    left -= fair[q]
                    continue
                rising += 1
                if seen_pair[q] != stamp:
                    seen_pair[q] = stamp
                    looked[found] = q
                    found += 1
            if rising > 0:
                scarce[full] = r
                full += 1
                room[r], load[r], level[r] = left, rising, left / rising
    return found, full


@kernel
def _set_rate(flows: Any, queue: Any, p: int, fair: float, now: float) -> None:
    rate = _round32(fair)
    flows.fair[p] = fair
    if rate == flows.rate[p]:
        return
    flows.to_go[p] = max(flows.to_go[p] - flows.rate[p] * (now - flows.since[p]), 0.0)
    flows.since[p] = now
    flows.rate[p] = rate
    flows.moved[0] = 1
    reschedule(queue, p, now + flows.to_go[p] / rate, KINDS * p + MESSAGE_SENT)


@inlined
def _freeze_rate(
    shared: Any, room: Any, load: Any, levels: Any, seen: Any, p: int, fair: float
) -> None:
    """A pair no longer rises: its resources have that much less for the others."""
    seen[p] = SETTLED
    for place in range(MOST_SHARED):
        r = shared[p, place]
        if r != NONE and load[r] > 0:
            room[r] -= fair
            load[r] -= 1
            if load[r] > 0:
                levels[r] = room[r] / load[r]


@kernel
def _recompute_rates(
    pairs: Any, flows: Any, queue: Any, found: int, least: float, now: float
) -> None:
    """New max-min fair rates of ``found`` pairs and all connected with them: all rise together.

    ``load`` counts a resource's rising pairs; 0 where it never binds. A pair whose rate is settled
    is no longer marked as seen. What changes does so from rate ``least`` on: whatever is settled
    before stays as it is.
    """
    found, full = _collect_affected(pairs, flows, found, least)
    most, shared, users_first = pairs.most, pairs.shared, pairs.first
    looked, scarce_ones, active, users = flows.found, flows.full, flows.active, flows.users
    room, load, levels, seen = flows.room, flows.load, flows.level, flows.seen_pair
    stamp = flows.stamp[0]
    lowest = np.inf
    for k in range(found):
        lowest = min(lowest, most[looked[k]])
    level = 0.0
    while lowest < np.inf:
        scarce, left = np.inf, 0
        for k in range(full):
            r = scarce_ones[k]
            if load[r] > 0:
                scarce_ones[left] = r
                left += 1
                scarce = min(scarce, levels[r])
        full = left
        level = max(level, min(lowest, scarce))
        upto = level * (1 + SAME)
        if scarce <= upto:
            for k in range(full):
                r = scarce_ones[k]
                if room[r] > upto * load[r]:
                    continue
                for a in range(users_first[r], users_first[r] + users[r]):
                    p = active[a]
                    if seen[p] == stamp:
                        fair = min(level, most[p])
                        _set_rate(flows, queue, p, fair, now)
                        _freeze_rate(shared, room, load, levels, seen, p, fair)
        if lowest <= upto or full == 0:
            # by their own bandwidth; the next lowest of those that rise on
            lowest, left = np.inf, 0
            for k in range(found):
                p = looked[k]
                if seen[p] != stamp:
                    continue
                if most[p] <= upto:
                    _set_rate(flows, queue, p, most[p], now)
                    _freeze_rate(shared, room, load, levels, seen, p, most[p])
                    continue
                looked[left] = p
                left += 1
                lowest = min(lowest, most[p])
            found = left


@kernel
def _saturation_level(pairs: Any, flows: Any, r: int) -> float:
    """The level at which a resource is full if pairs below it keep their rates and others rise.

    A pair that begins, with rate 0, rises.
    """
    first, level, rising = pairs.first[r], 0.0, -1
    while True:
        left, above = pairs.capacity[r], 0
        for a in range(first, first + flows.users[r]):
            fair = flows.fair[flows.active[a]]
            if 0.0 < fair < level:
                left -= fair
            else:
                above += 1
        if above == 0 or above == rising:
            return level
        rising, level = above, max(left / above, level)


@kernel
def _start(pairs: Any, flows: Any, queue: Any, p: int, now: float) -> None:
    """A pair becomes active: its queue was empty."""
    for place in range(MOST_SHARED):
        r = pairs.shared[p, place]
        if r != NONE:
            flows.place[p, place] = flows.users[r]
            flows.active[pairs.first[r] + flows.users[r]] = p
            flows.users[r] += 1
            flows.wanted[r] += _round32(pairs.most[p])
    flows.rate[p] = flows.fair[p] = 0.0
    flows.since[p] = now
    flows.stamp[0] += 1
    flows.seen_pair[p] = flows.stamp[0]
    flows.found[0] = p
    least = pairs.most[p]
    for place in range(MOST_SHARED):
        r = pairs.shared[p, place]
        if r != NONE and _is_bottleneck(pairs.capacity, flows.wanted, r):
            least = min(least, _saturation_level(pairs, flows, r))
    _recompute_rates(pairs, flows, queue, ONE, BELOW * least, now)


@kernel
def _stop(pairs: Any, flows: Any, queue: Any, p: int, now: float) -> None:
    """A pair's queue is empty: those that shared what was scarce get more."""
    flows.stamp[0] += 1
    stamp = flows.stamp[0]
    flows.seen_pair[p] = stamp
    least = BELOW * flows.fair[p]
    flows.rate[p] = flows.fair[p] = 0.0
    found = ZERO
    for place in range(MOST_SHARED):
        r = pairs.shared[p, place]
        if r == NONE:
            continue
        first = pairs.first[r]
        scarce = _is_bottleneck(pairs.capacity, flows.wanted, r)
        # the last of the list takes its place
        last = flows.active[first + flows.users[r] - 1]
        flows.active[first + flows.place[p, place]] = last
        for other in range(MOST_SHARED):
            if pairs.shared[last, other] == r:
                flows.place[last, other] = flows.place[p, place]
        flows.users[r] -= 1
        flows.wanted[r] -= _round32(pairs.most[p])
        if not scarce:
            continue
        for a in range(first, first + flows.users[r]):
            q = flows.active[a]
            if flows.seen_pair[q] != stamp and flows.fair[q] >= least:
                flows.seen_pair[q] = stamp
                flows.found[found] = q
                found += 1
    _recompute_rates(pairs, flows, queue, found, least, now)


@kernel
def _unsent(flows: Any, p: int, now: float) -> float:
    """Bytes of a pair's queue that have not left."""
    if flows.head[p] == NONE:
        return 0.0
    return float(
        max(flows.to_go[p] - flows.rate[p] * (now - flows.since[p]), 0.0) + flows.behind[p]
    )


@inlined
def _requested_rate(rounds: Any, alone_s: float, k: int) -> float:
    """Bytes per second of a round over a resource, if it is the only one."""
    return float(_round32(rounds.need[k] / alone_s)) if alone_s > 0.0 else 0.0


@kernel
def _begin_round(
    pairs: Any, rounds: Any, flows: Any, averaging: Any, queue: Any, g: int, now: float
) -> None:
    """The last member is ready.

    All of the round's bytes keep their proportions, and with nothing else to come take the largest
    (bytes of the round + pipeline bytes still queued) / capacity over all resources.
    """
    longest = rounds.pair_s[g]
    for k in range(rounds.pair_first[g], rounds.pair_first[g + 1]):
        p = rounds.pair[k]
        size = rounds.pair_need[k]
        if size > 0:
            longest = max(longest, (size + _unsent(flows, p, now)) / pairs.bandwidth[p])
    for k in range(rounds.need_first[g], rounds.need_first[g + 1]):
        r = rounds.resource[k]
        size = rounds.need[k]
        for a in range(pairs.first[r], pairs.first[r] + flows.users[r]):
            size += _unsent(flows, flows.active[a], now)
        averaging.load[k] = _round32(size)
        longest = max(longest, averaging.load[k] / pairs.capacity[r])
    longest = _round32(longest)
    for k in range(rounds.need_first[g], rounds.need_first[g + 1]):
        r = rounds.resource[k]
        averaging.asked[r] += _requested_rate(rounds, longest, k)
        averaging.users[r] += 1
        if averaging.users[r] > 1:
            flows.moved[0] = 1
    averaging.begun[g] = now
    averaging.alone_s[g] = longest
    averaging.done[g] = 0.0
    averaging.since[g] = now
    averaging.rate[g] = 1.0
    averaging.place[g] = averaging.groups[0]
    averaging.running[averaging.groups[0]] = g
    averaging.groups[0] += 1
    reschedule(queue, len(pairs.most) + g, now + longest, KINDS * g + ROUND_SENT)


@kernel
def _end_round(rounds: Any, flows: Any, averaging: Any, g: int) -> None:
    """The round's last byte has left."""
    for k in range(rounds.need_first[g], rounds.need_first[g + 1]):
        r = rounds.resource[k]
        averaging.asked[r] -= _requested_rate(rounds, averaging.alone_s[g], k)
        averaging.users[r] -= 1
        if averaging.users[r] > 0:
            flows.moved[0] = 1
    averaging.groups[0] -= 1
    last = averaging.running[averaging.groups[0]]
    averaging.running[averaging.place[g]] = last
    averaging.place[last] = averaging.place[g]


@kernel
def _round_rate(pairs: Any, rounds: Any, flows: Any, averaging: Any, g: int) -> float:
    """How fast a round goes, as a part of its speed alone.

    Messages that were handed over after its begin keep their rates. The rest is the round's, or all
    rounds' in proportion to what each would send alone, where they share a site's line.
    """
    rate = 1.0
    for k in range(rounds.need_first[g], rounds.need_first[g + 1]):
        r = rounds.resource[k]
        taken = 0.0
        for a in range(pairs.first[r], pairs.first[r] + flows.users[r]):
            p = flows.active[a]
            if flows.handed[flows.head[p]] > averaging.begun[g]:
                taken += flows.rate[p]
        if taken > 0.0 or averaging.users[r] > 1:
            alone_s = averaging.alone_s[g]
            left = max(pairs.capacity[r] - taken, 0.0)
            others = averaging.asked[r] - _requested_rate(rounds, alone_s, k)
            rate = min(rate, left * alone_s / (averaging.load[k] + others * alone_s))
    return rate


@kernel
def _renew_rounds(
    pairs: Any, rounds: Any, flows: Any, averaging: Any, queue: Any, now: float
) -> None:
    """After a change of the messages under way."""
    flows.moved[0] = 0
    for k in range(averaging.groups[0]):
        g = averaging.running[k]
        rate = _round_rate(pairs, rounds, flows, averaging, g)
        if rate == averaging.rate[g]:
            continue
        averaging.done[g] += averaging.rate[g] * (now - averaging.since[g])
        averaging.since[g] = now
        averaging.rate[g] = rate
        over = np.inf
        if rate > 0.0:
            over = now + max(averaging.alone_s[g] - averaging.done[g], 0.0) / rate
        reschedule(queue, len(pairs.most) + g, over, KINDS * g + ROUND_SENT)


@kernel
def _processor_rate(cores: float, processors: Any) -> float:
    return float(min(1.0, cores / max(processors.size[0], 1)))


@kernel
def _earliest_end(processors: Any) -> int:
    """Place of the operation that is done first, of equals the one that began first."""
    first = 0
    for k in range(1, processors.size[0]):
        if processors.until[k] < processors.until[first] or (
            processors.until[k] == processors.until[first]
            and processors.number[k] < processors.number[first]
        ):
            first = k
    return first


@kernel
def _next_end(processors: Any, queue: Any, cores: float, now: float) -> None:
    """When the next operation ends, as long as none comes or goes."""
    if processors.size[0] > 0:
        rest = max(processors.until[_earliest_end(processors)] - processors.state[0], 0.0)
        rate = _processor_rate(cores, processors)
        reschedule(queue, len(queue.at) - 1, now + rest / rate, PROCESSOR)


@kernel
def _advance(processors: Any, cores: float, now: float) -> None:
    state = processors.state
    state[0] += (now - state[1]) * _processor_rate(cores, processors)
    state[1] = now


@kernel
def _begin_shared(processors: Any, queue: Any, event: int, seconds: float) -> None:
    """One more operation that shares processors."""
    queue.pushed[0] += 1
    k = processors.size[0]
    processors.size[0] = k + 1
    processors.until[k] = processors.state[0] + seconds
    processors.number[k] = queue.pushed[0]
    processors.event[k] = event


@kernel
def _end_shared(processors: Any) -> Any:
    """The event of the operation that is done first, which no longer shares processors."""
    first = _earliest_end(processors)
    event = processors.event[first]
    processors.state[0] = processors.until[first]
    processors.size[0] -= 1
    last = processors.size[0]
    processors.until[first] = processors.until[last]
    processors.number[first] = processors.number[last]
    processors.event[first] = processors.event[last]
    return event


@inlined
def _begin(
    rules: Any, processors: Any, queue: Any, d: int, seconds: float, kind: int, now: float
) -> None:
    """A device starts to work for so many seconds of a processor of its own."""
    if rules.cores == 0:
        push(queue, now + seconds, KINDS * d + kind)
        return
    _advance(processors, rules.cores, now)
    _begin_shared(processors, queue, KINDS * d + kind, seconds)
    _next_end(processors, queue, rules.cores, now)


@inlined
def _mark_dirty(devices: Any, touched: int, d: int) -> int:
    if devices.mark[d]:
        return touched
    devices.mark[d] = True
    devices.touched[touched] = d
    return touched + 1


@inlined
def _make_ready(work: Any, rules: Any, devices: Any, message: int) -> None:
    """What an operation waited for is there; ``message`` numbers it over all steps."""
    devices.there[message] = True
    if len(rules.room) == 0:
        return
    o = message % len(work.device)
    d, kind = work.device[o], work.kind[o]
    devices.behind[message] = NONE
    if devices.waiting[d, kind] == NONE:
        devices.waiting[d, kind] = message
    else:
        devices.behind[devices.last[d, kind]] = message
    devices.last[d, kind] = message


@inlined
def _next_chosen(work: Any, rules: Any, devices: Any, times: Any, d: int) -> int:
    """With free choice: B before H before F, first come first served; -1: nothing can begin."""
    for kind in range(3):
        o = devices.waiting[d, kind]
        if o == NONE or (kind == 2 and devices.live[d] >= rules.room[d]):
            continue
        devices.waiting[d, kind] = devices.behind[o]
        times.chosen[work.first[d] + times.done[d]] = o
        times.done[d] += 1
        return int(o)
    return NONE


@inlined
def _next_planned(work: Any, rules: Any, devices: Any, d: int) -> int:
    """The next operation in the planned order, -1 while what it needs is not there."""
    total = len(work.device)
    t = devices.step[d]
    row = rules.steps[t] * len(work.update_s) + d
    o = work.order[work.first[row] + devices.place[d]]
    if devices.there[t * total + o]:
        return int(o)
    return NONE


@inlined
def _has_more(work: Any, rules: Any, devices: Any, d: int) -> bool:
    row = rules.steps[devices.step[d]] * len(work.update_s) + d
    return bool(devices.place[d] < work.first[row + 1] - work.first[row])


@inlined
def _finish_step(
    work: Any, rules: Any, rounds: Any, devices: Any, times: Any, d: int, now: float
) -> None:
    t = devices.step[d]
    times.step_end[t] = max(times.step_end[t], now)
    if t < rules.recorded:
        times.update_end[t, d] = now
    devices.step[d] += 1
    devices.place[d] = 0
    devices.round[d] = 0
    devices.doing[d] = IDLE


@kernel
def _join(
    pairs: Any,
    rounds: Any,
    rules: Any,
    devices: Any,
    flows: Any,
    averaging: Any,
    queue: Any,
    times: Any,
    g: int,
    t: int,
    now: float,
) -> None:
    """A device is ready for a round of step t, which begins with the last one."""
    devices.present[g] += 1
    if devices.present[g] < rounds.size[g]:
        return
    devices.present[g] = 0
    averaging.step[g] = t
    if t < rules.recorded:
        times.round_begin[t, g] = now
        times.round_end[t, g] = now
    if rounds.size[g] > 1:
        _begin_round(pairs, rounds, flows, averaging, queue, g, now)
    else:
        push(queue, now, KINDS * g + ROUND_DONE)


@kernel
def _join_norm(
    rounds: Any,
    rules: Any,
    devices: Any,
    averaging: Any,
    queue: Any,
    times: Any,
    d: int,
    t: int,
    now: float,
) -> None:
    """A device waits for the norm, and may be the last to tell its part of it."""
    g = rounds.norm
    if t < rules.recorded:
        times.round_begin[t, g] = times.round_end[t, g] = now
    if averaging.told[t] == rounds.tellers:
        push(queue, max(now, averaging.added_s[t] + rounds.told_s[d]), KINDS * d + NORM_RECEIVED)
    elif rounds.tells_s[d] >= 0.0:
        averaging.told[t] += 1
        averaging.added_s[t] = max(averaging.added_s[t], now + rounds.tells_s[d])
        if averaging.told[t] < rounds.tellers:
            return
        # all who wait will be told
        for other in range(len(rounds.tells_s)):
            k = rounds.of_first[other] + devices.round[other]
            waits = devices.doing[other] == AVERAGING and devices.step[other] == t
            if waits and k < rounds.of_first[other + 1] and rounds.of[k] == g:
                push(
                    queue,
                    averaging.added_s[t] + rounds.told_s[other],
                    KINDS * other + NORM_RECEIVED,
                )


@kernel
def _advance_delayed_averaging(
    pairs: Any,
    work: Any,
    rounds: Any,
    rules: Any,
    devices: Any,
    flows: Any,
    averaging: Any,
    queue: Any,
    times: Any,
    d: int,
    now: float,
) -> None:
    """What is averaged beside operations goes on; a step that waited for its end ends.

    With the end of a step begins its own averaging.
    """
    over = rounds.of_first[d] + devices.round[d] == rounds.of_first[d + 1]
    if over and not devices.joined[d]:
        devices.beside[d] = NONE
    if devices.doing[d] == AVERAGING and devices.beside[d] == NONE:
        t = devices.step[d]
        _finish_step(work, rules, rounds, devices, times, d, now)
        if rules.averages[t] and rounds.of_first[d] < rounds.of_first[d + 1]:
            devices.beside[d] = t
    if devices.beside[d] != NONE and not devices.joined[d]:
        devices.joined[d] = True
        g = rounds.of[rounds.of_first[d] + devices.round[d]]
        step = devices.beside[d]
        _join(pairs, rounds, rules, devices, flows, averaging, queue, times, g, step, now)


@inlined
def _advance_device(
    pairs: Any,
    work: Any,
    rounds: Any,
    rules: Any,
    devices: Any,
    flows: Any,
    averaging: Any,
    processors: Any,
    queue: Any,
    times: Any,
    d: int,
    now: float,
) -> None:
    """Let an idle device do what comes next, until it works or waits."""
    if rules.delayed:
        _advance_delayed_averaging(
            pairs, work, rounds, rules, devices, flows, averaging, queue, times, d, now
        )
    while devices.doing[d] == IDLE and devices.step[d] < len(rules.steps):
        t = devices.step[d]
        if _has_more(work, rules, devices, d):
            if len(rules.room) > 0:
                o = _next_chosen(work, rules, devices, times, d)
            else:
                o = _next_planned(work, rules, devices, d)
            if o == NONE:
                return
            devices.place[d] += 1
            devices.live[d] += 1 if work.kind[o] == 2 else 0
            devices.doing[d] = o
            if t < rules.recorded:
                times.begin[t, o] = now
            _begin(rules, processors, queue, d, work.seconds[o], COMPUTED, now)
            return
        if devices.round[d] == 0 and t < rules.recorded:
            times.ready[t, d] = now
        first = rounds.of_first[d] + devices.round[d]
        if rules.averages[t] and not rules.delayed and first < rounds.of_first[d + 1]:
            devices.doing[d] = AVERAGING
            g = rounds.of[first]
            if g == rounds.norm:
                _join_norm(rounds, rules, devices, averaging, queue, times, d, t, now)
            else:
                _join(pairs, rounds, rules, devices, flows, averaging, queue, times, g, t, now)
            return
        if t < rules.recorded:
            times.update_begin[t, d] = now
        if work.update_s[d] > 0:
            devices.doing[d] = UPDATE
            _begin(rules, processors, queue, d, work.update_s[d], UPDATED, now)
            return
        if rules.delayed:
            devices.doing[d] = AVERAGING
            _advance_delayed_averaging(
                pairs, work, rounds, rules, devices, flows, averaging, queue, times, d, now
            )
        else:
            _finish_step(work, rules, rounds, devices, times, d, now)


@inlined
def _enqueue_message(
    pairs: Any,
    work: Any,
    rules: Any,
    flows: Any,
    queue: Any,
    times: Any,
    message: int,
    now: float,
) -> None:
    """A message joins its pair's queue; ``message`` numbers the operation that gave it."""
    total = len(work.device)
    t, o = message // total, message % total
    p, size = work.pair[o], work.size[o]
    if t < rules.recorded:
        times.handed[t, o] = now
    if not rules.queues:
        if t < rules.recorded:
            times.leaves[t, o] = now
            times.left[t, o] = now + size / pairs.most[p]
        arrives = now + pairs.latency_s[p] + size / pairs.most[p]
        push(queue, arrives, KINDS * message + MESSAGE_ARRIVED)
        return
    flows.follow[message] = NONE
    flows.handed[message] = now
    if flows.head[p] == NONE:
        flows.head[p] = message
        flows.tail[p] = message
        flows.to_go[p] = size
        flows.behind[p] = 0.0
        if t < rules.recorded:
            times.leaves[t, o] = now
        _start(pairs, flows, queue, p, now)
    else:
        flows.follow[flows.tail[p]] = message
        flows.tail[p] = message
        flows.behind[p] += size


@inlined
def _dequeue_message(
    pairs: Any, work: Any, rules: Any, flows: Any, queue: Any, times: Any, p: int, now: float
) -> None:
    """The first message of a queue has left; the next one is on its way."""
    total = len(work.device)
    message = flows.head[p]
    t, o = message // total, message % total
    if t < rules.recorded:
        times.left[t, o] = now
    push(queue, now + pairs.latency_s[p], KINDS * message + MESSAGE_ARRIVED)
    after = flows.follow[message]
    flows.head[p] = after
    flows.moved[0] = 1
    if after == NONE:
        _stop(pairs, flows, queue, p, now)
        return
    t, o = after // total, after % total
    flows.to_go[p] = work.size[o]
    flows.behind[p] = max(flows.behind[p] - work.size[o], 0.0)
    flows.since[p] = now
    if t < rules.recorded:
        times.leaves[t, o] = now
    reschedule(queue, p, now + flows.to_go[p] / flows.rate[p], KINDS * p + MESSAGE_SENT)


@inlined
def _computed(
    work: Any, rules: Any, devices: Any, queue: Any, times: Any, d: int, now: float
) -> int:
    """An operation is done; returns the message that it hands over at once, if any."""
    o, t = devices.doing[d], devices.step[d]
    devices.doing[d] = IDLE
    devices.live[d] -= 1 if work.kind[o] == 0 else 0
    if t < rules.recorded:
        times.end[t, o] = now
    if work.after[o] == NONE:
        return NONE
    message = t * len(work.device) + o
    if work.pair[o] == NONE:
        _make_ready(work, rules, devices, message - o + work.after[o])
        return NONE
    if rules.message_s > 0:
        push(queue, now + rules.message_s, KINDS * message + MESSAGE_QUEUED)
        return NONE
    return int(message)


@entry
def run(
    pairs: Pairs,
    work: OperationTable,
    rounds: AveragingRounds,
    rules: RunOptions,
    devices: DeviceState,
    flows: FlowState,
    averaging: AveragingState,
    times: EventTimes,
    processors: ProcessorState,
    queue: EventQueue,
) -> None:
    """Let the simulator run until nothing more can happen; ``times`` is filled in place."""
    total, n = len(work.device), len(work.update_s)
    for t in range(len(rules.steps)):
        for row in range(rules.steps[t] * n, (rules.steps[t] + 1) * n):
            for k in range(work.first[row], work.first[row + 1]):
                if len(rules.room) == 0 and work.begins[work.order[k]]:
                    devices.there[t * total + work.order[k]] = True
    if len(rules.room) > 0:
        for o in range(total):
            if work.begins[o]:
                _make_ready(work, rules, devices, o)
    # called at one place each, what is put in line is compiled once
    now, touched = 0.0, 0
    for d in range(n):
        touched = _mark_dirty(devices, touched, d)
    while True:
        for k in range(touched):
            d = devices.touched[k]
            devices.mark[d] = False
            _advance_device(
                pairs,
                work,
                rounds,
                rules,
                devices,
                flows,
                averaging,
                processors,
                queue,
                times,
                d,
                now,
            )
        if flows.moved[0] > 0:
            # rounds that have begun
            _renew_rounds(pairs, rounds, flows, averaging, queue, now)
        if queue.size[0] == 0 or queue.time[0] == np.inf:
            break
        now, touched = queue.time[0], 0
        while queue.size[0] > 0 and queue.time[0] == now:
            event = pop(queue)
            if event == PROCESSOR:
                _advance(processors, rules.cores, now)
                event = _end_shared(processors)
                _next_end(processors, queue, rules.cores, now)
            kind, subject = event % KINDS, event // KINDS
            if kind == COMPUTED:
                # what stays on the device is there now
                touched = _mark_dirty(devices, touched, subject)
                subject = _computed(work, rules, devices, queue, times, subject, now)
                if subject == NONE:
                    continue
                kind = MESSAGE_QUEUED
            if kind == MESSAGE_QUEUED:
                _enqueue_message(pairs, work, rules, flows, queue, times, subject, now)
            elif kind == MESSAGE_SENT:
                _dequeue_message(pairs, work, rules, flows, queue, times, subject, now)
            elif kind == MESSAGE_ARRIVED:
                t, o = subject // total, subject % total
                if t < rules.recorded:
                    times.arrived[t, o] = now
                _make_ready(work, rules, devices, t * total + work.after[o])
                touched = _mark_dirty(devices, touched, work.device[work.after[o]])
            elif kind == ROUND_SENT:
                _end_round(rounds, flows, averaging, subject)
                t, over = averaging.step[subject], now + rounds.return_s[subject]
                if t < rules.recorded:
                    times.round_end[t, subject] = over
                push(queue, over, KINDS * subject + ROUND_DONE)
            elif kind == ROUND_DONE:
                for d in range(n):
                    first = rounds.of_first[d] + devices.round[d]
                    waits = devices.joined[d] or (
                        devices.doing[d] == AVERAGING and not rules.delayed
                    )
                    if waits and first < rounds.of_first[d + 1] and rounds.of[first] == subject:
                        if rules.delayed:
                            devices.joined[d] = False
                        else:
                            devices.doing[d] = IDLE
                        devices.round[d] += 1
                        touched = _mark_dirty(devices, touched, d)
            elif kind == NORM_RECEIVED:
                devices.doing[subject] = IDLE
                devices.round[subject] += 1
                touched = _mark_dirty(devices, touched, subject)
            else:
                if rules.delayed:
                    devices.doing[subject] = AVERAGING
                else:
                    _finish_step(work, rules, rounds, devices, times, subject, now)
                touched = _mark_dirty(devices, touched, subject)
        if flows.moved[0] > 0:
            _renew_rounds(pairs, rounds, flows, averaging, queue, now)
    for d in range(n):
        # not who waits for others to average, but who waits for an operation
        waits = devices.step[d] < len(rules.steps) and _has_more(work, rules, devices, d)
        if waits and times.stuck[0] == NONE:
            times.stuck[0] = d
