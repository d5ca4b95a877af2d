"""`solve_assignment`: one entry for every way to place devices."""

from __future__ import annotations

import enum
import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from planner.genetic.anneal import solve_matchings
from planner.genetic.bounds import SAFETY, quick_bound
from planner.genetic.chain import ChainBound
from planner.genetic.classes import (
    ClassCosts,
    counts_of,
    expand,
    interchangeable,
    solve_classes,
)
from planner.genetic.evolution import Evolution, EvolutionParams
from planner.genetic.greedy import region_greedy
from planner.genetic.local_search import Gain, improve_circular, improve_pairs
from planner.genetic.search import Search
from planner.genetic.tables import Ints, Tables, tables_of
from planner.matching.open_path import open_path
from planner.network.network import Network
from planner.problems import AssignmentProblem, ProblemError
from planner.problems.answers import AssignmentPlan
from planner.problems.quantities import of_kind
from planner.search.result import Result
from planner.search.stop import MaxIterations, MaxRuntime, StoppingCriterion, StopRun, started


class Method(enum.StrEnum):
    """Ways to solve an assignment problem."""

    AUTO = "auto"
    SEARCH = "search"
    CLASSES = "classes"
    GENETIC = "genetic"
    KERNIGHAN_LIN = "kl"
    CIRCULAR_KERNIGHAN_LIN = "circular-kl"
    RANDOM = "random"
    REGION_GREEDY = "region-greedy"


EVOLUTIONS = {
    Method.GENETIC: EvolutionParams(),
    Method.KERNIGHAN_LIN: EvolutionParams(gain=Gain.KERNIGHAN_LIN, circular=False),
    Method.CIRCULAR_KERNIGHAN_LIN: EvolutionParams(gain=Gain.KERNIGHAN_LIN),
    Method.RANDOM: EvolutionParams(gain=Gain.NONE, mutation=1.0),
}


FEW_CLASSES = 20
"""Up to this many classes, of three devices on average, the class model is worth its time."""

FEW = 10
"""Up to this many classes it is worth it in any case."""

WARM_UP_S = 1.0
WARM_UP_SHARE = 0.2
WARM_UP_ITERATIONS = 24
"""Search before the class model, to give it a good upper bound."""

EXACT_SHARE = 0.9
"""Share of the time left that ``auto`` gives to the class model."""

FIRST_SOLVE_S = 1.5
FIRST_EFFORT = 3.0
EFFORT = 60.0
"""First solve of the class model; deterministic times where there is no limit in seconds."""

PATH_SHARE = 0.5
"""Share of the time left for the open path where there is one pipeline."""

SEARCH_S = 9.0
SEARCH_SHARE = 0.2
SEARCH_MOST = 0.9
"""Search before the chain bound: so many seconds or the share if that is more, but at most so much
of the time left."""

ALTERNATE = 300
ROUNDS = 15
"""Without a limit in seconds: iterations of search, then rounds of decisions, in turn."""

PROVERS = 2
"""Decisions made at the same time; fixed, so that any machine makes the same ones."""


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
        ``search``, one offspring for ``genetic``. Proofs do not count as iterations: ``auto`` under
        a limit on iterations alone also does a fixed amount of proving.
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
        raise ProblemError(f"method is {method!r}; it must be one of {', '.join(Method)}") from None
    of_kind(AssignmentProblem, problem)
    compile_kernels(chosen in EVOLUTIONS)
    run = started(stop)
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
            case Method.REGION_GREEDY:
                work.offer(region_greedy(problem, tables))
            case _:
                work.evolve(EVOLUTIONS[chosen])
    return work.result(chosen, seed)


@cache
def compile_kernels(evolution: bool) -> None:
    """Compile before the clock starts, once per process and from the disk cache if it is there.

    The first solve of a new installation waits some seconds here, so that a time limit is spent on
    the problem.
    """
    far = np.ones((4, 4))
    tables = tables_of(AssignmentProblem(Network(far, far), 2, 2, 1.0, 1.0))
    Search(tables, 0).run(MaxIterations(1).start())
    if evolution:
        group_of, order = tables.stage.copy(), np.arange(2)
        improve_pairs(tables.hop[0], group_of, tables.sizes, order, True)
        improve_circular(tables.hop[0], group_of, tables.sizes, order, True)


class _Work:
    """One solve: the incumbent lives in the search, the bound in the stopping rule's run."""

    def __init__(self, problem: AssignmentProblem, tables: Tables, run: StopRun, seed: int) -> None:
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
        """The class model where devices repeat; search and the chain bound elsewhere or after."""
        run = self.run
        if int(self.tables.sizes.max()) == 1 and self.tables.free_order:
            self.one_pipeline()
        if run.check() is not None:
            return
        classes = interchangeable(self.problem)
        if len(classes) <= FEW or len(classes) <= min(FEW_CLASSES, len(self.tables.stage) // 3):
            self.search.run(
                run,
                until_s=run.elapsed_s + min(WARM_UP_S, WARM_UP_SHARE * run.remaining_s),
                iterations=min(WARM_UP_ITERATIONS, run.remaining_iterations - 1),
            )
            if run.check() is None:
                self.exact(ClassCosts.of(self.tables, classes), EXACT_SHARE)
                if not math.isfinite(run.remaining_s):
                    run.update()
        if run.check() is None:
            self.open_ended()

    def one_pipeline(self) -> None:
        """Groups of one device: what is left of eq. 1 is the open path of eq. 4."""
        left_s = self.run.remaining_s
        rule = MaxRuntime(PATH_SHARE * left_s) if 0 < left_s < math.inf else MaxIterations(1000)
        path = open_path(self.tables.hop[0], rule, self.seed)
        if path.plan is not None and path.bound is not None:
            self.offer(np.array(path.plan, dtype=np.int64))
            self.raise_bound(path.bound * (1 - SAFETY))

    def open_ended(self) -> None:
        """Search, and the chain bound in the rest of the time."""
        run = self.run
        chain = None
        if ChainBound.applies(self.tables):
            chain = ChainBound(self.tables, self.search.best_cost)
        if math.isfinite(run.remaining_s):
            left = run.remaining_s
            share = min(max(SEARCH_SHARE * left, SEARCH_S), SEARCH_MOST * left)
            self.search.run(run, until_s=run.elapsed_s + share if chain else math.inf)
            while chain is not None and run.check() is None and self.prove(chain):
                pass
            self.search.run(run)
        else:
            while run.check() is None:
                self.search.run(run, iterations=ALTERNATE)
                for _ in range(ROUNDS):
                    if chain is None or run.reason == "optimal" or not self.prove(chain):
                        chain = None
                        break

    def prove(self, chain: ChainBound) -> bool:
        """One round of decisions, two at a time; False if there is nothing left to decide."""
        chain.tighten(self.search.best_cost)
        questions = chain.questions(PROVERS)
        if not questions:
            return False
        limit_s = self.run.remaining_s
        with ThreadPoolExecutor(max_workers=PROVERS) as pool:
            answers = list(pool.map(lambda q: q.answer(self.tables, limit_s), questions))
        for question, answer in zip(questions, answers, strict=True):
            chain.learn(question, answer)
        self.raise_bound(chain.bound)
        self.run.check()
        return True

    def classes(self) -> None:
        """The class model alone, from the trivial plan."""
        self.exact(ClassCosts.of(self.tables, interchangeable(self.problem)), 1.0)

    def exact(self, costs: ClassCosts, share: float) -> None:
        """CP-SAT on exact classes for a share of the time left.

        A proof is much quicker below a tight upper bound, so a short solve that improves the plan
        is followed by a fresh one.
        """
        run = self.run
        until_s = run.elapsed_s + share * run.remaining_s
        for first in (True, False):
            left_s = until_s - run.elapsed_s
            outcome = solve_classes(
                self.tables,
                costs,
                upper=self.search.best_cost,
                runtime_s=min(left_s, FIRST_SOLVE_S) if first else left_s,
                hint=counts_of(costs, self.groups(self.search.best)),
                effort=None if math.isfinite(left_s) else FIRST_EFFORT if first else EFFORT,
            )
            if outcome.counts is not None:
                groups = expand(costs, outcome.counts)
                self.offer(np.array([d for group in groups for d in group], dtype=np.int64))
            self.raise_bound(outcome.bound)
            if run.check() is not None:
                break

    def evolve(self, params: EvolutionParams) -> None:
        """The genetic algorithm; an interrupt leaves its best."""
        evolution = Evolution(self.tables, self.seed, params)
        try:
            evolution.run(self.run)
        finally:
            self.offer(evolution.best)

    def offer(self, slots: Ints) -> None:
        """Consider an arrangement from elsewhere."""
        if self.search.offer(slots):
            self.run.improve(self.search.best_cost)

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
        return AssignmentPlan.of_groups(
            [slots[first[j] : first[j + 1]].tolist() for j in range(stages)]
        )
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
