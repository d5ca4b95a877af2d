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
    """A solver ignores `stop_search` until it has entered its search."""
    model = cp_model.CpModel()
    holes = 14
    inside = [[model.new_bool_var("") for _ in range(holes)] for _ in range(holes + 1)]
    for row in inside:
        model.add(sum(row) == 1)
    for column in zip(*inside, strict=True):
        model.add(sum(column) <= 1)

    class Late(cp_model.CpSolver):
        """Sends Ctrl-C and starts half a second later."""

        def solve(self, *arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
            return super().solve(*arguments)

    solver = Late()
    solver.parameters.catch_sigint_signal = False
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 30.0
    solver.parameters.cp_model_presolve = False
    solver.parameters.symmetry_level = 0
    solver.parameters.linearization_level = 0
    with pytest.raises(KeyboardInterrupt):
        solve_interruptibly(solver, model)
    assert solver.wall_time < 20.0
