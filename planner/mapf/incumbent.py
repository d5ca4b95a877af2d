"""Incumbent paths as arrays, shared between the parts of a solve."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.dispatch import plan_of
from planner.problems import ArrangedPathProblem, PathProblem
from planner.problems.answers import PathPlan
from planner.search.arrays import Floats, Ints
from planner.search.incumbent import Incumbent
from planner.search.result import Result
from planner.search.stop import StopRun

BETTER = 1e-9
"""Share by which a plan must be shorter to replace another: more than rounding."""


class TimedPaths(NamedTuple):
    """Paths over roles, the start of every step, and the device in each role.

    Roles are the devices themselves unless the arrangement is free. A role without a device has
    the number of devices for one.
    """

    paths: Ints
    begin: Floats
    device_of: Ints


class FoundPaths(NamedTuple):
    """What a stopping rule hears of: the best paths so far, where roles are devices."""

    problem: PathProblem | ArrangedPathProblem
    arrays: PathArrays
    timed: TimedPaths

    def path_plan(self) -> PathPlan:
        """As an answer."""
        return plan_of(self.arrays, self.timed.paths, self.timed.begin)


class PathIncumbent(Incumbent[TimedPaths]):
    """Best paths and times, with the best bound; see `planner.search.incumbent.Incumbent`."""

    def __init__(
        self,
        arrays: PathArrays,
        run: StopRun,
        problem: PathProblem | ArrangedPathProblem,
        *,
        method: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(run, problem, method=method, seed=seed, better=BETTER)
        self.method = method  # a `PathMethod` stays one
        self.arrays = arrays
        self._first = np.minimum(np.arange(len(arrays.stage)), len(problem))

    @property
    def device_of(self) -> Ints:
        """The device in each role of the best plan; before the first, as the arrays have it."""
        return self._first if self.plan is None else self.plan.device_of

    @property
    def rows(self) -> Ints:
        """Paths of the best plan, one row per microbatch."""
        assert self.plan is not None
        return self.plan.paths

    @property
    def times(self) -> Floats:
        """Start of each step of the best plan, one row per microbatch."""
        assert self.plan is not None
        return self.plan.begin

    def offer_times(
        self, paths: Ints, begin: Floats, makespan: float, device_of: Ints | None = None
    ) -> bool:
        """Consider paths with the start of each step; a deadlock (infinite) is passed over."""
        at = self._first if device_of is None else device_of
        return math.isfinite(makespan) and self.offer(
            makespan, lambda: TimedPaths(paths.copy(), begin.copy(), at.copy())
        )

    def offer_plan(self, plan: PathPlan | None) -> bool:
        """Consider a plan; None is passed over."""
        if plan is None:
            return False
        return self.offer(plan.makespan_s, lambda: self._timed(plan))

    def path_plan(self) -> PathPlan:
        """The best plan, where roles are devices."""
        return plan_of(self.arrays, self.rows, self.times)

    def answer(self) -> Result[PathPlan]:
        """The outcome, where roles are devices."""
        if self.plan is not None:
            return self.result(self.path_plan())
        found: Result[Any] = self.result()
        return found

    def begins(self, plan: PathPlan) -> Floats:
        """Start of each step of a plan's paths, one row per microbatch."""
        length = self.arrays.path_stages
        begin = np.zeros((self.arrays.microbatches, self.arrays.steps))
        for op in plan.ops:
            if op.kind == "H":
                step = length
            else:
                place = plan.paths[op.microbatch].index(op.device)
                step = place if op.kind == "F" else 2 * length - place
            begin[op.microbatch, step] = op.start_s
        return begin

    def _told(self, plan: TimedPaths) -> FoundPaths:
        return FoundPaths(self.problem, self.arrays, plan)

    def _timed(self, plan: PathPlan) -> TimedPaths:
        rows = np.array(plan.paths, dtype=np.int64).reshape(len(plan.paths), -1)
        return TimedPaths(rows, self.begins(plan), self._first)
