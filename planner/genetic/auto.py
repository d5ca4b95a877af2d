"""The default method: exact models where they are quick, search and a growing bound elsewhere.

A limit on iterations is shared out in iterations and CP-SAT's deterministic time; only a limit in
seconds alone is shared out in seconds.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from planner.genetic.chain import ChainBound
from planner.genetic.classes import ClassCosts, counts_of, expand, interchangeable, solve_classes
from planner.genetic.search import AssignmentSearch
from planner.genetic.tables import groups_of
from planner.matching.path_tsp import open_path
from planner.problems import AssignmentProblem
from planner.search.stop import AnyOf, MaxIterations, MaxRuntime, StoppingCriterion


@dataclass(frozen=True)
class ClassParams:
    """Settings of the class model's two solves.

    A proof is much quicker below a tight upper bound, so a short solve that improves the plan is
    followed by a fresh one.

    Attributes
    ----------
    share
        Share of the seconds left for both.
    first_s
        Seconds of the first.
    first_effort, effort
        CP-SAT's deterministic time of both where counts decide.
    """

    share: float = 1.0
    first_s: float = 1.5
    first_effort: float = 3.0
    effort: float = 60.0


@dataclass(frozen=True)
class AutoParams:
    """Settings of ``auto``.

    Attributes
    ----------
    few_classes, devices_per_class
        Up to so many classes, of so many devices on average, the class model is worth its time.
    very_few_classes
        Up to so many it is worth it in any case.
    warm_up_s, warm_up_share, warm_up_iterations
        Search before the class model, to give it a good upper bound: seconds, but at most this
        share of those left, and iterations.
    path_share, path_iterations
        Share of the seconds left for the open path where there is one pipeline; its iterations
        where counts decide.
    search_s, search_share, most_search_share
        Search before the chain bound: so many seconds, or the share of those left if that is more,
        but at most the last share.
    search_iterations, rounds
        Where counts decide: iterations of search, then rounds of decisions, in turn.
    provers
        Decisions made at the same time; fixed, so that any machine makes the same ones.
    """

    few_classes: int = 20
    devices_per_class: int = 3
    very_few_classes: int = 10
    warm_up_s: float = 1.0
    warm_up_share: float = 0.2
    warm_up_iterations: int = 24
    classes: ClassParams = ClassParams(share=0.9)
    path_share: float = 0.5
    path_iterations: int = 1000
    search_s: float = 9.0
    search_share: float = 0.2
    most_search_share: float = 0.9
    search_iterations: int = 300
    rounds: int = 15
    provers: int = 2


class Auto:
    """One solve; plans and bounds go to the search's incumbent."""

    def __init__(
        self, problem: AssignmentProblem, search: AssignmentSearch, params: AutoParams | None = None
    ) -> None:
        self.problem = problem
        self.search = search
        self.tables = search.tables
        self.incumbent = search.incumbent
        self.stop = search.incumbent.run
        self.params = params or AutoParams()

    def run(self) -> None:
        """The class model where devices repeat; search and the chain bound elsewhere or after."""
        stop = self.stop
        if int(self.tables.sizes.max()) == 1 and self.tables.free_order:
            self._one_pipeline()
        if stop.check() is not None:
            return
        classes = interchangeable(self.problem)
        if self._worth_a_model(len(classes)):
            self._warm_up()
            if stop.check() is None:
                prove_by_classes(self.search, classes, self.params.classes)
                if not stop.paced_by_time:
                    stop.update()
        if stop.check() is None:
            self._open_ended()

    def _one_pipeline(self) -> None:
        """Groups of one device: what is left of eq. 1 is the open path of eq. 4."""
        left_s = self.stop.remaining_s
        if self.stop.paced_by_time:
            # a rule of no seconds is none
            rule: StoppingCriterion = MaxRuntime(max(self.params.path_share * left_s, 1e-3))
        else:
            rule = MaxIterations(self.params.path_iterations)
            if 0 < left_s < math.inf:
                rule = AnyOf(rule, MaxRuntime(left_s))
        path = open_path(self.tables.hop[0], rule, self.incumbent.seed)
        if path.plan is not None and path.bound is not None:
            self.search.offer(np.array(path.plan, dtype=np.int64))
            self.incumbent.raise_bound(path.bound, f"open path of all devices: {path.basis}")
        if path.stop_reason == "interrupted":
            self.stop.reason = path.stop_reason

    def _worth_a_model(self, classes: int) -> bool:
        params = self.params
        many_each = classes * params.devices_per_class <= len(self.tables.stage)
        return classes <= params.very_few_classes or (classes <= params.few_classes and many_each)

    def _warm_up(self) -> None:
        stop, params = self.stop, self.params
        until_s = math.inf
        if stop.paced_by_time:
            share_s = params.warm_up_share * stop.remaining_s
            until_s = stop.elapsed_s + min(params.warm_up_s, share_s)
        # one iteration is the model's
        iterations = min(params.warm_up_iterations, stop.remaining_iterations - 1)
        if math.isfinite(stop.remaining_effort):
            iterations = min(iterations, params.warm_up_share * stop.remaining_iterations)
        self.search.run(until_s=until_s, iterations=iterations)

    def _open_ended(self) -> None:
        """Search, and the chain bound in the rest of the time."""
        chain = None
        if ChainBound.applies(self.tables):
            chain = ChainBound(self.tables, self.search.best)
        if self.stop.paced_by_time:
            self._by_time(chain)
        else:
            self._by_counts(chain)

    def _by_time(self, chain: ChainBound | None) -> None:
        stop, params = self.stop, self.params
        until_s = math.inf
        if chain is not None:
            left_s = stop.remaining_s
            wanted_s = max(params.search_share * left_s, params.search_s)
            until_s = stop.elapsed_s + min(wanted_s, params.most_search_share * left_s)
        self.search.run(until_s=until_s)
        while chain is not None and stop.check() is None and self._prove(chain):
            pass
        self.search.run()

    def _by_counts(self, chain: ChainBound | None) -> None:
        while self.stop.check() is None:
            self.search.run(iterations=self.params.search_iterations)
            for _ in range(self.params.rounds):
                # the last iteration is no reason to skip the proofs that follow it
                over = self.incumbent.closed or 0 in (
                    self.stop.remaining_s,
                    self.stop.remaining_effort,
                )
                if chain is None or over or not self._prove(chain):
                    chain = None
                    break

    def _prove(self, chain: ChainBound) -> bool:
        """One round of decisions, some at a time; False if there is nothing left to decide."""
        chain.tighten(self.search.best)
        questions = chain.questions(self.params.provers)
        if not questions:
            return False
        limit_s = self.stop.remaining_s
        with ThreadPoolExecutor(max_workers=self.params.provers) as pool:
            answers = list(pool.map(lambda q: q.answer(self.tables, limit_s), questions))
        for question, answer in zip(questions, answers, strict=True):
            chain.learn(question, answer)
        self.incumbent.raise_bound(
            chain.bound, "chain bound: CP-SAT decisions on which boundaries stay below a level"
        )
        self.stop.spend(sum(question.effort for question in questions))
        return True


def prove_by_classes(
    search: AssignmentSearch, classes: list[list[int]], params: ClassParams | None = None
) -> None:
    """CP-SAT on classes of interchangeable devices, from the search's incumbent."""
    tables, incumbent, stop = search.tables, search.incumbent, search.incumbent.run
    settings = params or ClassParams()
    costs = ClassCosts.of(tables, classes)
    timed = stop.paced_by_time
    until_s = stop.elapsed_s + (settings.share * stop.remaining_s if timed else stop.remaining_s)
    for first in (True, False):
        left_s = until_s - stop.elapsed_s
        most = min(settings.first_effort if first else settings.effort, stop.remaining_effort)
        outcome = solve_classes(
            tables,
            costs,
            upper=incumbent.objective,
            hint=counts_of(costs, groups_of(tables, search.best)),
            max_s=min(left_s, settings.first_s) if timed and first else left_s,
            effort=math.inf if timed else most,
        )
        if outcome.counts is not None:
            groups = expand(costs, outcome.counts)
            search.offer(np.array([d for group in groups for d in group], dtype=np.int64))
        basis = f"CP-SAT: model of {len(classes)} classes of devices"
        incumbent.raise_bound(outcome.bound, basis)
        if stop.spend(outcome.work) is not None:
            break
