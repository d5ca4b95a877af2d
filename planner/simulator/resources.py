"""Lines of devices and sites: capacities that links (ordered pairs of devices) share.

Lines are numbered: uploads of the N devices, their downloads, then the sites' uploads and
downloads. A link is a resource, too, but nothing else uses it, so it has no number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster, device_limits

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


def _by_site(names: list[str], limits: Mapping[str, float] | None) -> Floats:
    return np.array([(limits or {}).get(name, np.inf) for name in names], dtype=np.float64)
