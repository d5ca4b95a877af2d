"""Reducer rates with aggregators, as the simulator counts them.

All trainers contribute and get every sum back; an aggregator gives nothing and gets nothing back.
(In DeDLOC's problem a peer that does not contribute gets the sums too.) With T the m trainers, R
the sum of all rates and u, d, t limits of uploads, downloads and pairs:

    R + (m - 2) r_i <= u_i, d_i         a trainer i: shares to others, its own sums to them
    m r_h <= u_h, d_h                   an aggregator h
    r_i + r_k <= t_ik                   two trainers
    r_h <= t_ih, t_hi                   a trainer and an aggregator
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FIT = 1e-9
"""Excess over a pair's limit that counts as rounding."""

Floats = NDArray[np.float64]


def helped_rates(
    upload: Floats,
    download: Floats,
    link: Floats,
    helps: NDArray[np.bool_],
    sums: NDArray[np.bool_],
) -> Floats:
    """The rates r_i with the largest sum R.

    Parameters
    ----------
    upload, download
        ``float[n]``, bytes per second, infinite for no limit.
    link
        ``float[n, n]``, bytes per second of ordered pairs; the diagonal is ignored.
    helps
        ``bool[n]``: the aggregators; the others train, and there are at least two of them.
    sums
        ``bool[n]``: who can sum.

    Returns
    -------
    ndarray
        ``float[n]``, bytes per second; all 0 where nothing is feasible.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, vstack

    n, trains = len(upload), np.flatnonzero(~helps)
    m = len(trains)
    both = np.where(np.eye(n, dtype=bool), np.inf, np.minimum(link, link.T))
    line = np.minimum(upload, download)
    # R is at most the slowest trainer's line
    scale = float(line[trains].min())
    most = np.where(helps, np.minimum(line / m, both[:, trains].min(axis=1)), scale)
    highest = np.append(np.where(sums, np.minimum(most / scale, 1.0), 0.0), 1.0)
    own = (np.arange(m), trains)
    rows = csr_array((np.full(m, m - 2.0), own), shape=(m, n + 1))
    rows += csr_array((np.ones(m), (own[0], np.full(m, n))), shape=(m, n + 1))
    right = np.minimum(line[trains] / scale, 4.0 * n)
    pairs = both[np.ix_(trains, trains)] / scale
    known = np.zeros((m, m), dtype=bool)
    while True:
        found = linprog(
            np.append(np.zeros(n), -1.0),
            A_ub=rows,
            b_ub=right,
            A_eq=csr_array(np.append(np.ones(n), -1.0)[None, :]),
            b_eq=[0.0],
            bounds=np.column_stack([np.zeros(n + 1), highest]),
            method="highs",
        )
        if found.status != 0:
            return np.zeros(n)
        rates = np.maximum(found.x[:n], 0.0)
        mine = rates[trains]
        # pairs seldom bind, so that their rows enter where a solution breaks them
        over = mine[:, None] + mine[None, :] > pairs * (1 + FIT) + FIT
        broken = np.argwhere(np.triu(over & ~known, 1))
        if not len(broken):
            return np.asarray(rates * scale)
        known[broken[:, 0], broken[:, 1]] = True
        count = np.arange(len(broken)).repeat(2)
        more = csr_array(
            (np.ones(len(count)), (count, trains[broken].ravel())), (len(broken), n + 1)
        )
        rows = vstack([rows, more], format="csr")
        right = np.concatenate([right, pairs[broken[:, 0], broken[:, 1]]])
