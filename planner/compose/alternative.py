"""What a plan's decisions would cost otherwise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alternative:
    """The runner-up of one decision, the others left as they are or nearly so.

    Attributes
    ----------
    taken, instead
        In words.
    value
        About what a step would take or cost, from a draft. None: memory does not hold it.
    unit
        ``"s"`` or ``"$"``.
    """

    taken: str
    instead: str
    value: float | None
    unit: str = "s"
