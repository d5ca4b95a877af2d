"""Chooses aggregators: devices without a stage that reduce gradients for one.

Any device that can aggregate but not compute is a candidate. It serves one stage at most, so that
no round waits for another. Greedily, the stage with the longest round gets the aggregator that
shortens it most, until none shortens any. The result is kept if its simulated step is shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.network.cluster import Cluster, device_limits, member_limits
from planner.network.dtype import Dtype
from planner.planning.averaging.stage_averaging import adaptive_owners
from planner.planning.problem import PlanningProblem
from planner.problems.answers import AssignmentPlan
from planner.simulator.averaging_rounds import rounds_s
from planner.simulator.resources import LinkResources
from planner.simulator.simulator import predict
from planner.training_plan.averaging_group import AveragingGroup, StageAveraging
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.training_plan.shares import shares_of
from planner.workload.compute_times import FIELDS, ComputeTimes

MIN_GAIN = 1e-9
"""Least relative gain of an aggregator."""


def with_aggregators(problem: PlanningProblem, plan: TrainingPlan) -> TrainingPlan:
    """The plan with the aggregators that shorten its step; unused devices are listed."""
    full_cluster, names = problem.full_cluster or problem.cluster, plan.cluster.network.ids
    aggregators = problem.aggregators
    members = [full_cluster.network.index_of(name) for name in names]
    unchanged = _with_left_out(plan, full_cluster, members)
    if not aggregators:
        return unchanged
    averaging = _averaging_with_aggregators(on_cluster(plan, full_cluster, members), aggregators)
    used = {d for rounds in averaging for r in rounds for g in r for d in g.aggregators}
    if not used:
        return unchanged
    participants = sorted({*members, *used})
    index_of = {d: k for k, d in enumerate(participants)}
    aggregated = on_cluster(plan, full_cluster.subset(participants), [index_of[d] for d in members])
    aggregated = aggregated.replace(
        averaging=tuple(
            tuple(tuple(_renumbered(g, index_of) for g in groups) for groups in rounds)
            for rounds in averaging
        )
    )
    aggregated = _with_left_out(
        aggregated.replace(predicted=predict(aggregated)), full_cluster, participants
    )
    return min(unchanged, aggregated, key=lambda candidate: candidate.predicted.step_s)


def on_cluster(plan: TrainingPlan, cluster: Cluster, index: Sequence[int]) -> TrainingPlan:
    """The same plan on a cluster that contains its devices and possibly others."""
    number = dict(enumerate(index))

    def widened(times: ComputeTimes) -> ComputeTimes:
        columns: dict[str, Any] = {}
        for name in FIELDS:
            full = [0.0] * len(cluster)
            for d, value in zip(index, getattr(times, name), strict=True):
                full[d] = value
            columns[name] = tuple(full)
        return replace(times, **columns)

    def renumbered(schedule: Schedule) -> Schedule:
        order: list[tuple[tuple[str, int], ...]] = [()] * len(cluster)
        for d, ops in zip(index, schedule.order, strict=True):
            order[d] = ops
        paths = tuple(tuple(number[d] for d in path) for path in schedule.paths)
        return replace(schedule, paths=paths, order=tuple(order))

    grid = plan.assignment.grid
    return plan.replace(
        cluster=cluster,
        assignment=AssignmentPlan(
            tuple(tuple(number[d] for d in group) for group in plan.assignment.groups),
            None if grid is None else np.asarray(index)[grid],
        ),
        compute_times=widened(plan.compute_times),
        schedules=tuple(renumbered(schedule) for schedule in plan.schedules),
        averaging=tuple(
            tuple(tuple(_renumbered(g, number) for g in groups) for groups in rounds)
            for rounds in plan.averaging
        ),
    )


def group_with_aggregators(
    cluster: Cluster, members: Sequence[int], aggregators: Sequence[int]
) -> AveragingGroup | None:
    """The group with the highest rate of averaging; None if no aggregator helps."""
    from planner.lp.aggregator_rates import aggregator_rates

    index = [*members, *aggregators]
    helps = np.arange(len(index)) >= len(members)
    can_reduce = np.asarray(cluster.devices.can_aggregate)[index]
    rates = aggregator_rates(*member_limits(cluster, index), helps, can_reduce)
    if rates.sum() <= 0:
        return None
    shares = rates / rates.sum()
    selected = np.flatnonzero(~helps | (shares > MIN_GAIN))
    if len(selected) == len(members):
        return None
    trains = tuple((~helps[selected]).tolist())
    members = tuple(index[k] for k in selected)
    return AveragingGroup(members, shares_of(shares[selected]), trains, trains)


def _rounds_with_aggregators(
    plan: TrainingPlan, stage: int, aggregators: Sequence[int]
) -> StageAveraging | None:
    """A stage's rounds with these aggregators; None if none of them helps."""
    cluster, members = plan.cluster, plan.assignment.groups[stage]
    if not plan.shards_optimizer:
        group = group_with_aggregators(cluster, members, aggregators)
        return None if group is None else ((group,),)
    w, index = plan.workload, [*members, *aggregators]
    can_own = np.asarray(cluster.devices.can_aggregate)[index]
    # an aggregator has the sums of the whole vector in memory
    parameters = plan.vector_bytes()[stage] / w.gradient_bytes_per_parameter
    free_bytes = cluster.memory_bytes[list(aggregators)] - Dtype.FP32.bytes * parameters
    limits = np.concatenate(
        [
            np.full(len(members), 1 / w.optimizer_shards),
            np.clip(free_bytes / (w.precision.optimizer_bytes * parameters), 0.0, 1.0),
        ]
    )
    trains = np.arange(len(index)) < len(members)
    dtype = w.spread_dtype(plan.stage_layers[stage][0])
    rounds = adaptive_owners(cluster, index, np.where(can_own, limits, 0.0), dtype, trains)
    return rounds if rounds is not None and rounds[0][0].aggregators else None


def _averaging_with_aggregators(
    plan: TrainingPlan, aggregators: Sequence[int]
) -> tuple[StageAveraging, ...]:
    """The plan's averaging, with aggregators where they shorten it."""
    cluster, links = plan.cluster, LinkResources.of(plan.cluster)
    vector_sizes = plan.vector_bytes()

    def seconds(rounds: StageAveraging, stage: int) -> float:
        return rounds_s(rounds, vector_sizes[stage], links, plan.codec)

    rounds_of = {
        j: rounds
        for j, rounds in enumerate(plan.averaging[: len(plan.stage_layers)])
        if len(rounds) == 1 + plan.shards_optimizer
    }
    rounds_of = {j: rounds for j, rounds in rounds_of.items() if len(rounds[0][0].members) > 1}
    initial_s = {j: seconds(rounds, j) for j, rounds in rounds_of.items()}
    kind = _properties(cluster)
    free, remaining_s = list(aggregators), dict(initial_s)
    while free and remaining_s:
        j = max(remaining_s, key=lambda stage: (remaining_s[stage], -stage))
        known = rounds_of[j][0][0].aggregators
        options = [
            (seconds(rounds, j), h, rounds)
            for h in {kind[h]: h for h in reversed(free)}.values()
            if (rounds := _rounds_with_aggregators(plan, j, [*known, h])) is not None
        ]
        fastest = min(options, key=lambda option: option[:2], default=None)
        if fastest is None or fastest[0] >= remaining_s[j] * (1 - MIN_GAIN):
            del remaining_s[j]
            continue
        remaining_s[j], _, rounds_of[j] = fastest
        used = {h for rounds in rounds_of.values() for h in rounds[0][0].aggregators}
        free = [h for h in aggregators if h not in used]
    return tuple(rounds_of.get(j, rounds) for j, rounds in enumerate(plan.averaging))


def _properties(cluster: Cluster) -> dict[int, tuple[object, ...]]:
    """Properties that distinguish aggregators."""
    network, (up, down) = cluster.network, device_limits(cluster)
    sites = cluster.devices.sites or [""] * len(cluster)
    return {
        d: (c, float(up[d]), float(down[d]), sites[d])
        for c, members in enumerate(network.alike)
        for d in members
    }


def _renumbered(group: AveragingGroup, number: Mapping[int, int]) -> AveragingGroup:
    return replace(group, members=tuple(number[d] for d in group.members))


def _with_left_out(plan: TrainingPlan, whole: Cluster, cast: Sequence[int]) -> TrainingPlan:
    """The plan, with the names of devices that take no part."""
    ids, used = whole.network.ids, set(cast)
    return plan.replace(left_out=tuple(ids[d] for d in range(len(whole)) if d not in used))
