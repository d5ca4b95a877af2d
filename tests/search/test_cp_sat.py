"""CP-SAT beside Python's own handling of Ctrl-C."""

from __future__ import annotations

import os
import signal
import time

import pytest
from ortools.sat.python import cp_model

from planner.search.cp_sat import solver_for


def test_a_solve_leaves_the_handler_of_interrupts() -> None:
    """CP-SAT's own handler would leave none: the next Ctrl-C would end the process."""
    model = cp_model.CpModel()
    model.maximize(model.new_int_var(0, 9, "x"))
    solver_for().solve(model)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
