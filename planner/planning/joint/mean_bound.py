"""Lower bound on the mean step of every plan, over many steps; a single step may be shorter.

Between the ends of two of its rounds, every stage does all its work of a step, so the first t steps
from an idle system, a multiple of H, take at least t times what the stages need for one
(`split_weight`); and at least t times what types of devices (`type_bound`) or sites (`site_bound`)
need for their part of a step. The highest of the three counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from planner.network.cluster import Cluster
from planner.planning.joint.joint_bound import plan_terms
from planner.planning.joint.site_bound import site_bound
from planner.planning.joint.split_weight import (
    DualWeights,
    RoleWeights,
    SplitWeight,
    best_weights,
    least_of,
    lightest_split,
    of_steps,
)
from planner.planning.joint.stage_requirements import DevicePool, StageRequirements
from planner.planning.joint.type_bound import type_bound
from planner.planning.step_bound import StepBound
from planner.training_plan.choices import Head
from planner.workload.workload import Workload


def mean_bound(
    cluster: Cluster, workload: Workload, wire_ratio: float = 1.0, **terms: Any
) -> StepBound | None:
    """Lower bound in seconds on the mean step of every plan.

    Parameters
    ----------
    cluster, workload, wire_ratio
        As for `planner.planning.joint.joint_bound.joint_bound`.
    terms
        Its other parameters, and ``is_over``, of `mean_bounds`.

    Returns
    -------
    StepBound or None
        Seconds per step, averaged over H steps; None if no devices suffice.
    """
    bounds = mean_bounds(cluster, workload, wire_ratio, **terms)
    best = max(bounds, key=lambda bound: bound.value)
    return best if np.isfinite(best.value) else None


def mean_bounds(
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
    is_over: Callable[[], bool] = lambda: False,
) -> list[StepBound]:
    """The bounds of stages, of types of devices, where that is the highest, and of sites.

    That of types, which takes longest, is less tight or missing once ``is_over``.
    """
    pool = DevicePool.of(cluster, aggregators_in, two_frequency=two_frequency, in_copies=in_copies)
    several_steps = of_steps(workload, every_steps)
    requirements = [
        StageRequirements(pool, several_steps, wire_ratio, recomputes, every_steps, head)
        for head in heads
    ]
    split_weight_of = least_of([_split_weight(each) for each in requirements])
    seconds, weights = best_weights(pool, split_weight_of, requirements[0].scale_s)
    about = plan_terms(workload, recomputes, every_steps, heads, measured=measured)
    bounds = [
        StepBound(
            seconds / every_steps,
            "all work of all stages, whatever devices they have",
            {"kind": "mean of stages", "price": list(weights), **pool.to_dict(), **about},
        )
    ]
    of_sites = site_bound(
        cluster,
        workload,
        wire_ratio,
        every_steps=every_steps,
        has_aggregators=aggregators_in is not None,
        heads=heads,
    )
    known_s = max(seconds, of_sites.seconds * every_steps)
    of_types = [type_bound(each, known_s, is_over) for each in requirements]
    proofs = [proof for proof in of_types if proof is not None]
    if len(proofs) == len(heads):
        witness = pool.to_dict()
        for row, owner in zip(witness["devices"], proofs[0].type_of, strict=True):
            row["type"] = owner
        prices = [proof.prices for proof in proofs]
        bounds.append(
            StepBound(
                min(proof.seconds for proof in proofs) / every_steps,
                "all work of all stages, whatever types of devices they have",
                {"kind": "mean of types", "prices": prices, **witness, **about},
            )
        )
    bounds.append(
        StepBound(
            of_sites.seconds,
            "all work of all sites behind their lines",
            {"kind": "mean of sites", **of_sites.to_dict(), **pool.options(), **about},
        )
    )
    return bounds


def _split_weight(requirements: StageRequirements) -> Callable[[DualWeights], SplitWeight]:
    """Weight of the lightest split, between two ends of each stage's own rounds."""
    roles = [
        RoleWeights(requirements, partial(StageRequirements.steady_state, choice=choice))
        for choice in requirements.recompute_choices
    ]

    def split_weight_of(weights: DualWeights) -> SplitWeight:
        return lambda limit: lightest_split(
            np.min([role.at(limit, weights) for role in roles], axis=0)
        )

    return split_weight_of
