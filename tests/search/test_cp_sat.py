"""CP-SAT and Python's handling of Ctrl-C."""

from __future__ import annotations

import os
import signal
import time

import pytest
from ortools.sat.python import cp_model

from planner.search.cp_sat import solver_for


def test_solve_keeps_the_interrupt_handler() -> None:
    """After a solve, Ctrl-C still raises KeyboardInterrupt."""
    model = cp_model.CpModel()
    model.maximize(model.new_int_var(0, 9, "x"))
    solver_for().solve(model)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
