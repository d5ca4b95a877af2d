"""Hierarchical averaging: reduce within sites, exchange slices between sites, spread the result.

In one round, every device sends its vector over its site's shared line. Reduced within the site
first, the line carries one vector. The k-th aggregator of every site reduces the k-th slice; the
devices that hold the same slice exchange it, and spread it within their sites. Every site has as
many slice owners as the smallest site can have, so that a device exchanges in one group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.network.cluster import Cluster
from planner.problems import AveragingProblem
from planner.simulator.resources import LinkResources
from planner.training_plan.averaging_group import AveragingGroup, StageAveraging
from planner.training_plan.choices import Phase
from planner.training_plan.shares import shares_of
from planner.training_plan.slice_owners import exchanged, slice_owners


def has_hierarchy(cluster: Cluster) -> bool:
    """Whether devices of a site share a line, and there are several sites."""
    devices = cluster.devices
    if not (devices.site_upload_bytes_per_s or devices.site_download_bytes_per_s):
        return False
    n = len(cluster)
    return any(1 < len(devices_at) < n for devices_at in site_groups(cluster, range(n)))


def hierarchical_rounds(cluster: Cluster, group: Sequence[int]) -> list[StageAveraging]:
    """Rounds that reduce, exchange and spread: by sites, and by those in which they lie.

    Empty if the group cannot gain by them.
    """
    if not has_hierarchy(cluster):
        return []
    can_sum = np.asarray(cluster.devices.can_aggregate)
    found = []
    for devices_at in site_groups(cluster, group):
        if 1 < len(devices_at) < len(group) and all(
            can_sum[members].any() for members in devices_at.values()
        ):
            found.append(_rounds_between(cluster, devices_at))
    return found


def site_groups(cluster: Cluster, group: Sequence[int]) -> Iterator[dict[str, list[int]]]:
    """Devices by site, then by the sites around those, up to the outermost."""
    around = {d: cluster.devices.sites_around(d) for d in group}
    deepest = max(map(len, around.values()))
    for level in range(deepest):
        devices_at: dict[str, list[int]] = {}
        for d, sites in around.items():
            # the outermost sites of all are one level
            site = sites[max(level - deepest + len(sites), 0)]
            devices_at.setdefault(site, []).append(d)
        yield devices_at


def _rounds_between(cluster: Cluster, devices_at: Mapping[str, Sequence[int]]) -> StageAveraging:
    owners, spread = slice_owners(cluster, list(devices_at.values()))
    shares = _exchange_shares(cluster, list(devices_at), owners)
    flags = (True,) * len(devices_at)
    exchange = exchanged(owners, lambda members: AveragingGroup(members, shares, flags))
    return tuple(replace(groups, phase=Phase.REDUCE) for groups in spread), exchange, spread


def _exchange_shares(
    cluster: Cluster, sites: Sequence[str], slice_owners: Sequence[Sequence[int]]
) -> tuple[float, ...]:
    """Each site's share in the exchange, as if a site were one device."""
    from planner.lp.capacity import BandwidthLimits
    from planner.lp.rates import best_rates

    links = LinkResources.of(cluster)
    capacity, n = links.capacity_bytes_per_s, len(cluster)
    number = {site: k for k, site in enumerate(cluster.inside)}
    lines = []
    for site_first, device_first in ((2 * n, 0), (2 * n + links.sites, n)):
        lines.append(
            [
                min(
                    float(capacity[site_first + number[site]]),
                    float(capacity[device_first + np.array(owners)].sum()),
                )
                for site, owners in zip(sites, slice_owners, strict=True)
            ]
        )
    index = np.array(slice_owners)
    pairs = cluster.network.bandwidth_table[index[:, None], index[None, :]].sum(axis=2)
    problem = AveragingProblem(1.0, lines[0], lines[1], 1.0, 1.0, pairs)
    rates = best_rates(BandwidthLimits(problem), problem.contributors).rates
    return shares_of(rates if rates.sum() > 0 else np.ones(len(sites)))
