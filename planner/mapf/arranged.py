"""The best arrangement with its paths so far."""

from __future__ import annotations

import numpy as np

from planner.mapf.incumbent import BETTER, Incumbent
from planner.mapf.tables import Floats, Ints, Tables
from planner.problems import PathProblem
from planner.stop import StopRun


class Arranged(Incumbent):
    """Best paths of roles, with the device in each role."""

    def __init__(self, problem: PathProblem, tables: Tables, run: StopRun) -> None:
        super().__init__(tables, run)
        self.groups = problem.stage_devices
        self._paths = np.zeros((0, 0), dtype=np.int64)
        self._begin = np.zeros((0, 0))

    def offer_times(
        self, paths: Ints, begin: Floats, makespan: float, seat: Ints | None = None
    ) -> bool:
        """Consider paths of roles with the device in each role."""
        if not makespan < self.makespan * BETTER:
            return False
        with self._lock:
            self._paths, self._begin, self.makespan = paths.copy(), begin.copy(), makespan
            self.seat = np.arange(len(self.tables.stage)) if seat is None else seat.copy()
            self.run.improve(makespan)
        return True

    def rows(self) -> Ints:
        return self._paths

    def times(self) -> Floats:
        return self._begin

    def arrangement(self) -> list[list[int]]:
        """Devices per stage, in the order of their roles."""
        return [[int(self.seat[role]) for role in group] for group in self.groups]
