"""Alternatives to the best plan of a joint search: what each decision is worth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.planning.joint.candidate import CandidatePlan
from planner.planning.joint.candidate_pool import CandidatePool
from planner.planning.request import ShareRule
from planner.training_plan.alternative import Alternative
from planner.training_plan.averaging_group import is_hierarchical
from planner.utils.text import counted

MAX_RECHECKS = 3
"""Times that a runner-up may replace the best plan after the search."""
ROUNDING = 1e-9
"""Relative difference of two values that counts as rounding."""

Decision = tuple[str, str]
"""What the best plan does, and what the alternative does instead."""


def alternatives(pool: CandidatePool) -> Iterator[Alternative]:
    """Runners-up, and variants of the best plan with one decision changed.

    One that is better than the best plan replaces it in the pool.
    """
    runners_up = _runners_up(pool)
    best, request = pool.best_candidate, pool.problem.request
    for decision, candidate in runners_up:
        yield _alternative(pool, decision, candidate.value)
    if best is None or not pool.may_recheck(best):
        return
    if request.recompute is None:
        yield _other_recomputation(pool, best)
        best = pool.best_candidate or best
    if request.averaging is None:
        yield from _equal_shares(pool, best)


def _runners_up(pool: CandidatePool) -> list[tuple[Decision, CandidatePlan]]:
    """The best candidates with another number of stages, with another head, and on all devices."""
    runners_up: list[tuple[Decision, CandidatePlan]] = []
    for _ in range(MAX_RECHECKS):
        best = pool.best_candidate
        if best is None:
            return []
        runners_up = list(_next_best(pool, best))
        if not pool.may_recheck(best):
            return runners_up
        runners_up = [
            (decision, pool.builder.with_next_step(candidate)) for decision, candidate in runners_up
        ]
        for _, candidate in runners_up:
            pool.update(candidate, candidate.seconds)
        least_value = pool.incumbent.objective * (1 - ROUNDING)
        for candidate in [c for _, c in runners_up if c.value < least_value]:
            pool.evaluate(candidate)
        if pool.best_candidate is best:
            break
    return runners_up


def _next_best(
    pool: CandidatePool, best: CandidatePlan
) -> Iterator[tuple[Decision, CandidatePlan]]:
    stages, head = best.layout.outline
    by_outline = pool.best_by_outline.items()
    others = [candidate for outline, candidate in by_outline if outline[0] != stages]
    if others:
        runner_up = min(others, key=lambda candidate: candidate.value)
        yield (counted(stages, "stage"), str(len(runner_up.layout.layers))), runner_up
    others = [
        x for (count, place), x in by_outline if place is not head and 1 not in (count, stages)
    ]
    if others:
        runner_up = min(others, key=lambda candidate: candidate.value)
        yield (f"head on the {head} stage", f"the {runner_up.layout.head} stage"), runner_up
    without_stage = pool.num_without_stage(best)
    if without_stage > 0 and pool.best_on_all is not None:
        yield (f"{without_stage} without a stage", "none"), pool.best_on_all


def _other_recomputation(pool: CandidatePool, best: CandidatePlan) -> Alternative:
    """The best plan with recomputation on all stages, or on none if it recomputes."""
    recomputes = any(best.layout.recompute)
    with_, without = ("recomputation", "none"), ("no recomputation", "on all stages")
    decision, reverse = (with_, without) if recomputes else (without, with_)
    sizes = best.layout.layer_counts
    other = replace(best.layout, recompute=(0,) * len(sizes) if recomputes else sizes)
    variant = pool.rebuilt(replace(best.spec, layout=other, max_in_flight_ratio=math.inf))
    if variant is None:
        return _alternative(pool, decision, None)
    return _variant(pool, variant, decision, reverse)


def _equal_shares(pool: CandidatePool, best: CandidatePlan) -> Iterator[Alternative]:
    """The best plan with one round of equal shares.

    Shares are optimised for averaging alone; other shares may suit concurrent messages better.
    """
    plan = pool.incumbent.plan
    if plan is not None and all(len(group) == 1 for group in plan.assignment.groups):
        return  # nothing is averaged
    hierarchical = (
        plan is not None and any(map(is_hierarchical, plan.averaging)) and not plan.two_frequency
    )
    decision = ("adaptive shares", "equal")
    if hierarchical:
        decision = ("two levels", "one round of equal shares")
    equal = replace(best.spec, shares=ShareRule.EQUAL, max_in_flight_ratio=math.inf)
    variant = pool.rebuilt(equal)
    if variant is not None:
        yield _variant(pool, variant, decision, ("equal shares", decision[0]))


def _variant(
    pool: CandidatePool, variant: CandidatePlan, decision: Decision, reverse: Decision
) -> Alternative:
    """A variant of the best plan, which replaces it if it is better: then ``reverse`` holds."""
    best_value, value = pool.incumbent.objective, variant.value
    if value < best_value * (1 - ROUNDING):
        value = pool.evaluate(variant)
        if value < best_value * (1 - ROUNDING):
            return _alternative(pool, reverse, best_value)
    return _alternative(pool, decision, value)


def _alternative(pool: CandidatePool, decision: Decision, value: float | None) -> Alternative:
    why = "memory does not hold it" if value is None else ""
    unit = "$" if pool.objective.by_cost else "s"
    return Alternative(*decision, value, unit, why)
