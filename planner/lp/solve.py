"""`solve_averaging`."""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.lp.contributor_search import ContributorSearch
from planner.lp.fewest_reducers import Choice, with_fewest_reducers
from planner.lp.paper_rule import paper_rule
from planner.lp.rates import attained_scale
from planner.problems import AveragingProblem
from planner.problems.answers import AveragingPlan
from planner.problems.quantities import choice, instance_of
from planner.search.certificate import Status
from planner.search.incumbent import Incumbent
from planner.search.result import Result, Sense
from planner.search.stop import StoppingCriterion, TargetGap, started

FITTED = 1e-10
"""Relative excess over a limit that is left in a plan."""
STEPS_PER_EFFORT = 2000
"""Nodes of a programme, or sets of contributors, in one unit of `planner.search.stop.Effort`."""
ROUNDING = 1e-7
"""Relative margin put on values that come from an LP solver's tolerances."""


class AveragingMethod(enum.StrEnum):
    """How to choose contributors and shares.

    ``exact``: binary c and one rate per reducer, so that the promised rate is attained by fixed
    shares. ``relaxed``: the paper's rule (LP 5 and eq. 6) with the rate that its shares really
    attain; the bound is what LP (5) promises.
    """

    EXACT = "exact"
    RELAXED = "relaxed"


def solve_averaging(
    problem: AveragingProblem, method: str = "exact", stop: StoppingCriterion | None = None
) -> Result[AveragingPlan]:
    """Who contributes and who sums which share, for the most steps per second.

    Parameters
    ----------
    problem
        Peers with their speeds and limits, batch and gradient (DeDLOC, 3.2).
    method
        An `AveragingMethod`.
    stop
        When to end the search; None: when the plan is proven optimal. `MaxIterations` counts
        branch-and-bound nodes (sets of contributors for small problems).

    Returns
    -------
    Result
        ``objective`` in steps per second, maximised, ``bound`` above it. ``INFEASIBLE`` without a
        plan where no gradients can be exchanged at all, for instance if a peer is cut off.

    Raises
    ------
    ProblemError
        ``problem`` or ``method`` is none.
    """
    instance_of(AveragingProblem, problem)
    if choice(AveragingMethod, "method", method) is AveragingMethod.RELAXED:
        return _relaxed(problem, stop)
    return solve_from(problem, None, stop)


def solve_from(
    problem: AveragingProblem, start: NDArray[np.bool_] | None, stop: StoppingCriterion | None
) -> Result[AveragingPlan]:
    """The exact method from a known set of contributors (None: from nothing).

    Parameters
    ----------
    start
        ``bool[n]``.
    """
    run = started(TargetGap(0.0) if stop is None else stop, STEPS_PER_EFFORT)
    search = ContributorSearch(problem, run)
    with run.interruptible():
        search.solve(start)
    incumbent = search.incumbent
    if search.impossible or search.bound <= 0.0:
        why = "no gradients can be exchanged: some peer cannot be reached by any reducer"
        return _of_plans(incumbent.without_plan(Status.INFEASIBLE, why), None)
    if incumbent.plan is None:
        return _of_plans(incumbent.without_plan(Status.UNKNOWN, run.reason or "stopped"), None)
    chosen = with_fewest_reducers(
        problem, incumbent.objective, incumbent.plan, search.equally_fast(), run
    )
    rates = chosen.rates
    scale = attained_scale(problem, chosen.computes, rates)
    if scale < 1 - FITTED:
        # rates of very different size: rounding of the largest is not small for the smallest limit
        rates = rates * scale
    plan = plan_of(problem, chosen.computes, rates)
    result = incumbent.result(incumbent.plan, plan.steps_per_s, exhausted="stopped")
    return _of_plans(result, plan)


def _of_plans(result: Result[Choice], plan: AveragingPlan | None) -> Result[AveragingPlan]:
    """The same result for the plan that the choice makes."""
    made: Any = replace(result, plan=plan)  # type: ignore[arg-type]
    return made  # type: ignore[no-any-return]


def plan_of(
    problem: AveragingProblem, computes: NDArray[np.bool_], rates: NDArray[np.float64]
) -> AveragingPlan:
    """The plan with these contributors and rates, and what it attains.

    Parameters
    ----------
    computes
        ``bool[n]``, the contributors.
    rates
        ``float[n]``, r_i in bytes per second.
    """
    samples = np.where(computes, problem.samples_per_s, 0.0)
    total = float(samples.sum())
    expected = samples / total * problem.batch_size if total > 0 else samples
    return AveragingPlan(computes, rates, problem.steps_per_s(rates, computes), expected)


def _relaxed(problem: AveragingProblem, stop: StoppingCriterion | None) -> Result[AveragingPlan]:
    run = started(TargetGap(0.0) if stop is None else stop)
    rule = paper_rule(problem)
    plan = plan_of(problem, rule.computes, rule.rates)
    incumbent: Incumbent[AveragingPlan] = Incumbent(
        run, problem, method=AveragingMethod.RELAXED, seed=0, sense=Sense.MAXIMISE
    )
    incumbent.offer(plan.steps_per_s, plan)
    incumbent.raise_bound(rule.promised, "LP (5), solved by HiGHS", rounding=ROUNDING)
    return incumbent.result(exhausted="the rule was applied")
