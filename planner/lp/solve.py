"""`solve_averaging`: contributors and reducer rates for the most steps per second (DeDLOC)."""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.lp.contributor_search import ContributorSearch
from planner.lp.fewest_reducers import AveragingChoice, with_fewest_reducers
from planner.lp.paper_rule import paper_rule
from planner.lp.rates import max_scale
from planner.problems import AveragingProblem
from planner.problems.answers import AveragingPlan
from planner.problems.quantities import choice, instance_of
from planner.search.certificate import Status
from planner.search.incumbent import Incumbent
from planner.search.result import Result, Sense
from planner.search.stop import StoppingCriterion, TargetGap, started

FEASIBILITY_TOLERANCE = 1e-10
"""Relative violation of a limit that is tolerated in a plan."""
STEPS_PER_EFFORT = 2000
"""MILP nodes, or sets of contributors, per unit of `planner.search.stop.Effort`."""
ROUNDING = 1e-7
"""Relative margin for an LP solver's tolerances."""


class AveragingMethod(enum.StrEnum):
    """How to choose contributors and shares.

    ``exact``: binary c and one rate per reducer, so that fixed shares attain the objective.
    ``relaxed``: the paper's rule (LP 5 and eq. 6) with the rate that its shares attain; the bound
    is the value of LP (5).
    """

    EXACT = "exact"
    RELAXED = "relaxed"


def solve_averaging(
    problem: AveragingProblem, method: str = "exact", stop: StoppingCriterion | None = None
) -> Result[AveragingPlan]:
    """Choose contributors and reducer shares for the most steps per second.

    Parameters
    ----------
    problem
        Peers with their speeds and limits, batch and gradient (DeDLOC, 3.2).
    method
        An `AveragingMethod`.
    stop
        When to stop; by default when the plan is proven optimal: within 1e-6, or about 1e-5 where a
        mixed-integer program decides, whose rows HiGHS satisfies up to 1e-6. `MaxIterations` counts
        branch-and-bound nodes (sets of contributors for small problems).

    Returns
    -------
    Result
        ``objective`` in steps per second, maximised; ``bound`` is an upper bound. ``INFEASIBLE``
        without a plan if gradients cannot be averaged, for instance if a peer is unreachable.

    Raises
    ------
    ProblemError
        ``problem`` is not an `AveragingProblem`, or ``method`` is unknown.
    """
    instance_of(AveragingProblem, problem)
    if choice(AveragingMethod, "method", method) is AveragingMethod.RELAXED:
        return _relaxed(problem, stop)
    return solve_from(problem, None, stop)


def solve_from(
    problem: AveragingProblem, start: NDArray[np.bool_] | None, stop: StoppingCriterion | None
) -> Result[AveragingPlan]:
    """The exact method, optionally from an initial set of contributors.

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
    if search.infeasible or search.bound <= 0.0:
        why = "no gradients can be exchanged: some peer cannot be reached by any reducer"
        return _of_plans(incumbent.without_plan(Status.INFEASIBLE, why), None)
    if incumbent.plan is None:
        return _of_plans(incumbent.without_plan(Status.UNKNOWN, run.reason or "stopped"), None)
    chosen = with_fewest_reducers(
        problem, incumbent.objective, incumbent.plan, search.possible_ties(), run
    )
    rates = chosen.rates
    scale = max_scale(problem, chosen.computes, rates)
    if scale < 1 - FEASIBILITY_TOLERANCE:
        # if rates differ by orders of magnitude, rounding errors can exceed the smallest limit
        rates = rates * scale
    plan = build_plan(problem, chosen.computes, rates)
    result = incumbent.result(incumbent.plan, plan.steps_per_s, exhausted="stopped")
    return _of_plans(result, plan)


def _of_plans(result: Result[AveragingChoice], plan: AveragingPlan | None) -> Result[AveragingPlan]:
    """The result with its plan replaced."""
    answer: Any = replace(result, plan=plan)  # type: ignore[arg-type]
    return answer  # type: ignore[no-any-return]


def build_plan(
    problem: AveragingProblem, computes: NDArray[np.bool_], rates: NDArray[np.float64]
) -> AveragingPlan:
    """Build the plan with these contributors and rates.

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
    plan = build_plan(problem, rule.computes, rule.rates)
    incumbent: Incumbent[AveragingPlan] = Incumbent(
        run, problem, method=AveragingMethod.RELAXED, seed=0, sense=Sense.MAXIMISE
    )
    incumbent.offer(plan.steps_per_s, plan)
    incumbent.offer_bound(rule.lp_value, "LP (5), solved by HiGHS", rounding=ROUNDING)
    return incumbent.result(exhausted="the rule was applied")
