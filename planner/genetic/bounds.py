"""Combinatorial lower bounds on eq. 1, for any network, in milliseconds."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from planner.genetic.tables import Tables
from planner.search.arrays import Floats

STAR_AND_FOREST = "star and forest"
"""Kind of the witness of `quick_bound`: the argument needs no data but the problem's."""


def quick_bound(tables: Tables) -> float:
    """Star bound on the data-parallel part plus forest bound on the pipeline part, in seconds."""
    return star_bound(tables) + forest_bound(tables)


def star_bound(tables: Tables) -> float:
    """Eq. 2 in seconds.

    Every device is in some group j and pays at least its |C_j| - 1 cheapest partners.
    """
    n = len(tables.stage)
    needs = np.full(n, np.inf)
    for size, kind in sorted({*zip(tables.sizes, tables.exchange_of, strict=True)}):
        exchange = tables.exchange[kind] + np.where(np.eye(n, dtype=bool), np.inf, 0.0)
        cheapest = np.sort(exchange, axis=1)[:, : size - 1]
        needs = np.minimum(needs, cheapest.sum(axis=1))
    return float(needs.max())


def forest_bound(tables: Tables) -> float:
    """Eq. 4 in seconds.

    The largest of the r smallest levels is at least t if the links below t cannot fill r
    boundaries.
    """
    forest = Forest(tables)
    needed = np.cumsum(np.sort(np.minimum(tables.sizes[:-1], tables.sizes[1:])))
    return float(sum(forest.levels[forest.level(int(pairs))] for pairs in needed))


class Forest:
    """How many links up to a level lie on disjoint paths, at most.

    The pairs of several boundaries form disjoint paths: every device has at most two of them, and a
    connected component of c devices holds at most c - 1.

    Attributes
    ----------
    levels
        The distinct hop costs, ascending.
    """

    def __init__(self, tables: Tables) -> None:
        hop = tables.hop[np.unique(tables.hop_of)] if len(tables.hop_of) else tables.hop
        self.hop: Floats = hop.min(axis=0)
        self.levels: Floats = np.unique(hop[:, *np.triu_indices(len(self.hop), 1)])
        if not len(self.levels):
            self.levels = np.zeros(1)

    def level(self, pairs: int) -> int:
        """Index of the smallest level that may hold so many pairs."""
        low, high = 0, len(self.levels) - 1
        while low < high:
            middle = (low + high) // 2
            if self.most_pairs(float(self.levels[middle])) >= pairs:
                high = middle
            else:
                low = middle + 1
        return low

    def most_pairs(self, level: float) -> int:
        """At most this many links of cost <= level lie on disjoint paths."""
        linked = self.hop <= level
        np.fill_diagonal(linked, False)
        count, label = connected_components(csr_array(linked), directed=False)
        members = np.bincount(label, minlength=count)
        degrees = np.bincount(label, weights=np.minimum(linked.sum(axis=1), 2), minlength=count)
        return int(np.minimum(members - 1, degrees.astype(np.int64) // 2).sum())
