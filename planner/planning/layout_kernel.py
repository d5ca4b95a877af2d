"""Compiled search over layouts: step-time estimate and simulated annealing.

In seconds, or in dollars of devices and messages. Seconds are M x period + the way of one
microbatch there and back + the longest averaging, or its share where only every H-th step averages.
The period is that of the fullest stage, boundary or memory when every device takes microbatches in
proportion to what it can do, whatever pipeline they came through. It leaves out how messages wait
for each other in detail: the simulator decides between the best layouts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from planner.search.arrays import Bools, Floats, Floats2, Ints, Ints2, Words
from planner.search.compiled import entry, kernel
from planner.search.rng import next_below, next_unit

IN_FLIGHT = 2.0
"""Microbatches that must be in flight beyond a stage, as a multiple of rate times delay (Little's
law): in the simulator they wait for each other. Below about 2, pipelines run dry
(docs/explanation/joint-search.md)."""
SHORT_IN_FLIGHT = 1.5
"""The same where memory allows no more: the stage is so much slower than by Little's law."""
RECOMPUTED = 4.0 / 3.0
"""Period of a stage that recomputes over that of one that does not."""
TRIALS = 12
"""Of longer periods, until a boundary carries what its stages could do."""
BISECTIONS = 12
MOVE, SWAP, LAYERS, ORDER, SPLIT, MADE = 0.34, 0.54, 0.70, 0.82, 0.89, 0.93
"""Upper ends of the shares of trials: devices from one stage to another or out, places exchanged,
layers shifted, stages put elsewhere or reversed, a stage split, one made of a place, two merged."""
ALONG = 0.5
"""Of devices that move, and stages: with layers in proportion, or with theirs."""


class ModelArrays(NamedTuple):
    """What is trained, by layer.

    Attributes
    ----------
    flops, parameters, saved_bytes
        ``float[L + 1]``: of the first layers of a microbatch, embedding included.
    output_bytes, held_bytes
        ``float[L]``: of a microbatch after each layer, on the wire and in memory.
    stem_parameters, tied_parameters
        Of the embedding; those that the head has too where it is not with the embedding.
    saves_output
        Whether a stage's output waits for its gradient.
    layer_bytes, embedding_bytes, head_bytes, message_bytes, rounded_bytes
        Fields of `planner.workload.working_memory.WorkingMemory`.
    gradient_bytes, state_bytes
        A parameter, gradients on the wire.
    wire_ratio
        Bytes of gradients on the wire over those that they have.
    every, delayed, two_frequency
        Average every this many steps; overlap averaging with the next step; average within
        regions in every step as well.
    by_cost, wait_usd_per_s
        Whether dollars are estimated, and what waiting is worth.
    most_held
        Microbatches that a device may hold.
    layers_free, recompute_free
        Whether stages may get other layers, and recompute where memory is short.
    recompute
        ``bool[most]``: stages that recompute in any case.
    """

    flops: Floats
    parameters: Floats
    saved_bytes: Floats
    output_bytes: Floats
    held_bytes: Floats
    head_flops: float
    head_parameters: float
    stem_parameters: float
    tied_parameters: float
    saves_output: bool
    layer_bytes: float
    embedding_bytes: float
    head_bytes: float
    message_bytes: float
    rounded_bytes: float
    gradient_bytes: float
    state_bytes: float
    wire_ratio: float
    microbatches: float
    every: float
    delayed: bool
    two_frequency: bool
    by_cost: bool
    wait_usd_per_s: float
    most_held: float
    layers_free: bool
    recompute_free: bool
    recompute: Bools


NO_PLACE: Any = np.int64(-1)
"""No place; no literal, for which numba would compile once more."""
FEW = 12
"""Pairs in use are sorted rather than looked for among so many times as many."""


class ClassLinks(NamedTuple):
    """Where: see `planner.planning.device_classes.DeviceClasses`; ``near``, ``far`` are the ends of
    pairs of places, nearest first, and ``rank`` is where each pair is among them; ``equal``: shares
    must be; ``usd_per_s``, ``usd_per_byte``: of devices and of messages."""

    size: Ints
    there_and_back_s: Floats2
    bandwidth: Floats2
    slower: Floats2
    capacity: Floats
    flops: Floats
    memory_bytes: Floats
    sums: Bools
    site: Ints
    line: Floats
    region: Ints
    near: Ints
    far: Ints
    rank: Ints2
    equal: bool
    usd_per_s: Floats
    usd_per_byte: Floats2


class LayoutState(NamedTuple):
    """A layout under search, for up to ``len(cuts) - 1`` stages.

    Attributes
    ----------
    stages
        ``int[1]``: S.
    counts
        ``int[most, C]``.
    cuts
        ``int[most + 1]``.
    recompute
        ``bool[most]``: as the estimate chose.
    """

    stages: Ints
    counts: Ints2
    cuts: Ints
    recompute: Bools


class LayoutScratch(NamedTuple):
    """Room to work in: shares of microbatches, what is left of them, shares of what is averaged by
    place; delays, compute, periods, rooms and dollars for a microbatch's messages by stage; by
    site, bytes of each stage's messages over its line, bytes of averaging, and a stage's devices;
    some of a stage's devices by place, and all of them by region; pairs of places in use; places
    that a stage uses, and others; how far they are away."""

    share: Floats2
    left: Floats2
    averaged: Floats
    delay_s: Floats
    own_s: Floats
    stage_s: Floats
    room: Floats
    paid: Floats
    crossing: Floats2
    averaged_bytes: Floats
    held: Floats
    some: Ints
    by_region: Floats
    pairs: Ints
    used: Ints
    others: Ints
    away: Floats


@kernel
def _places_of(row: Any, used: Any) -> int:
    """Put the places that have devices first in ``used``; returns how many."""
    count = 0
    for c in range(len(row)):
        if row[c] > 0:
            used[count] = c
            count += 1
    return count


@kernel
def _most_shared(
    row: Any, used: Any, links: Any, speed: float, members: int, none: int, share: Floats
) -> float:
    """Shares that so many vectors a second leave room for; what they add up to.

    ``used``: the places of the row that have devices. Of a pair's bandwidth each end takes half,
    then what others leave. Place ``none`` sums nothing.
    """
    for c in used:
        share[c] = 0.0
        if c == none or not links.sums[c]:
            continue
        most = max((links.capacity[c] / speed - 1.0) / (members - 2), 0.0)
        for d in used:
            if c != d or row[c] > 1:
                part = 1.0 if d == none or not links.sums[d] else 0.5
                most = min(most, part * links.slower[c, d] / speed)
        share[c] = most
    total = 0.0
    for c in used:
        if c == none or not links.sums[c]:
            continue
        most = max((links.capacity[c] / speed - 1.0) / (members - 2), 0.0)
        for d in used:
            if c != d:
                most = min(most, links.slower[c, d] / speed - share[d])
            elif row[c] > 1:
                most = min(most, 0.5 * links.slower[c, d] / speed)
        share[c] = max(most, share[c])
        total += row[c] * share[c]
    return total


@kernel
def averaging_s(
    size: float,
    plain: float,
    row: Any,
    links: Any,
    scratch: Any,
    enough: float,
) -> float:
    """Seconds in which a stage of such devices averages so many bytes on the wire.

    ``plain``: as many as they are within a site. In one round of all or, where sites' lines are
    shared, hierarchically if that is faster; see `planner.planning.hierarchical_averaging`. The
    bytes over each site's line are added to ``scratch.averaged_bytes``. Nothing faster than
    ``enough`` seconds is looked for.
    """
    seconds = one_round_s(size, row, links, scratch, enough)
    held, sent = scratch.held, scratch.averaged_bytes
    sites = len(links.line)
    if sites == 0:
        return seconds
    members, used, least, all_sum = 0.0, 0, np.inf, 0.0
    held[:] = 0.0
    for c in range(len(row)):
        held[links.site[c]] += row[c]
        members += row[c]
        all_sum += row[c] if links.sums[c] else 0
    for s in range(sites):
        used += held[s] > 0
    if used <= 1:
        return seconds
    back_s = 0.0
    for c in range(len(row)):
        for d in range(len(row)):
            if row[c] > 0 and row[d] > 0 and (c != d or row[c] > 1):
                back_s = max(back_s, links.there_and_back_s[c, d])
    for s in range(sites):
        if held[s] > 0:
            here = _summing(s, row, links)
            least = min(least, here)
            crossing = _crossing(held[s], members, here / max(all_sum, 1.0)) * size
            seconds = max(seconds, crossing / links.line[s] + back_s)
    levels = np.inf
    if used < members and least > 0 and not links.equal:
        levels = _hierarchical_s(size, plain, row, links, held, used, least)
    for s in range(sites):
        if held[s] > 0 and levels < seconds:
            sent[s] += 2 * (used - 1) / used * size
        else:
            part = _summing(s, row, links) / max(all_sum, 1.0)
            sent[s] += _crossing(held[s], members, part) * size
    return float(min(seconds, levels))


@kernel
def _summing(site: int, row: Any, links: Any) -> float:
    """Devices of a site that can sum for others."""
    found = 0.0
    for c in range(len(row)):
        found += row[c] if links.site[c] == site and links.sums[c] else 0
    return found


@kernel
def _crossing(held: float, members: float, part: float) -> float:
    """Vectors over a site's line, each way, in one round: ``part`` is summed there."""
    return held * (1.0 - part) + part * (members - held)


@kernel
def _hierarchical_s(
    size: float, plain: float, row: Any, links: Any, held: Floats, used: int, least: float
) -> float:
    """Seconds to reduce, exchange and spread, with ``least`` slices between ``used`` sites."""
    places = len(row)
    within, between, near_s, far_s = 0.0, 0.0, 0.0, 0.0
    each = 2 * (used - 1) / used * size
    for c in range(places):
        if row[c] == 0:
            continue
        s = links.site[c]
        between = max(between, each / links.line[s], each / least / links.capacity[c])
        if held[s] > 1:
            within = max(within, max((held[s] - 1) / least, 1.0) * plain / links.capacity[c])
        for d in range(places):
            if row[d] == 0 or (c == d and row[c] == 1):
                continue
            if links.site[d] == s:
                within = max(within, plain / least / links.slower[c, d])
                near_s = max(near_s, links.there_and_back_s[c, d])
            else:
                between = max(between, 2 * size / used / least / links.slower[c, d])
                far_s = max(far_s, links.there_and_back_s[c, d])
    return float(2 * (within + near_s) + between + far_s)


@kernel
def one_round_s(size: float, row: Any, links: Any, scratch: Any, enough: float) -> float:
    """The same in one round of all, whatever sites' lines.

    Equal shares or, where they are faster, such as the devices' own links and the pairs allow
    (eq. 6 of DeDLOC), with all places or without the one that has the slowest pair. Infinite where
    nobody may sum. Nothing faster than ``enough`` seconds is looked for.
    """
    members, least, pair, back_s, slowest = 0, np.inf, np.inf, 0.0, -1
    summing, clients = 0, False
    share = scratch.averaged
    used = scratch.used[: _places_of(row, scratch.used)]
    for c in used:
        members += row[c]
        summing += row[c] if links.sums[c] else 0
        clients = clients or not links.sums[c]
        least = min(least, links.capacity[c])
        for d in used:
            if c != d or row[c] > 1:
                if links.slower[c, d] < pair:
                    pair = links.slower[c, d]
                    slowest = c if row[c] <= row[d] else d
                back_s = max(back_s, links.there_and_back_s[c, d])
    if members <= 1:
        return 0.0
    seconds = max(2 * size * (members - 1) / members / least, 2 * size / members / pair)
    low = size / least
    if links.equal or summing == 0:
        return np.inf if clients else float(seconds + back_s)
    if clients and members > 2:
        # one for all, at worst
        seconds *= members
    if members > 2 and low < seconds * (1 - 1e-9):
        for _ in range(BISECTIONS):
            if seconds + back_s <= enough:
                break
            tried = math.sqrt(low * seconds)
            speed = size / tried
            total = _most_shared(row, used, links, speed, members, NO_PLACE, share)
            if total < 1.0:
                total = _most_shared(row, used, links, speed, members, slowest, share)
            if total >= 1.0:
                seconds = tried
            else:
                low = tried
    return float(seconds + back_s)


@kernel
def two_frequency_s(
    size: float, plain: float, row: Any, links: Any, scratch: Any, enough: float
) -> tuple[float, float]:
    """Seconds in which regions average ``plain`` bytes each, and then ``size`` between them.

    See `planner.planning.two_frequency_averaging`; what sites' lines take beside is left aside.
    Nothing faster than ``enough`` seconds is looked for within a region.
    """
    some, held = scratch.some, scratch.by_region
    places, used, least, within, spread = len(row), 0, np.inf, enough, 0.0
    held[:] = 0.0
    for c in range(places):
        held[links.region[c]] += row[c]
    for r in range(len(held)):
        if held[r] == 0:
            continue
        used += 1
        able = 0.0
        for c in range(places):
            some[c] = row[c] if links.region[c] == r else 0
            able += some[c] if links.sums[c] else 0
        least = min(least, able if held[r] > 1 else 1.0)
        within = max(within, one_round_s(plain, some, links, scratch, within))
    if used == 1 or least == 0:
        return within, 0.0
    for c in range(places):
        if row[c] == 0:
            continue
        r = links.region[c]
        if held[r] > 1:
            near_s = (held[r] - 1) / least * plain / links.capacity[c]
            back_s = 0.0
            for d in range(places):
                if row[d] > 0 and links.region[d] == r and (c != d or row[c] > 1):
                    near_s = max(near_s, plain / least / links.slower[c, d])
                    back_s = max(back_s, links.there_and_back_s[c, d])
            spread = max(spread, near_s + back_s)
    some[:] = 0
    for r in range(len(held)):
        best = -1
        for c in range(places):
            if row[c] == 0 or links.region[c] != r:
                continue
            more = best == -1 or links.capacity[c] > links.capacity[best]
            if best == -1 or (links.sums[c] and (more or not links.sums[best])):
                best = c
        if best >= 0:
            some[best] = 1
    return within, one_round_s(size / least, some, links, scratch, 0.0) + spread


@kernel
def capacity(model: Any, links: Any, state: Any, j: int, c: int) -> tuple[float, float]:
    """Microbatches that a device of a place holds on a stage, without and with recomputation."""
    last = j == state.stages[0] - 1
    a, b = state.cuts[j], state.cuts[j + 1]
    parameters = _stage_parameters(model, state, j)
    saved = model.saved_bytes[b] - model.saved_bytes[a]
    saved += model.held_bytes[b - 1] if model.saves_output else 0.0
    rounded = parameters
    if j == 0:
        rounded -= model.stem_parameters - (model.tied_parameters if last else 0.0)
    left = links.memory_bytes[c] - parameters * model.state_bytes
    left -= rounded * model.rounded_bytes + (0.0 if j == 0 and last else model.message_bytes)
    kept = (model.held_bytes[a - 1] if j > 0 else 0.0) + (model.held_bytes[b - 1] if last else 0.0)
    every = min(model.microbatches, model.most_held)
    head = model.head_bytes if last else 0.0
    scratch = max(model.layer_bytes, head)
    again = left - max(model.layer_bytes + saved, head)
    if j == 0:
        scratch = max(scratch, model.embedding_bytes - saved)
        again = min(again, left - model.embedding_bytes)
    plain = min(np.floor((left - scratch) / saved), every) if saved > 0 else every
    few = min(np.floor(again / kept), every) if kept > 0 else every
    return (plain if left >= scratch else 0.0), (few if again >= 0 else 0.0)


@kernel
def _stage_period(model: Any, links: Any, state: Any, scratch: Any, j: int) -> float:
    """Period of stage j by itself, infinite if it is too full; sets shares, own seconds, room."""
    last = j == state.stages[0] - 1
    a, b = state.cuts[j], state.cuts[j + 1]
    forward = model.flops[b] - model.flops[a]
    sent = (0.0 if last else model.output_bytes[b - 1]) + (
        model.output_bytes[a - 1] if j > 0 else 0.0
    )
    row = state.counts[j]
    places = len(row)
    plain_room, again_room = 0.0, 0.0
    for c in range(places):
        if row[c] > 0:
            plain, again = capacity(model, links, state, j, c)
            if plain < 1 and model.recompute_free:
                state.recompute[j] = True
            if (again if state.recompute[j] else plain) < 1:
                return np.inf
            plain_room += row[c] * plain
            again_room += row[c] * again
    work = (3.0 + (1.0 if state.recompute[j] else 0.0)) * forward
    work += model.head_flops if last else 0.0
    rate = 0.0
    for c in range(places):
        scratch.share[j, c] = 0.0
        if row[c] > 0:
            busy = max(work / links.flops[c], sent / links.capacity[c])
            scratch.share[j, c] = row[c] / busy
            rate += row[c] / busy
    if rate == 0.0:
        return np.inf
    own = 0.0
    for c in range(places):
        scratch.share[j, c] /= rate
        own += scratch.share[j, c] * work / links.flops[c]
    scratch.own_s[j] = own
    scratch.room[j] = again_room if state.recompute[j] else plain_room
    return float(1.0 / rate)


@kernel
def _pairs_in_use(here: Any, there: Any, links: Any, scratch: Any) -> int:
    """Put ranks of pairs of places that both have devices first in ``scratch.pairs``, in order."""
    found, pairs = scratch.pairs, 0
    before, after = _places_of(here, scratch.used), _places_of(there, scratch.others)
    count = before * after
    if FEW * count > len(links.near):
        for k in range(len(links.near)):
            if here[links.near[k]] > 0 and there[links.far[k]] > 0:
                found[pairs] = k
                pairs += 1
        return pairs
    for i in range(before):
        for j in range(after):
            # sorted as they come in
            rank, k = links.rank[scratch.used[i], scratch.others[j]], pairs
            while k > 0 and found[k - 1] > rank:
                found[k] = found[k - 1]
                k -= 1
            found[k] = rank
            pairs += 1
    return pairs


@kernel
def _boundary_period(
    model: Any, links: Any, state: Any, scratch: Any, j: int, period: float, most: float
) -> float:
    """A period at which the boundary after stage j carries its shares, nearest pairs first.

    One that is longer than ``most`` is not made out.
    """
    size = model.output_bytes[state.cuts[j + 1] - 1]
    here, there = state.counts[j], state.counts[j + 1]
    places = len(here)
    pairs = _pairs_in_use(here, there, links, scratch)
    left, sites = 1.0, len(links.line)
    for _ in range(TRIALS):
        left, delay, paid = 1.0, 0.0, 0.0
        for q in range(sites):
            scratch.crossing[j, q] = 0.0
        for c in range(places):
            scratch.left[0, c] = scratch.share[j, c]
            scratch.left[1, c] = scratch.share[j + 1, c]
        for k in range(pairs):
            c, d = links.near[scratch.pairs[k]], links.far[scratch.pairs[k]]
            if scratch.left[0, c] <= 0.0 or scratch.left[1, d] <= 0.0:
                continue
            carried = period * here[c] * there[d] * links.slower[c, d] / size
            part = min(scratch.left[0, c], scratch.left[1, d], carried)
            scratch.left[0, c] -= part
            scratch.left[1, d] -= part
            left -= part
            if sites > 0 and links.site[c] != links.site[d]:
                # activations there and gradients back
                scratch.crossing[j, links.site[c]] += part * size
                scratch.crossing[j, links.site[d]] += part * size
            both = size / links.bandwidth[c, d] + size / links.bandwidth[d, c]
            delay += part * (links.there_and_back_s[c, d] + both)
            paid += part * size * (links.usd_per_byte[c, d] + links.usd_per_byte[d, c])
        scratch.delay_s[j] = delay
        scratch.paid[j] = paid
        if left < 1e-6:
            return period
        period *= 1.0 + max(0.02, 0.7 * left)
        if period > most:
            break
    return float(period * (1.0 + 2.0 * left))


@entry
def estimate(
    model: ModelArrays, links: ClassLinks, state: LayoutState, scratch: LayoutScratch, most: float
) -> float:
    """Estimated seconds or dollars of a step; sets which stages recompute.

    Infinite where memory does not hold it, or where it is seen early that it is above ``most``: by
    what stages recompute then, more of which may still be found to, with other parts for places.
    """
    if not model.by_cost:
        return float(_step_s(model, links, state, scratch, most))
    stages = state.stages[0]
    each, messages = model.wait_usd_per_s, 0.0
    for j in range(stages):
        for c in range(state.counts.shape[1]):
            each += state.counts[j, c] * links.usd_per_s[c]
    seconds = _step_s(model, links, state, scratch, most / each if each > 0 else np.inf)
    if seconds == np.inf:
        return np.inf
    for j in range(stages):
        row, members, averaged, rare = state.counts[j], 0.0, 0.0, 0.0
        held = scratch.by_region
        held[:] = 0.0
        for c in range(len(row)):
            members += row[c]
            held[links.region[c]] += row[c]
        for c in range(len(row)):
            for d in range(len(row)):
                paid = row[c] * row[d] * links.usd_per_byte[c, d]
                averaged += paid
                if paid > 0:
                    rare += paid / (held[links.region[c]] * held[links.region[d]])
        if model.two_frequency:
            # one device a region, as it were
            averaged, members = rare, 0.0
            for r in range(len(held)):
                members += held[r] > 0
        if j < stages - 1:
            messages += model.microbatches * scratch.paid[j]
        # shares are equal, or about so
        size = _averaged_parameters(model, state, j) * model.gradient_bytes
        messages += 2.0 * size / members * averaged / model.every
    if _averages_tied(model, state):
        _join_ends(state, scratch)
        row, members, averaged = scratch.some, 0.0, 0.0
        for c in range(len(row)):
            members += row[c]
            for d in range(len(row)):
                averaged += row[c] * row[d] * links.usd_per_byte[c, d]
        size = model.tied_parameters * model.gradient_bytes
        messages += 2.0 * size / members * averaged
    return float(seconds * each + messages)


@kernel
def _stage_parameters(model: Any, state: Any, j: int) -> float:
    """With the head on the last stage."""
    parameters = model.parameters[state.cuts[j + 1]] - model.parameters[state.cuts[j]]
    if j == state.stages[0] - 1:
        parameters += model.head_parameters + (model.tied_parameters if j > 0 else 0.0)
    return float(parameters)


@kernel
def _averages_tied(model: Any, state: Any) -> bool:
    """Whether first and last stage average what embedding and head share, after all else."""
    apart = model.tied_parameters > 0 and state.stages[0] > 1
    return bool(apart and model.every == 1.0 and not model.delayed and not model.two_frequency)


@kernel
def _averaged_parameters(model: Any, state: Any, j: int) -> float:
    """Of a stage, without what another one has too and averages with it."""
    parameters = _stage_parameters(model, state, j)
    if (j == 0 or j == state.stages[0] - 1) and _averages_tied(model, state):
        parameters -= model.tied_parameters
    return float(parameters)


@kernel
def _join_ends(state: Any, scratch: Any) -> None:
    """Devices of first and last stage by place."""
    for c in range(state.counts.shape[1]):
        scratch.some[c] = state.counts[0, c] + state.counts[state.stages[0] - 1, c]


@kernel
def _step_s(model: Any, links: Any, state: Any, scratch: Any, most: float) -> float:
    """Estimated seconds, infinite where it is seen early that they are more than ``most``.

    A stage recomputes where what must be in flight does not fit otherwise, if it may.
    """
    stages = state.stages[0]
    for q in range(len(model.recompute)):
        state.recompute[q] = model.recompute[q]
    period, most_period = 0.0, min(most / model.microbatches, 1e300)
    for _ in range(stages + 1):
        period = 0.0
        for j in range(stages):
            scratch.stage_s[j] = _stage_period(model, links, state, scratch, j)
            period = max(period, scratch.stage_s[j])
        for j in range(stages - 1):
            if period > most_period:
                break
            period = _boundary_period(model, links, state, scratch, j, period, most_period)
        if period > most_period:
            return np.inf
        for s in range(len(links.line)):
            crossing = 0.0
            for j in range(stages - 1):
                crossing += scratch.crossing[j, s]
            period = max(period, crossing / links.line[s])
        scratch.delay_s[stages - 1] = 0.0
        way, slowed, changed = 0.0, period, False
        for j in range(stages - 1, -1, -1):
            way += scratch.own_s[j] + scratch.delay_s[j]
            held = IN_FLIGHT * way - (IN_FLIGHT - 1.0) * scratch.own_s[j]
            if held > period * scratch.room[j]:
                # with fewer in flight the stage waits, which may cost less than another F
                waits_s = SHORT_IN_FLIGHT * way / scratch.room[j]
                again_s = scratch.stage_s[j] * RECOMPUTED
                if (
                    state.recompute[j]
                    or not model.recompute_free
                    or waits_s <= max(period, again_s)
                ):
                    slowed = max(slowed, waits_s)
                else:
                    state.recompute[j] = changed = True
        period = slowed
        if not changed:
            break
    # no barrier: a stage has its microbatches' way from there on, then averages, then begins again
    way, longest, each, ends = 0.0, 0.0, 0.0, 0.0
    waits = model.every == 1.0 and not model.delayed
    tied = _averages_tied(model, state)
    scratch.averaged_bytes[:] = 0.0
    for j in range(stages - 1, -1, -1):
        way += scratch.own_s[j] + scratch.delay_s[j]
        size = _averaged_parameters(model, state, j) * model.gradient_bytes
        row = state.counts[j]
        plain, enough = size / model.wire_ratio, longest - way
        if tied and j == 0:
            enough = ends - way
        if model.two_frequency:
            within, between = two_frequency_s(
                size, plain, row, links, scratch, max(each - way, 0.0)
            )
            each = max(each, way + within)
            longest = max(longest, way + within + between)
            continue
        seconds = averaging_s(size, plain, row, links, scratch, enough)
        longest = max(longest, way + seconds)
        if j == 0 or j == stages - 1:
            ends = max(ends, way + seconds)
        if waits and model.microbatches * period + longest > most:
            return np.inf
    if tied:
        _join_ends(state, scratch)
        size = model.tied_parameters * model.gradient_bytes
        plain, row, enough = size / model.wire_ratio, scratch.some, longest - ends
        seconds = averaging_s(size, plain, row, links, scratch, enough)
        longest = max(longest, ends + seconds)
    for s in range(len(links.line)):
        # all stages average at about the same time
        sent_s = scratch.averaged_bytes[s] / links.line[s]
        longest = max(longest, scratch.own_s[stages - 1] + sent_s)
    if longest == np.inf:
        return np.inf  # nobody of a stage sums, maybe within regions already
    # the longest way is that through all stages
    each = max(each, way)
    alone = model.microbatches * period + each
    averages = longest - each
    if model.delayed:
        # beside the next step
        averages = max(averages - alone, 0.0)
    return float(alone + averages / model.every)


@kernel
def _row(counts: Any, source: int, target: int) -> None:
    for c in range(counts.shape[1]):
        counts[target, c] = counts[source, c]


@kernel
def _members(state: Any, j: int) -> int:
    total = 0
    for c in range(state.counts.shape[1]):
        total += state.counts[j, c]
    return total


@kernel
def _copy(source: Any, target: Any) -> None:
    target.stages[0] = source.stages[0]
    for j in range(source.counts.shape[0]):
        target.cuts[j] = source.cuts[j]
        target.recompute[j] = source.recompute[j]
        for c in range(source.counts.shape[1]):
            target.counts[j, c] = source.counts[j, c]
    target.cuts[len(source.cuts) - 1] = source.cuts[len(source.cuts) - 1]


@kernel
def _speed(links: Any, state: Any, j: int) -> float:
    """What a stage's devices compute a second."""
    found = 0.0
    for c in range(state.counts.shape[1]):
        found += state.counts[j, c] * links.flops[c]
    return found


@kernel
def _shift(state: Any, i: int, j: int, layers: int) -> bool:
    """So many layers from stage i to stage j, over those between; whether each keeps one."""
    for k in range(i + 1, j + 1):
        state.cuts[k] -= layers
    for k in range(j + 1, i + 1):
        state.cuts[k] += layers
    sound = True
    for k in range(min(i, j), max(i, j) + 1):
        sound = sound and state.cuts[k + 1] > state.cuts[k]
    return sound


@kernel
def _move_devices(model: Any, links: Any, state: Any, random: Any) -> bool:
    """Some or all devices of a place, from one stage to another, or out, or in.

    Between stages half of them take layers along, in proportion.
    """
    stages = state.stages[0]
    c = next_below(random, len(links.size))
    i, j = next_below(random, stages + 1) - 1, next_below(random, stages + 1) - 1
    if i == j:
        return False
    have = links.size[c]
    if i >= 0:
        have = state.counts[i, c]
    else:
        for q in range(stages):
            have -= state.counts[q, c]
    if have <= 0:
        return False
    k = have if next_unit(random) < 0.4 else next_below(random, have) + 1
    if i >= 0 and j >= 0 and model.layers_free and next_unit(random) < ALONG:
        part = k * links.flops[c] / _speed(links, state, i)
        layers = int(part * (state.cuts[i + 1] - state.cuts[i]) + next_unit(random))
        if layers > 0 and not _shift(state, i, j, layers):
            return False
    if i >= 0:
        state.counts[i, c] -= k
    if j >= 0:
        state.counts[j, c] += k
    return True


@kernel
def _swap_places(state: Any, random: Any) -> bool:
    """As many devices of one place against those of another between two stages."""
    stages, places = state.stages[0], state.counts.shape[1]
    i, j = next_below(random, stages), next_below(random, stages)
    a, b = next_below(random, places), next_below(random, places)
    most = min(state.counts[i, a], state.counts[j, b])
    if i == j or a == b or most == 0:
        return False
    k = 1 if next_unit(random) < 0.5 else most
    state.counts[i, a] -= k
    state.counts[j, a] += k
    state.counts[j, b] -= k
    state.counts[i, b] += k
    return True


@kernel
def _shift_layers(state: Any, random: Any) -> bool:
    """A layer from one stage to a neighbour, or over the stages between to a distant one."""
    stages = state.stages[0]
    if stages < 2:
        return False
    i = next_below(random, stages)
    j = next_below(random, stages) if next_unit(random) < 0.4 else i + 2 * next_below(random, 2) - 1
    return 0 <= j < stages and i != j and bool(_shift(state, i, j, 1))


@kernel
def _exchange(state: Any, i: int, j: int, along: bool) -> None:
    """Devices of two neighbouring stages, and their numbers of layers if ``along``."""
    for c in range(state.counts.shape[1]):
        kept = state.counts[i, c]
        state.counts[i, c] = state.counts[j, c]
        state.counts[j, c] = kept
    if along:
        state.cuts[j] = state.cuts[i] + state.cuts[j + 1] - state.cuts[j]


@kernel
def _reorder(model: Any, state: Any, random: Any) -> bool:
    """A stage to another place in the order, or a run of stages in reverse; half of the time
    with their layers."""
    stages = state.stages[0]
    i, j = next_below(random, stages), next_below(random, stages)
    if i == j:
        return False
    along = model.layers_free and next_unit(random) < ALONG
    low, high = min(i, j), max(i, j)
    if next_unit(random) < 0.4:
        for end in range(high, low, -1):
            for k in range(low, end):
                _exchange(state, k, k + 1, along)
    elif i < j:
        for k in range(i, j):
            _exchange(state, k, k + 1, along)
    else:
        for k in range(i - 1, j - 1, -1):
            _exchange(state, k, k + 1, along)
    return True


@kernel
def _split(model: Any, links: Any, state: Any, scratch: Any, random: Any) -> bool:
    """A stage in two, with layers in proportion: half of every place, or those near one of them."""
    stages = state.stages[0]
    j = next_below(random, stages)
    a, b = state.cuts[j], state.cuts[j + 1]
    if stages == len(state.counts) or b - a < 2 or _members(state, j) == 0:
        return False
    for k in range(stages, j, -1):
        _row(state.counts, k - 1, k)
        state.cuts[k + 1] = state.cuts[k]
    state.stages[0] += 1
    here, there = state.counts[j], state.counts[j + 1]
    used = scratch.used[: _places_of(here, scratch.used)]
    if len(used) == 1 or next_unit(random) < 0.2:
        for c in used:
            here[c] //= 2
            there[c] -= here[c]
    else:
        first = used[next_below(random, len(used))]
        size, away = 2 * model.output_bytes[a], scratch.away[: len(used)]
        for k, c in enumerate(used):
            # places as near as each other come in any order
            both_s = links.there_and_back_s[first, c] + size / links.slower[first, c]
            away[k] = -1.0 if c == first else both_s * (1.0 + 0.2 * next_unit(random))
        near = next_below(random, len(used) - 1) + 1
        side = next_unit(random) < 0.5
        for k in range(1, len(used)):
            x, u, q = away[k], used[k], k - 1
            while q >= 0 and away[q] > x:
                away[q + 1], used[q + 1] = away[q], used[q]
                q -= 1
            away[q + 1], used[q + 1] = x, u
        for k, c in enumerate(used):
            if (k < near) == side:
                there[c] = 0
            else:
                here[c] = 0
    one, two = _speed(links, state, j), _speed(links, state, j + 1)
    if one == 0.0 or two == 0.0:
        return False
    cut = int((b - a) * one / (one + two) + next_unit(random))
    state.cuts[j + 1] = a + min(max(cut, 1), b - a - 1)
    return True


@kernel
def _merge(state: Any, random: Any) -> bool:
    """Two neighbouring stages in one."""
    stages = state.stages[0]
    if stages < 2:
        return False
    j = next_below(random, stages - 1)
    for c in range(state.counts.shape[1]):
        state.counts[j, c] += state.counts[j + 1, c]
    for k in range(j + 1, stages - 1):
        _row(state.counts, k + 1, k)
    for k in range(j + 1, stages):
        state.cuts[k] = state.cuts[k + 1]
    for c in range(state.counts.shape[1]):
        state.counts[stages - 1, c] = 0
    state.stages[0] -= 1
    return True


@kernel
def _make(model: Any, links: Any, state: Any, random: Any) -> bool:
    """A stage of all devices of a place, anywhere in the order.

    Its layers, in proportion, were those of the stage that had most of these devices.
    """
    stages = state.stages[0]
    c, j = next_below(random, len(links.size)), next_below(random, stages + 1)
    if stages == len(state.counts):
        return False
    i, total = -1, links.size[c] * links.flops[c]
    for k in range(stages):
        total += _speed(links, state, k) - state.counts[k, c] * links.flops[c]
        if state.counts[k, c] > 0 and (i < 0 or state.counts[k, c] > state.counts[i, c]):
            i = k
    if i < 0:
        i = next_below(random, stages)
    part = links.size[c] * links.flops[c] / total
    layers = max(1, int(len(model.output_bytes) * part + next_unit(random)))
    layers = min(layers, state.cuts[i + 1] - state.cuts[i] - 1)
    if layers < 1:
        return False
    for k in range(stages):
        state.counts[k, c] = 0
    for k in range(stages, j, -1):
        _row(state.counts, k - 1, k)
        state.cuts[k + 1] = state.cuts[k]
    state.cuts[j + 1] = state.cuts[j]
    for q in range(state.counts.shape[1]):
        state.counts[j, q] = 0
    state.counts[j, c] = links.size[c]
    state.stages[0] += 1
    return bool(_shift(state, i + (i >= j), j, layers))


@entry
def mutate(
    model: ModelArrays,
    links: ClassLinks,
    state: LayoutState,
    scratch: LayoutScratch,
    random: Words,
    fixed: bool,
) -> bool:
    """One random change; whether there was one.

    ``fixed``: the number of stages stays; two are merged and another is split. Where layers are
    given they stay, and with them the number of stages.
    """
    u, free = next_unit(random), model.layers_free
    if u < MOVE or (u >= ORDER and not free):
        return bool(_move_devices(model, links, state, random))
    if u < SWAP or (u < LAYERS and not free):
        return bool(_swap_places(state, random))
    if u < LAYERS:
        return bool(_shift_layers(state, random))
    if u < ORDER:
        return bool(_reorder(model, state, random))
    if fixed:
        return bool(_merge(state, random)) and bool(_split(model, links, state, scratch, random))
    if u < SPLIT:
        return bool(_split(model, links, state, scratch, random))
    if u < MADE:
        return bool(_make(model, links, state, random))
    return bool(_merge(state, random))


@entry
def anneal(
    model: ModelArrays,
    links: ClassLinks,
    state: LayoutState,
    tried: LayoutState,
    best: LayoutState,
    scratch: LayoutScratch,
    random: Words,
    values: Floats,
    trials: int,
    warm: float,
    cold: float,
    fixed: bool,
) -> None:
    """So many trials from ``state``; ``values`` has its estimate and that of ``best``.

    Temperatures, relative to the estimate, fall from ``warm`` to ``cold``.
    """
    for k in range(trials):
        _copy(state, tried)
        if not mutate(model, links, tried, scratch, random, fixed):
            continue
        heat = warm * (cold / warm) ** (k / trials) * values[0]
        most = values[0] - heat * math.log(max(next_unit(random), 1e-300))
        found = estimate(model, links, tried, scratch, most)
        if found > most:
            continue
        _copy(tried, state)
        values[0] = found
        if found < values[1] * (1 - 1e-12):
            _copy(tried, best)
            values[1] = found
