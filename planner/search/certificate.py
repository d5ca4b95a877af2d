"""Certificate of a part of a plan: objective, bound and the bound's basis."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPTIMAL_GAP = 1e-6
"""Relative gap at or under which a result counts as closed."""

Witness = Mapping[str, Any]
"""Data from which `planner.checker` recomputes a bound, as JSON.

``kind`` names the argument, the other entries are its data; docs/reference/plan-file.md lists them
under "Witnesses". A witness holds only what the plan or the problem does not.
"""


def is_json(value: Any) -> bool:
    """Whether a value consists of mappings with text keys, lists, text and plain numbers."""
    try:
        return _is_json(value)
    except RecursionError:
        return False


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float)


class Status(enum.StrEnum):
    """Status of a solve."""

    OPTIMAL = "OPTIMAL"
    FEASIBLE = "FEASIBLE"
    INFEASIBLE = "INFEASIBLE"
    UNKNOWN = "UNKNOWN"


def relative_gap(objective: float | None, bound: float | None) -> float | None:
    """``|objective - bound| / max(|objective|, 1e-12)``, or None if either is missing."""
    if objective is None or bound is None:
        return None
    return abs(objective - bound) / max(abs(objective), 1e-12)


@dataclass(frozen=True)
class Certificate:
    """Quality of a part of a plan: objective, proven bound and how they were obtained.

    Attributes
    ----------
    method
        Name of the solver.
    status
        OPTIMAL if the gap is at most 1e-6.
    objective, bound, gap
        See `planner.search.result.Result`; ``gap`` is None without a bound.
    stop_reason
        Why the search stopped.
    runtime_s
        Running time in seconds.
    seed
        Seed of the search.
    basis
        Basis of the bound: an argument, or the solver that proved it.
    witness
        Data from which the checker recomputes the bound; None if the bound is not recomputed.
    """

    method: str
    status: Status
    objective: float | None
    bound: float | None
    gap: float | None
    stop_reason: str
    runtime_s: float
    seed: int
    basis: str = ""
    witness: Witness | None = None

    def __post_init__(self) -> None:
        if isinstance(self.status, str) and self.status in set(Status):
            object.__setattr__(self, "status", Status(self.status))
        if not is_json(self.witness):
            raise ValueError(
                "witness holds what JSON cannot; give numbers, text, lists and mappings"
            )

    def __repr__(self) -> str:
        return (
            f"Certificate({self.status} objective={_short(self.objective)} "
            f"bound={_short(self.bound)} method={self.method!r})"
        )


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
