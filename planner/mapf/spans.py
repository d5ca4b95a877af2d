"""What bounds that count visits or messages have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.search.arrays import Floats


def least_ways(arrays: PathArrays, starts: Sequence[int]) -> tuple[Floats, Floats]:
    """Least seconds before F can begin on each device, and after B has ended there.

    Over any devices on the way: links need not satisfy the triangle inequality.
    """
    forward, backward, hop = arrays.forward, arrays.backward, arrays.hop
    near = (forward[starts, None] + hop[starts]).min(axis=0)
    back = (hop[:, starts] + backward[starts]).min(axis=1)
    for _ in range(arrays.path_stages - 2):
        near = np.minimum(near, (near[:, None] + forward[:, None] + hop).min(axis=0))
        back = np.minimum(back, (hop + backward + back).min(axis=1))
    return near, back


def least_span(fits: Callable[[float], bool]) -> float:
    """The least span that fits, from below, found by bisection; 0 if none does."""
    low, high = 0.0, 1.0
    while not fits(high):
        high *= 2
        if high > 1e15:
            return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low
