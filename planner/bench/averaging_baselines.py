"""Rates of known averaging strategies on the same peers.

Every peer with an accelerator contributes, as in Table 1 of the paper.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.problems import AveragingProblem

Floats = NDArray[np.float64]


def scalar_bandwidth_shares(problem: AveragingProblem) -> Floats:
    """Compute shares from one bandwidth b_i = min(u_i, d_i) per peer, as hivemind does.

    Minimise ``max_i (1 + (n - 2) x_i) / b_i`` over shares x that sum to 1: each peer sends the
    parts of others and receives its own from all. Implemented from that description.

    Returns
    -------
    ndarray
        ``float[n]``, sums to 1.
    """
    from scipy.optimize import linprog

    n = len(problem)
    bandwidth = np.minimum(problem.upload_bytes_per_s, problem.download_bytes_per_s)
    slow = np.maximum(bandwidth, 1e-9 * bandwidth.max()) / bandwidth.max()
    rows = np.hstack([np.eye(n) * (n - 2), -slow[:, None]])
    limits = [(0.0, None if ok else 0.0) for ok in problem.can_aggregate]
    solution = linprog(
        np.append(np.zeros(n), 1.0),
        A_ub=rows,
        b_ub=-np.ones(n),
        A_eq=np.append(np.ones(n), 0.0)[None, :],
        b_eq=[1.0],
        bounds=[*limits, (0.0, None)],
        method="highs",
    )
    shares: Floats = np.maximum(solution.x[:n], 0.0)
    return shares
