"""Threshold bound for any network: what links below a level allow.

Order the boundaries of a plan by their level (eq. 3), largest first. Taking them away one after the
other leaves fewer and fewer boundaries *kept*, and when the set Q is kept, all its levels are at
most the next one. So if no plan keeps Q at level <= t, the next level after reaching Q is above t,
and the sum of eq. 4 is at least the cheapest chain of sets from all boundaries down to none, where
a set costs the smallest level at which it can be kept. CP-SAT decides on single devices whether a
set can be kept, together with eq. 2 at most ``ceiling``. Such decisions are quick, unlike
the minimisation.

The data-parallel cost of the optimum is unknown, so its range is cut into intervals: within one,
the bound is its lower end plus the chain found with its upper end as ceiling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.genetic.arrangement import cost_of, exchange_cost
from planner.genetic.bounds import Forest, star_bound
from planner.genetic.chain_decision import can_keep
from planner.genetic.kept_sets import KeptSets, Key, Mask
from planner.genetic.tables import Tables
from planner.search.arrays import Ints

AGREE = 1e-9
"""Sums of the same costs in another order differ by a smaller share."""


@dataclass(frozen=True)
class ChainParams:
    """Settings of the chain bound.

    Attributes
    ----------
    most_stages
        Sets of boundaries are enumerated: 2 ** (S - 1) of them.
    most_cells
        Devices x stages up to which a decision is worth building.
    effort
        CP-SAT's deterministic time (about seconds) for a first decision.
    most_patience
        Times by which the effort may grow once all quick decisions are made.
    stride
        First step above a proven level, as a share of the known plan's cost.
    grain
        Steps and intervals smaller than this share of the known plan's cost are not worth a
        decision.
    split
        An interval is halved when it is so many times wider than the next step.
    """

    most_stages: int = 14
    most_cells: int = 1100
    effort: float = 0.2
    most_patience: int = 64
    stride: float = 8e-3
    grain: float = 1e-3
    split: float = 6.0


@dataclass
class _Level:
    """What is known about the smallest level of a kept set, as indices into the levels.

    Attributes
    ----------
    low, high
        Proven: not below ``low``. Known: ``high`` will do.
    stride, effort
        Of the next decision; see `ChainParams`.
    """

    low: int
    high: int
    stride: float
    effort: float


@dataclass
class _Interval:
    """Plans whose data-parallel cost lies between ``floor`` and ``top``.

    Plans above ``ceiling`` cost at least as much as a known one, whatever is known of the others.
    """

    floor: float
    top: float
    ceiling: float
    known: dict[Key, _Level]


@dataclass(frozen=True)
class ChainQuery:
    """Can the boundaries of ``mask`` be kept at ``level``, in an interval?

    Attributes
    ----------
    interval
        The range of the data-parallel cost it is asked for.
    key, index
        The kept set, and the index of its level.
    mask
        The boundaries as bits.
    level
        Seconds of a hop.
    effort
        CP-SAT's deterministic time for it.
    """

    interval: _Interval
    key: Key
    index: int
    mask: Mask
    level: float
    effort: float

    def answer(self, tables: Tables, limit_s: float = math.inf) -> bool | None:
        """Ask CP-SAT; None: not decided."""
        return can_keep(tables, self.mask, self.level, self.interval.ceiling, self.effort, limit_s)


class ChainBound:
    """Bound that grows with the decisions made.

    Parameters
    ----------
    known
        Slots of a known plan.

    Attributes
    ----------
    bound
        In seconds, as computed so far: no plan is better than the smaller of this and the known
        plan. It exceeds the known plan's cost only if a decision was wrong.
    """

    def __init__(self, tables: Tables, known: Ints, params: ChainParams | None = None) -> None:
        self.tables = tables
        self.params = params or ChainParams()
        self.sets = KeptSets(tables)
        forest = Forest(tables)
        self.levels = forest.levels
        base = {
            key: self._fresh(forest.level(self.sets.pairs(key)))
            for key in sorted(set(self.sets.keys))
        }
        self.patience = 1
        self.intervals = [_Interval(star_bound(tables), math.inf, math.inf, base)]
        self.bound = 0.0
        self.upper = math.inf
        self.tighten(known)

    @staticmethod
    def applies(tables: Tables) -> bool:
        """Whether the instance is small enough for the decisions."""
        limits = ChainParams()
        stages = len(tables.sizes)
        cells = len(tables.stage) * stages
        return 1 < stages <= limits.most_stages and cells <= limits.most_cells

    def tighten(self, known: Ints) -> None:
        """Use a better known plan."""
        cost = cost_of(self.tables, known)
        if cost < self.upper:
            self.upper, self.upper_exchange = cost, float(exchange_cost(self.tables, known))
        self._refresh()

    def questions(self, count: int) -> list[ChainQuery]:
        """The decisions most worth making next, at most ``count``; none if nothing is left."""
        grain = self.params.grain * self.upper
        while True:
            interval = min(self.intervals, key=self._value)
            strides = sorted(
                ((self._stride(interval.known[key]), key) for key in self._chain(interval)[1]),
                reverse=True,
            )
            worthwhile = [key for stride, key in strides if stride > grain]
            if math.isinf(interval.ceiling):
                if worthwhile:
                    break
                interval.ceiling = math.nextafter(self.upper, math.inf)
                self._forget(interval)
                self._refresh()
                continue
            width = interval.ceiling - interval.floor
            if width > grain and width > self.params.split * (strides[0][0] if strides else 0.0):
                self._split(interval)
            elif not worthwhile and self.patience < self.params.most_patience:
                self._try_harder()
            else:
                break
        return [self._question(interval, key) for key in worthwhile[:count]]

    def learn(self, question: ChainQuery, answer: bool | None) -> None:
        """Take in the answer to a question."""
        known = question.interval.known[question.key]
        if answer is False:
            known.stride *= 2
            self._raise(question.interval, question.key, question.index + 1)
        else:
            known.stride /= 4
            if answer:
                known.high = max(known.low, min(known.high, question.index))
            else:
                known.effort *= 2
        self._refresh()

    def _question(self, interval: _Interval, key: Key) -> ChainQuery:
        """Proofs are quick well below the true level and slow near it: stride up from below."""
        known = interval.known[key]
        level = self.levels[known.low] + self._stride(known)
        index = int(np.searchsorted(self.levels, level, side="right")) - 1
        index = min(max(index, known.low), known.high - 1)
        mask, level = self.sets.mask_of[key], float(self.levels[index])
        return ChainQuery(interval, key, index, mask, level, known.effort)

    def _stride(self, known: _Level) -> float:
        """How far above the proven level the next decision will be, 0 if that is known."""
        room = self.levels[known.high] - self.levels[known.low]
        return float(min(known.stride * self.upper, room))

    def _raise(self, interval: _Interval, key: Key, low: int) -> None:
        """A set that contains ``key`` cannot be kept at a lower level than ``key``."""
        for other, known in interval.known.items():
            if other == key or self.sets.contains(other, key):
                known.low = max(known.low, low)
                known.high = max(known.high, known.low)

    def _try_harder(self) -> None:
        """All quick proofs are made: go over the undecided levels again with more effort."""
        self.patience *= 4
        for interval in self.intervals:
            for known in interval.known.values():
                known.stride = max(known.stride, self.params.stride / 2)
                known.effort = self.params.effort * self.patience

    def _split(self, interval: _Interval) -> None:
        middle = (interval.floor + interval.ceiling) / 2
        copy = {key: self._fresh(known.low) for key, known in interval.known.items()}
        self.intervals.append(_Interval(interval.floor, middle, middle, copy))
        interval.floor = middle

    def _forget(self, interval: _Interval) -> None:
        """A smaller ceiling may make more impossible: only the proofs of impossibility stay."""
        interval.known = {key: self._fresh(known.low) for key, known in interval.known.items()}

    def _fresh(self, low: int) -> _Level:
        return _Level(low, len(self.levels) - 1, self.params.stride, self.params.effort)

    def _refresh(self) -> None:
        """Ceilings and bound follow from the levels and the known plan."""
        for interval in self.intervals:
            rest = self._chain(interval)[0]
            if self._excludes_known(interval, rest):
                self.bound = self.upper_exchange + rest
                return
            if math.isfinite(interval.ceiling):
                # above, a plan costs at least as much as the known one
                interval.ceiling = min(interval.ceiling, max(interval.floor, self.upper - rest))
        values = [self._value(interval) for interval in self.intervals]
        if all(math.isfinite(interval.ceiling) for interval in self.intervals):
            values.append(self.upper)  # what lies above the ceilings
        self.bound = max(self.bound, min(values))

    def _excludes_known(self, interval: _Interval, rest: float) -> bool:
        """Whether an interval with the known plan says that it costs more than it does."""
        inside = interval.floor <= self.upper_exchange <= interval.top
        return inside and self.upper_exchange + rest > self.upper * (1 + AGREE)

    def _value(self, interval: _Interval) -> float:
        return interval.floor + self._chain(interval)[0]

    def _chain(self, interval: _Interval) -> tuple[float, list[Key]]:
        return self.sets.cheapest_chain(
            {key: float(self.levels[known.low]) for key, known in interval.known.items()}
        )
