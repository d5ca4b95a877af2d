"""What ``planner plan`` compares a plan with beside random placements: what needs no planner."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from planner.compose.baseline_plans import RANKS, BaselinePlans, or_why
from planner.compose.fixed_trials import FixedPlan, Tally
from planner.compose.request import Objective, Question


def compared(
    question: Question,
    known: BaselinePlans | None,
    data: dict[str, Any],
    seconds: float = math.inf,
) -> None:
    """Ranks by region on all devices, and the fastest region alone.

    Parameters
    ----------
    question
        What was asked, with the workload's own microbatches.
    known
        The baselines that the search started from; None: they are computed.
    data
        Gets ``ranks_by_region`` and ``one_region``, as soon as each is known; null where nothing
        fits, with the reason in ``ranks_by_region_refused`` or ``one_region_refused``.
    seconds
        After so many nothing new is tried.
    """
    from planner.compose.rank_order import one_region, ranks_by_region

    if question.request.objective == Objective.COST:
        why = "not searched with --objective cost"
        data |= {"ranks_by_region": None, "one_region": None, "ranks_by_region_refused": why}
        return
    began = time.perf_counter()

    def over_after(share: float) -> Callable[[], bool]:
        return lambda: time.perf_counter() - began > share * seconds

    if known is None:
        ranks, why = or_why(lambda: ranks_by_region(question, over=over_after(RANKS)))
    else:
        ranks, why = known.ranks, known.ranks_refused
    if ranks is None:
        data |= {"ranks_by_region": None, "ranks_by_region_refused": _short(why)}
    else:
        data["ranks_by_region"] = {"outermost": str(ranks.best[0]), **_decided(ranks)}
    if known is None:
        region, why = or_why(lambda: one_region(question, over=over_after(1.0)))
    else:
        region, why = known.region, known.region_refused
    data["one_region"] = None
    if region is None:
        data["one_region_refused"] = _short(why)
    elif region.plan.devices < len(question.cluster):  # else it is the same as ranks by region
        data["one_region"] = {"name": region.name, **_decided(region)}


def _decided(found: Any) -> dict[str, Any]:
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


def _short(why: str) -> str:
    return why.split(";", maxsplit=1)[0]
