"""Reducer rates of trainers that helpers sum for, as a plan's clock counts them.

All trainers contribute and get every sum back; a helper gives nothing and gets nothing back. (In
DeDLOC's problem a peer that does not contribute gets the sums too.) With T the m trainers, R the
sum of all rates and u, d, t limits of uploads, downloads and pairs:

    R + (m - 2) r_i <= u_i, d_i         a trainer i: shares to others, its own sums to them
    m r_h <= u_h, d_h                   a helper h
    r_i + r_k <= t_ik                   two trainers
    r_h <= t_ih, t_hi                   a trainer and a helper
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
        ``bool[n]``: the helpers; the others train, and there are at least two of them.
    sums
        ``bool[n]``: who can sum.

    Returns
    -------
    ndarray
        ``float[n]``, bytes per second; all 0 where nothing is feasible.
    """
    from scipy.optimize import linprog

    n, trains = len(upload), np.flatnonzero(~helps)
    m = len(trains)
    both = np.where(np.eye(n, dtype=bool), np.inf, np.minimum(link, link.T))
    line = np.minimum(upload, download)
    most = np.where(helps, np.minimum(line / m, both[:, trains].min(axis=1)), np.inf)
    # nobody carries more than the slowest trainer, which must send and receive it all but its own
    scale = float(line[trains].min())
    first, second = np.triu_indices(m, 1)
    rows = np.zeros((m + len(first), n + 1))
    rows[np.arange(m), trains] = m - 2.0
    rows[:m, n] = 1.0
    pairs = m + np.arange(len(first))
    rows[pairs, trains[first]] = rows[pairs, trains[second]] = 1.0
    right = np.concatenate([line[trains], both[trains[first], trains[second]]]) / scale
    found = linprog(
        np.append(np.zeros(n), -1.0),
        A_ub=rows,
        b_ub=np.minimum(right, 4.0 * n),
        A_eq=np.append(np.ones(n), -1.0)[None, :],
        b_eq=[0.0],
        bounds=np.column_stack(
            [np.zeros(n + 1), np.append(np.where(sums, np.minimum(most / scale, 1.0), 0.0), 1.0)]
        ),
        method="highs",
    )
    if found.status != 0:
        return np.zeros(n)
    return np.asarray(np.maximum(found.x[:n], 0.0) * scale)
