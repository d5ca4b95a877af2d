"""Averaging groups and rounds of a plan: equal shares, or DeDLOC's adaptive ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.lp.owner_shares import owner_shares
from planner.network.cluster import Cluster, member_limits
from planner.network.dtype import Dtype
from planner.planning.averaging.hierarchical import hierarchical_rounds, site_groups
from planner.planning.averaging.two_frequency import two_frequency_rounds
from planner.planning.request import ShareRule
from planner.problems import AveragingProblem, ProblemError
from planner.simulator.averaging_rounds import round_s, rounds_s
from planner.simulator.resources import LinkResources
from planner.training_plan.averaging_group import AveragingGroup, StageAveraging
from planner.training_plan.choices import Codec, Phase
from planner.training_plan.shares import shares_of
from planner.training_plan.slice_owners import rounds_of_copies
from planner.utils.text import counted, joined

MIN_SHARE = 1e-9
"""Least share of an aggregator."""


def averaging_rounds(
    cluster: Cluster,
    group: Sequence[int],
    shares: str,
    group_size: int | None,
    vector_bytes: float,
    codec: Codec = Codec.NONE,
    *,
    hierarchical: bool = False,
    two_frequency: bool = False,
    optimizer_shards: int = 1,
    optimizer_copies: int = 1,
    spread_dtype: Dtype | None = None,
) -> StageAveraging:
    """Rounds of one stage, to which every device contributes.

    Parameters
    ----------
    cluster, group
        The cluster, and the stage's devices in it.
    shares
        ``"equal"`` or ``"adaptive"``: what each member reduces.
    group_size
        Members of a group, with which averaging takes several rounds; None for one group of all.
    vector_bytes
        Unencoded bytes that each device averages.
    codec
        Encoding of the vectors.
    hierarchical
        Whether averaging in three rounds by site is taken where it is faster.
    two_frequency
        Whether regions average in every step, and between them every H.
    optimizer_shards
        Above 1: reduced to owners of at most one part in so many, which update and spread it.
    optimizer_copies
        Devices that have each part of the optimizer state, at least.
    spread_dtype
        Format of what they spread (`Workload.spread_dtype`).

    Returns
    -------
    tuple
        Groups of every round.

    Raises
    ------
    ProblemError
        A device cannot aggregate but shares are equal, groups of this size do not give the mean, or
        no rate is feasible.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.2 and
    Appendix C.
    """
    can_own = np.asarray(cluster.devices.can_aggregate)[list(group)]
    owners = int(can_own.sum())
    if optimizer_shards == 1 and optimizer_copies > len(group):
        raise ProblemError(
            f"optimizer_copies is {optimizer_copies}, and a stage has "
            f"{counted(len(group), 'device')}; give fewer, or more pipelines"
        )
    if optimizer_shards > 1 and optimizer_shards * optimizer_copies > owners:
        times = f" with optimizer_copies {optimizer_copies}" if optimizer_copies > 1 else ""
        raise ProblemError(
            f"optimizer_shards is {optimizer_shards}{times}, and of "
            f"{counted(len(group), 'device')} of a stage {owners} can aggregate; give fewer, or "
            "more pipelines"
        )
    unable = [d for d, can in zip(group, can_own, strict=True) if not can]
    if shares == ShareRule.EQUAL and unable and len(group) > 1:
        raise ProblemError(
            f"device {cluster.network.ids[unable[0]]!r} cannot aggregate, so shares cannot be "
            "equal; ask for averaging='adaptive'"
        )

    def group_of(members: tuple[int, ...], vector_bytes: float) -> AveragingGroup:
        if shares == ShareRule.EQUAL:
            return AveragingGroup.equal(members)
        return adaptive_group(cluster, members, vector_bytes)

    if optimizer_shards > 1:
        return _sharded_rounds(
            cluster,
            tuple(group),
            shares,
            vector_bytes,
            optimizer_shards,
            optimizer_copies,
            spread_dtype,
            hierarchical=hierarchical,
        )
    if two_frequency:
        return two_frequency_rounds(cluster, group, group_of, vector_bytes, codec)
    rounds = [[tuple(group)]]
    if group_size is not None and len(group) > 1:
        rounds = _rounds_of_groups(group, min(group_size, len(group)))
    encoded_bytes = vector_bytes * codec.wire_ratio
    single_level = tuple(tuple(group_of(m, encoded_bytes) for m in groups) for groups in rounds)
    multi_level = hierarchical_rounds(cluster, group) if hierarchical else []
    if not multi_level:
        return single_level
    links = LinkResources.of(cluster)
    return min(
        (single_level, *multi_level),
        key=lambda rounds: rounds_s(rounds, vector_bytes, links, codec),
    )


def _rounds_of_groups(group: Sequence[int], group_size: int) -> list[list[tuple[int, ...]]]:
    from planner.lp.groups import group_schedule, schedule_error

    rounds = group_schedule(len(group), group_size)
    error = schedule_error(len(group), group_size, len(rounds))
    if error > 0:
        raise ProblemError(
            f"groups of {group_size} do not give {len(group)} devices the exact mean (off by "
            f"{error:.2g}); choose a size of which {len(group)} is a power or product"
        )
    return [[tuple(group[i] for i in members) for members in groups] for groups in rounds]


def _sharded_rounds(
    cluster: Cluster,
    members: tuple[int, ...],
    shares: str,
    vector_bytes: float,
    shards: int,
    copies: int,
    spread_dtype: Dtype | None,
    *,
    hierarchical: bool,
) -> StageAveraging:
    """Rounds that reduce gradients to the owners of shards, and spread their parameters."""
    able = np.asarray(cluster.devices.can_aggregate)
    can_own = able[list(members)]
    rounds: list[StageAveraging] = []
    if copies > 1:
        groupings = _groupings(cluster, members, copies)
        rounds += [
            rounds_of_copies(cluster, groups, spread_dtype)
            for groups in groupings
            if min(able[list(group)].sum() for group in groups) >= shards
        ]
    else:
        rounds.append(_owner_rounds(members, shares_of(can_own.astype(float)), spread_dtype))
        if shares == ShareRule.ADAPTIVE:
            limits = np.where(can_own, 1 / shards, 0.0)
            adaptive = adaptive_owners(cluster, members, limits, spread_dtype)
            rounds += [] if adaptive is None else [adaptive]
    for *reduced, spread in hierarchical_rounds(cluster, members) if hierarchical else ():
        if len(spread) >= copies and max(spread[0].shares) <= 1 / shards:
            rounds.append((*reduced, tuple(replace(group, dtype=spread_dtype) for group in spread)))
    links = LinkResources.of(cluster)
    return min(rounds, key=lambda each: rounds_s(each, vector_bytes, links))


def _groupings(
    cluster: Cluster, members: tuple[int, ...], copies: int
) -> list[list[tuple[int, ...]]]:
    """Whole sites or regions in groups with as many owners, and groups that take of everywhere."""
    can_own = np.asarray(cluster.devices.can_aggregate)
    in_region: dict[str, list[int]] = {}
    for d in members:
        in_region.setdefault(cluster.network.regions[d], []).append(d)
    levels = [list(at.values()) for at in (*site_groups(cluster, members), in_region)]
    found = []
    for places in [*levels, [[d] for d in members]]:
        groups: list[list[int]] = [[] for _ in range(copies)]
        # the largest first, each to the group with the fewest owners
        for devices in sorted(places, key=lambda devices: -int(can_own[devices].sum())):
            min(groups, key=lambda group: (can_own[group].sum(), len(group))).extend(devices)
        found.append([tuple(sorted(group)) for group in groups])
    return [groups for groups in found if all(groups)]


def adaptive_owners(
    cluster: Cluster,
    members: Sequence[int],
    limits: NDArray[np.float64],
    spread_dtype: Dtype | None,
    trains: NDArray[np.bool_] | None = None,
) -> StageAveraging | None:
    """Rounds of the owners with the shortest averaging without latency; None if none can own.

    Parameters
    ----------
    limits
        ``float[n]``, each member's largest share.
    trains
        ``bool[n]``, which of them have the stage; None if all do.
    """
    shares = owner_shares(
        *member_limits(cluster, members),
        limits,
        trains,
        1.0 if spread_dtype is None else spread_dtype.bytes / Dtype.FP32.bytes,
    )
    if shares is None:
        return None
    kept = np.ones(len(members), dtype=bool) if trains is None else trains | (shares > MIN_SHARE)
    holds = None if trains is None else trains[kept]
    present = np.array(members)[kept].tolist()
    return _owner_rounds(present, shares_of(shares[kept]), spread_dtype, holds)


def _owner_rounds(
    members: Sequence[int],
    shares: tuple[float, ...],
    spread_dtype: Dtype | None,
    trains: NDArray[np.bool_] | None = None,
) -> StageAveraging:
    flags = (True,) * len(members) if trains is None else tuple(trains.tolist())
    reducing = AveragingGroup(tuple(members), shares, flags, flags, phase=Phase.REDUCE)
    return (reducing,), (replace(reducing, phase=Phase.SPREAD, dtype=spread_dtype),)


def adaptive_group(
    cluster: Cluster, members: tuple[int, ...], vector_bytes: float
) -> AveragingGroup:
    """Shares with the highest rate of averaging over all members (eq. 6).

    Equal shares of all aggregating members, if these are faster in the simulator, which counts
    latency too.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), eq. 6.
    """
    if len(members) == 1:
        return AveragingGroup.equal(members)
    links = LinkResources.of(cluster)
    groups = [_lp_group(cluster, members)]
    can_sum = np.asarray(cluster.devices.can_aggregate)[list(members)]
    if can_sum.any():
        flags = (True,) * len(members)
        groups.append(AveragingGroup(members, shares_of(can_sum.astype(float)), flags))
    return min(groups, key=lambda group: round_s(group, vector_bytes, links))


def _lp_group(cluster: Cluster, members: tuple[int, ...]) -> AveragingGroup:
    """Shares with the highest rate, without latency."""
    from planner.lp.capacity import BandwidthLimits
    from planner.lp.rates import best_rates

    up, down, pairs = member_limits(cluster, members)
    can_aggregate = np.asarray(cluster.devices.can_aggregate)[list(members)]
    problem = AveragingProblem(1.0, up, down, 1.0, 1.0, pairs, can_aggregate=can_aggregate)
    rates = best_rates(BandwidthLimits(problem), problem.contributors).rates
    if rates.sum() <= 0:
        names = joined([cluster.network.ids[d] for d in members])
        raise ProblemError(
            f"devices {names} cannot average: no rate is feasible; check their links"
        )
    return AveragingGroup(members, shares_of(rates), (True,) * len(members))
