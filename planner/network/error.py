"""The error of networks that cannot be used as asked."""


class NetworkError(ValueError):
    """A network that cannot be used as asked; one line with rule, value and remedy."""
