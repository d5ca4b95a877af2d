"""The exception for invalid networks."""


class NetworkError(ValueError):
    """An invalid network; one line with rule, value and remedy."""
