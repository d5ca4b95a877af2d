"""CP-SAT on the model of paths and times: the whole problem, or a few microbatches of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from planner.mapf.chains import Path, all_paths, chain_s, count_paths
from planner.mapf.cp_model import TICKS, PathModel, build, by_first_start
from planner.mapf.incumbent import Incumbent
from planner.mapf.relax import relaxed
from planner.mapf.tables import Tables
from planner.mapf.timing import timed_by_rank
from planner.problems import PathProblem
from planner.search.cp_sat import solve_interruptibly

MOST_PATHS = 3000
"""Most paths of a start device, swapped ones left out, for which all are listed."""

MOST_LITERALS = 40_000
"""Most literals of paths in one model."""

MOST_MICROBATCHES = 60
"""Most microbatches whose times are all left free at once."""

COARSE = 1 << 13
"""Steps of time of a first proof."""

SMALL = 100
"""Most operations for which there is one."""

SLACK = 1 + 1e-9
"""Sums of floats differ by the order of their terms."""


class _Recorder(cp_model.CpSolverSolutionCallback):
    """Times every solution exactly and offers it."""

    def __init__(self, made: PathModel, incumbent: Incumbent) -> None:
        super().__init__()
        self._made = made
        self._incumbent = incumbent

    def on_solution_callback(self) -> None:
        paths = self._made.paths(self.value)
        ranks = self._made.ranks(self.value, paths)
        self._incumbent.offer(timed_by_rank(self._made.problem, paths, ranks))
        if self._incumbent.run.check() is not None:
            self.stop_search()


def solver_for(seed: int, workers: int, max_s: float, max_work: float) -> cp_model.CpSolver:
    """A CP-SAT solver with limits in seconds and in its deterministic unit."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed % (1 << 31)
    if math.isfinite(max_s):
        solver.parameters.max_time_in_seconds = max(0.01, max_s)
    if math.isfinite(max_work):
        solver.parameters.max_deterministic_time = max_work
    return solver


class Exact:
    """Exact methods on one problem, around a shared incumbent."""

    def __init__(
        self, problem: PathProblem, tables: Tables, incumbent: Incumbent, seed: int
    ) -> None:
        self.problem = problem
        self.tables = tables
        self.incumbent = incumbent
        self.seed = seed
        self.rng = np.random.default_rng((seed, 1))
        self.free = 4
        listed = count_paths(tables)
        swaps = 1 + max(0, tables.path_stages - 2) * (tables.max_swaps > 0)
        self.small = tables.microbatches * tables.steps <= SMALL
        self.listable = listed <= MOST_PATHS and tables.path_stages > 1
        self.whole = (
            self.listable
            and tables.microbatches <= MOST_MICROBATCHES
            and listed * swaps * tables.microbatches <= MOST_LITERALS
        )
        self._listed: dict[int, list[Path]] = {}
        if self.listable:
            for start in dict.fromkeys(tables.starts.tolist()):
                paths = all_paths(tables, start)
                self._listed[start] = sorted(paths, key=lambda p: (chain_s(tables, p), p))

    def options(self) -> dict[int, list[Path]]:
        """Paths per start device that may be on a plan shorter than the incumbent."""
        limit = self.incumbent.makespan * SLACK
        return {
            start: [p for p in paths if chain_s(self.tables, p) <= limit]
            for start, paths in self._listed.items()
        }

    def relax(self, workers: int, max_s: float, max_work: float) -> None:
        """The bound without collisions."""
        bound = relaxed(
            self.tables,
            self.options(),
            self.incumbent.makespan,
            workers=workers,
            seed=self.seed % (1 << 31),
            max_s=max_s,
            max_work=max_work,
        )
        self.incumbent.raise_bound(bound)

    def prove(self, workers: int, max_s: float, max_work: float) -> None:
        """The whole problem: better plans and a bound.

        On small problems with few steps of time first: propagation may creep from the bound to the
        makespan a step at a time, and has only the rest of the way to go then.
        """
        if self.small:
            self._prove(workers, max_s / 2, max_work / 2, COARSE)
        if self.incumbent.run.check() is None:
            self._prove(workers, max_s, max_work, TICKS)

    def _prove(self, workers: int, max_s: float, max_work: float, steps: int) -> None:
        incumbent = self.incumbent
        assert incumbent.plan is not None
        plan = by_first_start(incumbent.plan, self.problem.microbatches_per_start)
        options = self.options()
        starts = self.tables.starts.tolist()
        made = build(self.problem, [options[s] for s in starts], plan.makespan_s, steps)
        made.hint(plan)
        made.model.add(made.makespan >= math.floor(incumbent.bound / made.tick_s * (1 - 1e-9)))
        solver = solver_for(self.seed, workers, max_s, max_work)

        def bounded(bound: float) -> None:
            incumbent.raise_bound(bound * made.tick_s)
            if incumbent.run.check() is not None:
                solver.stop_search()

        if math.isinf(max_work):
            solver.best_bound_callback = bounded
        self._solve(solver, made, math.isfinite(max_work))
        incumbent.raise_bound(solver.best_objective_bound * made.tick_s)

    def polish(self, max_s: float, max_work: float) -> None:
        """Free the paths of a few microbatches and all times (large-neighbourhood search)."""
        incumbent = self.incumbent
        plan = incumbent.plan
        assert plan is not None
        before = incumbent.makespan
        freed = set(self._neighbourhood())
        limit = before * SLACK
        options: list[list[Path]] = []
        for b, path in enumerate(plan.paths):
            choice = [path]
            if b in freed:
                all_of = self._listed.get(path[0], [])
                fit = [p for p in all_of if p != path and chain_s(self.tables, p) <= limit]
                choice += fit[: MOST_LITERALS // (8 * len(freed))]
            options.append(choice)
        made = build(self.problem, options, before)
        made.hint(plan)
        solver = solver_for(int(self.rng.integers(1 << 30)), 1, max_s, max_work)
        status = self._solve(solver, made, True)
        if incumbent.makespan < before:
            return
        if status in (cp_model.OPTIMAL, cp_model.INFEASIBLE):
            self.free = min(self.free + 1, len(plan.paths))
        elif self.free > 2:
            self.free -= 1

    def _neighbourhood(self) -> list[int]:
        """Microbatches that end last or meet those on their devices, or any."""
        plan = self.incumbent.plan
        assert plan is not None
        count = len(plan.paths)
        size = min(self.free, count)
        if self.rng.random() < 0.3:
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

    def _solve(self, solver: cp_model.CpSolver, made: PathModel, once: bool) -> Any:
        """Solve and offer what is found; at the end only, if ``once`` (deterministic)."""
        if not once:
            recorder = _Recorder(made, self.incumbent)
            return solve_interruptibly_with(solver, made.model, recorder)
        status = solve_interruptibly(solver, made.model)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            paths = made.paths(solver.value)
            ranks = made.ranks(solver.value, paths)
            self.incumbent.offer(timed_by_rank(self.problem, paths, ranks))
        return status


def solve_interruptibly_with(
    solver: cp_model.CpSolver, model: cp_model.CpModel, callback: _Recorder
) -> Any:
    """`solve_interruptibly` with a callback for solutions."""

    class _Bound:
        """A solver whose `solve` passes the callback on."""

        parameters = solver.parameters

        def solve(self, model: cp_model.CpModel) -> Any:
            return solver.solve(model, callback)

        def stop_search(self) -> None:
            solver.stop_search()

    return solve_interruptibly(_Bound(), model)  # type: ignore[arg-type]
