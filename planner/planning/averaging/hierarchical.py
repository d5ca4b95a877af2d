"""Hierarchical averaging: reduce within sites, exchange slices between sites, spread the result.

In one round, every device sends its vector over its site's shared line. Reduced within the site
first, the line carries one vector. The k-th aggregator of every site reduces the k-th slice; the
devices that hold the same slice exchange it, and spread it within their sites. Every site has as
many slice owners as the smallest site can have, so that a device exchanges in one group.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    lines = devices.site_upload_bytes_per_s or devices.site_download_bytes_per_s
    sites = devices.sites
    return bool(lines) and sites is not None and 1 < len(set(sites)) < len(sites)


def hierarchical_rounds(cluster: Cluster, group: Sequence[int]) -> StageAveraging | None:
    """Rounds that reduce, exchange and spread; None if the group cannot gain by them."""
    if not has_hierarchy(cluster):
        return None
    sites = cluster.devices.sites
    assert sites is not None
    devices_at: dict[str, list[int]] = {}
    for d in group:
        devices_at.setdefault(sites[d], []).append(d)
    if not 1 < len(devices_at) < len(group):
        return None
    can_sum = np.asarray(cluster.devices.can_aggregate)
    if not all(can_sum[members].any() for members in devices_at.values()):
        return None
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
    capacity, n, number = links.capacity_bytes_per_s, len(cluster), links.site_of
    lines = []
    for site_first, device_first in ((2 * n, 0), (2 * n + links.sites, n)):
        lines.append(
            [
                min(
                    float(capacity[site_first + number[owners[0]]]),
                    float(capacity[device_first + np.array(owners)].sum()),
                )
                for owners in slice_owners
            ]
        )
    index = np.array(slice_owners)
    pairs = cluster.network.bandwidth_bytes_per_s[index[:, None], index[None, :]].sum(axis=2)
    problem = AveragingProblem(1.0, lines[0], lines[1], 1.0, 1.0, pairs)
    rates = best_rates(BandwidthLimits(problem), problem.contributors).rates
    return shares_of(rates if rates.sum() > 0 else np.ones(len(sites)))
