"""The whole plan: who takes part, stages, layers, groups, paths and averaging at once.

Layouts are searched by an estimate of their step, the best are drafted with the paths of their flow
and served on the clock, the best of these priced in steps that chain. Then all again from other
starts, until the limit: a plan is there after the first round.
"""

from __future__ import annotations

import math

from planner.compose.bounds import StepBound
from planner.compose.flow_plan import Draft, drafted
from planner.compose.helpers import with_helpers
from planner.compose.layout import Layout
from planner.compose.layout_kernel import IN_FLIGHT
from planner.compose.layout_search import LayoutSearch
from planner.compose.places import Floats, Places
from planner.compose.request import Question
from planner.problems import ProblemError
from planner.search.incumbent import Incumbent
from planner.search.result import Result
from planner.search.stop import StoppingCriterion, started
from planner.training_plan.choices import Codec
from planner.training_plan.model import TrainingPlan

ROUND_TRIALS = 200_000.0
"""Of the layout search in one round, at most."""
SEARCHING = 0.4
"""Share of the limit for the layout search; pricing on the clock gets the rest."""
OPERATIONS_PER_EFFORT = 50_000
"""That the clock serves in a unit of effort."""
PASSES = 5
"""Of a plan's pricing: one from rest, and steps that chain."""
DRAFTS, PRICED = 6, 2
"""Layouts of a round that are drafted, and drafts that are priced."""
AGAIN, WORTH = 3, 1.08
"""How often a draft is made anew by what its devices took; only one not so far above the best."""
CHANGES, TRIED = 400, 6
"""Changes of the best plan's layout that are estimated in a round, and those that are drafted."""
MOST_IN_FLIGHT = (2.0, 3.0)
"""That the best draft is also made with."""


def best_whole(
    question: Question, stop: StoppingCriterion, bound: StepBound | None = None
) -> Result[TrainingPlan]:
    """The fastest plan found with every decision open that the request leaves open.

    Parameters
    ----------
    question
        What is asked, of what.
    stop
        When to end.
    bound
        Of any plan's step.

    Returns
    -------
    Result
        ``objective`` is the step on the clock.

    Raises
    ------
    NetworkError
        A pair of devices is not measured.
    ProblemError
        No layout fits the devices' memory.
    """
    question.cluster.network.require_complete()
    return _Search(question, stop, bound).result()


class _Search:
    """Rounds of layouts, drafts and prices, and the best plan so far."""

    def __init__(
        self, question: Question, stop: StoppingCriterion, bound: StepBound | None
    ) -> None:
        self.question, self.stop = question, stop
        self.places = Places.of(question.cluster)
        wire = Codec(question.request.codec).wire_ratio
        self.layouts = LayoutSearch(self.places, question.workload, wire, question.seed)
        # compiled before the clock starts
        self.trials_per_s = self.layouts.trials_in(1.0)
        self.run = started(stop, self.layouts.trials_per_effort)
        self.best: Incumbent[TrainingPlan] = Incumbent(
            self.run, question.cluster, method="layouts, flow", seed=question.seed
        )
        if bound is not None:
            self.best.raise_bound(*bound)
        self.leader: Draft | None = None
        self.drafted: set[Layout] = set()
        self.refused: ProblemError | None = None

    def result(self) -> Result[TrainingPlan]:
        """Rounds until the limit."""
        trials = self._trials()
        rounds = max(1, math.ceil(trials / ROUND_TRIALS))
        with self.run.interruptible():
            for _ in range(rounds):
                self._round(trials / rounds)
                if self.run.check() is not None:
                    break
        if self.best.plan is None:
            self._price_anything()
        return self.best.result(exhausted="all rounds")

    def _trials(self) -> float:
        """Of all rounds together."""
        if self.run.paced_by_time:
            return SEARCHING * self.trials_per_s * self.stop.seconds()
        return min(SEARCHING * self.run.most_iterations, 1e9)

    def _round(self, trials: float) -> None:
        """Layouts from new starts, the best drafted and priced; then changes of the best plan."""
        self.layouts.found.clear()
        self.layouts.run(self.run, trials)
        drafts: list[Draft] = []
        for one in self.layouts.ranked():
            if len(drafts) == DRAFTS or self._over(drafts):
                break
            draft = self._draft(one.layout)
            if draft is not None:
                drafts.append(draft)
        if drafts and not self._over(drafts):
            first = min(drafts, key=lambda draft: draft.seconds)
            drafts += [self._made(first.layout, most, first.slower) for most in MOST_IN_FLIGHT]
        self._price_best(drafts)
        if self.leader is not None:
            self._price_best(self._changed(self.leader))

    def _changed(self, parent: Draft) -> list[Draft]:
        """Drafts that are better than one of whose layout they are changes."""
        better = []
        tried = 0
        for one in self.layouts.near(parent.layout, CHANGES):
            if tried == TRIED or self.run.check() is not None:
                break
            draft = self._draft(one.layout)
            tried += draft is not None
            if draft is not None and draft.seconds < parent.seconds:
                better.append(draft)
        return better

    def _draft(self, layout: Layout) -> Draft | None:
        """The best of some; None where there was one before or memory does not hold it."""
        if layout in self.drafted:
            return None
        self.drafted.add(layout)
        try:
            best = last = self._made(layout)
        except ProblemError as error:
            self.refused = self.refused or error
            return None
        for _ in range(AGAIN):
            if last.seconds > WORTH * self.best.objective or self.run.check() is not None:
                break
            last = self._made(layout, slower=last.slower * last.late)
            best = min(best, last, key=lambda draft: draft.seconds)
        return best

    def _made(self, layout: Layout, most: float = math.inf, slower: Floats | None = None) -> Draft:
        draft = drafted(self.question, self.places, layout, IN_FLIGHT, most, slower)
        self._spend(draft, 1)
        return draft

    def _price_best(self, drafts: list[Draft]) -> None:
        """Those that may be better than the best plan."""
        for draft in sorted(drafts, key=lambda draft: draft.seconds)[:PRICED]:
            if self.best.plan is not None and (
                draft.seconds >= self.best.objective or self._over(drafts)
            ):
                break
            self._price(draft)

    def _over(self, drafts: list[Draft]) -> bool:
        return bool(drafts) and self.run.check() is not None

    def _price(self, draft: Draft) -> None:
        plan = with_helpers(self.question, draft.plan())
        if self.best.offer(plan.predicted.step_s, plan):
            self.leader = draft
        # with helpers it is priced twice
        self._spend(draft, PASSES * (2 if self.question.helpers else 1))

    def _spend(self, draft: Draft, passes: int) -> None:
        self.run.spend(passes * draft.operations / OPERATIONS_PER_EFFORT)

    def _price_anything(self) -> None:
        """After an interruption, or if nothing fits: the best layout that there is."""
        for one in self.layouts.ranked():
            draft = self._draft(one.layout)
            if draft is not None:
                self._price(draft)
                return
        raise self.refused or ProblemError(
            "no layout fits the devices' memory; use larger devices, smaller microbatches or a "
            "smaller model"
        )
