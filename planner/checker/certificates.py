"""Rules of every certificate: gap and status follow from objective and bound."""

from __future__ import annotations

from collections.abc import Iterator

from planner.checker.violation import Violation
from planner.search.certificate import OPTIMAL_GAP, Certificate, Status

TOLERANCE = 1e-6
"""Relative, between a stored and a recomputed time."""


def compare_stored(
    actual: float,
    stored: float | None,
    rule: str,
    where: str,
    tolerance: float = TOLERANCE,
    *,
    unit: str = "s",
    label: str = "recomputed",
) -> Iterator[Violation]:
    """Report a stored value that differs from the recomputed one."""
    if stored is None or not abs(actual - stored) <= tolerance * max(abs(actual), 1e-12):
        yield Violation(rule, where, f"{label} {actual:.9g} {unit}, found {stored} {unit}")


def check_certificate(c: Certificate, where: str) -> Iterator[Violation]:
    """Report a gap or a status that does not follow from objective and bound."""
    for name, value in (("objective", c.objective), ("bound", c.bound)):
        if value is not None and not value >= 0:
            yield Violation(name, f"{where}.{name}", f"must be at least 0, found {value}")
            return
    gap = None
    if c.objective is not None and c.bound is not None:
        gap = abs(c.objective - c.bound) / max(abs(c.objective), 1e-12)
    if (gap is None) != (c.gap is None) or (gap is not None and abs(gap - (c.gap or 0.0)) > 1e-9):
        yield Violation("gap", where, f"objective and bound give gap {gap}, found {c.gap}")
    closed = gap is not None and gap <= OPTIMAL_GAP
    if closed != (c.status is Status.OPTIMAL):
        yield Violation("status", where, f"status is {c.status} with a gap of {gap}")
