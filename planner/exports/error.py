"""Error of exports."""


class ExportError(ValueError):
    """The format cannot express the plan, or an option is invalid."""
