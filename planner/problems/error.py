"""What a problem raises when its data contradict each other."""

from __future__ import annotations


class ProblemError(ValueError):
    """A problem whose data contradict each other; the message names rule, value and remedy."""
