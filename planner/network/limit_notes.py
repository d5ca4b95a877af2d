"""Notes for users on the limits of devices: assumed, tight, or perhaps shared."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster
from planner.utils.text import joined

LONG_LATENCY_S = 2.0
"""No network takes longer: a signal is on its way to a geostationary satellite for 0.12 s."""
TOLERANCE = 1e-9
"""Relative: a limit counts as below a rate if it is lower by more than this."""
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
    """A hint that each pair of GPUs of two machines is assumed to have the machines' rate.

    A network file usually has one rate for two machines, from one pair of processes. Empty if the
    machines' lines carry no more than that.
    """
    machines = cluster.devices.machines
    if machines is None:
        return ""
    members: dict[str, list[int]] = {}
    for d, machine in enumerate(machines):
        if machine:
            members.setdefault(machine, []).append(d)
    names = list(members)
    size = np.array([len(gpus) for gpus in members.values()])
    first = [gpus[0] for gpus in members.values()]
    rate = cluster.network.bandwidth_table.between(first)
    limits = (cluster.devices.site_upload_bytes_per_s, cluster.devices.site_download_bytes_per_s)
    up, down = (np.array([(limit or {}).get(name, np.inf) for name in names]) for limit in limits)
    most = np.minimum(np.minimum(up[:, None], down[None, :]), np.outer(size, size) * rate)
    np.fill_diagonal(most, 0.0)
    excess = np.divide(most, rate, out=np.zeros_like(rate), where=rate > 0)
    if excess.max(initial=0.0) <= 1 + TOLERANCE:
        return ""
    a, b = np.unravel_index(int(excess.argmax()), excess.shape)
    ids = cluster.network.ids
    return (
        f"each of the {size[a]} x {size[b]} pairs of GPUs of {names[a]} and {names[b]} is assumed "
        f"to have the {rate[a, b] * 8e-9:.4g} Gb/s of {ids[first[a]]} and {ids[first[b]]}, all "
        f"together {most[a, b] * 8e-9:.4g}. If two machines have no more than that rate in all, "
        "the step takes longer than predicted; give site_upload_mbps and site_download_mbps of "
        "the machine, or of the site behind it, in the devices file"
    )


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
