"""`solve_paths`: paths and times of all microbatches, with a bound (SkipPipe)."""

from __future__ import annotations

import enum
import math

from planner.mapf.bounds import simple_bound_s
from planner.mapf.exact import MOST_MICROBATCHES, Exact
from planner.mapf.incumbent import Incumbent
from planner.mapf.search import Search, first_plans
from planner.mapf.tables import Tables
from planner.mapf.waves import offer_waves, wave_problem
from planner.parts import PathPlan
from planner.problems import PathProblem, ProblemError
from planner.result import OPTIMAL_GAP, Result, Status
from planner.stop import AnyOf, MaxIterations, MaxRuntime, StoppingCriterion, StopRun

ANNEALING = 0.25
"""Share of a time limit for annealing before CP-SAT begins."""

SETTLED_ANNEALING = 0.6
"""The same where the whole model of several waves is beyond CP-SAT."""

RELAXATION = 0.25
"""Share of a time limit for the bound without collisions, at most."""

WAVE = 0.35
"""Share of a limit for the first wave."""

THREADS = 2

STEP_S = 3.0
"""Seconds of one step of the large-neighbourhood search, at most."""


class PathMethod(enum.StrEnum):
    """How to find paths."""

    AUTO = "auto"


def solve_paths(
    problem: PathProblem,
    stop: StoppingCriterion,
    seed: int = 0,
    method: str | PathMethod = PathMethod.AUTO,
) -> Result[PathPlan]:
    """Paths under CC1, CC2, CC3 and TC1 and a schedule under TC2 with the smallest makespan.

    Parameters
    ----------
    stop
        When to stop. With a limit in seconds two threads work beside each other; under any other
        rule the decisions depend on the problem, the seed and the rule alone.
    method
        See `PathMethod`.
    """
    try:
        chosen = PathMethod(method)
    except ValueError:
        raise ProblemError(
            f"method must be one of {', '.join(PathMethod)}, found {method!r}"
        ) from None
    run = stop.start()
    tables = Tables.of(problem)
    reason = tables.impossible()
    if reason is not None:
        return Result(None, Status.INFEASIBLE, None, None, run.elapsed_s, reason, seed, chosen)
    incumbent = Incumbent(tables, run)
    with run.interruptible():
        first_plans(tables, incumbent)
        incumbent.raise_bound(simple_bound_s(tables))
        _auto(problem, tables, incumbent, run, seed)
    return _result(incumbent, run, seed, chosen)


def _result(
    incumbent: Incumbent, run: StopRun, seed: int, method: PathMethod
) -> Result[PathPlan]:
    if incumbent.plan is None:
        why = run.reason or "nothing found"
        return Result(None, Status.UNKNOWN, None, None, run.elapsed_s, why, seed, method)
    bound = min(incumbent.bound, incumbent.makespan)
    done = incumbent.makespan - bound <= OPTIMAL_GAP * incumbent.makespan
    return Result.of(
        incumbent.plan,
        incumbent.makespan,
        bound,
        runtime_s=run.elapsed_s,
        stop_reason="optimal" if done else run.reason or "search exhausted",
        seed=seed,
        method=method,
        history=run.history,
    )


def _auto(
    problem: PathProblem, tables: Tables, incumbent: Incumbent, run: StopRun, seed: int
) -> None:
    """Annealing, then CP-SAT: the whole model for the bound, neighbourhoods for the plan."""
    if run.check() is not None:
        return
    search = Search(tables, incumbent, seed)
    _waves_first(problem, tables, incumbent, run, seed, search)
    exact = Exact(problem, tables, incumbent, seed)
    if math.isfinite(run.remaining_s):
        _by_time(search, exact, run)
    else:
        _by_count(search, exact, run)


def _waves_first(
    problem: PathProblem,
    tables: Tables,
    incumbent: Incumbent,
    run: StopRun,
    seed: int,
    search: Search,
) -> None:
    """Solve one wave with a share of the limit and begin with its paths, used for every wave."""
    wave = wave_problem(problem)
    if wave is None:
        return
    limits: list[StoppingCriterion] = []
    if math.isfinite(run.remaining_s):
        limits.append(MaxRuntime(max(1e-3, WAVE * run.remaining_s)))
    else:
        limits.append(MaxIterations(int(min(64, max(1, WAVE * run.remaining_iterations)))))
    inner = AnyOf(*limits).start()
    small = Tables.of(wave)
    best = Incumbent(small, inner)
    first_plans(small, best)
    _auto(wave, small, best, inner, seed)
    run.update(inner.iterations)
    offer_waves(tables, incumbent, best.rows(), best.times(), best.makespan)
    search.settled = True


def _by_time(search: Search, exact: Exact, run: StopRun) -> None:
    """Shares of the limit; CP-SAT has neighbourhoods of its own on the whole model."""
    started, limit = run.elapsed_s, run.remaining_s
    share = SETTLED_ANNEALING if search.settled else ANNEALING
    search.run(until_s=started + share * limit)
    if exact.listable and run.check() is None:
        exact.relax(THREADS, RELAXATION * limit, math.inf)
    if exact.whole and not search.settled and run.check() is None:
        exact.prove(THREADS, run.remaining_s, math.inf)
    while run.check() is None:
        search.run(until_s=run.elapsed_s + STEP_S)
        if search.tables.microbatches <= MOST_MICROBATCHES and run.check() is None:
            exact.polish(min(STEP_S, run.remaining_s), math.inf)
            run.update()


def _by_count(search: Search, exact: Exact, run: StopRun) -> None:
    """Steps with limits in deterministic units; each counts as one iteration."""
    work, relaxed = 1.0, False
    while run.check() is None:
        search.run(iterations=8)
        if exact.listable and not relaxed and run.check() is None:
            exact.relax(1, math.inf, 10.0)
            relaxed = True
            run.update()
        for _ in range(4):
            if search.tables.microbatches <= MOST_MICROBATCHES and run.check() is None:
                exact.polish(math.inf, 1.0)
                run.update()
        if exact.whole and run.check() is None:
            exact.prove(1, math.inf, work)
            run.update()
            work *= 2
