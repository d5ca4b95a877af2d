"""Reducer rates r_i for given contributors: eq. 1 with c fixed and one rate per reducer.

A linear program in n + 1 variables (r and R). Its pair limits ``c_i r_j + r_i <= t_ij`` rarely
bind, so they are added lazily; if none binds, `planner.lp.capacity` solves it in closed form.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import BandwidthLimits
from planner.problems import AveragingProblem

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

TOLERANCE = 1e-12
"""Relative tolerance of a limit."""


class ReducerRates(NamedTuple):
    """The best total rate for given contributors.

    Attributes
    ----------
    total
        R in bytes per second, attained by ``rates``.
    bound
        Upper bound on R by weak duality, valid despite the LP solver's tolerances.
    rates
        r_i in bytes per second.
    """

    total: float
    bound: float
    rates: Floats


def satisfies_pair_limits(limits: BandwidthLimits, computes: Bools, rates: Floats) -> bool:
    """Whether the rates satisfy every pair limit.

    Parameters
    ----------
    computes
        ``bool[n]``, the contributors.
    rates
        ``float[n]``, r_i in bytes per second.
    """
    if limits.links is None:
        return True
    used = np.where(computes[:, None], rates[None, :] + rates[:, None], rates[:, None])
    np.fill_diagonal(used, 0.0)
    return bool((used <= limits.links * (1 + TOLERANCE)).all())


def water_fill(caps: Floats, total: float) -> Floats:
    """Rates ``min(cap_i, level)`` that sum to ``total`` (water-filling).

    Parameters
    ----------
    caps
        ``float[n]``, bytes per second.

    Returns
    -------
    ndarray
        ``float[n]``, bytes per second.
    """
    order = np.argsort(caps, kind="stable")
    ascending = caps[order]
    n = len(caps)
    prefix_sum = np.concatenate(([0.0], np.cumsum(ascending)[:-1]))
    levels = (total - prefix_sum) / np.arange(n, 0, -1)
    feasible = np.flatnonzero(levels <= ascending)
    rates: Floats = np.minimum(caps, levels[feasible[0]]) if len(feasible) else caps.copy()
    return rates


def best_rates(limits: BandwidthLimits, computes: Bools, max_total: float = np.inf) -> ReducerRates:
    """The largest total rate R, up to ``max_total``, with the contributors ``computes``.

    Parameters
    ----------
    computes
        ``bool[n]``, the contributors.
    """
    total = float(limits.max_total_rate(computes[None, :], max_total)[0])
    if total <= 0 or not np.isfinite(total):
        return ReducerRates(0.0, 0.0, np.zeros(limits.n))
    rates = even_rates(limits, computes, total)
    if satisfies_pair_limits(limits, computes, rates):
        return ReducerRates(total, total, rates)
    return solve_rates(limits, computes, total, rates)


def even_rates(limits: BandwidthLimits, computes: Bools, total: float) -> Floats:
    """The most even rates that sum to ``total``, ignoring pair limits between two rates.

    Parameters
    ----------
    computes
        ``bool[n]``, the contributors.

    Returns
    -------
    ndarray
        ``float[n]``, bytes per second.
    """
    caps, _ = limits.caps(computes[None, :], np.array([total]))
    floor = np.zeros(limits.n)
    if computes.sum() == 1:
        # a single contributor must sum at least what it cannot download
        single = computes & limits.can_reduce
        floor[single] = np.maximum(total - limits.download[single], 0.0)
    if not floor.any():
        return water_fill(caps[0], total)
    i = int(np.argmax(floor))
    other_caps = caps[0].copy()
    other_caps[i] = 0.0
    rates = water_fill(other_caps, min(total - floor[i], float(other_caps.sum())))
    rates[i] = total - rates.sum()
    return rates


def solve_rates(
    limits: BandwidthLimits, computes: Bools, max_total: float, initial_rates: Floats
) -> ReducerRates:
    """Solve the LP, scaled so that ``max_total`` is 1, adding violated pair rows lazily.

    Parameters
    ----------
    computes
        ``bool[n]``, the contributors.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, diags_array, hstack, vstack

    n, c = limits.n, computes.astype(np.float64)
    assert limits.links is not None
    # limits larger than R = 1 can use are capped
    links = np.minimum(limits.links / max_total, 4.0)
    np.fill_diagonal(links, np.inf)
    ones = np.ones((n, 1))
    base_rows = vstack(
        [
            hstack([diags_array(n - 1.0 - c), csr_array(c[:, None])]),
            hstack([diags_array(c.sum() - c - 1.0), csr_array(ones)]),
        ],
        format="csr",
    )
    base_rhs = np.minimum(np.concatenate([limits.upload, limits.download]) / max_total, 4.0 * n)
    a_eq = csr_array(np.append(np.ones(n), -1.0)[None, :])
    upper = np.append(np.minimum(limits.max_reducer_rate / max_total, 1.0), 1.0)
    lower = np.zeros(n + 1)
    objective = np.append(np.zeros(n), 1.0)
    pairs = np.zeros((0, 2), dtype=np.int64)
    rates, solution = initial_rates / max_total, None
    while True:
        used = c[:, None] * rates[None, :] + rates[:, None]
        np.fill_diagonal(used, 0.0)
        # the tolerance of LP solutions is larger than that of the initial rates
        violated = np.argwhere(used > links * (1 + 1e-9) + (0.0 if solution is None else 1e-12))
        new_pairs = violated[~_contains(pairs, violated, n)]
        if solution is not None and not len(new_pairs):
            break
        pairs = np.concatenate([pairs, new_pairs])
        row = np.arange(len(pairs))
        pair_rows = csr_array(
            (
                np.concatenate([np.ones(len(pairs)), c[pairs[:, 0]]]),
                (np.concatenate([row, row]), np.concatenate([pairs[:, 0], pairs[:, 1]])),
            ),
            shape=(len(pairs), n + 1),
        )
        a_ub = vstack([base_rows, pair_rows], format="csr")
        b_ub = np.concatenate([base_rhs, links[pairs[:, 0], pairs[:, 1]]])
        solution = linprog(
            -objective,
            A_ub=a_ub,
            b_ub=b_ub,
            A_eq=a_eq,
            b_eq=[0.0],
            bounds=np.column_stack([lower, upper]),
            method="highs",
        )
        if solution.status != 0:
            # all rates 0 satisfy it: the solver has failed, and proves nothing
            rates = initial_rates * min(1.0, max_scale(limits.problem, computes, initial_rates))
            return ReducerRates(float(rates.sum()), max_total, rates)
        rates = np.maximum(solution.x[:n], 0.0)
    # weak duality: any y >= 0 bounds R, whatever the solver's tolerances
    y = np.maximum(-solution.ineqlin.marginals, 0.0)
    reduced = objective - a_ub.T @ y + solution.eqlin.marginals[0] * np.append(np.ones(n), -1.0)
    bound = float(y @ b_ub + np.maximum(reduced, 0.0) @ upper)
    rates = rates * max_total
    rates = rates * min(1.0, max_scale(limits.problem, computes, rates))
    return ReducerRates(float(rates.sum()), min(bound * max_total, max_total), rates)


def max_scale(problem: AveragingProblem, computes: Bools, rates: Floats) -> float:
    """The largest factor by which all rates can be scaled within the limits.

    All limits are homogeneous in r, so that the factor is the smallest ratio of limit and use; it
    is below 1 if a limit is violated.

    Parameters
    ----------
    computes
        ``bool[n]``, the contributors.
    rates
        ``float[n]``, r_i in bytes per second.
    """
    scale = np.inf
    for limit, used in (
        (problem.upload_bytes_per_s, problem.upload_of(rates, computes)),
        (problem.download_bytes_per_s, problem.download_of(rates, computes)),
        (problem.link_bytes_per_s, problem.link_of(rates, computes)),
    ):
        if limit is not None:
            positive = used > 0
            if positive.any():
                scale = min(scale, float((limit[positive] / used[positive]).min()))
    if (rates[~problem.can_aggregate] > 0).any() or computes[~problem.contributors].any():
        return 0.0
    return scale


def attained_rates(problem: AveragingProblem, computes: Bools, shares: Floats) -> Floats:
    """Maximum rates r_i = shares_i R for fixed shares and contributors.

    This is what an executor with these shares attains; eq. 6 does not determine it.

    Parameters
    ----------
    computes
        ``bool[n]``, the contributors.
    shares
        ``float[n]``, fractions of the vector.

    Returns
    -------
    ndarray
        ``float[n]``, bytes per second.
    """
    scale = max_scale(problem, computes, shares)
    rates: Floats = shares * scale if np.isfinite(scale) else np.zeros(len(shares))
    return rates


def _contains(pairs: NDArray[np.int64], wanted: NDArray[np.int64], n: int) -> Bools:
    """Mask of the wanted ordered pairs that are in ``pairs``."""
    return np.isin(wanted[:, 0] * n + wanted[:, 1], pairs[:, 0] * n + pairs[:, 1])
