"""Rebuilds parts of a plan by deterministic rules, without search.

After a device moved, was lost or returned, every device thus arrives at the same plan
independently.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.network.dtype import Dtype
from planner.training_plan.averaging_group import AveragingGroup, StageAveraging
from planner.training_plan.choices import Head, Phase
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Operation, Schedule
from planner.training_plan.slice_owners import exchanged, rounds_of_copies, slice_owners
from planner.utils.text import counted


def one_round(
    plan: TrainingPlan, stage: int, devices: Sequence[int], gone: Collection[int] = ()
) -> tuple[tuple[AveragingGroup, ...], ...]:
    """One round of a stage's devices and aggregators; shares keep their proportions if possible.

    Returns
    -------
    tuple
        One round of one group.
    """
    rounds = plan.averaging[stage]
    aggregators = sorted(
        {d for groups in rounds for g in groups for d in g.aggregators} - set(gone)
    )
    members = (*devices, *aggregators)
    alone = len(rounds) == 1 and len(rounds[0]) == 1 and rounds[0][0].phase is Phase.ALL
    old_shares = dict(zip(rounds[0][0].members, rounds[0][0].shares, strict=True)) if alone else {}
    shares = _shares(plan, members, old_shares, aggregators)
    contributes = (True,) * len(devices) + (False,) * len(aggregators)
    return ((AveragingGroup(members, shares, contributes, contributes),),)


def two_frequency_rounds(plan: TrainingPlan, stage: int, gone: Collection[int]) -> StageAveraging:
    """Rounds of the remaining devices within regions, between them, and back.

    Shares keep their proportions, also those of regions. Slices are equal, and owned by the devices
    with most bandwidth, as in `planner.training_plan.slice_owners`.
    """
    inner, *between = plan.averaging[stage]
    groups, regions, parts = [], [], []
    for group in inner:
        remaining = tuple(d for d in group.members if d not in gone)
        if not remaining:
            continue
        _require_sums(plan, stage, remaining)
        old_shares = dict(zip(group.members, group.shares, strict=True))
        groups.append(
            replace(_all(remaining, _shares(plan, remaining, old_shares)), phase=Phase.WITHIN)
        )
        regions.append(remaining)
        parts.append(_exchange_fraction(between, group.members))
    if len(groups) == 1:
        return (tuple(groups),)
    owners, spread_groups = slice_owners(plan.cluster, regions)
    for members in zip(*owners, strict=True):
        _require_sums(plan, stage, members)
    exchange = exchanged(
        owners,
        lambda members: _all(
            members, _shares(plan, members, dict(zip(members, parts, strict=True)))
        ),
    )
    return tuple(groups), exchange, spread_groups


def owner_rounds(plan: TrainingPlan, entry: int, gone: Collection[int]) -> StageAveraging:
    """Rounds of the remaining devices that own shares of the optimizer state.

    As many groups as before hold all of it, or two, or one, as the number of devices allows.
    """
    able = np.asarray(plan.cluster.devices.can_aggregate)
    shards, (*_, spread) = plan.workload.optimizer_shards, plan.averaging[entry]
    groups = [tuple(d for d in group.members if d not in gone) for group in spread]
    members = sorted(d for group in groups for d in group)
    # those that own nothing come last
    members.sort(key=lambda d: not able[d])
    for choice in (groups, [members[::2], members[1::2]], [members]):
        if all(able[list(group)].sum() >= shards for group in choice):
            return _rounds_of_owners(plan, choice, spread[0].dtype)
    what = f"stage {entry}" if entry < len(plan.stage_layers) else "the matrix of two stages"
    raise PlanError(
        f"{what} has {counted(able[members].sum(), 'device')} left that can aggregate, and "
        f"optimizer state in {shards} shards needs as many"
    )


def _rounds_of_owners(
    plan: TrainingPlan, groups: Sequence[Sequence[int]], dtype: Dtype | None
) -> StageAveraging:
    if len(groups) > 1:
        return rounds_of_copies(plan.cluster, groups, dtype)
    members = tuple(groups[0])
    group = replace(_all(members, _shares(plan, members, {})), phase=Phase.REDUCE)
    return (group,), (replace(group, phase=Phase.SPREAD, dtype=dtype),)


def _require_sums(plan: TrainingPlan, stage: int, members: Sequence[int]) -> None:
    able = np.asarray(plan.cluster.devices.can_aggregate)
    if len(members) > 1 and not able[list(members)].any():
        names = ", ".join(repr(plan.cluster.network.ids[d]) for d in members)
        raise PlanError(f"stage {stage}: none of {names} can sum (can_aggregate)")


def _all(members: tuple[int, ...], shares: tuple[float, ...]) -> AveragingGroup:
    return AveragingGroup(members, shares, (True,) * len(members))


def _exchange_fraction(
    rounds: Sequence[Sequence[AveragingGroup]], region: Collection[int]
) -> float:
    """Fraction of the exchange between regions that a region reduces."""
    return sum(
        share * group.width
        for groups in rounds
        for group in groups
        if group.phase is Phase.EXCHANGE
        for d, share in zip(group.members, group.shares, strict=True)
        if d in region
    )


def _shares(
    plan: TrainingPlan,
    members: Sequence[int],
    known: Mapping[int, float],
    aggregators: Collection[int] = (),
) -> tuple[float, ...]:
    """Known shares in proportion; other members get their mean if they can aggregate."""
    able = np.asarray(plan.cluster.devices.can_aggregate)
    if known:
        mean = sum(known.values()) / len(known)
        shares = [known.get(d, mean) * float(able[d]) for d in members]
    else:
        shares = [float(able[d]) * (d not in aggregators) for d in members]
    if sum(shares) <= 0:
        shares = [float(able[d]) for d in members]
    if sum(shares) <= 0:  # no device can sum; a single device need not
        shares = [1.0] * len(members)
    total = sum(shares)
    return tuple(share / total for share in shares)


def assign_greedily(cost: Mapping[int, float], microbatches: int) -> list[int]:
    """Assign each microbatch to the device that would finish it first; all get at least one."""
    done, assigned = dict.fromkeys(cost, 0.0), []
    for remaining in range(microbatches, 0, -1):
        idle = [d for d in cost if not done[d]]
        choices = idle if len(idle) >= remaining else list(cost)
        d = min(choices, key=lambda d: (done[d] + cost[d], d))
        done[d] += max(cost[d], 1e-12)
        assigned.append(d)
    return assigned


def list_schedule(
    schedule: Schedule, devices: int, room: Mapping[int, int]
) -> tuple[tuple[Operation, ...], ...]:
    """Operations in dependency order, with forward passes first as long as memory allows."""
    chains = [schedule.chain(b) for b in range(len(schedule.paths))]
    place = [0] * len(chains)
    live = [0] * devices
    orders: list[list[Operation]] = [[] for _ in range(devices)]
    last = Head.LAST is schedule.head
    while True:
        ready: list[dict[str, list[int]]] = [{"F": [], "H": [], "B": []} for _ in range(devices)]
        for b, chain in enumerate(chains):
            if place[b] < len(chain):
                kind, d = chain[place[b]]
                ready[d][kind].append(b)
        some = False
        for d, waiting in enumerate(ready):
            if waiting["F"] and live[d] < room[d]:
                kind = "F"
            elif waiting["H"]:
                kind = "H"
            elif waiting["B"]:
                kind = "B"
            else:
                continue
            some = True
            b = waiting[kind][0]
            live[d] += {"F": 1, "H": 0, "B": -1}[kind]
            orders[d].append((kind, b))
            place[b] += 1
            if last and kind == "F" and chains[b][place[b]] == ("H", d):
                # the last stage runs B as soon as possible
                orders[d] += [("H", b), ("B", b)]
                place[b] += 2
                live[d] -= 1
        if not some:
            return tuple(map(tuple, orders))
