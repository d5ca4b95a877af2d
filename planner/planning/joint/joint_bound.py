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

If stages need more devices than there are, however the layers are split, no plan has such a step:
`split_weight` compares the lightest split with all devices. The bound is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from planner.network.cluster import Cluster
from planner.planning.joint.split_weight import (
    BUDGET,
    DualWeights,
    RoleWeights,
    SplitWeight,
    best_weights,
    least_of,
    lightest_split,
    of_steps,
)
from planner.planning.joint.stage_requirements import DevicePool, Requirement, StageRequirements
from planner.planning.step_bound import StepBound
from planner.training_plan.choices import Head
from planner.workload.workload import Workload

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
    workload = of_steps(workload, every_steps)
    require = partial(
        StageRequirements,
        workload=workload,
        wire_ratio=wire_ratio,
        recomputes=recomputes,
        every_steps=every_steps,
    )

    def split_weight_on(pool: DevicePool) -> Callable[[DualWeights], SplitWeight]:
        return least_of([_split_weight_from_any_stage(require(pool, head=head)) for head in heads])

    scale_s = require(pool).scale_s
    seconds, weights = best_weights(pool, split_weight_on(pool), scale_s)
    if not np.isfinite(seconds):
        return None
    witness = {
        "kind": "whole step",
        "price": list(weights),
        **pool.to_dict(),
        **plan_terms(workload, recomputes, every_steps, heads, measured=measured),
    }
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


def plan_terms(
    workload: Workload, recomputes: bool, every_steps: int, heads: Sequence[Head], *, measured: bool
) -> dict[str, Any]:
    """Entries of a witness on the plans that it is about; some only where they are unusual."""
    terms: dict[str, Any] = {
        "microbatch_samples": workload.microbatch_samples,
        "recompute": "layers" if recomputes else False,
    }
    if every_steps > 1:
        terms["every_steps"] = every_steps
    if measured:
        terms["measured"] = True
    if tuple(heads) != (Head.LAST,):
        terms["heads"] = list(heads)
    return terms


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
        RoleWeights(requirements, role) for role in roles
    )

    def split_weight(weights: DualWeights, limit: float) -> float:
        with_boundary = lightest_split(
            downstream.at(limit, weights),
            np.min([role.at(limit, weights) for role in upstream], axis=0),
            boundary.at(limit, weights),
        )
        return min(with_boundary, lightest_split(whole_pipeline.at(limit, weights)))

    return lambda weights: partial(split_weight, weights)
