"""Entry and return times of devices, shared by bounds that count visits or messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.search.arrays import Floats


def entry_and_return_s(arrays: PathArrays, starts: Sequence[int]) -> tuple[Floats, Floats]:
    """Least seconds before F can start on each device, and after B has ended there.

    Paths may pass any devices: transfers need not satisfy the triangle inequality.
    """
    forward, backward, transfer = arrays.forward, arrays.backward, arrays.transfer
    entry_s = (forward[starts, None] + transfer[starts]).min(axis=0)
    return_s = (transfer[:, starts] + backward[starts]).min(axis=1)
    for _ in range(arrays.path_stages - 2):
        entry_s = np.minimum(entry_s, (entry_s[:, None] + forward[:, None] + transfer).min(axis=0))
        return_s = np.minimum(return_s, (transfer + backward + return_s).min(axis=1))
    return entry_s, return_s


def min_feasible_span(fits: Callable[[float], bool]) -> float:
    """A lower bound on the least feasible span, by bisection; 0 if no span is feasible."""
    low, high = 0.0, 1.0
    while not fits(high):
        high *= 2
        if high > 1e15:
            return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low
