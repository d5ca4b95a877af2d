"""Rates promised by DeDLOC's linear programs, compared with rates of fixed shares."""

from __future__ import annotations

import math
from typing import NamedTuple

from planner.lp.dedloc_lp import lp_bound
from planner.lp.paper_model import build_paper_model
from planner.lp.solve import solve_averaging
from planner.problems import AveragingProblem
from planner.search.stop import StoppingCriterion


class Promises(NamedTuple):
    """Steps per second promised by the paper's programs, and attained by fixed shares.

    Attributes
    ----------
    lp5
        Linear program (5), the relaxation.
    eq2
        Eq. 2: binary c, but returned rates may differ between receivers; None if not computed.
    attained, proven
        Best plan with fixed shares, and its bound.
    rule
        Rate of the shares of eq. 6.
    """

    lp5: float
    eq2: float | None
    attained: float
    proven: float
    rule: float


def promises(
    problem: AveragingProblem, eq2: bool = False, stop: StoppingCriterion | None = None
) -> Promises:
    """Compute upper bounds and attained rates."""
    exact = solve_averaging(problem, "exact", stop)
    relaxed = solve_averaging(problem, "relaxed")
    return Promises(
        lp_bound(problem),
        build_paper_model(problem, binary=True).solve().xi if eq2 else None,
        exact.objective or 0.0,
        math.inf if exact.bound is None else exact.bound,
        relaxed.objective or 0.0,
    )
