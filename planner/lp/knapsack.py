"""Upper bound on the samples per second at a given total rate: a fractional knapsack.

At the total rate R the cap on r_i is N_i if peer i does not contribute and A_i if it does
(`planner.lp.capacity`). Contributing therefore has weight w_i = N_i - A_i in a knapsack of capacity
sum_i N_i - R, and value s_i. Ignoring the pair limits between two rates, and assuming only
``min_contributors`` contributors in the download caps, are relaxations, so the knapsack's LP value
bounds sum_i s_i c_i. It is solved by taking contributors in the order of s_i / w_i.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import BandwidthLimits

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NO_SET = -np.inf


class Knapsack(NamedTuple):
    """Relaxation: no plan at this rate computes more than ``samples_per_s``."""

    samples_per_s: float
    computes: Bools


def knapsack(limits: BandwidthLimits, total: float, min_contributors: int) -> Knapsack:
    """Upper bound on the samples per second at a total rate of ``total`` bytes per second."""
    n = limits.n
    no_set = Knapsack(NO_SET, np.zeros(n, dtype=bool))
    if limits.download.min() < total:
        return no_set
    cap_idle, cap_contributing = caps_by_role(limits, total, min_contributors)
    eligible = limits.problem.contributors & (limits.upload >= total)
    if limits.links is not None and limits.smallest_link < total:
        # contributor i sends every r_j through its own links: sum_j r_j <= sum_j min(cap_j, t_ij)
        max_caps = np.maximum(cap_idle, cap_contributing)
        through = np.minimum(limits.links, max_caps[None, :])
        np.fill_diagonal(through, cap_contributing)
        eligible &= through.sum(axis=1) >= total * (1 - 1e-12)
    capacity = float(cap_idle.sum()) - total
    weight = np.where(eligible, cap_idle - cap_contributing, 0.0)
    value = limits.problem.samples_per_s
    free = eligible & (weight <= 0)
    capacity -= float(weight[free].sum())
    if capacity < -1e-12 * total or int(eligible.sum()) < min_contributors:
        return no_set
    costly = np.flatnonzero(eligible & (weight > 0))
    order = costly[np.argsort(-value[costly] / weight[costly], kind="stable")]
    cumulative_weight = np.cumsum(weight[order])
    num_whole = int(np.searchsorted(cumulative_weight, capacity, side="right"))
    computes = free.copy()
    computes[order[:num_whole]] = True
    samples = float(value[computes].sum())
    if num_whole < len(order):
        used = float(cumulative_weight[num_whole - 1]) if num_whole else 0.0
        i = order[num_whole]
        samples += float(value[i] * max(capacity - used, 0.0) / weight[i])
    return Knapsack(samples * (1 + 1e-12), computes)


def caps_by_role(
    limits: BandwidthLimits, total: float, min_contributors: int, max_total: float | None = None
) -> tuple[Floats, Floats]:
    """Caps (N_i, A_i) of r_i at ``total`` without and with contributing.

    Download caps assume ``min_contributors`` contributors. A_i is 0 if the upload cannot carry the
    peer's own gradients. With ``max_total`` the caps hold for all total rates up to it.

    Returns
    -------
    tuple of ndarray
        ``float[n]`` each, bytes per second.
    """
    n = limits.n
    room = limits.download - total
    cap_idle = np.minimum(limits.upload / (n - 1), room / (min_contributors - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        spare = limits.upload - total
        cap_contributing = spare / (n - 2) if n > 2 else np.where(spare >= 0, np.inf, 0.0)
        if min_contributors > 2:
            cap_contributing = np.minimum(cap_contributing, room / (min_contributors - 2))
    max_cap = np.minimum(limits.max_reducer_rate, total if max_total is None else max_total)
    return (
        np.clip(np.minimum(cap_idle, max_cap), 0.0, None),
        np.clip(np.minimum(cap_contributing, max_cap), 0.0, None),
    )
