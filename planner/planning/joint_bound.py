"""Lower bound on the step time of every plan.

Any devices take part, in any number of stages with any layers and any sizes; every microbatch goes
through one device of each stage, wired and ordered in any way, with or without recomputation; each
stage averages in one round of its devices or, where these share sites' lines, hierarchically, or on
two frequencies; all contribute, with any shares. Compute times by FLOPs, or measured ones that are
no shorter; updates free, or with them a mean over many steps; head and loss with the last stage.

Let T be the end of a step and j the first stage whose round ends then. All devices of stage j begin
their next step at T, so that of it F, H and B of the stages from j on and B of those before come
after T. What a stage of m devices must do before the next step ends is in
`planner.planning.stage_requirements`. In two levels, and on two frequencies, T is the end of the
last exchange: all sites of a stage exchange at the same moment, and begin their next step no
earlier. A step by itself may be shorter than the bound by what it spreads sums faster than the one
before.

Where one step in H averages, a step is taken for H of them, with as many microbatches, from the
end of one that averages to the end of the next: the bound is a mean over these.

Where stages need more devices than there are, however the layers are split, no plan has such a
step. A device has a price, a mixture of its parts of all FLOP/s, of all uploads and of their
number, and all devices together cost 1. What a stage costs at least is the least over m, the
cheapest split a shortest path over the layers, and the bound is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.network.cluster import Cluster
from planner.planning.calibrated import fastest_measured
from planner.planning.problem import PlanningProblem
from planner.planning.stage_requirements import DevicePool, Floats, Requirement, StageRequirements
from planner.planning.step_bound import StepBound
from planner.training_plan.model import TrainingPlan
from planner.workload.workload import Workload

Price = tuple[float, float, float]
"""Weights of FLOP/s, uploads and number of devices; they sum to 1."""

PriceAt = Callable[[float], float]
"""Price of the cheapest split by seconds between two step ends."""

PAID = 1 + 1e-12
"""What all devices cost, but for rounding."""

PRICES: tuple[Price, ...] = (
    (0.0, 0.0, 1.0),
    (1.0, 0.0, 0.0),
    (0.0, 1.0, 0.0),
    (0.5, 0.5, 0.0),
    (0.25, 0.75, 0.0),
    (0.75, 0.25, 0.0),
)
"""Each gives a bound; the best counts. They are the same where all devices are alike."""

HALVINGS, DOUBLINGS = 30, 200
A_LITTLE = 0.01
"""How much faster something is, relatively, where it is asked whether the bound stands on it."""


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
    """Seconds that no plan's step beats."""
    fleet = DevicePool.of(cluster, aggregators_in, two_frequency=two_frequency)
    workload = _of_steps(workload, every)
    asked = (workload, wire_ratio, recomputes, every)
    needs = StageRequirements(fleet, *asked)
    seconds, price = _best(fleet, lambda price: _any_stage(needs, price), needs.scale_s)
    if not np.isfinite(seconds):
        return None
    witness = {
        "kind": "whole step",
        "microbatch_samples": workload.microbatch_samples,
        "recompute": recomputes,
        "price": list(price),
        **fleet.to_dict(),
    }
    if every > 1:
        witness["every_steps"] = every
    if measured:
        witness["measured"] = True

    more = 1 + A_LITTLE
    faster = {
        "computing": replace(fleet, flops=fleet.flops * more),
        "messages and averaging": replace(fleet, up=fleet.up * more, down=fleet.down * more),
    }
    less_s = seconds * (1 - A_LITTLE / 10)
    names = [
        name
        for name, other in faster.items()
        if _any_stage(StageRequirements(other, *asked), price)(less_s) <= PAID
    ]
    what = ", ".join(names) or "the number, memory and latencies"
    basis = f"{what} of all devices, whatever stages they are in"
    if fleet.levels:
        basis += "; for a stage in two levels, from exchange to exchange"
    if fleet.regions:
        basis += "; from one exchange between regions to the next"
    if measured:
        basis += "; each as fast as the fastest of its operations"
    if every > 1:
        basis += f"; a mean over {every} steps, of which one averages"
    return StepBound(seconds / every, basis, witness)


def _of_steps(workload: Workload, every: int) -> Workload:
    """With the microbatches of so many steps in one."""
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
    """Seconds a step that no plan beats in the long run; a single step may.

    From the end of its round to the end of its next one every stage does all its work of a step,
    so that the first t steps from rest take at least t times this.
    """
    fleet = DevicePool.of(cluster, aggregators_in, two_frequency=two_frequency)
    needs = StageRequirements(fleet, _of_steps(workload, every), wire_ratio, True, every)
    lasting = needs.steady_state()

    def prices(price: Price) -> PriceAt:
        return lambda limit: _in_turn(_costs(needs, lasting, price, limit))

    return _best(fleet, prices, needs.scale_s)[0] / every


def plan_long_run_bound_s(problem: PlanningProblem, plan: TrainingPlan) -> float | None:
    """What no plan is faster than over many steps, as a found one averages."""
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


def _best(
    fleet: DevicePool, prices: Callable[[Price], PriceAt], scale_s: float
) -> tuple[float, Price]:
    """The highest bound of all prices, and which gives it."""
    best, chosen = 0.0, PRICES[0]
    for price in PRICES[:1] if fleet.alike else PRICES:
        price_at = prices(price)
        if best == 0 or price_at(best) > PAID:
            best, chosen = max(best, _least_s(price_at, scale_s)), price
    return best, chosen


def _any_stage(needs: StageRequirements, price: Price) -> PriceAt:
    """What the cheapest split costs, whichever stage's round ended the step before."""
    home, ends, beyond = needs.tail(), needs.boundary(), needs.downstream()
    ahead = [needs.upstream(again) for again in needs.choices]

    def price_at(limit: float) -> float:
        before = np.min([_costs(needs, need, price, limit) for need in ahead], axis=0)
        end = _costs(needs, ends, price, limit)
        later = _in_turn(_costs(needs, beyond, price, limit), before, end)
        return min(later, _in_turn(_costs(needs, home, price, limit)))

    return price_at


def _costs(needs: StageRequirements, need: Requirement, price: Price, limit: float) -> Floats:
    """Least price of the devices of every part, infinite where no number of them will do.

    Returns
    -------
    ndarray
        ``float[L, L + 1]``, by the part's first layer and the one after its last.
    """
    fleet = needs.fleet
    busy, late = limit - need.tail_s, limit - need.tail_s - need.begin_s
    open_s = limit - need.quiet_s
    able = need.fits & (need.least_s <= limit) & (busy > 0) & (late > 0) & (open_s > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        flops = np.maximum(need.flops / busy, need.late_flops / late)
        sent = need.sent / open_s
    able &= (flops <= needs.most_flops) & (sent <= needs.most_up)
    wanted = (
        (np.maximum(flops, needs.least_flops), fleet.flops.sum()),
        (np.maximum(sent, needs.least_up), fleet.up.sum()),
        (needs.m, needs.n),
    )
    # a device alone has no limit of its upload, and its price counts none
    cost = sum(w * need / whole for w, (need, whole) in zip(price, wanted, strict=True) if w > 0)
    table = np.full((needs.layers, needs.layers + 1), np.inf)
    table[needs.starts, needs.stops] = np.where(able, cost, np.inf).min(axis=1)
    return table


def _in_turn(cost: Floats, before: Floats | None = None, end: Floats | None = None) -> float:
    """Price of the cheapest split into stages.

    With ``before`` and ``end`` some stage, not the first, costs what ``end`` says, those before it
    what ``before`` says.
    """
    layers = len(cost)
    ahead, done = np.full(layers + 1, np.inf), np.full(layers + 1, np.inf)
    (done if before is None else ahead)[0] = 0.0
    for stop in range(1, layers + 1):
        last = (done[:stop] + cost[:stop, stop]).min()
        if before is not None and end is not None:
            ahead[stop] = (ahead[:stop] + before[:stop, stop]).min()
            last = min(last, (ahead[1:stop] + end[1:stop, stop]).min(initial=np.inf))
        done[stop] = last
    return float(done[layers])


def _least_s(price_at: PriceAt, scale_s: float) -> float:
    """The least seconds at which the devices can pay for all stages, from below."""
    high = scale_s
    for _ in range(DOUBLINGS):
        if price_at(high) <= PAID:
            break
        high *= 2
    else:
        return np.inf
    low = high / 2 if high > scale_s else 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if price_at(middle) <= PAID else (middle, high)
    return low
