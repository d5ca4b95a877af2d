"""Why each decision of a plan: lines of ``planner plan``."""

from __future__ import annotations

from collections.abc import Sequence

from planner.compose.degrees import Candidate
from planner.report.figures import least
from planner.training_plan.model import TrainingPlan


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
            rows.append(f"{shape}   refused: {c.why}")
        else:
            bound = "none" if c.bound_s is None else f"{c.bound_s:.4f}"
            rows.append(f"{shape}   {c.step_s:10.4f} s  {bound}")
    return rows


def alternative_lines(made: TrainingPlan) -> list[str]:
    """What the runner-up of each decision would take.

    Parameters
    ----------
    made
        The plan.
    """
    return [
        f"{one.taken + ',':24}not {one.instead}: {one.outcome(least(made))}"
        for one in made.alternatives
    ]
