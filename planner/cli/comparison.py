"""What ``planner plan`` compares a plan with beside random placements: what needs no planner."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from typing import Any

from planner.compose.fixed_trials import FixedPlan, Tally
from planner.compose.request import Question
from planner.problems import ProblemError

RANKS = 0.7
"""Part of the time that ranks by region may take; regions by themselves get the rest."""


def compared(
    question: Question,
    step_s: float,
    data: dict[str, Any],
    seconds: float = math.inf,
) -> Iterator[str]:
    """Ranks by region on all devices, and the fastest region alone, as data and as lines.

    Parameters
    ----------
    question
        What was asked, with the workload's own microbatches.
    step_s
        Of the plan.
    data
        Gets ``ranks_by_region`` and ``one_region``; null where nothing fits.
    seconds
        After so many nothing new is tried.

    Yields
    ------
    str
        A line each, as soon as it is known.
    """
    began = time.perf_counter()

    def over_after(share: float) -> Callable[[], bool]:
        return lambda: time.perf_counter() - began > share * seconds

    yield from _ranks(question, step_s, data, over_after(RANKS))
    yield from _region(question, step_s, data, over_after(1.0))


def _ranks(
    question: Question, step_s: float, data: dict[str, Any], over: Callable[[], bool]
) -> list[str]:
    from planner.compose.rank_order import ranks_by_region

    found, why = _or_why(lambda: ranks_by_region(question, over=over))
    data["ranks_by_region"] = None
    if found is None:
        return [why]
    outermost, plan = found.best
    data["ranks_by_region"] = {"outermost": str(outermost), **_told(found)}
    parallel = f"{outermost} parallel" if outermost == "data" else str(outermost)
    shape = f"{_shape(plan)}, {parallel} outermost"
    return [f"ranks by region: {shape}, {_step(plan, step_s)}{_left_out(found.tally)}"]


def _region(
    question: Question, step_s: float, data: dict[str, Any], over: Callable[[], bool]
) -> list[str]:
    from planner.compose.rank_order import one_region

    data["one_region"] = None
    found, why = _or_why(lambda: one_region(question, over=over))
    if found is None:
        return [why]
    if found.plan.devices == len(question.cluster):
        return []  # ranks by region are the same
    data["one_region"] = _told(found)
    plan = found.plan
    alone = f"{found.name} alone: {_shape(plan)}, {_step(plan, step_s)}"
    return [f"{alone}{_left_out(found.tally)}"]


def _told(found: Any) -> dict[str, Any]:
    """Plans and tallies as data."""
    values = {one.name: getattr(found, one.name) for one in fields(found)}
    return {
        name: value.decisions()
        if isinstance(value, FixedPlan)
        else asdict(value)
        if isinstance(value, Tally)
        else value
        for name, value in values.items()
    }


def _or_why(make: Callable[[], Any]) -> tuple[Any, str]:
    """What is made, or the reason why nothing fits."""
    try:
        return make(), ""
    except ProblemError as error:
        return None, str(error).split(";", maxsplit=1)[0]


def _shape(plan: FixedPlan) -> str:
    again = ", recomputing" if plan.recompute else ""
    samples = f", microbatches of {plan.microbatch_samples}" if plan.microbatch_samples > 1 else ""
    return f"{plan.stages} stages x {plan.pipelines} pipelines{samples}, {plan.order}{again}"


def _step(plan: FixedPlan, step_s: float) -> str:
    return f"step time {plan.step_s:.4f} s ({plan.step_s / step_s:.2f} x)"


def _left_out(tally: Tally) -> str:
    return f", {tally.left_out} more not tried" if tally.left_out else ""
