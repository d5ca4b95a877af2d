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
from planner.mapf.cbs import CbsSearch
from planner.mapf.exact import Exact
from planner.mapf.fixed_order import FOLLOW, scheduled
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.moves import count_swaps, in_order
from planner.mapf.search import PathSearch, PathSearchParams, first_plans
from planner.mapf.warm_up import compile_kernels
from planner.mapf.waves import even, in_turn, offer_waves, repeats_evenly, wave_problem
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
    StoppingCriterion,
    StopRun,
    started,
)


@dataclass(frozen=True)
class PathParams:
    """How ``auto`` shares a limit between annealing and CP-SAT.

    Attributes
    ----------
    few
        Microbatches up to which several waves are not built from one.
    wave
        Share of the limit for the first wave.
    cbs_waves
        ``cbs``: shares of what is left of the limit for the smallest and the largest wave.
    annealing
        Share of a limit in seconds for annealing before CP-SAT begins.
    settled_annealing
        The same for several waves, whose whole model is beyond CP-SAT, and at most anywhere.
    short_annealing_s
        Annealing under a short limit, in which CP-SAT would hardly begin.
    small_annealing_s
        Of a limit, what counts for annealing on problems so small that CP-SAT closes them at once.
    collision_free
        Share of a limit in seconds for the bound without collisions, at most.
    threads
        Of CP-SAT under a limit in seconds; under a count limit there is one.
    least_s
        CP-SAT is not begun with fewer seconds left: building a model takes a part of them.
    step_s
        Seconds of one step of annealing or of large-neighbourhood search, at most.
    step_iterations, step_polishes
        Iterations of annealing, and neighbourhoods, between two proofs under a count limit.
    polish_work, prove_work, collision_free_work
        CP-SAT's deterministic time under a count limit, of one neighbourhood, of the first proof
        (each later one has twice as much) and of the bound without collisions.
    annealing_effort, closing_effort
        Under a limit of effort: annealing before CP-SAT on small problems, and at most so much for
        a neighbourhood.
    inner_iterations
        Iterations of a part of the solve on a problem of its own, at most.
    """

    few: int = 12
    wave: float = 0.35
    cbs_waves: tuple[float, float] = (0.2, 0.7)
    annealing: float = 0.25
    settled_annealing: float = 0.6
    short_annealing_s: float = 6.0
    small_annealing_s: float = 1.0
    collision_free: float = 0.25
    threads: int = 2
    least_s: float = 2.0
    step_s: float = 3.0
    step_iterations: int = 8
    step_polishes: int = 4
    polish_work: float = 1.0
    prove_work: float = 1.0
    collision_free_work: float = 10.0
    closing_effort: float = 3.0
    annealing_effort: float = 1.0
    inner_iterations: int = 64


PARAMS = PathParams()

LEAST_EFFORT = 1e-3
"""A neighbourhood is never counted as less, so that every loop ends."""

ITERATIONS_PER_EFFORT = 9.0
NODES_PER_EFFORT, NODE_AGENTS, NODE_STAGES = 1500.0, 24, 4
"""Annealing iterations of full size, and nodes of ``cbs`` with so many agents on paths of so many
stages, in a unit of effort."""


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
        When to stop. With a limit in seconds alone two threads work beside each other; under any
        other rule the decisions depend on the problem, the seed and the rule alone, and seconds
        beside a limit on iterations only cut the search off.
    seed
        Of the random generators.
    method
        See `PathMethod`.
    first
        Paths of this problem to begin with, in the order of their times, such as those of a
        shorter solve; with ``auto`` only. They are improved in place of other starts.

    Returns
    -------
    Result
        Seconds; INFEASIBLE if no paths exist.

    Raises
    ------
    ProblemError
        The method cannot solve such a problem.

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
    started(stop)  # refused before the kernels are compiled
    compile_kernels()
    arrays = PathArrays.of(problem)
    per_effort = (nodes_per_effort if chosen is PathMethod.CBS else steps_per_effort)(arrays)
    run = started(stop, per_effort)
    incumbent = PathIncumbent(arrays, run, problem, method=chosen, seed=seed)
    reason = arrays.impossible()
    if reason is not None:
        found: Result[Any] = incumbent.without_plan(Status.INFEASIBLE, reason)
        return found
    with run.interruptible():
        if chosen is PathMethod.AUTO and (first is None or not _begun(arrays, incumbent, first)):
            first = None
            first_plans(arrays, incumbent)
        raise_simple_bound(arrays, incumbent)
        if chosen is PathMethod.AUTO:
            _auto(problem, arrays, incumbent, run, seed, settled=first is not None)
        elif chosen is PathMethod.CBS:
            _conflict_based(problem, arrays, incumbent, run, seed)
        elif chosen is PathMethod.REUSE:
            _reuse(problem, arrays, incumbent, run, seed)
        else:
            paths = _baseline(problem, arrays, chosen)
            makespan, begin = first_in_first_out(arrays, paths)
            incumbent.offer_times(paths, begin, makespan)
    if incumbent.plan is None and chosen is PathMethod.REUSE:
        # interrupted in the first wave: the best so far is what is constructed
        first_plans(arrays, incumbent)
    return incumbent.answer()


def steps_per_effort(arrays: PathArrays) -> float:
    """Iterations of annealing in one unit of `planner.search.stop.Effort`."""
    params = PathSearchParams()
    size = arrays.microbatches * arrays.steps * arrays.microbatches
    return ITERATIONS_PER_EFFORT * max(1.0, params.work / (params.most_moves * size))


def nodes_per_effort(arrays: PathArrays) -> float:
    """Nodes of ``cbs`` per unit of `planner.search.stop.Effort`; fewer where paths are long."""
    agents = min(1.0, NODE_AGENTS / arrays.microbatches)
    stages = min(1.0, NODE_STAGES / arrays.path_stages) ** 6
    return max(1.0, NODES_PER_EFFORT * agents * stages)


def raise_simple_bound(arrays: PathArrays, incumbent: PathIncumbent) -> None:
    """The bound that takes no search."""
    bound = simple_bound(arrays)
    incumbent.raise_bound(bound.seconds, bound.basis, bound.witness)


def improve(search: PathSearch, exact: Exact, run: StopRun, params: PathParams = PARAMS) -> None:
    """Annealing and CP-SAT in turn until the rule says stop."""
    if run.check() is not None:
        return
    if run.paced_by_time:
        _by_time(search, exact, run, params)
    elif math.isfinite(run.remaining_effort):
        _by_effort(search, exact, run, params)
    else:
        _by_count(search, exact, run, params)


def inner_run(run: StopRun, share: float, params: PathParams = PARAMS) -> StopRun:
    """A run of its own with a share of what is left of the limit.

    Under a count limit its seconds are all that are left of the outer run.
    """
    if run.paced_by_time:
        return MaxRuntime(max(1e-3, share * run.remaining_s)).start()
    if math.isfinite(run.remaining_effort):
        part: StoppingCriterion = Effort(max(LEAST_EFFORT, share * run.remaining_effort))
        if math.isfinite(run.remaining_s):
            part = AnyOf(part, MaxRuntime(max(1e-3, run.remaining_s)))
        return part.start(run.steps_per_effort)
    most = min(params.inner_iterations, max(1, share * run.remaining_iterations))
    counted = MaxIterations(int(most))
    if math.isinf(run.remaining_s):
        return counted.start()
    return AnyOf(counted, MaxRuntime(max(1e-3, run.remaining_s))).start()


def _auto(
    problem: PathProblem,
    arrays: PathArrays,
    incumbent: PathIncumbent,
    run: StopRun,
    seed: int,
    params: PathParams = PARAMS,
    *,
    settled: bool = False,
) -> None:
    """Annealing, then CP-SAT: the whole model for the bound, neighbourhoods for the plan."""
    # F, H and B of one device without transfers: any order without gaps is best
    if run.check() is not None or arrays.path_stages == 1:
        return
    search = PathSearch(arrays, incumbent, seed)
    search.settled = settled
    wave = None if settled else wave_problem(problem)
    if wave is not None and arrays.microbatches > params.few:
        best = _solve_wave(wave, run, seed, params.wave)
        offer_waves(arrays, incumbent, best.rows, best.times, best.objective)
        search.settled = True
        if run.check() is not None:
            return
    improve(search, Exact(problem, arrays, incumbent, seed), run, params)


def _begun(arrays: PathArrays, incumbent: PathIncumbent, first: PathPlan) -> bool:
    """Offer given paths, dispatched anew in the order of their times; whether that could be."""
    shape = (arrays.microbatches, arrays.path_stages)
    rows = np.array([path for path in first.paths if len(path) == shape[1]], dtype=np.int64)
    fits = rows.shape == shape and rows.min() >= 0 and rows.max() < len(arrays.stage)
    fits = fits and bool((rows[:, 0] == arrays.starts).all()) and even(arrays, rows)
    used = np.bincount(rows.ravel(), minlength=len(arrays.room)) if fits else arrays.room
    if not fits or (used > arrays.room).any():
        return False
    swaps = [count_swaps(row, arrays.stage) for row in rows]
    if not all(in_order(row, arrays.stage, arrays.max_swaps) for row in rows):
        return False
    if sum(swaps) > arrays.max_total_swaps:
        return False
    makespan, begin = scheduled(arrays, rows, incumbent.begins(first), FOLLOW)
    incumbent.offer_times(rows, begin, makespan)
    return incumbent.plan is not None


def _conflict_based(
    problem: PathProblem,
    arrays: PathArrays,
    incumbent: PathIncumbent,
    run: StopRun,
    seed: int,
    params: PathParams = PARAMS,
) -> None:
    """Algorithm 1; an iteration of several waves begins with the paths of one, repeated (D.1).

    First those of the smallest wave, whose paths are there soon, then of the largest.
    """
    found = (wave_problem(problem, 1), wave_problem(problem))
    waves = {wave.microbatches_per_start: wave for wave in found if wave is not None}
    # where there is only one size, it gets the larger share
    for wave, share in zip(waves.values(), params.cbs_waves[-len(waves) :], strict=False):
        inner = inner_run(run, share, replace(params, inner_iterations=sys.maxsize))
        own = PathArrays.of(wave)
        best = PathIncumbent(own, inner, wave, seed=seed)
        CbsSearch(own, best, inner).search()
        run.update(inner.iterations)
        if best.plan is not None:
            offer_waves(arrays, incumbent, best.rows, best.times, best.objective)
    if run.check() is None:
        CbsSearch(arrays, incumbent, run).search()


def _baseline(problem: PathProblem, arrays: PathArrays, method: PathMethod) -> Ints:
    if method is PathMethod.STRAIGHT:
        return straight_paths(problem, arrays)
    if method is PathMethod.DTFM_SKIP:
        return unit_cost_paths(arrays)
    return collision_blind_paths(arrays)


def _solve_wave(wave: PathProblem, run: StopRun, seed: int, share: float) -> PathIncumbent:
    """One wave, with a share of what is left of the limit."""
    inner = inner_run(run, share)
    arrays = PathArrays.of(wave)
    best = PathIncumbent(arrays, inner, wave, seed=seed)
    first_plans(arrays, best)
    raise_simple_bound(arrays, best)
    _auto(wave, arrays, best, inner, seed)
    run.update(inner.iterations)
    return best


def _reuse(
    problem: PathProblem, arrays: PathArrays, incumbent: PathIncumbent, run: StopRun, seed: int
) -> None:
    """The best paths of one wave, the waves strictly in turn."""
    wave = wave_problem(problem)
    if wave is None or not repeats_evenly(wave):
        raise ProblemError(
            "method reuse needs live_memory and an iteration of several equal waves, each with "
            f"the same visits per stage, found {problem.microbatches_per_start} microbatches per "
            "start device; take auto"
        )
    best = _solve_wave(wave, run, seed, 0.99)
    incumbent.offer_times(*in_turn(arrays, best.rows, best.times, best.objective))


def _by_time(search: PathSearch, exact: Exact, run: StopRun, params: PathParams) -> None:
    """Shares of the limit; CP-SAT has neighbourhoods of its own on the whole model."""
    begun, limit = run.elapsed_s, max(1e-6, run.remaining_s)
    short = min(params.settled_annealing, params.short_annealing_s / limit)
    share = params.settled_annealing if search.settled else max(params.annealing, short)
    seconds = min(params.small_annealing_s, limit) if exact.small else limit

    def time_left() -> bool:
        return run.check() is None and run.remaining_s > params.least_s

    search.run(until_s=begun + share * seconds)
    if exact.listable and time_left():
        exact.leave_out_collisions(params.threads, params.collision_free * limit, math.inf)
    if exact.whole and not search.settled and time_left():
        exact.prove(params.threads, run.remaining_s, math.inf)
    while run.check() is None:
        search.run(until_s=run.elapsed_s + params.step_s)
        if exact.polishable and time_left():
            exact.polish(min(params.step_s, run.remaining_s), math.inf)
            run.update()


def _by_effort(search: PathSearch, exact: Exact, run: StopRun, params: PathParams) -> None:
    """As `_by_time`, with effort in the place of seconds and one worker."""
    limit = run.remaining_effort
    short = min(params.settled_annealing, params.short_annealing_s / max(limit, LEAST_EFFORT))
    share = params.settled_annealing if search.settled else max(params.annealing, short)
    first = share * (min(params.annealing_effort, limit) if exact.small else limit)
    search.run(iterations=math.ceil(first * run.steps_per_effort))
    if exact.listable and run.check() is None:
        exact.leave_out_collisions(1, run.remaining_s, params.collision_free * limit)
        run.spend(exact.take_work())
    if exact.whole and not search.settled and run.check() is None:
        exact.prove(1, run.remaining_s, run.remaining_effort)
        run.spend(exact.take_work())
    while run.check() is None:
        search.run(iterations=math.ceil(params.closing_effort * run.steps_per_effort))
        if exact.polishable and run.check() is None:
            exact.polish(run.remaining_s, min(params.closing_effort, run.remaining_effort))
            run.spend(max(exact.take_work(), LEAST_EFFORT))


def _by_count(search: PathSearch, exact: Exact, run: StopRun, params: PathParams) -> None:
    """Steps with limits in deterministic units; each counts as one iteration.

    Seconds, where the rule has them too, only cut a step off.
    """
    work, bounded = params.prove_work, False
    while run.check() is None:
        search.run(iterations=params.step_iterations)
        if exact.listable and not bounded and run.check() is None:
            exact.leave_out_collisions(1, run.remaining_s, params.collision_free_work)
            bounded = True
            run.update()
        for _ in range(params.step_polishes):
            if exact.polishable and run.check() is None:
                exact.polish(run.remaining_s, params.polish_work)
                run.update()
        if exact.whole and run.check() is None:
            exact.prove(1, run.remaining_s, work)
            run.update()
            work *= 2
