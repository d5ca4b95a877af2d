"""Tie-breaking: among equally fast plans, choose one with few reducers.

If no pair limit binds, the reducers are the peers with the largest caps; otherwise a mixed-integer
program minimises their number. The choice is deterministic, but not necessarily minimal.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import BandwidthLimits
from planner.lp.rates import best_rates, max_scale, satisfies_pair_limits
from planner.problems import AveragingProblem
from planner.search.highs import milp
from planner.search.stop import SearchRun

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SLACK = 1e-9
"""Relative difference in steps per second below which plans count as equally fast."""
ROUNDED_SLACK = 1e-7
"""The same after rates were computed by a mixed-integer program."""
SUM_TOLERANCE = 1e-12
"""Relative tolerance of a sum of rates."""
ZERO = 1e-7
"""Rates below this fraction of the total are rounded to 0."""
MAX_MILP_PEERS = 80
"""Maximum number of peers for the MILP under binding pair limits; beyond it, the LP's rates."""
NODE_LIMIT = 200
"""Node limit of the MILP, deterministic in contrast to a time limit."""


class AveragingChoice(NamedTuple):
    """Contributors and reducer rates.

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
    problem: AveragingProblem, steps: float, choice: AveragingChoice, others: Bools, run: SearchRun
) -> AveragingChoice:
    """A plan with ``steps`` per second and the fewest reducers found.

    Parameters
    ----------
    others
        ``bool[q, n]``, further sets of contributors that may be equally fast.
    """
    limits = BandwidthLimits(problem)
    if limits.n == 1:
        return choice
    sets = [choice.computes, *others]
    target = steps * (1 - SLACK)
    lower_bounds = [_min_reducer_count(problem, limits, chosen, target) for chosen in sets]
    best, fewest_found = choice, int((choice.rates > 0).sum()) + 1
    for k in sorted(range(len(sets)), key=lambda k: (lower_bounds[k], k)):
        if lower_bounds[k] >= fewest_found:
            break
        for target_steps in (min(steps, _max_steps(problem, limits, sets[k])), target):
            rates = _rates(
                limits, sets[k], _required_rate(problem, limits, sets[k], target_steps), run
            )
            if rates is not None:
                break
        if rates is None or problem.steps_per_s(rates, sets[k]) < steps * (1 - ROUNDED_SLACK):
            continue
        count = int((rates > 0).sum())
        if count < fewest_found:
            best, fewest_found = AveragingChoice(sets[k], rates), count
    return best


def sets_attaining(problem: AveragingProblem, sets: Bools, steps: float) -> Bools:
    """The sets of contributors that may attain ``steps`` per second.

    Parameters
    ----------
    sets
        ``bool[q, n]``, sets of contributors.
    """
    limits, target = BandwidthLimits(problem), steps * (1 - SLACK)
    samples = sets @ problem.samples_per_s
    sets = sets[samples >= target * problem.batch_size]
    totals, samples = limits.max_total_rate(sets), sets @ problem.samples_per_s
    values = [problem.steps_of(s, r) for s, r in zip(samples, totals, strict=True)]
    return sets[np.array(values) >= target]


def _required_rate(
    problem: AveragingProblem, limits: BandwidthLimits, computes: Bools, steps: float
) -> float:
    """The total rate in bytes per second that this set needs for ``steps`` per second."""
    if problem.overlap:
        return steps * problem.gradient_bytes
    seconds_left = 1 / steps - problem.batch_size / float(problem.samples_per_s[computes].sum())
    # where computing takes nearly all of the step, `seconds_left` is a rounding error
    max_rate = float(limits.max_total_rate(computes[None, :])[0])
    return min(problem.gradient_bytes / seconds_left, max_rate) if seconds_left > 0 else max_rate


def _max_steps(problem: AveragingProblem, limits: BandwidthLimits, computes: Bools) -> float:
    samples = float(problem.samples_per_s[computes].sum())
    return problem.steps_of(samples, float(limits.max_total_rate(computes[None, :])[0]))


def _min_reducer_count(
    problem: AveragingProblem, limits: BandwidthLimits, computes: Bools, steps: float
) -> int:
    """Minimum number of caps that sum to the required rate: a lower bound with pair limits."""
    total = _required_rate(problem, limits, computes, steps)
    caps, _ = limits.caps(computes[None, :], np.array([total]))
    required = _min_rates(limits, computes, total) > 0
    required_sum = float(caps[0][required].sum())
    best_first = np.sort(caps[0][~required])[::-1]
    extra = int(np.searchsorted(required_sum + np.cumsum(best_first), total * (1 - SUM_TOLERANCE)))
    return int(required.sum()) + (0 if required_sum >= total * (1 - SUM_TOLERANCE) else extra + 1)


def _min_rates(limits: BandwidthLimits, computes: Bools, total: float) -> Floats:
    """Lower bound r_i >= R - d_i: a single contributor must sum what it cannot download."""
    floor = np.zeros(limits.n)
    if computes.sum() == 1:
        single = computes & limits.can_reduce
        floor[single] = np.maximum(total - limits.download[single], 0.0)
    return floor


def _rates(limits: BandwidthLimits, computes: Bools, total: float, run: SearchRun) -> Floats | None:
    """Rates that sum to ``total`` with few reducers; None if not found."""
    caps, _ = limits.caps(computes[None, :], np.array([total]))
    floor = _min_rates(limits, computes, total)
    greedy = _fill_largest_caps(caps[0], floor, total)
    if greedy is None or satisfies_pair_limits(limits, computes, greedy):
        return greedy
    if limits.n > MAX_MILP_PEERS:
        rates = best_rates(limits, computes, total)
        return rates.rates if rates.total >= total * (1 - SLACK) else None
    return _under_pair_limits(limits, computes, caps[0] / total, floor / total, total, run)


def _fill_largest_caps(caps: Floats, floor: Floats, total: float) -> Floats | None:
    """Fill the largest caps until they sum to ``total``, peers with a lower bound first."""
    if caps.sum() < total * (1 - SUM_TOLERANCE):
        return None
    rates, remaining = np.zeros(len(caps)), total
    for i in np.lexsort((np.arange(len(caps)), -caps, floor == 0)):
        # the last reducer takes the remainder, even if it is a rounding error
        rates[i] = min(caps[i], remaining)
        remaining -= rates[i]
        if remaining <= total * SUM_TOLERANCE:
            break
    return rates


def _under_pair_limits(
    limits: BandwidthLimits,
    computes: Bools,
    caps: Floats,
    floor: Floats,
    total: float,
    run: SearchRun,
) -> Floats | None:
    """Minimise the number of reducers by a MILP in (r, m), m_i = 1 if i is a reducer.

    Rates are scaled by the total; pair rows ``r_i + r_j <= t_ij`` are added lazily.
    """
    from scipy.optimize import Bounds, LinearConstraint

    n = limits.n
    assert limits.links is not None
    links = limits.links / total
    pairs: list[tuple[int, int]] = []
    base_rows = np.vstack(
        [np.concatenate([np.ones(n), np.zeros(n)])[None, :], np.hstack([np.eye(n), -np.diag(caps)])]
    )
    options: dict[str, Any] = {"node_limit": NODE_LIMIT}
    while run.remaining_s > 0:
        if math.isfinite(run.remaining_s):
            options["time_limit"] = max(run.remaining_s, 1e-3)
        pair_rows = np.zeros((len(pairs), 2 * n))
        for row, (i, j) in zip(pair_rows, pairs, strict=True):
            row[[i, j]] = 1.0
        lower = np.full(n + len(pairs), -np.inf)
        rhs = [*np.zeros(n), *(links[i, j] for i, j in pairs)]
        solution = milp(
            np.concatenate([np.zeros(n), np.ones(n)]),
            integrality=np.repeat([0.0, 1.0], n),
            bounds=Bounds(np.concatenate([floor, np.zeros(n)]), np.concatenate([caps, np.ones(n)])),
            constraints=LinearConstraint(
                np.vstack([base_rows, pair_rows]), np.append(1.0, lower), np.append(1.0, rhs)
            ),
            options=options,
        )
        if solution.x is None:
            return None
        rates: Floats = np.where(solution.x[:n] > ZERO, solution.x[:n], 0.0)
        used = np.where(computes[:, None], rates[None, :] + rates[:, None], 0.0)
        np.fill_diagonal(used, 0.0)
        violated = {(int(i), int(j)) for i, j in np.argwhere(used > links + 1e-8)}
        if violated <= set(pairs):
            rates *= total / rates.sum()
            return rates * min(1.0, max_scale(limits.problem, computes, rates))
        pairs += sorted(violated - set(pairs))
    return None
