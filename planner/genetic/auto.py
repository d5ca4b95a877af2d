"""The default method: an exact class model where it is fast, otherwise search and chain bound.

A limit on iterations is divided into iterations and CP-SAT's deterministic time, a time limit alone
into seconds.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from planner.genetic.chain_bound import ChainBound
from planner.genetic.classes import (
    ClassCosts,
    counts_of,
    groups_from_counts,
    interchangeable,
    solve_classes,
)
from planner.genetic.data import groups_of
from planner.genetic.matched_assignment import data_parallel_cost
from planner.genetic.packing_bound import MAX_MODELS, PACKING, PackingBound
from planner.genetic.tempering import ParallelTempering
from planner.matching.path_tsp import open_path
from planner.problems import AssignmentProblem
from planner.search.stop import AnyOf, Effort, MaxRuntime, StoppingCriterion


@dataclass(frozen=True)
class ClassParams:
    """Parameters of the two solves of the class model.

    Proofs are much faster with a tight upper bound, so a short solve that improves the plan is
    followed by a second one.

    Attributes
    ----------
    time_share
        Share of the remaining seconds for both solves.
    first_s
        Seconds of the first solve.
    first_work, max_work
        CP-SAT's deterministic time of both solves without a pure time limit.
    """

    time_share: float = 1.0
    first_s: float = 1.5
    first_work: float = 3.0
    max_work: float = 60.0


@dataclass(frozen=True)
class AutoParams:
    """Settings of ``auto``.

    Attributes
    ----------
    max_classes, devices_per_class
        The class model is used for at most ``max_classes`` classes with at least
        ``devices_per_class`` devices on average.
    max_classes_always
        It is always used for at most this many classes.
    warm_up_s, warm_up_share, warm_up_iterations
        Search before the class model, for a good upper bound: seconds, at most this share of the
        remaining ones, and iterations.
    path_share, path_effort
        Share of the remaining seconds or effort for the open path with one pipeline; its effort
        under a limit on iterations.
    search_s, search_share, max_search_share
        Search before the chain bound: ``search_s`` seconds or ``search_share`` of the remaining
        ones, whichever is more, but at most ``max_search_share``.
    search_iterations, rounds
        Without a pure time limit: iterations of search and rounds of queries, alternating.
    parallel_queries
        Queries solved at the same time; independent of the machine for reproducibility.
    packings_per_iteration, max_refinements
        Without a pure time limit: packings decided per iteration of the limit. Most refinements of
        the packing bound.
    """

    max_classes: int = 20
    devices_per_class: int = 3
    max_classes_always: int = 10
    warm_up_s: float = 1.0
    warm_up_share: float = 0.2
    warm_up_iterations: int = 24
    classes: ClassParams = ClassParams(time_share=0.9)
    path_share: float = 0.5
    path_effort: float = 5.0
    search_s: float = 9.0
    search_share: float = 0.2
    max_search_share: float = 0.9
    search_iterations: int = 300
    rounds: int = 15
    parallel_queries: int = 2
    packings_per_iteration: int = 10
    max_refinements: int = 24


class AutoSolver:
    """One solve with method ``auto``; plans and bounds go to the search's incumbent."""

    def __init__(self, problem: AssignmentProblem, search: ParallelTempering) -> None:
        self.problem = problem
        self.search = search
        self.data = search.data
        self.incumbent = search.incumbent
        self.search_run = search.incumbent.run
        self.params = AutoParams()

    def run(self) -> None:
        """Run the class model where devices repeat, then search and chain bound."""
        run = self.search_run
        if int(self.data.sizes.max()) == 1 and self.data.free_order:
            self._solve_one_pipeline()
        if run.check() is not None:
            return
        classes = interchangeable(self.problem)
        if self._class_model_applies(len(classes)):
            self._warm_up()
            if run.check() is None:
                prove_by_classes(self.search, classes, self.params.classes)
                if not run.paced_by_time:
                    run.update()
        if run.check() is None:
            self._search_and_prove()
        if not (run.paced_by_time or self.incumbent.closed):
            models = self.params.packings_per_iteration * run.max_iterations
            self._prove_by_packing(int(min(models, MAX_MODELS)))

    def _solve_one_pipeline(self) -> None:
        """Solve groups of one device: eq. 1 reduces to the open path of eq. 4."""
        run, share = self.search_run, self.params.path_share
        remaining_s, effort = run.remaining_s, share * run.remaining_effort
        if run.paced_by_time:
            # MaxRuntime(0) is not a valid criterion
            criterion: StoppingCriterion = MaxRuntime(max(share * remaining_s, 1e-3))
        else:
            criterion = Effort(effort if 0 < effort < math.inf else self.params.path_effort)
            if 0 < remaining_s < math.inf:
                criterion = AnyOf(criterion, MaxRuntime(remaining_s))
        path = open_path(self.data.pp_cost[0], criterion, self.incumbent.seed)
        if path.plan is not None and path.bound is not None:
            self.search.offer(np.array(path.plan, dtype=np.int64))
            self.incumbent.offer_bound(path.bound, f"open path of all devices: {path.basis}")
        if 0 < effort < math.inf and not self.incumbent.closed:
            run.spend(effort)
        if path.stop_reason == "interrupted":
            run.reason = path.stop_reason

    def _class_model_applies(self, classes: int) -> bool:
        params = self.params
        many_each = classes * params.devices_per_class <= len(self.data.stage_of_slot)
        return classes <= params.max_classes_always or (classes <= params.max_classes and many_each)

    def _warm_up(self) -> None:
        run, params = self.search_run, self.params
        until_s = math.inf
        if run.paced_by_time:
            share_s = params.warm_up_share * run.remaining_s
            until_s = run.elapsed_s + min(params.warm_up_s, share_s)
        # one iteration is reserved for the class model
        iterations = min(params.warm_up_iterations, run.remaining_iterations - 1)
        if math.isfinite(run.remaining_effort):
            iterations = min(iterations, params.warm_up_share * run.remaining_iterations)
        self.search.run(until_s=until_s, iterations=iterations)

    def _search_and_prove(self) -> None:
        """Search, and improve the packing bound and the chain bound in the remaining time."""
        if self.search_run.paced_by_time:
            self._search_by_time()
        else:
            self._search_by_iterations()

    def _chain_bound(self) -> ChainBound | None:
        applies = ChainBound.applies(self.data)
        return ChainBound(self.data, self.search.best) if applies else None

    def _search_by_time(self) -> None:
        run, params = self.search_run, self.params
        until_s = math.inf
        if ChainBound.applies(self.data) or PackingBound.applies(self.data):
            remaining_s = run.remaining_s
            wanted_s = max(params.search_share * remaining_s, params.search_s)
            until_s = run.elapsed_s + min(wanted_s, params.max_search_share * remaining_s)
        self.search.run(until_s=until_s)
        self._prove_by_packing(MAX_MODELS)
        chain = None if run.check() is not None else self._chain_bound()
        while chain is not None and run.check() is None and self._solve_queries(chain):
            pass
        self.search.run()

    def _search_by_iterations(self) -> None:
        chain = self._chain_bound()
        while self.search_run.check() is None:
            self.search.run(iterations=self.params.search_iterations)
            for _ in range(self.params.rounds):
                # proofs that follow the last iteration are still run
                over = self.incumbent.closed or 0 in (
                    self.search_run.remaining_s,
                    self.search_run.remaining_effort,
                )
                if chain is None or over or not self._solve_queries(chain):
                    chain = None
                    break

    def _prove_by_packing(self, max_packings: int) -> None:
        """Compute the packing bound, and refine it."""
        run, incumbent = self.search_run, self.incumbent
        if not PackingBound.applies(self.data):
            return
        packing = PackingBound(
            self.data, incumbent.objective, max_packings, lambda: run.remaining_s <= 0
        )
        data_parallel_s = data_parallel_cost(self.data, self.search.best)
        for _ in range(self.params.max_refinements):
            incumbent.require_admitted(packing.bound_at(data_parallel_s), PACKING)
            incumbent.offer_bound(packing.bound, PACKING, packing.witness)
            if not packing.refine():
                break

    def _solve_queries(self, chain: ChainBound) -> bool:
        """Solve one round of queries in parallel; False if there are none left."""
        chain.tighten(self.search.best)
        queries = chain.queries(self.params.parallel_queries)
        if not queries:
            return False
        max_s = self.search_run.remaining_s
        with ThreadPoolExecutor(max_workers=self.params.parallel_queries) as pool:
            outcomes = list(pool.map(lambda q: q.solve(self.data, max_s), queries))
        for query, outcome in zip(queries, outcomes, strict=True):
            chain.record(query, outcome)
        self.incumbent.offer_bound(
            chain.bound, "chain bound: CP-SAT decisions on which boundaries stay below a level"
        )
        self.search_run.spend(sum(query.max_work for query in queries))
        return True


def prove_by_classes(
    search: ParallelTempering, classes: list[list[int]], params: ClassParams | None = None
) -> None:
    """Solve the class model with CP-SAT, starting from the search's incumbent."""
    data, incumbent, run = search.data, search.incumbent, search.incumbent.run
    params = params or ClassParams()
    costs = ClassCosts.of(data, classes)
    time_limited = run.paced_by_time
    until_s = run.elapsed_s + (
        params.time_share * run.remaining_s if time_limited else run.remaining_s
    )
    for first in (True, False):
        remaining_s = until_s - run.elapsed_s
        max_work = min(params.first_work if first else params.max_work, run.remaining_effort)
        result = solve_classes(
            data,
            costs,
            upper=incumbent.objective,
            hint=counts_of(costs, groups_of(data, search.best)),
            max_s=min(remaining_s, params.first_s) if time_limited and first else remaining_s,
            max_work=math.inf if time_limited else max_work,
        )
        if result.counts is not None:
            groups = groups_from_counts(costs, result.counts)
            search.offer(np.array([d for group in groups for d in group], dtype=np.int64))
        basis = f"CP-SAT: model of {len(classes)} classes of devices"
        incumbent.offer_bound(result.bound, basis)
        # with work left it is solved, or makes no progress
        is_done = not time_limited and result.work < max_work / 2
        if run.spend(result.work) is not None or is_done:
            break
