"""The averaging part of a plan: equal shares or DeDLOC's adaptive ones, in one or more rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.compose.request import Shares
from planner.network.cluster import Cluster
from planner.problems import AveragingProblem, ProblemError
from planner.training_plan.model import AveragingGroup

Rounds = tuple[tuple[AveragingGroup, ...], ...]


def averaging_rounds(
    cluster: Cluster, group: Sequence[int], shares: str, group_size: int | None
) -> Rounds:
    """Rounds of one stage, in which every device contributes.

    Parameters
    ----------
    cluster
        N devices.
    group
        Devices of the stage.
    shares
        ``"equal"``: everybody sums the same part. ``"adaptive"``: the parts that make averaging
        fastest when all messages flow at the same time (`planner.lp`), by the devices' limits or,
        where they have none, their fastest link, and by the pairs' bandwidth.
    group_size
        m of DeDLOC's Appendix C: rounds of groups of at most m, laid out to give the exact mean.
        None: one round of all.

    Returns
    -------
    Rounds
        Per round, its disjoint groups.

    Raises
    ------
    ProblemError
        The groups do not give the exact mean, or no rate is feasible.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.2 and
    Appendix C.
    """
    members = [tuple(group)]
    rounds = [members]
    if group_size is not None and len(group) > 1:
        rounds = _schedule(group, min(group_size, len(group)))
    unable = [d for d in group if not np.asarray(cluster.devices.can_aggregate)[d]]
    if shares == Shares.EQUAL and unable and len(group) > 1:
        raise ProblemError(
            f"device {cluster.network.ids[unable[0]]!r} cannot aggregate, so shares cannot be "
            "equal; ask for averaging='adaptive'"
        )
    make = (
        AveragingGroup.equal if shares == Shares.EQUAL else (lambda m: adaptive_group(cluster, m))
    )
    return tuple(tuple(make(m) for m in groups) for groups in rounds)


def _schedule(group: Sequence[int], group_size: int) -> list[list[tuple[int, ...]]]:
    from planner.lp.groups import group_schedule, schedule_error

    rounds = group_schedule(len(group), group_size)
    error = schedule_error(len(group), group_size, len(rounds))
    if error > 0:
        raise ProblemError(
            f"groups of {group_size} do not give {len(group)} devices the exact mean (off by "
            f"{error:.2g}); choose a size of which {len(group)} is a power or product"
        )
    return [[tuple(group[i] for i in members) for members in groups] for groups in rounds]


def adaptive_group(cluster: Cluster, members: tuple[int, ...]) -> AveragingGroup:
    """Shares by which all members' gradients are averaged at the highest rate (eq. 6).

    Parameters
    ----------
    cluster
        N devices.
    members
        Devices.

    Returns
    -------
    AveragingGroup
        Everybody contributes.

    Raises
    ------
    ProblemError
        No rate is feasible.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), eq. 6.
    """
    from planner.lp.capacity import Limits
    from planner.lp.rates import best_rates

    if len(members) == 1:
        return AveragingGroup.equal(members)
    index = list(members)
    # a site's line is a limit of pairs here; devices' own limits are the problem's
    network = cluster.network if cluster.devices.sites is None else cluster.limited_network()
    pairs = network.bandwidth_bytes_per_s[np.ix_(index, index)]
    off = np.where(np.eye(len(index), dtype=bool), 0.0, pairs)
    up, down = cluster.upload_bytes_per_s, cluster.download_bytes_per_s
    problem = AveragingProblem(
        1.0,
        off.max(axis=1) if up is None else up[index],
        off.max(axis=0) if down is None else down[index],
        1.0,
        1.0,
        pairs,
        can_aggregate=np.asarray(cluster.devices.can_aggregate)[index],
    )
    rates = best_rates(Limits(problem), problem.contributors).rates
    if rates.sum() <= 0:
        raise ProblemError(
            f"devices {index} cannot average: no rate is feasible; check their links"
        )
    shares = rates / rates.sum()
    # the file's shares sum to 1 within rounding; the largest takes the rest
    shares[np.argmax(shares)] += 1.0 - shares.sum()
    return AveragingGroup(members, tuple(shares.tolist()), (True,) * len(members))
