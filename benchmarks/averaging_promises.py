"""Rates that the linear programs of DeDLOC promise, against what fixed shares attain."""

from __future__ import annotations

import math
from typing import NamedTuple

from planner.lp.lp5 import lp_bound
from planner.lp.paper_model import build_paper_model
from planner.lp.solve import solve_averaging
from planner.problems import AveragingProblem
from planner.search.stop import StoppingCriterion


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
    """Upper bounds and attained rates side by side."""
    exact = solve_averaging(problem, "exact", stop)
    relaxed = solve_averaging(problem, "relaxed")
    return Promises(
        lp_bound(problem),
        build_paper_model(problem, binary=True).solve().xi if eq2 else None,
        exact.objective or 0.0,
        math.inf if exact.bound is None else exact.bound,
        relaxed.objective or 0.0,
    )
