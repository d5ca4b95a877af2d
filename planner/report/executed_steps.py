"""Executed steps of a run, read from its events or from ``planner run --json``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.utils.input_files import parse_json, read_text


class ReportError(ValueError):
    """Invalid file of an executed run."""


@dataclass(frozen=True)
class Executed:
    """One executed step, with its measured and, if known, predicted seconds."""

    step: int
    took_s: float
    predicted_s: float | None = None


def load_run(path: str | Path, plan_hash: str | None = None) -> list[Executed]:
    """Read the steps of a run, in the file's order."""
    steps = []
    for where, row, ran in _rows(read_text(path, error=ReportError), path):
        if plan_hash is not None and isinstance(ran, str) and ran not in ("", plan_hash):
            raise ReportError(
                f"{path}, {where}: the run is of plan {ran[:12]}, not of {plan_hash[:12]}; "
                "give the run of this plan, or the plan of this run"
            )
        steps.append(_step(row, f"{path}, {where}"))
    if not steps:
        raise ReportError(
            f"{path}: contains no step; give the output of the executor's --events or of planner "
            "run --json"
        )
    return steps


def _rows(text: str, path: str | Path) -> list[tuple[str, Any, Any]]:
    """Return the location, the data and the plan hash of each step."""
    try:
        data = parse_json(text, path)
    except ValueError:
        data = None
    if isinstance(data, dict) and isinstance(data.get("steps"), list):
        ran = data.get("plan")
        return [(f"steps[{k}]", row, ran) for k, row in enumerate(data["steps"])]
    rows = []
    for k, line in enumerate(text.splitlines(), 1):
        if not line.startswith('{"event"'):
            continue
        try:
            event = parse_json(line, f"{path}, line {k}", error=ReportError)
        except ReportError as error:
            raise ReportError(f"{error}, or remove the line if it is cut") from None
        if event["event"] == "step":
            rows.append((f"line {k}", event, event.get("plan")))
    return rows


def _step(row: Any, where: str) -> Executed:
    row = row if isinstance(row, dict) else {}
    step, took = row.get("step"), row.get("took_s", row.get("measured_s"))
    numbers = isinstance(step, int) and isinstance(took, (int, float))
    if not numbers or isinstance(took, bool) or not math.isfinite(took) or took < 0:
        raise ReportError(f"{where}: a step needs a number and seconds >= 0, found {str(row)[:60]}")
    predicted = row.get("predicted_s")
    is_number = isinstance(predicted, (int, float)) and not isinstance(predicted, bool)
    predicted_s = float(predicted) if is_number and 0 < predicted < math.inf else None
    return Executed(step, float(took), predicted_s)
