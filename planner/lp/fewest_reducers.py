"""Among equally fast plans, one with the fewest reducers.

Where no pair limit binds, the reducers are the peers with the largest caps. Where one does, a
mixed-integer program counts them. The answer is the same every time; nothing else is promised of
it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import Limits
from planner.lp.rates import attained_scale, best_rates, links_fit
from planner.problems import AveragingProblem
from planner.search.highs import milp
from planner.search.stop import StopRun

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SLACK = 1e-9
"""Plans whose steps per second differ relatively by less than this count as equally fast."""
EVEN = 1e-12
"""Relative rounding of a sum of rates."""
ZERO = 1e-7
"""A rate below this fraction of the total is rounding of the solver."""
LARGEST = 80
"""With more peers than this, reducers under binding pair limits stay as the LP for R has them."""
NODES = 200
"""Branch-and-bound nodes of the programme: a count ends it at the same place everywhere."""


class Choice(NamedTuple):
    """Contributors, and r_i in bytes per second.

    Attributes
    ----------
    computes
        ``bool[n]``.
    rates
        ``float[n]``, bytes per second.
    """

    computes: Bools
    rates: Floats


def with_fewest_reducers(
    problem: AveragingProblem, steps: float, found: Choice, others: Bools, run: StopRun
) -> Choice:
    """A plan that makes ``steps`` per second with the fewest reducers that are seen.

    Parameters
    ----------
    others
        ``bool[q, n]``, further sets of contributors that may be as fast.
    """
    limits = Limits(problem)
    if limits.n == 1:
        return found
    sets = [found.computes, *others]
    target = steps * (1 - SLACK)
    least = [_count_at(problem, limits, chosen, target) for chosen in sets]
    best, fewest = found, int((found.rates > 0).sum()) + 1
    for k in sorted(range(len(sets)), key=lambda k: (least[k], k)):
        if least[k] >= fewest:
            break
        for wanted in (min(steps, _fastest(problem, limits, sets[k])), target):
            rates = _rates(limits, sets[k], _needed(problem, limits, sets[k], wanted), run)
            if rates is not None:
                break
        if rates is None or problem.steps_per_s(rates, sets[k]) < steps * (1 - 1e-7):
            continue
        count = int((rates > 0).sum())
        if count < fewest:
            best, fewest = Choice(sets[k], rates), count
    return best


def fast_sets(problem: AveragingProblem, sets: Bools, steps: float) -> Bools:
    """Those sets of contributors that may make ``steps`` per second.

    Parameters
    ----------
    sets
        ``bool[q, n]``, sets of contributors.
    """
    limits, target = Limits(problem), steps * (1 - SLACK)
    samples = sets @ problem.samples_per_s
    sets = sets[samples >= target * problem.batch_size]
    totals, samples = limits.largest_total(sets), sets @ problem.samples_per_s
    values = [problem.steps_of(s, r) for s, r in zip(samples, totals, strict=True)]
    return sets[np.array(values) >= target]


def _needed(problem: AveragingProblem, limits: Limits, computes: Bools, steps: float) -> float:
    """The total rate in bytes per second that this set needs for ``steps`` per second."""
    if problem.overlap:
        return steps * problem.gradient_bytes
    left = 1 / steps - problem.batch_size / float(problem.samples_per_s[computes].sum())
    # where computing takes nearly all of the step, `left` is rounding and the limits decide
    most = float(limits.largest_total(computes[None, :])[0])
    return min(problem.gradient_bytes / left, most) if left > 0 else most


def _fastest(problem: AveragingProblem, limits: Limits, computes: Bools) -> float:
    samples = float(problem.samples_per_s[computes].sum())
    return problem.steps_of(samples, float(limits.largest_total(computes[None, :])[0]))


def _count_at(problem: AveragingProblem, limits: Limits, computes: Bools, steps: float) -> int:
    """Fewest caps that sum to the rate for ``steps``: a lower bound where pair limits bind."""
    total = _needed(problem, limits, computes, steps)
    caps, _ = limits.caps(computes[None, :], np.array([total]))
    must = _floor(limits, computes, total) > 0
    have = float(caps[0][must].sum())
    best_first = np.sort(caps[0][~must])[::-1]
    more = int(np.searchsorted(have + np.cumsum(best_first), total * (1 - EVEN)))
    return int(must.sum()) + (0 if have >= total * (1 - EVEN) else more + 1)


def _floor(limits: Limits, computes: Bools, total: float) -> Floats:
    """What a lone contributor must keep because it cannot download it: r_i >= H - d_i."""
    floor = np.zeros(limits.n)
    if computes.sum() == 1:
        own = computes & limits.aggregates
        floor[own] = np.maximum(total - limits.download[own], 0.0)
    return floor


def _rates(limits: Limits, computes: Bools, total: float, run: StopRun) -> Floats | None:
    """Rates that sum to ``total`` with few reducers, or None if there are none, or no time."""
    caps, _ = limits.caps(computes[None, :], np.array([total]))
    floor = _floor(limits, computes, total)
    simple = _from_the_largest(caps[0], floor, total)
    if simple is None or links_fit(limits, computes, simple):
        return simple
    if limits.n > LARGEST:
        found = best_rates(limits, computes, total)
        return found.rates if found.total >= total * (1 - SLACK) else None
    return _under_pair_limits(limits, computes, caps[0] / total, floor / total, total, run)


def _from_the_largest(caps: Floats, floor: Floats, total: float) -> Floats | None:
    """The largest caps until they sum to ``total``; who has a floor comes first."""
    if caps.sum() < total * (1 - EVEN):
        return None
    rates, left = np.zeros(len(caps)), total
    for i in np.lexsort((np.arange(len(caps)), -caps, floor == 0)):
        # the rest goes in whole, if only by rounding
        rates[i] = min(caps[i], left)
        left -= rates[i]
        if left <= total * EVEN:
            break
    return rates


def _under_pair_limits(
    limits: Limits, computes: Bools, caps: Floats, floor: Floats, total: float, run: StopRun
) -> Floats | None:
    """The programme in (r, m), m_i: i is a reducer; rates are scaled by the total.

    Pair rows ``r_i + r_j <= t_ij`` of contributors i enter when a solution breaks them.
    """
    from scipy.optimize import Bounds, LinearConstraint

    n = limits.n
    assert limits.links is not None
    links = limits.links / total
    pairs: list[tuple[int, int]] = []
    fixed = np.vstack(
        [np.concatenate([np.ones(n), np.zeros(n)])[None, :], np.hstack([np.eye(n), -np.diag(caps)])]
    )
    options: dict[str, Any] = {"node_limit": NODES}
    while run.remaining_s > 0:
        if math.isfinite(run.remaining_s):
            options["time_limit"] = max(run.remaining_s, 1e-3)
        rows = np.zeros((len(pairs), 2 * n))
        for row, (i, j) in zip(rows, pairs, strict=True):
            row[[i, j]] = 1.0
        free = np.full(n + len(pairs), -np.inf)
        limit = [*np.zeros(n), *(links[i, j] for i, j in pairs)]
        found = milp(
            np.concatenate([np.zeros(n), np.ones(n)]),
            integrality=np.repeat([0.0, 1.0], n),
            bounds=Bounds(np.concatenate([floor, np.zeros(n)]), np.concatenate([caps, np.ones(n)])),
            constraints=LinearConstraint(
                np.vstack([fixed, rows]), np.append(1.0, free), np.append(1.0, limit)
            ),
            options=options,
        )
        if found.x is None:
            return None
        rates: Floats = np.where(found.x[:n] > ZERO, found.x[:n], 0.0)
        used = np.where(computes[:, None], rates[None, :] + rates[:, None], 0.0)
        np.fill_diagonal(used, 0.0)
        broken = {(int(i), int(j)) for i, j in np.argwhere(used > links + 1e-8)}
        if broken <= set(pairs):
            rates *= total / rates.sum()
            return rates * min(1.0, attained_scale(limits.problem, computes, rates))
        pairs += sorted(broken - set(pairs))
    return None
