"""Compiles kernels before a solve's clock starts."""

from __future__ import annotations

from functools import cache

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.dispatch import PULL
from planner.mapf.fixed_order import FOLLOW
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.router import PathRouter
from planner.mapf.search import PathSearchParams, SearchWorker, first_plans
from planner.problems import PathProblem
from planner.search.stop import MaxIterations


@cache
def compile_kernels() -> None:
    """Once per process, from the disk cache if it is there.

    The first solve of a new installation waits some seconds here, so that a time limit is spent on
    the problem.
    """
    problem = PathProblem(np.ones((2, 2)), [[0], [1]], 1.0, 1.0, 1.0, 2, 1, 1)
    arrays = PathArrays.of(problem)
    incumbent = PathIncumbent(arrays, MaxIterations(1).start(), problem)
    first_plans(arrays, incumbent)
    worker = SearchWorker(arrays, np.random.default_rng(0), None, PathSearchParams())
    for pull in (PULL, FOLLOW):
        worker.begin(incumbent.rows, pull, incumbent.times, incumbent.device_of)
        worker.work(1, 1.0, 0.5, 1.0)
    PathRouter(arrays).route(0, {})
