"""Compiles kernels before the clock of a solve starts."""

from __future__ import annotations

from functools import cache

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.fixed_order import FOLLOW_TIMES
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.list_scheduling import DEFAULT_TAIL_WEIGHT
from planner.mapf.router import PathRouter
from planner.mapf.search import PathSearchParams, SearchWorker, initial_plans
from planner.problems import PathProblem
from planner.search.stop import MaxIterations


@cache
def compile_kernels() -> None:
    """Compile all kernels once per process, or load them from the disk cache.

    The first solve of a new installation takes some seconds here, so that compilation does not
    count against a time limit.
    """
    problem = PathProblem(np.ones((2, 2)), [[0], [1]], 1.0, 1.0, 1.0, 2, 1, 1)
    arrays = PathArrays.of(problem)
    incumbent = PathIncumbent(arrays, MaxIterations(1).start(), problem)
    initial_plans(arrays, incumbent)
    worker = SearchWorker(arrays, np.random.default_rng(0), None, PathSearchParams())
    for tail_weight in (DEFAULT_TAIL_WEIGHT, FOLLOW_TIMES):
        worker.start_cycle(incumbent.paths, tail_weight, incumbent.starts, incumbent.device_of)
        worker.run_moves(1, 1.0, 0.5, 1.0)
    PathRouter(arrays).route(0, {})
