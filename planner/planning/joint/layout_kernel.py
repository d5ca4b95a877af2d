"""Compiled search over layouts: estimate of the step time, and simulated annealing.

The estimate, in seconds or dollars, is M x period + the latency of one microbatch through all
stages and back + the longest averaging, divided by H if only every H-th step averages. The period
is that of the slowest stage, boundary or memory limit, if every device takes microbatches in
proportion to its capacity, whichever pipeline they came through. Queueing of messages is left to
the simulator, which decides between the best layouts.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from planner.search.arrays import Bools, Floats, Floats2, Ints, Ints2, Words
from planner.search.compiled import entry, kernel
from planner.search.rng import next_below, next_unit

IN_FLIGHT = 2.0
"""Microbatches that must be in flight beyond a stage, as a multiple of rate times delay (Little's
law). In the simulator they queue; below about 2, pipelines run dry. See
docs/explanation/joint-search.md."""
SHORT_IN_FLIGHT = 1.5
"""The same if memory allows no more; the stage then slows down in proportion."""
RECOMPUTE_FACTOR = 4.0 / 3.0
"""Period of a stage that recomputes, relative to one that does not."""
PERIOD_TRIALS = 12
"""Increases of the period until a boundary carries the flow of its stages."""
BISECTIONS = 12
MIN_PERIOD_RISE, PERIOD_RISE = 0.02, 0.7
"""A trial raises the period by `PERIOD_RISE` times the unrouted share, at least by the first."""
CARRIED = 1e-6
"""Share of the flow without a pair that counts as none."""
UNROUTED_FACTOR = 2.0
"""After the last trial, relative increase of the period per share of the flow without a pair."""


class LayoutMoveShares(NamedTuple):
    """Probability of each move; the remainder up to 1 merges two stages.

    Attributes
    ----------
    devices
        Devices to another stage, in or out.
    swap
        Exchange of devices between stages.
    layers
        Layers to another stage.
    reorder
        Order of stages.
    split
        Split of a stage.
    add
        New stage for a class.
    """

    devices: float = 0.34
    swap: float = 0.20
    layers: float = 0.16
    reorder: float = 0.12
    split: float = 0.07
    add: float = 0.04


# rounded, so that sums are the same numbers whatever the order
P_DEVICES, P_SWAP, P_LAYERS, P_REORDER, P_SPLIT, P_ADD = (
    round(edge, 9) for edge in accumulate(LayoutMoveShares())
)
"""Cumulative probabilities of `LayoutMoveShares`."""
P_ALL_DEVICES = 0.4
"""Probability that a move takes all devices of the class."""
P_DISTANT = 0.4
"""Probability that a layer moves to any stage, not to a neighbouring one."""
P_REVERSE = 0.4
"""Probability that a run of stages is reversed, not one of them moved."""
P_HALVE = 0.2
"""Probability that a split halves each class, instead of separating near classes from far ones."""
DISTANCE_NOISE = 0.2
"""Largest relative random increase of distances in a split: classes at equal distance get a random
order."""
P_WITH_LAYERS = 0.5
"""Probability that devices or stages that move take layers along."""


class ModelArrays(NamedTuple):
    """The model, by layer; L layers.

    Attributes
    ----------
    flops, parameters, saved_bytes
        ``float[L + 1]``: sums over the first layers, for one microbatch, including the embedding.
    output_bytes, held_bytes
        ``float[L]``: output of each layer for one microbatch, on the wire and in memory.
    stem_parameters, tied_parameters
        Parameters of the embedding; parameters that the head shares with it.
    saves_output
        Whether a stage keeps its output until the gradient arrives.
    layer_bytes, embedding_bytes, head_bytes, message_bytes, rounded_bytes
        Fields of `planner.workload.working_memory.WorkingMemory`.
    gradient_bytes, state_bytes
        Bytes per parameter: of gradients on the wire, and of weights and optimizer state.
    wire_ratio
        Bytes of encoded gradients over unencoded ones.
    every_steps, delayed, two_frequency
        Average every this many steps; overlap averaging with the next step; average within regions
        in every step as well.
    by_cost, wait_usd_per_s
        Whether the objective is cost, and the value of waiting.
    max_in_flight
        Microbatches between forward and backward that a device may hold.
    layers_free, recompute_free
        Whether layers may move, and whether stages may recompute where memory is short.
    recompute
        ``bool[S]``: stages that always recompute.
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
    every_steps: float
    delayed: bool
    two_frequency: bool
    by_cost: bool
    wait_usd_per_s: float
    max_in_flight: float
    layers_free: bool
    recompute_free: bool
    recompute: Bools


NO_CLASS: Any = np.int64(-1)
"""No device class. Not a literal, for which numba would compile a second version."""
SORT_LIMIT = 12
"""With fewer pairs than this many times those in use, all are scanned; else these are sorted."""


class ClassArrays(NamedTuple):
    """`DeviceClasses` (`planner.planning.joint.device_classes`) as arrays, with ordered pairs.

    ``pair_source`` and ``pair_target`` list all pairs by rising round-trip time, ``pair_rank`` the
    position of each pair in that list; ``equal_shares`` forbids adaptive shares.
    """

    size: Ints
    rtt_s: Floats2
    bandwidth: Floats2
    pair_bandwidth: Floats2
    capacity: Floats
    flops_per_s: Floats
    memory_bytes: Floats
    can_aggregate: Bools
    site: Ints
    site_bandwidth: Floats
    region: Ints
    pair_source: Ints
    pair_target: Ints
    pair_rank: Ints2
    equal_shares: bool
    usd_per_s: Floats
    usd_per_byte: Floats2


class LayoutState(NamedTuple):
    """A layout under search, with up to ``most`` stages.

    Attributes
    ----------
    stages
        ``int[1]``: number of stages.
    counts
        ``int[most, C]``: devices per stage and class.
    cuts
        ``int[most + 1]``: first layer of every stage, and the number of layers.
    recompute
        ``bool[most]``: stages that recompute, as the estimate chose.
    """

    stages: Ints
    counts: Ints2
    cuts: Ints
    recompute: Bools


class LayoutScratch(NamedTuple):
    """Work arrays of the estimate.

    Attributes
    ----------
    share
        ``float[S, C]``: fraction of the microbatches by stage and class.
    unrouted
        ``float[2, C]``: what is still to be routed over a boundary, on both sides.
    reduce_share
        ``float[C]``: share of the vector that a device reduces.
    delay_s, compute_s, period_s, in_flight_room, messages_usd
        ``float[S]``: per stage, seconds to the next stage and back, seconds of computation, period
        of the stage alone, microbatches that fit, and dollars of a microbatch's messages.
    site_bytes
        ``float[S, K]``: bytes over each site's line for one microbatch.
    averaged_bytes, site_devices
        ``float[K]``: bytes of averaging over each site's line, and devices of a stage at the site.
    subset
        ``int[C]``: some of a stage's devices.
    region_devices
        ``float[C]``: devices of a stage by region.
    pairs, used, others
        Pairs of classes in use; classes that a stage uses, and those of its neighbour.
    distance_s
        ``float[C]``: seconds from a class to the others.
    """

    share: Floats2
    unrouted: Floats2
    reduce_share: Floats
    delay_s: Floats
    compute_s: Floats
    period_s: Floats
    in_flight_room: Floats
    messages_usd: Floats
    site_bytes: Floats2
    averaged_bytes: Floats
    site_devices: Floats
    subset: Ints
    region_devices: Floats
    pairs: Ints
    used: Ints
    others: Ints
    distance_s: Floats

    @classmethod
    def of(cls, max_stages: int, num_classes: int, num_sites: int) -> LayoutScratch:
        """Work arrays for so many stages, device classes and sites."""
        per_class, per_stage, per_site = num_classes, max_stages, num_sites
        return cls(
            share=np.zeros((max_stages, num_classes)),
            unrouted=np.zeros((2, num_classes)),
            reduce_share=np.zeros(per_class),
            delay_s=np.zeros(per_stage),
            compute_s=np.zeros(per_stage),
            period_s=np.zeros(per_stage),
            in_flight_room=np.zeros(per_stage),
            messages_usd=np.zeros(per_stage),
            site_bytes=np.zeros((max_stages, num_sites)),
            averaged_bytes=np.zeros(per_site),
            site_devices=np.zeros(per_site),
            subset=np.zeros(per_class, dtype=np.int64),
            region_devices=np.zeros(per_class),
            pairs=np.zeros(num_classes**2, dtype=np.int64),
            used=np.zeros(per_class, dtype=np.int64),
            others=np.zeros(per_class, dtype=np.int64),
            distance_s=np.zeros(per_class),
        )


@kernel
def _classes_in(row: Ints, used: Ints) -> int:
    """List the classes that have devices at the front of ``used``; return their number."""
    count = 0
    for c in range(len(row)):
        if row[c] > 0:
            used[count] = c
            count += 1
    return count


@kernel
def _largest_shares(
    row: Ints,
    used: Ints,
    classes: ClassArrays,
    speed: float,
    members: int,
    none: int,
    share: Floats,
) -> float:
    """Largest shares to reduce at ``speed`` vectors per second; returns their sum.

    Each end of a pair first gets half of its bandwidth, then what the other end leaves. Class
    ``none`` reduces nothing.
    """
    for c in used:
        share[c] = 0.0
        if c == none or not classes.can_aggregate[c]:
            continue
        max_share = max((classes.capacity[c] / speed - 1.0) / (members - 2), 0.0)
        for d in used:
            if c != d or row[c] > 1:
                fraction = 1.0 if d == none or not classes.can_aggregate[d] else 0.5
                max_share = min(max_share, fraction * classes.pair_bandwidth[c, d] / speed)
        share[c] = max_share
    total = 0.0
    for c in used:
        if c == none or not classes.can_aggregate[c]:
            continue
        max_share = max((classes.capacity[c] / speed - 1.0) / (members - 2), 0.0)
        for d in used:
            if c != d:
                max_share = min(max_share, classes.pair_bandwidth[c, d] / speed - share[d])
            elif row[c] > 1:
                max_share = min(max_share, 0.5 * classes.pair_bandwidth[c, d] / speed)
        share[c] = max(max_share, share[c])
        total += row[c] * share[c]
    return total


@kernel
def averaging_s(
    encoded_bytes: float,
    unencoded_bytes: float,
    row: Ints,
    classes: ClassArrays,
    scratch: LayoutScratch,
    enough_s: float,
) -> float:
    """Seconds for the devices of a stage to average ``encoded_bytes`` on the wire.

    In one round or, if sites share a line and it is faster, hierarchically
    (`planner.planning.averaging.hierarchical`), where ``unencoded_bytes`` are sent within a site.
    Adds the bytes over each site's line to ``scratch.averaged_bytes``. Stops early at ``enough_s``.
    """
    seconds = one_round_s(encoded_bytes, row, classes, scratch, enough_s)
    devices_at, averaged_bytes = scratch.site_devices, scratch.averaged_bytes
    sites = len(classes.site_bandwidth)
    if sites == 0:
        return seconds
    members, num_sites, fewest, num_aggregators = 0.0, 0, np.inf, 0.0
    devices_at[:] = 0.0
    for c in range(len(row)):
        devices_at[classes.site[c]] += row[c]
        members += row[c]
        num_aggregators += row[c] if classes.can_aggregate[c] else 0
    for s in range(sites):
        num_sites += devices_at[s] > 0
    if num_sites <= 1:
        return seconds
    rtt_s = 0.0
    for c in range(len(row)):
        for d in range(len(row)):
            if row[c] > 0 and row[d] > 0 and (c != d or row[c] > 1):
                rtt_s = max(rtt_s, classes.rtt_s[c, d])
    for s in range(sites):
        if devices_at[s] > 0:
            here = _aggregators_at(s, row, classes)
            fewest = min(fewest, here)
            crossing = (
                _vectors_over_line(devices_at[s], members, here / max(num_aggregators, 1.0))
                * encoded_bytes
            )
            seconds = max(seconds, crossing / classes.site_bandwidth[s] + rtt_s)
    hierarchical_s = np.inf
    if num_sites < members and fewest > 0 and not classes.equal_shares:
        hierarchical_s = _hierarchical_s(
            encoded_bytes, unencoded_bytes, row, classes, devices_at, num_sites, fewest
        )
    for s in range(sites):
        if devices_at[s] > 0 and hierarchical_s < seconds:
            averaged_bytes[s] += 2 * (num_sites - 1) / num_sites * encoded_bytes
        else:
            part = _aggregators_at(s, row, classes) / max(num_aggregators, 1.0)
            averaged_bytes[s] += _vectors_over_line(devices_at[s], members, part) * encoded_bytes
    return float(min(seconds, hierarchical_s))


@kernel
def _aggregators_at(site: int, row: Ints, classes: ClassArrays) -> float:
    """Devices of a site that may reduce gradients."""
    found = 0.0
    for c in range(len(row)):
        found += row[c] if classes.site[c] == site and classes.can_aggregate[c] else 0
    return found


@kernel
def _vectors_over_line(held: float, members: float, part: float) -> float:
    """Vectors over a site's line in each direction, in one round, if ``part`` is reduced there."""
    return held * (1.0 - part) + part * (members - held)


@kernel
def _hierarchical_s(
    encoded_bytes: float,
    unencoded_bytes: float,
    row: Ints,
    classes: ClassArrays,
    devices_at: Floats,
    num_sites: int,
    slices: float,
) -> float:
    """Seconds of reduce, exchange and spread, with so many slices between so many sites."""
    num_classes = len(row)
    within_s, between_s, near_s, far_s = 0.0, 0.0, 0.0, 0.0
    bytes_each = 2 * (num_sites - 1) / num_sites * encoded_bytes
    for c in range(num_classes):
        if row[c] == 0:
            continue
        s = classes.site[c]
        between_s = max(
            between_s,
            bytes_each / classes.site_bandwidth[s],
            bytes_each / slices / classes.capacity[c],
        )
        if devices_at[s] > 1:
            within_s = max(
                within_s,
                max((devices_at[s] - 1) / slices, 1.0) * unencoded_bytes / classes.capacity[c],
            )
        for d in range(num_classes):
            if row[d] == 0 or (c == d and row[c] == 1):
                continue
            if classes.site[d] == s:
                within_s = max(within_s, unencoded_bytes / slices / classes.pair_bandwidth[c, d])
                near_s = max(near_s, classes.rtt_s[c, d])
            else:
                between_s = max(
                    between_s, 2 * encoded_bytes / num_sites / slices / classes.pair_bandwidth[c, d]
                )
                far_s = max(far_s, classes.rtt_s[c, d])
    return float(2 * (within_s + near_s) + between_s + far_s)


@kernel
def one_round_s(
    vector_bytes: float, row: Ints, classes: ClassArrays, scratch: LayoutScratch, enough_s: float
) -> float:
    """Seconds for one round of all devices, without the limits of sites' lines.

    With equal shares or, if faster, with shares that device limits and pairs allow (eq. 6 of
    DeDLOC), over all classes or without the one that has the slowest pair. Infinite if no device
    may reduce. Stops early at ``enough_s``.
    """
    members, slowest_line, slowest_pair, rtt_s, slowest_class = 0, np.inf, np.inf, 0.0, -1
    num_aggregators, clients = 0, False
    share = scratch.reduce_share
    used = scratch.used[: _classes_in(row, scratch.used)]
    for c in used:
        members += row[c]
        num_aggregators += row[c] if classes.can_aggregate[c] else 0
        clients = clients or not classes.can_aggregate[c]
        slowest_line = min(slowest_line, classes.capacity[c])
        for d in used:
            if c != d or row[c] > 1:
                if classes.pair_bandwidth[c, d] < slowest_pair:
                    slowest_pair = classes.pair_bandwidth[c, d]
                    slowest_class = c if row[c] <= row[d] else d
                rtt_s = max(rtt_s, classes.rtt_s[c, d])
    if members <= 1:
        return 0.0
    seconds = max(
        2 * vector_bytes * (members - 1) / members / slowest_line,
        2 * vector_bytes / members / slowest_pair,
    )
    low = vector_bytes / slowest_line
    if classes.equal_shares or num_aggregators == 0:
        return np.inf if clients else float(seconds + rtt_s)
    if clients and members > 2:
        # at worst, one device reduces everything
        seconds *= members
    if members > 2 and low < seconds * (1 - 1e-9):
        for _ in range(BISECTIONS):
            if seconds + rtt_s <= enough_s:
                break
            tried = math.sqrt(low * seconds)
            speed = vector_bytes / tried
            total = _largest_shares(row, used, classes, speed, members, NO_CLASS, share)
            if total < 1.0:
                total = _largest_shares(row, used, classes, speed, members, slowest_class, share)
            if total >= 1.0:
                seconds = tried
            else:
                low = tried
    return float(seconds + rtt_s)


@kernel
def two_frequency_s(
    encoded_bytes: float,
    unencoded_bytes: float,
    row: Ints,
    classes: ClassArrays,
    scratch: LayoutScratch,
    enough_s: float,
) -> tuple[float, float]:
    """Seconds for regions to average ``unencoded_bytes`` each, then ``encoded_bytes`` between them.

    See `planner.planning.averaging.two_frequency`; limits of sites' lines are ignored. The
    first value is ``enough_s`` if it would be less: it matters only where it makes a step without
    exchange longer. The step with exchange, which counts one in H times, is then overestimated by
    at most the difference.
    """
    members, devices_in = scratch.subset, scratch.region_devices
    num_classes, num_regions, slices, within_s, spread_s = len(row), 0, np.inf, enough_s, 0.0
    devices_in[:] = 0.0
    for c in range(num_classes):
        devices_in[classes.region[c]] += row[c]
    for r in range(len(devices_in)):
        if devices_in[r] == 0:
            continue
        num_regions += 1
        able = 0.0
        for c in range(num_classes):
            members[c] = row[c] if classes.region[c] == r else 0
            able += members[c] if classes.can_aggregate[c] else 0
        slices = min(slices, able if devices_in[r] > 1 else 1.0)
        within_s = max(within_s, one_round_s(unencoded_bytes, members, classes, scratch, within_s))
    if num_regions == 1 or slices == 0:
        return within_s, 0.0
    for c in range(num_classes):
        if row[c] == 0:
            continue
        r = classes.region[c]
        if devices_in[r] > 1:
            near_s = (devices_in[r] - 1) / slices * unencoded_bytes / classes.capacity[c]
            rtt_s = 0.0
            for d in range(num_classes):
                if row[d] > 0 and classes.region[d] == r and (c != d or row[c] > 1):
                    near_s = max(near_s, unencoded_bytes / slices / classes.pair_bandwidth[c, d])
                    rtt_s = max(rtt_s, classes.rtt_s[c, d])
            spread_s = max(spread_s, near_s + rtt_s)
    members[:] = 0
    for r in range(len(devices_in)):
        best = -1
        for c in range(num_classes):
            if row[c] == 0 or classes.region[c] != r:
                continue
            more = best == -1 or classes.capacity[c] > classes.capacity[best]
            if best == -1 or (
                classes.can_aggregate[c] and (more or not classes.can_aggregate[best])
            ):
                best = c
        if best >= 0:
            members[best] = 1
    return within_s, one_round_s(encoded_bytes / slices, members, classes, scratch, 0.0) + spread_s


@kernel
def in_flight_room(
    model: ModelArrays, classes: ClassArrays, state: LayoutState, j: int, c: int
) -> tuple[float, float]:
    """Microbatches that fit on a device of class c for stage j, without and with recomputation."""
    last = j == state.stages[0] - 1
    a, b = state.cuts[j], state.cuts[j + 1]
    parameters = _stage_parameters(model, state, j)
    saved = model.saved_bytes[b] - model.saved_bytes[a]
    saved += model.held_bytes[b - 1] if model.saves_output else 0.0
    rounded = parameters
    if j == 0:
        rounded -= model.stem_parameters - (model.tied_parameters if last else 0.0)
    memory_left = classes.memory_bytes[c] - parameters * model.state_bytes
    memory_left -= rounded * model.rounded_bytes + (0.0 if j == 0 and last else model.message_bytes)
    kept_bytes = (model.held_bytes[a - 1] if j > 0 else 0.0) + (
        model.held_bytes[b - 1] if last else 0.0
    )
    max_live = min(model.microbatches, model.max_in_flight)
    head = model.head_bytes if last else 0.0
    working_bytes = max(model.layer_bytes, head)
    left_when_recomputing = memory_left - max(model.layer_bytes + saved, head)
    if j == 0:
        working_bytes = max(working_bytes, model.embedding_bytes - saved)
        left_when_recomputing = min(left_when_recomputing, memory_left - model.embedding_bytes)
    keeping_room = (
        min(np.floor((memory_left - working_bytes) / saved), max_live) if saved > 0 else max_live
    )
    recomputing_room = (
        min(np.floor(left_when_recomputing / kept_bytes), max_live) if kept_bytes > 0 else max_live
    )
    return (keeping_room if memory_left >= working_bytes else 0.0), (
        recomputing_room if left_when_recomputing >= 0 else 0.0
    )


@kernel
def _stage_period(
    model: ModelArrays, classes: ClassArrays, state: LayoutState, scratch: LayoutScratch, j: int
) -> float:
    """Period of stage j alone, infinite if memory is too small; sets share, compute_s and room."""
    last = j == state.stages[0] - 1
    a, b = state.cuts[j], state.cuts[j + 1]
    forward = model.flops[b] - model.flops[a]
    sent = (0.0 if last else model.output_bytes[b - 1]) + (
        model.output_bytes[a - 1] if j > 0 else 0.0
    )
    row = state.counts[j]
    num_classes = len(row)
    keeping_room, recomputing_room = 0.0, 0.0
    for c in range(num_classes):
        if row[c] > 0:
            keeping, recomputing = in_flight_room(model, classes, state, j, c)
            if keeping < 1 and model.recompute_free:
                state.recompute[j] = True
            if (recomputing if state.recompute[j] else keeping) < 1:
                return np.inf
            keeping_room += row[c] * keeping
            recomputing_room += row[c] * recomputing
    work = (3.0 + (1.0 if state.recompute[j] else 0.0)) * forward
    work += model.head_flops if last else 0.0
    rate = 0.0
    for c in range(num_classes):
        scratch.share[j, c] = 0.0
        if row[c] > 0:
            busy = max(work / classes.flops_per_s[c], sent / classes.capacity[c])
            scratch.share[j, c] = row[c] / busy
            rate += row[c] / busy
    if rate == 0.0:
        return np.inf
    compute_s = 0.0
    for c in range(num_classes):
        scratch.share[j, c] /= rate
        compute_s += scratch.share[j, c] * work / classes.flops_per_s[c]
    scratch.compute_s[j] = compute_s
    scratch.in_flight_room[j] = recomputing_room if state.recompute[j] else keeping_room
    return float(1.0 / rate)


@kernel
def _pairs_in_use(here: Ints, there: Ints, classes: ClassArrays, scratch: LayoutScratch) -> int:
    """List the ranks of pairs of classes that both have devices in ``scratch.pairs``, ascending."""
    found, pairs = scratch.pairs, 0
    before, after = _classes_in(here, scratch.used), _classes_in(there, scratch.others)
    count = before * after
    if SORT_LIMIT * count > len(classes.pair_source):
        for k in range(len(classes.pair_source)):
            if here[classes.pair_source[k]] > 0 and there[classes.pair_target[k]] > 0:
                found[pairs] = k
                pairs += 1
        return pairs
    for i in range(before):
        for j in range(after):
            # insertion sort
            rank, k = classes.pair_rank[scratch.used[i], scratch.others[j]], pairs
            while k > 0 and found[k - 1] > rank:
                found[k] = found[k - 1]
                k -= 1
            found[k] = rank
            pairs += 1
    return pairs


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

    The search for one longer than ``max_period`` ends early.
    """
    message_bytes = model.output_bytes[state.cuts[j + 1] - 1]
    here, there = state.counts[j], state.counts[j + 1]
    num_classes = len(here)
    pairs = _pairs_in_use(here, there, classes, scratch)
    unrouted, sites = 1.0, len(classes.site_bandwidth)
    for _ in range(PERIOD_TRIALS):
        unrouted, delay, usd = 1.0, 0.0, 0.0
        for s in range(sites):
            scratch.site_bytes[j, s] = 0.0
        for c in range(num_classes):
            scratch.unrouted[0, c] = scratch.share[j, c]
            scratch.unrouted[1, c] = scratch.share[j + 1, c]
        for k in range(pairs):
            c, d = classes.pair_source[scratch.pairs[k]], classes.pair_target[scratch.pairs[k]]
            if scratch.unrouted[0, c] <= 0.0 or scratch.unrouted[1, d] <= 0.0:
                continue
            carried = period * here[c] * there[d] * classes.pair_bandwidth[c, d] / message_bytes
            share = min(scratch.unrouted[0, c], scratch.unrouted[1, d], carried)
            scratch.unrouted[0, c] -= share
            scratch.unrouted[1, d] -= share
            unrouted -= share
            if sites > 0 and classes.site[c] != classes.site[d]:
                # activations forward, gradients back
                scratch.site_bytes[j, classes.site[c]] += share * message_bytes
                scratch.site_bytes[j, classes.site[d]] += share * message_bytes
            transfer_s = (
                message_bytes / classes.bandwidth[c, d] + message_bytes / classes.bandwidth[d, c]
            )
            delay += share * (classes.rtt_s[c, d] + transfer_s)
            usd += share * message_bytes * (classes.usd_per_byte[c, d] + classes.usd_per_byte[d, c])
        scratch.delay_s[j] = delay
        scratch.messages_usd[j] = usd
        if unrouted < CARRIED:
            return period
        period *= 1.0 + max(MIN_PERIOD_RISE, PERIOD_RISE * unrouted)
        if period > max_period:
            break
    return float(period * (1.0 + UNROUTED_FACTOR * unrouted))


@entry
def estimate(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    max_value: float,
) -> float:
    """Estimated seconds or dollars of a step; sets which stages recompute.

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
        row, members, pair_usd, between_regions_usd = state.counts[j], 0.0, 0.0, 0.0
        devices_in = scratch.region_devices
        devices_in[:] = 0.0
        for c in range(len(row)):
            members += row[c]
            devices_in[classes.region[c]] += row[c]
        for c in range(len(row)):
            for d in range(len(row)):
                usd = row[c] * row[d] * classes.usd_per_byte[c, d]
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
        if j < stages - 1:
            messages_usd += model.microbatches * scratch.messages_usd[j]
        # assume equal shares
        encoded_bytes = _averaged_parameters(model, state, j) * model.gradient_bytes
        messages_usd += 2.0 * encoded_bytes / members * pair_usd / model.every_steps
    if _averages_tied(model, state):
        _join_first_and_last(state, scratch)
        row, members, pair_usd = scratch.subset, 0.0, 0.0
        for c in range(len(row)):
            members += row[c]
            for d in range(len(row)):
                pair_usd += row[c] * row[d] * classes.usd_per_byte[c, d]
        encoded_bytes = model.tied_parameters * model.gradient_bytes
        messages_usd += 2.0 * encoded_bytes / members * pair_usd
    return float(seconds * usd_per_s + messages_usd)


@kernel
def _stage_parameters(model: ModelArrays, state: LayoutState, j: int) -> float:
    """Parameters of a stage; the last one has the head."""
    parameters = model.parameters[state.cuts[j + 1]] - model.parameters[state.cuts[j]]
    if j == state.stages[0] - 1:
        parameters += model.head_parameters + (model.tied_parameters if j > 0 else 0.0)
    return float(parameters)


@kernel
def _averages_tied(model: ModelArrays, state: LayoutState) -> bool:
    """Whether first and last stage average the tied parameters in a round of their own."""
    apart = model.tied_parameters > 0 and state.stages[0] > 1
    return bool(
        apart and model.every_steps == 1.0 and not model.delayed and not model.two_frequency
    )


@kernel
def _averaged_parameters(model: ModelArrays, state: LayoutState, j: int) -> float:
    """Parameters that a stage averages, without tied ones that are averaged separately."""
    parameters = _stage_parameters(model, state, j)
    if (j == 0 or j == state.stages[0] - 1) and _averages_tied(model, state):
        parameters -= model.tied_parameters
    return float(parameters)


@kernel
def _join_first_and_last(state: LayoutState, scratch: LayoutScratch) -> None:
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
    """Estimated seconds; infinite as soon as they are known to exceed ``max_s``."""
    period = _pipeline_period(
        model, classes, state, scratch, min(max_s / model.microbatches, 1e300)
    )
    if period == np.inf:
        return np.inf
    return float(_step_with_period_s(model, classes, state, scratch, period, max_s))


@kernel
def _pipeline_period(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    max_period: float,
) -> float:
    """Period of the whole pipeline; infinite if it exceeds ``max_period``.

    A stage recomputes, if allowed, where memory does not hold the microbatches that must be in
    flight. That changes its period, so that the period is computed again, at most once per stage.
    """
    stages = state.stages[0]
    for j in range(len(model.recompute)):
        state.recompute[j] = model.recompute[j]
    period = 0.0
    for _ in range(stages + 1):
        period = 0.0
        for j in range(stages):
            scratch.period_s[j] = _stage_period(model, classes, state, scratch, j)
            period = max(period, scratch.period_s[j])
        for j in range(stages - 1):
            if period > max_period:
                break
            period = _boundary_period(model, classes, state, scratch, j, period, max_period)
        if period > max_period:
            return np.inf
        for s in range(len(classes.site_bandwidth)):
            crossing_bytes = 0.0
            for j in range(stages - 1):
                crossing_bytes += scratch.site_bytes[j, s]
            period = max(period, crossing_bytes / classes.site_bandwidth[s])
        scratch.delay_s[stages - 1] = 0.0
        round_trip_s, slowed_period, changed = 0.0, period, False
        for j in range(stages - 1, -1, -1):
            round_trip_s += scratch.compute_s[j] + scratch.delay_s[j]
            held_s = IN_FLIGHT * round_trip_s - (IN_FLIGHT - 1.0) * scratch.compute_s[j]
            if held_s > period * scratch.in_flight_room[j]:
                # waiting with fewer in flight may cost less than repeating F
                waiting_period = SHORT_IN_FLIGHT * round_trip_s / scratch.in_flight_room[j]
                recomputing_period = scratch.period_s[j] * RECOMPUTE_FACTOR
                if (
                    state.recompute[j]
                    or not model.recompute_free
                    or waiting_period <= max(period, recomputing_period)
                ):
                    slowed_period = max(slowed_period, waiting_period)
                else:
                    state.recompute[j] = changed = True
        period = slowed_period
        if not changed:
            break
    return float(period)


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
    waits = model.every_steps == 1.0 and not model.delayed
    tied = _averages_tied(model, state)
    scratch.averaged_bytes[:] = 0.0
    for j in range(stages - 1, -1, -1):
        round_trip_s += scratch.compute_s[j] + scratch.delay_s[j]
        encoded_bytes = _averaged_parameters(model, state, j) * model.gradient_bytes
        row = state.counts[j]
        unencoded_bytes, enough_s = encoded_bytes / model.wire_ratio, longest_s - round_trip_s
        if tied and j == 0:
            enough_s = tied_ends_s - round_trip_s
        if model.two_frequency:
            within_s, between_s = two_frequency_s(
                encoded_bytes,
                unencoded_bytes,
                row,
                classes,
                scratch,
                max(longest_within_s - round_trip_s, 0.0),
            )
            longest_within_s = max(longest_within_s, round_trip_s + within_s)
            longest_s = max(longest_s, round_trip_s + within_s + between_s)
            continue
        seconds = averaging_s(encoded_bytes, unencoded_bytes, row, classes, scratch, enough_s)
        longest_s = max(longest_s, round_trip_s + seconds)
        if j == 0 or j == stages - 1:
            tied_ends_s = max(tied_ends_s, round_trip_s + seconds)
        if waits and model.microbatches * period + longest_s > max_s:
            return np.inf
    if tied:
        _join_first_and_last(state, scratch)
        encoded_bytes = model.tied_parameters * model.gradient_bytes
        unencoded_bytes, row, enough_s = (
            encoded_bytes / model.wire_ratio,
            scratch.subset,
            longest_s - tied_ends_s,
        )
        seconds = averaging_s(encoded_bytes, unencoded_bytes, row, classes, scratch, enough_s)
        longest_s = max(longest_s, tied_ends_s + seconds)
    for s in range(len(classes.site_bandwidth)):
        # all stages average at about the same time
        sent_s = scratch.averaged_bytes[s] / classes.site_bandwidth[s]
        longest_s = max(longest_s, scratch.compute_s[stages - 1] + sent_s)
    if longest_s == np.inf:
        return np.inf  # no device of a stage may reduce, possibly within regions already
    # the round trip through all stages is the longest
    longest_within_s = max(longest_within_s, round_trip_s)
    alone_s = model.microbatches * period + longest_within_s
    averaging_adds_s = longest_s - longest_within_s
    if model.delayed:
        # averaging overlaps with the next step
        averaging_adds_s = max(averaging_adds_s - alone_s, 0.0)
    return float(alone_s + averaging_adds_s / model.every_steps)


@kernel
def _copy_row(counts: Ints2, source: int, target: int) -> None:
    for c in range(counts.shape[1]):
        counts[target, c] = counts[source, c]


@kernel
def _stage_devices(state: LayoutState, j: int) -> int:
    total = 0
    for c in range(state.counts.shape[1]):
        total += state.counts[j, c]
    return total


@kernel
def _copy(source: LayoutState, target: LayoutState) -> None:
    target.stages[0] = source.stages[0]
    for j in range(source.counts.shape[0]):
        target.cuts[j] = source.cuts[j]
        target.recompute[j] = source.recompute[j]
        for c in range(source.counts.shape[1]):
            target.counts[j, c] = source.counts[j, c]
    target.cuts[len(source.cuts) - 1] = source.cuts[len(source.cuts) - 1]


@kernel
def _stage_flops_per_s(classes: ClassArrays, state: LayoutState, j: int) -> float:
    """FLOP/s of a stage's devices."""
    found = 0.0
    for c in range(state.counts.shape[1]):
        found += state.counts[j, c] * classes.flops_per_s[c]
    return found


@kernel
def _shift_cuts(state: LayoutState, i: int, j: int, layers: int) -> bool:
    """Move layers from stage i to stage j; returns whether every stage keeps one."""
    for k in range(i + 1, j + 1):
        state.cuts[k] -= layers
    for k in range(j + 1, i + 1):
        state.cuts[k] += layers
    valid = True
    for k in range(min(i, j), max(i, j) + 1):
        valid = valid and state.cuts[k + 1] > state.cuts[k]
    return valid


@kernel
def _move_devices(
    model: ModelArrays, classes: ClassArrays, state: LayoutState, random: Words
) -> bool:
    """Move some or all devices of a class to another stage, in or out.

    Half of the moves between stages take a proportional number of layers along. ``state`` is
    undefined after False: the cuts may have moved already.
    """
    stages = state.stages[0]
    c = next_below(random, len(classes.size))
    i, j = next_below(random, stages + 1) - 1, next_below(random, stages + 1) - 1
    if i == j:
        return False
    available = classes.size[c]
    if i >= 0:
        available = state.counts[i, c]
    else:
        for stage in range(stages):
            available -= state.counts[stage, c]
    if available <= 0:
        return False
    k = available if next_unit(random) < P_ALL_DEVICES else next_below(random, available) + 1
    if i >= 0 and j >= 0 and model.layers_free and next_unit(random) < P_WITH_LAYERS:
        share = k * classes.flops_per_s[c] / _stage_flops_per_s(classes, state, i)
        layers = int(share * (state.cuts[i + 1] - state.cuts[i]) + next_unit(random))
        if layers > 0 and not _shift_cuts(state, i, j, layers):
            return False
    if i >= 0:
        state.counts[i, c] -= k
    if j >= 0:
        state.counts[j, c] += k
    return True


@kernel
def _swap_devices(state: LayoutState, random: Words) -> bool:
    """Exchange devices of two classes between two stages."""
    stages, num_classes = state.stages[0], state.counts.shape[1]
    i, j = next_below(random, stages), next_below(random, stages)
    a, b = next_below(random, num_classes), next_below(random, num_classes)
    max_devices = min(state.counts[i, a], state.counts[j, b])
    if i == j or a == b or max_devices == 0:
        return False
    k = 1 if next_unit(random) < 0.5 else max_devices
    state.counts[i, a] -= k
    state.counts[j, a] += k
    state.counts[j, b] -= k
    state.counts[i, b] += k
    return True


@kernel
def _shift_layers(state: LayoutState, random: Words) -> bool:
    """Move one layer to a neighbouring stage or, through those between, to a distant one."""
    stages = state.stages[0]
    if stages < 2:
        return False
    i = next_below(random, stages)
    j = (
        next_below(random, stages)
        if next_unit(random) < P_DISTANT
        else i + 2 * next_below(random, 2) - 1
    )
    return 0 <= j < stages and i != j and bool(_shift_cuts(state, i, j, 1))


@kernel
def _exchange(state: LayoutState, i: int, j: int, with_layers: bool) -> None:
    """Exchange the devices of two neighbouring stages, optionally with their numbers of layers."""
    for c in range(state.counts.shape[1]):
        kept = state.counts[i, c]
        state.counts[i, c] = state.counts[j, c]
        state.counts[j, c] = kept
    if with_layers:
        state.cuts[j] = state.cuts[i] + state.cuts[j + 1] - state.cuts[j]


@kernel
def _reorder(model: ModelArrays, state: LayoutState, random: Words) -> bool:
    """Move a stage in the order, or reverse a run of stages; half of the time with their layers."""
    stages = state.stages[0]
    i, j = next_below(random, stages), next_below(random, stages)
    if i == j:
        return False
    with_layers = model.layers_free and next_unit(random) < P_WITH_LAYERS
    low, high = min(i, j), max(i, j)
    if next_unit(random) < P_REVERSE:
        for end in range(high, low, -1):
            for k in range(low, end):
                _exchange(state, k, k + 1, with_layers)
    elif i < j:
        for k in range(i, j):
            _exchange(state, k, k + 1, with_layers)
    else:
        for k in range(i - 1, j - 1, -1):
            _exchange(state, k, k + 1, with_layers)
    return True


@kernel
def _split(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    random: Words,
) -> bool:
    """Split a stage in two, layers in proportion: by halving each class, or by distance to one."""
    stages = state.stages[0]
    j = next_below(random, stages)
    a, b = state.cuts[j], state.cuts[j + 1]
    if stages == len(state.counts) or b - a < 2 or _stage_devices(state, j) == 0:
        return False
    for k in range(stages, j, -1):
        _copy_row(state.counts, k - 1, k)
        state.cuts[k + 1] = state.cuts[k]
    state.stages[0] += 1
    here, there = state.counts[j], state.counts[j + 1]
    used = scratch.used[: _classes_in(here, scratch.used)]
    if len(used) == 1 or next_unit(random) < P_HALVE:
        for c in used:
            here[c] //= 2
            there[c] -= here[c]
    else:
        first = used[next_below(random, len(used))]
        round_trip_bytes, distance_s = 2 * model.output_bytes[a], scratch.distance_s[: len(used)]
        for k, c in enumerate(used):
            both_s = classes.rtt_s[first, c] + round_trip_bytes / classes.pair_bandwidth[first, c]
            distance_s[k] = (
                -1.0 if c == first else both_s * (1.0 + DISTANCE_NOISE * next_unit(random))
            )
        near = next_below(random, len(used) - 1) + 1
        side = next_unit(random) < 0.5
        for k in range(1, len(used)):
            x, u, place = distance_s[k], used[k], k - 1
            while place >= 0 and distance_s[place] > x:
                distance_s[place + 1], used[place + 1] = distance_s[place], used[place]
                place -= 1
            distance_s[place + 1], used[place + 1] = x, u
        for k, c in enumerate(used):
            if (k < near) == side:
                there[c] = 0
            else:
                here[c] = 0
    one, two = _stage_flops_per_s(classes, state, j), _stage_flops_per_s(classes, state, j + 1)
    if one == 0.0 or two == 0.0:
        return False
    cut = int((b - a) * one / (one + two) + next_unit(random))
    state.cuts[j + 1] = a + min(max(cut, 1), b - a - 1)
    return True


@kernel
def _merge(state: LayoutState, random: Words) -> bool:
    """Merge two neighbouring stages."""
    stages = state.stages[0]
    if stages < 2:
        return False
    j = next_below(random, stages - 1)
    for c in range(state.counts.shape[1]):
        state.counts[j, c] += state.counts[j + 1, c]
    for k in range(j + 1, stages - 1):
        _copy_row(state.counts, k + 1, k)
    for k in range(j + 1, stages):
        state.cuts[k] = state.cuts[k + 1]
    for c in range(state.counts.shape[1]):
        state.counts[stages - 1, c] = 0
    state.stages[0] -= 1
    return True


@kernel
def _add_stage(model: ModelArrays, classes: ClassArrays, state: LayoutState, random: Words) -> bool:
    """Make a stage of all devices of a class, anywhere in the order.

    It takes a proportional number of layers from the stage that had most of these devices.
    """
    stages = state.stages[0]
    c, j = next_below(random, len(classes.size)), next_below(random, stages + 1)
    if stages == len(state.counts):
        return False
    i, total = -1, classes.size[c] * classes.flops_per_s[c]
    for k in range(stages):
        total += _stage_flops_per_s(classes, state, k) - state.counts[k, c] * classes.flops_per_s[c]
        if state.counts[k, c] > 0 and (i < 0 or state.counts[k, c] > state.counts[i, c]):
            i = k
    if i < 0:
        i = next_below(random, stages)
    share = classes.size[c] * classes.flops_per_s[c] / total
    layers = max(1, int(len(model.output_bytes) * share + next_unit(random)))
    layers = min(layers, state.cuts[i + 1] - state.cuts[i] - 1)
    if layers < 1:
        return False
    for k in range(stages):
        state.counts[k, c] = 0
    for k in range(stages, j, -1):
        _copy_row(state.counts, k - 1, k)
        state.cuts[k + 1] = state.cuts[k]
    state.cuts[j + 1] = state.cuts[j]
    for other in range(state.counts.shape[1]):
        state.counts[j, other] = 0
    state.counts[j, c] = classes.size[c]
    state.stages[0] += 1
    return bool(_shift_cuts(state, i + (i >= j), j, layers))


@entry
def mutate(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    random: Words,
    fixed: bool,
) -> bool:
    """Apply one random move; returns whether it was possible. If not, ``state`` is undefined.

    With ``fixed`` the number of stages stays: a merge is followed by a split. If layers are fixed,
    they and the number of stages stay.
    """
    u, free = next_unit(random), model.layers_free
    if u < P_DEVICES or (u >= P_REORDER and not free):
        return bool(_move_devices(model, classes, state, random))
    if u < P_SWAP or (u < P_LAYERS and not free):
        return bool(_swap_devices(state, random))
    if u < P_LAYERS:
        return bool(_shift_layers(state, random))
    if u < P_REORDER:
        return bool(_reorder(model, state, random))
    if fixed:
        return bool(_merge(state, random)) and bool(_split(model, classes, state, scratch, random))
    if u < P_SPLIT:
        return bool(_split(model, classes, state, scratch, random))
    if u < P_ADD:
        return bool(_add_stage(model, classes, state, random))
    return bool(_merge(state, random))


@entry
def anneal(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    tried: LayoutState,
    best: LayoutState,
    scratch: LayoutScratch,
    random: Words,
    values: Floats,
    trials: int,
    t_start: float,
    t_end: float,
    fixed: bool,
) -> None:
    """Anneal ``state`` for ``trials`` moves; ``values`` holds its estimate and that of ``best``.

    The temperature, relative to the estimate, falls from ``t_start`` to ``t_end``.
    """
    for k in range(trials):
        _copy(state, tried)
        if not mutate(model, classes, tried, scratch, random, fixed):
            continue
        temperature = t_start * (t_end / t_start) ** (k / trials) * values[0]
        threshold = values[0] - temperature * math.log(max(next_unit(random), 1e-300))
        value = estimate(model, classes, tried, scratch, threshold)
        if value > threshold:
            continue
        _copy(tried, state)
        values[0] = value
        if value < values[1] * (1 - 1e-12):
            _copy(tried, best)
            values[1] = value
