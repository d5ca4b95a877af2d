"""CP-SAT model of the decision problem of the chain bound, on single devices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from planner.genetic.data import AssignmentData
from planner.genetic.matching_constraint import add_matching_constraint
from planner.search.arrays import Floats, Ints
from planner.search.cp_sat import solve_interruptibly, solver_for

THRESHOLD_TOLERANCE = 1e-9
"""Relative tolerance added to thresholds, so that rounding excludes no plan."""

UNITS = 1e5
"""Integer units per ceiling and device of the largest group."""


def is_achievable(
    data: AssignmentData,
    mask: int,
    level: float,
    ceiling: float,
    max_work: float,
    max_s: float = math.inf,
) -> bool | None:
    """Whether a plan has levels <= ``level`` on the set ``mask``, and eq. 2 <= ``ceiling``.

    Costs are rounded so that the model is a relaxation. None if the limit is reached.
    """
    sizes = data.sizes
    n, stages = len(data.stage_of_slot), len(sizes)
    model = cp_model.CpModel()
    x = [[model.new_bool_var("") for _ in range(stages)] for _ in range(n)]
    for row in x:
        model.add_exactly_one(row)
    for j in range(stages):
        model.add(_total([row[j] for row in x]) == int(sizes[j]))
    if math.isfinite(ceiling):
        _limit_data_parallel_cost(model, data, x, ceiling)
    for j in range(stages - 1):
        if mask >> j & 1:
            linked = data.pp_cost[data.pp_kind[j]] <= level * (1 + THRESHOLD_TOLERANCE)
            _match_linked(model, sizes, x, j, linked)
    solver = solver_for(seed=1, max_s=max_s, max_work=max_work)
    solver.parameters.linearization_level = 1
    status = solve_interruptibly(solver, model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return True
    return False if status == cp_model.INFEASIBLE else None


def _total(variables: list[cp_model.IntVar]) -> Any:
    return cp_model.LinearExpr.sum(variables)


def _limit_data_parallel_cost(
    model: cp_model.CpModel, data: AssignmentData, x: list[list[cp_model.IntVar]], ceiling: float
) -> None:
    """Eq. 2: the sum of every device in its group is at most the ceiling."""
    sizes = data.sizes
    # every term is rounded down by less than one unit
    unit = max(ceiling, 1e-300) / (UNITS * int(sizes.max()))
    budget = math.ceil(ceiling / unit * (1 + THRESHOLD_TOLERANCE)) + 1
    for j in range(len(sizes)):
        dp_cost: Floats = np.floor(data.dp_cost[data.dp_kind[j]] / unit)
        units = np.minimum(dp_cost, budget + 1).astype(np.int64)
        column = [row[j] for row in x]
        for d in range(len(x)):
            # the diagonal is zero: a device does not pay for itself
            terms = cp_model.LinearExpr.weighted_sum(column, units[d].tolist())
            model.add(terms <= budget).only_enforce_if(x[d][j])


def _match_linked(
    model: cp_model.CpModel, sizes: Ints, x: list[list[cp_model.IntVar]], j: int, linked: Any
) -> None:
    """Eq. 3: a matching over boundary j that uses linked pairs only."""
    n = len(x)
    out: list[list[cp_model.IntVar]] = [[] for _ in range(n)]
    into: list[list[cp_model.IntVar]] = [[] for _ in range(n)]
    for d, e in np.argwhere(linked & ~np.eye(n, dtype=bool)):
        used = model.new_bool_var("")
        out[d].append(used)
        into[e].append(used)
    for d in range(n):
        add_matching_constraint(
            model, sizes, j, _total(out[d]), _total(into[d]), x[d][j], x[d][j + 1]
        )
