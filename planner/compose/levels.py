"""Averaging in two levels: sums within sites, slices of them between sites, and back.

Whoever averages over a line that several devices share sends each device's vector over it. Summed
within the site first, it carries one. The k-th device of every site sums the k-th slice there, the
devices that hold the same slice exchange it, and give it to their sites. All sites have as many
such devices as the smallest can have, so that a device exchanges in one group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.clock.links import Links
from planner.network.cluster import Cluster, device_limits
from planner.problems import AveragingProblem
from planner.training_plan.choices import Phase
from planner.training_plan.model import WHOLE, AveragingGroup, StageAveraging
from planner.training_plan.shares import fraction_ends, shares_of


def has_levels(cluster: Cluster) -> bool:
    """Whether devices of a site share a line, and there are other sites.

    Parameters
    ----------
    cluster
        N devices.
    """
    devices = cluster.devices
    lines = devices.site_upload_bytes_per_s or devices.site_download_bytes_per_s
    sites = devices.sites
    return bool(lines) and sites is not None and 1 < len(set(sites)) < len(sites)


def two_levels(cluster: Cluster, group: Sequence[int]) -> StageAveraging | None:
    """Rounds that reduce, exchange and spread; None where there is nothing to win by them.

    Parameters
    ----------
    cluster
        N devices.
    group
        Devices of the stage.

    Returns
    -------
    StageAveraging or None
        Everybody contributes. None without shared lines, with one site, with one device in every
        site, and where all of a site cannot sum.
    """
    if not has_levels(cluster):
        return None
    sites = cluster.devices.sites
    assert sites is not None
    at: dict[str, list[int]] = {}
    for d in group:
        at.setdefault(sites[d], []).append(d)
    if not 1 < len(at) < len(group):
        return None
    sums, (up, down) = np.asarray(cluster.devices.can_aggregate), device_limits(cluster)
    holders = {
        site: sorted((d for d in here if sums[d]), key=lambda d: -min(up[d], down[d]))
        for site, here in at.items()
    }
    slices = min(map(len, holders.values()))
    if slices == 0:
        return None
    holders = {site: held[:slices] for site, held in holders.items()}
    part = shares_of(np.ones(slices))
    within = []
    for site, here in at.items():
        rest = tuple(d for d in here if d not in set(holders[site]))
        shares = part + (0.0,) * len(rest)
        within.append(((*holders[site], *rest), shares, (True,) * len(here), (True,) * len(here)))
    ends = fraction_ends(WHOLE, part)
    between = _exchange_shares(cluster, list(holders), list(holders.values()))
    flags = (True,) * len(holders)
    return (
        tuple(AveragingGroup(*parts, phase=Phase.REDUCE) for parts in within),
        tuple(
            AveragingGroup(
                tuple(held[k] for held in holders.values()),
                between,
                flags,
                flags,
                (ends[k], ends[k + 1]),
                Phase.EXCHANGE,
            )
            for k in range(slices)
        ),
        tuple(AveragingGroup(*parts, phase=Phase.SPREAD) for parts in within),
    )


def _exchange_shares(
    cluster: Cluster, sites: Sequence[str], holders: Sequence[Sequence[int]]
) -> tuple[float, ...]:
    """Each site's share of what all exchange: as if a site were one device."""
    from planner.lp.capacity import Limits
    from planner.lp.rates import best_rates

    links = Links.of(cluster)
    capacity, n, number = links.capacity_bytes_per_s, len(cluster), links.site_of
    lines = []
    for first, own in ((2 * n, 0), (2 * n + links.sites, n)):
        lines.append(
            [
                min(
                    float(capacity[first + number[held[0]]]),
                    float(capacity[own + np.array(held)].sum()),
                )
                for held in holders
            ]
        )
    index = np.array(holders)
    pairs = cluster.network.bandwidth_bytes_per_s[index[:, None], index[None, :]].sum(axis=2)
    problem = AveragingProblem(1.0, lines[0], lines[1], 1.0, 1.0, pairs)
    rates = best_rates(Limits(problem), problem.contributors).rates
    return shares_of(rates if rates.sum() > 0 else np.ones(len(sites)))
