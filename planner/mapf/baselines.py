"""SkipPipe's baselines (4.1, Appendix B.1), executed first in, first out."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from planner.mapf.arrays import PathArrays
from planner.mapf.construction import construct, construction_order
from planner.mapf.fixed_order import schedule_paths
from planner.problems import PathProblem, ProblemError
from planner.search.arrays import Floats, Ints


def first_in_first_out(arrays: PathArrays, paths: Ints) -> tuple[float, Floats]:
    """Makespan and start times when every device runs the operation that can start first."""
    return schedule_paths(arrays, paths, tail_weight=0.0)


def straight_paths(problem: PathProblem, arrays: PathArrays) -> Ints:
    """DT-FM: every stage in order; neighbours matched with the least sum of transfers.

    The devices of a stage share the microbatches evenly, as pipelines do.
    """
    if problem.path_stages != len(problem.stage_devices):
        raise ProblemError(
            f"method straight visits all {len(problem.stage_devices)} stages, found path_stages "
            f"{problem.path_stages}; take dtfm-skip"
        )
    round_trip = arrays.transfer + arrays.transfer.T
    paths = arrays.starts[:, None]
    for group in problem.stage_devices[1:]:
        slots = _even_slots(arrays, list(group))
        rows, columns = linear_sum_assignment(round_trip[np.ix_(paths[:, -1], slots)])
        column = np.empty(len(paths), dtype=np.int64)
        column[rows] = slots[columns]
        paths = np.hstack([paths, column[:, None]])
    return paths


def _even_slots(arrays: PathArrays, group: list[int]) -> Ints:
    """One device per microbatch, as evenly as TC1 allows."""
    slots: list[int] = []
    visit = 1
    while len(slots) < arrays.microbatches:
        slots += [d for d in group if arrays.capacity[d] >= visit]
        visit += 1
    return np.array(slots[: arrays.microbatches], dtype=np.int64)


def unit_cost_paths(arrays: PathArrays) -> Ints:
    """DT-FM-skip (Appendix B.1): as `collision_blind_paths`, every transfer costs one second."""
    order = list(range(arrays.microbatches))
    return construct(arrays, order, 0.0, np.ones_like(arrays.transfer))


def collision_blind_paths(arrays: PathArrays) -> Ints:
    """SkipPipe without TC2: cheapest paths, ignoring collisions."""
    return construct(arrays, construction_order(arrays), 0.0)
