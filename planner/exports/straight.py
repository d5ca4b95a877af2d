"""Straight pipelines, as other trainers need them, and what these trainers cannot express."""

from __future__ import annotations

from collections import Counter

from planner.exports.error import ExportError
from planner.training_plan.averaging_group import is_hierarchical
from planner.training_plan.choices import Codec, Head, Wiring
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.workload.boundary_codec import BoundaryCodec

Pipelines = tuple[tuple[int, ...], ...]
"""Devices of each pipeline by stage; pipelines in order of their first device."""


def straight_pipelines(plan: TrainingPlan) -> Pipelines | None:
    """Return the pipelines if all microbatches stay in disjoint ones; otherwise None."""
    return None if _not_straight(plan) else _pipelines(plan)


def require_trainable(
    plan: TrainingPlan,
    target: str,
    *,
    recompute: bool = False,
    local_steps: bool = False,
    shards: bool = False,
) -> Pipelines:
    """Reject a plan that a trainer with one all-reduce per stage cannot run.

    Flags state what the trainer has: ``shards`` reduces to equal shards of optimizer state.
    """
    refusal = _not_straight(plan) or _unsupported(plan, recompute, local_steps, shards)
    if refusal:
        reason, remedy = refusal
        raise ExportError(f"{target} cannot express {reason}; {remedy}")
    return _pipelines(plan)


def first_schedule(plan: TrainingPlan) -> Schedule:
    """Return the schedule of the first step; straight pipelines use it in every step."""
    return plan.schedules[plan.cycle[0]]


def _pipelines(plan: TrainingPlan) -> Pipelines:
    return tuple(sorted(set(first_schedule(plan).paths)))


def _not_straight(plan: TrainingPlan) -> tuple[str, str] | None:
    """Return why the pipelines are not straight, and the remedy."""
    sizes = [len(group) for group in plan.assignment.groups]
    stages = len(sizes)
    paths = {path for k in plan.cycle for path in plan.schedules[k].paths}
    remedy = "plan with --stages auto or a number"
    if any(len(path) != stages for path in paths):
        return "paths that skip stages", f"{remedy}, without --path-stages"
    in_order = range(stages)
    if any(plan.stage_of[d] != j for path in paths for j, d in zip(in_order, path, strict=True)):
        return "paths that swap stages", f"{remedy}, without --path-stages"
    if len(set(sizes)) > 1:
        return f"stages of unequal sizes ({', '.join(map(str, sizes))})", remedy
    if len(paths) != sizes[0] or len({d for path in paths for d in path}) != sum(sizes):
        return "microbatches that flow between pipelines", remedy
    if len(set(plan.cycle)) > 1:
        return "schedules that change from step to step", remedy
    if len(degrees := sorted({plan.gpu_counts[d] for d in plan.stage_of})) > 1:
        numbers = f"{', '.join(map(str, degrees[:-1]))} and {degrees[-1]}"
        return (
            f"devices of {numbers} GPUs",
            "plan with the same number, such as --tensor-parallel 1",
        )
    return None


def _unsupported(
    plan: TrainingPlan, recompute: bool, local_steps: bool, shards: bool
) -> tuple[str, str] | None:
    """Return an unsupported feature of a plan with straight pipelines, and the remedy."""
    workload = plan.workload
    schedule = first_schedule(plan)
    counts = set(Counter(schedule.paths).values())
    equal = "plan with --averaging equal"
    if len(counts) > 1:
        return (
            f"pipelines with unequal numbers of microbatches ({min(counts)} to {max(counts)})",
            "plan a batch that the pipelines divide",
        )
    if len(plan.stage_layers) > 1 and schedule.head is not Head.LAST:
        return "a head on the first stage", "plan with --head last"
    if plan.wiring is Wiring.STOCHASTIC:
        return "microbatches that are routed at run time", "plan without --wiring stochastic"
    if any(plan.recompute) and not recompute:
        return "recomputation", "plan with --recompute none"
    layers = tuple(stop - start for start, stop in plan.stage_layers)
    if plan.recompute not in ((0,) * len(layers), layers):
        return "recomputation of some of the layers", "plan with --recompute none or all"
    if plan.codec is not Codec.NONE:
        return f"gradients encoded as {plan.codec}", "plan without --codec"
    if workload.boundary_codec is not BoundaryCodec.NONE:
        return (
            f"activations encoded as {workload.boundary_codec}",
            "plan a workload without a boundary codec",
        )
    if plan.sync.local_steps and not local_steps:
        return (
            f"an outer optimizer that runs every {plan.sync.every_steps} steps",
            "plan with averaging in every step",
        )
    if plan.shards_optimizer and not shards:
        return "optimizer state in shards", "plan with --optimizer-shards 1"
    for stage, rounds in enumerate(plan.averaging):
        groups = [group for groups in rounds for group in groups]
        subject = f"stage {stage}" if stage < len(plan.stage_layers) else "the embedding"
        if is_hierarchical(rounds):
            return f"hierarchical averaging ({subject})", equal
        if len(groups) > 1 + plan.shards_optimizer:
            return f"averaging in several rounds ({subject})", "plan without --group-size"
        for group in groups:
            averaged = set(plan.averaged_by(stage))
            if set(group.members) != averaged or not all(group.contributes):
                return f"devices that only aggregate gradients ({subject})", equal
            if len(set(group.shares)) > 1:
                return f"unequal shares of averaging ({subject})", equal
    return None
