"""Bottleneck assignment: the matching whose largest entry is smallest (DT-FM, eq. 3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.search.arrays import Floats2, Ints
from planner.search.compiled import allocating_entry
from planner.utils.validate import numbers, short_repr


class MatchingError(ValueError):
    """An invalid cost matrix."""


def bottleneck_assignment(cost: ArrayLike) -> tuple[float, NDArray[np.int64]]:
    """Match every row or every column, whichever are fewer, minimising the largest cost.

    Threshold method with augmenting paths (Derigs and Zimmermann): the threshold starts at a lower
    bound, and is raised to the cheapest entry that leaves an alternating tree only when the tree
    proves that there is no matching below it.

    Parameters
    ----------
    cost
        ``n x m``; infinite entries are used only if no finite matching exists. NaN is not allowed.

    Returns
    -------
    value
        The largest entry of the matching; infinite if no finite matching covers the smaller side,
        0 for a matrix without rows or columns.
    columns
        ``int[n]``, the column of every row, -1 for an unmatched row. Ties are broken
        deterministically.

    Raises
    ------
    MatchingError
        ``cost`` is not a matrix of numbers, or contains NaN.

    References
    ----------
    U. Derigs and U. Zimmermann, "An augmenting path method for solving linear bottleneck assignment
    problems", Computing 19 (1978). Used for eq. 3 of DT-FM.
    """
    matrix = cost_matrix(cost)
    rows, columns = matrix.shape
    if rows <= columns:
        matched = np.full(rows, -1, dtype=np.int64)
        value = (
            fill_matching(matrix, matched, np.full(columns, -1, dtype=np.int64)) if rows else 0.0
        )
    else:
        matched = np.full(rows, -1, dtype=np.int64)
        other = np.full(columns, -1, dtype=np.int64)
        value = fill_matching(np.ascontiguousarray(matrix.T), other, matched) if columns else 0.0
    return float(value), matched


def cost_matrix(cost: ArrayLike, *, finite: bool = False) -> NDArray[np.float64]:
    """Copy the input to a float matrix; raises `MatchingError` if it is not one."""
    if np.ma.isMaskedArray(cost):
        raise MatchingError(
            "cost is a masked array; give cost.filled(value), with what masked pairs cost"
        )
    try:
        matrix = np.ascontiguousarray(numbers(cost))
    except (TypeError, ValueError, OverflowError):
        raise MatchingError(
            f"cost must be a matrix of numbers, found {short_repr(cost)}; give rows of real "
            "numbers, all of one length"
        ) from None
    if matrix.ndim != 2:
        raise MatchingError(
            f"cost must have two dimensions, found {matrix.ndim} in {short_repr(cost)}; reshape it"
        )
    bad = np.isnan(matrix)
    if finite:
        bad = np.logical_not(np.isfinite(matrix) | np.eye(*matrix.shape, dtype=np.bool_))
    if bad.any():
        i, j = (int(k) for k in np.argwhere(bad)[0])
        remedy = (
            "a path may need any pair, give a large finite cost"
            if finite
            else "use infinity where a pair is not allowed"
        )
        raise MatchingError(f"cost[{i}, {j}] is {_number_text(matrix[i, j])}; {remedy}")
    return matrix


def _number_text(number: float) -> str:
    return "NaN" if np.isnan(number) else f"{number}"


@allocating_entry
def fill_matching(cost: Floats2, column_of: Ints, row_of: Ints) -> float:
    """Bottleneck assignment for ``n <= m``; returns its value.

    Parameters
    ----------
    cost
        ``float[n, m]`` without NaN.
    column_of, row_of
        ``int[n]`` and ``int[m]``, -1 on entry; filled with the matching.
    """
    n, m = cost.shape
    level = -np.inf
    for r in range(n):
        smallest = cost[r, 0]
        for c in range(1, m):
            smallest = min(smallest, cost[r, c])
        level = max(level, smallest)
    if n == m:
        for c in range(m):
            smallest = cost[0, c]
            for r in range(1, n):
                smallest = min(smallest, cost[r, c])
            level = max(level, smallest)
    for r in range(n):
        for c in range(m):
            if row_of[c] < 0 and cost[r, c] <= level:
                column_of[r] = c
                row_of[c] = r
                break
    tree_cost = np.empty(m)
    parent = np.empty(m, dtype=np.int64)
    done = np.empty(m, dtype=np.bool_)
    for root in range(n):
        if column_of[root] >= 0:
            continue
        for c in range(m):
            tree_cost[c] = cost[root, c]
            parent[c] = root
            done[c] = False
        while True:
            column = -1
            for c in range(m):
                if not done[c] and (column < 0 or tree_cost[c] < tree_cost[column]):
                    column = c
                    if row_of[c] < 0 and tree_cost[c] <= level:
                        break
            level = max(level, tree_cost[column])
            done[column] = True
            row = row_of[column]
            if row < 0:
                break
            for c in range(m):
                if not done[c] and cost[row, c] < tree_cost[c]:
                    tree_cost[c] = cost[row, c]
                    parent[c] = row
        # augment: flip the path from the free column back to the root
        while column >= 0:
            row = parent[column]
            row_of[column] = row
            previous = column_of[row]
            column_of[row] = column
            column = previous
    return level
