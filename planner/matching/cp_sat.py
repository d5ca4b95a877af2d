"""Running CP-SAT so that Ctrl-C reaches Python."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

POLL_S = 0.05


def solve_interruptibly(solver: cp_model.CpSolver, model: cp_model.CpModel) -> Any:
    """``solver.solve(model)``; a `KeyboardInterrupt` ends the solve and is raised again.

    CP-SAT would swallow the signal, and a call into it would hold back Python's handler, so the
    solve runs beside the main thread.
    """
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(max_workers=1) as pool:
        task = pool.submit(solver.solve, model)
        while True:
            try:
                return task.result(timeout=POLL_S)
            except NotYet:
                continue
            except BaseException:
                solver.stop_search()
                raise
