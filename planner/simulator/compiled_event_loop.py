"""Compiled event loop of the simulator: devices, queueing shared links, averaging rounds.

Each ordered pair of devices has a FIFO message queue; its first message is in transit at the pair's
max-min fair rate over the resources that it shares. Pairs influence each other's rates only through
bottlenecks (resources whose active pairs together could use more than the capacity), so only the
pairs connected through bottlenecks are recomputed when a pair becomes active or inactive.

Events at the same time are handled in the order in which they were pushed; devices choose their
next operation after all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.search.arrays import Floats, Ints, Ints2
from planner.search.compiled import entry, inlined, kernel
from planner.simulator.averaging_rounds import AveragingRounds
from planner.simulator.event_queue import pop, push, reschedule
from planner.simulator.pairs import Pairs
from planner.simulator.program import OperationTable
from planner.simulator.resources import NONE
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
"""Event kinds: an operation ends; a message joins its queue, leaves it, arrives; a round sends its
last byte, and ends; a device receives the gradient norm; an optimizer step ends. The event
`PROCESSOR` is the end of the first of the operations that share processors."""
EVENT_STRIDE = 16
"""An event is encoded as ``EVENT_STRIDE * subject + kind``. Slots of the event queue:
`MESSAGE_SENT` of every pair, then `ROUND_SENT` of every group, then `PROCESSOR`."""

ROUNDING = 1e-9
"""Relative: a demand that exceeds a capacity by no more than this is no bottleneck."""
LEVEL_TOLERANCE = 1e-12
"""Relative: fill levels this close are equal up to rounding."""
RATE_MARGIN = 1.0 - 1e-6
"""A rate below this multiple of another is lower beyond rounding."""
SPLIT32 = 2.0**21 + 1
"""Factor of Veltkamp's splitting that keeps the upper 32 bits of a significand."""
ZERO: Any = np.int64(0)
ONE: Any = np.int64(1)
PROCESSOR: Any = np.int64(UPDATED + 1)
"""Typed constants: numba would compile another version for a literal argument."""
FROZEN = -1
"""Value of ``seen_pair[p]`` once the rate of pair p is final in this pass; before, the stamp."""


@kernel
def _round32(x: float) -> float:
    """Round to a significand of 32 bits.

    Shared queues amplify rounding errors, from 1e-16 to 1e-4 within four steps. Rates are computed
    in full precision and then rounded, so that they do not depend on the order of summation.
    """
    wide = x * SPLIT32
    return wide - (wide - x)


@inlined
def _is_bottleneck(capacity: Floats, demand: Floats, r: int) -> bool:
    """Whether a resource's active pairs together could use more than its capacity."""
    return bool(demand[r] > capacity[r] * (1 + ROUNDING))


@kernel
def _collect_affected(
    pairs: Pairs, flows: FlowState, num_affected: int, threshold: float
) -> tuple[int, int]:
    """Extend the affected pairs by all that are connected with them through bottlenecks.

    Pairs with a rate below ``threshold`` keep it.
    """
    # local names: reading a tuple's field in the loop costs time
    shared, resource_ptr, capacity = pairs.shared, pairs.resource_ptr, pairs.capacity
    affected, bottlenecks, active, num_active = (
        flows.affected,
        flows.bottlenecks,
        flows.active,
        flows.num_active,
    )
    seen_resource, seen_pair, fair_rate = flows.seen_resource, flows.seen_pair, flows.fair_rate
    demand, residual, num_rising, fill_level = (
        flows.demand,
        flows.residual,
        flows.num_rising,
        flows.fill_level,
    )
    num_bottlenecks = 0
    stamp = flows.stamp[0]
    k = 0
    while k < num_affected:
        p = affected[k]
        k += 1
        for j in range(shared.shape[1]):
            r = shared[p, j]
            if r == NONE or seen_resource[r] == stamp:
                continue
            seen_resource[r] = stamp
            if not _is_bottleneck(capacity, demand, r):
                continue
            residual_rate, rising = capacity[r], 0
            for a in range(resource_ptr[r], resource_ptr[r] + num_active[r]):
                q = active[a]
                if 0.0 < fair_rate[q] < threshold:
                    residual_rate -= fair_rate[q]
                    continue
                rising += 1
                if seen_pair[q] != stamp:
                    seen_pair[q] = stamp
                    affected[num_affected] = q
                    num_affected += 1
            if rising > 0:
                bottlenecks[num_bottlenecks] = r
                num_bottlenecks += 1
                residual[r], num_rising[r] = residual_rate, rising
                fill_level[r] = residual_rate / rising
    return num_affected, num_bottlenecks


@kernel
def _set_rate(flows: FlowState, queue: EventQueue, p: int, fair_rate: float, now: float) -> None:
    rate = _round32(fair_rate)
    flows.fair_rate[p] = fair_rate
    if rate == flows.rate[p]:
        return
    flows.remaining_bytes[p] = max(
        flows.remaining_bytes[p] - flows.rate[p] * (now - flows.updated_s[p]), 0.0
    )
    flows.updated_s[p] = now
    flows.rate[p] = rate
    flows.changed[0] = 1
    reschedule(queue, p, now + flows.remaining_bytes[p] / rate, EVENT_STRIDE * p + MESSAGE_SENT)


@inlined
def _freeze_rate(
    shared: Ints2,
    residual: Floats,
    num_rising: Ints,
    fill_level: Floats,
    seen: Ints,
    p: int,
    fair_rate: float,
) -> None:
    """Fix a pair's rate and subtract it from its resources' residual capacities."""
    seen[p] = FROZEN
    for j in range(shared.shape[1]):
        r = shared[p, j]
        if r != NONE and num_rising[r] > 0:
            residual[r] -= fair_rate
            num_rising[r] -= 1
            if num_rising[r] > 0:
                fill_level[r] = residual[r] / num_rising[r]


@kernel
def _recompute_max_min_rates(
    pairs: Pairs,
    flows: FlowState,
    queue: EventQueue,
    num_affected: int,
    threshold: float,
    now: float,
) -> None:
    """Recompute max-min fair rates of affected and connected pairs by progressive filling.

    ``num_rising`` is 0 for resources that are no bottlenecks. A pair whose rate is final has
    `FROZEN` in place of the stamp. Rates below ``threshold`` are unchanged.
    """
    num_affected, num_bottlenecks = _collect_affected(pairs, flows, num_affected, threshold)
    max_rate, shared, resource_ptr = pairs.max_rate, pairs.shared, pairs.resource_ptr
    affected, bottlenecks, active, num_active = (
        flows.affected,
        flows.bottlenecks,
        flows.active,
        flows.num_active,
    )
    residual, num_rising, fill_level, seen = (
        flows.residual,
        flows.num_rising,
        flows.fill_level,
        flows.seen_pair,
    )
    stamp = flows.stamp[0]
    lowest_max_rate = np.inf
    for k in range(num_affected):
        lowest_max_rate = min(lowest_max_rate, max_rate[affected[k]])
    level = 0.0
    while lowest_max_rate < np.inf:
        lowest_fill_level, kept = np.inf, 0
        for k in range(num_bottlenecks):
            r = bottlenecks[k]
            if num_rising[r] > 0:
                bottlenecks[kept] = r
                kept += 1
                lowest_fill_level = min(lowest_fill_level, fill_level[r])
        num_bottlenecks = kept
        level = max(level, min(lowest_max_rate, lowest_fill_level))
        level_limit = level * (1 + LEVEL_TOLERANCE)
        if lowest_fill_level <= level_limit:
            for k in range(num_bottlenecks):
                r = bottlenecks[k]
                if residual[r] > level_limit * num_rising[r]:
                    continue
                for a in range(resource_ptr[r], resource_ptr[r] + num_active[r]):
                    p = active[a]
                    if seen[p] == stamp:
                        fair_rate = min(level, max_rate[p])
                        _set_rate(flows, queue, p, fair_rate, now)
                        _freeze_rate(shared, residual, num_rising, fill_level, seen, p, fair_rate)
        if lowest_max_rate <= level_limit or num_bottlenecks == 0:
            # freeze pairs at their own maximum, and find the next lowest maximum
            lowest_max_rate, kept = np.inf, 0
            for k in range(num_affected):
                p = affected[k]
                if seen[p] != stamp:
                    continue
                if max_rate[p] <= level_limit:
                    _set_rate(flows, queue, p, max_rate[p], now)
                    _freeze_rate(shared, residual, num_rising, fill_level, seen, p, max_rate[p])
                    continue
                affected[kept] = p
                kept += 1
                lowest_max_rate = min(lowest_max_rate, max_rate[p])
            num_affected = kept


@kernel
def _saturation_level(pairs: Pairs, flows: FlowState, r: int) -> float:
    """The level at which a resource is full if pairs with lower rates keep them and others rise.

    A newly active pair has rate 0 and counts as rising.
    """
    first, level, last_num_above = pairs.resource_ptr[r], 0.0, -1
    while True:
        residual, num_above = pairs.capacity[r], 0
        for a in range(first, first + flows.num_active[r]):
            fair_rate = flows.fair_rate[flows.active[a]]
            if 0.0 < fair_rate < level:
                residual -= fair_rate
            else:
                num_above += 1
        if num_above == 0 or num_above == last_num_above:
            return level
        last_num_above, level = num_above, max(residual / num_above, level)


@kernel
def _activate_pair(pairs: Pairs, flows: FlowState, queue: EventQueue, p: int, now: float) -> None:
    """Activate a pair whose queue was empty, and recompute the rates that this changes."""
    for j in range(pairs.shared.shape[1]):
        r = pairs.shared[p, j]
        if r != NONE:
            flows.active_index[p, j] = flows.num_active[r]
            flows.active[pairs.resource_ptr[r] + flows.num_active[r]] = p
            flows.num_active[r] += 1
            flows.demand[r] += _round32(pairs.max_rate[p])
    flows.rate[p] = flows.fair_rate[p] = 0.0
    flows.updated_s[p] = now
    flows.stamp[0] += 1
    flows.seen_pair[p] = flows.stamp[0]
    flows.affected[0] = p
    threshold = pairs.max_rate[p]
    for j in range(pairs.shared.shape[1]):
        r = pairs.shared[p, j]
        if r != NONE and _is_bottleneck(pairs.capacity, flows.demand, r):
            threshold = min(threshold, _saturation_level(pairs, flows, r))
    _recompute_max_min_rates(pairs, flows, queue, ONE, RATE_MARGIN * threshold, now)


@kernel
def _deactivate_pair(pairs: Pairs, flows: FlowState, queue: EventQueue, p: int, now: float) -> None:
    """Deactivate a pair whose queue is empty: pairs that shared its bottlenecks get more."""
    flows.stamp[0] += 1
    stamp = flows.stamp[0]
    flows.seen_pair[p] = stamp
    threshold = RATE_MARGIN * flows.fair_rate[p]
    flows.rate[p] = flows.fair_rate[p] = 0.0
    num_affected = ZERO
    for j in range(pairs.shared.shape[1]):
        r = pairs.shared[p, j]
        if r == NONE:
            continue
        first = pairs.resource_ptr[r]
        binds = _is_bottleneck(pairs.capacity, flows.demand, r)
        # swap removal
        last = flows.active[first + flows.num_active[r] - 1]
        flows.active[first + flows.active_index[p, j]] = last
        for other in range(pairs.shared.shape[1]):
            if pairs.shared[last, other] == r:
                flows.active_index[last, other] = flows.active_index[p, j]
        flows.num_active[r] -= 1
        flows.demand[r] -= _round32(pairs.max_rate[p])
        if not binds:
            continue
        for a in range(first, first + flows.num_active[r]):
            q = flows.active[a]
            if flows.seen_pair[q] != stamp and flows.fair_rate[q] >= threshold:
                flows.seen_pair[q] = stamp
                flows.affected[num_affected] = q
                num_affected += 1
    _recompute_max_min_rates(pairs, flows, queue, num_affected, threshold, now)


@kernel
def _unsent_bytes(flows: FlowState, p: int, now: float) -> float:
    """Bytes in a pair's queue that have not been sent."""
    if flows.head[p] == NONE:
        return 0.0
    return float(
        max(flows.remaining_bytes[p] - flows.rate[p] * (now - flows.updated_s[p]), 0.0)
        + flows.queued_bytes[p]
    )


@inlined
def _requested_rate(rounds: AveragingRounds, nominal_s: float, k: int) -> float:
    """Bytes per second that a round would send over its k-th resource in its nominal duration."""
    return float(_round32(rounds.resource_bytes[k] / nominal_s)) if nominal_s > 0.0 else 0.0


@kernel
def _begin_round(
    pairs: Pairs,
    rounds: AveragingRounds,
    flows: FlowState,
    averaging: AveragingState,
    queue: EventQueue,
    g: int,
    now: float,
) -> None:
    """Begin a round when its last member is ready.

    The round sends over all its resources in proportion to their bytes. Without later messages it
    takes the maximum over its resources of (its bytes + pipeline bytes queued there) / capacity.
    """
    longest = rounds.pair_s[g]
    for k in range(rounds.pair_ptr[g], rounds.pair_ptr[g + 1]):
        p = rounds.pair[k]
        size = rounds.pair_bytes[k]
        if size > 0:
            longest = max(longest, (size + _unsent_bytes(flows, p, now)) / pairs.bandwidth[p])
    for k in range(rounds.resource_ptr[g], rounds.resource_ptr[g + 1]):
        r = rounds.resource[k]
        size = rounds.resource_bytes[k]
        for a in range(pairs.resource_ptr[r], pairs.resource_ptr[r] + flows.num_active[r]):
            size += _unsent_bytes(flows, flows.active[a], now)
        averaging.load_bytes[k] = _round32(size)
        longest = max(longest, averaging.load_bytes[k] / pairs.capacity[r])
    longest = _round32(longest)
    for k in range(rounds.resource_ptr[g], rounds.resource_ptr[g + 1]):
        r = rounds.resource[k]
        averaging.demand[r] += _requested_rate(rounds, longest, k)
        averaging.num_rounds[r] += 1
        if averaging.num_rounds[r] > 1:
            flows.changed[0] = 1
    averaging.begin_s[g] = now
    averaging.nominal_s[g] = longest
    averaging.progress_s[g] = 0.0
    averaging.updated_s[g] = now
    averaging.rate[g] = 1.0
    averaging.running_index[g] = averaging.num_running[0]
    averaging.running[averaging.num_running[0]] = g
    averaging.num_running[0] += 1
    reschedule(queue, len(pairs.max_rate) + g, now + longest, EVENT_STRIDE * g + ROUND_SENT)


@kernel
def _end_round(
    rounds: AveragingRounds, flows: FlowState, averaging: AveragingState, g: int
) -> None:
    """End the sending of a round: its last byte has been sent."""
    for k in range(rounds.resource_ptr[g], rounds.resource_ptr[g + 1]):
        r = rounds.resource[k]
        averaging.demand[r] -= _requested_rate(rounds, averaging.nominal_s[g], k)
        averaging.num_rounds[r] -= 1
        if averaging.num_rounds[r] > 0:
            flows.changed[0] = 1
    averaging.num_running[0] -= 1
    last = averaging.running[averaging.num_running[0]]
    averaging.running[averaging.running_index[g]] = last
    averaging.running_index[last] = averaging.running_index[g]


@kernel
def _round_rate(
    pairs: Pairs, rounds: AveragingRounds, flows: FlowState, averaging: AveragingState, g: int
) -> float:
    """A round's speed, relative to that of its nominal duration.

    Messages enqueued after the round began keep their rates. Rounds that share a resource divide
    its residual capacity in proportion to their nominal rates.
    """
    rate = 1.0
    for k in range(rounds.resource_ptr[g], rounds.resource_ptr[g + 1]):
        r = rounds.resource[k]
        taken = 0.0
        for a in range(pairs.resource_ptr[r], pairs.resource_ptr[r] + flows.num_active[r]):
            p = flows.active[a]
            if flows.enqueued_s[flows.head[p]] > averaging.begin_s[g]:
                taken += flows.rate[p]
        if taken > 0.0 or averaging.num_rounds[r] > 1:
            nominal_s = averaging.nominal_s[g]
            left = max(pairs.capacity[r] - taken, 0.0)
            others = averaging.demand[r] - _requested_rate(rounds, nominal_s, k)
            rate = min(rate, left * nominal_s / (averaging.load_bytes[k] + others * nominal_s))
    return rate


@kernel
def _update_round_rates(
    pairs: Pairs,
    rounds: AveragingRounds,
    flows: FlowState,
    averaging: AveragingState,
    queue: EventQueue,
    now: float,
) -> None:
    """Recompute the running rounds' speeds after the messages in transit have changed."""
    flows.changed[0] = 0
    for k in range(averaging.num_running[0]):
        g = averaging.running[k]
        rate = _round_rate(pairs, rounds, flows, averaging, g)
        if rate == averaging.rate[g]:
            continue
        averaging.progress_s[g] += averaging.rate[g] * (now - averaging.updated_s[g])
        averaging.updated_s[g] = now
        averaging.rate[g] = rate
        over = np.inf
        if rate > 0.0:
            over = now + max(averaging.nominal_s[g] - averaging.progress_s[g], 0.0) / rate
        reschedule(queue, len(pairs.max_rate) + g, over, EVENT_STRIDE * g + ROUND_SENT)


@kernel
def _processor_rate(cores: float, processors: ProcessorState) -> float:
    return float(min(1.0, cores / max(processors.size[0], 1)))


@kernel
def _earliest_end(processors: ProcessorState) -> int:
    """Index of the operation that ends first; of equals, the one that began first."""
    first = 0
    for k in range(1, processors.size[0]):
        if processors.until[k] < processors.until[first] or (
            processors.until[k] == processors.until[first]
            and processors.number[k] < processors.number[first]
        ):
            first = k
    return first


@kernel
def _schedule_next_end(
    processors: ProcessorState, queue: EventQueue, cores: float, now: float
) -> None:
    """Schedule the end of the next operation that shares processors."""
    if processors.size[0] > 0:
        rest = max(processors.until[_earliest_end(processors)] - processors.state[0], 0.0)
        rate = _processor_rate(cores, processors)
        reschedule(queue, len(queue.at) - 1, now + rest / rate, PROCESSOR)


@kernel
def _advance(processors: ProcessorState, cores: float, now: float) -> None:
    state = processors.state
    state[0] += (now - state[1]) * _processor_rate(cores, processors)
    state[1] = now


@kernel
def _begin_shared(
    processors: ProcessorState, queue: EventQueue, event: int, seconds: float
) -> None:
    """Add an operation that shares processors."""
    queue.pushed[0] += 1
    k = processors.size[0]
    processors.size[0] = k + 1
    processors.until[k] = processors.state[0] + seconds
    processors.number[k] = queue.pushed[0]
    processors.event[k] = event


@kernel
def _end_shared(processors: ProcessorState) -> Any:
    """Remove the operation that ends first and return its event."""
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
def _start_work(
    options: RunOptions,
    processors: ProcessorState,
    queue: EventQueue,
    d: int,
    seconds: float,
    kind: int,
    now: float,
) -> None:
    """Start work on a device that takes ``seconds`` on a processor of its own."""
    if options.cores == 0:
        push(queue, now + seconds, EVENT_STRIDE * d + kind)
        return
    _advance(processors, options.cores, now)
    _begin_shared(processors, queue, EVENT_STRIDE * d + kind, seconds)
    _schedule_next_end(processors, queue, options.cores, now)


@inlined
def _mark_dirty(devices: DeviceState, num_dirty: int, d: int) -> int:
    if devices.is_dirty[d]:
        return num_dirty
    devices.is_dirty[d] = True
    devices.dirty[num_dirty] = d
    return num_dirty + 1


@inlined
def _make_ready(
    operations: OperationTable, options: RunOptions, devices: DeviceState, message: int
) -> None:
    """An operation's input has arrived; ``message`` is step * operations + operation."""
    devices.inputs_ready[message] = True
    if len(options.max_live) == 0:
        return
    o = message % len(operations.device)
    d, kind = operations.device[o], operations.kind[o]
    devices.ready_next[message] = NONE
    if devices.ready_head[d, kind] == NONE:
        devices.ready_head[d, kind] = message
    else:
        devices.ready_next[devices.ready_tail[d, kind]] = message
    devices.ready_tail[d, kind] = message


@inlined
def _next_chosen(
    operations: OperationTable, options: RunOptions, devices: DeviceState, times: EventTimes, d: int
) -> int:
    """Dynamic dispatch: B before H before F, first come first served; -1: none is ready."""
    for kind in range(3):
        o = devices.ready_head[d, kind]
        if o == NONE or (kind == 2 and devices.live[d] >= options.max_live[d]):
            continue
        devices.ready_head[d, kind] = devices.ready_next[o]
        times.chosen[operations.order_ptr[d] + times.num_done[d]] = o
        times.num_done[d] += 1
        return int(o)
    return NONE


@inlined
def _next_planned(
    operations: OperationTable, options: RunOptions, devices: DeviceState, d: int
) -> int:
    """The next operation in the planned order; -1 while its input has not arrived."""
    total = len(operations.device)
    t = devices.step[d]
    row = options.steps[t] * len(operations.update_s) + d
    o = operations.order[operations.order_ptr[row] + devices.position[d]]
    if devices.inputs_ready[t * total + o]:
        return int(o)
    return NONE


@inlined
def _has_more(
    operations: OperationTable, options: RunOptions, devices: DeviceState, d: int
) -> bool:
    row = options.steps[devices.step[d]] * len(operations.update_s) + d
    return bool(devices.position[d] < operations.order_ptr[row + 1] - operations.order_ptr[row])


@inlined
def _finish_step(
    options: RunOptions, devices: DeviceState, times: EventTimes, d: int, now: float
) -> None:
    t = devices.step[d]
    times.step_end[t] = max(times.step_end[t], now)
    if t < options.recorded:
        times.update_end[t, d] = now
    devices.step[d] += 1
    devices.position[d] = 0
    devices.round[d] = 0
    devices.current[d] = IDLE


@kernel
def _join_round(
    pairs: Pairs,
    rounds: AveragingRounds,
    options: RunOptions,
    devices: DeviceState,
    flows: FlowState,
    averaging: AveragingState,
    queue: EventQueue,
    times: EventTimes,
    g: int,
    t: int,
    now: float,
) -> None:
    """A device is ready for a round of step t; the round begins with the last member."""
    devices.num_ready[g] += 1
    if devices.num_ready[g] < rounds.size[g]:
        return
    devices.num_ready[g] = 0
    averaging.step[g] = t
    if t < options.recorded:
        times.round_begin[t, g] = now
        times.round_end[t, g] = now
    if rounds.size[g] > 1:
        _begin_round(pairs, rounds, flows, averaging, queue, g, now)
    else:
        push(queue, now, EVENT_STRIDE * g + ROUND_DONE)


@kernel
def _join_norm(
    rounds: AveragingRounds,
    options: RunOptions,
    devices: DeviceState,
    averaging: AveragingState,
    queue: EventQueue,
    times: EventTimes,
    d: int,
    t: int,
    now: float,
) -> None:
    """A device waits for the gradient norm; it may be the last to send its stage's part."""
    g = rounds.norm
    if t < options.recorded:
        times.round_begin[t, g] = times.round_end[t, g] = now
    if averaging.norm_received[t] == rounds.num_norm_senders:
        push(
            queue,
            max(now, averaging.norm_sum_s[t] + rounds.norm_receive_s[d]),
            EVENT_STRIDE * d + NORM_RECEIVED,
        )
    elif rounds.norm_send_s[d] >= 0.0:
        averaging.norm_received[t] += 1
        averaging.norm_sum_s[t] = max(averaging.norm_sum_s[t], now + rounds.norm_send_s[d])
        if averaging.norm_received[t] < rounds.num_norm_senders:
            return
        # the sum is complete: send it to all waiting devices
        for other in range(len(rounds.norm_send_s)):
            k = rounds.device_ptr[other] + devices.round[other]
            waits = devices.current[other] == AVERAGING and devices.step[other] == t
            if waits and k < rounds.device_ptr[other + 1] and rounds.device_groups[k] == g:
                push(
                    queue,
                    averaging.norm_sum_s[t] + rounds.norm_receive_s[other],
                    EVENT_STRIDE * other + NORM_RECEIVED,
                )


@kernel
def _advance_delayed_averaging(
    pairs: Pairs,
    operations: OperationTable,
    rounds: AveragingRounds,
    options: RunOptions,
    devices: DeviceState,
    flows: FlowState,
    averaging: AveragingState,
    queue: EventQueue,
    times: EventTimes,
    d: int,
    now: float,
) -> None:
    """Advance averaging that overlaps with operations, and end a step that waited for it.

    The end of a step begins the step's own averaging.
    """
    over = rounds.device_ptr[d] + devices.round[d] == rounds.device_ptr[d + 1]
    if over and not devices.in_round[d]:
        devices.delayed_step[d] = NONE
    if devices.current[d] == AVERAGING and devices.delayed_step[d] == NONE:
        t = devices.step[d]
        _finish_step(options, devices, times, d, now)
        if options.averages[t] and rounds.device_ptr[d] < rounds.device_ptr[d + 1]:
            devices.delayed_step[d] = t
    if devices.delayed_step[d] != NONE and not devices.in_round[d]:
        devices.in_round[d] = True
        g = rounds.device_groups[rounds.device_ptr[d] + devices.round[d]]
        step = devices.delayed_step[d]
        _join_round(pairs, rounds, options, devices, flows, averaging, queue, times, g, step, now)


@inlined
def _advance_device(
    pairs: Pairs,
    operations: OperationTable,
    rounds: AveragingRounds,
    options: RunOptions,
    devices: DeviceState,
    flows: FlowState,
    averaging: AveragingState,
    processors: ProcessorState,
    queue: EventQueue,
    times: EventTimes,
    d: int,
    now: float,
) -> None:
    """Advance an idle device until it works or waits."""
    if options.delayed:
        _advance_delayed_averaging(
            pairs, operations, rounds, options, devices, flows, averaging, queue, times, d, now
        )
    while devices.current[d] == IDLE and devices.step[d] < len(options.steps):
        t = devices.step[d]
        if _has_more(operations, options, devices, d):
            if len(options.max_live) > 0:
                o = _next_chosen(operations, options, devices, times, d)
            else:
                o = _next_planned(operations, options, devices, d)
            if o == NONE:
                return
            devices.position[d] += 1
            devices.live[d] += 1 if operations.kind[o] == 2 else 0
            devices.current[d] = o
            if t < options.recorded:
                times.begin[t, o] = now
            _start_work(options, processors, queue, d, operations.seconds[o], COMPUTED, now)
            return
        if devices.round[d] == 0 and t < options.recorded:
            times.ready[t, d] = now
        first = rounds.device_ptr[d] + devices.round[d]
        if options.averages[t] and not options.delayed and first < rounds.device_ptr[d + 1]:
            devices.current[d] = AVERAGING
            g = rounds.device_groups[first]
            if g == rounds.norm:
                _join_norm(rounds, options, devices, averaging, queue, times, d, t, now)
            else:
                _join_round(
                    pairs, rounds, options, devices, flows, averaging, queue, times, g, t, now
                )
            return
        if t < options.recorded:
            times.update_begin[t, d] = now
        if operations.update_s[d] > 0:
            devices.current[d] = UPDATE
            _start_work(options, processors, queue, d, operations.update_s[d], UPDATED, now)
            return
        if options.delayed:
            devices.current[d] = AVERAGING
            _advance_delayed_averaging(
                pairs, operations, rounds, options, devices, flows, averaging, queue, times, d, now
            )
        else:
            _finish_step(options, devices, times, d, now)


@inlined
def _enqueue_message(
    pairs: Pairs,
    operations: OperationTable,
    options: RunOptions,
    flows: FlowState,
    queue: EventQueue,
    times: EventTimes,
    message: int,
    now: float,
) -> None:
    """Append a message to its pair's queue; ``message`` is step * operations + sender."""
    total = len(operations.device)
    t, o = message // total, message % total
    p, size = operations.pair[o], operations.message_bytes[o]
    if t < options.recorded:
        times.enqueued[t, o] = now
    if not options.queues:
        if t < options.recorded:
            times.send_begin[t, o] = now
            times.send_end[t, o] = now + size / pairs.max_rate[p]
        arrives = now + pairs.latency_s[p] + size / pairs.max_rate[p]
        push(queue, arrives, EVENT_STRIDE * message + MESSAGE_ARRIVED)
        return
    flows.next_message[message] = NONE
    flows.enqueued_s[message] = now
    if flows.head[p] == NONE:
        flows.head[p] = message
        flows.tail[p] = message
        flows.remaining_bytes[p] = size
        flows.queued_bytes[p] = 0.0
        if t < options.recorded:
            times.send_begin[t, o] = now
        _activate_pair(pairs, flows, queue, p, now)
    else:
        flows.next_message[flows.tail[p]] = message
        flows.tail[p] = message
        flows.queued_bytes[p] += size


@inlined
def _dequeue_message(
    pairs: Pairs,
    operations: OperationTable,
    options: RunOptions,
    flows: FlowState,
    queue: EventQueue,
    times: EventTimes,
    p: int,
    now: float,
) -> None:
    """Remove the sent first message of a queue and start to send the next one."""
    total = len(operations.device)
    message = flows.head[p]
    t, o = message // total, message % total
    if t < options.recorded:
        times.send_end[t, o] = now
    push(queue, now + pairs.latency_s[p], EVENT_STRIDE * message + MESSAGE_ARRIVED)
    successor = flows.next_message[message]
    flows.head[p] = successor
    flows.changed[0] = 1
    if successor == NONE:
        _deactivate_pair(pairs, flows, queue, p, now)
        return
    t, o = successor // total, successor % total
    flows.remaining_bytes[p] = operations.message_bytes[o]
    flows.queued_bytes[p] = max(flows.queued_bytes[p] - operations.message_bytes[o], 0.0)
    flows.updated_s[p] = now
    if t < options.recorded:
        times.send_begin[t, o] = now
    reschedule(
        queue, p, now + flows.remaining_bytes[p] / flows.rate[p], EVENT_STRIDE * p + MESSAGE_SENT
    )


@inlined
def _finish_operation(
    operations: OperationTable,
    options: RunOptions,
    devices: DeviceState,
    queue: EventQueue,
    times: EventTimes,
    d: int,
    now: float,
) -> int:
    """End an operation; returns the message to enqueue now, `NONE` if there is none."""
    o, t = devices.current[d], devices.step[d]
    devices.current[d] = IDLE
    devices.live[d] -= 1 if operations.kind[o] == 0 else 0
    if t < options.recorded:
        times.end[t, o] = now
    if operations.successor[o] == NONE:
        return NONE
    message = t * len(operations.device) + o
    if operations.pair[o] == NONE:
        _make_ready(operations, options, devices, message - o + operations.successor[o])
        return NONE
    if options.message_s > 0:
        push(queue, now + options.message_s, EVENT_STRIDE * message + MESSAGE_QUEUED)
        return NONE
    return int(message)


@entry
def run(
    pairs: Pairs,
    operations: OperationTable,
    rounds: AveragingRounds,
    options: RunOptions,
    devices: DeviceState,
    flows: FlowState,
    averaging: AveragingState,
    times: EventTimes,
    processors: ProcessorState,
    queue: EventQueue,
) -> None:
    """Run the simulation until no event is left; fills ``times`` in place."""
    total, n = len(operations.device), len(operations.update_s)
    for t in range(len(options.steps)):
        for row in range(options.steps[t] * n, (options.steps[t] + 1) * n):
            for k in range(operations.order_ptr[row], operations.order_ptr[row + 1]):
                if len(options.max_live) == 0 and operations.is_first[operations.order[k]]:
                    devices.inputs_ready[t * total + operations.order[k]] = True
    if len(options.max_live) > 0:
        for o in range(total):
            if operations.is_first[o]:
                _make_ready(operations, options, devices, o)
    # inlined kernels have one call site each, so that they are compiled once
    now, num_dirty = 0.0, 0
    for d in range(n):
        num_dirty = _mark_dirty(devices, num_dirty, d)
    while True:
        for k in range(num_dirty):
            d = devices.dirty[k]
            devices.is_dirty[d] = False
            _advance_device(
                pairs,
                operations,
                rounds,
                options,
                devices,
                flows,
                averaging,
                processors,
                queue,
                times,
                d,
                now,
            )
        if flows.changed[0] > 0:
            # rounds may have begun
            _update_round_rates(pairs, rounds, flows, averaging, queue, now)
        if queue.size[0] == 0 or queue.time[0] == np.inf:
            break
        now, num_dirty = queue.time[0], 0
        while queue.size[0] > 0 and queue.time[0] == now:
            event = pop(queue)
            if event == PROCESSOR:
                _advance(processors, options.cores, now)
                event = _end_shared(processors)
                _schedule_next_end(processors, queue, options.cores, now)
            kind, subject = event % EVENT_STRIDE, event // EVENT_STRIDE
            if kind == COMPUTED:
                # a result that stays on the device is available now
                num_dirty = _mark_dirty(devices, num_dirty, subject)
                subject = _finish_operation(
                    operations, options, devices, queue, times, subject, now
                )
                if subject == NONE:
                    continue
                kind = MESSAGE_QUEUED
            if kind == MESSAGE_QUEUED:
                _enqueue_message(pairs, operations, options, flows, queue, times, subject, now)
            elif kind == MESSAGE_SENT:
                _dequeue_message(pairs, operations, options, flows, queue, times, subject, now)
            elif kind == MESSAGE_ARRIVED:
                t, o = subject // total, subject % total
                if t < options.recorded:
                    times.arrived[t, o] = now
                _make_ready(operations, options, devices, t * total + operations.successor[o])
                num_dirty = _mark_dirty(
                    devices, num_dirty, operations.device[operations.successor[o]]
                )
            elif kind == ROUND_SENT:
                _end_round(rounds, flows, averaging, subject)
                t, over = averaging.step[subject], now + rounds.round_trip_s[subject]
                if t < options.recorded:
                    times.round_end[t, subject] = over
                push(queue, over, EVENT_STRIDE * subject + ROUND_DONE)
            elif kind == ROUND_DONE:
                for d in range(n):
                    first = rounds.device_ptr[d] + devices.round[d]
                    waits = devices.in_round[d] or (
                        devices.current[d] == AVERAGING and not options.delayed
                    )
                    if (
                        waits
                        and first < rounds.device_ptr[d + 1]
                        and rounds.device_groups[first] == subject
                    ):
                        if options.delayed:
                            devices.in_round[d] = False
                        else:
                            devices.current[d] = IDLE
                        devices.round[d] += 1
                        num_dirty = _mark_dirty(devices, num_dirty, d)
            elif kind == NORM_RECEIVED:
                devices.current[subject] = IDLE
                devices.round[subject] += 1
                num_dirty = _mark_dirty(devices, num_dirty, subject)
            else:
                if options.delayed:
                    devices.current[subject] = AVERAGING
                else:
                    _finish_step(options, devices, times, subject, now)
                num_dirty = _mark_dirty(devices, num_dirty, subject)
        if flows.changed[0] > 0:
            _update_round_rates(pairs, rounds, flows, averaging, queue, now)
    for d in range(n):
        # report a device that waits for an operation, not one that waits for averaging
        waits = devices.step[d] < len(options.steps) and _has_more(operations, options, devices, d)
        if waits and times.stuck[0] == NONE:
            times.stuck[0] = d
