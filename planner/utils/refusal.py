"""The exception for input that cannot be used."""


class Refusal(ValueError):
    """Input that cannot be used; one line with rule, value and remedy."""
