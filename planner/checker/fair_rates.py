"""Max-min fair rates on small arrays, compiled where numba is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
EQUAL = 1e-9


def fair_rates(most: Floats, lines: Ints, room: Floats) -> Floats:
    """All rates rise together until a pair has its most or a line that it uses is full.

    Parameters
    ----------
    most
        ``float[P]``: what each pair could have by itself.
    lines
        ``int[P, 4]``: lines that it uses, -1 for none.
    room
        ``float[L]``: of every line.

    Returns
    -------
    ndarray
        ``float[P]``.
    """
    return np.asarray(_filling()(most, lines, room))


@cache
def _filling() -> Callable[..., Any]:
    try:
        from numba import njit  # takes a while to load, so not before it is needed
    except ImportError:
        return _fill
    compiled: Callable[..., Any] = njit(cache=True)(_fill)
    return compiled


def _fill(most: Any, lines: Any, room: Any) -> Any:
    pairs, width = lines.shape
    rates = np.zeros(pairs)
    rising = np.ones(pairs, dtype=np.bool_)
    left = room.copy()
    waiting, level = pairs, 0.0
    while waiting > 0:
        users = np.zeros(len(room))
        top = np.inf
        for p in range(pairs):
            if rising[p]:
                top = min(top, most[p])
                for k in range(width):
                    if lines[p, k] >= 0:
                        users[lines[p, k]] += 1.0
        for r in range(len(room)):
            if users[r] > 0:
                top = min(top, left[r] / users[r])
        level = max(level, top)
        full = np.zeros(len(room), dtype=np.bool_)
        for r in range(len(room)):
            full[r] = users[r] > 0 and left[r] / users[r] <= level * (1 + EQUAL)
        for p in range(pairs):
            stops = rising[p] and most[p] <= level * (1 + EQUAL)
            for k in range(width):
                stops = stops or (rising[p] and lines[p, k] >= 0 and full[lines[p, k]])
            if stops:
                rising[p] = False
                waiting -= 1
                rates[p] = min(level, most[p])
                for k in range(width):
                    if lines[p, k] >= 0:
                        left[lines[p, k]] -= rates[p]
    return rates
