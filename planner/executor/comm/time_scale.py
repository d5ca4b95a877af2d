"""Scale of times and bytes of a run with simulated compute."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.utils.refusal import Refusal


@dataclass(frozen=True)
class TimeScale:
    """Divisors with which one machine can run a plan for a large network.

    Attributes
    ----------
    speed
        Divides all times.
    shrink
        Divides all bytes.
    """

    speed: float = 1.0
    shrink: float = 1.0

    def __post_init__(self) -> None:
        for name in ("speed", "shrink"):
            if not 0 < getattr(self, name) < math.inf:
                raise Refusal(
                    f"--{name} must be a number above 0, found {getattr(self, name)}; give 1 to "
                    "leave the plan as it is"
                )
