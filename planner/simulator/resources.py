"""Network resources: ordered pairs of devices, and the up- and downlinks that they share.

A resource is a capacity and the ordered pairs that use it. Resource numbers: uploads of the N
devices, their downloads, then the sites' uploads and downloads. An ordered pair is a resource of
its own, which nothing else uses, so it has no number here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster, device_limits
from planner.utils.text import joined

TOLERANCE = 1e-9
"""Relative: a limit counts as below a rate if it is lower by more than this."""
AUTO_SITE = re.compile(r"device \d+'*")
"""Names of the sites that the devices file's reader generates for devices without one."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NONE = -1
MAX_SHARED = 4
"""Most resources that a pair shares: its devices' up- and downlink and their sites' links."""


@dataclass(frozen=True)
class LinkResources:
    """Latency and capacities of a cluster's network.

    Attributes
    ----------
    latency_s, bandwidth_bytes_per_s
        ``float[N, N]``, of the ordered pairs; the diagonal costs nothing.
    capacity_bytes_per_s
        ``float[R]``, by resource number.
    ids
        Names of the N devices.
    names
        Of the R resources.
    site_of
        ``int[N]``: index of each device's site, -1 where none is given.
    sites
        Number of sites.
    """

    latency_s: Floats
    bandwidth_bytes_per_s: Floats
    capacity_bytes_per_s: Floats
    ids: tuple[str, ...]
    names: tuple[str, ...]
    site_of: Ints
    sites: int

    @classmethod
    def of(cls, cluster: Cluster) -> LinkResources:
        """The links of a cluster; a device without a stated limit has its fastest pair's rate."""
        n, ids = len(cluster), cluster.network.ids
        up, down = device_limits(cluster)
        names = sorted(set(cluster.devices.sites or ()))
        place = {name: k for k, name in enumerate(names)}
        site_of = np.array([place[s] for s in cluster.devices.sites or ()] or [NONE] * n)
        lines = [
            _by_site(names, limits)
            for limits in (
                cluster.devices.site_upload_bytes_per_s,
                cluster.devices.site_download_bytes_per_s,
            )
        ]
        return cls(
            # the diagonals are 0 (latency) and inf (bandwidth)
            cluster.network.latency_s,
            cluster.network.bandwidth_bytes_per_s,
            np.concatenate([up, down, *lines]),
            ids,
            (
                *(f"upload of {name}" for name in ids),
                *(f"download of {name}" for name in ids),
                *(f"upload of site {name}" for name in names),
                *(f"download of site {name}" for name in names),
            ),
            site_of.astype(np.int64),
            len(names),
        )

    def __len__(self) -> int:
        return len(self.latency_s)

    def shared(self, source: int, destination: int) -> tuple[int, ...]:
        """Indices of the resources that an ordered pair shares with others.

        Returns
        -------
        tuple[int, ...]
            Two, or four between different sites.
        """
        n = len(self)
        resources = (source, n + destination)
        source_site, target_site = int(self.site_of[source]), int(self.site_of[destination])
        if source_site == target_site:
            return resources
        return (*resources, 2 * n + source_site, 2 * n + self.sites + target_site)


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
    n, ids = len(cluster), cluster.network.ids
    rate = np.where(np.eye(n, dtype=bool), 0.0, cluster.network.bandwidth_bytes_per_s)
    for word, limit, rates in (
        ("upload", cluster.upload_bytes_per_s, rate),
        ("download", cluster.download_bytes_per_s, rate.T),
    ):
        if limit is None:
            continue
        below = np.flatnonzero(limit < rates.max(axis=1) * (1 - TOLERANCE))
        if below.size:
            d = int(below[0])
            e = int(rates[d].argmax())
            many = f" ({below.size} devices are so)" if below.size > 1 else ""
            return (
                f"{word} of {ids[d]} is at most {limit[d] * 8e-9:.4g} Gb/s in all, its link with "
                f"{ids[e]} has {rates[d, e] * 8e-9:.4g}{many}; a line that devices share is that "
                "of a site"
            )
    return ""


def unstated_sites(cluster: Cluster) -> str:
    """A hint that devices of one region may share an uplink; empty if their sites are given.

    Devices without a site are modelled with an uplink each. If they share an office's line or a
    machine's network card, the predicted step is too short.
    """
    out, into = cluster.network.fastest_bytes_per_s
    free = np.ones(len(cluster), dtype=bool)
    for limit, fastest in (
        (cluster.upload_bytes_per_s, out),
        (cluster.download_bytes_per_s, into),
    ):
        if limit is not None:
            free &= limit >= fastest * (1 - TOLERANCE)
    alone = [
        cluster.devices.sites is None or bool(AUTO_SITE.fullmatch(cluster.devices.sites[d]))
        for d in range(len(cluster))
    ]
    count: dict[str, int] = {}
    for d, region in enumerate(cluster.network.regions):
        if free[d] and alone[d]:
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


def _by_site(names: list[str], limits: Mapping[str, float] | None) -> Floats:
    return np.array([(limits or {}).get(name, np.inf) for name in names], dtype=np.float64)
