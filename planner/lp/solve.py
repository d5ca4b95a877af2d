"""`solve_averaging`: the front door of this room."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.lp.canonical import canonical
from planner.lp.literal import literal_model
from planner.lp.rates import attained_scale
from planner.lp.relaxed import paper_rule
from planner.lp.search import Search
from planner.lp.sparse import lp_bound
from planner.problems import AveragingProblem, ProblemError
from planner.problems.answers import AveragingPlan
from planner.problems.quantities import of_kind
from planner.search.certificate import Status
from planner.search.result import Result
from planner.search.stop import StoppingCriterion, TargetGap, started

METHODS = ("exact", "relaxed")
FITTED = 1e-10
"""Relative excess over a limit that is left in a plan."""
ROUNDING = 1e-7
"""Relative margin put on values that come from an LP solver's tolerances."""


def solve_averaging(
    problem: AveragingProblem, method: str = "exact", stop: StoppingCriterion | None = None
) -> Result[AveragingPlan]:
    """Who contributes and who sums which share, for the most steps per second.

    Parameters
    ----------
    method
        ``"exact"``: binary c and one rate per reducer, so that the promised rate is attained by
        fixed shares. ``"relaxed"``: the paper's rule (LP 5 and eq. 6) with the rate that its
        shares really attain; the bound is what LP (5) promises.
    stop
        When to end the search; None: when the plan is proven optimal. `MaxIterations` counts
        branch-and-bound nodes (sets of contributors for small problems).

    Returns
    -------
    Result
        ``objective`` in steps per second, maximised, ``bound`` above it. ``INFEASIBLE`` without a
        plan where no gradients can be exchanged at all, for instance if a peer is cut off.
    """
    of_kind(AveragingProblem, problem)
    if method == "relaxed":
        return _relaxed(problem, stop)
    if method != "exact":
        raise ProblemError(f"no method {method!r}; there are {', '.join(METHODS)}")
    return solve_from(problem, None, stop)


def solve_from(
    problem: AveragingProblem, start: NDArray[np.bool_] | None, stop: StoppingCriterion | None
) -> Result[AveragingPlan]:
    """The exact method from a known set of contributors (None: from nothing)."""
    run = started(TargetGap(0.0) if stop is None else stop)
    search = Search(problem, run)
    with run.interruptible():
        search.solve(start)
    if search.computes is None:
        done = search.bound <= 0.0
        return Result(
            None,
            Status.INFEASIBLE if done else Status.UNKNOWN,
            None,
            search.bound,
            run.elapsed_s,
            "no gradients can be exchanged: some peer cannot be reached by any reducer"
            if done
            else run.reason or "stopped",
            0,
            "exact",
            tuple(run.history),
        )
    choice = canonical(problem, search.best, search.computes, search.rates, run)
    rates = choice.rates
    scale = attained_scale(problem, choice.computes, rates)
    if scale < 1 - FITTED:
        # rates of very different size: rounding of the largest is not small for the smallest limit
        rates = rates * scale
    plan = plan_of(problem, choice.computes, rates)
    closed = search.bound <= search.best * (1 + 1e-6)
    return Result.of(
        plan,
        plan.steps_per_s,
        max(search.bound, plan.steps_per_s),
        runtime_s=run.elapsed_s,
        stop_reason="optimal" if closed else run.reason or "stopped",
        seed=0,
        method="exact",
        history=run.history,
    )


def plan_of(
    problem: AveragingProblem, computes: NDArray[np.bool_], rates: NDArray[np.float64]
) -> AveragingPlan:
    """The plan with these contributors and rates, and what it attains."""
    samples = np.where(computes, problem.samples_per_s, 0.0)
    total = float(samples.sum())
    expected = samples / total * problem.batch_size if total > 0 else samples
    return AveragingPlan(computes, rates, problem.steps_per_s(rates, computes), expected)


def _relaxed(problem: AveragingProblem, stop: StoppingCriterion | None) -> Result[AveragingPlan]:
    run = started(TargetGap(0.0) if stop is None else stop)
    rule = paper_rule(problem)
    plan = plan_of(problem, rule.computes, rule.rates)
    return Result.of(
        plan,
        plan.steps_per_s,
        max(rule.promised * (1 + ROUNDING), plan.steps_per_s),
        runtime_s=run.elapsed_s,
        stop_reason="the rule was applied",
        seed=0,
        method="relaxed",
        history=[(run.elapsed_s, plan.steps_per_s)],
    )


class Promises(NamedTuple):
    """What the paper's programmes promise, in steps per second, beside what fixed shares attain.

    Attributes
    ----------
    lp5
        LP (5), the relaxation.
    eq2
        Eq. 2: binary c, but returned rates that differ between receivers. None if not asked for.
    attained, proven
        The best plan with fixed shares, and the bound on it.
    rule
        What the shares of eq. 6 attain.
    """

    lp5: float
    eq2: float | None
    attained: float
    proven: float
    rule: float


def promises(
    problem: AveragingProblem, eq2: bool = False, stop: StoppingCriterion | None = None
) -> Promises:
    """Upper bounds and attained rates side by side.

    Parameters
    ----------
    eq2
        Also solve eq. 2 in its literal form: n binary variables and n^3 rows, for small n.
    """
    exact = solve_averaging(problem, "exact", stop)
    relaxed = solve_averaging(problem, "relaxed")
    return Promises(
        lp_bound(problem),
        literal_model(problem, binary=True).solve().xi if eq2 else None,
        exact.objective or 0.0,
        math.inf if exact.bound is None else exact.bound,
        relaxed.objective or 0.0,
    )
