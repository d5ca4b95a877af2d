"""The exception for invalid plans."""

from planner.utils.refusal import Refusal


class PlanError(Refusal):
    """An invalid plan; one line with field, value and remedy."""


def require_hash(field: str, stored: str, actual: str) -> None:
    """Refuse content that was changed after it was hashed."""
    if stored != actual:
        raise PlanError(
            f"{field}: is {stored[:12]}... but the content gives {actual[:12]}...; the file was "
            "changed after it was written, make the plan again"
        )
