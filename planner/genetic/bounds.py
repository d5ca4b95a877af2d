"""Combinatorial lower bounds on eq. 1, for any network, in milliseconds."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from planner.genetic.data import AssignmentData
from planner.search.arrays import Floats

STAR_AND_FOREST = "star and forest"
"""Kind of the witness of `quick_bound`, which needs no data beyond the problem."""


def quick_bound(data: AssignmentData) -> float:
    """Star bound on the data-parallel part plus forest bound on the pipeline part, in seconds."""
    return star_bound(data) + forest_bound(data)


def star_bound(data: AssignmentData) -> float:
    """Lower bound on eq. 2, in seconds.

    Every device is in some group j and pays at least for its |C_j| - 1 cheapest partners.
    """
    n = len(data.stage_of_slot)
    least_sums = np.full(n, np.inf)
    for size, kind in sorted({*zip(data.sizes, data.dp_kind, strict=True)}):
        dp_cost = data.dp_cost[kind] + np.where(np.eye(n, dtype=bool), np.inf, 0.0)
        cheapest = np.sort(dp_cost, axis=1)[:, : size - 1]
        least_sums = np.minimum(least_sums, cheapest.sum(axis=1))
    return float(least_sums.max())


def forest_bound(data: AssignmentData) -> float:
    """Lower bound on eq. 4, in seconds.

    The largest of the r smallest levels is at least t if the links below t cannot fill r
    boundaries.
    """
    forest = Forest(data)
    needed = np.cumsum(np.sort(np.minimum(data.sizes[:-1], data.sizes[1:])))
    return float(sum(forest.levels[forest.level(int(pairs))] for pairs in needed))


class Forest:
    """Upper bound on the number of links up to a cost that lie on disjoint paths.

    The pairs of several boundaries form disjoint paths: every device has at most two of them, and a
    connected component of c devices holds at most c - 1.

    Attributes
    ----------
    levels
        The distinct link costs, ascending.
    """

    def __init__(self, data: AssignmentData) -> None:
        pp_cost = data.pp_cost[np.unique(data.pp_kind)] if len(data.pp_kind) else data.pp_cost
        self.pp_cost: Floats = pp_cost.min(axis=0)
        self.levels: Floats = np.unique(pp_cost[:, *np.triu_indices(len(self.pp_cost), 1)])
        if not len(self.levels):
            self.levels = np.zeros(1)

    def level(self, pairs: int) -> int:
        """Index of the smallest level at which ``pairs`` links are not excluded."""
        low, high = 0, len(self.levels) - 1
        while low < high:
            middle = (low + high) // 2
            if self.max_pairs(float(self.levels[middle])) >= pairs:
                high = middle
            else:
                low = middle + 1
        return low

    def max_pairs(self, level: float) -> int:
        """Upper bound on the links of cost <= level on disjoint paths."""
        linked = self.pp_cost <= level
        np.fill_diagonal(linked, False)
        count, label = connected_components(csr_array(linked), directed=False)
        members = np.bincount(label, minlength=count)
        degrees = np.bincount(label, weights=np.minimum(linked.sum(axis=1), 2), minlength=count)
        return int(np.minimum(members - 1, degrees.astype(np.int64) // 2).sum())
