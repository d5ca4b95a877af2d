"""`solve_paths`: paths and times of all microbatches, with a bound (SkipPipe)."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.baselines import (
    collision_blind_paths,
    first_in_first_out,
    straight_paths,
    unit_cost_paths,
)
from planner.mapf.bounds import simple_bound
from planner.mapf.exact_solver import ExactSolver
from planner.mapf.fixed_order import FOLLOW_TIMES, schedule_paths
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.moves import count_swaps, in_order
from planner.mapf.search import PathSearch, PathSearchParams, initial_plans
from planner.mapf.skippipe_cbs import SkipPipeSearch
from planner.mapf.warm_up import compile_kernels
from planner.mapf.waves import (
    offer_repeated_wave,
    repeat_in_turn,
    repeats_evenly,
    visits_balanced,
    wave_problem,
)
from planner.problems import PathProblem, ProblemError
from planner.problems.answers import PathPlan
from planner.problems.path_method import PathMethod
from planner.problems.quantities import instance_of
from planner.search.arrays import Ints
from planner.search.certificate import Status
from planner.search.result import Result
from planner.search.stop import (
    AnyOf,
    Effort,
    MaxIterations,
    MaxRuntime,
    SearchRun,
    StoppingCriterion,
    started,
)


@dataclass(frozen=True)
class PathParams:
    """How ``auto`` and ``cbs`` divide a limit between their parts.

    Attributes
    ----------
    max_direct_microbatches
        Up to this many microbatches, several waves are solved directly instead of repeating one.
    wave_share
        Share of the limit for the first wave.
    cbs_wave_shares
        ``cbs``: shares of the remaining limit for the smallest and the largest wave.
    annealing_share
        Share of a time limit for annealing before CP-SAT starts.
    intensify_annealing
        The same for several waves, whose full model is too large for CP-SAT; also the maximum
        for any problem.
    short_annealing_s
        Seconds of annealing under a short limit, in which CP-SAT would hardly start.
    small_annealing_s
        Part of a limit that counts for annealing on problems that CP-SAT closes quickly.
    collision_free_share
        Maximum share of a time limit for the bound without collisions.
    threads
        Threads of CP-SAT under a time limit; one under any other limit.
    min_cp_sat_s
        CP-SAT is not started with fewer seconds left: building a model takes a part of them.
    step_s
        Maximum seconds of one step of annealing or of LNS.
    step_iterations, step_neighbourhoods
        Iterations of annealing, and LNS neighbourhoods, between two proofs under an iteration
        limit.
    neighbourhood_work, prove_work, collision_free_work
        CP-SAT's deterministic time under an iteration limit: of one neighbourhood, of the first
        proof (doubled for each later one) and of the bound without collisions.
    step_effort, annealing_effort
        Under an effort limit: maximum effort of a step of annealing or LNS, and of annealing before
        CP-SAT on small problems.
    inner_iterations
        Maximum iterations of an inner solve, such as of one wave.
    """

    max_direct_microbatches: int = 12
    wave_share: float = 0.35
    cbs_wave_shares: tuple[float, float] = (0.2, 0.7)
    annealing_share: float = 0.25
    intensify_annealing: float = 0.6
    short_annealing_s: float = 6.0
    small_annealing_s: float = 1.0
    collision_free_share: float = 0.25
    threads: int = 2
    min_cp_sat_s: float = 2.0
    step_s: float = 3.0
    step_iterations: int = 8
    step_neighbourhoods: int = 4
    neighbourhood_work: float = 1.0
    prove_work: float = 1.0
    collision_free_work: float = 10.0
    step_effort: float = 3.0
    annealing_effort: float = 1.0
    inner_iterations: int = 64


PARAMS = PathParams()

MIN_EFFORT = 1e-3
"""Minimum effort counted for a neighbourhood, so that every loop terminates."""

ITERATIONS_PER_EFFORT = 9.0
NODES_PER_EFFORT, NODE_AGENTS, NODE_STAGES = 1500.0, 24, 4
"""Full-size annealing iterations per unit of effort, and ``cbs`` nodes per unit of effort for
NODE_AGENTS agents on paths of NODE_STAGES stages."""


def solve_paths(
    problem: PathProblem,
    stop: StoppingCriterion,
    seed: int = 0,
    method: str | PathMethod = PathMethod.AUTO,
    first: PathPlan | None = None,
) -> Result[PathPlan]:
    """Paths under CC1, CC2, CC3 and TC1 and a schedule under TC2 with the smallest makespan.

    Parameters
    ----------
    stop
        When to stop. A time limit alone uses two threads and is not deterministic; under any other
        criterion the result depends only on the problem, the seed and the criterion, and a time
        limit combined with an iteration limit only ends the search early.
    seed
        Seed of the random generators.
    method
        See `PathMethod`.
    first
        Initial solution for ``auto``: a plan for this problem, such as that of a shorter solve. It
        replaces the constructed initial solutions. Ignored if it does not fit the problem, and by
        other methods.

    Returns
    -------
    Result
        Objective and bound in seconds; INFEASIBLE if no paths exist.

    Raises
    ------
    ProblemError
        The method is unknown or not applicable to the problem.

    References
    ----------
    SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in Heterogeneous
    Networks, 2025, sections 3 and 4.
    """
    instance_of(PathProblem, problem)
    if first is not None:
        instance_of(PathPlan, first, "first")
    try:
        chosen = PathMethod(method)
    except ValueError:
        raise ProblemError(
            f"method must be one of {', '.join(PathMethod)}, found {method!r}"
        ) from None
    started(stop)  # validate before the kernels are compiled
    compile_kernels()
    arrays = PathArrays.of(problem)
    per_effort = (nodes_per_effort if chosen is PathMethod.CBS else steps_per_effort)(arrays)
    run = started(stop, per_effort)
    incumbent = PathIncumbent(arrays, run, problem, method=chosen, seed=seed)
    reason = arrays.infeasibility()
    if reason is not None:
        result: Result[Any] = incumbent.without_plan(Status.INFEASIBLE, reason)
        return result
    with run.interruptible():
        if chosen is PathMethod.AUTO and (
            first is None or not _offer_initial_plan(arrays, incumbent, first)
        ):
            first = None
            initial_plans(arrays, incumbent)
        offer_simple_bound(arrays, incumbent)
        if chosen is PathMethod.AUTO:
            _solve_auto(problem, arrays, incumbent, run, seed, intensify=first is not None)
        elif chosen is PathMethod.CBS:
            _run_cbs(problem, arrays, incumbent, run, seed)
        elif chosen is PathMethod.REUSE:
            _reuse_wave(problem, arrays, incumbent, run, seed)
        else:
            paths = _baseline(problem, arrays, chosen)
            makespan, begin = first_in_first_out(arrays, paths)
            incumbent.offer_schedule(paths, begin, makespan)
    if incumbent.plan is None and chosen is PathMethod.REUSE:
        # interrupted in the first wave: fall back to constructed paths
        initial_plans(arrays, incumbent)
    return incumbent.answer()


def steps_per_effort(arrays: PathArrays) -> float:
    """Iterations of annealing in one unit of `planner.search.stop.Effort`."""
    params = PathSearchParams()
    size = arrays.microbatches * arrays.steps * arrays.microbatches
    return ITERATIONS_PER_EFFORT * max(1.0, params.move_budget / (params.max_moves * size))


def nodes_per_effort(arrays: PathArrays) -> float:
    """Nodes of ``cbs`` per unit of `planner.search.stop.Effort`; fewer where paths are long."""
    agents = min(1.0, NODE_AGENTS / arrays.microbatches)
    stages = min(1.0, NODE_STAGES / arrays.path_stages) ** 6
    return max(1.0, NODES_PER_EFFORT * agents * stages)


def offer_simple_bound(arrays: PathArrays, incumbent: PathIncumbent) -> None:
    """Offer `simple_bound` as a lower bound."""
    bound = simple_bound(arrays)
    incumbent.offer_bound(bound.seconds, bound.basis, bound.witness)


def improve(
    search: PathSearch, exact: ExactSolver, run: SearchRun, params: PathParams = PARAMS
) -> None:
    """Alternate annealing and CP-SAT until the run stops."""
    if run.check() is not None:
        return
    if run.paced_by_time:
        _improve_by_time(search, exact, run, params)
    elif math.isfinite(run.remaining_effort):
        _improve_by_effort(search, exact, run, params)
    else:
        _improve_by_iterations(search, exact, run, params)


def inner_run(run: SearchRun, share: float, params: PathParams = PARAMS) -> SearchRun:
    """A nested run with a share of the remaining limit.

    Under an iteration limit it may use all remaining seconds of the outer run.
    """
    if run.paced_by_time:
        return MaxRuntime(max(1e-3, share * run.remaining_s)).start()
    if math.isfinite(run.remaining_effort):
        criterion: StoppingCriterion = Effort(max(MIN_EFFORT, share * run.remaining_effort))
        if math.isfinite(run.remaining_s):
            criterion = AnyOf(criterion, MaxRuntime(max(1e-3, run.remaining_s)))
        return criterion.start(run.steps_per_effort)
    max_iterations = min(params.inner_iterations, max(1, share * run.remaining_iterations))
    counted = MaxIterations(int(max_iterations))
    if math.isinf(run.remaining_s):
        return counted.start()
    return AnyOf(counted, MaxRuntime(max(1e-3, run.remaining_s))).start()


def _solve_auto(
    problem: PathProblem,
    arrays: PathArrays,
    incumbent: PathIncumbent,
    run: SearchRun,
    seed: int,
    *,
    intensify: bool = False,
) -> None:
    """Annealing, then CP-SAT: the whole model for the bound, neighbourhoods for the plan."""
    # one stage: F, H and B on one device without transfers; any schedule without gaps is optimal
    if run.check() is not None or arrays.path_stages == 1:
        return
    search = PathSearch(arrays, incumbent, seed)
    search.intensify = intensify
    wave = None if intensify else wave_problem(problem)
    if wave is not None and arrays.microbatches > PARAMS.max_direct_microbatches:
        best = _solve_wave(wave, run, seed, PARAMS.wave_share)
        offer_repeated_wave(arrays, incumbent, best.paths, best.starts, best.objective)
        search.intensify = True
        if run.check() is not None:
            return
    improve(search, ExactSolver(problem, arrays, incumbent, seed), run)


def _offer_initial_plan(arrays: PathArrays, incumbent: PathIncumbent, first: PathPlan) -> bool:
    """Offer an initial plan, rescheduled in the order of its times; False if it is not valid."""
    shape = (arrays.microbatches, arrays.path_stages)
    rows = np.array([path for path in first.paths if len(path) == shape[1]], dtype=np.int64)
    fits = rows.shape == shape and rows.min() >= 0 and rows.max() < len(arrays.stage)
    fits = fits and bool((rows[:, 0] == arrays.starts).all()) and visits_balanced(arrays, rows)
    used = np.bincount(rows.ravel(), minlength=len(arrays.capacity)) if fits else arrays.capacity
    if not fits or (used > arrays.capacity).any():
        return False
    swaps = [count_swaps(row, arrays.stage) for row in rows]
    if not all(in_order(row, arrays.stage, arrays.max_swaps) for row in rows):
        return False
    if sum(swaps) > arrays.max_total_swaps:
        return False
    makespan, begin = schedule_paths(arrays, rows, incumbent.starts_of(first), FOLLOW_TIMES)
    incumbent.offer_schedule(rows, begin, makespan)
    return incumbent.plan is not None


def _run_cbs(
    problem: PathProblem,
    arrays: PathArrays,
    incumbent: PathIncumbent,
    run: SearchRun,
    seed: int,
) -> None:
    """Algorithm 1; with several waves, the paths of one are found first and repeated (D.1).

    First the smallest wave, whose paths are found soon, then the largest.
    """
    problems = (wave_problem(problem, 1), wave_problem(problem))
    waves = {wave.microbatches_per_start: wave for wave in problems if wave is not None}
    # a single wave size gets the larger share
    for wave, share in zip(waves.values(), PARAMS.cbs_wave_shares[-len(waves) :], strict=False):
        inner = inner_run(run, share, replace(PARAMS, inner_iterations=sys.maxsize))
        wave_arrays = PathArrays.of(wave)
        best = PathIncumbent(wave_arrays, inner, wave, seed=seed)
        SkipPipeSearch(wave_arrays, best, inner).search()
        run.update(inner.iterations)
        if best.plan is not None:
            offer_repeated_wave(arrays, incumbent, best.paths, best.starts, best.objective)
    if run.check() is None:
        SkipPipeSearch(arrays, incumbent, run).search()


def _baseline(problem: PathProblem, arrays: PathArrays, method: PathMethod) -> Ints:
    if method is PathMethod.STRAIGHT:
        return straight_paths(problem, arrays)
    if method is PathMethod.DTFM_SKIP:
        return unit_cost_paths(arrays)
    return collision_blind_paths(arrays)


def _solve_wave(wave: PathProblem, run: SearchRun, seed: int, share: float) -> PathIncumbent:
    """Solve one wave with a share of the remaining limit."""
    inner = inner_run(run, share)
    arrays = PathArrays.of(wave)
    best = PathIncumbent(arrays, inner, wave, seed=seed)
    initial_plans(arrays, best)
    offer_simple_bound(arrays, best)
    _solve_auto(wave, arrays, best, inner, seed)
    run.update(inner.iterations)
    return best


def _reuse_wave(
    problem: PathProblem, arrays: PathArrays, incumbent: PathIncumbent, run: SearchRun, seed: int
) -> None:
    """Repeat the best paths of one wave without overlap."""
    wave = wave_problem(problem)
    if wave is None or not repeats_evenly(wave):
        raise ProblemError(
            "method reuse needs live_memory and an iteration of several equal waves, each with "
            f"the same visits per stage, found {problem.microbatches_per_start} microbatches per "
            "start device; take auto"
        )
    best = _solve_wave(wave, run, seed, 0.99)
    incumbent.offer_schedule(*repeat_in_turn(arrays, best.paths, best.starts, best.objective))


def _improve_by_time(
    search: PathSearch, exact: ExactSolver, run: SearchRun, params: PathParams
) -> None:
    """Improve under a time limit."""
    begun, limit = run.elapsed_s, max(1e-6, run.remaining_s)
    short = min(params.intensify_annealing, params.short_annealing_s / limit)
    share = params.intensify_annealing if search.intensify else max(params.annealing_share, short)
    seconds = min(params.small_annealing_s, limit) if exact.small else limit

    def time_left() -> bool:
        return run.check() is None and run.remaining_s > params.min_cp_sat_s

    search.run(until_s=begun + share * seconds)
    if exact.enumerable and time_left():
        exact.bound_without_collisions(
            params.threads, params.collision_free_share * limit, math.inf
        )
    if exact.fits_one_model and not search.intensify and time_left():
        exact.prove(params.threads, run.remaining_s, math.inf)
    while run.check() is None:
        search.run(until_s=run.elapsed_s + params.step_s)
        if exact.lns_applicable and time_left():
            exact.improve_neighbourhood(min(params.step_s, run.remaining_s), math.inf)
            run.update()


def _improve_by_effort(
    search: PathSearch, exact: ExactSolver, run: SearchRun, params: PathParams
) -> None:
    """Improve under an effort limit: as `_improve_by_time`, with one CP-SAT worker."""
    limit = run.remaining_effort
    short = min(params.intensify_annealing, params.short_annealing_s / max(limit, MIN_EFFORT))
    share = params.intensify_annealing if search.intensify else max(params.annealing_share, short)
    first = share * (min(params.annealing_effort, limit) if exact.small else limit)
    search.run(iterations=math.ceil(first * run.steps_per_effort))
    if exact.enumerable and run.check() is None:
        exact.bound_without_collisions(1, run.remaining_s, params.collision_free_share * limit)
        run.spend(exact.pop_work())
    if exact.fits_one_model and not search.intensify and run.check() is None:
        exact.prove(1, run.remaining_s, run.remaining_effort)
        run.spend(exact.pop_work())
    while run.check() is None:
        search.run(iterations=math.ceil(params.step_effort * run.steps_per_effort))
        if exact.lns_applicable and run.check() is None:
            exact.improve_neighbourhood(
                run.remaining_s, min(params.step_effort, run.remaining_effort)
            )
            run.spend(max(exact.pop_work(), MIN_EFFORT))


def _improve_by_iterations(
    search: PathSearch, exact: ExactSolver, run: SearchRun, params: PathParams
) -> None:
    """Improve under an iteration limit: each step has a deterministic limit and is one iteration.

    An additional time limit only ends a step early.
    """
    work, bounded = params.prove_work, False
    while run.check() is None:
        search.run(iterations=params.step_iterations)
        if exact.enumerable and not bounded and run.check() is None:
            exact.bound_without_collisions(1, run.remaining_s, params.collision_free_work)
            bounded = True
            run.update()
        for _ in range(params.step_neighbourhoods):
            if exact.lns_applicable and run.check() is None:
                exact.improve_neighbourhood(run.remaining_s, params.neighbourhood_work)
                run.update()
        if exact.fits_one_model and run.check() is None:
            exact.prove(1, run.remaining_s, work)
            run.update()
            work *= 2
