"""The cheapest split of the layers into stages, where a stage may limit the later ones.

A shortest path over the layers and a level. Every stage has a level of its own and a highest level
that it allows before it. The level after a stage is the higher of its own and the one before it.
"""

from __future__ import annotations

from planner.search.arrays import Floats, Floats2, Ints, Ints2
from planner.search.compiled import entry


@entry
def fill_cheapest(
    start: Ints,
    stop: Ints,
    own: Ints,
    most: Ints,
    price: Floats,
    boundary_levels: Ints,
    least: Floats2,
    last: Ints2,
    before: Ints2,
) -> None:
    """Fill the tables of the cheapest splits.

    Parameters
    ----------
    start, stop
        ``int[S]``: layers of stages, in order of ``stop``.
    own, most, price
        ``[S]``: own level, highest level before, and price.
    boundary_levels
        ``int[L + 1]``: what every boundary adds to the level after it.
    least
        ``float[L + 1, K]``: price of the layers up to a boundary, with a level of at most k after
        it; the highest level stands for all above it. On entry 0 in the first row, else infinite.
    last, before
        ``int[L + 1, K]``: the last stage of that split, and the level before it.
    """
    levels, k = least.shape[1], 0
    for boundary in range(1, len(least)):
        while k < len(start) and stop[k] == boundary:
            for level in range(own[k], max(own[k], most[k]) + 1):
                level_before = min(level, most[k])
                total = price[k] + least[start[k], level_before]
                after = min(level + boundary_levels[boundary], levels - 1)
                if total < least[boundary, after]:
                    least[boundary, after] = total
                    last[boundary, after] = k
                    before[boundary, after] = level_before
            k += 1
        for level in range(1, levels):
            if least[boundary, level - 1] < least[boundary, level]:
                least[boundary, level] = least[boundary, level - 1]
                last[boundary, level] = last[boundary, level - 1]
                before[boundary, level] = before[boundary, level - 1]
