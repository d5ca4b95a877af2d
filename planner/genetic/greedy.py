"""A greedy baseline."""

from __future__ import annotations

import numpy as np

from planner.genetic.data import AssignmentData
from planner.genetic.stage_order import reorder_stages
from planner.problems import AssignmentProblem
from planner.search.arrays import Ints


def region_greedy(problem: AssignmentProblem, data: AssignmentData) -> Ints:
    """Fill stage after stage with the nearest devices, region by region.

    A practitioner's heuristic: start with the region of cheapest links, repeatedly append the
    nearest remaining region, and cut the resulting sequence of devices into stages.

    Returns
    -------
    ndarray
        ``int[N]``, slots.
    """
    regions = problem.network.regions
    names = list(dict.fromkeys(regions))
    members = [np.flatnonzero([r == name for r in regions]) for name in names]
    pp_cost = data.pp_cost[0]
    between = np.array([[pp_cost[np.ix_(a, b)].mean() for b in members] for a in members])
    at = int(np.argmin(between.mean(axis=1)))
    unassigned = set(range(len(names))) - {at}
    row = [int(d) for d in members[at]]
    while unassigned:
        at = min(unassigned, key=lambda r: (between[at, r], r))
        unassigned.remove(at)
        row += [int(d) for d in members[at]]
    return reorder_stages(data, np.array(row, dtype=np.int64))
