"""Compiled estimates of the seconds in which the devices of a stage average their gradients.

The same compositions of stages recur in most layouts, and the seconds of a round are those of a
byte times the length of its vector, and a latency: both are kept in a table, by a hash of the
devices.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from planner.planning.joint.layout_arrays import ClassArrays, LayoutScratch, classes_in
from planner.search.arrays import Floats, Ints
from planner.search.compiled import kernel
from planner.search.rng import mixed

BISECTIONS = 12
"""Bisections of a round's seconds: enough to rank layouts."""
NO_CLASS: Any = np.int64(-1)
"""No device class. Not a literal, for which numba would compile a second version."""


@kernel
def _largest_shares(
    counts: Ints,
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
            if c != d or counts[c] > 1:
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
            elif counts[c] > 1:
                max_share = min(max_share, 0.5 * classes.pair_bandwidth[c, d] / speed)
        share[c] = max(max_share, share[c])
        total += counts[c] * share[c]
    return total


@kernel
def averaging_s(
    encoded_bytes: float,
    unencoded_bytes: float,
    counts: Ints,
    classes: ClassArrays,
    scratch: LayoutScratch,
) -> float:
    """Seconds for the devices of a stage to average ``encoded_bytes`` on the wire.

    In one round or, if sites share a line and it is faster, hierarchically
    (`planner.planning.averaging.hierarchical`), where ``unencoded_bytes`` are sent within a site.
    Adds the bytes over each site's line to ``scratch.averaged_bytes``.
    """
    sites = len(classes.site_bandwidth)
    seconds = one_round_s(encoded_bytes, counts, classes, scratch)
    if sites == 0:
        return float(seconds)
    # hierarchical averaging may be faster
    devices_at, averaged_bytes = scratch.site_devices, scratch.averaged_bytes
    sites_inside = scratch.sites_inside
    members, num_sites, min_aggregators, num_aggregators = 0.0, 0, np.inf, 0.0
    devices_at[:] = 0.0
    sites_inside[:] = 0.0
    for c in range(len(counts)):
        if counts[c] == 0:
            continue
        # before the devices of this class are counted
        is_first = devices_at[classes.sites[c, 0]] == 0.0
        num_sites += is_first
        for level in range(classes.sites.shape[1]):
            s = classes.sites[c, level]
            if s < 0:
                break
            devices_at[s] += counts[c]
            sites_inside[s] += is_first
        members += counts[c]
        num_aggregators += counts[c] if classes.can_aggregate[c] else 0
    if num_sites <= 1:
        return seconds
    rtt_s = 0.0
    for c in range(len(counts)):
        for d in range(len(counts)):
            if counts[c] > 0 and counts[d] > 0 and (c != d or counts[c] > 1):
                rtt_s = max(rtt_s, classes.rtt_s[c, d])
    for s in range(sites):
        # all devices may be in a site around others
        if 0 < devices_at[s] < members:
            site_aggregators = _aggregators_at(s, counts, classes)
            min_aggregators = min(min_aggregators, site_aggregators)
            crossing_bytes = (
                _vectors_over_line(
                    devices_at[s], members, site_aggregators / max(num_aggregators, 1.0)
                )
                * encoded_bytes
            )
            seconds = max(seconds, crossing_bytes / classes.site_bandwidth[s] + rtt_s)
    hierarchical_s = np.inf
    if num_sites < members and min_aggregators > 0 and not classes.equal_shares:
        hierarchical_s = _hierarchical_s(
            encoded_bytes, unencoded_bytes, counts, classes, scratch, num_sites, min_aggregators
        )
    for s in range(sites):
        if devices_at[s] > 0 and hierarchical_s < seconds:
            # as of so many devices, each of which reduces as much
            vectors = _vectors_over_line(sites_inside[s], num_sites, sites_inside[s] / num_sites)
            averaged_bytes[s] += vectors * encoded_bytes
        else:
            local_share = _aggregators_at(s, counts, classes) / max(num_aggregators, 1.0)
            averaged_bytes[s] += (
                _vectors_over_line(devices_at[s], members, local_share) * encoded_bytes
            )
    return float(min(seconds, hierarchical_s))


@kernel
def _aggregators_at(site: int, counts: Ints, classes: ClassArrays) -> float:
    """Devices of a site that may reduce gradients."""
    count = 0.0
    for c in range(len(counts)):
        count += counts[c] if classes.inside[site, c] and classes.can_aggregate[c] else 0
    return count


@kernel
def _vectors_over_line(local_members: float, members: float, local_share: float) -> float:
    """Vectors over a site's line each way, in one round, if ``local_share`` is reduced there."""
    return local_members * (1.0 - local_share) + local_share * (members - local_members)


@kernel
def _hierarchical_s(
    encoded_bytes: float,
    unencoded_bytes: float,
    counts: Ints,
    classes: ClassArrays,
    scratch: LayoutScratch,
    num_sites: int,
    slices: float,
) -> float:
    """Seconds of reduce, exchange and spread between ``num_sites`` sites, each with ``slices``."""
    num_classes, devices_at = len(counts), scratch.site_devices
    within_s, between_s, local_rtt_s, remote_rtt_s = 0.0, 0.0, 0.0, 0.0
    exchanged_bytes = 2 * (num_sites - 1) / num_sites * encoded_bytes
    for c in range(num_classes):
        if counts[c] == 0:
            continue
        s = classes.sites[c, 0]
        between_s = max(between_s, exchanged_bytes / slices / classes.capacity[c])
        for level in range(classes.sites.shape[1]):
            line = classes.sites[c, level]
            if line < 0:
                break
            part = scratch.sites_inside[line]
            vectors = _vectors_over_line(part, num_sites, part / num_sites)
            between_s = max(between_s, vectors * encoded_bytes / classes.site_bandwidth[line])
        if devices_at[s] > 1:
            within_s = max(
                within_s,
                max((devices_at[s] - 1) / slices, 1.0) * unencoded_bytes / classes.capacity[c],
            )
        for d in range(num_classes):
            if counts[d] == 0 or (c == d and counts[c] == 1):
                continue
            if classes.sites[d, 0] == s:
                within_s = max(within_s, unencoded_bytes / slices / classes.pair_bandwidth[c, d])
                local_rtt_s = max(local_rtt_s, classes.rtt_s[c, d])
            else:
                between_s = max(
                    between_s, 2 * encoded_bytes / num_sites / slices / classes.pair_bandwidth[c, d]
                )
                remote_rtt_s = max(remote_rtt_s, classes.rtt_s[c, d])
    return float(2 * (within_s + local_rtt_s) + between_s + remote_rtt_s)


@kernel
def one_round_s(
    vector_bytes: float, counts: Ints, classes: ClassArrays, scratch: LayoutScratch
) -> float:
    """Seconds for one round of all devices, without the limits of sites' lines.

    With equal shares or, if faster, with shares that device limits and pairs allow (eq. 6 of
    DeDLOC), over all classes or without the one that has the slowest pair. Infinite if no device
    may reduce.
    """
    # 0 without devices, as the table is at first
    key = np.uint64(0)
    for c in range(len(counts)):
        if counts[c] > 0:
            key = mixed(key ^ np.uint64(counts[c] << 32 | c))
    slot = key % np.uint64(len(scratch.round_keys))
    if scratch.round_keys[slot] != key:
        scratch.round_keys[slot] = key
        scratch.round_s_per_byte[slot], scratch.round_latency_s[slot] = _seconds_per_byte(
            counts, classes, scratch
        )
    if scratch.round_s_per_byte[slot] == np.inf:
        return np.inf
    return float(vector_bytes * scratch.round_s_per_byte[slot] + scratch.round_latency_s[slot])


@kernel
def _seconds_per_byte(
    counts: Ints, classes: ClassArrays, scratch: LayoutScratch
) -> tuple[float, float]:
    """Seconds of a round for each byte of the vector, and for any vector."""
    members, slowest_line, slowest_pair, rtt_s, slowest_class = 0, np.inf, np.inf, 0.0, -1
    num_aggregators, has_clients = 0, False
    share = scratch.reduce_share
    used = scratch.used[: classes_in(counts, scratch.used)]
    for c in used:
        members += counts[c]
        num_aggregators += counts[c] if classes.can_aggregate[c] else 0
        has_clients = has_clients or not classes.can_aggregate[c]
        slowest_line = min(slowest_line, classes.capacity[c])
        for d in used:
            if c != d or counts[c] > 1:
                if classes.pair_bandwidth[c, d] < slowest_pair:
                    slowest_pair = classes.pair_bandwidth[c, d]
                    slowest_class = c if counts[c] <= counts[d] else d
                rtt_s = max(rtt_s, classes.rtt_s[c, d])
    if members <= 1:
        return 0.0, 0.0
    seconds = max(2 * (members - 1) / members / slowest_line, 2 / members / slowest_pair)
    lower_s = 1.0 / slowest_line
    if classes.equal_shares or num_aggregators == 0:
        return np.inf if has_clients else seconds, rtt_s
    if has_clients and members > 2:
        # at worst, one device reduces everything
        seconds *= members
    if members > 2 and lower_s < seconds * (1 - 1e-9):
        for _ in range(BISECTIONS):
            middle = math.sqrt(lower_s * seconds)
            speed = 1.0 / middle
            total = _largest_shares(counts, used, classes, speed, members, NO_CLASS, share)
            if total < 1.0:
                total = _largest_shares(counts, used, classes, speed, members, slowest_class, share)
            if total >= 1.0:
                seconds = middle
            else:
                lower_s = middle
    return seconds, rtt_s


@kernel
def two_frequency_s(
    encoded_bytes: float,
    unencoded_bytes: float,
    counts: Ints,
    classes: ClassArrays,
    scratch: LayoutScratch,
) -> tuple[float, float]:
    """Seconds for regions to average ``unencoded_bytes`` each, then ``encoded_bytes`` between them.

    See `planner.planning.averaging.two_frequency`; limits of sites' lines are ignored.
    """
    members, devices_in = scratch.subset, scratch.region_devices
    num_classes, num_regions, slices, within_s, spread_s = len(counts), 0, np.inf, 0.0, 0.0
    devices_in[:] = 0.0
    for c in range(num_classes):
        devices_in[classes.region[c]] += counts[c]
    for r in range(len(devices_in)):
        if devices_in[r] == 0:
            continue
        num_regions += 1
        num_aggregators = 0.0
        for c in range(num_classes):
            members[c] = counts[c] if classes.region[c] == r else 0
            num_aggregators += members[c] if classes.can_aggregate[c] else 0
        slices = min(slices, num_aggregators if devices_in[r] > 1 else 1.0)
        within_s = max(within_s, one_round_s(unencoded_bytes, members, classes, scratch))
    if num_regions == 1 or slices == 0:
        return within_s, 0.0
    for c in range(num_classes):
        if counts[c] == 0:
            continue
        r = classes.region[c]
        if devices_in[r] > 1:
            device_spread_s = (devices_in[r] - 1) / slices * unencoded_bytes / classes.capacity[c]
            rtt_s = 0.0
            for d in range(num_classes):
                if counts[d] > 0 and classes.region[d] == r and (c != d or counts[c] > 1):
                    device_spread_s = max(
                        device_spread_s, unencoded_bytes / slices / classes.pair_bandwidth[c, d]
                    )
                    rtt_s = max(rtt_s, classes.rtt_s[c, d])
            spread_s = max(spread_s, device_spread_s + rtt_s)
    members[:] = 0
    for r in range(len(devices_in)):
        representative = -1
        for c in range(num_classes):
            if counts[c] == 0 or classes.region[c] != r:
                continue
            has_more_capacity = (
                representative == -1 or classes.capacity[c] > classes.capacity[representative]
            )
            if representative == -1 or (
                classes.can_aggregate[c]
                and (has_more_capacity or not classes.can_aggregate[representative])
            ):
                representative = c
        if representative >= 0:
            members[representative] = 1
    between_s = one_round_s(encoded_bytes / slices, members, classes, scratch)
    return within_s, between_s + spread_s
