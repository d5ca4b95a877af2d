"""Owners of slices of a vector in the exchange between sites or regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from planner.network.cluster import Cluster, device_limits
from planner.training_plan.averaging_group import WHOLE, AveragingGroup
from planner.training_plan.choices import Phase
from planner.training_plan.shares import fraction_ends, shares_of


def slice_owners(
    cluster: Cluster, sites: Sequence[Sequence[int]]
) -> tuple[list[list[int]], tuple[AveragingGroup, ...]]:
    """Slice owners of each site, as many as the smallest site can have, and the spread round.

    Returns
    -------
    tuple
        Per site, its owners in order of slices; the groups that spread the slices.
    """
    sums, (up, down) = np.asarray(cluster.devices.can_aggregate), device_limits(cluster)
    able = [
        sorted((d for d in site if sums[d] or len(site) == 1), key=lambda d: -min(up[d], down[d]))
        for site in sites
    ]
    count = min(map(len, able))
    spread_groups = []
    for site, best in zip(sites, able, strict=True):
        others = tuple(d for d in site if d not in set(best[:count]))
        shares = shares_of(np.ones(count)) + (0.0,) * len(others)
        flags = (True,) * len(site)
        members = (*best[:count], *others)
        spread_groups.append(AveragingGroup(members, shares, flags, flags, phase=Phase.SPREAD))
    return [best[:count] for best in able], tuple(spread_groups)


def exchanged(
    owners: Sequence[Sequence[int]], make: Callable[[tuple[int, ...]], AveragingGroup]
) -> tuple[AveragingGroup, ...]:
    """Groups of the owners of each slice; slices are equal parts of the vector."""
    members = list(zip(*owners, strict=True))
    # boundaries as those of the sites' shares
    ends = fraction_ends(WHOLE, shares_of(np.ones(len(members))))
    return tuple(
        replace(make(group), slice=part, phase=Phase.EXCHANGE)
        for group, part in zip(members, pairwise(ends), strict=True)
    )
