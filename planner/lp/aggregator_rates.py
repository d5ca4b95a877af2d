"""Reducer rates with aggregators, consistent with the simulator.

All trainers contribute and receive every sum; an aggregator neither contributes nor receives sums.
(In DeDLOC's problem a peer that does not contribute receives the sums, too.) With m trainers, R the
sum of all rates and u, d, t limits of uploads, downloads and pairs:

    R + (m - 2) r_i <= u_i, d_i         a trainer i: others' shares, and its own sums
    m r_h <= u_h, d_h                   an aggregator h
    r_i + r_k <= t_ik                   two trainers
    r_h <= t_ih, t_hi                   a trainer and an aggregator
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-9
"""Tolerance of a pair's limit."""

Floats = NDArray[np.float64]


def aggregator_rates(
    upload: Floats,
    download: Floats,
    link: Floats,
    is_aggregator: NDArray[np.bool_],
    can_reduce: NDArray[np.bool_],
) -> Floats:
    """The rates r_i with the maximum sum R.

    Parameters
    ----------
    upload, download
        ``float[n]``, bytes per second, infinite for no limit.
    link
        ``float[n, n]``, bytes per second of ordered pairs; the diagonal is ignored.
    is_aggregator
        ``bool[n]``: the aggregators; the others are trainers, at least two.
    can_reduce
        ``bool[n]``: whether a device can be a reducer.

    Returns
    -------
    ndarray
        ``float[n]``, bytes per second; all 0 if infeasible.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, vstack

    n, trainers = len(upload), np.flatnonzero(~is_aggregator)
    m = len(trainers)
    pair_limit = np.where(np.eye(n, dtype=bool), np.inf, np.minimum(link, link.T))
    line = np.minimum(upload, download)
    # R is at most the slowest trainer's line
    scale = float(line[trainers].min())
    max_rate = np.where(
        is_aggregator, np.minimum(line / m, pair_limit[:, trainers].min(axis=1)), scale
    )
    upper = np.append(np.where(can_reduce, np.minimum(max_rate / scale, 1.0), 0.0), 1.0)
    trainer_entries = (np.arange(m), trainers)
    a_ub = csr_array((np.full(m, m - 2.0), trainer_entries), shape=(m, n + 1))
    a_ub += csr_array((np.ones(m), (trainer_entries[0], np.full(m, n))), shape=(m, n + 1))
    b_ub = np.minimum(line[trainers] / scale, 4.0 * n)
    pairs = pair_limit[np.ix_(trainers, trainers)] / scale
    has_row = np.zeros((m, m), dtype=bool)
    while True:
        solution = linprog(
            np.append(np.zeros(n), -1.0),
            A_ub=a_ub,
            b_ub=b_ub,
            A_eq=csr_array(np.append(np.ones(n), -1.0)[None, :]),
            b_eq=[0.0],
            bounds=np.column_stack([np.zeros(n + 1), upper]),
            method="highs",
        )
        if solution.status != 0:
            return np.zeros(n)
        rates = np.maximum(solution.x[:n], 0.0)
        trainer_rates = rates[trainers]
        # pair limits rarely bind, so their rows are added lazily
        exceeds = (
            trainer_rates[:, None] + trainer_rates[None, :] > pairs * (1 + TOLERANCE) + TOLERANCE
        )
        violated = np.argwhere(np.triu(exceeds & ~has_row, 1))
        if not len(violated):
            return np.asarray(rates * scale)
        has_row[violated[:, 0], violated[:, 1]] = True
        row = np.arange(len(violated)).repeat(2)
        pair_rows = csr_array(
            (np.ones(len(row)), (row, trainers[violated].ravel())), (len(violated), n + 1)
        )
        a_ub = vstack([a_ub, pair_rows], format="csr")
        b_ub = np.concatenate([b_ub, pairs[violated[:, 0], violated[:, 1]]])
