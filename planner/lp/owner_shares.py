"""Shares of optimizer state: gradients are reduced to their owners, then parameters are spread.

The update lies between both rounds, so that they cannot overlap as in DeDLOC's all-reduce. The
linear programme minimises the sum of their times::

    min   R + S
    s.t.  (1 - s_i) / u_i <= R      trainer i sends what others own
          m' s_i / d_i <= R         and any owner receives what it owns from the m' other trainers
          s_j / b_ij <= R           i sends j what j owns
          m' q s_i / u_i <= S       the same in the other direction, in q of the bytes
          q (1 - s_i) / d_i <= S
          q s_i / b_ij <= S
          s_1 + ... + s_n = 1,  0 <= s_i <= limit_i

for members with uploads u, downloads d, pairs b, in vectors per second. Members that are no
trainers have no gradients and receive no parameters.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def owner_shares(
    upload: Floats,
    download: Floats,
    pairs: Floats,
    limits: Floats,
    trains: NDArray[np.bool_] | None = None,
    spread_ratio: float = 1.0,
) -> Floats | None:
    """``float[n]``: the shares with the shortest two rounds, without latency; None if none exist.

    Parameters
    ----------
    upload, download
        ``float[n]``, bytes per second.
    pairs
        ``float[n, n]``, bytes per second; the diagonal is ignored.
    limits
        ``float[n]``, each member's largest share.
    trains
        ``bool[n]``, the trainers; None if all are.
    spread_ratio
        Bytes of a parameter that is spread over those of its gradient.
    """
    from scipy.optimize import linprog

    n, q = len(upload), spread_ratio
    if limits.sum() < 1 - 1e-12:
        return None
    trainer = np.ones(n, dtype=bool) if trains is None else trains
    others = trainer.sum() - trainer.astype(float)
    # seconds scaled so that coefficients are near 1
    scale = float(np.median(np.concatenate([upload, download])))
    up, down = scale / upload, scale / download
    pair_s = np.where(np.eye(n, dtype=bool) | ~trainer[:, None], 0.0, scale / pairs)
    back_s = np.where(np.eye(n, dtype=bool) | ~trainer[:, None], 0.0, scale / pairs.T)
    reduce_s = np.maximum(others * down, pair_s.max(axis=0))
    spread_s = q * np.maximum(others * up, back_s.max(axis=0))
    eye, zero, one = np.eye(n), np.zeros((n, 1)), np.ones((n, 1))
    rows = np.vstack(
        [
            np.hstack([-up[:, None] * eye, -one, zero])[trainer],
            np.hstack([reduce_s[:, None] * eye, -one, zero]),
            np.hstack([spread_s[:, None] * eye, zero, -one]),
            np.hstack([-q * down[:, None] * eye, zero, -one])[trainer],
        ]
    )
    solution = linprog(
        np.concatenate([np.zeros(n), np.ones(2)]),
        A_ub=rows,
        b_ub=np.concatenate([-up[trainer], np.zeros(2 * n), -q * down[trainer]]),
        A_eq=np.concatenate([np.ones(n), np.zeros(2)])[None, :],
        b_eq=[1.0],
        bounds=[*((0.0, min(limit, 1.0)) for limit in limits), (0, None), (0, None)],
        method="highs",
    )
    if solution.status != 0:
        return None
    return np.clip(np.asarray(solution.x[:n], dtype=np.float64), 0.0, limits)
