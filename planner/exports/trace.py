"""Export of the predicted step as Trace Event JSON."""

from __future__ import annotations

from planner.exports.error import ExportError
from planner.exports.options import ExportOptions
from planner.simulator.simulator import simulate
from planner.training_plan.model import TrainingPlan


def chrome_trace(plan: TrainingPlan, options: ExportOptions) -> str:
    """Return a trace for ui.perfetto.dev: one process per device, one row per link."""
    if options.schedule >= len(plan.schedules):
        raise ExportError(
            f"schedule must be 0 to {len(plan.schedules) - 1} for this plan, found "
            f"{options.schedule}; "
            "give one of these"
        )
    return simulate(plan, schedule=options.schedule).chrome_trace()
