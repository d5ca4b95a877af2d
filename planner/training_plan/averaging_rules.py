"""Validation of a plan's averaging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.training_plan.averaging_group import (
    WHOLE,
    AveragingGroup,
    has_phases,
    is_hierarchical,
    within,
)
from planner.training_plan.choices import Phase
from planner.training_plan.model import TrainingPlan
from planner.training_plan.shares import fraction_ends
from planner.utils.text import counted

Floats = NDArray[np.float64]

SHARE_TOLERANCE = 1e-9
WEIGHT_TOLERANCE = 1e-9


def averaging_contradictions(plan: TrainingPlan) -> Iterator[str]:
    """Every gradient must reach every device of its stage."""
    stages = len(plan.assignment.groups)
    tied = plan.averages_tied and plan.must_average_tied
    if any(length_mismatches(plan)):
        return  # the rest presumes that there are none
    arch, shared = plan.workload.architecture, plan.workload.tied_parameters
    if tied and arch is not None and shared != arch.tied * arch.vocabulary * arch.hidden:
        yield (
            f"workload.tied_parameters: must be {arch.tied * arch.vocabulary * arch.hidden}, as "
            f"workload.architecture says, found {shared}; correct it"
        )
    if tied and plan.sync.local_steps:
        yield (
            "averaging.tied: averages gradients in every step, found devices that update by "
            "themselves (sync); leave it out"
        )
    if tied and within(plan.averaging[-1]):
        yield "averaging.tied: averages in every step, found phase within; leave phase out"
        return
    for j, rounds in enumerate(plan.averaging):
        holders, entry = sorted(plan.averaged_by(j)), _entry(plan, j)
        named = f"stage {j}" if j < stages else f"stages 0 and {plan.head_stage}"
        for r, averaging_groups in enumerate(rounds):
            where = f"{entry}.rounds[{r}]"
            aggregators = {d for g in averaging_groups for d in g.aggregators}
            members = sorted(d for g in averaging_groups for d in g.members)
            trained = [d for d in members if d not in aggregators]
            some = {group.phase for group in averaging_groups} == {Phase.EXCHANGE}
            if some and (len(set(members)) < len(members) or not set(members) <= set(holders)):
                yield (
                    f"{where}: its groups must hold devices of {named}, each once, found "
                    f"{members}; correct members"
                )
            elif not some and trained != holders:
                yield (
                    f"{where}: its groups must hold each device of {named} once, and give sums "
                    f"back to it, found {trained}; correct members and receives"
                )
            for g in averaging_groups:
                if abs(sum(g.shares) - 1) > SHARE_TOLERANCE:
                    yield f"{where}: shares must sum to 1, found {sum(g.shares):g}; rescale them"
                elif not any(g.contributes):
                    yield f"{where}: no member contributes; let at least one member do"
                else:
                    yield from _share_contradictions(plan, g, where)
            if aggregators and j == stages:
                yield (
                    f"{where}: device {min(aggregators)} holds no stage; let such devices help "
                    "stages"
                )
            elif aggregators and len(rounds) > 1 + plan.shards_optimizer:
                yield (
                    f"{where}: device {min(aggregators)} holds no stage, and there are "
                    f"{len(rounds)} rounds; let such devices help in a single round"
                )
        wrong = list(_phase_contradictions(rounds, entry, sharded=plan.shards_optimizer))
        if not wrong and plan.shards_optimizer:
            wrong = list(_owner_contradictions(plan, j, entry))
        yield from wrong
        if not wrong:
            yield from _weights_contradictions(plan, j)
    if plan.shards_optimizer and plan.sync.local_steps:
        yield (
            "workload.optimizer_shards: devices that take steps of their own need all of their "
            f"optimizer state, found sync.every_steps {plan.sync.every_steps}; give 1"
        )
    yield from _aggregator_contradictions(plan)
    yield from _frequency_contradictions(plan)


def length_mismatches(plan: TrainingPlan) -> Iterator[str]:
    """Numbers of stages and averaging entries, or of members and their fields, that differ."""
    stages = len(plan.assignment.groups)
    if plan.averages_tied and not plan.must_average_tied:
        yield "averaging.tied: no two stages share a matrix (embedding and head); leave it out"
    elif len(plan.averaging) != stages + plan.averages_tied:
        yield (
            f"averaging.stages: must have {stages} entries, found {len(plan.averaging)}; give one "
            "per stage"
        )
    for j, rounds in enumerate(plan.averaging):
        for r, groups in enumerate(rounds):
            for g in groups:
                if not len(g.members) == len(g.shares) == len(g.contributes) == len(g.receives):
                    yield (
                        f"{_entry(plan, j)}.rounds[{r}]: members, shares, contributes and receives "
                        "differ in length; align them"
                    )


def _entry(plan: TrainingPlan, j: int) -> str:
    """Name of an entry in the plan file."""
    return f"averaging.stages[{j}]" if j < len(plan.stage_layers) else "averaging.tied"


def _frequency_contradictions(plan: TrainingPlan) -> Iterator[str]:
    """Two-frequency averaging must be used by all stages or none, with changes at the lower
    frequency."""
    if not plan.two_frequency:
        return
    other = [j for j, rounds in enumerate(plan.averaging) if not within(rounds)]
    if other:
        yield (
            f"averaging.stages[{other[0]}]: has no groups that average within in every step, other "
            "stages have; give all of them some, or none"
        )
    if not plan.sync.local_steps or plan.sync.delayed:
        averaging = "delayed" if plan.sync.delayed else "gradients of all in every step"
        yield (
            "averaging.stages: groups that average within in every step go with changes that are "
            f"averaged every so many, not delayed, found sync of {averaging}; give "
            "every_steps above 1, or leave phase out"
        )


def _owner_contradictions(plan: TrainingPlan, j: int, where: str) -> Iterator[str]:
    """With optimizer state in shards, devices update what they spread: one part in so many."""
    shards, devices = plan.workload.optimizer_shards, len(plan.averaged_by(j))
    if devices < shards:
        yield (
            f"{where}: {counted(devices, 'device')} cannot share optimizer state in {shards} "
            "shards; give the stage more devices, or fewer optimizer_shards"
        )
    start = plan.stage_layers[j][0] if j < len(plan.stage_layers) else 0
    dtype = plan.workload.spread_dtype(start)
    for g in plan.averaging[j][-1]:
        if g.dtype is not dtype:
            yield (
                f"{where}: parameters of these layers are spread in "
                f"{dtype or plan.workload.precision.gradients}, found dtype "
                f"{g.dtype and str(g.dtype)!r}; correct it"
            )
        # an aggregator holds nothing else
        held = [s for s, holds in zip(g.shares, g.receives, strict=True) if holds]
        largest = max(held, default=0.0)
        if largest > 1 / shards + SHARE_TOLERANCE:
            d = g.members[g.shares.index(largest)]
            yield (
                f"{where}: device {d} spreads {largest:g} of the parameters, found "
                f"optimizer_shards {shards}, with which it may hold {1 / shards:g} of their "
                "optimizer state; lower its share"
            )
            return


def _phase_contradictions(
    rounds: Sequence[Sequence[AveragingGroup]], where: str, *, sharded: bool
) -> Iterator[str]:
    """Hierarchical averaging has three rounds: reduce or within, exchange, spread.

    Or a single round within, if that covers the stage. With optimizer state in shards, what is
    spread are updated parameters, and a single group has nothing to exchange.
    """
    phases = [{group.phase for group in groups} for groups in rounds]
    between = [{Phase.EXCHANGE}, {Phase.SPREAD}]
    allowed = [
        [{Phase.REDUCE}, *between],
        *(
            [[{Phase.REDUCE}, {Phase.SPREAD}]]
            if sharded
            else [[{Phase.WITHIN}, *between], [{Phase.WITHIN}]]
        ),
    ]
    levels = phases in allowed
    if not levels and (sharded or any(one != {Phase.ALL} for one in phases)):
        stated = [sorted(map(str, member_phases)) for member_phases in phases]
        choices = "reduce, exchange, spread, "
        if sharded:
            choices += "or without exchange, with optimizer_shards above 1"
        else:
            choices += "or within in place of reduce, a round each, or none stated"
        yield f"{where}: phases must be {choices}, found {stated}; correct phase"
        return
    for r, groups in enumerate(rounds):
        for group in groups:
            if group.dtype is not None and not (sharded and group.phase is Phase.SPREAD):
                yield (
                    f"{where}.rounds[{r}]: dtype is for parameters that are spread, found "
                    f"{str(group.dtype)!r} in phase {group.phase}; leave it out"
                )
            if group.slice != WHOLE and group.phase is not Phase.EXCHANGE:
                yield (
                    f"{where}.rounds[{r}]: groups that exchange may work on a slice, found "
                    f"{list(group.slice)} in phase {group.phase}; leave it out"
                )
            full = all(group.contributes) and all(group.receives)
            owners_alone = not is_hierarchical(rounds) and group.contributes == group.receives
            if levels and not full and not owners_alone:
                yield (
                    f"{where}.rounds[{r}]: in two levels all members contribute and receive, found "
                    "one that does not; average in one round"
                )


def _share_contradictions(plan: TrainingPlan, group: AveragingGroup, where: str) -> Iterator[str]:
    """Devices with a share must be able to aggregate; aggregators must have one."""
    sums = np.asarray(plan.cluster.devices.can_aggregate)
    rows = zip(group.members, group.shares, group.contributes, group.receives, strict=True)
    for d, share, contributes, receives in rows:
        if share > 0 and len(group.members) > 1 and d < len(sums) and not sums[d]:
            yield f"{where}: device {d} cannot aggregate, found the share {share:g}; give it none"
        if not receives and (contributes or share == 0):
            role = "contributes" if contributes else "sums nothing"
            yield f"{where}: device {d} gets nothing back and {role}; let it sum a share, no more"


def _aggregator_contradictions(plan: TrainingPlan) -> Iterator[str]:
    """A device without a stage is in one group of one stage, so that no round waits for another."""
    # with optimizer state in shards, the same group reduces and spreads
    last = [rounds[-1:] for rounds in plan.averaging]
    aggregators = [d for rounds in last for r in rounds for g in r for d in g.aggregators]
    for d in sorted(set(aggregators)):
        if d >= len(plan.cluster):
            yield f"averaging.stages: there is no device {d}; name one of the {len(plan.cluster)}"
        elif d in plan.stage_of:
            yield (
                f"averaging.stages: device {d} holds stage {plan.stage_of[d]}, so it must get sums "
                "back; correct receives"
            )
        elif aggregators.count(d) > 1:
            yield f"averaging.stages: device {d} helps in {aggregators.count(d)} groups; leave one"


def _weights_contradictions(plan: TrainingPlan, j: int) -> Iterator[str]:
    """Every gradient of a stage must reach each of its devices with the same weight."""
    group, rounds = plan.averaged_by(j), plan.averaging[j]
    place = {d: i for i, d in enumerate(group)}
    all_groups = [g for groups in rounds for g in groups]
    if any(d not in place and d not in g.aggregators for g in all_groups for d in g.members):
        return  # reported already
    if any(len(g.members) != len(g.shares) or not any(g.shares) for g in all_groups):
        return
    has_gradient = [
        place[d] for d in group if any(k == "B" for s in plan.schedules for k, _ in s.order[d])
    ]
    levels = has_phases(rounds)
    if within(rounds):
        # members of a region have equal gradients: the first one represents them
        has_gradient = [place[g.members[0]] for g in rounds[0]]
    for weights in _hierarchical_weights(rounds, place) if levels else [_weights(rounds, place)]:
        off = np.abs(weights[:, has_gradient] - 1)
        if off.size and off.max() > WEIGHT_TOLERANCE:
            i, k = np.unravel_index(int(off.argmax()), off.shape)
            yield (
                f"{_entry(plan, j)}: device {group[int(i)]} gets the gradient of device "
                f"{group[has_gradient[int(k)]]} with weight {weights[i, has_gradient[int(k)]]:g} "
                "instead of 1; let every device with gradients contribute, in rounds that mix all"
            )
            return


def _weights(rounds: Sequence[Sequence[AveragingGroup]], place: Mapping[int, int]) -> Floats:
    """``float[n, n]``, [i, k]: weight of k's gradient in the result of i.

    Several rounds take means, a single one takes the sum.
    """
    weights = np.eye(len(place))
    for groups in rounds:
        previous = weights.copy()
        for g in groups:
            rows = [place[d] for d in g.members if d in place]
            contributions = zip(g.members, g.contributes, strict=False)
            giving = [place[d] for d, flag in contributions if flag and d in place]
            total = previous[giving].sum(axis=0)
            weights[rows] = total / len(rows) if len(rounds) > 1 else total
    return weights * (len(place) if len(rounds) > 1 else 1)


def _hierarchical_weights(
    rounds: Sequence[Sequence[AveragingGroup]], place: Mapping[int, int]
) -> Iterator[Floats]:
    """The same for hierarchical averaging, for every part of the vector that no slice divides."""
    cuts = {end for groups in rounds for g in groups for end in fraction_ends(g.slice, g.shares)}
    holders = len(place)
    aggregators = {d for groups in rounds for g in groups for d in g.aggregators} - place.keys()
    place = {**place, **{d: holders + k for k, d in enumerate(sorted(aggregators))}}
    for begin in sorted(cuts)[:-1]:
        # aggregators have no gradients
        weights = np.eye(len(place), holders)
        for g in (g for groups in within(rounds) for g in groups):
            # the pseudo-gradient of one member is that of its region
            weights[[place[d] for d in g.members]] = weights[place[g.members[0]]]
        for groups in rounds[len(within(rounds)) :]:
            for g in groups:
                ends = np.array(fraction_ends(g.slice, g.shares))
                if not ends[0] <= begin < ends[-1]:
                    continue
                rows = [place[d] for d in g.members]
                holder = rows[int(np.searchsorted(ends, begin, side="right")) - 1]
                if g.phase is Phase.SPREAD:
                    weights[rows] = weights[holder]
                else:
                    total = weights[rows].sum(axis=0)
                    weights[holder if g.phase is Phase.REDUCE else rows] = total
        yield weights[:holders]
