"""`solve_paths`: paths and times of all microbatches, with a bound (SkipPipe)."""

from __future__ import annotations

import enum
import math

from planner.mapf.baselines import (
    collision_blind_paths,
    first_in_first_out,
    random_paths,
    straight_paths,
    unit_cost_paths,
)
from planner.mapf.bounds import simple_bound_s
from planner.mapf.cbs import PathSearch
from planner.mapf.coarsen import coarse_problem, told_apart
from planner.mapf.exact import MOST_MICROBATCHES, Exact
from planner.mapf.follow import FOLLOW, scheduled
from planner.mapf.incumbent import Incumbent
from planner.mapf.search import Search, first_plans
from planner.mapf.tables import Ints, Tables
from planner.mapf.warm import compile_kernels
from planner.mapf.waves import (
    even,
    in_turn,
    offer_waves,
    repair,
    repeats_evenly,
    wave_problem,
)
from planner.problems import PathProblem, ProblemError
from planner.problems.answers import PathPlan
from planner.problems.quantities import of_kind
from planner.search.certificate import OPTIMAL_GAP, Status
from planner.search.result import Result
from planner.search.stop import MaxIterations, MaxRuntime, StoppingCriterion, StopRun, started

ANNEALING = 0.25
"""Share of a time limit for annealing before CP-SAT begins."""

SETTLED_ANNEALING = 0.6
"""The same for several waves, whose whole model is beyond CP-SAT, and at most anywhere."""

SHORT_ANNEALING_S = 6.0
"""Annealing under a short limit, in which CP-SAT would hardly begin."""

SMALL_ANNEALING_S = 1.0
"""Of a limit, what counts for annealing on problems so small that CP-SAT closes them at once."""

RELAXATION = 0.25
"""Share of a time limit for the bound without collisions, at most."""

FEW = 12
"""Microbatches up to which several waves are not built from one."""

WAVE = 0.35
"""Share of a limit for the first wave."""

THREADS = 2

LEAST_S = 2.0
"""Building a CP-SAT model takes a noticeable part of less than this."""

STEP_S = 3.0
"""Seconds of one step of annealing or of large-neighbourhood search, at most."""


class PathMethod(enum.StrEnum):
    """How to find paths.

    ``straight`` is DT-FM's pipeline, ``dtfm-skip`` its skipping (Appendix B.1), ``no-tc2`` the
    choice of paths that ignores collisions, ``reuse`` the paths of one wave for one wave after the
    other and ``coarse`` those of groups of microbatches (both Appendix D.1), ``cbs`` the paper's
    conflict-based search (Algorithm 1), its paths dispatched first in, first out; UNKNOWN if the
    limit comes before its first valid paths.
    """

    AUTO = "auto"
    STRAIGHT = "straight"
    DTFM_SKIP = "dtfm-skip"
    NO_TC2 = "no-tc2"
    RANDOM = "random"
    REUSE = "reuse"
    COARSE = "coarse"
    CBS = "cbs"


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
    compile_kernels()
    run = started(stop)
    tables = Tables.of(of_kind(PathProblem, problem))
    reason = tables.impossible()
    if reason is not None:
        return Result(None, Status.INFEASIBLE, None, None, run.elapsed_s, reason, seed, chosen)
    incumbent = Incumbent(tables, run)
    with run.interruptible():
        if chosen in (PathMethod.AUTO, PathMethod.REUSE):
            first_plans(tables, incumbent)
        incumbent.raise_bound(simple_bound_s(tables))
        if chosen is PathMethod.AUTO:
            _auto(problem, tables, incumbent, run, seed)
        elif chosen is PathMethod.CBS:
            PathSearch(tables, incumbent, run).search()
        elif chosen is PathMethod.COARSE:
            _coarse(problem, tables, incumbent, run, seed)
        elif chosen is PathMethod.REUSE:
            incumbent = _reuse(problem, tables, run, seed)
        else:
            paths = _baseline(problem, tables, chosen, seed)
            makespan, begin = first_in_first_out(tables, paths)
            incumbent.offer_times(paths, begin, makespan)
    return _result(incumbent, run, seed, chosen)


def _result(incumbent: Incumbent, run: StopRun, seed: int, method: PathMethod) -> Result[PathPlan]:
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
    # F, H and B of one device without transfers: any order without gaps is best
    if run.check() is not None or tables.path_stages == 1:
        return
    search = Search(tables, incumbent, seed)
    wave = wave_problem(problem)
    if wave is not None and tables.microbatches > FEW:
        best = _solve_wave(wave, run, seed, WAVE)
        offer_waves(tables, incumbent, best.rows(), best.times(), best.makespan)
        search.settled = True
        if run.check() is not None:
            return
    exact = Exact(problem, tables, incumbent, seed)
    improve(search, exact, run)


def improve(search: Search, exact: Exact, run: StopRun) -> None:
    """Annealing and CP-SAT in turn until the rule says stop."""
    if run.check() is not None:
        return
    if math.isfinite(run.remaining_s):
        _by_time(search, exact, run)
    else:
        _by_count(search, exact, run)


def _baseline(problem: PathProblem, tables: Tables, method: PathMethod, seed: int) -> Ints:
    if method is PathMethod.STRAIGHT:
        return straight_paths(problem, tables)
    if method is PathMethod.DTFM_SKIP:
        return unit_cost_paths(tables)
    if method is PathMethod.NO_TC2:
        return collision_blind_paths(tables)
    return random_paths(tables, seed)


def inner_run(run: StopRun, share: float) -> StopRun:
    """A run of its own with a share of what is left of the limit."""
    if math.isfinite(run.remaining_s):
        return MaxRuntime(max(1e-3, share * run.remaining_s)).start()
    return MaxIterations(int(min(64, max(1, share * run.remaining_iterations)))).start()


def _solve_wave(wave: PathProblem, run: StopRun, seed: int, share: float) -> Incumbent:
    """One wave, with a share of what is left of the limit."""
    inner = inner_run(run, share)
    tables = Tables.of(wave)
    best = Incumbent(tables, inner)
    first_plans(tables, best)
    best.raise_bound(simple_bound_s(tables))
    _auto(wave, tables, best, inner, seed)
    run.update(inner.iterations)
    return best


def _coarse(
    problem: PathProblem, tables: Tables, incumbent: Incumbent, run: StopRun, seed: int
) -> None:
    """The best schedule of groups, told apart."""
    found = coarse_problem(problem)
    if found is None:
        raise ProblemError(
            "method coarse needs groups that divide the microbatches of a start device and fit "
            f"memory, found {problem.microbatches_per_start} and {problem.memory.max()}; take auto"
        )
    coarse, size = found
    groups = _solve_wave(coarse, run, seed, 0.99)
    paths, times = told_apart(tables, groups.rows(), groups.times(), size)
    repair(tables, paths)
    if even(tables, paths):
        makespan, begin = scheduled(tables, paths, times, FOLLOW)
        incumbent.offer_times(paths, begin, makespan)


def _reuse(problem: PathProblem, tables: Tables, run: StopRun, seed: int) -> Incumbent:
    """The best paths of one wave, the waves strictly in turn."""
    wave = wave_problem(problem)
    if wave is None or not repeats_evenly(wave):
        raise ProblemError(
            "method reuse needs live_memory and an iteration of several equal waves, each with "
            f"the same visits per stage, found {problem.microbatches_per_start} microbatches per "
            "start device; take auto"
        )
    best = _solve_wave(wave, run, seed, 0.99)
    incumbent = Incumbent(tables, run)
    paths, begin, makespan = in_turn(tables, best.rows(), best.times(), best.makespan)
    incumbent.offer_times(paths, begin, makespan)
    incumbent.raise_bound(simple_bound_s(tables))
    return incumbent


def _by_time(search: Search, exact: Exact, run: StopRun) -> None:
    """Shares of the limit; CP-SAT has neighbourhoods of its own on the whole model."""
    started, limit = run.elapsed_s, max(1e-6, run.remaining_s)
    short = min(SETTLED_ANNEALING, SHORT_ANNEALING_S / limit)
    share = SETTLED_ANNEALING if search.settled else max(ANNEALING, short)
    seconds = min(SMALL_ANNEALING_S, limit) if exact.small else limit
    search.run(until_s=started + share * seconds)
    if exact.listable and run.check() is None and run.remaining_s > LEAST_S:
        exact.relax(THREADS, RELAXATION * limit, math.inf)
    if exact.whole and not search.settled and run.check() is None and run.remaining_s > LEAST_S:
        exact.prove(THREADS, run.remaining_s, math.inf)
    while run.check() is None:
        search.run(until_s=run.elapsed_s + STEP_S)
        small = search.tables.microbatches <= MOST_MICROBATCHES
        if small and run.check() is None and run.remaining_s > LEAST_S:
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
