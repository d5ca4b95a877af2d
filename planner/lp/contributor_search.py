"""Search for the best set of contributors c, with a proven bound on the steps per second.

Removing a contributor never decreases the maximum total rate R(K) (its own cap does not decrease
and the others' increase), while it decreases sum_i s_i c_i: the sets that attain a given rate are
closed under taking subsets. Four phases share one incumbent; the first that closes the gap ends the
search:

1. few eligible contributors: enumerate all sets, each with its exact R(K);
2. a fractional knapsack at a series of rates gives a bound and candidate sets; if a gap remains, a
   knapsack with a cardinality constraint, and exchanges of a few peers;
3. single contributors, whose download limit is different;
4. a mixed-integer program (HiGHS) between incumbent and bound, with lazy pair rows.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import BandwidthLimits
from planner.lp.cardinality_knapsack import (
    CardinalityKnapsack,
    cardinality_knapsack,
    exchange_peers,
    feasible_sizes,
)
from planner.lp.contributor_milp import ContributorModel
from planner.lp.fewest_reducers import AveragingChoice, sets_attaining
from planner.lp.knapsack import knapsack
from planner.lp.rates import ReducerRates, best_rates
from planner.problems import AveragingProblem
from planner.search.incumbent import ROUNDING, Incumbent
from planner.search.result import Sense
from planner.search.stop import SearchRun

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

KNAPSACKS = "fractional knapsacks over intervals of the total rate"
CARDINALITY_KNAPSACKS = "knapsacks by the number of contributors"
MILPS = "HiGHS: mixed-integer programs of the contributors"
"""Bases of the bounds of the phases."""

HIGHS_ROUNDING = 1e-5
"""Relative tolerance of HiGHS's bounds: rows are satisfied up to 1e-6, and errors add up."""

OBJECTIVE_TOLERANCE = 2e-7
"""Relative improvement below which sets are ignored; less than the 1e-6 of OPTIMAL."""
MAX_ENUMERATED = 200_000
"""Maximum of (number of sets) x (number of peers) for enumeration (phase 1)."""
NUM_CANDIDATES = 24
"""Number of rates at which phase 2 rounds the knapsack."""
EXCHANGE_TARGETS = (1e-7, 4e-7, 2e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
"""Relative distances below the bound that phase 2 targets when it exchanges peers."""
NUM_SIZES = 3
"""Numbers of contributors tried per target."""
MAX_INTERVALS = 400
"""Maximum number of rate intervals in phase 2."""


class ContributorSearch:
    """Exact search for the contributors.

    Attributes
    ----------
    incumbent
        Best contributors and rates, and upper bound, in steps per second.
    infeasible
        Whether no set of contributors attains any rate.
    """

    def __init__(self, problem: AveragingProblem, run: SearchRun) -> None:
        self.problem = problem
        self.limits = BandwidthLimits(problem)
        self.run = run
        self.infeasible = False
        self.eligible = problem.contributors
        self.samples = float(problem.samples_per_s[self.eligible].sum())
        self.incumbent: Incumbent[AveragingChoice] = Incumbent(
            run, problem, method="exact", seed=0, sense=Sense.MAXIMISE
        )
        self._tried: dict[bytes, ReducerRates] = {}
        self._tried_bound = 0.0
        value = problem.steps_of(self.samples, self._max_rate_bound())
        basis = "all peers that can contribute; every peer downloads the whole average"
        self.incumbent.offer_bound(value, basis, {"kind": "everyone"})

    @property
    def best(self) -> float:
        """Steps per second of the incumbent, 0 before the first."""
        return 0.0 if self.incumbent.plan is None else self.incumbent.objective

    @property
    def bound(self) -> float:
        """Upper bound on the steps per second of any plan."""
        return math.inf if self.incumbent.bound is None else self.incumbent.bound

    @property
    def cutoff(self) -> float:
        """Steps per second that a set must exceed to be considered."""
        return self.best * (1 + OBJECTIVE_TOLERANCE)

    def solve(self, start: Bools | None = None) -> None:
        """Run the phases, optionally from an initial set of contributors.

        Parameters
        ----------
        start
            ``bool[n]`` or None.
        """
        if start is not None and start.any():
            self.try_set(start & self.eligible)
        self.try_set(self.eligible)
        if self._is_done():
            return
        if self.best == 0.0:
            # if no single contributor attains a positive rate, no larger set does
            self._try_single_contributors()
            if self.best == 0.0:
                negligible = 1e-9 * self.samples / self.problem.batch_size
                self.infeasible = self._tried_bound <= negligible
                return
        if len(self.problem) * 2 ** int(self.eligible.sum()) <= MAX_ENUMERATED:
            self._enumerate()
            return
        self._round_knapsacks()
        self._try_single_contributors()
        self._bound_by_knapsacks()
        if not self._is_done() and self.problem.overlap:
            self._count_contributors()
        if not self._is_done():
            self._branch_and_bound()

    def try_set(self, computes: Bools) -> ReducerRates:
        """Compute the exact rates of one set and offer it to the incumbent.

        Parameters
        ----------
        computes
            ``bool[n]``, the contributors.
        """
        key = np.packbits(computes).tobytes()
        if key not in self._tried:
            samples = float(self.problem.samples_per_s[computes].sum())
            needed_rate = samples * self.problem.gradient_bytes / self.problem.batch_size
            if len(self.problem) == 1:
                rates = ReducerRates(needed_rate, needed_rate, np.array([needed_rate]))
            else:
                cap = needed_rate if self.problem.overlap else math.inf
                rates = best_rates(self.limits, computes, cap)
            self._tried[key] = rates
            value = self.value(computes, rates.total)
            # larger than the value if the LP solver has failed
            self._tried_bound = max(self._tried_bound, self.value(computes, rates.bound))
            if value > 0:
                self.incumbent.offer(value, AveragingChoice(computes.copy(), rates.rates))
        return self._tried[key]

    def value(self, computes: Bools, total: float) -> float:
        """Steps per second of a set at a total rate.

        Parameters
        ----------
        computes
            ``bool[n]``, the contributors.
        """
        samples = float(self.problem.samples_per_s[computes].sum())
        return self.problem.steps_of(samples, math.inf if len(self.problem) == 1 else total)

    def _offer_bound(self, bound: float, basis: str) -> None:
        """Offer a bound on all sets but those that were tried, whose bounds are added."""
        self.incumbent.offer_bound(max(bound, self._tried_bound), basis)

    def _max_rate_bound(self) -> float:
        """Upper bound on R: every peer except a single contributor downloads at rate R.

        A reducer returns r_i to n - 1 peers, or to n - 2 while it sends R >= r_i as a contributor.
        """
        n = len(self.problem)
        if n == 1:
            return math.inf
        lower = np.partition(self.limits.download, 1)[:2]
        caps = np.minimum(self.limits.upload / (n - 1), self.limits.max_reducer_rate)[
            self.limits.can_reduce
        ]
        return float(min(lower[1], lower[0] + caps.max(initial=0.0), caps.sum()))

    def _is_done(self) -> bool:
        """Whether the gap is closed or the run must stop."""
        return self.bound <= self.cutoff * (1 + ROUNDING) or self.run.check() is not None

    def _require_admitted(self, samples_per_s: float, total: float, basis: str) -> None:
        """Verify that a relaxation at the incumbent's total rate admits the incumbent."""
        allowed = self.problem.steps_of(max(samples_per_s, 0.0), total)
        self.incumbent.require_admitted(allowed, basis)

    def possible_ties(self) -> Bools:
        """Sets that may tie with the incumbent, if all sets can be enumerated."""
        if len(self.problem) * 2 ** int(self.eligible.sum()) > MAX_ENUMERATED:
            return np.zeros((0, len(self.problem)), dtype=bool)
        return sets_attaining(self.problem, all_sets(self.eligible), self.best)

    # phase 1

    def _enumerate(self) -> None:
        """Enumerate all sets of contributors in descending order of their upper bounds."""
        sets = all_sets(self.eligible)
        samples = sets @ self.problem.samples_per_s
        required_samples = self.best * self.problem.batch_size
        sets, samples = sets[samples > required_samples], samples[samples > required_samples]
        totals = self.limits.max_total_rate(sets)
        values = np.array(
            [self.problem.steps_of(s, r) for s, r in zip(samples, totals, strict=True)]
        )
        order = np.argsort(-values, kind="stable")
        ceilings: list[tuple[Bools, float]] = []
        for index in order:
            if values[index] <= self.best * (1 + 1e-12):
                break
            if self.run.update() is not None:
                self._offer_bound(
                    max(float(values[index]), self.cutoff), "sets of contributors not yet tried"
                )
                return
            # the total rate of a superset is at most that of the set
            chosen = sets[index]
            total = min((r for k, r in ceilings if not (k & ~chosen).any()), default=math.inf)
            if self.problem.steps_of(float(samples[index]), total) <= self.best:
                continue
            rates = self.try_set(chosen)
            if rates.total < totals[index] * (1 - 1e-9):
                capped = self.problem.overlap and rates.bound >= (
                    samples[index] * self.problem.gradient_bytes / self.problem.batch_size
                ) * (1 - 1e-9)
                if not capped:
                    ceilings.append((chosen, rates.bound))
        self._check_caps()
        self._offer_bound(
            self.best, f"each of {len(order)} sets of contributors that could be better"
        )

    # phase 2

    def _round_knapsacks(self) -> None:
        """Try the rounded knapsack solutions at many rates."""
        max_rate = min(self._max_rate_bound(), float(self.limits.download.min()))
        if self.problem.overlap:
            max_rate = min(max_rate, self.bound * self.problem.gradient_bytes)
        if max_rate <= 0:
            return
        sets: dict[bytes, Bools] = {}
        for rate in self._promising_rates(max_rate):
            count = max(2, int(self.eligible.sum()))
            for _ in range(4):
                chosen = knapsack(self.limits, rate, count).computes
                if chosen.any():
                    sets[np.packbits(chosen).tobytes()] = chosen
                    if max(2, int(chosen.sum())) == count:
                        break
                count = max(2, int(chosen.sum())) if chosen.any() else max(2, count // 2)
        if not sets:
            return
        stacked = np.array(list(sets.values()))
        totals = self.limits.max_total_rate(stacked)
        samples = stacked @ self.problem.samples_per_s
        values = np.array(
            [self.problem.steps_of(s, r) for s, r in zip(samples, totals, strict=True)]
        )
        for index in np.argsort(-values, kind="stable")[:NUM_CANDIDATES]:
            if values[index] > self.best:
                self.try_set(stacked[index])

    def _promising_rates(self, max_rate: float) -> list[float]:
        """Rates for rounding: around the relaxation's best rate, and a coarse grid."""
        low, high = 0.0, max_rate
        if self.problem.overlap:
            for _ in range(30):
                middle = (low + high) / 2
                required_samples = middle / self.problem.gradient_bytes * self.problem.batch_size
                if self._max_samples(middle, required_samples) >= required_samples:
                    low = middle
                else:
                    high = middle
            peak = low if low > 0 else max_rate
        else:
            grid = np.linspace(max_rate / NUM_CANDIDATES, max_rate, NUM_CANDIDATES)
            values = [self.problem.steps_of(self._max_samples(rate, 0.0), rate) for rate in grid]
            peak = float(grid[int(np.argmax(values))])
        near_peak = [peak * (1 - x) for x in (0.0, 1e-9, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.02, 0.05)]
        coarse = [max_rate * (1 - i / NUM_CANDIDATES) for i in range(NUM_CANDIDATES)]
        steps = [
            float(u) for u in np.unique(self.limits.upload[self.eligible]) if 0 < u <= max_rate
        ]
        return [*near_peak, *coarse, *steps[-NUM_CANDIDATES:]]

    def _max_samples(self, rate: float, required_samples: float) -> float:
        """Maximum samples per second at ``rate`` of sets with at least ``required_samples``."""
        return knapsack(self.limits, rate, self._min_contributors(required_samples)).samples_per_s

    def _min_contributors(self, required_samples: float) -> int:
        """Minimum number of contributors that compute ``required_samples`` samples per second."""
        best_first = np.sort(self.problem.samples_per_s[self.eligible])[::-1]
        enough = int(np.searchsorted(np.cumsum(best_first), required_samples * (1 - 1e-12))) + 1
        return max(2, min(enough, len(best_first)))

    def _bound_by_knapsacks(self) -> None:
        """Tighten the bound: on a rate interval [x, y] it is steps_of(knapsack(x), y)."""
        max_rate = min(self._max_rate_bound(), float(self.limits.download.min()))
        if self.problem.overlap:
            max_rate = min(
                max_rate, self.samples * self.problem.gradient_bytes / self.problem.batch_size
            )
        best = self.cutoff
        self._check_knapsack()
        heap = [(-self.problem.steps_of(self.samples, max_rate), 0.0, max_rate)]
        closed_bound = self.best
        for _ in range(MAX_INTERVALS):
            if not heap or -heap[0][0] <= best:
                break
            value, low, high = heapq.heappop(heap)
            if high - low <= 1e-10 * high:
                closed_bound = max(closed_bound, -value)
                continue
            middle = (low + high) / 2
            if low == 0.0 and self.best > 0:
                # below this rate, no set exceeds the cutoff
                middle = max(middle, self._min_rate(best) * (1 - 1e-12))
            for x, y in ((low, middle), (middle, high)):
                if y <= x:
                    continue
                samples = (
                    self._max_samples(x, self._min_samples(best, y)) if x > 0 else self.samples
                )
                steps = self.problem.steps_of(max(samples, 0.0), y)
                if steps > best:
                    heapq.heappush(heap, (-min(steps, -value), x, y))
        if heap:
            closed_bound = max(closed_bound, -heap[0][0])
        # intervals pruned are at most the cutoff, or have a single contributor
        self._offer_bound(max(closed_bound, best), KNAPSACKS)

    def _check_knapsack(self) -> None:
        """Verify that the knapsack admits an incumbent with several contributors."""
        assert self.incumbent.plan is not None
        computes, rates = self.incumbent.plan
        count, total = int(computes.sum()), float(rates.sum())
        if count > 1:
            chosen = knapsack(self.limits, total * (1 - ROUNDING), count)
            self._require_admitted(chosen.samples_per_s, total, KNAPSACKS)

    def _min_rate(self, steps: float) -> float:
        """Minimum total rate needed for ``steps`` per second."""
        if self.problem.overlap:
            return steps * self.problem.gradient_bytes
        seconds_left = 1 / steps - self.problem.batch_size / self.samples
        return self.problem.gradient_bytes / seconds_left if seconds_left > 0 else math.inf

    def _min_samples(self, steps: float, rate: float) -> float:
        """Minimum samples per second needed at ``rate`` for ``steps`` per second."""
        if steps <= 0:
            return 0.0
        if self.problem.overlap:
            return steps * self.problem.batch_size
        seconds_left = 1 / steps - self.problem.gradient_bytes / rate
        return self.problem.batch_size / seconds_left if seconds_left > 0 else math.inf

    def _count_contributors(self) -> None:
        """Cardinality-constrained knapsack: a tighter bound by bisection, and sets close to it."""
        max_contributors = int(self.eligible.sum())

        def sizes(steps: float) -> Iterator[tuple[CardinalityKnapsack, int]]:
            total, required_samples = (
                steps * self.problem.gradient_bytes,
                steps * self.problem.batch_size,
            )
            return feasible_sizes(
                self.limits,
                total,
                required_samples,
                self._min_contributors(required_samples),
                max_contributors,
            )

        self._check_cardinality_knapsack()
        low, high = self.best, self.bound
        while high - low > high * OBJECTIVE_TOLERANCE / 4 and self.run.check() is None:
            middle = (low + high) / 2
            if next(sizes(middle), None) is None:
                high = middle
            else:
                low = middle
        self._offer_bound(max(high, self.cutoff), CARDINALITY_KNAPSACKS)
        for distance in EXCHANGE_TARGETS:
            steps = self.bound * (1 - distance)
            if steps <= self.best or self._is_done():
                return
            for chosen, size in itertools.islice(sizes(steps), NUM_SIZES):
                better = exchange_peers(self.limits, chosen, steps * self.problem.batch_size, size)
                if better is not None:
                    self.try_set(better)

    def _check_caps(self) -> None:
        """Verify that the maximum total rate of the incumbent's set admits the incumbent."""
        assert self.incumbent.plan is not None
        computes = self.incumbent.plan.computes
        samples = float(self.problem.samples_per_s[computes].sum())
        max_total_rate = float(self.limits.max_total_rate(computes[None, :])[0])
        self._require_admitted(
            samples, max_total_rate, "largest total rates of sets of contributors"
        )

    def _check_milp(self) -> None:
        """Verify that the MILP with the incumbent's contributors fixed admits the incumbent."""
        assert self.incumbent.plan is not None
        computes, rates = self.incumbent.plan
        count, total = int(computes.sum()), float(rates.sum())
        if count > 1:
            model = ContributorModel(
                self.limits, count, count, total * (1 - 1e-6), self._max_improving_rate(self.bound)
            )
            model.fix(computes)
            bound = model.solve(self.run).bound
            self.incumbent.require_admitted(bound, MILPS, rounding=HIGHS_ROUNDING)

    def _check_cardinality_knapsack(self) -> None:
        assert self.incumbent.plan is not None
        computes, rates = self.incumbent.plan
        count, total = int(computes.sum()), float(rates.sum())
        if count > 1:
            solution = cardinality_knapsack(self.limits, total * (1 - ROUNDING), count, count)
            self._require_admitted(solution.samples_per_s, total, CARDINALITY_KNAPSACKS)

    # phase 3

    def _try_single_contributors(self) -> None:
        """Try single contributors that compute fast enough on their own."""
        steps_alone_per_s = self.problem.samples_per_s / self.problem.batch_size
        for i in np.argsort(-np.where(self.eligible, steps_alone_per_s, 0.0), kind="stable"):
            if not self.eligible[i] or steps_alone_per_s[i] <= self.best:
                break
            self.try_set(np.arange(len(self.problem)) == i)

    # phase 4

    def _branch_and_bound(self) -> None:
        """Best-first search over intervals of the number of contributors, a MILP for each."""
        self._check_milp()
        required_samples = self._min_samples(self.cutoff, self._max_rate_bound())
        heap = [(-self.bound, self._min_contributors(required_samples), int(self.eligible.sum()))]
        closed_bound = self.best
        while heap and self.run.check() is None:
            value, min_contributors, max_contributors = heapq.heappop(heap)
            bound, split = self._search_interval(min_contributors, max_contributors, -value)
            if split is not None:
                for low, high in ((min_contributors, split - 1), (split, max_contributors)):
                    if low <= high:
                        heapq.heappush(heap, (-bound, low, high))
            elif bound > self.cutoff:
                # the run stopped before this interval was closed
                heapq.heappush(heap, (-bound, min_contributors, max_contributors))
                break
            else:
                closed_bound = max(closed_bound, bound)
            while heap and -heap[0][0] <= self.cutoff:
                closed_bound = max(closed_bound, -heapq.heappop(heap)[0])
            self._update_bound([closed_bound, *(-v for v, _, _ in heap)])
        self._update_bound([closed_bound, *(-v for v, _, _ in heap)])

    def _update_bound(self, bounds: Sequence[float]) -> None:
        """Set the bound to the largest of all open and closed intervals."""
        self._offer_bound(max(self.cutoff, *bounds), MILPS)

    def _search_interval(
        self, min_contributors: int, max_contributors: int, bound: float
    ) -> tuple[float, int | None]:
        """Search ``min_contributors <= k <= max_contributors``.

        Returns
        -------
        tuple
            The bound reached, and where to split the interval, if the MILP's set has more than
            ``min_contributors`` contributors and satisfies only their download caps.
        """
        min_rate = self._min_rate(self.cutoff) if self.best > 0 else 0.0
        model = ContributorModel(
            self.limits,
            min_contributors,
            max_contributors,
            min_rate,
            self._max_improving_rate(bound),
        )
        while True:
            result = model.solve(self.run)
            bound = min(bound, max(result.bound, self.cutoff))
            if result.computes is not None:
                self.try_set(result.computes)
            if bound <= self.cutoff or result.computes is None or self.run.check():
                return bound, None
            if model.add_violated_rows(result):
                continue
            if int(result.computes.sum()) > min_contributors:
                return bound, int(result.computes.sum())
            model.exclude(result.computes)

    def _max_improving_rate(self, bound: float) -> float:
        """Upper bound on the total rate of a better plan, in bytes per second."""
        max_rate = min(self._max_rate_bound(), float(self.limits.download.min()))
        return (
            min(max_rate, bound * self.problem.gradient_bytes) if self.problem.overlap else max_rate
        )


def all_sets(eligible: Bools) -> Bools:
    """``bool[2^e - 1, n]``: all non-empty sets of the e eligible contributors.

    Parameters
    ----------
    eligible
        ``bool[n]``, the possible contributors.
    """
    index = np.flatnonzero(eligible)
    numbers = np.arange(1, 2 ** len(index), dtype=np.int64)
    sets = np.zeros((len(numbers), len(eligible)), dtype=bool)
    sets[:, index] = (numbers[:, None] >> np.arange(len(index))[None, :]) & 1
    return sets
