"""The error of plans that cannot be used."""


class PlanError(ValueError):
    """A plan that cannot be used; one line with field, value and remedy."""
