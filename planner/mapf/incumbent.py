"""Incumbent paths and start times as arrays, shared by all methods of a solve."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.list_scheduling import build_plan
from planner.problems import ArrangedPathProblem, PathProblem
from planner.problems.answers import PathPlan
from planner.search.arrays import Floats, Ints
from planner.search.incumbent import Incumbent
from planner.search.result import Result
from planner.search.stop import SearchRun

MIN_IMPROVEMENT = 1e-9
"""Relative improvement required to replace the incumbent: more than rounding errors."""


class PathSchedule(NamedTuple):
    """Paths over roles, the start of every step, and the device of each role.

    Roles are the devices themselves unless the arrangement is free. The device of a vacant role is
    N, the number of devices.
    """

    paths: Ints
    begin: Floats
    device_of: Ints


class IncumbentPaths(NamedTuple):
    """The best paths so far, as passed to the progress callback of a stopping criterion."""

    problem: PathProblem | ArrangedPathProblem
    arrays: PathArrays
    schedule: PathSchedule

    def path_plan(self) -> PathPlan:
        """The paths and times as a `PathPlan`, where roles are devices."""
        return build_plan(self.arrays, self.schedule.paths, self.schedule.begin)


class PathIncumbent(Incumbent[PathSchedule]):
    """Best paths and times, with the best bound; see `planner.search.incumbent.Incumbent`."""

    def __init__(
        self,
        arrays: PathArrays,
        run: SearchRun,
        problem: PathProblem | ArrangedPathProblem,
        *,
        method: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(run, problem, method=method, seed=seed, min_improvement=MIN_IMPROVEMENT)
        self.method = method  # keep the `PathMethod`, of which the base class takes the string
        self.arrays = arrays
        self._first = np.minimum(np.arange(len(arrays.stage)), len(problem))

    @property
    def device_of(self) -> Ints:
        """The device of each role of the best plan; initially that of the arrays."""
        return self._first if self.plan is None else self.plan.device_of

    @property
    def paths(self) -> Ints:
        """Paths of the best plan, one row per microbatch."""
        assert self.plan is not None
        return self.plan.paths

    @property
    def starts(self) -> Floats:
        """Start of each step of the best plan, one row per microbatch."""
        assert self.plan is not None
        return self.plan.begin

    def offer_schedule(
        self, paths: Ints, begin: Floats, makespan: float, device_of: Ints | None = None
    ) -> bool:
        """Offer paths with the start of each step; a deadlock (infinite makespan) is ignored."""
        devices = self._first if device_of is None else device_of
        return math.isfinite(makespan) and self.offer(
            makespan, lambda: PathSchedule(paths.copy(), begin.copy(), devices.copy())
        )

    def offer_plan(self, plan: PathPlan | None) -> bool:
        """Offer a plan; None is ignored."""
        if plan is None:
            return False
        return self.offer(plan.makespan_s, lambda: self._timed(plan))

    def path_plan(self) -> PathPlan:
        """The best plan, where roles are devices."""
        return build_plan(self.arrays, self.paths, self.starts)

    def answer(self) -> Result[PathPlan]:
        """The result, where roles are devices."""
        if self.plan is not None:
            return self.result(self.path_plan())
        result: Result[Any] = self.result()
        return result

    def starts_of(self, plan: PathPlan) -> Floats:
        """Start of each step of a plan's paths, one row per microbatch."""
        length = self.arrays.path_stages
        begin = np.zeros((self.arrays.microbatches, self.arrays.steps))
        for op in plan.ops:
            if op.kind == "H":
                step = length
            else:
                position = plan.paths[op.microbatch].index(op.device)
                step = position if op.kind == "F" else 2 * length - position
            begin[op.microbatch, step] = op.start_s
        return begin

    def _callback_value(self, plan: PathSchedule) -> IncumbentPaths:
        return IncumbentPaths(self.problem, self.arrays, plan)

    def _timed(self, plan: PathPlan) -> PathSchedule:
        paths = np.array(plan.paths, dtype=np.int64).reshape(len(plan.paths), -1)
        return PathSchedule(paths, self.starts_of(plan), self._first)
