"""The best plan so far, shared between the parts of a solve."""

from __future__ import annotations

import math
from threading import Lock

import numpy as np

from planner.mapf.dispatch import plan_of
from planner.mapf.tables import Floats, Ints, Tables
from planner.problems.answers import PathPlan
from planner.search.stop import StopRun

BETTER = 1 - 1e-9
"""A plan must be shorter by more than rounding to replace another."""


class Incumbent:
    """Best plan, its makespan and the best bound; safe to offer to from several threads."""

    def __init__(self, tables: Tables, run: StopRun) -> None:
        self.tables = tables
        self.run = run
        self.plan: PathPlan | None = None
        self.makespan = math.inf
        self.bound = 0.0
        self.seat = np.arange(len(tables.stage))
        self._lock = Lock()

    def offer(self, plan: PathPlan | None) -> bool:
        """Consider a plan; True if it is the best so far."""
        if plan is None:
            return False
        with self._lock:
            makespan = plan.makespan_s
            if not makespan < self.makespan * BETTER and self.plan is not None:
                return False
            self.plan, self.makespan = plan, makespan
            self.run.improve(makespan)
            return True

    def offer_times(
        self, paths: Ints, begin: Floats, makespan: float, seat: Ints | None = None
    ) -> bool:
        """Consider paths with the start of each step; ``seat`` where devices are exchanged."""
        if not makespan < self.makespan * BETTER:
            return False
        return self.offer(plan_of(self.tables, paths, begin))

    def raise_bound(self, bound: float) -> None:
        """Consider a proven bound; one above the makespan can only be so by rounding."""
        with self._lock:
            self.bound = max(self.bound, bound)
            self.run.bound = min(self.bound, self.makespan)

    def rows(self) -> Ints:
        """Paths of the best plan as an array."""
        assert self.plan is not None
        return np.array(self.plan.paths, dtype=np.int64).reshape(self.tables.microbatches, -1)

    def times(self) -> Floats:
        """Start of each step of the best plan."""
        assert self.plan is not None
        length = self.tables.path_stages
        begin = np.zeros((self.tables.microbatches, self.tables.steps))
        for op in self.plan.ops:
            if op.kind == "H":
                step = length
            else:
                place = self.plan.paths[op.microbatch].index(op.device)
                step = place if op.kind == "F" else 2 * length - place
            begin[op.microbatch, step] = op.start_s
        return begin
