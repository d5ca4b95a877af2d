"""Runner-up decisions of a plan, and what they would cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from planner.training_plan.error import PlanError
from planner.utils.validate import instance_of, real, short_repr

UNITS = ("s", "$")
SAME = 0.01
"""Relative difference below which an estimate is not significant."""


@dataclass(frozen=True)
class Alternative:
    """The runner-up of one decision, with the others unchanged or nearly so.

    Attributes
    ----------
    value
        Approximate seconds or dollars of a step, usually of a candidate plan; None if infeasible.
    why
        Why it is infeasible.
    """

    taken: str
    instead: str
    value: float | None
    unit: str = "s"
    why: str = ""

    def __post_init__(self) -> None:
        for name in ("taken", "instead", "unit", "why"):
            instance_of(str, getattr(self, name), f"{name} of an alternative", error=PlanError)
        if self.unit not in UNITS:
            raise PlanError(f"unit of an alternative is {short_repr(self.unit)}; give s or $")
        if self.value is not None:
            value = real("value of an alternative", self.value, 0, error=PlanError)
            object.__setattr__(self, "value", value)

    def outcome(self, least: float) -> str:
        """What a step would take or cost, in words."""
        if self.value is None:
            return self.why or "cannot be"
        if abs(self.value - least) < SAME * least:
            return "about the same"
        value = f"{self.value:,.0f}" if self.value >= 1000 else f"{self.value:.4g}"
        return f"about {value} {self.unit}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Alternative:
        """Inverse of `to_dict`."""
        return cls(**data)
