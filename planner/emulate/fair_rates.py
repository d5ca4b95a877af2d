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
    """Compute max-min fair rates: all rates rise together until one of their limits is reached.

    Parameters
    ----------
    links
        The network.
    active
        Indices of the pairs that send.
    room, load
        Work space for each limit: remaining capacity, and number of pairs that share it.
    rate
        ``float[pairs]``, bytes per second; overwritten at ``active``.
    """
    room[:] = links.capacity
    load[:] = 0
    for pair in active:
        rate[pair] = -1.0
        for limit in links.uses[pair]:
            if limit >= 0:
                load[limit] += 1
    unfrozen = len(active)
    level = 0.0
    while unfrozen > 0:
        lowest = np.inf
        for limit in range(len(room)):
            if load[limit] > 0:
                lowest = min(lowest, room[limit] / load[limit])
        for pair in active:
            if rate[pair] < 0.0:
                lowest = min(lowest, links.rate[pair])
        level = max(level, lowest)
        reached = level * (1.0 + ROUNDING)
        # find all full limits before any rate is fixed: fixing one would change the others' room
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
            unfrozen -= 1
            for limit in links.uses[pair]:
                if limit >= 0:
                    room[limit] -= rate[pair]
                    load[limit] -= 1 if load[limit] > 0 else -1
