"""Numbers that problems are made of: whole ones, and one for all or one per item."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.problems.error import ProblemError


def per_item(field: str, value: ArrayLike, count: int, item: str) -> NDArray[np.float64]:
    """An array of ``count`` values, each ``>= 0`` and finite, from a scalar or an array.

    Parameters
    ----------
    item
        What an entry belongs to, for the message: "peer", "device", "stage".
    """
    try:
        array = np.array(np.broadcast_to(np.asarray(value, dtype=np.float64), (count,)))
    except (TypeError, ValueError):
        raise ProblemError(
            f"{field} must be one number or {count} of them, found shape {np.shape(value)}"
        ) from None
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(bad):
        raise ProblemError(
            f"{field} of {item} {bad[0]} is {array[bad[0]]:g}; it must be >= 0 and finite"
        )
    return array + 0.0


def whole(field: str, value: Any) -> int:
    """A whole number, refused if it is not one."""
    try:
        return operator.index(value)
    except TypeError:
        raise ProblemError(f"{field} must be a whole number, found {value!r}") from None
