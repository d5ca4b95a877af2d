"""Least weight of a split of the layers into stages, at some dual weights of all devices.

Every device has a weight, a mixture of its fractions of all FLOP/s, of all uploads and of the
number of devices, so that all devices together weigh 1. If stages need more devices than there are,
however the layers are split, no plan has such a step. The least weight of a stage is a minimum over
its number of devices, the lightest split a shortest path over the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from planner.planning.joint.bisection import least_feasible_s
from planner.planning.joint.stage_requirements import (
    KEPT_BLOCKS,
    DevicePool,
    Floats,
    Requirement,
    StageRequirements,
)
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


def of_steps(workload: Workload, every_steps: int) -> Workload:
    """The workload with the microbatches of H steps in one."""
    return workload.replace(batch_samples=workload.batch_samples * every_steps)


def least_of(
    split_weights: Sequence[Callable[[DualWeights], SplitWeight]],
) -> Callable[[DualWeights], SplitWeight]:
    """The lightest split of several kinds of plans."""

    def split_weight_of(weights: DualWeights) -> SplitWeight:
        at = [split_weight(weights) for split_weight in split_weights]
        return lambda limit: min(split_weight_at(limit) for split_weight_at in at)

    return split_weight_of


def best_weights(
    pool: DevicePool, split_weight_of: Callable[[DualWeights], SplitWeight], scale_s: float
) -> tuple[float, DualWeights]:
    """The highest bound over all weights, and its weights."""
    best_s, best = 0.0, WEIGHTS[0]
    for weights in WEIGHTS[:1] if pool.identical else WEIGHTS:
        suffice = partial(_within_budget, split_weight_of(weights))
        if best_s == 0 or not suffice(best_s):
            best_s = max(best_s, least_feasible_s(suffice, scale_s))
            best = weights
    return best_s, best


def _within_budget(split_weight_at: SplitWeight, limit: float) -> bool:
    """Whether all devices suffice for the lightest split."""
    return split_weight_at(limit) <= BUDGET


class RoleWeights:
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


def lightest_split(
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
