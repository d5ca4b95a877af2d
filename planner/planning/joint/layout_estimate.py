"""Compiled estimate of the step time of a layout.

The estimate, in seconds or dollars, is M x period + the latency of one microbatch through all
stages and back + the longest averaging, divided by H if only every H-th step averages. The period
is that of the slowest stage, boundary or memory limit, if every device takes microbatches in
proportion to its capacity, whichever pipeline they came through. Queueing of messages is left to
the simulator, which decides between the best layouts.
"""

from __future__ import annotations

import numpy as np

from planner.planning.joint.layout_arrays import (
    ClassArrays,
    LayoutScratch,
    LayoutState,
    ModelArrays,
    classes_in,
)
from planner.planning.joint.layout_averaging import averaging_s, two_frequency_s
from planner.planning.joint.layout_memory import (
    head_stage,
    recompute_to_fit,
    stage_parameters,
    stage_room,
)
from planner.search.arrays import Ints
from planner.search.compiled import entry, kernel

MIN_IN_FLIGHT, IN_FLIGHT_IF_MIXED = 1.25, 0.75
"""Microbatches that a stage needs in flight beyond itself, as a multiple of rate times round-trip
time (Little's law): the first, and the second times the mixing of the flow after it. With fewer,
the stage slows down in proportion. Fitted to the simulator; see
docs/explanation/joint-search.md."""
IN_FLIGHT_IF_PARTIAL = 0.75
"""As the second, in addition for a stage that recomputes some of its layers: their number is chosen
for what is needed on average, and queues need more at times."""
MAX_PERIOD_RISES = 12
"""Maximum increases of the period until a boundary carries the flow of its stages."""
MIN_PERIOD_RISE, PERIOD_RISE = 0.02, 0.7
"""The period rises by `PERIOD_RISE` times the unrouted share, at least by `MIN_PERIOD_RISE`."""
UNROUTED_TOLERANCE = 1e-6
"""Unrouted share of the flow that counts as none."""
UNROUTED_PENALTY = 2.0
"""Relative increase of the period per share of the flow that is unrouted after the last rise."""
SORT_LIMIT = 4
"""Pairs of classes are sorted if the square of their number is below this many times the words of
64 bits that have a bit for every pair, else read from these."""
ZERO, ONE, INDEX_SHIFT = np.uint64(0), np.uint64(1), np.uint64(58)
DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
"""All its 64 runs of six bits differ: the first one of its product with a power of two identifies
that power."""
BIT_OF = np.zeros(64, dtype=np.int64)
"""The power of two by the first six bits of that product."""
for _bit in range(64):
    BIT_OF[(int(DE_BRUIJN) << _bit) % (1 << 64) >> 58] = _bit
ROUNDING = 1e-9
"""Relative error of a sum in another order."""


@kernel
def _returns(state: LayoutState) -> bool:
    """Whether microbatches go from the last stage to the head on the first, and back."""
    return bool(state.head_first[0] and state.stages[0] > 1)


@kernel
def _stage_period(
    model: ModelArrays, classes: ClassArrays, state: LayoutState, scratch: LayoutScratch, j: int
) -> float:
    """Period of stage j alone, infinite if it does not fit; sets `scratch`."""
    last, runs_head = j == state.stages[0] - 1, j == head_stage(state)
    a, b = state.cuts[j], state.cuts[j + 1]
    forward = model.flops[b] - model.flops[a]
    sent_bytes = (0.0 if last else model.output_bytes[b - 1]) + (
        model.output_bytes[a - 1] if j > 0 else 0.0
    )
    if _returns(state) and (last or runs_head):
        sent_bytes += model.output_bytes[-1]
    counts = state.counts[j]
    num_classes = len(counts)
    if not model.min_devices <= counts.sum() <= model.max_devices[state.stages[0]]:
        return np.inf
    room = stage_room(model, classes, state, j)
    if room == 0.0 and model.recompute_free and state.recompute[j] == 0:
        room = recompute_to_fit(model, classes, state, j)
    if room == 0.0:
        return np.inf
    work_flops = 3.0 * forward + model.flops[a + state.recompute[j]] - model.flops[a]
    # on the way of a microbatch, a head on the first stage comes after the last one
    way_flops = work_flops + (model.head_flops if last and runs_head else 0.0)
    work_flops += model.head_flops if runs_head else 0.0
    rate = 0.0
    for c in range(num_classes):
        scratch.share[j, c] = 0.0
        if counts[c] > 0:
            busy_s = max(work_flops / classes.flops_per_s[c], sent_bytes / classes.capacity[c])
            scratch.share[j, c] = counts[c] / busy_s
            rate += counts[c] / busy_s
    if rate == 0.0:
        return np.inf
    compute_s = 0.0
    for c in range(num_classes):
        scratch.share[j, c] /= rate
        compute_s += scratch.share[j, c] * way_flops / classes.flops_per_s[c]
    scratch.compute_s[j] = compute_s
    scratch.in_flight_room[j] = room
    return float(1.0 / rate)


@kernel
def _pairs_in_use(
    source_counts: Ints, target_counts: Ints, classes: ClassArrays, scratch: LayoutScratch
) -> int:
    """List the ranks of pairs of classes that both have devices in ``scratch.pairs``, ascending."""
    ranks, num_pairs = scratch.pairs, 0
    num_sources, num_targets = (
        classes_in(source_counts, scratch.used),
        classes_in(target_counts, scratch.others),
    )
    words = scratch.pair_bits
    if (num_sources * num_targets) ** 2 < SORT_LIMIT * len(words):
        for i in range(num_sources):
            for j in range(num_targets):
                # insertion sort
                rank, k = classes.pair_rank[scratch.used[i], scratch.others[j]], num_pairs
                while k > 0 and ranks[k - 1] > rank:
                    ranks[k] = ranks[k - 1]
                    k -= 1
                ranks[k] = rank
                num_pairs += 1
        return num_pairs
    for i in range(num_sources):
        for j in range(num_targets):
            rank = classes.pair_rank[scratch.used[i], scratch.others[j]]
            words[rank >> 6] |= ONE << np.uint64(rank & 63)
    for k in range(len(words)):
        word = words[k]
        while word != ZERO:
            lowest = word & (~word + ONE)
            ranks[num_pairs] = 64 * k + BIT_OF[(lowest * DE_BRUIJN) >> INDEX_SHIFT]
            word ^= lowest
            num_pairs += 1
        words[k] = ZERO
    return num_pairs


@kernel
def _add_crossing(
    scratch: LayoutScratch, j: int, c: int, d: int, size: float, classes: ClassArrays
) -> None:
    """Add bytes after stage j to the lines of the sites of class c that class d is not in."""
    for level in range(classes.sites.shape[1]):
        s = classes.sites[c, level]
        if s < 0 or classes.inside[s, d]:
            return
        scratch.site_bytes[j, s] += size


@kernel
def _boundary_period(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    j: int,
    period: float,
    max_period: float,
) -> float:
    """Period at which the boundary after stage j carries its flow, nearest pairs first.

    After the last stage comes the head on the first: pairs are then chosen as if a microbatch could
    return to any device of it. The search for one longer than ``max_period`` ends early.
    """
    message_bytes = model.output_bytes[state.cuts[j + 1] - 1]
    # of two stages, both boundaries use the same pairs
    pair_messages = 2.0 if _returns(state) and state.stages[0] == 2 else 1.0
    after = (j + 1) % state.stages[0]
    source_counts, target_counts = state.counts[j], state.counts[after]
    num_classes = len(source_counts)
    num_pairs = _pairs_in_use(source_counts, target_counts, classes, scratch)
    unrouted, sites = 1.0, len(classes.site_bandwidth)
    for _ in range(MAX_PERIOD_RISES):
        unrouted, delay, usd, unmixed = 1.0, 0.0, 0.0, 0.0
        for s in range(sites):
            scratch.site_bytes[j, s] = 0.0
        for c in range(num_classes):
            scratch.unrouted[0, c] = scratch.share[j, c]
            scratch.unrouted[1, c] = scratch.share[after, c]
        for k in range(num_pairs):
            c, d = classes.pair_source[scratch.pairs[k]], classes.pair_target[scratch.pairs[k]]
            if scratch.unrouted[0, c] <= 0.0 or scratch.unrouted[1, d] <= 0.0:
                continue
            max_share = (
                period
                * source_counts[c]
                * target_counts[d]
                * classes.pair_bandwidth[c, d]
                / (pair_messages * message_bytes)
            )
            share = min(scratch.unrouted[0, c], scratch.unrouted[1, d], max_share)
            scratch.unrouted[0, c] -= share
            scratch.unrouted[1, d] -= share
            unrouted -= share
            unmixed += share**2 / max(scratch.share[j, c], scratch.share[after, d])
            if sites > 0 and classes.sites[c, 0] != classes.sites[d, 0]:
                # activations forward, gradients back
                _add_crossing(scratch, j, c, d, share * message_bytes, classes)
                _add_crossing(scratch, j, d, c, share * message_bytes, classes)
            transfer_s = (
                message_bytes / classes.bandwidth[c, d] + message_bytes / classes.bandwidth[d, c]
            )
            delay += share * (classes.rtt_s[c, d] + transfer_s)
            usd += share * message_bytes * (classes.usd_per_byte[c, d] + classes.usd_per_byte[d, c])
        scratch.delay_s[j] = delay
        scratch.mixing[j] = 1.0 - unmixed
        scratch.messages_usd[j] = usd
        if unrouted < UNROUTED_TOLERANCE:
            return period
        period *= 1.0 + max(MIN_PERIOD_RISE, PERIOD_RISE * unrouted)
        if period > max_period:
            break
    return float(period * (1.0 + UNROUTED_PENALTY * unrouted))


@entry
def estimate(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    max_value: float,
) -> float:
    """Estimated seconds or dollars of a step; sets which layers are recomputed.

    Infinite if memory is too small, or as soon as the value is known to exceed ``max_value``. In
    the second case ``state.recompute`` is not final.
    """
    if not model.by_cost:
        return float(_step_s(model, classes, state, scratch, max_value))
    stages = state.stages[0]
    usd_per_s, messages_usd = model.wait_usd_per_s, 0.0
    for j in range(stages):
        for c in range(state.counts.shape[1]):
            usd_per_s += state.counts[j, c] * classes.usd_per_s[c]
    seconds = _step_s(
        model, classes, state, scratch, max_value / usd_per_s if usd_per_s > 0 else np.inf
    )
    if seconds == np.inf:
        return np.inf
    for j in range(stages):
        counts, members, pair_usd, between_regions_usd = state.counts[j], 0.0, 0.0, 0.0
        devices_in = scratch.region_devices
        devices_in[:] = 0.0
        for c in range(len(counts)):
            members += counts[c]
            devices_in[classes.region[c]] += counts[c]
        for c in range(len(counts)):
            for d in range(len(counts)):
                usd = counts[c] * counts[d] * classes.usd_per_byte[c, d]
                pair_usd += usd
                if usd > 0:
                    between_regions_usd += usd / (
                        devices_in[classes.region[c]] * devices_in[classes.region[d]]
                    )
        if model.two_frequency:
            # as if each region were one device
            pair_usd, members = between_regions_usd, 0.0
            for r in range(len(devices_in)):
                members += devices_in[r] > 0
        if j < stages - 1 or _returns(state):
            messages_usd += model.microbatches * scratch.messages_usd[j]
        # assume equal shares
        encoded_bytes = _averaged_parameters(model, state, j) * model.gradient_bytes
        messages_usd += 2.0 * encoded_bytes / members * pair_usd / model.every_steps
    if _averages_tied(model, state):
        _count_end_devices(state, scratch)
        counts, members, pair_usd = scratch.subset, 0.0, 0.0
        for c in range(len(counts)):
            members += counts[c]
            for d in range(len(counts)):
                pair_usd += counts[c] * counts[d] * classes.usd_per_byte[c, d]
        encoded_bytes = model.tied_parameters * model.gradient_bytes
        messages_usd += 2.0 * encoded_bytes / members * pair_usd
    return float(seconds * usd_per_s + messages_usd)


@kernel
def _averages_tied(model: ModelArrays, state: LayoutState) -> bool:
    """Whether first and last stage average the tied parameters in a round of their own."""
    apart = model.tied_parameters > 0 and head_stage(state) > 0
    return bool(apart and _waits(model) and not model.two_frequency)


@kernel
def _waits(model: ModelArrays) -> bool:
    """Whether every step waits for the averaging of the one before."""
    return bool(model.every_steps == 1.0 and not model.delayed)


@kernel
def _averaged_parameters(model: ModelArrays, state: LayoutState, j: int) -> float:
    """Parameters that a stage averages, without tied ones that are averaged separately."""
    parameters = stage_parameters(model, state, j)
    if (j == 0 or j == state.stages[0] - 1) and _averages_tied(model, state):
        parameters -= model.tied_parameters
    return float(parameters)


@kernel
def _count_end_devices(state: LayoutState, scratch: LayoutScratch) -> None:
    """Devices of first and last stage by class, in ``scratch.subset``."""
    for c in range(state.counts.shape[1]):
        scratch.subset[c] = state.counts[0, c] + state.counts[state.stages[0] - 1, c]


@kernel
def _step_s(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    max_s: float,
) -> float:
    """Estimated seconds; infinite as soon as they are known to exceed ``max_s``.

    Averaging is estimated before the boundaries, which take longer to estimate: most layouts that
    are too slow are so without any delay of messages.
    """
    for j in range(state.stages[0]):
        state.recompute[j] = min(model.recompute[j], state.cuts[j + 1] - state.cuts[j])
    max_period = min(max_s / model.microbatches, 1e300)
    period = _slowest_stage_period(model, classes, state, scratch, max_period)
    if period > max_period:
        return np.inf
    max_tail_s = (max_s - model.microbatches * period) * (1.0 + ROUNDING)
    tail_s = _least_tail_s(model, classes, state, scratch, max_tail_s)
    if tail_s > max_tail_s:
        return np.inf
    # max_period leaves the tail out: a boundary may need a longer period at first than in the end,
    # when stages recompute more
    period = _pipeline_period(model, classes, state, scratch, period, max_period)
    if period == np.inf:
        return np.inf
    return float(_step_with_period_s(model, classes, state, scratch, period, max_s))


@kernel
def _slowest_stage_period(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    max_period: float,
) -> float:
    """The longest period of a stage alone; one of them if that exceeds ``max_period``."""
    period = 0.0
    for j in range(state.stages[0]):
        scratch.period_s[j] = _stage_period(model, classes, state, scratch, j)
        period = max(period, scratch.period_s[j])
        if period > max_period:
            break
    return period


@kernel
def _least_tail_s(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    max_tail_s: float,
) -> float:
    """Least seconds of a step besides the periods of its microbatches: messages without delay.

    Sets the stages' averaging. The search for more than ``max_tail_s`` ends early.
    """
    way_back_s, longest_s = 0.0, 0.0
    scratch.averaged_bytes[:] = 0.0
    for j in range(state.stages[0] - 1, -1, -1):
        way_back_s += scratch.compute_s[j]
        if model.two_frequency:
            continue
        encoded_bytes = _averaged_parameters(model, state, j) * model.gradient_bytes
        scratch.averaging_s[j] = averaging_s(
            encoded_bytes, encoded_bytes / model.wire_ratio, state.counts[j], classes, scratch
        )
        if _waits(model):
            longest_s = max(longest_s, way_back_s + scratch.averaging_s[j])
            if longest_s > max_tail_s:
                break
    return max(longest_s, way_back_s)


@kernel
def _pipeline_period(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    slowest_stage_period: float,
    max_period: float,
) -> float:
    """Period of the whole pipeline; infinite if it exceeds ``max_period``.

    A stage recomputes layers, if allowed, where memory does not hold the microbatches that must be
    in flight. That changes its period, which is computed again, at most as often as there are
    stages.
    """
    stages = state.stages[0]
    boundaries = stages if _returns(state) else stages - 1
    period = slowest_stage_period
    for k in range(stages + 1):
        if k > 0:
            period = _slowest_stage_period(model, classes, state, scratch, max_period)
        if period > max_period:
            return np.inf
        for j in range(boundaries):
            period = _boundary_period(model, classes, state, scratch, j, period, max_period)
            if period > max_period:
                return np.inf
        for s in range(len(classes.site_bandwidth)):
            crossing_bytes = 0.0
            for j in range(boundaries):
                crossing_bytes += scratch.site_bytes[j, s]
            period = max(period, crossing_bytes / classes.site_bandwidth[s])
        if boundaries == stages:
            for c in range(state.counts.shape[1]):
                head_s = model.head_flops / classes.flops_per_s[c]
                scratch.delay_s[stages - 1] += scratch.share[0, c] * head_s
        else:
            scratch.delay_s[stages - 1] = 0.0
        round_trip_s, mixing, slowed_period, changed = 0.0, 0.0, period, False
        for j in range(stages - 1, -1, -1):
            round_trip_s += scratch.compute_s[j] + scratch.delay_s[j]
            if j < boundaries:
                mixing = max(mixing, scratch.mixing[j])
            away_s = round_trip_s - scratch.compute_s[j]
            waiting_period = _waiting_period(model, state, scratch, j, away_s, mixing)
            if waiting_period > period:
                if model.recompute_free and _recompute_to_wait_less(
                    model, classes, state, scratch, j, away_s, mixing, period, waiting_period
                ):
                    changed = True
                    continue
                slowed_period = max(slowed_period, waiting_period)
        period = slowed_period
        if not changed:
            break
    return float(period)


@kernel
def _waiting_period(
    model: ModelArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    j: int,
    away_s: float,
    mixing: float,
) -> float:
    """Period of stage j if its microbatches, on their way for ``away_s``, fill its memory."""
    required = MIN_IN_FLIGHT + IN_FLIGHT_IF_MIXED * mixing
    if model.recompute_free and 0 < state.recompute[j] < state.cuts[j + 1] - state.cuts[j]:
        required += IN_FLIGHT_IF_PARTIAL * mixing
    return float((scratch.compute_s[j] + required * away_s) / scratch.in_flight_room[j])


@kernel
def _recompute_to_wait_less(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    j: int,
    away_s: float,
    mixing: float,
    period: float,
    waiting_period: float,
) -> bool:
    """Let stage j recompute more layers if it then waits less than it computes more.

    As many as do not lengthen the period further: room that is not needed smooths the flow.
    """
    before, more = state.recompute[j], state.cuts[j + 1] - state.cuts[j] + 1
    fewer = before
    best, best_period = before, waiting_period
    while more - fewer > 1:
        tried = (fewer + more) // 2
        state.recompute[j] = tried
        own_period, waits = _stage_period(model, classes, state, scratch, j), np.inf
        # all layers at once may need more memory than some of them
        if own_period < np.inf:
            waits = _waiting_period(model, state, scratch, j, away_s, mixing)
        value = max(own_period, waits, period)
        if value < best_period or (value == best_period and best != before and tried > best):
            best, best_period = tried, value
        if own_period <= max(waits, period) and own_period < np.inf:
            fewer = tried
        else:
            more = tried
    state.recompute[j] = best
    _stage_period(model, classes, state, scratch, j)
    return bool(best != before)


@kernel
def _step_with_period_s(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    period: float,
    max_s: float,
) -> float:
    """Seconds of a step whose pipeline has this period, with its averaging.

    There is no barrier: a stage ends when its last microbatch returns, averages, and begins the
    next step. So the longest sum of a stage's way back and its averaging counts.
    """
    stages = state.stages[0]
    round_trip_s, longest_s, longest_within_s, tied_ends_s = 0.0, 0.0, 0.0, 0.0
    tied = _averages_tied(model, state)
    for j in range(stages - 1, -1, -1):
        round_trip_s += scratch.compute_s[j] + scratch.delay_s[j]
        if model.two_frequency:
            encoded_bytes = _averaged_parameters(model, state, j) * model.gradient_bytes
            within_s, between_s = two_frequency_s(
                encoded_bytes,
                encoded_bytes / model.wire_ratio,
                state.counts[j],
                classes,
                scratch,
            )
            longest_within_s = max(longest_within_s, round_trip_s + within_s)
            longest_s = max(longest_s, round_trip_s + within_s + between_s)
            continue
        longest_s = max(longest_s, round_trip_s + scratch.averaging_s[j])
        if j == 0 or j == stages - 1:
            tied_ends_s = max(tied_ends_s, round_trip_s + scratch.averaging_s[j])
    # the round trip through all stages is the longest
    if model.microbatches * period + round_trip_s > max_s:
        return np.inf
    if _waits(model) and model.microbatches * period + longest_s > max_s:
        return np.inf
    if tied:
        _count_end_devices(state, scratch)
        encoded_bytes = model.tied_parameters * model.gradient_bytes
        longest_s = max(
            longest_s,
            tied_ends_s
            + averaging_s(
                encoded_bytes, encoded_bytes / model.wire_ratio, scratch.subset, classes, scratch
            ),
        )
    for s in range(len(classes.site_bandwidth)):
        # all stages average at about the same time
        sent_s = scratch.averaged_bytes[s] / classes.site_bandwidth[s]
        longest_s = max(longest_s, scratch.compute_s[stages - 1] + sent_s)
    if longest_s == np.inf:
        return np.inf  # no device of a stage may reduce, possibly within regions already
    longest_within_s = max(longest_within_s, round_trip_s)
    pipeline_s = model.microbatches * period + longest_within_s
    averaging_adds_s = longest_s - longest_within_s
    if model.delayed:
        # averaging overlaps with the next step
        averaging_adds_s = max(averaging_adds_s - pipeline_s, 0.0)
    return float(pipeline_s + averaging_adds_s / model.every_steps)
