"""The paper's rule: LP (5), then eq. 6, and the rate that the shares attain."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.lp.dedloc_lp import solve_relaxed
from planner.lp.dedloc_lp_rows import RelaxedSolution
from planner.lp.rates import attained_rates
from planner.problems import AveragingProblem

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CONTRIBUTOR_TOLERANCE = 1e-6
"""Tolerance for c_i = 1."""


class PaperRule(NamedTuple):
    """Contributors and rates by the paper's rule.

    Attributes
    ----------
    computes, rates
        The decisions, with the largest rates that the shares of eq. 6 attain.
    lp_value
        The value of LP (5) in steps per second.
    """

    computes: Bools
    rates: Floats
    lp_value: float


def eq6_shares(solution: RelaxedSolution) -> Floats:
    """Eq. 6: ``fraction_i = min_j g_ij / sum_k min_j g_kj``; all 0 if every minimum is 0.

    Returns
    -------
    ndarray
        ``float[n]``, sums to 1 or is 0.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), eq. 6.
    """
    least = solution.g.min(axis=1)
    total = least.sum()
    shares: Floats = least / total if total > 0 else np.zeros_like(least)
    return shares


def paper_rule(problem: AveragingProblem) -> PaperRule:
    """Solve (5), let only peers with c = 1 contribute, and divide the vector by eq. 6.

    The relaxation often has every c below 1: then no peer contributes and the rule attains 0.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.2 and
    Appendix B.
    """
    solution = solve_relaxed(problem)
    computes = (solution.c >= 1 - CONTRIBUTOR_TOLERANCE) & problem.contributors
    shares = np.where(problem.can_aggregate, eq6_shares(solution), 0.0)
    if len(problem) == 1:
        rates = solution.g[0] * computes
    else:
        rates = attained_rates(problem, computes, shares)
    return PaperRule(computes, rates, solution.xi)
