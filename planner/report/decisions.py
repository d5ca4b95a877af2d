"""What else was looked at for a decision, in words: a plan file does not keep it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """One that was made, and what could have been instead.

    Attributes
    ----------
    taken, instead
        In words.
    outcome
        What the step would take or cost instead, or why it cannot be.
    """

    taken: str
    instead: str
    outcome: str
