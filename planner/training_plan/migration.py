"""The plan after a device has moved to another stage (SWARM, 3.2).

Dependent parts are rebuilt by deterministic rules without search, so that every device arrives at
the same plan independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.problems.answers import AssignmentPlan
from planner.training_plan.choices import Wiring
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.training_plan.rebuild import assign_greedily, list_schedule, one_round
from planner.training_plan.schedule import Schedule
from planner.training_plan.validation import contradictions
from planner.workload.compute_times import FIELDS, FROM_FLOPS, ComputeTimes


@dataclass(frozen=True)
class Migration:
    """A move of a device to another stage.

    Attributes
    ----------
    after
        Number of steps completed before it.
    """

    device: str
    stage: int
    after: int


def require_routed(plan: TrainingPlan, where: str) -> None:
    """Refuse plans whose devices have fixed paths."""
    if plan.wiring is not Wiring.STOCHASTIC:
        raise PlanError(
            f"{where}: devices move where microbatches are routed, found wiring {plan.wiring}; "
            "plan with --wiring stochastic"
        )


def require_agreed(plan: TrainingPlan, where: str, steps: int, remedy: str) -> None:
    """Refuse moves after steps at which devices of a stage have different parameters."""
    if plan.sync.delayed or steps % plan.sync.every_steps:
        raise PlanError(
            f"{where}: devices move after an outer step that is not delayed, found averaging every "
            f"{plan.sync.every_steps} steps; {remedy}"
        )


def migrated(plan: TrainingPlan, move: Migration) -> TrainingPlan:
    """The plan after a move.

    Paths visit the devices of the two changed stages in proportion to their speed, and stay the
    same in others. Devices hold as many microbatches in flight as before; the moved one, as many as
    the smallest in its new stage. The changed stages average in one round; remaining members keep
    the proportions of their shares, the new member gets the mean. Predicted times are the old
    plan's.
    """
    where = f"device {move.device!r} to stage {move.stage} after {move.after} steps"
    require_routed(plan, where)
    ids, groups = plan.cluster.network.ids, plan.assignment.groups
    if move.device not in ids:
        raise PlanError(f"{where}: the plan has no device {move.device!r}; it has {', '.join(ids)}")
    device = ids.index(move.device)
    source = plan.stage_of.get(device)
    if source is None or move.stage == source or move.stage >= len(groups):
        raise PlanError(
            f"{where}: must go from one stage to another of 0 to {len(groups) - 1}, found stage "
            f"{'none' if source is None else source} to {move.stage}; correct it"
        )
    if len(groups[source]) == 1:
        raise PlanError(f"{where}: is the last device of stage {source}; let another one move")
    require_agreed(plan, where, move.after, "move after a multiple of it")
    new_groups = [tuple(d for d in group if d != device) for group in groups]
    new_groups[move.stage] = tuple(sorted((*groups[move.stage], device)))
    averaging = list(plan.averaging)
    averaging[source] = one_round(plan, source, new_groups[source])
    averaging[move.stage] = one_round(plan, move.stage, new_groups[move.stage])
    if plan.averages_tied and {source, move.stage} & {0, plan.head_stage}:
        both = sorted((*new_groups[0], *new_groups[plan.head_stage]))
        averaging[-1] = one_round(plan, len(groups), both)
    new = plan.replace(
        assignment=AssignmentPlan(tuple(new_groups), None),
        averaging=tuple(averaging),
        compute_times=_times(plan, device, groups[move.stage][0], new_groups),
        certificates={},
        alternatives=(),
        baselines=(),
        cost=None,
    )
    new = new.replace(schedules=(_schedule(plan, new, device, {source, move.stage}),))
    for problem in contradictions(new):
        raise PlanError(f"{where}: {problem}")
    return new


def _times(
    plan: TrainingPlan, device: int, peer: int, groups: Sequence[Sequence[int]]
) -> ComputeTimes:
    """Times of a device in its new stage: by FLOP/s, relative to a peer if measured."""
    times = plan.compute_times
    if times.source == FROM_FLOPS:
        computed = ComputeTimes.from_flops(
            plan.cluster, plan.workload, groups, plan.stage_layers, plan.recompute
        )
        return replace(computed, operation_s=times.operation_s, message_s=times.message_s)
    factor = float(plan.cluster.flops[peer]) / float(plan.cluster.flops[device])
    data = times.to_dict()
    for name in FIELDS:
        data[name][device] = data[name][peer] * factor
    return ComputeTimes.from_dict(data)


def _schedule(old: TrainingPlan, new: TrainingPlan, device: int, changed: set[int]) -> Schedule:
    (schedule,) = old.schedules
    room = dict(enumerate(schedule.most_live()))
    peers = [d for d in new.assignment.groups[new.stage_of[device]] if d != device]
    room[device] = min(room[d] for d in peers)
    times, columns = new.compute_times, list(zip(*schedule.paths, strict=True))
    for stage in changed:
        group = new.assignment.groups[stage]
        microbatch_s = {d: times.forward_s[d] + times.backward_s[d] for d in group}
        if stage == new.head_stage:
            microbatch_s = {d: seconds + times.head_s[d] for d, seconds in microbatch_s.items()}
        columns[stage] = tuple(assign_greedily(microbatch_s, len(schedule.paths)))
    bare = Schedule(f"{schedule.name}, moved", schedule.head, tuple(zip(*columns, strict=True)), ())
    return replace(bare, order=list_schedule(bare, len(new.cluster), room))


def require_movable(plan: TrainingPlan, every: int) -> None:
    """Refuse plans in which devices cannot move after so many steps."""
    if every < 1:
        raise PlanError(f"--rebalance is {every}; give at least 1")
    require_routed(plan, "--rebalance")
    require_agreed(plan, f"--rebalance {every}", every, "give a multiple of it")
