"""What commands share when they print and write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planner.cli.progress import PROGRESS
from planner.search.result import Result

INVALID_PLAN = 1
BAD_INPUT = 2
INTERNAL_ERROR = 4
INTERRUPTED = 130
"""Exit codes beside 0."""


def show(as_json: bool, data: Any, lines: Sequence[str]) -> None:
    """Print the data as JSON, or the lines."""
    PROGRESS.clear()
    print(json.dumps(data, allow_nan=False, indent=1) if as_json else "\n".join(lines))


def result_data(result: Result[Any]) -> dict[str, Any]:
    """A result's certificate, JSON-ready."""
    return asdict(result.certificate())


def certificate_line(what: str, certificate: dict[str, Any], unit: str = "s") -> str:
    """Objective, bound and gap in one line, in seconds or dollars."""

    def number(value: float | None, spec: str) -> str:
        return "none" if value is None else format(value, spec)

    return (
        f"{what:<24}{number(certificate['objective'], '10.4f')} {unit}   "
        f"bound {number(certificate['bound'], '.4f')}   gap {number(certificate['gap'], '.2%')}   "
        f"{certificate['status']} ({certificate['stop_reason']}, {certificate['runtime_s']:.1f} s)"
    )


def require_writable(path: Path | None, suffixes: Sequence[str]) -> None:
    """Refuse an output that cannot be written, before the work it would be lost after."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"{path}: folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file")
    if path.suffix not in suffixes:
        raise ValueError(f"{path}: must end in {' or '.join(suffixes)}; rename it")
