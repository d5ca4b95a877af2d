"""The best arrangement with its paths so far."""

from __future__ import annotations

import numpy as np

from planner.mapf.incumbent import BETTER, Incumbent
from planner.mapf.tables import Floats, Ints, Tables
from planner.search.stop import StopRun


class Arranged(Incumbent):
    """Best paths of roles, with the device in each role."""

    def __init__(self, tables: Tables, devices: int, run: StopRun) -> None:
        super().__init__(tables, run)
        self.vacant = devices
        self.seat = self.as_first = np.minimum(self.seat, devices)
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
            self.seat = (self.as_first if seat is None else seat).copy()
            self.run.improve(makespan)
        return True

    def rows(self) -> Ints:
        return self._paths

    def times(self) -> Floats:
        return self._begin

    def arrangement(self) -> list[list[int]]:
        """Devices per stage, in the order of their roles."""
        t = self.tables
        roles = [t.members[t.first[s] : t.first[s + 1]] for s in range(len(t.fewest))]
        return [[d for d in self.seat[group].tolist() if d != self.vacant] for group in roles]

    def role_of(self) -> Ints:
        """The role of each device."""
        role = np.empty(self.vacant, dtype=np.int64)
        taken = np.flatnonzero(self.seat != self.vacant)
        role[self.seat[taken]] = taken
        return role
