"""The matching constraint of two CP-SAT models."""

from __future__ import annotations

from typing import Any

from planner.search.arrays import Ints


def add_matching_constraint(
    model: Any,
    sizes: Ints,
    boundary: int,
    outflow: Any,
    inflow: Any,
    left_count: Any,
    right_count: Any,
) -> None:
    """Eq. 3: match every device of the smaller side, and each of the larger side at most once."""
    if sizes[boundary] <= sizes[boundary + 1]:
        model.add(outflow == left_count)
    else:
        model.add(outflow <= left_count)
    if sizes[boundary + 1] <= sizes[boundary]:
        model.add(inflow == right_count)
    else:
        model.add(inflow <= right_count)
