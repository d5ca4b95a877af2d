"""Lower bound on the step time of every plan.

Any devices take part, in any number of stages with any layers and any sizes; every microbatch
passes one device of each stage, with any wiring and order, with or without recomputation; each
stage averages in one round of its devices, hierarchically if these share sites' lines, or at two
frequencies; all contribute, with any shares. Compute times follow from FLOPs, or are measured ones
that are no shorter; updates are free, or with them the bound is a mean over many steps; head and
loss are on the last stage.

Let T be the end of a step and j the first stage whose round ends then. All devices of stage j start
their next step at T, so F, H and B of the stages from j on and B of those before it follow T.
`stage_requirements` derives what a stage of m devices must do before the next step ends. In
hierarchical and two-frequency averaging, T is the end of the last exchange: all sites of a stage
exchange at the same time, and start their next step no earlier. A single step may be shorter than
the bound, if it spreads sums faster than the step before.

If one step in H averages, H steps are treated as one with as many microbatches, from the end of one
that averages to the end of the next: the bound is a mean over these.

If stages need more devices than there are, however the layers are split, no plan has such a step.
Every device has a weight, a mixture of its fractions of all FLOP/s, of all uploads and of the
number of devices, so that all devices together weigh 1. The least weight of a stage is a minimum
over m, the lightest split a shortest path over the layers, and the bound is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from planner.network.cluster import Cluster
from planner.planning.calibrated import fastest_measured
from planner.planning.joint.bisection import least_feasible_s
from planner.planning.joint.site_bound import site_bound_s
from planner.planning.joint.stage_requirements import (
    KEPT_BLOCKS,
    DevicePool,
    Floats,
    Requirement,
    StageRequirements,
)
from planner.planning.joint.type_bound import type_bound_s
from planner.planning.problem import PlanningProblem
from planner.planning.step_bound import StepBound
from planner.training_plan.choices import Head
from planner.training_plan.model import TrainingPlan
from planner.workload.workload import Workload

DualWeights = tuple[float, float, float]
"""Dual values of FLOP/s, uploads and number of devices; they sum to 1."""

SplitWeight = Callable[[float], float]
"""Weight of the lightest split as a function of seconds between two ends of steps."""

BUDGET = 1 + 1e-12
"""Weight of all devices, with tolerance for rounding."""

WEIGHTS: tuple[DualWeights, ...] = (
    (0.0, 0.0, 1.0),
    (1.0, 0.0, 0.0),
    (0.0, 1.0, 0.0),
    (0.5, 0.5, 0.0),
    (0.25, 0.75, 0.0),
    (0.75, 0.25, 0.0),
)
"""Each gives a bound, the best of which counts; all are equal if devices are."""

ROUNDING = 1e-9
"""Relative: limits so much shorter than a stage's shortest are impossible."""
SENSITIVITY = 0.01
"""Relative improvement for which the bound is tested, to name what it depends on."""


def joint_bound(
    cluster: Cluster,
    workload: Workload,
    wire_ratio: float = 1.0,
    *,
    recomputes: bool = True,
    every_steps: int = 1,
    aggregators_in: Cluster | None = None,
    two_frequency: bool = False,
    in_copies: bool = False,
    measured: bool = False,
    heads: Sequence[Head] = (Head.LAST,),
) -> StepBound | None:
    """Lower bound in seconds on every plan's step.

    Parameters
    ----------
    cluster, workload
        The devices that can compute, and what they train, with its microbatch size.
    wire_ratio
        Bytes of encoded gradients over unencoded ones.
    recomputes
        Whether stages may recompute their activations.
    every_steps
        H, if one step in H averages; the bound is then a mean over H steps.
    aggregators_in
        The cluster with the devices that may only reduce gradients; None if there are none.
    two_frequency
        Whether gradients are averaged within regions in every step.
    in_copies
        Whether groups of a stage hold all of its optimizer state each, so that it is averaged as
        between sites.
    measured
        Whether the FLOP/s of ``cluster`` are measured ones, as the basis then states.
    heads
        Ends of the pipeline that may run head and loss.

    Returns
    -------
    StepBound or None
        The bound with its basis and witness; None if no number of devices suffices for a stage.
    """
    pool = DevicePool.of(cluster, aggregators_in, two_frequency=two_frequency, in_copies=in_copies)
    workload = _of_steps(workload, every_steps)
    require = partial(
        StageRequirements,
        workload=workload,
        wire_ratio=wire_ratio,
        recomputes=recomputes,
        every_steps=every_steps,
    )

    def split_weight_on(pool: DevicePool) -> Callable[[DualWeights], SplitWeight]:
        return _least_of([_split_weight_from_any_stage(require(pool, head=head)) for head in heads])

    scale_s = require(pool).scale_s
    seconds, weights = _best_weights(pool, split_weight_on(pool), scale_s)
    if not np.isfinite(seconds):
        return None
    witness = {
        "kind": "whole step",
        "microbatch_samples": workload.microbatch_samples,
        "recompute": "layers" if recomputes else False,
        "price": list(weights),
        **pool.to_dict(),
    }
    if every_steps > 1:
        witness["every_steps"] = every_steps
    if measured:
        witness["measured"] = True
    if tuple(heads) != (Head.LAST,):
        witness["heads"] = list(heads)

    limiting = _limiting_resources(pool, split_weight_on, weights, seconds)
    basis = f"{limiting} of all devices, whatever stages they are in"
    if pool.hierarchical:
        basis += "; for stages that average hierarchically, from one exchange to the next"
    if pool.regions:
        basis += "; from one exchange between regions to the next"
    if measured:
        basis += "; each as fast as the fastest of its operations"
    if every_steps > 1:
        basis += f"; a mean over {every_steps} steps, of which one averages"
    return StepBound(seconds / every_steps, basis, witness)


def _limiting_resources(
    pool: DevicePool,
    split_weight_on: Callable[[DevicePool], Callable[[DualWeights], SplitWeight]],
    weights: DualWeights,
    seconds: float,
) -> str:
    """What limits the bound: the resources of which slightly more would lower it."""
    factor = 1 + SENSITIVITY
    faster = {
        "computing": replace(pool, flops_per_s=pool.flops_per_s * factor),
        "messages and averaging": replace(pool, up=pool.up * factor, down=pool.down * factor),
    }
    less_s = seconds * (1 - SENSITIVITY / 10)
    names = [
        name for name, other in faster.items() if split_weight_on(other)(weights)(less_s) <= BUDGET
    ]
    return ", ".join(names) or "the number, memory and latencies"


def _of_steps(workload: Workload, every_steps: int) -> Workload:
    """The workload with the microbatches of H steps in one."""
    return workload.replace(batch_samples=workload.batch_samples * every_steps)


def long_run_bound_s(
    cluster: Cluster,
    workload: Workload,
    wire_ratio: float = 1.0,
    *,
    every_steps: int = 1,
    aggregators_in: Cluster | None = None,
    two_frequency: bool = False,
    in_copies: bool = False,
    heads: Sequence[Head] = (Head.LAST,),
) -> float:
    """Lower bound in seconds per step in the long run; a single step may be shorter.

    Between the ends of two of its rounds, every stage does all its work of a step, so the first t
    steps from an idle system, a multiple of H, take at least t times this; and at least t times
    what types of devices, or sites, need for their part of a step. The value is only printed: no
    certificate holds it, and the checker does not recompute it.

    Parameters
    ----------
    cluster, workload, wire_ratio, every_steps, aggregators_in, two_frequency, in_copies, heads
        As for `joint_bound`.

    Returns
    -------
    float
        Seconds per step, averaged over H steps.
    """
    pool = DevicePool.of(cluster, aggregators_in, two_frequency=two_frequency, in_copies=in_copies)
    requirements = [
        StageRequirements(
            pool, _of_steps(workload, every_steps), wire_ratio, True, every_steps, head
        )
        for head in heads
    ]
    split_weight_of = _least_of([_split_weight_in_long_run(each) for each in requirements])
    of_stages_s = _best_weights(pool, split_weight_of, requirements[0].scale_s)[0] / every_steps
    of_types_s = min(type_bound_s(each, of_stages_s * every_steps) for each in requirements)
    of_sites_s = site_bound_s(
        cluster,
        workload,
        wire_ratio,
        every_steps=every_steps,
        has_aggregators=aggregators_in is not None,
        heads=heads,
    )
    return max(of_stages_s, of_types_s / every_steps, of_sites_s)


def _split_weight_in_long_run(
    requirements: StageRequirements,
) -> Callable[[DualWeights], SplitWeight]:
    """Weight of the lightest split, between two ends of each stage's own rounds."""
    roles = [
        _RoleWeights(requirements, partial(StageRequirements.steady_state, choice=choice))
        for choice in requirements.recompute_choices
    ]

    def split_weight_of(weights: DualWeights) -> SplitWeight:
        return lambda limit: _lightest_split(
            np.min([role.at(limit, weights) for role in roles], axis=0)
        )

    return split_weight_of


def _least_of(
    split_weights: Sequence[Callable[[DualWeights], SplitWeight]],
) -> Callable[[DualWeights], SplitWeight]:
    """The lightest split of several kinds of plans."""

    def split_weight_of(weights: DualWeights) -> SplitWeight:
        at = [split_weight(weights) for split_weight in split_weights]
        return lambda limit: min(split_weight_at(limit) for split_weight_at in at)

    return split_weight_of


def plan_long_run_bound_s(problem: PlanningProblem, plan: TrainingPlan) -> float | None:
    """The long-run bound for all plans that average like a given one; see `long_run_bound_s`."""
    if problem.request.group_size is not None or problem.request.delayed:
        return None
    return long_run_bound_s(
        fastest_measured(problem.cluster, plan.workload, problem.request.calibration),
        plan.workload,
        plan.codec.wire_ratio,
        every_steps=plan.sync.every_steps,
        aggregators_in=problem.aggregators_in,
        two_frequency=plan.two_frequency,
        in_copies=problem.request.in_copies,
        heads=sorted({*problem.heads, plan.schedules[0].head}),
    )


def _best_weights(
    pool: DevicePool, split_weight_of: Callable[[DualWeights], SplitWeight], scale_s: float
) -> tuple[float, DualWeights]:
    """The highest bound over all weights, and its weights."""
    best_s, best_weights = 0.0, WEIGHTS[0]
    for weights in WEIGHTS[:1] if pool.identical else WEIGHTS:
        suffice = partial(_within_budget, split_weight_of(weights))
        if best_s == 0 or not suffice(best_s):
            best_s = max(best_s, least_feasible_s(suffice, scale_s))
            best_weights = weights
    return best_s, best_weights


def _within_budget(split_weight_at: SplitWeight, limit: float) -> bool:
    """Whether all devices suffice for the lightest split."""
    return split_weight_at(limit) <= BUDGET


def _split_weight_from_any_stage(
    requirements: StageRequirements,
) -> Callable[[DualWeights], SplitWeight]:
    """Weight of the lightest split, whichever stage's round ended the step before."""
    roles: list[Callable[[StageRequirements], Requirement]] = [
        StageRequirements.whole_pipeline,
        StageRequirements.boundary,
        StageRequirements.downstream,
    ]
    for choice in range(len(requirements.recompute_choices)):
        roles.append(partial(StageRequirements.upstream, choice=choice))
    whole_pipeline, boundary, downstream, *upstream = (
        _RoleWeights(requirements, role) for role in roles
    )

    def split_weight(weights: DualWeights, limit: float) -> float:
        with_boundary = _lightest_split(
            downstream.at(limit, weights),
            np.min([role.at(limit, weights) for role in upstream], axis=0),
            boundary.at(limit, weights),
        )
        return min(with_boundary, _lightest_split(whole_pipeline.at(limit, weights)))

    return lambda weights: partial(split_weight, weights)


class _RoleWeights:
    """Least weight of the devices of every part of the layers, as a stage in one role."""

    def __init__(
        self, requirements: StageRequirements, role: Callable[[StageRequirements], Requirement]
    ) -> None:
        self.requirements = requirements
        self._role = role
        self._kept: dict[int, Requirement] = {}

    @cached_property
    def shortest_s(self) -> Floats:
        """``float[P]``: a limit below which no number of devices suffices for a part."""
        shortest_s = np.full(len(self.requirements.starts), np.inf)
        for block in self.requirements.blocks():
            need = self.requirement(block)
            most_flops_per_s, most_up = block.most_flops_per_s, block.most_up
            limits = (
                need.least_s,
                need.tail_s + need.flops / most_flops_per_s,
                need.tail_s + need.begin_s + need.late_flops / most_flops_per_s,
                need.quiet_s + need.sent / most_up,
            )
            longest_s = np.max(np.broadcast_arrays(*limits), axis=0)
            np.minimum(
                shortest_s, np.where(need.fits, longest_s, np.inf).min(axis=1), out=shortest_s
            )
        return shortest_s * (1 - ROUNDING)

    def requirement(self, block: StageRequirements) -> Requirement:
        """The requirements of a block, of which the first ones are kept."""
        if (requirement := self._kept.get(block.first)) is None:
            requirement = self._role(block)
            if len(self._kept) < KEPT_BLOCKS:
                self._kept[block.first] = requirement
        return requirement

    def at(self, limit: float, weights: DualWeights) -> Floats:
        """Weights for stages that end within a limit; infinite if no number of devices suffices.

        Returns
        -------
        ndarray
            ``float[L, L + 1]``, by the first layer of the part and the one after its last.
        """
        whole = self.requirements
        least = np.full(len(whole.starts), np.inf)
        is_possible = self.shortest_s <= limit
        for block in whole.blocks():
            # the slowest devices weigh least, and more of them weigh no less
            slowest = (block.least_flops_per_s[0], block.least_up[0], block.m[0])
            is_open = is_possible & (least > _weight_sum(weights, slowest, whole))
            if not is_open.any():
                break
            requirement = Requirement(*(values[is_open] for values in self.requirement(block)))
            found = _stage_weights(block, requirement, weights, limit)
            least[is_open] = np.minimum(least[is_open], found)
        stage_weights = np.full((whole.layers, whole.layers + 1), np.inf)
        stage_weights[whole.starts, whole.stops] = least
        return stage_weights


def _weight_sum(
    weights: DualWeights, needed: Sequence[Any], requirements: StageRequirements
) -> Any:
    """Weight of devices with so many FLOP/s, bytes per second sent, and number."""
    pool = requirements.pool
    totals = pool.flops_per_s.sum(), pool.up.sum(), requirements.num_devices
    # a single device has no upload, so its upload has no weight
    return sum(
        weight * each / total
        for weight, each, total in zip(weights, needed, totals, strict=True)
        if weight > 0
    )


def _stage_weights(
    block: StageRequirements,
    requirement: Requirement,
    weights: DualWeights,
    limit: float,
) -> Floats:
    """Least weight of the devices of every part, for the numbers of devices of a block."""
    busy_s, sending_s = limit - requirement.tail_s, limit - requirement.quiet_s
    late_s = busy_s - requirement.begin_s
    # inequalities (1) to (6) of `stage_requirements`
    feasible = (
        requirement.fits
        & (requirement.least_s <= limit)
        & (busy_s > 0)
        & (late_s > 0)
        & (sending_s > 0)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        flops_per_s = np.maximum(requirement.flops / busy_s, requirement.late_flops / late_s)
        sent_per_s = requirement.sent / sending_s
    feasible &= (flops_per_s <= block.most_flops_per_s) & (sent_per_s <= block.most_up)
    needed_of_all = (
        np.maximum(flops_per_s, block.least_flops_per_s),
        np.maximum(sent_per_s, block.least_up),
        block.m,
    )
    return np.asarray(
        np.where(feasible, _weight_sum(weights, needed_of_all, block), np.inf).min(axis=1)
    )


def _lightest_split(
    weights: Floats, upstream_weights: Floats | None = None, boundary_weights: Floats | None = None
) -> float:
    """Weight of the lightest split into stages.

    With the optional weights, one stage, not the first, is the boundary stage, and those before it
    are upstream.
    """
    layers = len(weights)
    least_upstream, least = np.full(layers + 1, np.inf), np.full(layers + 1, np.inf)
    (least if upstream_weights is None else least_upstream)[0] = 0.0
    for stop in range(1, layers + 1):
        last = (least[:stop] + weights[:stop, stop]).min()
        if upstream_weights is not None and boundary_weights is not None:
            least_upstream[stop] = (least_upstream[:stop] + upstream_weights[:stop, stop]).min()
            last = min(
                last, (least_upstream[1:stop] + boundary_weights[1:stop, stop]).min(initial=np.inf)
            )
        least[stop] = last
    return float(least[layers])
