"""Stage order of given groups: eq. 4 over the coarsened graph of eq. 3."""

from __future__ import annotations

import numpy as np

from planner.genetic.data import AssignmentData
from planner.genetic.matched_assignment import group_bottlenecks
from planner.matching.path_tsp import EXACT_NODES, open_path
from planner.search.arrays import Ints
from planner.search.stop import MaxIterations


def reorder_stages(data: AssignmentData, slots: Ints) -> Ints:
    """Reorder the groups to minimise eq. 4; unchanged if the order is not free.

    The order is free when all stages have the same size and costs.

    Parameters
    ----------
    slots
        ``int[N]``, the device of every slot.

    Returns
    -------
    ndarray
        ``int[N]``, slots.
    """
    stages = len(data.sizes)
    if not data.free_order or not 2 < stages <= EXACT_NODES:
        return slots
    order = open_path(group_bottlenecks(data, slots), MaxIterations(1)).plan
    groups = slots.reshape(stages, -1)
    return np.ascontiguousarray(groups[list(order or range(stages))].reshape(-1))
