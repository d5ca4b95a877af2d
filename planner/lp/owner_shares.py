"""Shares of optimizer state: gradients are reduced to their owners, then parameters are spread.

The update lies between both rounds, so that they cannot overlap as in DeDLOC's all-reduce. The
linear programme minimises the sum of their times::

    min   R + S
    s.t.  (1 - s_i) / u_i <= R      member i sends what others own
          (m - 1) s_i / d_i <= R    and receives what it owns
          s_j / b_ij <= R           i sends j what j owns
          (m - 1) q s_i / u_i <= S  the same in the other direction, in q of the bytes
          q (1 - s_i) / d_i <= S
          q s_i / b_ij <= S
          s_1 + ... + s_m = 1,  0 <= s_i <= limit

for m members with uploads u, downloads d, pairs b, in vectors per second.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def owner_shares(
    upload: Floats,
    download: Floats,
    pairs: Floats,
    can_own: NDArray[np.bool_],
    limit: float,
    spread_ratio: float = 1.0,
) -> Floats | None:
    """``float[m]``: the shares with the shortest two rounds, without latency; None if none exist.

    Parameters
    ----------
    upload, download
        ``float[m]``, bytes per second.
    pairs
        ``float[m, m]``, bytes per second; the diagonal is ignored.
    can_own
        ``bool[m]``: members that may have a share.
    limit
        The largest share.
    spread_ratio
        Bytes of a parameter that is spread over those of its gradient.
    """
    from scipy.optimize import linprog

    m = len(upload)
    if can_own.sum() * limit < 1 - 1e-12:
        return None
    rate = np.where(np.eye(m, dtype=bool), np.inf, pairs)
    # seconds scaled so that coefficients are near 1
    scale = float(np.median(np.concatenate([upload, download])))
    up, down = scale / upload, scale / download
    q = spread_ratio
    into, out = scale / rate.min(axis=0), scale / rate.min(axis=1)
    eye, zero, one = np.eye(m), np.zeros((m, 1)), np.ones((m, 1))
    rows = np.vstack(
        [
            np.hstack([-up[:, None] * eye, -one, zero]),
            np.hstack([np.maximum((m - 1) * down, into)[:, None] * eye, -one, zero]),
            np.hstack([np.maximum((m - 1) * up, out)[:, None] * q * eye, zero, -one]),
            np.hstack([-down[:, None] * q * eye, zero, -one]),
        ]
    )
    solution = linprog(
        np.concatenate([np.zeros(m), np.ones(2)]),
        A_ub=rows,
        b_ub=np.concatenate([-up, np.zeros(2 * m), -q * down]),
        A_eq=np.concatenate([np.ones(m), np.zeros(2)])[None, :],
        b_eq=[1.0],
        bounds=[*((0.0, limit * can) for can in can_own.astype(float)), (0, None), (0, None)],
        method="highs",
    )
    if solution.status != 0:
        return None
    return np.clip(np.asarray(solution.x[:m], dtype=np.float64), 0.0, limit)
