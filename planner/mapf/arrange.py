"""`arrange_paths`: arrangement and paths together, beyond SkipPipe's two steps (3.2).

Annealing as for paths alone, with moves that exchange the devices of two places; then the paths of
the best arrangement alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from planner.mapf.arranged import Arranged
from planner.mapf.arranged_bounds import arranged_bound_s
from planner.mapf.dispatch import plan_of
from planner.mapf.exact import Exact
from planner.mapf.incumbent import Incumbent
from planner.mapf.search import Search, SearchParams, first_plans
from planner.mapf.seats import Seats
from planner.mapf.solve import improve, inner_run
from planner.mapf.tables import Tables
from planner.mapf.warm import compile_kernels
from planner.problems import ArrangedPathProblem
from planner.problems.answers import ArrangedPathPlan, PathOp, PathPlan
from planner.problems.quantities import of_kind
from planner.search.certificate import OPTIMAL_GAP, Status
from planner.search.result import Result
from planner.search.stop import StoppingCriterion, StopRun, started

SEARCH = SearchParams(
    first_cycle=64, longest_cycle=512, hot=0.08, warm=0.02, rearrange=0.2, smooth=0.3
)
"""Hotter and longer cycles than for paths alone: an exchange changes many times at once."""

VACANCIES = 2
"""Devices by which a stage may grow."""

EXPLORING = 0.4
"""Share of the limit for starting anew again and again, from devices at random."""

REARRANGING = 0.7
"""Share of what is left for exchanges around the best; paths alone have the rest."""


def arrange_paths(
    problem: ArrangedPathProblem,
    stop: StoppingCriterion,
    seed: int = 0,
    first: Sequence[Sequence[int]] | None = None,
) -> Result[ArrangedPathPlan]:
    """Which device holds which stage, and paths over them, with the smallest makespan.

    Parameters
    ----------
    stop
        As in `solve_paths`.
    first
        Devices per stage to begin with, such as ``solve_assignment(...).plan.groups``; the result
        is never worse than the paths first found on it. By default the devices with the most
        memory start.
    """
    of_kind(ArrangedPathProblem, problem)
    compile_kernels()
    run = started(stop)
    groups = _roomiest_first(problem) if first is None else [list(g) for g in first]
    at = problem.arranged(groups)
    tables = Tables.of(at)
    reason = tables.impossible()
    if reason is not None:
        certain = _never_possible(problem)
        status = Status.INFEASIBLE if certain else Status.UNKNOWN
        why = reason if certain else f"on the first arrangement {reason}"
        return Result(None, status, None, None, run.elapsed_s, why, seed, "auto")
    tables = tables.with_vacancies(0 if problem.fixed_sizes else VACANCIES)
    best = Arranged(tables, len(problem), run)
    with run.interruptible():
        first_plans(tables, best)
        best.raise_bound(arranged_bound_s(problem))
        search = Search(tables, best, seed, SEARCH, _seats(problem))
        while run.check() is None and tables.path_stages > 1:
            for share in (EXPLORING, REARRANGING):
                if math.isfinite(run.remaining_s):
                    search.run(until_s=run.elapsed_s + share * run.remaining_s)
                else:
                    search.run(iterations=math.ceil(share * min(512, run.remaining_iterations)))
                search.settled = True
            if run.check() is None:
                _paths_alone(problem, best, run, seed)
    return _result(problem, best, run, seed)


def _never_possible(problem: ArrangedPathProblem) -> bool:
    """Whether what one arrangement lacks (TC1), every arrangement lacks."""
    least = 1 if problem.live_memory else problem.microbatches_per_start
    few = int((problem.memory[0] >= least).sum()) < problem.stage_sizes[0]
    alike = bool((problem.memory == problem.memory[:, :1]).all())
    return few or (alike and problem.fixed_sizes)


def _seats(problem: ArrangedPathProblem) -> Seats:
    """What each device would bring to each stage, as `Tables` has it for one."""
    count = problem.stage_sizes[0] * problem.microbatches_per_start
    room = np.minimum(problem.memory, count)
    memory = np.full_like(problem.memory, count)
    if problem.live_memory:
        room, memory = np.where(problem.memory > 0, count, 0), room
    none = ((0, 0), (0, 1))
    return Seats(
        np.pad(problem.transfer_s, (0, 1)),
        np.pad(problem.forward_s, none),
        np.pad(problem.backward_s, none),
        np.pad(np.tile(problem.head_s, (len(problem.stage_sizes), 1)), none),
        np.pad(memory.astype(np.int64), none),
        np.pad(room.astype(np.int64), none),
        len(problem),
    )


def _roomiest_first(problem: ArrangedPathProblem) -> list[list[int]]:
    order = np.argsort(-problem.memory[0], kind="stable").tolist()
    start, rest = order[: problem.stage_sizes[0]], order[problem.stage_sizes[0] :]
    groups, turn = [start, *([] for _ in problem.stage_sizes[1:])], 0
    while rest:
        turn = turn % (len(groups) - 1) + 1
        if len(groups[turn]) < problem.stage_sizes[turn]:
            groups[turn].append(rest.pop(0))
    return groups


def _paths_alone(problem: ArrangedPathProblem, best: Arranged, run: StopRun, seed: int) -> None:
    """Improve the paths of the best arrangement, its devices staying where they are."""
    at = problem.arranged(best.arrangement())
    inner = inner_run(run, 1.0)
    found = Incumbent(Tables.of(at), inner)
    seat = best.seat
    found.offer_times(seat[best.rows()], best.times(), best.makespan)
    search = Search(found.tables, found, seed)
    search.settled = True
    try:
        improve(search, Exact(at, found.tables, found, seed), inner)
    finally:
        best.offer_times(best.role_of()[found.rows()], found.times(), found.makespan, seat)
        run.update(inner.iterations)


def _result(
    problem: ArrangedPathProblem, best: Arranged, run: StopRun, seed: int
) -> Result[ArrangedPathPlan]:
    if math.isinf(best.makespan):
        why = run.reason or "nothing found"
        return Result(None, Status.UNKNOWN, None, None, run.elapsed_s, why, seed, "auto")
    groups = best.arrangement()
    plan = plan_of(Tables.of(problem.arranged(groups)), best.seat[best.rows()], best.times())
    bound = min(best.bound, best.makespan)
    done = best.makespan - bound <= OPTIMAL_GAP * best.makespan
    return Result.of(
        _in_order(groups, plan, problem.microbatches_per_start),
        best.makespan,
        bound,
        runtime_s=run.elapsed_s,
        stop_reason="optimal" if done else run.reason or "search exhausted",
        seed=seed,
        method="auto",
        history=run.history,
    )


def _in_order(groups: list[list[int]], plan: PathPlan, each: int) -> ArrangedPathPlan:
    """Groups sorted, and microbatches numbered by the sorted devices of stage 0."""
    order = sorted(range(len(plan.paths)), key=lambda b: (plan.paths[b][0], b % each))
    name = {b: k for k, b in enumerate(order)}
    ops = [PathOp(name[op.microbatch], *op[1:]) for op in plan.ops]
    paths = PathPlan.of([plan.paths[b] for b in order], ops)
    return ArrangedPathPlan(tuple(tuple(sorted(group)) for group in groups), paths)
