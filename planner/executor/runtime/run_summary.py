"""The line about all devices at the end of a run; also used where PyTorch is not loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.utils.text import quantity


def summary(reports: Sequence[Mapping[str, Any]]) -> str:
    """One line from `device_reports`."""
    largest = max(reports, key=lambda report: float(report["peak_bytes"]))
    sent = sum(size for report in reports for size in report["sent_bytes"].values())
    off_plan = [one for one in reports if "part" in one and one["part"] != one["planned_part"]]
    parts = ""
    if off_plan:
        farthest = max(off_plan, key=lambda report: abs(report["part"] - report["planned_part"]))
        parts = (
            f"; farthest from its planned part of microbatches is {farthest['device']}: "
            f"{farthest['part']:.1%} of its stage's, planned {farthest['planned_part']:.1%}"
        )
    peak, planned, expected = (
        quantity(float(largest[f"{name}_bytes"]), "B") for name in ("peak", "planned", "expected")
    )
    return (
        f"memory {peak} at most, on {largest['device']} ({largest['peak_is']}; the plan counts "
        f"{planned} for its stage, {expected} were expected with averaging and all else), "
        f"{quantity(sent, 'B')} sent in all{parts}"
    )
