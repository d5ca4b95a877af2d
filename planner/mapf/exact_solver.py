"""CP-SAT on the job-shop model: the full problem, or large-neighbourhood search (LNS)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from planner.mapf.arrays import PathArrays
from planner.mapf.collision_free_bound import collision_free_bound_s
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.job_shop_model import (
    TICKS,
    PathModel,
    build,
    proven_bound_s,
    renumber_by_first_forward,
)
from planner.mapf.path_enumeration import Path, all_paths, chain_s, count_paths
from planner.mapf.schedule_by_rank import schedule_by_rank
from planner.problems import PathProblem
from planner.problems.answers import PathPlan
from planner.search.cp_sat import solve_interruptibly, solver_for, work_of

COLLISION_FREE = "CP-SAT: paths without collisions away from the start devices"
FULL_MODEL = "CP-SAT: whole model of paths and times"
FULL_MODEL_WITHOUT_LINKS = "CP-SAT: whole model of paths and times, links that queue left out"

SLACK = 1 + 1e-9
"""Relative tolerance for sums of floats in a different order."""


@dataclass(frozen=True)
class ExactSolverParams:
    """Limits on the size of CP-SAT models and of LNS neighbourhoods.

    Attributes
    ----------
    max_paths
        Maximum number of paths per start device, without swapped ones, for enumeration.
    max_literals
        Maximum number of path literals in one model.
    max_microbatches
        Maximum number of microbatches whose times are all free at once.
    coarse_steps
        Integer time steps of a first, coarse proof.
    small
        Maximum number of operations for a coarse proof.
    neighbourhood_size
        Initial number of microbatches whose paths a neighbourhood frees.
    random_share
        Share of the neighbourhoods that are drawn uniformly from all microbatches.
    """

    max_paths: int = 3000
    max_literals: int = 40_000
    max_microbatches: int = 60
    coarse_steps: int = 1 << 13
    small: int = 100
    neighbourhood_size: int = 4
    random_share: float = 0.3


class _SolutionCallback(cp_model.CpSolverSolutionCallback):
    """Schedules every solution exactly, offers it to the incumbent, and forwards bounds.

    Solutions are scheduled for ``problem``, of which the model may be a relaxation. An exception
    here stops the solve and is raised afterwards: it would be lost in CP-SAT's threads.
    """

    def __init__(
        self,
        path_model: PathModel,
        problem: PathProblem,
        incumbent: PathIncumbent,
        solver: cp_model.CpSolver,
        basis: str,
    ) -> None:
        super().__init__()
        self._path_model = path_model
        self._problem = problem
        self._basis = basis
        self._incumbent = incumbent
        self._solver = solver
        self.error: Exception | None = None

    def on_solution_callback(self) -> None:
        self._guarded(self._offer)

    def on_bound(self, bound: float) -> None:
        """Raise the incumbent's bound to the model's."""
        seconds = bound * self._path_model.tick_s
        self._guarded(lambda: self._incumbent.offer_bound(seconds, self._basis))

    def _offer(self) -> None:
        paths = self._path_model.paths(self.value)
        ranks = self._path_model.ranks(self.value, paths)
        self._incumbent.offer_plan(schedule_by_rank(self._problem, paths, ranks))

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self.error = error
        if self.error is not None or self._incumbent.run.check() is not None:
            self._solver.stop_search()


class ExactSolver:
    """CP-SAT on one problem, sharing an incumbent with other methods.

    Attributes
    ----------
    small
        Whether a coarse proof comes first.
    enumerable
        Whether all paths are enumerated.
    fits_one_model
        Whether all paths fit in one model.
    work
        CP-SAT's deterministic time since the last `pop_work`.
    """

    def __init__(
        self,
        problem: PathProblem,
        arrays: PathArrays,
        incumbent: PathIncumbent,
        seed: int,
    ) -> None:
        self.problem = problem
        self.arrays = arrays
        self.incumbent = incumbent
        self.seed = seed
        self.params = params = ExactSolverParams()
        self.rng = np.random.default_rng((seed, 1))
        self.neighbourhood_size = params.neighbourhood_size
        self.work = 0.0
        path_count = count_paths(arrays)
        swaps = 1 + max(0, arrays.path_stages - 2) * (arrays.max_swaps > 0)
        few_microbatches = arrays.microbatches <= params.max_microbatches
        self.small = arrays.microbatches * arrays.steps <= params.small
        self.enumerable = path_count <= params.max_paths and arrays.path_stages > 1
        literals = path_count * swaps * arrays.microbatches
        self.fits_one_model = (
            self.enumerable and few_microbatches and literals <= params.max_literals
        )
        self.lns_applicable = few_microbatches
        # the relaxation without queueing on links; None once it is solved
        self._relaxed = problem.replace(link_s=None) if arrays.queueing else None
        self._enumerated: dict[int, list[Path]] = {}
        if self.enumerable:
            for start in dict.fromkeys(arrays.starts.tolist()):
                paths = all_paths(arrays, start)
                self._enumerated[start] = sorted(paths, key=lambda p: (chain_s(arrays, p), p))

    def candidate_paths(self) -> dict[int, list[Path]]:
        """Paths per start device that a plan better than the incumbent may use."""
        limit = self.incumbent.objective * SLACK
        return {
            start: [p for p in paths if chain_s(self.arrays, p) <= limit]
            for start, paths in self._enumerated.items()
        }

    def pop_work(self) -> float:
        """CP-SAT's deterministic time since the last call."""
        work, self.work = self.work, 0.0
        return work

    def bound_without_collisions(self, workers: int, max_s: float, max_work: float) -> None:
        """Raise the bound by the relaxation without collisions; limits as in `solver_for`."""
        solver = solver_for(seed=self.seed, workers=workers, max_s=max_s, max_work=max_work)
        bound = collision_free_bound_s(
            self.arrays, self.candidate_paths(), self.incumbent.objective, solver
        )
        self.work += work_of(solver)
        self._raise_bound(bound, COLLISION_FREE)

    def prove(self, workers: int, max_s: float, max_work: float) -> None:
        """Solve the full model for better plans and a bound.

        Small problems are first solved with few time steps: propagation may raise the bound one
        step at a time, and then starts from the coarse bound. Where links queue, the relaxation
        without links is solved first: its model is far smaller, its bound is valid, and its
        solutions are scheduled with links.
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
        """Solve the model of the problem or of a relaxation; True if solved to optimality."""
        incumbent = self.incumbent
        basis = FULL_MODEL if problem is self.problem else FULL_MODEL_WITHOUT_LINKS
        plan = renumber_by_first_forward(incumbent.path_plan(), self.problem.microbatches_per_start)
        candidate_paths = self.candidate_paths()
        starts = self.arrays.starts.tolist()
        path_model = build(problem, [candidate_paths[s] for s in starts], plan.makespan_s, steps)
        path_model.hint(plan)
        path_model.model.add(
            path_model.makespan >= math.floor((incumbent.bound or 0.0) / path_model.tick_s)
        )
        solver = solver_for(seed=self.seed, workers=workers, max_s=max_s, max_work=max_work)
        status = self._solve(solver, path_model, math.isfinite(max_work), basis)
        self._raise_bound(proven_bound_s(solver, status, path_model.tick_s), basis)
        return bool(status == cp_model.OPTIMAL)

    def _raise_bound(self, seconds: float, basis: str) -> None:
        """Raise the bound to that of a model that contains the incumbent."""
        if math.isinf(seconds):
            self.incumbent.contradict(basis)
        self.incumbent.offer_bound(seconds, basis)

    def improve_neighbourhood(self, max_s: float, max_work: float) -> None:
        """Free the paths of a few microbatches and all times (large-neighbourhood search)."""
        incumbent = self.incumbent
        plan, before = incumbent.path_plan(), incumbent.objective
        free_microbatches = set(self._neighbourhood(plan))
        limit = before * SLACK
        candidate_paths: list[list[Path]] = []
        for b, path in enumerate(plan.paths):
            choice = [path]
            if b in free_microbatches:
                all_of = self._enumerated.get(path[0], [])
                short_enough = [p for p in all_of if p != path and chain_s(self.arrays, p) <= limit]
                choice += short_enough[: self.params.max_literals // (8 * len(free_microbatches))]
            candidate_paths.append(choice)
        path_model = build(self.problem, candidate_paths, before)
        path_model.hint(plan)
        seed = int(self.rng.integers(1 << 30))
        solver = solver_for(seed=seed, max_s=max_s, max_work=max_work)
        status = self._solve(solver, path_model, True, FULL_MODEL)
        if incumbent.objective < before:
            return
        if status in (cp_model.OPTIMAL, cp_model.INFEASIBLE):
            self.neighbourhood_size = min(self.neighbourhood_size + 1, len(plan.paths))
        elif self.neighbourhood_size > 2:
            self.neighbourhood_size -= 1

    def _neighbourhood(self, plan: PathPlan) -> list[int]:
        """Late microbatches and those that share their devices, or random ones."""
        count = len(plan.paths)
        size = min(self.neighbourhood_size, count)
        if self.rng.random() < self.params.random_share:
            return [int(b) for b in self.rng.choice(count, size, replace=False)]
        ends = np.zeros(count)
        for op in plan.ops:
            ends[op.microbatch] = max(ends[op.microbatch], op.end_s)
        weight = np.exp((ends - ends.max()) / (0.1 * ends.max() + 1e-12))
        seed_microbatch = int(self.rng.choice(count, p=weight / weight.sum()))
        seed_devices = set(plan.paths[seed_microbatch])
        shared = np.array([0.2 + len(seed_devices & set(p)) for p in plan.paths])
        shared[seed_microbatch] = 0.0
        others = self.rng.choice(count, size - 1, replace=False, p=shared / shared.sum())
        return [seed_microbatch, *(int(b) for b in others)]

    def _solve(
        self, solver: cp_model.CpSolver, path_model: PathModel, at_end_only: bool, basis: str
    ) -> Any:
        """Solve and offer solutions; only the last one with ``at_end_only`` (deterministic)."""
        if at_end_only:
            status = solve_interruptibly(solver, path_model.model)
            self.work += work_of(solver)
            if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                paths = path_model.paths(solver.value)
                ranks = path_model.ranks(solver.value, paths)
                self.incumbent.offer_plan(schedule_by_rank(self.problem, paths, ranks))
            return status
        watch = _SolutionCallback(path_model, self.problem, self.incumbent, solver, basis)
        solver.best_bound_callback = watch.on_bound
        status = solve_interruptibly(solver, path_model.model, watch)
        if watch.error is not None:
            raise watch.error
        return status
