"""Chooses moves of peers by a mixed-integer program (HiGHS).

Columns: how many of each kind leave and enter each stage, and the rates of the slowest stage after
the moves and during them.
"""

from __future__ import annotations

import numpy as np

from planner.search import highs
from planner.swarm.rebalancing import Ints, StageRates

GAP = 1e-4
NODES = 500
"""Counted limits: the same answer on any machine."""


def solve_moves(
    stages: StageRates,
    horizon_s: float,
    download_s: float,
    cost: float,
    most: float,
    nothing: tuple[Ints, Ints],
) -> tuple[Ints, Ints]:
    """The moves of the greatest value (see `planner.swarm.planned_moves`).

    Returns
    -------
    tuple[ndarray, ndarray]
        ``int[S, K]``: who leaves, and who comes.
    """
    from scipy.optimize import Bounds, LinearConstraint
    from scipy.sparse import coo_array

    size, (s, k) = stages.serving.size, stages.serving.shape
    after, during, width = 2 * size, 2 * size + 1, 2 * size + 2
    cells = np.arange(size)
    stage, kind = np.divmod(cells, k)
    per_s = stages.speed[kind] / stages.work[stage]
    one = np.ones(size)
    row, column, value = [], [], []

    def put(rows: Ints, columns: Ints, values: object) -> None:
        row.append(rows)
        column.append(columns)
        value.append(np.broadcast_to(np.asarray(values, dtype=np.float64), rows.shape))

    every = np.arange(s)
    # after <= rate with those who come, without those who leave
    put(every, np.full(s, after), 1.0)
    put(stage, cells, per_s)
    put(stage, size + cells, -per_s)
    # during <= rate of those who stay
    put(s + every, np.full(s, during), 1.0)
    put(s + stage, cells, per_s)
    # somebody stays where somebody serves
    put(2 * s + stage, cells, one)
    # as many of a kind come as leave
    put(3 * s + kind, cells, one)
    put(3 * s + kind, size + cells, -one)
    serving = stages.serving.sum(axis=1)
    high = np.concatenate(
        [stages.coming_rates, stages.rates, np.maximum(serving - 1, 0), np.zeros(k)]
    )
    low = np.concatenate([np.full(3 * s, -np.inf), np.zeros(k)])
    matrix = coo_array(
        (np.concatenate(value), (np.concatenate(row), np.concatenate(column))),
        shape=(3 * s + k, width),
    ).tocsr()
    down_s = min(download_s, horizon_s)
    # a move that wins nothing costs something, so that none is made
    aim = np.concatenate(
        [
            np.full(size, max(cost, 1e-6 * horizon_s * per_s.min())),
            np.zeros(size),
            [down_s - horizon_s, -down_s],
        ]
    )
    highest = np.concatenate(
        [stages.serving.ravel(), np.tile(stages.serving.sum(axis=0), s), [most, most]]
    )
    found = highs.milp(
        aim,
        constraints=LinearConstraint(matrix, low, high),
        integrality=np.concatenate([np.ones(2 * size), np.zeros(2)]),
        bounds=Bounds(0, highest),
        options={"mip_rel_gap": GAP, "node_limit": NODES},
    )
    if found.x is None:
        return nothing
    out = np.rint(found.x[:size]).astype(np.int64).reshape(s, k)
    into = np.rint(found.x[size : 2 * size]).astype(np.int64).reshape(s, k)
    # within the gap a peer may be told to move to where it is
    stay = np.minimum(out, into)
    return out - stay, into - stay
