"""Chain bound for any network: a lower bound from decisions about links below a threshold.

The level of a boundary is its bottleneck (eq. 3). Removing the boundaries of a plan one by one, the
largest level first, leaves a chain of ever smaller sets, and each removed level is the largest of
its set. Let the cost of a set be the smallest t for which some plan has all of the set's levels at
most t. Then the sum of eq. 4 is at least the cost of the cheapest chain from all boundaries to
none. CP-SAT decides whether a set can have levels of at most t while eq. 2 is at most ``ceiling``.
Such decisions are fast, unlike the minimisation.

The data-parallel cost of the optimum is unknown, so its range is divided into intervals. Within an
interval the bound is its lower end plus the chain found with its upper end as ceiling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from planner.genetic.boundary_sets import BoundarySets, Key, Mask
from planner.genetic.bounds import Forest, star_bound
from planner.genetic.chain_decision import is_achievable
from planner.genetic.data import AssignmentData
from planner.genetic.matched_assignment import cost_of, data_parallel_cost
from planner.search.arrays import Ints

ROUNDING = 1e-9
"""Relative tolerance for sums of the same costs in another order."""


@dataclass(frozen=True)
class ChainParams:
    """Parameters of the chain bound.

    Attributes
    ----------
    max_stages
        Maximum number of stages: 2 ** (S - 1) sets of boundaries are enumerated.
    max_cells
        Maximum of devices x stages for which queries are solved.
    max_work
        Limit on CP-SAT's deterministic time for a first query.
    max_work_factor
        Maximum factor on that limit once all fast queries are solved.
    stride
        First step above a proven level, as a share of the incumbent's cost.
    min_step
        Smaller steps and intervals, as a share of the incumbent's cost, are not queried.
    split
        An interval is halved if it is this many times wider than the next step.
    """

    max_stages: int = 14
    max_cells: int = 1100
    max_work: float = 0.2
    max_work_factor: int = 64
    stride: float = 8e-3
    min_step: float = 1e-3
    split: float = 6.0


@dataclass
class _LevelRange:
    """Range of the cost of a set, as indices into the levels.

    Attributes
    ----------
    low, high
        Proven to be infeasible below ``low``; not excluded at ``high``.
    stride, max_work
        Of the next query; see `ChainParams`.
    """

    low: int
    high: int
    stride: float
    max_work: float


@dataclass
class _Interval:
    """Plans whose data-parallel cost lies between ``floor`` and ``top``.

    Plans above ``ceiling`` cost at least as much as the incumbent.
    """

    floor: float
    top: float
    ceiling: float
    levels: dict[Key, _LevelRange]


@dataclass(frozen=True)
class ChainQuery:
    """Decision problem: can a plan have levels of at most ``level`` on ``mask``, in an interval?

    Attributes
    ----------
    interval
        The range of the data-parallel cost.
    key, index
        The set of boundaries, and the index of the level.
    mask
        The boundaries as bits.
    level
        Threshold on the link costs, seconds.
    max_work
        CP-SAT's deterministic time.
    """

    interval: _Interval
    key: Key
    index: int
    mask: Mask
    level: float
    max_work: float

    def solve(self, data: AssignmentData, max_s: float = math.inf) -> bool | None:
        """Decide with CP-SAT; None if the limit is reached."""
        return is_achievable(
            data, self.mask, self.level, self.interval.ceiling, self.max_work, max_s
        )


class ChainBound:
    """Lower bound that grows with the queries solved.

    Parameters
    ----------
    incumbent
        Slots of the best known plan.

    Attributes
    ----------
    bound
        In seconds: no plan is better than the smaller of this and the incumbent's cost. It exceeds
        the incumbent's cost only if a decision was wrong.
    """

    def __init__(
        self, data: AssignmentData, incumbent: Ints, params: ChainParams | None = None
    ) -> None:
        self.data = data
        self.params = params or ChainParams()
        self.sets = BoundarySets(data)
        forest = Forest(data)
        self.levels = forest.levels
        # many sets have as many links
        level_of = cache(forest.level)
        levels = {
            key: self._initial_level(level_of(self.sets.pairs(key)))
            for key in sorted(set(self.sets.keys))
        }
        self.work_factor = 1
        self.intervals = [_Interval(star_bound(data), math.inf, math.inf, levels)]
        self.bound = 0.0
        self.upper = math.inf
        self.tighten(incumbent)

    @staticmethod
    def applies(data: AssignmentData) -> bool:
        """Whether the instance is small enough."""
        params = ChainParams()
        stages = len(data.sizes)
        cells = len(data.stage_of_slot) * stages
        return 1 < stages <= params.max_stages and cells <= params.max_cells

    def tighten(self, incumbent: Ints) -> None:
        """Update the incumbent if the plan is better."""
        cost = cost_of(self.data, incumbent)
        if cost < self.upper:
            self.upper, self.upper_dp_cost = cost, float(data_parallel_cost(self.data, incumbent))
        self._refresh()

    def queries(self, count: int) -> list[ChainQuery]:
        """The at most ``count`` most useful next queries; none if there are none left."""
        min_step = self.params.min_step * self.upper
        while True:
            interval = min(self.intervals, key=self._value)
            strides = sorted(
                ((self._stride(interval.levels[key]), key) for key in self._chain(interval)[1]),
                reverse=True,
            )
            useful = [key for stride, key in strides if stride > min_step]
            if math.isinf(interval.ceiling):
                if useful:
                    break
                interval.ceiling = math.nextafter(self.upper, math.inf)
                self._discard_feasible(interval)
                self._refresh()
                continue
            width = interval.ceiling - interval.floor
            if width > min_step and width > self.params.split * (strides[0][0] if strides else 0.0):
                self._split(interval)
            elif not useful and self.work_factor < self.params.max_work_factor:
                self._increase_work()
            else:
                break
        return [self._query(interval, key) for key in useful[:count]]

    def record(self, query: ChainQuery, outcome: bool | None) -> None:
        """Record the outcome of a query."""
        level_range = query.interval.levels[query.key]
        if outcome is False:
            level_range.stride *= 2
            self._raise(query.interval, query.key, query.index + 1)
        else:
            level_range.stride /= 4
            if outcome:
                level_range.high = max(level_range.low, min(level_range.high, query.index))
            else:
                level_range.max_work *= 2
        self._refresh()

    def _query(self, interval: _Interval, key: Key) -> ChainQuery:
        """Next query of a set: proofs are fast well below the true level, so step up from below."""
        level_range = interval.levels[key]
        level = self.levels[level_range.low] + self._stride(level_range)
        index = int(np.searchsorted(self.levels, level, side="right")) - 1
        index = min(max(index, level_range.low), level_range.high - 1)
        mask, level = self.sets.mask_of[key], float(self.levels[index])
        return ChainQuery(interval, key, index, mask, level, level_range.max_work)

    def _stride(self, level_range: _LevelRange) -> float:
        """Step of the next query above the proven level; 0 if the level is known."""
        open_range = self.levels[level_range.high] - self.levels[level_range.low]
        return float(min(level_range.stride * self.upper, open_range))

    def _raise(self, interval: _Interval, key: Key, low: int) -> None:
        """Raise the proven level of ``key`` and of all sets that contain it."""
        for other, level_range in interval.levels.items():
            if other == key or self.sets.contains(other, key):
                level_range.low = max(level_range.low, low)
                level_range.high = max(level_range.high, level_range.low)

    def _increase_work(self) -> None:
        """All fast proofs are done: retry the undecided levels with more work."""
        self.work_factor *= 4
        for interval in self.intervals:
            for level_range in interval.levels.values():
                level_range.stride = max(level_range.stride, self.params.stride / 2)
                level_range.max_work = self.params.max_work * self.work_factor

    def _split(self, interval: _Interval) -> None:
        middle = (interval.floor + interval.ceiling) / 2
        copy = {
            key: self._initial_level(level_range.low)
            for key, level_range in interval.levels.items()
        }
        self.intervals.append(_Interval(interval.floor, middle, middle, copy))
        interval.floor = middle

    def _discard_feasible(self, interval: _Interval) -> None:
        """A smaller ceiling invalidates feasible outcomes; infeasible ones remain proven."""
        interval.levels = {
            key: self._initial_level(level_range.low)
            for key, level_range in interval.levels.items()
        }

    def _initial_level(self, low: int) -> _LevelRange:
        return _LevelRange(low, len(self.levels) - 1, self.params.stride, self.params.max_work)

    def _refresh(self) -> None:
        """Update ceilings and bound from the levels and the incumbent."""
        for interval in self.intervals:
            chain_cost = self._chain(interval)[0]
            if self._contradicts_incumbent(interval, chain_cost):
                self.bound = self.upper_dp_cost + chain_cost
                return
            if math.isfinite(interval.ceiling):
                # above the ceiling, a plan costs at least as much as the incumbent
                interval.ceiling = min(
                    interval.ceiling, max(interval.floor, self.upper - chain_cost)
                )
        values = [self._value(interval) for interval in self.intervals]
        if all(math.isfinite(interval.ceiling) for interval in self.intervals):
            values.append(self.upper)  # plans above the ceilings
        self.bound = max(self.bound, min(values))

    def _contradicts_incumbent(self, interval: _Interval, chain_cost: float) -> bool:
        """Whether the bound of an interval that contains the incumbent exceeds its cost."""
        inside = interval.floor <= self.upper_dp_cost <= interval.top
        return inside and self.upper_dp_cost + chain_cost > self.upper * (1 + ROUNDING)

    def _value(self, interval: _Interval) -> float:
        return interval.floor + self._chain(interval)[0]

    def _chain(self, interval: _Interval) -> tuple[float, list[Key]]:
        return self.sets.cheapest_chain(
            {
                key: float(self.levels[level_range.low])
                for key, level_range in interval.levels.items()
            }
        )
