"""Optimal moves of peers by a mixed-integer program (HiGHS).

Columns: numbers of peers of each kind that leave and enter each stage, and the rates of the slowest
stage after the moves and while movers download.
"""

from __future__ import annotations

import numpy as np

from planner.search import highs
from planner.swarm.rebalancing import Ints, SwarmState

GAP = 1e-4
NODES = 500
"""Relative gap and node limit; deterministic, unlike a time limit."""


def solve_moves(
    stages: SwarmState,
    horizon_s: float,
    download_s: float,
    download_cost: float,
    target_rate: float,
    no_moves: tuple[Ints, Ints],
) -> tuple[Ints, Ints]:
    """Moves of maximum value; see `planner.swarm.planned_moves`.

    Returns
    -------
    tuple[ndarray, ndarray]
        ``int[S, K]`` each: numbers of peers that leave and enter.
    """
    from scipy.optimize import Bounds, LinearConstraint
    from scipy.sparse import coo_array

    size, (s, k) = stages.serving.size, stages.serving.shape
    after, during, num_columns = 2 * size, 2 * size + 1, 2 * size + 2
    cells = np.arange(size)
    stage, kind = np.divmod(cells, k)
    per_s = stages.speed[kind] / stages.work[stage]
    ones = np.ones(size)
    row, column, value = [], [], []

    def add_entries(rows: Ints, columns: Ints, values: object) -> None:
        row.append(rows)
        column.append(columns)
        value.append(np.broadcast_to(np.asarray(values, dtype=np.float64), rows.shape))

    all_stages = np.arange(s)
    # after <= rate with the entering and without the leaving peers
    add_entries(all_stages, np.full(s, after), 1.0)
    add_entries(stage, cells, per_s)
    add_entries(stage, size + cells, -per_s)
    # during <= rate of the peers that stay
    add_entries(s + all_stages, np.full(s, during), 1.0)
    add_entries(s + stage, cells, per_s)
    # at least one peer stays in every stage that is served
    add_entries(2 * s + stage, cells, ones)
    # conservation of peers of every kind
    add_entries(3 * s + kind, cells, ones)
    add_entries(3 * s + kind, size + cells, -ones)
    serving = stages.serving.sum(axis=1)
    high = np.concatenate(
        [stages.rates_after_loading, stages.rates, np.maximum(serving - 1, 0), np.zeros(k)]
    )
    low = np.concatenate([np.full(3 * s, -np.inf), np.zeros(k)])
    matrix = coo_array(
        (np.concatenate(value), (np.concatenate(row), np.concatenate(column))),
        shape=(3 * s + k, num_columns),
    ).tocsr()
    down_s = min(download_s, horizon_s)
    # a small cost per move, so that useless moves are not made
    cost_vector = np.concatenate(
        [
            np.full(size, max(download_cost, 1e-6 * horizon_s * per_s.min())),
            np.zeros(size),
            [down_s - horizon_s, -down_s],
        ]
    )
    upper = np.concatenate(
        [stages.serving.ravel(), np.tile(stages.serving.sum(axis=0), s), [target_rate, target_rate]]
    )
    solution = highs.milp(
        cost_vector,
        constraints=LinearConstraint(matrix, low, high),
        integrality=np.concatenate([np.ones(2 * size), np.zeros(2)]),
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": GAP, "node_limit": NODES},
    )
    if solution.x is None:
        return no_moves
    leaving = np.rint(solution.x[:size]).astype(np.int64).reshape(s, k)
    entering = np.rint(solution.x[size : 2 * size]).astype(np.int64).reshape(s, k)
    # within the gap, the solution may move peers of a kind in and out of the same stage
    unmoved = np.minimum(leaving, entering)
    return leaving - unmoved, entering - unmoved
