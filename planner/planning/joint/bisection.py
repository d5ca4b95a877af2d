"""Bisection for the shortest step that is not excluded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

HALVINGS, DOUBLINGS = 30, 200


def least_feasible_s(
    suffice: Callable[[float], bool], scale_s: float, halvings: int = HALVINGS
) -> float:
    """Smallest seconds at which devices suffice, rounded down; infinite if they never do.

    ``scale_s`` is the magnitude of a step.
    """
    high = scale_s
    for _ in range(DOUBLINGS):
        if suffice(high):
            break
        high *= 2
    else:
        return np.inf
    low = high / 2 if high > scale_s else 0.0
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (low, middle) if suffice(middle) else (middle, high)
    return low
