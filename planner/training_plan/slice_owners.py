"""Owners of slices of a vector in the exchange between sites or regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from planner.network.cluster import Cluster, device_limits
from planner.network.dtype import Dtype
from planner.training_plan.averaging_group import WHOLE, AveragingGroup, StageAveraging
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


def rounds_of_copies(
    cluster: Cluster, groups: Sequence[Sequence[int]], dtype: Dtype | None
) -> StageAveraging:
    """Rounds of groups of which each holds all optimizer state, and spreads what it updates."""
    owners, spread = slice_owners(cluster, groups)
    return (
        tuple(replace(group, phase=Phase.REDUCE) for group in spread),
        exchanged(owners, AveragingGroup.equal),
        tuple(replace(group, dtype=dtype) for group in spread),
    )


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
