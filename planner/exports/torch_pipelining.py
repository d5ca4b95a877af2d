"""Export of a pipeline schedule as CSV of torch.distributed.pipelining."""

from __future__ import annotations

import csv
import io

from planner.exports.error import ExportError
from planner.exports.options import ExportOptions
from planner.exports.straight import first_schedule, require_trainable
from planner.training_plan.model import TrainingPlan


def pipelining_csv(plan: TrainingPlan, options: ExportOptions) -> str:
    """Return one row per stage with its operations in order."""
    pipelines = require_trainable(plan, "torch-pipelining")
    if options.pipeline is None:
        texts = {_csv_of(plan, path) for path in pipelines}
        if len(texts) > 1:
            raise ExportError(
                f"torch-pipelining: the {len(pipelines)} pipelines have different schedules; "
                "select one with --pipeline and write one file for each"
            )
        return texts.pop()
    if options.pipeline >= len(pipelines):
        raise ExportError(
            f"pipeline must be 0 to {len(pipelines) - 1} for this plan, found {options.pipeline}; "
            "give one of these"
        )
    return _csv_of(plan, pipelines[options.pipeline])


def _csv_of(plan: TrainingPlan, path: tuple[int, ...]) -> str:
    schedule = first_schedule(plan)
    microbatches = [b for b, visited in enumerate(schedule.paths) if visited == path]
    number = {b: k for k, b in enumerate(microbatches)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for stage, d in enumerate(path):
        ops = schedule.order[d]
        writer.writerow([f"{stage}{kind}{number[b]}" for kind, b in ops if kind != "H"])
    return text.getvalue()
