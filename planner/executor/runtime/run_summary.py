"""The line about all devices at the end of a run; also used where PyTorch is not loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
    return (
        f"memory {largest['peak_bytes'] / 1e9:.3f} GB at most, on {largest['device']} "
        f"({largest['peak_is']}; the plan counts {largest['planned_bytes'] / 1e9:.3f} GB for its "
        f"stage, {largest['expected_bytes'] / 1e9:.3f} GB were expected with averaging, messages "
        f"and calibration), {sent / 1e9:.3f} GB sent in all{parts}"
    )
