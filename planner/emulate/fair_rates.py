"""Max-min fair rates by progressive filling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.emulate.links import EmulatedLinks
from planner.search.compiled import at_first_use

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
ROUNDING = 1e-9


@at_first_use
def fair_rates(links: EmulatedLinks, active: Ints, room: Floats, load: Ints, rate: Floats) -> None:
    """Rates of the active pairs: all rise together until a limit of theirs is reached.

    Parameters
    ----------
    rate
        ``float[pairs]``, overwritten at ``active``: bytes per second.
    """
    room[:] = links.capacity
    load[:] = 0
    for pair in active:
        rate[pair] = -1.0
        for limit in links.uses[pair]:
            if limit >= 0:
                load[limit] += 1
    left = len(active)
    level = 0.0
    while left > 0:
        lowest = np.inf
        for limit in range(len(room)):
            if load[limit] > 0:
                lowest = min(lowest, room[limit] / load[limit])
        for pair in active:
            if rate[pair] < 0.0:
                lowest = min(lowest, links.rate[pair])
        level = max(level, lowest)
        reached = level * (1.0 + ROUNDING)
        # which limits are full is settled before any pair's rate is: else the first ones frozen
        # would make room on paper
        for limit in range(len(room)):
            if load[limit] > 0 and room[limit] <= reached * load[limit]:
                load[limit] = -load[limit]
        for pair in active:
            if rate[pair] >= 0.0:
                continue
            full = links.rate[pair] <= reached
            for limit in links.uses[pair]:
                full = full or (limit >= 0 and load[limit] < 0)
            if not full:
                continue
            rate[pair] = min(level, links.rate[pair])
            left -= 1
            for limit in links.uses[pair]:
                if limit >= 0:
                    room[limit] -= rate[pair]
                    load[limit] -= 1 if load[limit] > 0 else -1
