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
from planner.network.pair_table import PairTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NONE = -1


@dataclass(frozen=True)
class LinkResources:
    """Latency and capacities of a cluster's network.

    Attributes
    ----------
    latency_s, bandwidth_bytes_per_s
        Of the ordered pairs; the diagonal costs nothing.
    capacity_bytes_per_s
        ``float[R]``, by resource number.
    ids
        Names of the N devices.
    names
        Of the R resources.
    sites_of
        ``int[N, L]``: indices of each device's site and of those around it, from the inside out, -1
        where there are no more.
    sites
        Number of sites.
    """

    latency_s: PairTable
    bandwidth_bytes_per_s: PairTable
    capacity_bytes_per_s: Floats
    ids: tuple[str, ...]
    names: tuple[str, ...]
    sites_of: Ints
    sites: int

    @classmethod
    def of(cls, cluster: Cluster) -> LinkResources:
        """The links of a cluster; a device without a stated limit has its fastest pair's rate."""
        n, ids = len(cluster), cluster.network.ids
        up, down = device_limits(cluster)
        names = list(cluster.inside)
        place = {name: k for k, name in enumerate(names)}
        around = [[place[s] for s in cluster.devices.sites_around(d)] for d in range(n)]
        deepest = max([1, *map(len, around)])
        sites_of = np.array([chain + [NONE] * (deepest - len(chain)) for chain in around])
        lines = [
            _by_site(names, limits)
            for limits in (
                cluster.devices.site_upload_bytes_per_s,
                cluster.devices.site_download_bytes_per_s,
            )
        ]
        return cls(
            cluster.network.latency_table,
            cluster.network.bandwidth_table,
            np.concatenate([up, down, *lines]),
            ids,
            (
                *(f"upload of {name}" for name in ids),
                *(f"download of {name}" for name in ids),
                *(f"upload of site {name}" for name in names),
                *(f"download of site {name}" for name in names),
            ),
            sites_of.astype(np.int64),
            len(names),
        )

    def __len__(self) -> int:
        return len(self.latency_s)

    def shared(self, source: int, destination: int) -> tuple[int, ...]:
        """Indices of the resources that an ordered pair shares with others.

        Returns
        -------
        tuple[int, ...]
            Two, and those of sites that it leaves or enters.
        """
        n = len(self)
        left, entered = self.sites_of[source].tolist(), self.sites_of[destination].tolist()
        up = [2 * n + s for s in left if s != NONE and s not in entered]
        down = [2 * n + self.sites + s for s in entered if s != NONE and s not in left]
        return (source, n + destination, *up, *down)

    @property
    def max_shared(self) -> int:
        """Most resources that a pair shares with others."""
        return 2 + 2 * int(self.sites_of.shape[1])


def _by_site(names: list[str], limits: Mapping[str, float] | None) -> Floats:
    return np.array([(limits or {}).get(name, np.inf) for name in names], dtype=np.float64)
