"""The knapsack of `planner.lp.knapsack` with the number of contributors k counted.

Where all uploads are alike, contributing weighs nearly the same for everyone, and the knapsack is a
limit on k in disguise. Its LP value then takes a fraction of a contributor too much, which no
mixed-integer solver finds quickly. Here k lies in an interval: caps are taken at its lower end, at
most its upper end contributes, and

    S <= min_{lambda >= 0}  sum of the k largest max(0, s_i - lambda w_i) + lambda * slack,

which intervals of a single k make as tight as the LP with both rows. Near that lambda and the k-th
largest value lie the peers whose exchange changes least: exchanging one or two of them for one or
two others brings a set close to the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import Limits
from planner.lp.knapsack import NOBODY, split_caps

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Index = NDArray[np.int64]

SINGLES = 150
PAIRED = 36
"""How many peers next to the critical value are exchanged alone, and in pairs."""
HALVINGS = 45


class SizedKnapsack(NamedTuple):
    """The relaxation at one total rate and for ``fewest <= k <= most``.

    Attributes
    ----------
    samples_per_s
        Upper bound; -inf if no set of such size attains the rate.
    computes
        A set that fits the caps at ``fewest``; at most ``most`` peers.
    merit
        s_i - lambda w_i, less its k-th largest value; -inf for peers that cannot contribute.
    weight, slack
        w_i, and what their sum may be, in bytes per second.
    """

    samples_per_s: float
    computes: Bools
    merit: Floats
    weight: Floats
    slack: float


def sized_knapsack(limits: Limits, total: float, fewest: int, most: int) -> SizedKnapsack:
    """The relaxation; see the module."""
    value = limits.problem.samples_per_s
    able = limits.problem.contributors & (limits.upload >= total)
    idle, busy = split_caps(limits, total, fewest)
    weight, slack = idle - busy, float(idle.sum()) - total
    peers = np.flatnonzero(able)
    nobody = SizedKnapsack(
        NOBODY, np.zeros(limits.n, dtype=bool), np.zeros(limits.n), weight, slack
    )
    if len(peers) < fewest or limits.download.min() < total:
        return nobody
    if float(np.sort(weight[peers])[:fewest].sum()) > slack + 1e-12 * total:
        return nobody
    s, w, k = value[peers], weight[peers], min(most, len(peers))

    def best(price: float) -> tuple[float, Index]:
        merit = s - price * w
        order = np.argsort(-merit, kind="stable")[:k]
        order = order[merit[order] > 0]
        return float(merit[order].sum()) + price * slack, order

    bound, taken = best(0.0)
    price = 0.0
    if float(w[taken].sum()) > slack:
        low, high = 0.0, float(s.max() / max(float(np.abs(w).max()), 1e-300))
        for _ in range(200):
            value_here, taken = best(high)
            bound = min(bound, value_here)
            if float(w[taken].sum()) <= slack:
                break
            low, high = high, 2 * high
        for _ in range(HALVINGS):
            price = (low + high) / 2
            value_here, trial = best(price)
            bound = min(bound, value_here)
            if float(w[trial].sum()) <= slack:
                high, taken = price, trial
            else:
                low = price
        price = high
    computes = np.zeros(limits.n, dtype=bool)
    computes[peers[taken]] = True
    merit = np.full(limits.n, -np.inf)
    merit[peers] = s - price * w
    border = float(merit[computes].min()) if computes.any() else 0.0
    return SizedKnapsack(bound * (1 + 1e-12), computes, merit - border, weight, slack)


def attainable(
    limits: Limits, total: float, need: float, fewest: int, most: int
) -> Iterator[tuple[SizedKnapsack, int]]:
    """Every k at which ``need`` samples per second are not excluded, and its relaxation.

    Nothing: no set of ``fewest`` to ``most`` contributors computes ``need`` at this rate.

    Yields
    ------
    tuple[SizedKnapsack, int]
        The relaxation and k.
    """
    waiting = [(fewest, most)]
    while waiting:
        low, high = waiting.pop()
        found = sized_knapsack(limits, total, low, high)
        if found.samples_per_s < need:
            continue
        if low == high:
            yield found, low
        else:
            middle = (low + high) // 2
            waiting += [(low, middle), (middle + 1, high)]


def exchange(limits: Limits, found: SizedKnapsack, need: float, most: int) -> Bools | None:
    """A set near the relaxation's that computes ``need`` and fits its caps, or None.

    Returns
    -------
    Bools or None
        ``bool[n]``.
    """
    value, weight, chosen = limits.problem.samples_per_s, found.weight, found.computes
    short = need - float(value[chosen].sum())
    if short <= 0:
        return chosen
    room = found.slack - float(weight[chosen].sum())
    spare = np.flatnonzero(np.isfinite(found.merit) & ~chosen)
    held = np.flatnonzero(chosen)
    distance = np.abs(found.merit)
    leave, gone = _combinations(held[np.argsort(distance[held], kind="stable")])
    enter, come = _combinations(spare[np.argsort(distance[spare], kind="stable")])
    gain = _sums(value, enter)[:, None] - _sums(value, leave)[None, :]
    load = _sums(weight, enter)[:, None] - _sums(weight, leave)[None, :]
    count = come[:, None] - gone[None, :]
    fits = (gain >= short) & (load <= room) & (count <= most - len(held))
    if not fits.any():
        return None
    # of all that fit the one that leaves most room
    i, j = np.unravel_index(int(np.argmin(np.where(fits, load, np.inf))), fits.shape)
    result = chosen.copy()
    result[leave[j][leave[j] >= 0]] = False
    result[enter[i][enter[i] >= 0]] = True
    return result


def _combinations(nearest: Index) -> tuple[Index, Index]:
    """None, one or two of the nearest peers, as rows of two indices padded by -1; and sizes."""
    one = nearest[:SINGLES]
    first, second = np.triu_indices(min(len(nearest), PAIRED), 1)
    rows = np.concatenate(
        [
            np.full((1, 2), -1, dtype=np.int64),
            np.column_stack([one, np.full(len(one), -1)]),
            np.column_stack([nearest[first], nearest[second]]),
        ]
    )
    return rows, (rows >= 0).sum(axis=1)


def _sums(values: Floats, rows: Index) -> Floats:
    total: Floats = np.append(values, 0.0)[rows].sum(axis=1)
    return total
