"""Stage order of given groups: eq. 4 over the coarsened graph of eq. 3."""

from __future__ import annotations

import numpy as np

from planner.genetic.data import AssignmentData
from planner.genetic.matched_assignment import group_bottlenecks
from planner.matching.path_tsp import EXACT_NODES, open_path
from planner.search.arrays import Ints
from planner.search.stop import MaxIterations


def has_best_order(data: AssignmentData) -> bool:
    """Whether `reorder_stages` does anything: the order is free, and stages are few."""
    return data.free_order and 2 < len(data.sizes) <= EXACT_NODES


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
    if not has_best_order(data):
        return slots
    stages = len(data.sizes)
    order = open_path(group_bottlenecks(data, slots), MaxIterations(1)).plan
    groups = slots.reshape(stages, -1)
    return np.ascontiguousarray(groups[list(order or range(stages))].reshape(-1))
