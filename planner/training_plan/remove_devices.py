"""The plan without lost devices: others of their stages take over their microbatches.

It follows from deterministic rules without search, so that all remaining devices arrive at the same
plan independently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from planner.problems.answers import AssignmentPlan
from planner.training_plan.averaging_group import StageAveraging, within
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.training_plan.rebuild import (
    list_schedule,
    one_round,
    owner_rounds,
    two_frequency_rounds,
)
from planner.training_plan.schedule import Schedule
from planner.training_plan.validation import contradictions
from planner.workload.compute_times import FIELDS, ComputeTimes


def require_elastic(plan: TrainingPlan, checkpoints_every: int | None = None) -> None:
    """Refuse a plan from which devices cannot be removed."""
    if plan.shards_optimizer and plan.optimizer_copies < 2:
        raise PlanError(
            f"--elastic: optimizer state is in {plan.workload.optimizer_shards} shards, of which a "
            "lost device has one that no other has; plan with --optimizer-copies 2, or leave "
            "--elastic out and write checkpoints"
        )
    if plan.shards_optimizer and plan.averages_for:
        name = plan.cluster.network.ids[min(plan.averages_for)]
        raise PlanError(
            f"--elastic: device {name!r} owns optimizer state and holds no stage, which elastic "
            "runs do not support; plan without it, or leave --elastic out"
        )
    if checkpoints_every is not None and plan.sync.delayed:
        raise PlanError(
            "--elastic: --checkpoint: with sync.delayed, an outer step ends one step late, and the "
            "plan for the remaining devices cannot continue from such a checkpoint; leave one of "
            "them out, or plan without --delayed"
        )
    if checkpoints_every is not None and checkpoints_every % plan.sync.every_steps:
        raise PlanError(
            f"--elastic: --every is {checkpoints_every}, but the plan averages every "
            f"{plan.sync.every_steps} steps, and after a loss the run can continue only from a "
            f"checkpoint of an outer step; give a multiple of {plan.sync.every_steps}"
        )
    if plan.sync.delayed and plan.sync.every_steps == 1:
        raise PlanError(
            "--elastic: sync.delayed with every_steps 1: every step ends one outer step and begins "
            "the next, so a lost device cannot be removed between the two; plan with --sync-every "
            "2 or more, or leave --elastic out"
        )
    stage_of = plan.stage_of
    for k, schedule in enumerate(plan.schedules):
        for b, path in enumerate(schedule.paths):
            stages = [stage_of[d] for d in path]
            if stages != sorted(stages):
                raise PlanError(
                    f"--elastic: paths.schedules[{k}].paths[{b}] swaps stages, found {stages}, and "
                    "others of a stage have no room that is known to be enough; plan without "
                    "swaps, or leave --elastic out"
                )


def remove_devices(plan: TrainingPlan, lost: Collection[str]) -> TrainingPlan:
    """The plan of the remaining devices.

    Each microbatch of a lost device goes to the device of its stage that would finish it first; all
    others stay. Devices hold no more microbatches in flight than before. Stages that lost a device
    average in one round, or at two frequencies as before; shares keep their proportions. Optimizer
    state in shards is shared by the others, in several copies where enough remain. Predicted times
    are the old plan's.
    """
    ids = plan.cluster.network.ids
    for name in lost:
        if name not in ids:
            raise PlanError(f"the plan has no device {name!r}; it has {', '.join(ids)}")
    gone = {ids.index(name) for name in lost}
    if not gone:
        return plan
    if plan.shards_optimizer and plan.optimizer_copies < 2:
        raise PlanError(
            "optimizer state is in shards, of which a lost device had one that no other has; plan "
            "again for the remaining devices, and resume from a checkpoint"
        )
    for j, group in enumerate(plan.assignment.groups):
        if set(group) <= gone:
            names = ", ".join(repr(ids[d]) for d in group)
            raise PlanError(f"stage {j} has no device left, it had {names}")
    remaining = [d for d in range(len(ids)) if d not in gone]
    number = {d: k for k, d in enumerate(remaining)}
    new = plan.replace(
        cluster=plan.cluster.subset(remaining),
        assignment=AssignmentPlan(
            tuple(
                tuple(number[d] for d in group if d not in gone) for group in plan.assignment.groups
            ),
            None,
        ),
        averaging=tuple(_averaging(plan, j, gone, number) for j in range(len(plan.averaging))),
        compute_times=_times(plan.compute_times, remaining),
        left_out=(*plan.left_out, *(ids[d] for d in sorted(gone))),
        schedules=tuple(_schedule(plan, s, gone, number) for s in plan.schedules),
        certificates={},
        alternatives=(),
        baselines=(),
        cost=None,
    )
    for problem in contradictions(new):
        raise PlanError(f"without {', '.join(map(repr, sorted(lost)))}: {problem}")
    return new


def _averaging(
    plan: TrainingPlan, stage: int, gone: Collection[int], number: Mapping[int, int]
) -> StageAveraging:
    rounds = plan.averaging[stage]
    if any(d in gone for groups in rounds for group in groups for d in group.members):
        if plan.shards_optimizer:
            rounds = owner_rounds(plan, stage, gone)
        elif within(rounds):
            rounds = two_frequency_rounds(plan, stage, gone)
        else:
            remaining = [d for d in plan.averaged_by(stage) if d not in gone]
            rounds = one_round(plan, stage, remaining, gone)
    return tuple(
        tuple(replace(g, members=tuple(number[d] for d in g.members)) for g in groups)
        for groups in rounds
    )


def _times(times: ComputeTimes, remaining: Sequence[int]) -> ComputeTimes:
    data = times.to_dict()
    return ComputeTimes.from_dict(
        data | {name: [data[name][d] for d in remaining] for name in FIELDS}
    )


def _schedule(
    plan: TrainingPlan, schedule: Schedule, gone: Collection[int], number: Mapping[int, int]
) -> Schedule:
    """Reassign the microbatches, and rebuild all orders."""
    room = [max(held) for held in zip(*(s.most_live() for s in plan.schedules), strict=True)]
    busy_s = [0.0] * len(room)
    for _, d, seconds in _visits(plan, schedule):
        busy_s[d] += seconds
    paths = [list(path) for path in schedule.paths]
    for b, d, _ in _visits(plan, schedule):
        if d not in gone:
            continue
        remaining = [e for e in plan.assignment.groups[plan.stage_of[d]] if e not in gone]
        # a device without microbatches may have no memory for any
        choices = [e for e in remaining if room[e]] or remaining
        heads = schedule.head_device(b) == d
        taker = min(choices, key=lambda e: (busy_s[e] + _seconds(plan, e, heads), e))
        busy_s[taker] += _seconds(plan, taker, heads)
        paths[b][paths[b].index(d)] = taker
    bare = Schedule(
        schedule.name, schedule.head, tuple(tuple(number[d] for d in path) for path in paths), ()
    )
    rooms = {k: max(room[d], 1) for d, k in number.items()}
    return replace(bare, order=list_schedule(bare, len(number), rooms))


def _visits(plan: TrainingPlan, schedule: Schedule) -> Iterator[tuple[int, int, float]]:
    """Microbatch, device, and seconds of the visit."""
    for b, path in enumerate(schedule.paths):
        for d in path:
            yield b, d, _seconds(plan, d, schedule.head_device(b) == d)


def _seconds(plan: TrainingPlan, device: int, heads: bool) -> float:
    times = plan.compute_times
    return times.forward_s[device] + times.backward_s[device] + heads * times.head_s[device]
