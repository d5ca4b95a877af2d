"""The predicted step as Trace Event JSON."""

from __future__ import annotations

from planner.exports.error import ExportError
from planner.exports.options import ExportOptions
from planner.simulator.simulator import simulate
from planner.training_plan.model import TrainingPlan


def chrome_trace(plan: TrainingPlan, options: ExportOptions) -> str:
    """For ui.perfetto.dev: a process a device, a row for each link."""
    if options.schedule >= len(plan.schedules):
        raise ExportError(
            f"schedule is {options.schedule}, the plan has schedules 0 to "
            f"{len(plan.schedules) - 1}; name one of them"
        )
    return simulate(plan, schedule=options.schedule).chrome_trace()
