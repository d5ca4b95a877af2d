"""The exception for invalid networks."""

from planner.utils.refusal import Refusal


class NetworkError(Refusal):
    """An invalid network; one line with rule, value and remedy."""
