"""Lower bound on the step time of every plan.

Any devices take part, in any number of stages with any layers and any sizes; every microbatch
passes one device of each stage, with any wiring and order, with or without recomputation; each
stage averages in one round of its devices, hierarchically if these share sites' lines, or at two
frequencies; all contribute, with any shares. Compute times follow from FLOPs, or are measured ones
that are no shorter; updates are free, or with them the bound is a mean over many steps; head and
loss are on the last stage.

Let T be the end of a step and j the first stage whose round ends then. All devices of stage j begin
their next step at T, so F, H and B of the stages from j on and B of those before it follow T. `planner.planning.joint.stage_requirements` derives what a stage of m devices must do before the
next step ends. In hierarchical and two-frequency averaging, T is the end of the last exchange: all
sites of a stage exchange at the same time, and begin their next step no earlier. A single step may
be shorter than the bound, if it spreads sums faster than the step before.

If one step in H averages, H steps are treated as one with as many microbatches, from the end of one
that averages to the end of the next: the bound is a mean over these.

If stages need more devices than there are, however the layers are split, no plan has such a step.
Every device has a price, a mixture of its fractions of all FLOP/s, of all uploads and of the number
of devices, so that all devices together cost 1. The lowest cost of a stage is a minimum over m, the
cheapest split a shortest path over the layers, and the bound is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from planner.network.cluster import Cluster
from planner.planning.calibrated import fastest_measured
from planner.planning.joint.stage_requirements import (
    DevicePool,
    Floats,
    Requirement,
    StageRequirements,
)
from planner.planning.problem import PlanningProblem
from planner.planning.step_bound import StepBound
from planner.training_plan.model import TrainingPlan
from planner.workload.workload import Workload

Price = tuple[float, float, float]
"""Weights of FLOP/s, uploads and number of devices; they sum to 1."""

PriceAt = Callable[[float], float]
"""Price of the cheapest split as a function of seconds between two ends of steps."""

BUDGET = 1 + 1e-12
"""Price of all devices, with tolerance for rounding."""

PRICES: tuple[Price, ...] = (
    (0.0, 0.0, 1.0),
    (1.0, 0.0, 0.0),
    (0.0, 1.0, 0.0),
    (0.5, 0.5, 0.0),
    (0.25, 0.75, 0.0),
    (0.75, 0.25, 0.0),
)
"""Each gives a bound, the best of which counts; all are equal if devices are."""

HALVINGS, DOUBLINGS = 30, 200
SENSITIVITY = 0.01
"""Relative improvement for which the bound is tested, to name what it depends on."""


def joint_bound(
    cluster: Cluster,
    workload: Workload,
    wire_ratio: float = 1.0,
    *,
    recomputes: bool = True,
    every: int = 1,
    aggregators_in: Cluster | None = None,
    two_frequency: bool = False,
    measured: bool = False,
) -> StepBound | None:
    """Lower bound in seconds on every plan's step."""
    pool = DevicePool.of(cluster, aggregators_in, two_frequency=two_frequency)
    workload = _of_steps(workload, every)
    require = partial(
        StageRequirements,
        workload=workload,
        wire_ratio=wire_ratio,
        recomputes=recomputes,
        every=every,
    )
    requirements = require(pool)
    seconds, price = _best_price(
        pool, lambda price: _price_from_any_stage(requirements, price), requirements.scale_s
    )
    if not np.isfinite(seconds):
        return None
    witness = {
        "kind": "whole step",
        "microbatch_samples": workload.microbatch_samples,
        "recompute": recomputes,
        "price": list(price),
        **pool.to_dict(),
    }
    if every > 1:
        witness["every_steps"] = every
    if measured:
        witness["measured"] = True

    factor = 1 + SENSITIVITY
    faster = {
        "computing": replace(pool, flops=pool.flops * factor),
        "messages and averaging": replace(pool, up=pool.up * factor, down=pool.down * factor),
    }
    less_s = seconds * (1 - SENSITIVITY / 10)
    names = [
        name
        for name, other in faster.items()
        if _price_from_any_stage(require(other), price)(less_s) <= BUDGET
    ]
    limiting = ", ".join(names) or "the number, memory and latencies"
    basis = f"{limiting} of all devices, whatever stages they are in"
    if pool.hierarchical:
        basis += "; for stages that average hierarchically, from one exchange to the next"
    if pool.regions:
        basis += "; from one exchange between regions to the next"
    if measured:
        basis += "; each as fast as the fastest of its operations"
    if every > 1:
        basis += f"; a mean over {every} steps, of which one averages"
    return StepBound(seconds / every, basis, witness)


def _of_steps(workload: Workload, every: int) -> Workload:
    """The workload with the microbatches of so many steps in one."""
    return workload.replace(batch_samples=workload.batch_samples * every)


def long_run_bound_s(
    cluster: Cluster,
    workload: Workload,
    wire_ratio: float = 1.0,
    *,
    every: int = 1,
    aggregators_in: Cluster | None = None,
    two_frequency: bool = False,
) -> float:
    """Lower bound in seconds per step in the long run; a single step may be shorter.

    Between the ends of two of its rounds, every stage does all its work of a step, so the first t
    steps from an idle system take at least t times this. The value is only printed: no certificate
    holds it, and the checker does not recompute it.
    """
    pool = DevicePool.of(cluster, aggregators_in, two_frequency=two_frequency)
    requirements = StageRequirements(pool, _of_steps(workload, every), wire_ratio, True, every)
    steady_state = requirements.steady_state()

    def prices(price: Price) -> PriceAt:
        return lambda limit: _cheapest_split(_costs(requirements, steady_state, price, limit))

    return _best_price(pool, prices, requirements.scale_s)[0] / every


def plan_long_run_bound_s(problem: PlanningProblem, plan: TrainingPlan) -> float | None:
    """The long-run bound for all plans that average like a given one; see `long_run_bound_s`."""
    if problem.request.group_size is not None or problem.request.delayed:
        return None
    return long_run_bound_s(
        fastest_measured(problem.cluster, plan.workload, problem.request.calibration),
        plan.workload,
        plan.codec.wire_ratio,
        every=plan.sync.every_steps,
        aggregators_in=problem.aggregators_in,
        two_frequency=plan.two_frequency,
    )


def _best_price(
    pool: DevicePool, prices: Callable[[Price], PriceAt], scale_s: float
) -> tuple[float, Price]:
    """The highest bound over all prices, and its price."""
    best_s, best_price = 0.0, PRICES[0]
    for price in PRICES[:1] if pool.identical else PRICES:
        price_at = prices(price)
        if best_s == 0 or price_at(best_s) > BUDGET:
            best_s, best_price = max(best_s, _least_feasible_s(price_at, scale_s)), price
    return best_s, best_price


def _price_from_any_stage(requirements: StageRequirements, price: Price) -> PriceAt:
    """Price of the cheapest split, whichever stage's round ended the step before."""
    whole_pipeline = requirements.whole_pipeline()
    boundary, downstream = requirements.boundary(), requirements.downstream()
    upstream = [requirements.upstream(recomputes) for recomputes in requirements.choices]

    def price_at(limit: float) -> float:
        before = np.min(
            [_costs(requirements, requirement, price, limit) for requirement in upstream], axis=0
        )
        end = _costs(requirements, boundary, price, limit)
        later = _cheapest_split(_costs(requirements, downstream, price, limit), before, end)
        return min(later, _cheapest_split(_costs(requirements, whole_pipeline, price, limit)))

    return price_at


def _costs(
    requirements: StageRequirements, requirement: Requirement, price: Price, limit: float
) -> Floats:
    """Lowest price of the devices of every part; infinite if no number of devices suffices.

    Returns
    -------
    ndarray
        ``float[L, L + 1]``, by the first layer of the part and the one after its last.
    """
    pool = requirements.pool
    busy, late = limit - requirement.tail_s, limit - requirement.tail_s - requirement.begin_s
    open_s = limit - requirement.quiet_s
    # inequalities (1) to (6) of `stage_requirements`
    able = (
        requirement.fits & (requirement.least_s <= limit) & (busy > 0) & (late > 0) & (open_s > 0)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        flops = np.maximum(requirement.flops / busy, requirement.late_flops / late)
        sent = requirement.sent / open_s
    able &= (flops <= requirements.most_flops) & (sent <= requirements.most_up)
    needed_of_all = (
        (np.maximum(flops, requirements.least_flops), pool.flops.sum()),
        (np.maximum(sent, requirements.least_up), pool.up.sum()),
        (requirements.m, requirements.n),
    )
    # a single device has no upload, so its price ignores it
    cost = sum(
        weight * needed / available
        for weight, (needed, available) in zip(price, needed_of_all, strict=True)
        if weight > 0
    )
    table = np.full((requirements.layers, requirements.layers + 1), np.inf)
    table[requirements.starts, requirements.stops] = np.where(able, cost, np.inf).min(axis=1)
    return table


def _cheapest_split(cost: Floats, before: Floats | None = None, end: Floats | None = None) -> float:
    """Price of the cheapest split into stages.

    With ``before`` and ``end``, one stage, not the first, has the prices of ``end``, and those
    before it have the prices of ``before``.
    """
    layers = len(cost)
    upstream, done = np.full(layers + 1, np.inf), np.full(layers + 1, np.inf)
    (done if before is None else upstream)[0] = 0.0
    for stop in range(1, layers + 1):
        last = (done[:stop] + cost[:stop, stop]).min()
        if before is not None and end is not None:
            upstream[stop] = (upstream[:stop] + before[:stop, stop]).min()
            last = min(last, (upstream[1:stop] + end[1:stop, stop]).min(initial=np.inf))
        done[stop] = last
    return float(done[layers])


def _least_feasible_s(price_at: PriceAt, scale_s: float) -> float:
    """Smallest seconds at which the devices can pay for all stages, rounded down."""
    high = scale_s
    for _ in range(DOUBLINGS):
        if price_at(high) <= BUDGET:
            break
        high *= 2
    else:
        return np.inf
    low = high / 2 if high > scale_s else 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if price_at(middle) <= BUDGET else (middle, high)
    return low
