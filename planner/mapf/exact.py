"""CP-SAT on the model of paths and times: the whole problem, or a few microbatches of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from planner.mapf.arrays import PathArrays
from planner.mapf.chains import Path, all_paths, chain_s, count_paths
from planner.mapf.collision_free_bound import collision_free_bound_s
from planner.mapf.cp_model import TICKS, PathModel, build, by_first_start, proven_s
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.timing import timed_by_rank
from planner.problems import PathProblem
from planner.problems.answers import PathPlan
from planner.search.cp_sat import solve_interruptibly, solver_for, work_of

WITHOUT_COLLISIONS = "CP-SAT: paths without collisions away from the start devices"
WHOLE = "CP-SAT: whole model of paths and times"
LINKS_LEFT_OUT = "CP-SAT: whole model of paths and times, links that queue left out"

SLACK = 1 + 1e-9
"""Sums of floats differ by the order of their terms."""


@dataclass(frozen=True)
class ExactParams:
    """How large a model CP-SAT gets, and how many microbatches it may move at once.

    Attributes
    ----------
    most_paths
        Most paths of a start device, swapped ones left out, for which all are listed.
    most_literals
        Most literals of paths in one model.
    most_microbatches
        Most microbatches whose times are all left free at once.
    coarse_steps
        Whole steps of time of a first proof.
    small
        Most operations for which there is one.
    free
        Microbatches whose paths a neighbourhood frees, at first.
    anywhere
        Share of the neighbourhoods that are drawn from all microbatches alike.
    """

    most_paths: int = 3000
    most_literals: int = 40_000
    most_microbatches: int = 60
    coarse_steps: int = 1 << 13
    small: int = 100
    free: int = 4
    anywhere: float = 0.3


class _Watch(cp_model.CpSolverSolutionCallback):
    """Times every solution exactly and offers it; takes bounds over as they come.

    ``problem`` is what solutions are timed for; the model may leave a part of it out.

    An error in here ends the solve and is raised after it: it would be lost in CP-SAT's threads.
    """

    def __init__(
        self,
        made: PathModel,
        problem: PathProblem,
        incumbent: PathIncumbent,
        solver: cp_model.CpSolver,
        basis: str,
    ) -> None:
        super().__init__()
        self._made = made
        self._problem = problem
        self._basis = basis
        self._incumbent = incumbent
        self._solver = solver
        self.error: Exception | None = None

    def on_solution_callback(self) -> None:
        self._guarded(self._offer)

    def on_bound(self, bound: float) -> None:
        """Take over a bound of the model."""
        seconds = bound * self._made.tick_s
        self._guarded(lambda: self._incumbent.raise_bound(seconds, self._basis))

    def _offer(self) -> None:
        paths = self._made.paths(self.value)
        ranks = self._made.ranks(self.value, paths)
        self._incumbent.offer_plan(timed_by_rank(self._problem, paths, ranks))

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            self.error = error
        if self.error is not None or self._incumbent.run.check() is not None:
            self._solver.stop_search()


class Exact:
    """Exact methods on one problem, around a shared incumbent.

    Attributes
    ----------
    small
        There is a first proof with few steps of time.
    listable
        All paths are listed.
    whole
        All paths fit one model.
    work
        CP-SAT's deterministic time that nobody has counted yet.
    """

    def __init__(
        self,
        problem: PathProblem,
        arrays: PathArrays,
        incumbent: PathIncumbent,
        seed: int,
        params: ExactParams | None = None,
    ) -> None:
        self.problem = problem
        self.arrays = arrays
        self.incumbent = incumbent
        self.seed = seed
        self.params = limits = params or ExactParams()
        self.rng = np.random.default_rng((seed, 1))
        self.free = limits.free
        self.work = 0.0
        listed = count_paths(arrays)
        swaps = 1 + max(0, arrays.path_stages - 2) * (arrays.max_swaps > 0)
        few = arrays.microbatches <= limits.most_microbatches
        self.small = arrays.microbatches * arrays.steps <= limits.small
        self.listable = listed <= limits.most_paths and arrays.path_stages > 1
        literals = listed * swaps * arrays.microbatches
        self.whole = self.listable and few and literals <= limits.most_literals
        self.polishable = few
        # the problem with links that never make a message wait, until that is solved
        self._relaxed = problem.replace(link_s=None) if arrays.queueing else None
        self._listed: dict[int, list[Path]] = {}
        if self.listable:
            for start in dict.fromkeys(arrays.starts.tolist()):
                paths = all_paths(arrays, start)
                self._listed[start] = sorted(paths, key=lambda p: (chain_s(arrays, p), p))

    def options(self) -> dict[int, list[Path]]:
        """Paths per start device that may be on a plan shorter than the incumbent."""
        limit = self.incumbent.objective * SLACK
        return {
            start: [p for p in paths if chain_s(self.arrays, p) <= limit]
            for start, paths in self._listed.items()
        }

    def take_work(self) -> float:
        """CP-SAT's deterministic time since this was last asked."""
        work, self.work = self.work, 0.0
        return work

    def leave_out_collisions(self, workers: int, max_s: float, max_work: float) -> None:
        """The bound without collisions; limits as in `planner.search.cp_sat.solver_for`."""
        solver = solver_for(seed=self.seed, workers=workers, max_s=max_s, max_work=max_work)
        bound = collision_free_bound_s(
            self.arrays, self.options(), self.incumbent.objective, solver
        )
        self.work += work_of(solver)
        self._raise_bound(bound, WITHOUT_COLLISIONS)

    def prove(self, workers: int, max_s: float, max_work: float) -> None:
        """The whole problem: better plans and a bound.

        On small problems with few steps of time first: propagation may creep from the bound to the
        makespan a step at a time, and has only the rest of the way to go then. Where links queue,
        first without links: the model is far smaller, its bound holds, and what it finds is timed
        with links.
        """
        run = self.incumbent.run
        if self._relaxed is not None:
            if self._prove(self._relaxed, workers, max_s / 2, max_work / 2, TICKS):
                self._relaxed = None
            if run.check() is not None:
                return
            max_s = min(max_s, run.remaining_s)
        if self.small:
            self._prove(self.problem, workers, max_s / 2, max_work / 2, self.params.coarse_steps)
        if run.check() is None:
            self._prove(self.problem, workers, min(max_s, run.remaining_s), max_work, TICKS)

    def _prove(
        self, problem: PathProblem, workers: int, max_s: float, max_work: float, steps: int
    ) -> bool:
        """Solve the model of the problem, or of one that leaves links out; whether it is solved."""
        incumbent = self.incumbent
        basis = WHOLE if problem is self.problem else LINKS_LEFT_OUT
        plan = by_first_start(incumbent.path_plan(), self.problem.microbatches_per_start)
        options = self.options()
        starts = self.arrays.starts.tolist()
        made = build(problem, [options[s] for s in starts], plan.makespan_s, steps)
        made.hint(plan)
        made.model.add(made.makespan >= math.floor((incumbent.bound or 0.0) / made.tick_s))
        solver = solver_for(seed=self.seed, workers=workers, max_s=max_s, max_work=max_work)
        status = self._solve(solver, made, math.isfinite(max_work), basis)
        self._raise_bound(proven_s(solver, status, made.tick_s), basis)
        return bool(status == cp_model.OPTIMAL)

    def _raise_bound(self, seconds: float, basis: str) -> None:
        """Take over a bound of a model that holds the best plan."""
        if math.isinf(seconds):
            self.incumbent.contradict(basis)
        self.incumbent.raise_bound(seconds, basis)

    def polish(self, max_s: float, max_work: float) -> None:
        """Free the paths of a few microbatches and all times (large-neighbourhood search)."""
        incumbent = self.incumbent
        plan, before = incumbent.path_plan(), incumbent.objective
        freed = set(self._neighbourhood(plan))
        limit = before * SLACK
        options: list[list[Path]] = []
        for b, path in enumerate(plan.paths):
            choice = [path]
            if b in freed:
                all_of = self._listed.get(path[0], [])
                fit = [p for p in all_of if p != path and chain_s(self.arrays, p) <= limit]
                choice += fit[: self.params.most_literals // (8 * len(freed))]
            options.append(choice)
        made = build(self.problem, options, before)
        made.hint(plan)
        seed = int(self.rng.integers(1 << 30))
        solver = solver_for(seed=seed, max_s=max_s, max_work=max_work)
        status = self._solve(solver, made, True, WHOLE)
        if incumbent.objective < before:
            return
        if status in (cp_model.OPTIMAL, cp_model.INFEASIBLE):
            self.free = min(self.free + 1, len(plan.paths))
        elif self.free > 2:
            self.free -= 1

    def _neighbourhood(self, plan: PathPlan) -> list[int]:
        """Microbatches that end last or meet those on their devices, or any."""
        count = len(plan.paths)
        size = min(self.free, count)
        if self.rng.random() < self.params.anywhere:
            return [int(b) for b in self.rng.choice(count, size, replace=False)]
        ends = np.zeros(count)
        for op in plan.ops:
            ends[op.microbatch] = max(ends[op.microbatch], op.end_s)
        weight = np.exp((ends - ends.max()) / (0.1 * ends.max() + 1e-12))
        seedling = int(self.rng.choice(count, p=weight / weight.sum()))
        mine = set(plan.paths[seedling])
        shared = np.array([0.2 + len(mine & set(p)) for p in plan.paths])
        shared[seedling] = 0.0
        others = self.rng.choice(count, size - 1, replace=False, p=shared / shared.sum())
        return [seedling, *(int(b) for b in others)]

    def _solve(self, solver: cp_model.CpSolver, made: PathModel, once: bool, basis: str) -> Any:
        """Solve and offer what is found; at the end only, if ``once`` (deterministic)."""
        if once:
            status = solve_interruptibly(solver, made.model)
            self.work += work_of(solver)
            if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                paths = made.paths(solver.value)
                ranks = made.ranks(solver.value, paths)
                self.incumbent.offer_plan(timed_by_rank(self.problem, paths, ranks))
            return status
        watch = _Watch(made, self.problem, self.incumbent, solver, basis)
        solver.best_bound_callback = watch.on_bound
        status = solve_interruptibly(solver, made.model, watch)
        if watch.error is not None:
            raise watch.error
        return status
