"""Why each decision of a plan: lines of ``planner plan``, and rows for its report."""

from __future__ import annotations

from collections.abc import Sequence

from planner.compose.alternative import Alternative
from planner.compose.degrees import Candidate
from planner.network.words import some
from planner.report.decisions import Decision
from planner.training_plan.model import TrainingPlan

SAME = 0.01
"""Relative difference under which an estimate says nothing."""


def candidate_lines(table: Sequence[Candidate]) -> list[str]:
    """Shapes that were tried, a line each.

    Parameters
    ----------
    table
        With their steps, or why they were refused.
    """
    if not table:
        return []
    rows = ["stages x pipelines  microbatch   step time       bound"]
    for c in table:
        shape = f"{c.stages:6d} x {c.pipelines:<9d}  {c.microbatch_samples:10d}"
        if c.step_s is None:
            rows.append(f"{shape}   refused: {_why(c)}")
        else:
            bound = "none" if c.bound_s is None else f"{c.bound_s:.4f}"
            rows.append(f"{shape}   {c.step_s:10.4f} s  {bound}")
    return rows


def alternative_lines(table: Sequence[Alternative], least: float) -> list[str]:
    """What the runner-up of each decision would take.

    Parameters
    ----------
    table
        Runners-up.
    least
        The plan's own step or cost.
    """
    return [f"{one.taken + ',':24}not {one.instead}: {_outcome(one, least)}" for one in table]


def decisions(
    made: TrainingPlan, table: Sequence[Candidate | Alternative], least: float
) -> list[Decision]:
    """The same for a report.

    Parameters
    ----------
    made
        The plan.
    table
        Of the search's result.
    least
        The plan's own step or cost.

    Returns
    -------
    list[Decision]
        Empty: everything was given.
    """
    groups, samples = made.assignment.groups, made.workload.microbatch_samples
    taken = _shape(len(groups), len(groups[0]), samples)
    rows = []
    for one in table:
        if isinstance(one, Alternative):
            rows.append(Decision(one.taken, one.instead, _outcome(one, least)))
            continue
        instead = _shape(one.stages, one.pipelines, one.microbatch_samples)
        if instead != taken:
            step = _why(one) if one.step_s is None else f"{one.step_s:.4f} s"
            rows.append(Decision(taken, instead, step))
    return rows


def _shape(stages: int, pipelines: int, samples: int) -> str:
    return f"{some(stages, 'stage')} x {some(pipelines, 'pipeline')}, microbatches of {samples}"


def _outcome(one: Alternative, least: float) -> str:
    if one.value is None:
        return "cannot be"
    if abs(one.value - least) < SAME * least:
        return "about the same"
    return f"about {one.value:.4f} {one.unit}"


def _why(one: Candidate) -> str:
    return one.refused.split(";")[0]
