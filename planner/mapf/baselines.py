"""SkipPipe's baselines (4.1, Appendix B.1), executed first in, first out."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from planner.mapf.construct import by_chain, construct
from planner.mapf.follow import scheduled
from planner.mapf.tables import Floats, Ints, Tables
from planner.problems import PathProblem, ProblemError


def first_in_first_out(tables: Tables, paths: Ints) -> tuple[float, Floats]:
    """Makespan and starts when every device takes what can begin first."""
    return scheduled(tables, paths, pull=0.0)


def straight_paths(problem: PathProblem, tables: Tables) -> Ints:
    """DT-FM: every stage in order; neighbours matched with the least sum of transfers.

    The devices of a stage share the microbatches evenly, as pipelines do.
    """
    if problem.path_stages != len(problem.stage_devices):
        raise ProblemError(
            f"method straight visits all {len(problem.stage_devices)} stages, found path_stages "
            f"{problem.path_stages}; take dtfm-skip"
        )
    both = tables.hop + tables.hop.T
    paths = tables.starts[:, None]
    for group in problem.stage_devices[1:]:
        slots = _even_slots(tables, list(group))
        rows, columns = linear_sum_assignment(both[np.ix_(paths[:, -1], slots)])
        column = np.empty(len(paths), dtype=np.int64)
        column[rows] = slots[columns]
        paths = np.hstack([paths, column[:, None]])
    return paths


def _even_slots(tables: Tables, group: list[int]) -> Ints:
    """One device per microbatch, as evenly as TC1 allows."""
    slots: list[int] = []
    turn = 1
    while len(slots) < tables.microbatches:
        slots += [d for d in group if tables.room[d] >= turn]
        turn += 1
    return np.array(slots[: tables.microbatches], dtype=np.int64)


def unit_cost_paths(tables: Tables) -> Ints:
    """DT-FM-skip (Appendix B.1): as `collision_blind_paths`, every transfer costs one second."""
    order = list(range(tables.microbatches))
    return construct(tables, order, 0.0, np.ones_like(tables.hop))


def collision_blind_paths(tables: Tables) -> Ints:
    """SkipPipe without TC2: cheapest paths, whoever else is on a device."""
    return construct(tables, by_chain(tables), 0.0)


def random_paths(tables: Tables, seed: int) -> Ints:
    """Paths by random costs, in random order; CC1, CC2, CC3 and TC1 hold."""
    rng = np.random.default_rng(seed)
    hop = rng.random(tables.hop.shape)
    return construct(tables, by_chain(tables, rng), 0.0, hop)
