"""One broken rule, as `planner.checker.dispatch` reports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    Attributes
    ----------
    rule
        Its short name, such as ``TC2`` or ``eq. 3``.
    where
        The field or device concerned.
    message
        What was expected and what was found.
    """

    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule} at {self.where}: {self.message}"
