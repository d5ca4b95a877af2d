"""`solve_assignment`: one entry for every way to place devices."""

from __future__ import annotations

import enum
import math

import numpy as np

from planner.genetic.anneal import solve_matchings
from planner.genetic.bounds import quick_bound
from planner.genetic.classes import (
    ClassCosts,
    counts_of,
    expand,
    interchangeable,
    solve_classes,
)
from planner.genetic.search import Search
from planner.genetic.tables import Ints, Tables, tables_of
from planner.parts import AssignmentPlan
from planner.problems import AssignmentProblem, ProblemError
from planner.result import Result
from planner.stop import StoppingCriterion, StopRun


class Method(enum.StrEnum):
    """Ways to solve an assignment problem."""

    AUTO = "auto"
    SEARCH = "search"
    CLASSES = "classes"


FEW_CLASSES = 20
"""Up to this many classes (clusters) the class model is worth its time."""

WARM_UP_S = 1.5
"""Search before the class model, to give it a good upper bound."""

WARM_UP_ITERATIONS = 24
EFFORT = 60.0
"""Deterministic time for CP-SAT under a limit on iterations."""


def solve_assignment(
    problem: AssignmentProblem,
    stop: StoppingCriterion,
    seed: int = 0,
    method: str = "auto",
) -> Result[AssignmentPlan]:
    """Place devices on stages and pipelines so that eq. 1 is smallest.

    Parameters
    ----------
    problem
        Network, shape and bytes.
    stop
        When to end. One iteration is one step of the method: a round of annealing moves for
        ``search``, one offspring for ``genetic``.
    seed
        Of the random generator. The same problem, seed and limit on iterations give the same plan
        in any process.
    method
        ``"auto"`` or another `Method`.

    Returns
    -------
    Result
        ``objective`` is ``problem.cost(plan.groups)``; ``bound`` is proven for every method.
    """
    try:
        chosen = Method(method)
    except ValueError:
        raise ProblemError(
            f"method is {method!r}; it must be one of {', '.join(Method)}"
        ) from None
    run = stop.start()
    tables = tables_of(problem)
    work = _Work(problem, tables, run, seed)
    with run.interruptible():
        work.start()
        match chosen:
            case Method.AUTO:
                work.auto()
            case Method.CLASSES:
                work.classes()
            case Method.SEARCH:
                work.search.run(run)
    return work.result(chosen, seed)


class _Work:
    """One solve: the incumbent lives in the search, the bound in the stopping rule's run."""

    def __init__(
        self, problem: AssignmentProblem, tables: Tables, run: StopRun, seed: int
    ) -> None:
        self.problem = problem
        self.tables = tables
        self.run = run
        self.seed = seed
        self.search = Search(tables, seed)
        run.improve(self.search.best_cost)
        run.bound = 0.0

    def start(self) -> None:
        self.raise_bound(quick_bound(self.tables))

    def raise_bound(self, bound: float) -> None:
        """Keep the better bound."""
        self.run.bound = max(self.run.bound or 0.0, min(bound, self.search.best_cost))

    def auto(self) -> None:
        """The class model where devices repeat, search and relaxations elsewhere."""
        run = self.run
        classes = interchangeable(self.problem)
        if len(classes) <= FEW_CLASSES:
            share = min(WARM_UP_S, 0.2 * run.remaining_s)
            self.search.run(run, until_s=run.elapsed_s + share, iterations=WARM_UP_ITERATIONS)
            if run.check() is None:
                self.exact(ClassCosts.of(self.tables, classes))
        else:
            self.search.run(run)

    def classes(self) -> None:
        """The class model alone, from the trivial plan."""
        self.exact(ClassCosts.of(self.tables, interchangeable(self.problem)))

    def exact(self, costs: ClassCosts) -> None:
        """CP-SAT on exact classes."""
        run = self.run
        outcome = solve_classes(
            self.tables,
            costs,
            upper=self.search.best_cost,
            runtime_s=run.remaining_s,
            seed=self.seed,
            hint=counts_of(costs, self.groups(self.search.best)),
            effort=None if math.isfinite(run.remaining_s) else EFFORT,
        )
        if outcome.counts is not None:
            groups = expand(costs, outcome.counts)
            slots = np.array([d for group in groups for d in group], dtype=np.int64)
            if self.search.offer(slots):
                run.improve(self.search.best_cost)
        self.raise_bound(outcome.bound)
        run.check()

    def groups(self, slots: Ints) -> list[list[int]]:
        """Devices per stage."""
        first = self.tables.first
        return [
            [int(d) for d in slots[first[j] : first[j + 1]]] for j in range(len(self.tables.sizes))
        ]

    def result(self, method: Method, seed: int) -> Result[AssignmentPlan]:
        """The incumbent as a result."""
        run = self.run
        plan = plan_of(self.problem, self.tables, self.search.best)
        objective = self.problem.cost(plan.groups)
        return Result.of(
            plan,
            objective,
            min(run.bound or 0.0, objective),
            runtime_s=run.elapsed_s,
            stop_reason=run.reason or "done",
            seed=seed,
            method=method,
            history=run.history,
        )


def plan_of(problem: AssignmentProblem, tables: Tables, slots: Ints) -> AssignmentPlan:
    """A plan from slots; with equal groups its grid realises the bottleneck matchings."""
    first, stages = tables.first, len(tables.sizes)
    if problem.pipelines is None:
        return AssignmentPlan.of_groups([slots[first[j] : first[j + 1]].tolist() for j in range(stages)])
    # the same groups give the same grid, whatever order the search left them in
    ordered = np.concatenate([np.sort(slots[first[j] : first[j + 1]]) for j in range(stages)])
    after, before = np.empty_like(ordered), np.empty_like(ordered)
    solve_matchings(tables, ordered, after, before)
    grid = np.empty((problem.pipelines, stages), dtype=np.int64)
    at = np.arange(problem.pipelines)
    for j in range(stages):
        grid[:, j] = ordered[at]
        at = after[at]
    return AssignmentPlan.of_grid(grid)
