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
    step_s
        About what a step would take, from a draft. None: memory does not hold it.
    """

    taken: str
    instead: str
    step_s: float | None
