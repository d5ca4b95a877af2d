"""The knapsack of `planner.lp.knapsack` with a cardinality constraint on the contributors.

If all uploads are similar, all peers have nearly the same weight, and the knapsack is in effect a
limit on the number of contributors k. Its LP value then exceeds the optimum by a fraction of a
contributor, a gap that MILP solvers close slowly. Here k lies in an interval: caps are those of its
lower end, at most its upper end contributes, and by Lagrangian relaxation

    S <= min_{lambda >= 0}  sum of the k largest max(0, s_i - lambda w_i) + lambda * capacity,

which for a single k equals the LP with both rows. Peers whose reduced value at the optimal lambda
is near the k-th largest one change the objective least: exchanging one or two of them for one or
two others yields a set close to the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import BandwidthLimits
from planner.lp.knapsack import NO_SET, caps_by_role

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Index = NDArray[np.int64]

MAX_SINGLES = 150
MAX_PAIRED = 36
"""Number of peers near the critical value that are exchanged singly, and in pairs."""
HALVINGS = 45


class CardinalityKnapsack(NamedTuple):
    """The relaxation at one total rate and for ``min_contributors <= k <= max_contributors``.

    Attributes
    ----------
    samples_per_s
        Upper bound; -inf if no set of such size attains the rate.
    computes
        A set of at most ``max_contributors`` peers that satisfies the caps at ``min_contributors``.
    reduced_value
        s_i - lambda w_i, minus its k-th largest value; -inf for peers that cannot contribute.
    weight, capacity
        w_i, and the limit on their sum, in bytes per second.
    """

    samples_per_s: float
    computes: Bools
    reduced_value: Floats
    weight: Floats
    capacity: float


def cardinality_knapsack(
    limits: BandwidthLimits, total: float, min_contributors: int, max_contributors: int
) -> CardinalityKnapsack:
    """Solve the relaxation; see the module."""
    value = limits.problem.samples_per_s
    eligible = limits.problem.contributors & (limits.upload >= total)
    cap_idle, cap_contributing = caps_by_role(limits, total, min_contributors)
    weight, capacity = cap_idle - cap_contributing, float(cap_idle.sum()) - total
    peers = np.flatnonzero(eligible)
    no_set = CardinalityKnapsack(
        NO_SET, np.zeros(limits.n, dtype=bool), np.zeros(limits.n), weight, capacity
    )
    if len(peers) < min_contributors or limits.download.min() < total:
        return no_set
    if float(np.sort(weight[peers])[:min_contributors].sum()) > capacity + 1e-12 * total:
        return no_set
    s, w, k = value[peers], weight[peers], min(max_contributors, len(peers))

    def relaxed_at(multiplier: float) -> tuple[float, Index]:
        reduced_value = s - multiplier * w
        order = np.argsort(-reduced_value, kind="stable")[:k]
        order = order[reduced_value[order] > 0]
        return float(reduced_value[order].sum()) + multiplier * capacity, order

    bound, selected = relaxed_at(0.0)
    multiplier = 0.0
    if float(w[selected].sum()) > capacity:
        low, high = 0.0, float(s.max() / max(float(np.abs(w).max()), 1e-300))
        for _ in range(200):
            value_here, selected = relaxed_at(high)
            bound = min(bound, value_here)
            if float(w[selected].sum()) <= capacity:
                break
            low, high = high, 2 * high
        for _ in range(HALVINGS):
            multiplier = (low + high) / 2
            value_here, selected_here = relaxed_at(multiplier)
            bound = min(bound, value_here)
            if float(w[selected_here].sum()) <= capacity:
                high, selected = multiplier, selected_here
            else:
                low = multiplier
        multiplier = high
    computes = np.zeros(limits.n, dtype=bool)
    computes[peers[selected]] = True
    reduced_value = np.full(limits.n, -np.inf)
    reduced_value[peers] = s - multiplier * w
    critical_value = float(reduced_value[computes].min()) if computes.any() else 0.0
    return CardinalityKnapsack(
        bound * (1 + 1e-12), computes, reduced_value - critical_value, weight, capacity
    )


def feasible_sizes(
    limits: BandwidthLimits,
    total: float,
    required_samples: float,
    min_contributors: int,
    max_contributors: int,
) -> Iterator[tuple[CardinalityKnapsack, int]]:
    """Yield every k at which ``required_samples`` is not excluded, with its relaxation.

    If nothing is yielded, no set of ``min_contributors`` to ``max_contributors`` peers computes
    ``required_samples`` per second at this rate.

    Yields
    ------
    tuple[CardinalityKnapsack, int]
        The relaxation and k.
    """
    intervals = [(min_contributors, max_contributors)]
    while intervals:
        low, high = intervals.pop()
        knapsack = cardinality_knapsack(limits, total, low, high)
        if knapsack.samples_per_s < required_samples:
            continue
        if low == high:
            yield knapsack, low
        else:
            middle = (low + high) // 2
            intervals += [(low, middle), (middle + 1, high)]


def exchange_peers(
    limits: BandwidthLimits,
    knapsack: CardinalityKnapsack,
    required_samples: float,
    max_contributors: int,
) -> Bools | None:
    """A set near the relaxation's that computes ``required_samples`` within its caps, or None.

    Returns
    -------
    Bools or None
        ``bool[n]``.
    """
    value, weight, chosen = limits.problem.samples_per_s, knapsack.weight, knapsack.computes
    missing = required_samples - float(value[chosen].sum())
    if missing <= 0:
        return chosen
    remaining_capacity = knapsack.capacity - float(weight[chosen].sum())
    candidates = np.flatnonzero(np.isfinite(knapsack.reduced_value) & ~chosen)
    members = np.flatnonzero(chosen)
    distance = np.abs(knapsack.reduced_value)
    leaving, num_leaving = _combinations(members[np.argsort(distance[members], kind="stable")])
    entering, num_entering = _combinations(
        candidates[np.argsort(distance[candidates], kind="stable")]
    )
    value_change = _sums(value, entering)[:, None] - _sums(value, leaving)[None, :]
    weight_change = _sums(weight, entering)[:, None] - _sums(weight, leaving)[None, :]
    size_change = num_entering[:, None] - num_leaving[None, :]
    fits = (
        (value_change >= missing)
        & (weight_change <= remaining_capacity)
        & (size_change <= max_contributors - len(members))
    )
    if not fits.any():
        return None
    # of all feasible exchanges, the one that leaves the most capacity
    i, j = np.unravel_index(int(np.argmin(np.where(fits, weight_change, np.inf))), fits.shape)
    result = chosen.copy()
    result[leaving[j][leaving[j] >= 0]] = False
    result[entering[i][entering[i] >= 0]] = True
    return result


def _combinations(nearest: Index) -> tuple[Index, Index]:
    """Zero, one or two of the nearest peers, as rows of two indices padded by -1; and sizes."""
    singles = nearest[:MAX_SINGLES]
    first, second = np.triu_indices(min(len(nearest), MAX_PAIRED), 1)
    rows = np.concatenate(
        [
            np.full((1, 2), -1, dtype=np.int64),
            np.column_stack([singles, np.full(len(singles), -1)]),
            np.column_stack([nearest[first], nearest[second]]),
        ]
    )
    return rows, (rows >= 0).sum(axis=1)


def _sums(values: Floats, rows: Index) -> Floats:
    total: Floats = np.append(values, 0.0)[rows].sum(axis=1)
    return total
