"""Transportation problem: flows that cover all demands, or minimum cuts that prevent it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

TOLERANCE = 1e-7
"""Tolerance of a demand, the same as that of HiGHS for a row of LP (5)."""
MIN_RESIDUAL = 1e-14
"""Residual capacities below this count as 0."""


def solve_transportation(
    supply: Floats, demand: Floats, capacity: Floats
) -> tuple[Floats | None, list[tuple[Index, Index]]]:
    """Flows g_ij within ``capacity`` that cover every demand, or cuts that prove there are none.

    A greedy heuristic usually succeeds; otherwise a maximum flow by shortest augmenting paths.

    Parameters
    ----------
    supply
        ``float[n]``, supply of every source.
    demand
        ``float[n]``, demand of every target.
    capacity
        ``float[n, n]``, maximum flow from source to target.

    Returns
    -------
    tuple
        The flows and no cuts, or None and one or two cuts (S, J): the demands of J exceed the
        supplies outside S plus the capacity between S and J. Both are minimum cuts, the one closest
        to the sources and the one closest to the targets.
    """
    g = _greedy_transport(supply, demand, capacity)
    remaining, unmet = supply - g.sum(axis=1), demand - g.sum(axis=0)
    while (unmet > TOLERANCE).any():
        if not _augment(g, remaining, unmet, capacity):
            return None, _cuts(g, remaining, unmet, capacity)
    return g, []


def _augment(g: Floats, remaining: Floats, unmet: Floats, capacity: Floats) -> bool:
    """Push flow along shortest paths in the residual graph, in place; False if there is none."""
    forward, backward = capacity - g > MIN_RESIDUAL, g > MIN_RESIDUAL
    senders, fresh = remaining > MIN_RESIDUAL, remaining > MIN_RESIDUAL
    reached = np.zeros(len(unmet), dtype=bool)
    sent_by, taken_from = np.full(len(remaining), -1), np.full(len(unmet), -1)
    while fresh.any():
        index = np.flatnonzero(fresh)
        new = forward[index].any(axis=0) & ~reached
        if not new.any():
            return False
        taken_from[new] = index[forward[np.ix_(index, new)].argmax(axis=0)]
        reached |= new
        if (new & (unmet > TOLERANCE)).any():
            break
        index = np.flatnonzero(new)
        fresh = backward[:, index].any(axis=1) & ~senders
        sent_by[fresh] = index[backward[np.ix_(fresh, index)].argmax(axis=1)]
        senders |= fresh
    else:
        return False
    for j in np.flatnonzero(new & (unmet > TOLERANCE)):
        path, i, amount = [(int(taken_from[j]), int(j))], int(taken_from[j]), float(unmet[j])
        while sent_by[i] >= 0:
            k = int(sent_by[i])
            amount = min(amount, float(g[i, k]))
            i = int(taken_from[k])
            path.append((i, k))
        amount = min(amount, float(remaining[i]), *(float(capacity[at] - g[at]) for at in path))
        for step, at in enumerate(path):
            g[at] += amount
            if step:
                # reduce the flow on the backward edge of the augmenting path
                g[path[step - 1][0], at[1]] -= amount
        remaining[i] -= amount
        unmet[j] -= amount
    return True


def _cuts(
    g: Floats, remaining: Floats, unmet: Floats, capacity: Floats
) -> list[tuple[Index, Index]]:
    """Minimum cuts of a maximum flow: by reachability from sources, and to unmet targets."""
    forward, backward = capacity - g > MIN_RESIDUAL, g > MIN_RESIDUAL
    senders: NDArray[np.bool_] = remaining > MIN_RESIDUAL
    while True:
        got = forward[senders].any(axis=0)
        grown = np.logical_or(senders, backward[:, got].any(axis=1))
        if (grown == senders).all():
            break
        senders = grown
    cuts = [(np.flatnonzero(senders), np.flatnonzero(~got))]
    needs: NDArray[np.bool_] = unmet > TOLERANCE
    while True:
        able = forward[:, needs].any(axis=1)
        grown = np.logical_or(needs, backward[able].any(axis=0))
        if (grown == needs).all():
            break
        needs = grown
    other = np.flatnonzero(~able), np.flatnonzero(needs)
    if not all(np.array_equal(x, y) for x, y in zip(cuts[0], other, strict=True)):
        cuts.append(other)
    return cuts


def _greedy_transport(supply: Floats, demand: Floats, capacity: Floats) -> Floats:
    """Serve targets in ascending order of capacity minus demand, from the largest supplies."""
    remaining = supply.copy()
    g = np.zeros_like(capacity)
    for j in np.argsort(capacity.sum(axis=0) - demand, kind="stable"):
        cap = np.minimum(capacity[:, j], remaining)
        total = float(cap.sum())
        if total <= 0 or demand[j] <= 0:
            continue
        # take from the sources with the largest remaining supply, down to a common level
        share = cap if total <= demand[j] else _take_from_largest(remaining, cap, float(demand[j]))
        g[:, j] = share
        remaining -= share
    return g


def _take_from_largest(remaining: Floats, cap: Floats, demand: float) -> Floats:
    """Amounts ``clip(remaining - level, 0, cap)`` that sum to ``demand``."""
    levels = np.sort(np.concatenate([remaining, remaining - cap]))
    totals = np.clip(remaining[None, :] - levels[:, None], 0.0, cap).sum(axis=1)
    # totals decrease with the level and are linear between neighbouring levels
    below = int(np.searchsorted(-totals, -demand, side="left"))
    low, high = levels[max(below - 1, 0)], levels[below]
    drop = totals[max(below - 1, 0)] - totals[below]
    fraction = (totals[max(below - 1, 0)] - demand) / drop if drop > 0 else 0.0
    share: Floats = np.clip(remaining - (low + (high - low) * fraction), 0.0, cap)
    return share
