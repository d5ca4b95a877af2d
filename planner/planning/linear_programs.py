"""The linear programs behind a plan, rebuilt from the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.lp.flow import StageFlow
from planner.lp.model_file import labels
from planner.network.cluster import member_limits
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.layout import Layout
from planner.planning.joint.layout_flow import IN_FLIGHT, UNLIMITED, flow_of
from planner.problems import AveragingProblem, ProblemError
from planner.training_plan.model import TrainingPlan
from planner.workload.costs import split_costs


class PlanFlow(NamedTuple):
    """What flows through the stages of a plan.

    Attributes
    ----------
    flow
        Nodes are classes, each of some alike devices of a stage.
    names
        Of nodes: stage, a device, and how many are like it.
    """

    flow: StageFlow
    microbatches: float
    names: tuple[str, ...]


def flow_of_plan(plan: TrainingPlan) -> PlanFlow:
    """The flow of microbatches through the stages, layers and devices of a plan.

    Times are FLOPs over speed, as where plans are searched; with a calibration that is the speed
    of F and B together.
    """
    stages, workload = len(plan.assignment.groups), plan.workload
    if any(len(path) < stages for schedule in plan.schedules for path in schedule.paths):
        raise ProblemError(
            "a flow is of microbatches that visit all stages, and some of this plan skip one; plan "
            "without --path-stages"
        )
    classes = DeviceClasses.of(plan.cluster)
    class_of = classes.class_of
    counts = [[0] * len(classes) for _ in range(stages)]
    first: dict[tuple[int, int], int] = {}
    for j, group in enumerate(plan.assignment.groups):
        for d in group:
            counts[j][class_of[d]] += 1
            first.setdefault((j, class_of[d]), d)
    recompute = plan.recompute or (0,) * stages
    head = plan.schedules[0].head
    layout = Layout(tuple(map(tuple, counts)), plan.stage_layers, recompute, head)
    costs = split_costs(workload, layout.layers, plan.head_stage, recompute)
    nodes, flow = flow_of(classes, layout, costs, IN_FLIGHT)
    flow = replace(flow, room=np.where(flow.room < UNLIMITED, flow.room, np.inf))
    ids = plan.cluster.network.ids
    names = labels(
        f"s{j}.{ids[first[j, c]]}" + (f".x{count}" if count > 1 else "")
        for j, c, count in zip(*(part.tolist() for part in nodes), strict=True)
    )
    return PlanFlow(flow, workload.batch_samples / workload.microbatch_samples, names)


def averaging_of_stage(plan: TrainingPlan, stage: int) -> tuple[AveragingProblem, tuple[str, ...]]:
    """DeDLOC's averaging problem of a stage, whose devices compute meanwhile.

    Returns
    -------
    tuple[AveragingProblem, tuple[str, ...]]
        In steps per second of the stage alone; names of its members.
    """
    groups = plan.assignment.groups
    if stage >= len(groups):
        raise ProblemError(
            f"stage is {stage}, and the plan has {len(groups)}, from 0; give one of these"
        )
    if plan.shards_optimizer:
        raise ProblemError(
            "the plan has optimizer state in shards, whose two rounds are not DeDLOC's problem; "
            "plan with optimizer_shards 1"
        )
    aggregators = [d for d, of in plan.averages_for.items() if of == stage]
    members = sorted({*groups[stage], *aggregators})
    if len(members) == 1:
        raise ProblemError(f"stage {stage} is one device, which does not average; give another")
    cluster, workload = plan.cluster, plan.workload
    costs = split_costs(workload, plan.stage_layers, plan.head_stage, plan.recompute)[stage]
    busy_s = [costs.busy_s(float(cluster.flops[d])) for d in members]
    up, down, pairs = member_limits(cluster, members)
    problem = AveragingProblem(
        workload.microbatch_samples / np.array(busy_s),
        up,
        down,
        workload.batch_samples,
        plan.vector_bytes()[stage] * plan.codec.wire_ratio,
        pairs,
        can_compute=[d not in aggregators for d in members],
        can_aggregate=np.asarray(cluster.devices.can_aggregate)[members],
    )
    return problem, labels(cluster.network.ids[d] for d in members)
