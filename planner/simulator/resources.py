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
    site_names
        Names of the sites.
    sites_of
        ``int[N, L]``: indices of each device's site and of those around it, from the inside out, -1
        where there are no more.
    """

    latency_s: PairTable
    bandwidth_bytes_per_s: PairTable
    capacity_bytes_per_s: Floats
    ids: tuple[str, ...]
    site_names: tuple[str, ...]
    sites_of: Ints

    @classmethod
    def of(cls, cluster: Cluster) -> LinkResources:
        """The links of a cluster; a device without a stated limit has its fastest pair's rate."""
        up, down = device_limits(cluster)
        names = list(cluster.inside)
        place = {name: k for k, name in enumerate(names)}
        # of one device in each site, or without sites of one device
        _, first, site = np.unique(
            cluster.devices.sites or [""] * len(cluster), return_index=True, return_inverse=True
        )
        around = [[place[s] for s in cluster.devices.sites_around(d)] for d in first.tolist()]
        deepest = max([1, *map(len, around)])
        chains = np.array([chain + [NONE] * (deepest - len(chain)) for chain in around])
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
            cluster.network.ids,
            tuple(names),
            chains.astype(np.int64)[site],
        )

    def __len__(self) -> int:
        return len(self.latency_s)

    @property
    def sites(self) -> int:
        """Number of sites."""
        return len(self.site_names)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the R resources."""
        return (
            *(f"upload of {name}" for name in self.ids),
            *(f"download of {name}" for name in self.ids),
            *(f"upload of site {name}" for name in self.site_names),
            *(f"download of site {name}" for name in self.site_names),
        )

    def shared(self, source: Ints, destination: Ints) -> Ints:
        """Indices of the resources that ordered pairs share with others.

        Returns
        -------
        ndarray
            ``int[P, 2 + 2 L]``: two, and those of sites that a pair leaves or enters; padded with
            `NONE`.
        """
        n = len(self)
        left, entered = self.sites_of[source], self.sites_of[destination]
        is_crossed = ~(left[:, :, None] == entered[:, None, :])
        up = np.where((left != NONE) & is_crossed.all(axis=2), 2 * n + left, NONE)
        down = np.where(
            (entered != NONE) & is_crossed.all(axis=1), 2 * n + self.sites + entered, NONE
        )
        shared = np.concatenate([source[:, None], n + destination[:, None], up, down], axis=1)
        padding_last = np.argsort(shared == NONE, axis=1, kind="stable")
        return np.take_along_axis(shared, padding_last, axis=1)


def _by_site(names: list[str], limits: Mapping[str, float] | None) -> Floats:
    return np.array([(limits or {}).get(name, np.inf) for name in names], dtype=np.float64)
