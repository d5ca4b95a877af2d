"""Averaging time of simple rules: all-reduce, parameter server, shares by bandwidth."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.bench.averaging_baselines import scalar_bandwidth_shares
from planner.lp.capacity import BandwidthLimits
from planner.lp.rates import attained_rates, best_rates
from planner.problems import AveragingProblem


def all_reduce_s(problem: AveragingProblem) -> float:
    """Return the time of a butterfly all-reduce in equal parts among the contributors.

    Peers without an accelerator do not take part.
    """
    inside = problem.subset([int(i) for i in np.flatnonzero(problem.contributors)])
    even = np.full(len(inside), 1.0 / len(inside))
    return _seconds(inside, attained_rates(inside, inside.contributors, even))


def parameter_server_s(problem: AveragingProblem) -> float:
    """Return the time if one peer sums everything, for the best choice of that peer."""
    shares = np.eye(len(problem))[problem.can_aggregate]
    return min(
        _seconds(problem, attained_rates(problem, problem.contributors, one)) for one in shares
    )


def adaptive_s(problem: AveragingProblem) -> float:
    """Return the time of the best plan to which all peers that can compute contribute."""
    return _seconds(problem, best_rates(BandwidthLimits(problem), problem.contributors).rates)


def scalar_bandwidth_s(problem: AveragingProblem) -> float:
    """Return the time with the shares of `scalar_bandwidth_shares`."""
    shares = scalar_bandwidth_shares(problem)
    return _seconds(problem, attained_rates(problem, problem.contributors, shares))


def _seconds(problem: AveragingProblem, rates: NDArray[np.float64]) -> float:
    total = float(rates.sum())
    return problem.gradient_bytes / total if total > 0 else float("inf")
