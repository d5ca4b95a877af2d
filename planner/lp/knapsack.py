"""A bound on the samples per second at a given total rate: a fractional knapsack.

At the total rate H a peer lends the cap N_i to the reducers while it does not contribute and A_i
while it does (`planner.lp.capacity`). Contributing therefore weighs w_i = N_i - A_i against the
slack sum_i N_i - H, and is worth s_i. Dropping the pair limits between two rates, and counting
``fewest`` contributors in the download caps where there may be more, only helps, so the knapsack's
LP value bounds sum_i s_i c_i. It is solved by taking contributors in the order of s_i / w_i.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import Limits

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NOBODY = -np.inf


class Knapsack(NamedTuple):
    """The relaxation's answer: no plan at this rate computes more than ``samples_per_s``."""

    samples_per_s: float
    computes: Bools


def knapsack(limits: Limits, total: float, fewest: int) -> Knapsack:
    """The most samples per second beside a total rate of ``total`` bytes per second."""
    n = limits.n
    nobody = Knapsack(NOBODY, np.zeros(n, dtype=bool))
    if limits.download.min() < total:
        return nobody
    idle, busy = split_caps(limits, total, fewest)
    able = limits.problem.contributors & (limits.upload >= total)
    if limits.links is not None and limits.smallest_link < total:
        # contributor i sends every r_j through its own links: sum_j r_j <= sum_j min(cap_j, t_ij)
        widest = np.maximum(idle, busy)
        through = np.minimum(limits.links, widest[None, :])
        np.fill_diagonal(through, busy)
        able &= through.sum(axis=1) >= total * (1 - 1e-12)
    slack = float(idle.sum()) - total
    weight = np.where(able, idle - busy, 0.0)
    value = limits.problem.samples_per_s
    free = able & (weight <= 0)
    slack -= float(weight[free].sum())
    if slack < -1e-12 * total or int(able.sum()) < fewest:
        return nobody
    costly = np.flatnonzero(able & (weight > 0))
    order = costly[np.argsort(-value[costly] / weight[costly], kind="stable")]
    filled = np.cumsum(weight[order])
    whole = int(np.searchsorted(filled, slack, side="right"))
    computes = free.copy()
    computes[order[:whole]] = True
    samples = float(value[computes].sum())
    if whole < len(order):
        used = float(filled[whole - 1]) if whole else 0.0
        i = order[whole]
        samples += float(value[i] * max(slack - used, 0.0) / weight[i])
    return Knapsack(samples * (1 + 1e-12), computes)


def split_caps(
    limits: Limits, total: float, fewest: int, highest: float | None = None
) -> tuple[Floats, Floats]:
    """(N_i, A_i): caps of r_i at ``total`` without and with contributing, for ``fewest`` of them.

    A_i is 0 where the upload does not even carry the peer's own gradients. With ``highest`` the
    caps hold for every total rate from ``total`` to there.

    Returns
    -------
    tuple of ndarray
        ``float[n]`` each, bytes per second.
    """
    n = limits.n
    room = limits.download - total
    idle = np.minimum(limits.upload / (n - 1), room / (fewest - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        spare = limits.upload - total
        busy = spare / (n - 2) if n > 2 else np.where(spare >= 0, np.inf, 0.0)
        if fewest > 2:
            busy = np.minimum(busy, room / (fewest - 2))
    top = np.minimum(limits.largest_rate, total if highest is None else highest)
    return (
        np.clip(np.minimum(idle, top), 0.0, None),
        np.clip(np.minimum(busy, top), 0.0, None),
    )
