"""CP-SAT and Python's handling of Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from ortools.sat.python import cp_model

from planner.search.cp_sat import solve_interruptibly, solver_for


def test_solve_keeps_the_interrupt_handler() -> None:
    """After a solve, Ctrl-C still raises KeyboardInterrupt."""
    model = cp_model.CpModel()
    model.maximize(model.new_int_var(0, 9, "x"))
    solver_for().solve(model)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def test_an_interrupt_before_the_solver_has_started_stops_it() -> None:
    """A solver ignores `stop_search` until it has entered its search, so it is repeated."""
    model = cp_model.CpModel()
    model.maximize(model.new_int_var(0, 9, "x"))

    class Late(cp_model.CpSolver):
        """Sends Ctrl-C, and starts once it was asked to stop three times."""

        stops = 0

        def solve(self, *arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(500):
                if self.stops >= 3:
                    break
                time.sleep(0.01)
            return super().solve(*arguments)

        def stop_search(self) -> None:
            self.stops += 1
            super().stop_search()

    solver = Late()
    solver.parameters.catch_sigint_signal = False
    with pytest.raises(KeyboardInterrupt):
        solve_interruptibly(solver, model)
    assert solver.stops >= 3
