"""Notes for users on the limits of devices: assumed, tight, or perhaps shared."""

from __future__ import annotations

import re
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster
from planner.utils.text import joined

LONG_LATENCY_S = 2.0
"""No network takes longer: a signal is on its way to a geostationary satellite for 0.12 s."""
TOLERANCE = 1e-9
"""Relative: a limit counts as below a rate if it is lower by more than this."""
MAX_MACHINES, MIN_EXCESS = 64, 1.2
"""Machines whose links are looked at for a hint, and by how much these must carry more than the
rate between two devices."""
AUTO_SITE = re.compile(r"device \d+'*")
"""Names of the sites that the devices file's reader generates for devices without one."""


def assumed_limits(cluster: Cluster) -> str:
    """A line that lists the device limits that are assumed; empty if all are given."""
    words = [
        name
        for name, limit in (
            ("upload", cluster.upload_bytes_per_s),
            ("download", cluster.download_bytes_per_s),
        )
        if limit is None
    ]
    if not words or len(cluster) < 2:
        return ""
    return (
        f"assumed: a device's whole {' and '.join(words)} is its fastest measured pair's rate; "
        "give limits in a devices file"
    )


def tight_limits(cluster: Cluster) -> str:
    """A line that names a device whose limit is below one of its pairs; empty if none is."""
    if len(cluster) < 2:
        return ""
    ids, pairs = cluster.network.ids, cluster.network.bandwidth_table
    out, into = cluster.network.fastest_bytes_per_s
    for word, limit, fastest, rates in (
        ("upload", cluster.upload_bytes_per_s, out, pairs),
        ("download", cluster.download_bytes_per_s, into, pairs.T),
    ):
        if limit is None:
            continue
        below = np.flatnonzero(limit < fastest * (1 - TOLERANCE))
        if below.size:
            d = int(below[0])
            row = rates.row(d).copy()
            row[d] = 0.0
            e = int(row.argmax())
            many = f" ({below.size} devices are so)" if below.size > 1 else ""
            return (
                f"{word} of {ids[d]} is at most {limit[d] * 8e-9:.4g} Gb/s in all, its link with "
                f"{ids[e]} has {row[e] * 8e-9:.4g}{many}; a line that devices share is that "
                "of a site"
            )
    return ""


def long_latency(cluster: Cluster) -> str:
    """A line that names a pair of which the latency is probably in another unit."""
    table = cluster.network.latency_table
    longest = np.where(table.joins_two, table.values, 0.0)
    a, b = np.unravel_index(int(longest.argmax()), longest.shape)
    if not longest[a, b] > LONG_LATENCY_S:
        return ""
    source, destination = (np.flatnonzero(table.class_of == k) for k in (a, b))
    pair = [cluster.network.ids[d] for d in (source[0], destination[-1])]
    return (
        f"the latency from {pair[0]} to {pair[1]} is {longest[a, b]:.4g} s, longer than by "
        "satellite; mind the unit in the column's name (latency_ms, latency_s, rtt_ms)"
    )


def unstated_sites(cluster: Cluster) -> str:
    """A hint that devices of one region may share an uplink; empty if their sites are given.

    Devices without a site are modelled with an uplink each. If they share an office's line or a
    machine's network card, the predicted step is too short.
    """
    unlimited = _unlimited(cluster)
    alone = [
        cluster.devices.sites is None or bool(AUTO_SITE.fullmatch(cluster.devices.sites[d]))
        for d in range(len(cluster))
    ]
    count: dict[str, int] = {}
    for d, region in enumerate(cluster.network.regions):
        if unlimited[d] and alone[d]:
            count[region] = count.get(region, 0) + 1
    several = [region for region, many in count.items() if many > 1]
    if not several:
        return ""
    many = f"{count[several[0]]} devices" if len(several) == 1 else "devices"
    return (
        f"{many} of {joined(several)} have no site: each is assumed to have a line of its own. If "
        "they share a line (one office, one network card), the step takes longer than predicted; "
        "give them the same site, with site_upload_mbps and site_download_mbps, in the devices file"
    )


def machine_pairs(cluster: Cluster) -> str:
    """A hint that each pair of devices of two machines is assumed to have the machines' rate.

    A network file usually has one rate for two machines, from one pair of processes. Empty if the
    devices and lines between them carry hardly more than that. Of many machines, some are looked
    at.
    """
    devices, table = cluster.devices, cluster.network.bandwidth_table
    members: dict[str, list[int]] = {}
    for d, machine in enumerate(devices.machines or ()):
        if machine:
            members.setdefault(machine, []).append(d)
    if len(members) < 2:
        return ""
    some = list(members)[:MAX_MACHINES]
    rates = table.between([d for name in some for d in members[name]])
    ends = np.cumsum([0, *(len(members[name]) for name in some)])
    around = {name: set(devices.sites_around(members[name][0])) for name in some}
    up, down = devices.site_upload_bytes_per_s or {}, devices.site_download_bytes_per_s or {}
    out, into = (
        np.full(len(cluster), np.inf) if limit is None else limit
        for limit in (cluster.upload_bytes_per_s, cluster.download_bytes_per_s)
    )
    most_excess, text = MIN_EXCESS, ""
    for (i, a), (j, b) in permutations(enumerate(some), 2):
        between = rates[ends[i] : ends[i + 1], ends[j] : ends[j + 1]]
        if not (between == between[0, 0]).all():
            continue  # pairs of devices were measured
        rate, sizes = float(between[0, 0]), between.shape
        lines = [up[s] for s in around[a] - around[b] if s in up]
        lines += [down[s] for s in around[b] - around[a] if s in down]
        lines += [float(out[members[a]].sum()), float(into[members[b]].sum())]
        most = min([sizes[0] * sizes[1] * rate, *lines])
        if rate > 0 and most / rate > most_excess:
            most_excess = most / rate
            text = (
                f"each of the {sizes[0]} x {sizes[1]} pairs of devices of machines {a} and {b} "
                f"is assumed to have the measured {rate * 8e-9:.4g} Gb/s, all together "
                f"{most * 8e-9:.4g}. If two machines have no more than the measured rate in all, "
                "the step takes longer than predicted; give site_upload_mbps and "
                "site_download_mbps of the machine, or of the site behind it, in the devices file"
            )
    return text


def unlimited_sites(cluster: Cluster) -> str:
    """A hint that sites of several devices have no limits; empty if all have, or there is one."""
    devices = cluster.devices
    if devices.sites is None or len(set(devices.sites)) < 2:
        return ""
    limits = (devices.site_upload_bytes_per_s or {}, devices.site_download_bytes_per_s or {})
    unlimited, innermost = _unlimited(cluster), set(devices.sites)
    # devices that have limits of their own may share a line around them
    count = {
        site: (cluster.inside[site] & (unlimited | (site not in innermost))).sum()
        for d in range(len(cluster))
        for site in devices.sites_around(d)
    }
    sites = [
        site
        for site, many in count.items()
        if 1 < many < len(cluster) and not all(site in limit for limit in limits)
    ]
    if not sites:
        return ""
    return (
        f"no rate is given for the shared line of {joined(sites)}: it is assumed to carry whatever "
        "its devices send and receive. If it carries less, the step takes longer than predicted; "
        "give site_upload_mbps and site_download_mbps in the devices file"
    )


def _unlimited(cluster: Cluster) -> NDArray[np.bool_]:
    """Devices whose own up- and download are not below their fastest pair."""
    out, into = cluster.network.fastest_bytes_per_s
    unlimited = np.ones(len(cluster), dtype=bool)
    for limit, fastest in (
        (cluster.upload_bytes_per_s, out),
        (cluster.download_bytes_per_s, into),
    ):
        if limit is not None:
            unlimited &= limit >= fastest * (1 - TOLERANCE)
    return unlimited
