"""One plan out of many equally fast ones, the same for every peer that solves.

Among the plans that reach the best steps per second (within `SLACK`): the fewest reducers, then the
lexicographically smallest contributors (false before true), then the lexicographically smallest
rates r. The rule is exact

* for the contributors, where `planner.lp.search` enumerates them; beyond that they are reduced from
  the set that was found, in ascending order of peers, as long as the rate stays;
* for reducers and rates of the chosen contributors always: by sorting caps where no pair limit
  binds, otherwise by mixed-integer programmes, at most `TREES` of at most `NODES` nodes each, for
  up to `ORDERED` peers.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import Limits
from planner.lp.rates import attained_scale, best_rates, links_fit
from planner.lp.search import ENUMERATED, all_sets
from planner.problems import AveragingProblem
from planner.search.highs import milp
from planner.search.stop import StopRun

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SLACK = 1e-9
"""Plans whose steps per second differ relatively by less than this count as equally fast."""
EVEN = 1e-12
ZERO = 1e-7
"""A rate below this fraction of the total is rounding of the MILP solver."""
ORDERED = 80
"""With more peers than this, rates under binding pair limits stay as the LP for R gives them."""
TREES = 8
"""Mixed-integer programmes spent on the order of rates; then the reducers are kept."""
NODES = 200
"""Branch-and-bound nodes for one question about reducers under pair limits; a count, so that every
peer stops at the same place."""


class Choice(NamedTuple):
    """The canonical plan's decisions."""

    computes: Bools
    rates: Floats


def canonical(
    problem: AveragingProblem, steps: float, computes: Bools, rates: Floats, run: StopRun
) -> Choice:
    """The canonical plan that makes ``steps`` per second.

    Parameters
    ----------
    computes, rates
        A plan that does; it is returned where rounding leaves no other, or time is up.
    run
        The clock. Without a limit in seconds it changes nothing.
    """
    limits = Limits(problem)
    if len(problem) == 1:
        return Choice(computes, rates)
    target = steps * (1 - SLACK)
    if len(problem) * 2 ** int(problem.contributors.sum()) <= ENUMERATED:
        sets = _fast_sets(problem, limits, target)
    else:
        sets = _thinned(problem, computes, target)[None, :]
    heap: list[tuple[int, tuple[bool, ...], int, Floats | None]] = [
        (
            _fewest_reducers(limits, chosen, _needed(problem, limits, chosen, target)),
            tuple(chosen),
            k,
            None,
        )
        for k, chosen in enumerate(sets)
    ]
    heapq.heapify(heap)
    while heap:
        _, _, k, exact = heapq.heappop(heap)
        if exact is not None:
            return Choice(sets[k], exact)
        total = _needed(problem, limits, sets[k], min(steps, _fastest(problem, limits, sets[k])))
        found = canonical_rates(limits, sets[k], total, run)
        if found is None:
            found = canonical_rates(limits, sets[k], _needed(problem, limits, sets[k], target), run)
        if found is not None and problem.steps_per_s(found, sets[k]) >= steps * (1 - 1e-7):
            heapq.heappush(heap, (int((found > 0).sum()), tuple(sets[k]), k, found))
    return Choice(computes, rates)


def canonical_rates(limits: Limits, computes: Bools, total: float, run: StopRun) -> Floats | None:
    """Fewest reducers, then lexicographically smallest rates, that sum to ``total``.

    None if the contributors cannot attain that total, or time is up.
    """
    caps, _ = limits.caps(computes[None, :], np.array([total]))
    floor = _floor(limits, computes, total)
    simple = _smallest_rates(caps[0], floor, total)
    if simple is None or links_fit(limits, computes, simple):
        return simple
    if limits.n > ORDERED:
        found = best_rates(limits, computes, total)
        return found.rates if found.total >= total * (1 - SLACK) else None
    return _Reducers(limits, computes, caps[0], floor, total, run).solve()


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


def _fast_sets(problem: AveragingProblem, limits: Limits, target: float) -> Bools:
    """Every set of contributors that may reach ``target``; pair limits between rates left out."""
    sets = all_sets(problem.contributors)
    samples = sets @ problem.samples_per_s
    sets = sets[samples >= target * problem.batch_size]
    totals = limits.largest_total(sets)
    samples = sets @ problem.samples_per_s
    values = [problem.steps_of(s, r) for s, r in zip(samples, totals, strict=True)]
    return sets[np.array(values) >= target]


def _thinned(problem: AveragingProblem, computes: Bools, target: float) -> Bools:
    """Drop contributors in ascending order while the others still compute fast enough.

    Without a contributor no cap falls, so the total rate stays attainable.
    """
    chosen = computes.copy()
    if problem.overlap:
        spare = float(problem.samples_per_s[chosen].sum()) - target * problem.batch_size
        for i in np.flatnonzero(chosen):
            if problem.samples_per_s[i] <= spare and chosen.sum() > 1:
                chosen[i] = False
                spare -= float(problem.samples_per_s[i])
    return chosen


def _floor(limits: Limits, computes: Bools, total: float) -> Floats:
    """What a lone contributor must keep because it cannot download it: r_i >= H - d_i."""
    floor = np.zeros(limits.n)
    if computes.sum() == 1:
        own = computes & limits.aggregates
        floor[own] = np.maximum(total - limits.download[own], 0.0)
    return floor


def _fewest_reducers(limits: Limits, computes: Bools, total: float) -> int:
    """Fewest caps that sum to ``total``: a lower bound where pair limits bind."""
    caps, _ = limits.caps(computes[None, :], np.array([total]))
    return _count(caps[0], _floor(limits, computes, total), total)


def _count(caps: Floats, floor: Floats, total: float) -> int:
    must = floor > 0
    have = float(caps[must].sum())
    best_first = np.sort(caps[~must])[::-1]
    more = int(np.searchsorted(have + np.cumsum(best_first), total * (1 - EVEN)))
    return int(must.sum()) + (0 if have >= total * (1 - EVEN) else more + 1)


def _smallest_rates(caps: Floats, floor: Floats, total: float) -> Floats | None:
    """Lexicographically smallest rates under the caps with as few reducers as possible.

    At most one peer has a floor; it is a reducer whatever the order.
    """
    n = len(caps)
    left = _count(caps, floor, total)
    if left > n or caps.sum() < total * (1 - EVEN):
        return None
    forced = int(np.argmax(floor)) if floor.any() else -1
    rates = np.zeros(n)
    later = np.sort(np.delete(caps, forced) if forced >= 0 else caps)
    rest = total
    for i in range(n):
        if i != forced:
            later = np.delete(later, np.searchsorted(later, caps[i]))
        reserve = float(caps[forced]) if forced > i else 0.0
        slots = left - (forced > i)
        reach = reserve + _top(later, slots)
        if i != forced and (slots == 0 or reach >= rest * (1 - EVEN)):
            continue
        others = reserve + _top(later, slots - 1)
        rates[i] = min(max(rest - others, float(floor[i]), 0.0), caps[i])
        rest = max(rest - float(rates[i]), 0.0)
        left -= 1
        if rest <= total * EVEN:
            break
    return rates


def _top(ascending: Floats, count: int) -> float:
    """Sum of the largest ``count`` of ascending numbers."""
    return float(ascending[max(len(ascending) - count, 0) :].sum()) if count > 0 else 0.0


class _Reducers:
    """Fewest reducers and smallest rates under pair limits: MILPs in (r, m), m_i: i is a reducer.

    Rates are scaled by the total; pair rows enter when broken and stay for the later solves.
    """

    def __init__(
        self,
        limits: Limits,
        computes: Bools,
        caps: Floats,
        floor: Floats,
        total: float,
        run: StopRun,
    ) -> None:
        self.limits, self.computes, self.total, self.run = limits, computes, total, run
        self.n = limits.n
        self.caps = caps / total
        self.lower = np.concatenate([floor / total, np.zeros(self.n)])
        self.upper = np.concatenate([self.caps, np.ones(self.n)])
        assert limits.links is not None
        self.links = limits.links / total
        self.pairs: list[tuple[int, int]] = []

    def solve(self) -> Floats | None:
        found = self._solve(np.concatenate([np.zeros(self.n), np.ones(self.n)]), None)
        if found is None:
            return None
        count = round(float(found[self.n :].sum()))
        trees = TREES
        for i in range(self.n):
            if found[i] > ZERO:
                least = self._solve(np.eye(2 * self.n)[i], count, integral=trees == 0)
                # fractional reducers may promise less than whole ones reach
                if trees > 0 and least is not None and least[i] < found[i] - ZERO:
                    trees -= 1
                    least = self._solve(np.eye(2 * self.n)[i], count)
                    if trees == 0:
                        self._keep(found if least is None else least)
                if least is not None and least[i] < found[i] - ZERO:
                    found = least
            self.upper[i] = min(self.upper[i], max(found[i], 0.0) + 1e-9)
        rates = np.where(found[: self.n] > ZERO, found[: self.n], 0.0)
        rates *= self.total / rates.sum()
        return rates * min(1.0, attained_scale(self.limits.problem, self.computes, rates))

    def _keep(self, found: Floats) -> None:
        """From here on the reducers are those of this solution, and m is no question any more."""
        reducers = found[: self.n] > ZERO
        self.upper[: self.n] = np.where(reducers, self.upper[: self.n], 0.0)
        self.lower[self.n :] = self.upper[self.n :] = reducers

    def _solve(self, cost: Floats, count: int | None, integral: bool = True) -> Floats | None:
        from scipy.optimize import Bounds, LinearConstraint

        n = self.n
        options: dict[str, Any] = {"node_limit": NODES} if integral else {}
        rows: list[Any] = [np.concatenate([np.ones(n), np.zeros(n)])[None, :]]
        rows.append(np.hstack([np.eye(n), -np.diag(self.caps)]))
        low, high = [np.ones(1), np.full(n, -np.inf)], [np.ones(1), np.zeros(n)]
        if count is not None:
            rows.append(np.concatenate([np.zeros(n), np.ones(n)])[None, :])
            low.append(np.zeros(1))
            high.append(np.full(1, float(count)))
        while self.run.remaining_s > 0:
            if math.isfinite(self.run.remaining_s):
                options["time_limit"] = max(self.run.remaining_s, 1e-3)
            pairs = np.zeros((len(self.pairs), 2 * n))
            for row, (i, j) in zip(pairs, self.pairs, strict=True):
                row[[i, j]] = 1.0
            limit = np.array([self.links[i, j] for i, j in self.pairs])
            found = milp(
                cost,
                integrality=np.repeat([0.0, float(integral)], n),
                bounds=Bounds(self.lower, self.upper),
                constraints=LinearConstraint(
                    np.vstack([*rows, pairs]),
                    np.concatenate([*low, np.full(len(limit), -np.inf)]),
                    np.concatenate([*high, limit]),
                ),
                options=options,
            )
            if found.x is None:
                return None
            rates = found.x[:n]
            used = np.where(self.computes[:, None], rates[None, :] + rates[:, None], 0.0)
            np.fill_diagonal(used, 0.0)
            broken = {(int(i), int(j)) for i, j in np.argwhere(used > self.links + 1e-8)}
            fresh = sorted(broken - set(self.pairs))
            if not fresh:
                return np.asarray(found.x, dtype=np.float64)
            self.pairs += fresh
        return None
