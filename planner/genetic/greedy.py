"""Baselines that build a plan without searching."""

from __future__ import annotations

import numpy as np

from planner.genetic.order import best_order
from planner.genetic.tables import Tables
from planner.problems import AssignmentProblem
from planner.search.arrays import Ints


def region_greedy(problem: AssignmentProblem, tables: Tables) -> Ints:
    """Fill stage after stage with the nearest devices, region by region.

    The practitioner's rule: start at the device with the cheapest links, take its region, then the
    region nearest to the last one, and so on; cut the resulting row of devices into stages.

    Returns
    -------
    ndarray
        ``int[N]``, slots.
    """
    regions = problem.network.regions
    names = list(dict.fromkeys(regions))
    members = [np.flatnonzero([r == name for r in regions]) for name in names]
    hop = tables.hop[0]
    between = np.array([[hop[np.ix_(a, b)].mean() for b in members] for a in members])
    at = int(np.argmin(between.mean(axis=1)))
    left = set(range(len(names))) - {at}
    row = [int(d) for d in members[at]]
    while left:
        at = min(left, key=lambda r: (between[at, r], r))
        left.remove(at)
        row += [int(d) for d in members[at]]
    return best_order(tables, np.array(row, dtype=np.int64))
