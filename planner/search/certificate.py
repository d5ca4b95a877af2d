"""Certificate of a part of a plan: objective, bound and what it rests on."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPTIMAL_GAP = 1e-6
"""Relative gap at or under which a result counts as closed."""

Witness = Mapping[str, Any]
"""JSON-ready: ``kind`` names the argument, the other entries are what it needs."""


def is_json(value: Any) -> bool:
    """Whether JSON holds it as it is: mappings with text for keys, lists, text, plain numbers."""
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
    """How far a solver came."""

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
    """How good a part of a plan is, and why the search stopped.

    Attributes
    ----------
    method
        The solver that made the part.
    status
        Follows from the gap.
    objective, bound, gap
        See `planner.search.result.Result`; ``gap`` is None where there is no bound.
    stop_reason
        What ended the search.
    runtime_s
        Seconds it took.
    seed
        It was started with.
    basis
        What the bound stands on: an argument, or the solver whose word it is.
    witness
        What a checker recomputes the bound from; None where it takes the solver's word.
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
