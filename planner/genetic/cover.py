"""A constraint that two CP-SAT models share."""

from __future__ import annotations

from typing import Any

from planner.search.arrays import Ints


def cover_smaller_side(
    model: Any, sizes: Ints, boundary: int, leaves: Any, enters: Any, left: Any, right: Any
) -> None:
    """Eq. 3: every device of the smaller side is matched, none of the larger one twice."""
    if sizes[boundary] <= sizes[boundary + 1]:
        model.add(leaves == left)
    else:
        model.add(leaves <= left)
    if sizes[boundary + 1] <= sizes[boundary]:
        model.add(enters == right)
    else:
        model.add(enters <= right)
