"""Runner-up decisions of a plan and what they would cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from planner.training_plan.error import PlanError
from planner.utils.validate import instance_of, real, short_repr

UNITS = ("s", "$")
SAME = 0.01
"""Relative difference under which an estimate says nothing."""


@dataclass(frozen=True)
class Alternative:
    """The runner-up of one decision, the others left as they are or nearly so.

    Attributes
    ----------
    value
        About what a step would take or cost, mostly from a draft. None: it cannot be.
    why
        It cannot be, in words.
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
        """JSON-ready; `from_dict` reads it again."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Alternative:
        """Of a plan file."""
        return cls(**data)
