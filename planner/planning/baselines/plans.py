"""Baseline plans: initial solutions of the search, and what a plan is compared with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from planner.planning.baselines.rank_order import (
    OneRegion,
    RanksByRegion,
    one_region,
    ranks_by_region,
)
from planner.planning.baselines.search import MAX_EVENTS, BaselinePlan
from planner.planning.problem import PlanningProblem
from planner.problems import ProblemError
from planner.search.interrupts import INTERRUPTS
from planner.search.stop import StoppingCriterion

Found = TypeVar("Found")

EVENTS_PER_EFFORT = 100_000
"""Operations and messages simulated per unit of effort."""
MIN_EVENTS = 100_000
SECONDS, RANKS = 0.2, 0.7
"""Share of a time limit for all baselines, and the part of it for ranks by region."""


@dataclass(frozen=True)
class Baselines:
    """The best plans of simple rules.

    Attributes
    ----------
    ranks
        Consecutive ranks on all devices; None if nothing fits.
    region
        The fastest region alone; None if no region holds the model.
    ranks_refused, region_refused
        Why there is none.
    """

    ranks: RanksByRegion | None
    region: OneRegion | None
    ranks_refused: str = ""
    region_refused: str = ""

    def __iter__(self) -> Iterator[BaselinePlan]:
        """Plans, fastest first."""
        plans = [] if self.region is None else [self.region.plan]
        if self.ranks is not None:
            plans += [plan for plan in (self.ranks.data, self.ranks.pipeline) if plan is not None]
        return iter(sorted(plans, key=lambda plan: plan.step_s))

    @classmethod
    def of(cls, problem: PlanningProblem, stop: StoppingCriterion) -> Baselines:
        """Baselines within a fifth of a time limit, or in proportion to the effort."""
        effort, began = stop.effort(), time.perf_counter()
        most = MAX_EVENTS
        if math.isfinite(effort):
            most = int(min(most, max(MIN_EVENTS, EVENTS_PER_EFFORT * effort)))
        elif math.isfinite(stop.iterations()):
            most = MIN_EVENTS
        seconds = SECONDS * stop.seconds()

        def over_after(share: float) -> Callable[[], bool]:
            return lambda: INTERRUPTS.requested or time.perf_counter() - began > share * seconds

        ranks, ranks_refused = _or_why(lambda: ranks_by_region(problem, most, over_after(RANKS)))
        # from here on an interruption keeps these results
        INTERRUPTS.has_plan |= ranks is not None
        region, region_refused = _or_why(lambda: one_region(problem, most, over_after(1.0)))
        return cls(ranks, region, ranks_refused, region_refused)


def _or_why(make: Callable[[], Found]) -> tuple[Found | None, str]:
    """The result, or the reason why nothing fits."""
    try:
        return make(), ""
    except ProblemError as error:
        return None, str(error)
