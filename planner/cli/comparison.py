"""Comparison of a plan with its baselines, as data for printing."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from planner.planning.baselines.plans import Baselines
from planner.planning.baselines.search import BaselinePlan, SearchCounts
from planner.planning.problem import PlanningProblem
from planner.planning.request import Objective


def add_baselines(problem: PlanningProblem, baselines: Baselines, data: dict[str, Any]) -> None:
    """Add the two baselines to ``data``: ranks by region, and the fastest region alone."""
    data |= {"ranks_by_region": None, "one_region": None}
    if problem.request.objective == Objective.COST:
        data["ranks_by_region_refused"] = "not searched with --objective cost"
        return
    if baselines.ranks is None:
        data["ranks_by_region_refused"] = _short(baselines.ranks_refused)
    else:
        outermost = str(baselines.ranks.best[0])
        data["ranks_by_region"] = {"outermost": outermost, **_decided(baselines.ranks)}
    region = baselines.region
    if region is None:
        data["one_region_refused"] = _short(baselines.region_refused)
    elif region.plan.devices < len(problem.cluster):  # otherwise both baselines are the same
        data["one_region"] = {"name": region.name, **_decided(region)}


def _decided(baseline: Any) -> dict[str, Any]:
    """Convert a baseline's plans and search counts to JSON-ready data."""
    values = {field.name: getattr(baseline, field.name) for field in fields(baseline)}
    return {
        name: value.decisions()
        if isinstance(value, BaselinePlan)
        else asdict(value)
        if isinstance(value, SearchCounts)
        else value
        for name, value in values.items()
    }


def _short(why: str) -> str:
    """Return a refusal's reason without its remedy."""
    return why.split(";", maxsplit=1)[0]
