"""A transportation problem: flows that cover all needs, or the cuts that forbid it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

UNMET = 1e-7
"""A need is met up to this: HiGHS too leaves as much of a row of LP (5) broken."""
EMPTY = 1e-14
"""Less than this is no room in the residual graph of a flow."""


def transport(
    supply: Floats, need: Floats, room: Floats
) -> tuple[Floats | None, list[tuple[Index, Index]]]:
    """Flows g_ij within ``room`` that cover every need from the supplies, or cuts that forbid it.

    A greedy pass usually ends it; a maximum flow along shortest augmenting paths decides the rest.

    Parameters
    ----------
    supply
        ``float[n]``, what every source can give.
    need
        ``float[n]``, what every target must get.
    room
        ``float[n, n]``, the most from source to target.

    Returns
    -------
    tuple
        The flows and nothing, or None and one or two (S, J): the needs of J exceed the supplies
        outside S plus the room between S and J. Both are minimum cuts, the one nearest to the
        suppliers and the one nearest to the needs.
    """
    g = _greedy_transport(supply, need, room)
    left, short = supply - g.sum(axis=1), need - g.sum(axis=0)
    while (short > UNMET).any():
        if not _augment(g, left, short, room):
            return None, _cuts(g, left, short, room)
    return g, []


def _augment(g: Floats, left: Floats, short: Floats, room: Floats) -> bool:
    """Push flow along shortest paths in the residual graph, in place; False if there is none."""
    forward, backward = room - g > EMPTY, g > EMPTY
    senders, fresh = left > EMPTY, left > EMPTY
    reached = np.zeros(len(short), dtype=bool)
    sent_by, taken_from = np.full(len(left), -1), np.full(len(short), -1)
    while fresh.any():
        index = np.flatnonzero(fresh)
        new = forward[index].any(axis=0) & ~reached
        if not new.any():
            return False
        taken_from[new] = index[forward[np.ix_(index, new)].argmax(axis=0)]
        reached |= new
        if (new & (short > UNMET)).any():
            break
        index = np.flatnonzero(new)
        fresh = backward[:, index].any(axis=1) & ~senders
        sent_by[fresh] = index[backward[np.ix_(fresh, index)].argmax(axis=1)]
        senders |= fresh
    else:
        return False
    for j in np.flatnonzero(new & (short > UNMET)):
        path, i, most = [(int(taken_from[j]), int(j))], int(taken_from[j]), float(short[j])
        while sent_by[i] >= 0:
            k = int(sent_by[i])
            most = min(most, float(g[i, k]))
            i = int(taken_from[k])
            path.append((i, k))
        most = min(most, float(left[i]), *(float(room[at] - g[at]) for at in path))
        for step, at in enumerate(path):
            g[at] += most
            if step:
                # the sender of the step before takes back what this one brings instead
                g[path[step - 1][0], at[1]] -= most
        left[i] -= most
        short[j] -= most
    return True


def _cuts(g: Floats, left: Floats, short: Floats, room: Floats) -> list[tuple[Index, Index]]:
    """The minimum cuts of a maximum flow: from what the suppliers reach, and what reaches needs."""
    forward, backward = room - g > EMPTY, g > EMPTY
    senders: NDArray[np.bool_] = left > EMPTY
    while True:
        got = forward[senders].any(axis=0)
        more = np.logical_or(senders, backward[:, got].any(axis=1))
        if (more == senders).all():
            break
        senders = more
    cuts = [(np.flatnonzero(senders), np.flatnonzero(~got))]
    needs: NDArray[np.bool_] = short > UNMET
    while True:
        able = forward[:, needs].any(axis=1)
        more = np.logical_or(needs, backward[able].any(axis=0))
        if (more == needs).all():
            break
        needs = more
    other = np.flatnonzero(~able), np.flatnonzero(needs)
    if not all(np.array_equal(x, y) for x, y in zip(cuts[0], other, strict=True)):
        cuts.append(other)
    return cuts


def _greedy_transport(supply: Floats, need: Floats, room: Floats) -> Floats:
    """Serve receivers in the order of room less need, each from the best-filled suppliers."""
    left = supply.copy()
    g = np.zeros_like(room)
    for j in np.argsort(room.sum(axis=0) - need, kind="stable"):
        cap = np.minimum(room[:, j], left)
        total = float(cap.sum())
        if total <= 0 or need[j] <= 0:
            continue
        # a level on the suppliers: take from those with most left, down to an even remainder
        share = cap if total <= need[j] else _from_the_fullest(left, cap, float(need[j]))
        g[:, j] = share
        left -= share
    return g


def _from_the_fullest(left: Floats, cap: Floats, need: float) -> Floats:
    """Amounts ``clip(left - level, 0, cap)`` that sum to ``need``, below the sum of the caps."""
    levels = np.sort(np.concatenate([left, left - cap]))
    totals = np.clip(left[None, :] - levels[:, None], 0.0, cap).sum(axis=1)
    # totals fall with the level and are linear between neighbouring levels
    below = int(np.searchsorted(-totals, -need, side="left"))
    low, high = levels[max(below - 1, 0)], levels[below]
    drop = totals[max(below - 1, 0)] - totals[below]
    part = (totals[max(below - 1, 0)] - need) / drop if drop > 0 else 0.0
    share: Floats = np.clip(left - (low + (high - low) * part), 0.0, cap)
    return share
