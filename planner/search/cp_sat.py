"""Running CP-SAT: limits in seconds and in counted work, and Ctrl-C that reaches Python."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

POLL_S = 0.05
LEAST_S = 0.01
"""CP-SAT takes no limit of zero seconds."""


def solver_for(
    *, seed: int = 0, workers: int = 1, max_s: float = math.inf, max_work: float = math.inf
) -> cp_model.CpSolver:
    """A CP-SAT solver with its limits."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # it would leave no handler behind
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed % (1 << 31)
    if math.isfinite(max_s):
        solver.parameters.max_time_in_seconds = max(LEAST_S, max_s)
    if math.isfinite(max_work):
        solver.parameters.max_deterministic_time = max_work
    return solver


def work_of(solver: cp_model.CpSolver) -> float:
    """Deterministic time that the last solve took, the same every time with one worker.

    0 before the first.
    """
    try:
        return float(solver.response_proto.deterministic_time)
    except RuntimeError:
        return 0.0


def solve_interruptibly(
    solver: cp_model.CpSolver,
    model: cp_model.CpModel,
    callback: cp_model.CpSolverSolutionCallback | None = None,
) -> Any:
    """``solver.solve(model, callback)``; a `KeyboardInterrupt` ends the solve and is raised again.

    CP-SAT would swallow the signal, and a call into it would hold back Python's handler, so the
    solve runs beside the main thread.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        task = pool.submit(solver.solve, model, callback)
        while True:
            try:
                return task.result(timeout=POLL_S)
            except NotYet:
                continue
            except BaseException:
                solver.stop_search()
                raise
