"""The error of plans that a format cannot express, and of options that do not fit."""


class ExportError(ValueError):
    """A plan that cannot be exported so; one line with the reason and the remedy."""
