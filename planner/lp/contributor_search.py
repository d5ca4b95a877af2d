"""Which peers contribute: the best c, with a proven bound on the steps per second.

Dropping a contributor never lowers the largest total rate R(K) (its own cap does not fall, the
others' rise), while it lowers sum_i s_i c_i: the sets that attain a given rate are closed under
taking subsets. Four stages share one incumbent; the first that closes the gap ends the search:

1. few possible contributors: every set at once, each with its exact R(K);
2. a fractional knapsack at a series of rates gives a bound and sets to try; if a gap remains, the
   same with the contributors counted, and exchanges of a few peers;
3. single contributors, whose download limit is different;
4. a mixed-integer program (HiGHS) between incumbent and bound, pair rows added when broken.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import Limits
from planner.lp.contributor_milp import ContributorModel
from planner.lp.fewest_reducers import Choice, fast_sets
from planner.lp.knapsack import knapsack
from planner.lp.rates import Rates, best_rates
from planner.lp.sized_knapsack import SizedKnapsack, attainable, exchange, sized_knapsack
from planner.problems import AveragingProblem
from planner.search.incumbent import ROUNDING, Incumbent
from planner.search.result import Sense
from planner.search.stop import StopRun

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

KNAPSACKS = "fractional knapsacks over intervals of the total rate"
SIZED_KNAPSACKS = "knapsacks by the number of contributors"
PROGRAMMES = "HiGHS: mixed-integer programmes of the contributors"
"""What the bounds of the stages stand on."""

HIGHS_ROUNDING = 1e-5
"""HiGHS keeps rows up to 1e-6, and a value is off by a few rows together."""

CLOSE = 2e-7
"""Relative improvement that is not worth looking for; under the 1e-6 that counts as optimal."""
ENUMERATED = 200_000
"""Stage 1 runs when (number of sets) x (number of peers) is at most this."""
CANDIDATES = 24
"""Rates at which stage 2 rounds the knapsack."""
EXCHANGED = (1e-7, 4e-7, 2e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
"""How far below the bound, relatively, stage 2 aims when it exchanges peers."""
SIZES = 3
"""Numbers of contributors for which it does so."""
INTERVALS = 400
"""Most rate intervals that stage 2 looks at."""


class ContributorSearch:
    """One search.

    Attributes
    ----------
    incumbent
        The best contributors and rates, and what no plan exceeds, in steps per second.
    impossible
        Whether no set of contributors attains any rate.
    """

    def __init__(self, problem: AveragingProblem, run: StopRun) -> None:
        self.problem = problem
        self.limits = Limits(problem)
        self.run = run
        self.impossible = False
        self.able = problem.contributors
        self.samples = float(problem.samples_per_s[self.able].sum())
        self.incumbent: Incumbent[Choice] = Incumbent(
            run, problem, method="exact", seed=0, sense=Sense.MAXIMISE
        )
        self._tried: dict[bytes, Rates] = {}
        together = problem.steps_of(self.samples, self._widest())
        basis = "all who can, as fast as the slowest link of each lets them"
        self.incumbent.raise_bound(together, basis, {"kind": "everyone"})

    @property
    def best(self) -> float:
        """Steps per second of the incumbent, 0 before the first."""
        return 0.0 if self.incumbent.plan is None else self.incumbent.objective

    @property
    def bound(self) -> float:
        """No plan makes more steps per second."""
        return math.inf if self.incumbent.bound is None else self.incumbent.bound

    @property
    def cutoff(self) -> float:
        """What a set must exceed to be of interest; the bounds below exclude all that do."""
        return self.best * (1 + CLOSE)

    def solve(self, start: Bools | None = None) -> None:
        """Run the stages; ``start`` is a set of contributors to begin from.

        Parameters
        ----------
        start
            ``bool[n]``; None: from nothing.
        """
        if start is not None and start.any():
            self.try_set(start & self.able)
        self.try_set(self.able)
        if self._done():
            return
        if self.best == 0.0:
            # if no lone contributor attains anything, no larger set does
            self._lone_contributors()
            if self.best == 0.0:
                self.impossible = True
                return
        if len(self.problem) * 2 ** int(self.able.sum()) <= ENUMERATED:
            self._enumerate()
            return
        self._round_knapsacks()
        self._lone_contributors()
        self._bound_by_knapsacks()
        if not self._done() and self.problem.overlap:
            self._count_contributors()
        if not self._done():
            self._branch()

    def try_set(self, computes: Bools) -> Rates:
        """Exact rates for one set; it becomes the incumbent if it is better.

        Parameters
        ----------
        computes
            ``bool[n]``, the contributors.
        """
        key = np.packbits(computes).tobytes()
        if key not in self._tried:
            samples = float(self.problem.samples_per_s[computes].sum())
            wanted = samples * self.problem.gradient_bytes / self.problem.batch_size
            if len(self.problem) == 1:
                found = Rates(wanted, wanted, np.array([wanted]))
            else:
                cap = wanted if self.problem.overlap else math.inf
                found = best_rates(self.limits, computes, cap)
            self._tried[key] = found
            value = self.value(computes, found)
            if value > 0:
                self.incumbent.offer(value, Choice(computes.copy(), found.rates))
        return self._tried[key]

    def value(self, computes: Bools, found: Rates) -> float:
        """Steps per second of a set at its best rates.

        Parameters
        ----------
        computes
            ``bool[n]``, the contributors.
        """
        samples = float(self.problem.samples_per_s[computes].sum())
        total = math.inf if len(self.problem) == 1 else found.total
        return self.problem.steps_of(samples, total)

    def _widest(self) -> float:
        """An upper bound on R: every peer but a lone contributor downloads all of it."""
        n = len(self.problem)
        if n == 1:
            return math.inf
        lower = np.partition(self.limits.download, 1)[:2]
        caps = np.minimum(self.limits.upload, self.limits.largest_rate * n)[self.limits.aggregates]
        return float(min(lower[1], lower[0] + caps.max(initial=0.0), caps.sum()))

    def _done(self) -> bool:
        """Whether the bound is reached, or the stopping rule says so."""
        return self.bound <= self.cutoff * (1 + ROUNDING) or self.run.check() is not None

    def _require_admitted(self, samples_per_s: float, total: float, basis: str) -> None:
        """A relaxation at the incumbent's own total rate must allow the incumbent."""
        allowed = self.problem.steps_of(max(samples_per_s, 0.0), total)
        self.incumbent.require_admitted(allowed, basis)

    def equally_fast(self) -> Bools:
        """Sets that may be as good as the incumbent, where all of them can be listed."""
        if len(self.problem) * 2 ** int(self.able.sum()) > ENUMERATED:
            return np.zeros((0, len(self.problem)), dtype=bool)
        return fast_sets(self.problem, all_sets(self.able), self.best)

    # stage 1

    def _enumerate(self) -> None:
        """Every set of contributors, the most promising first."""
        sets = all_sets(self.able)
        samples = sets @ self.problem.samples_per_s
        need = self.best * self.problem.batch_size
        sets, samples = sets[samples > need], samples[samples > need]
        totals = self.limits.largest_total(sets)
        values = np.array(
            [self.problem.steps_of(s, r) for s, r in zip(samples, totals, strict=True)]
        )
        order = np.argsort(-values, kind="stable")
        ceilings: list[tuple[Bools, float]] = []
        for place in order:
            if values[place] <= self.best * (1 + 1e-12):
                break
            if self.run.update() is not None:
                self.incumbent.raise_bound(
                    max(float(values[place]), self.cutoff), "sets of contributors not yet tried"
                )
                return
            # a superset never attains a larger total rate
            chosen = sets[place]
            total = min((r for k, r in ceilings if not (k & ~chosen).any()), default=math.inf)
            if self.problem.steps_of(float(samples[place]), total) <= self.best:
                continue
            found = self.try_set(chosen)
            if found.total < totals[place] * (1 - 1e-9):
                capped = self.problem.overlap and found.bound >= (
                    samples[place] * self.problem.gradient_bytes / self.problem.batch_size
                ) * (1 - 1e-9)
                if not capped:
                    ceilings.append((chosen, found.bound))
        self._admit_by_caps()
        self.incumbent.close(f"each of {len(order)} sets of contributors that could be better")

    # stage 2

    def _round_knapsacks(self) -> None:
        """Try the integer parts of knapsacks at many rates."""
        top = min(self._widest(), float(self.limits.download.min()))
        if self.problem.overlap:
            top = min(top, self.bound * self.problem.gradient_bytes)
        if top <= 0:
            return
        sets: dict[bytes, Bools] = {}
        for rate in self._promising_rates(top):
            count = max(2, int(self.able.sum()))
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
        totals = self.limits.largest_total(stacked)
        samples = stacked @ self.problem.samples_per_s
        values = np.array(
            [self.problem.steps_of(s, r) for s, r in zip(samples, totals, strict=True)]
        )
        for place in np.argsort(-values, kind="stable")[:CANDIDATES]:
            if values[place] > self.best:
                self.try_set(stacked[place])

    def _promising_rates(self, top: float) -> list[float]:
        """Rates to round at: around the relaxation's best one, and a coarse grid."""
        low, high = 0.0, top
        if self.problem.overlap:
            for _ in range(30):
                middle = (low + high) / 2
                need = middle / self.problem.gradient_bytes * self.problem.batch_size
                if self._relaxed(middle, need) >= need:
                    low = middle
                else:
                    high = middle
            peak = low if low > 0 else top
        else:
            grid = np.linspace(top / CANDIDATES, top, CANDIDATES)
            worth = [self.problem.steps_of(self._relaxed(h, 0.0), h) for h in grid]
            peak = float(grid[int(np.argmax(worth))])
        near = [peak * (1 - x) for x in (0.0, 1e-9, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.02, 0.05)]
        coarse = [top * (1 - i / CANDIDATES) for i in range(CANDIDATES)]
        steps = [float(u) for u in np.unique(self.limits.upload[self.able]) if 0 < u <= top]
        return [*near, *coarse, *steps[-CANDIDATES:]]

    def _relaxed(self, rate: float, need: float) -> float:
        """Most samples per second at ``rate`` for sets that compute at least ``need``."""
        return knapsack(self.limits, rate, self._fewest(need)).samples_per_s

    def _fewest(self, need: float) -> int:
        """How many contributors it takes at least to compute ``need`` samples per second."""
        best_first = np.sort(self.problem.samples_per_s[self.able])[::-1]
        enough = int(np.searchsorted(np.cumsum(best_first), need * (1 - 1e-12))) + 1
        return max(2, min(enough, len(best_first)))

    def _bound_by_knapsacks(self) -> None:
        """Lower the bound: over a rate interval [x, y] nothing beats steps_of(knapsack(x), y)."""
        top = min(self._widest(), float(self.limits.download.min()))
        if self.problem.overlap:
            top = min(top, self.samples * self.problem.gradient_bytes / self.problem.batch_size)
        best = self.cutoff
        self._admit_by_knapsack()
        heap = [(-self.problem.steps_of(self.samples, top), 0.0, top)]
        closed = self.best
        for _ in range(INTERVALS):
            if not heap or -heap[0][0] <= best:
                break
            value, low, high = heapq.heappop(heap)
            if high - low <= 1e-10 * high:
                closed = max(closed, -value)
                continue
            middle = (low + high) / 2
            if low == 0.0 and self.best > 0:
                # below this rate even everyone's samples are too slow
                middle = max(middle, self._least_rate(best) * (1 - 1e-12))
            for x, y in ((low, middle), (middle, high)):
                if y <= x:
                    continue
                samples = self._relaxed(x, self._least_samples(best, y)) if x > 0 else self.samples
                steps = self.problem.steps_of(max(samples, 0.0), y)
                if steps > best:
                    heapq.heappush(heap, (-min(steps, -value), x, y))
        if heap:
            closed = max(closed, -heap[0][0])
        # whatever the intervals left out is at most the cut-off, or has a single contributor
        self.incumbent.raise_bound(max(closed, best), KNAPSACKS)

    def _admit_by_knapsack(self) -> None:
        """Where the incumbent has several contributors, the knapsack must contain them."""
        assert self.incumbent.plan is not None
        computes, rates = self.incumbent.plan
        count, total = int(computes.sum()), float(rates.sum())
        if count > 1:
            found = knapsack(self.limits, total * (1 - ROUNDING), count)
            self._require_admitted(found.samples_per_s, total, KNAPSACKS)

    def _least_rate(self, steps: float) -> float:
        """The total rate below which nothing makes ``steps`` per second."""
        if self.problem.overlap:
            return steps * self.problem.gradient_bytes
        left = 1 / steps - self.problem.batch_size / self.samples
        return self.problem.gradient_bytes / left if left > 0 else math.inf

    def _least_samples(self, steps: float, rate: float) -> float:
        """The samples per second below which nothing at ``rate`` makes ``steps`` per second."""
        if steps <= 0:
            return 0.0
        if self.problem.overlap:
            return steps * self.problem.batch_size
        left = 1 / steps - self.problem.gradient_bytes / rate
        return self.problem.batch_size / left if left > 0 else math.inf

    def _count_contributors(self) -> None:
        """The knapsack with k counted: a lower bound by bisection, and sets close to it."""
        most = int(self.able.sum())

        def sizes(steps: float) -> Iterator[tuple[SizedKnapsack, int]]:
            total, need = steps * self.problem.gradient_bytes, steps * self.problem.batch_size
            return attainable(self.limits, total, need, self._fewest(need), most)

        self._admit_by_size()
        low, high = self.best, self.bound
        while high - low > high * CLOSE / 4 and self.run.check() is None:
            middle = (low + high) / 2
            if next(sizes(middle), None) is None:
                high = middle
            else:
                low = middle
        self.incumbent.raise_bound(max(high, self.cutoff), SIZED_KNAPSACKS)
        for below in EXCHANGED:
            steps = self.bound * (1 - below)
            if steps <= self.best or self._done():
                return
            for found, size in itertools.islice(sizes(steps), SIZES):
                better = exchange(self.limits, found, steps * self.problem.batch_size, size)
                if better is not None:
                    self.try_set(better)

    def _admit_by_caps(self) -> None:
        """The largest total rate of the incumbent's own set must reach what it reaches."""
        assert self.incumbent.plan is not None
        computes = self.incumbent.plan.computes
        samples = float(self.problem.samples_per_s[computes].sum())
        most = float(self.limits.largest_total(computes[None, :])[0])
        self._require_admitted(samples, most, "largest total rates of sets of contributors")

    def _admit_by_programme(self) -> None:
        """The programme with the incumbent's contributors fixed must reach what they reach."""
        assert self.incumbent.plan is not None
        computes, rates = self.incumbent.plan
        count, total = int(computes.sum()), float(rates.sum())
        if count > 1:
            model = ContributorModel(
                self.limits, count, count, total * (1 - 1e-6), self._highest_rate(self.bound)
            )
            model.fix(computes)
            found = model.solve(self.run).bound
            self.incumbent.require_admitted(found, PROGRAMMES, rounding=HIGHS_ROUNDING)

    def _admit_by_size(self) -> None:
        assert self.incumbent.plan is not None
        computes, rates = self.incumbent.plan
        count, total = int(computes.sum()), float(rates.sum())
        if count > 1:
            found = sized_knapsack(self.limits, total * (1 - ROUNDING), count, count)
            self._require_admitted(found.samples_per_s, total, SIZED_KNAPSACKS)

    # stage 3

    def _lone_contributors(self) -> None:
        """Sets of one: only those that compute fast enough on their own."""
        alone = self.problem.samples_per_s / self.problem.batch_size
        for i in np.argsort(-np.where(self.able, alone, 0.0), kind="stable"):
            if not self.able[i] or alone[i] <= self.best:
                break
            self.try_set(np.arange(len(self.problem)) == i)

    # stage 4

    def _branch(self) -> None:
        """Best-first over intervals of the number of contributors k, a MILP for each."""
        self._admit_by_programme()
        need = self._least_samples(self.cutoff, self._widest())
        heap = [(-self.bound, self._fewest(need), int(self.able.sum()))]
        closed = self.best
        while heap and self.run.check() is None:
            value, fewest, most = heapq.heappop(heap)
            bound, split = self._interval(fewest, most, -value)
            if split is not None:
                for low, high in ((fewest, split - 1), (split, most)):
                    if low <= high:
                        heapq.heappush(heap, (-bound, low, high))
            elif bound > self.cutoff:
                # stopped before this interval was finished
                heapq.heappush(heap, (-bound, fewest, most))
                break
            else:
                closed = max(closed, bound)
            while heap and -heap[0][0] <= self.cutoff:
                closed = max(closed, -heapq.heappop(heap)[0])
            self._lower([closed, *(-v for v, _, _ in heap)])
        self._lower([closed, *(-v for v, _, _ in heap)])

    def _lower(self, bounds: Sequence[float]) -> None:
        """The largest of what the intervals still allow; what was closed is below the cut-off."""
        self.incumbent.raise_bound(max(self.cutoff, *bounds), PROGRAMMES)

    def _interval(self, fewest: int, most: int, bound: float) -> tuple[float, int | None]:
        """Search ``fewest <= k <= most``.

        Returns
        -------
        tuple
            The bound reached, and where to split the interval: a set with more contributors than
            ``fewest`` fits the download caps of ``fewest`` but not its own.
        """
        lowest = self._least_rate(self.cutoff) if self.best > 0 else 0.0
        model = ContributorModel(self.limits, fewest, most, lowest, self._highest_rate(bound))
        while True:
            answer = model.solve(self.run)
            bound = min(bound, max(answer.bound, self.cutoff))
            if answer.computes is not None:
                self.try_set(answer.computes)
            if bound <= self.cutoff or answer.computes is None or self.run.check():
                return bound, None
            if model.refine(answer):
                continue
            if int(answer.computes.sum()) > fewest:
                return bound, int(answer.computes.sum())
            model.exclude(answer.computes)

    def _highest_rate(self, bound: float) -> float:
        """No better plan has a larger total rate than this, in bytes per second."""
        top = min(self._widest(), float(self.limits.download.min()))
        return min(top, bound * self.problem.gradient_bytes) if self.problem.overlap else top


def all_sets(able: Bools) -> Bools:
    """``bool[2^e - 1, n]``: every set of at least one of the e possible contributors.

    Parameters
    ----------
    able
        ``bool[n]``, the possible contributors.
    """
    index = np.flatnonzero(able)
    numbers = np.arange(1, 2 ** len(index), dtype=np.int64)
    sets = np.zeros((len(numbers), len(able)), dtype=bool)
    sets[:, index] = (numbers[:, None] >> np.arange(len(index))[None, :]) & 1
    return sets
