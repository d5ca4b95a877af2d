"""Running CP-SAT with limits on time and deterministic work, and with working Ctrl-C."""

from __future__ import annotations

import math
from concurrent.futures import Future
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

POLL_S = 0.05
MIN_LIMIT_S = 0.01
"""CP-SAT does not accept a limit of zero seconds."""
STALL_S = 10.0
"""Seconds per unit of work after which a solve with a limit on work ends, too. A unit takes about a
second, but propagation that moves bounds of large numbers by one at a time counts as no work."""


def solver_for(
    *, seed: int = 0, workers: int = 1, max_s: float = math.inf, max_work: float = math.inf
) -> cp_model.CpSolver:
    """A CP-SAT solver with limits on seconds and on work, its deterministic time."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # it would remove Python's handler
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed % (1 << 31)
    if math.isfinite(max_work):
        solver.parameters.max_deterministic_time = max_work
        max_s = min(max_s, STALL_S * max(1.0, max_work))
    if math.isfinite(max_s):
        solver.parameters.max_time_in_seconds = max(MIN_LIMIT_S, max_s)
    return solver


def work_of(solver: cp_model.CpSolver) -> float:
    """Deterministic time of the last solve, reproducible with one worker; 0 before the first."""
    try:
        return float(solver.response_proto.deterministic_time)
    except RuntimeError:
        return 0.0


def solve_interruptibly(
    solver: cp_model.CpSolver,
    model: cp_model.CpModel,
    callback: cp_model.CpSolverSolutionCallback | None = None,
) -> Any:
    """``solver.solve(model, callback)``, which a `KeyboardInterrupt` stops before it is re-raised.

    CP-SAT would swallow the signal, and Python's handler does not run during a call into it, so the
    solve runs in another thread.
    """
    outcome: Future[Any] = Future()

    def solve() -> None:
        try:
            outcome.set_result(solver.solve(model, callback))
        except BaseException as error:
            outcome.set_exception(error)

    thread = Thread(target=solve)
    try:
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
    except BaseException:
        # before the solver has entered its search, `stop_search` has no effect: repeat it
        while thread.is_alive():
            solver.stop_search()
            thread.join(POLL_S)
        raise
    return outcome.result()
