"""Threshold bound for any network: what the links below a level make possible.

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
from dataclasses import dataclass, field

import numpy as np

from planner.genetic.bounds import SAFETY, Forest, star_bound
from planner.genetic.tables import Tables

Mask = int
Key = tuple[int, ...]

MAX_STAGES = 14
"""Sets of boundaries are enumerated: 2 ** (S - 1) of them."""

MAX_CELLS = 1100
"""Devices x stages up to which a decision is worth building."""

FIRST_EFFORT = 0.2
"""Deterministic time of CP-SAT (about seconds) for a first decision."""

MOST_PATIENCE = 64
"""Times by which the effort may grow."""

FIRST_STRIDE = 8e-3
"""First step above a proven level, as a share of the known plan's cost."""

GRAIN = 1e-3
"""Steps and intervals smaller than this share of the known plan's cost are not worth a decision."""

SPLIT = 6.0
"""An interval is halved when it is so many times wider than the next step."""


@dataclass
class _Level:
    """What is known about the smallest level of a kept set, as indices into the levels."""

    low: int
    high: int
    stride: float = FIRST_STRIDE
    effort: float = FIRST_EFFORT


@dataclass
class _Interval:
    """Plans whose data-parallel cost lies between two values."""

    floor: float
    ceiling: float
    known: dict[Key, _Level] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """Can the boundaries of ``mask`` be kept at ``level``, in an interval?"""

    interval: _Interval
    key: Key
    index: int
    mask: Mask
    level: float
    effort: float

    def answer(self, tables: Tables, limit_s: float) -> bool | None:
        """Ask CP-SAT."""
        return can_keep(tables, self.mask, self.level, self.interval.ceiling, self.effort, limit_s)


class ChainBound:
    """Bound that grows with the time spent on it.

    Attributes
    ----------
    bound
        Proven so far.
    """

    def __init__(self, tables: Tables, upper: float) -> None:
        self.tables = tables
        self.boundaries = len(tables.sizes) - 1
        self.forest = Forest(tables)
        self.levels = self.forest.levels
        self.free_order = tables.free_order
        full = (1 << self.boundaries) - 1
        self.keys = [self._key(mask) for mask in range(full + 1)]
        self.mask_of: dict[Key, Mask] = {}
        for mask, key in enumerate(self.keys):
            self.mask_of.setdefault(key, mask)
        base = {
            key: _Level(self.forest.level(self._pairs(key)), len(self.levels) - 1)
            for key in sorted(set(self.keys))
        }
        floor = star_bound(tables)
        self.upper = upper
        self.patience = 1
        self.intervals = [_Interval(floor, math.inf, base)]
        self.bound = 0.0
        self._refresh()

    @staticmethod
    def applies(tables: Tables) -> bool:
        """Whether the instance is small enough for the decisions."""
        stages = len(tables.sizes)
        return 1 < stages <= MAX_STAGES and len(tables.stage) * stages <= MAX_CELLS

    def tighten(self, upper: float) -> None:
        """Use a better known plan."""
        self.upper = min(self.upper, upper)
        self._refresh()

    def questions(self, count: int) -> list[Question]:
        """The decisions most worth making next, at most ``count``; none if nothing is left."""
        grain = GRAIN * self.upper
        while True:
            interval = min(self.intervals, key=self._value)
            strides = sorted(
                ((self._stride(interval.known[key]), key) for key in self._chain(interval)[1]),
                reverse=True,
            )
            worthwhile = [(stride, key) for stride, key in strides if stride > grain]
            if math.isinf(interval.ceiling):
                if worthwhile:
                    break
                interval.ceiling = math.nextafter(self.upper, math.inf)
                self._forget(interval)
                self._refresh()
                continue
            width = interval.ceiling - interval.floor
            if width > grain and width > SPLIT * (strides[0][0] if strides else 0.0):
                self._split(interval)
                continue
            if not worthwhile and self.patience < MOST_PATIENCE:
                self._try_harder()
                continue
            break
        return [self._question(interval, key) for _, key in worthwhile[:count]]

    def _try_harder(self) -> None:
        """All quick proofs are made: go over the undecided levels again with more effort."""
        self.patience *= 4
        for interval in self.intervals:
            for known in interval.known.values():
                known.stride = max(known.stride, FIRST_STRIDE / 2)
                known.effort = FIRST_EFFORT * self.patience

    def _question(self, interval: _Interval, key: Key) -> Question:
        """Proofs are quick well below the true level and slow near it: stride up from below."""
        known = interval.known[key]
        level = self.levels[known.low] + self._stride(known)
        index = int(np.searchsorted(self.levels, level, side="right")) - 1
        index = min(max(index, known.low), known.high - 1)
        return Question(
            interval, key, index, self._mask(key), float(self.levels[index]), known.effort
        )

    def learn(self, question: Question, answer: bool | None) -> None:
        """Take in the answer of `can_keep`."""
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

    def _stride(self, known: _Level) -> float:
        """How far above the proven level the next decision will be, 0 if that is known."""
        room = self.levels[known.high] - self.levels[known.low]
        return float(min(known.stride * self.upper, room))

    def _raise(self, interval: _Interval, key: Key, low: int) -> None:
        """A set that contains ``key`` cannot be kept at a lower level than ``key``."""
        for other, known in interval.known.items():
            if other == key or self._contains(other, key):
                known.low = max(known.low, low)
                known.high = max(known.high, known.low)

    def _split(self, interval: _Interval) -> None:
        middle = (interval.floor + interval.ceiling) / 2
        lower = _Interval(interval.floor, middle, self._copy(interval.known))
        self._forget(lower)
        interval.floor = middle
        self.intervals.append(lower)

    def _forget(self, interval: _Interval) -> None:
        """A smaller ceiling may make more impossible: only the proofs of impossibility stay."""
        for known in interval.known.values():
            known.high = len(self.levels) - 1
            known.stride, known.effort = FIRST_STRIDE, FIRST_EFFORT

    def _refresh(self) -> None:
        # no better plan lies in an interval whose bound reaches the known plan
        for interval in self.intervals:
            if math.isinf(interval.ceiling):
                continue
            rest = self._chain(interval)[0]
            interval.ceiling = min(interval.ceiling, max(interval.floor, self.upper - rest))
        weakest = min(self._value(i) for i in self.intervals)
        self.bound = max(self.bound, min(weakest, self.upper) * (1 - SAFETY))

    def _value(self, interval: _Interval) -> float:
        return interval.floor + self._chain(interval)[0]

    def _chain(self, interval: _Interval) -> tuple[float, list[Key]]:
        """Cheapest chain from all boundaries down to none, by dynamic programming over sets."""
        cost = {key: float(self.levels[known.low]) for key, known in interval.known.items()}
        best: dict[Key, tuple[float, Key | None]] = {self.keys[0]: (0.0, None)}
        for mask in range(1, len(self.keys)):
            key = self.keys[mask]
            if key in best:
                continue
            below = min(
                (best[self.keys[mask & ~(1 << j)]][0], self.keys[mask & ~(1 << j)])
                for j in range(self.boundaries)
                if mask >> j & 1
            )
            best[key] = (cost[key] + below[0], below[1])
        chain: list[Key] = []
        at: Key | None = self.keys[-1]
        while at is not None and best[at][1] is not None:
            chain.append(at)
            at = best[at][1]
        return best[self.keys[-1]][0], chain

    def _key(self, mask: Mask) -> Key:
        """The set itself, or the sizes of its runs of stages if the order of stages is free."""
        if not self.free_order:
            return (mask,)
        runs, length = [], 1
        for j in range(self.boundaries):
            if mask >> j & 1:
                length += 1
            else:
                runs.append(length)
                length = 1
        return tuple(sorted([*runs, length], reverse=True))

    def _mask(self, key: Key) -> Mask:
        return self.mask_of[key]

    def _contains(self, outer: Key, inner: Key) -> bool:
        """Whether keeping ``outer`` keeps ``inner`` too."""
        if not self.free_order:
            return outer[0] & inner[0] == inner[0]
        return outer != inner and _refines(inner, outer)

    def _pairs(self, key: Key) -> int:
        """Links that a kept set needs."""
        sizes, mask = self.tables.sizes, self._mask(key)
        return int(
            sum(min(sizes[j], sizes[j + 1]) for j in range(self.boundaries) if mask >> j & 1)
        )

    @staticmethod
    def _copy(known: dict[Key, _Level]) -> dict[Key, _Level]:
        return {key: _Level(k.low, k.high, k.stride, k.effort) for key, k in known.items()}


def _refines(fine: Key, coarse: Key) -> bool:
    """Whether runs of sizes ``fine`` can be joined to runs of sizes ``coarse``."""
    if not coarse:
        return not fine
    need = coarse[0]

    def pick(start: int, left: int, rest: Key) -> bool:
        if left == 0:
            return _refines(rest, coarse[1:])
        for i in range(start, len(rest)):
            repeated = i > start and rest[i] == rest[i - 1]
            if (
                not repeated
                and rest[i] <= left
                and pick(i, left - rest[i], rest[:i] + rest[i + 1 :])
            ):
                return True
        return False

    return pick(0, need, fine)


def can_keep(
    tables: Tables, mask: Mask, level: float, ceiling: float, effort: float, limit_s: float
) -> bool | None:
    """Whether a plan keeps the boundaries of ``mask`` at <= ``level`` and eq. 2 at <= ``ceiling``.

    None if it could not be decided with the deterministic time ``effort`` or in ``limit_s``.
    Costs are rounded so that every real plan is a plan of the model.
    """
    from ortools.sat.python import cp_model

    from planner.search.cp_sat import solve_interruptibly

    sizes = tables.sizes
    n, stages = len(tables.stage), len(sizes)
    total, weighted = cp_model.LinearExpr.sum, cp_model.LinearExpr.weighted_sum
    model = cp_model.CpModel()
    x = [[model.new_bool_var("") for _ in range(stages)] for _ in range(n)]
    for row in x:
        model.add_exactly_one(row)
    for j in range(stages):
        model.add(total([x[d][j] for d in range(n)]) == int(sizes[j]))
    if math.isfinite(ceiling):
        # every summand is rounded down by less than one unit
        unit = max(ceiling, 1e-300) / (1e5 * int(sizes.max()))
        budget = math.ceil(ceiling / unit * (1 + SAFETY)) + 1
        for j in range(stages):
            exchange = np.floor(tables.exchange[tables.exchange_of[j]] / unit)
            whole = np.minimum(exchange, budget + 1).astype(np.int64)
            column = [x[d][j] for d in range(n)]
            for d in range(n):
                # the diagonal is zero: a device does not pay for itself
                terms = weighted(column, whole[d].tolist())
                model.add(terms <= budget).only_enforce_if(x[d][j])
    for j in range(stages - 1):
        if not mask >> j & 1:
            continue
        linked = tables.hop[tables.hop_of[j]] <= level * (1 + SAFETY)
        np.fill_diagonal(linked, False)
        used = {(int(d), int(e)): model.new_bool_var("") for d, e in np.argwhere(linked)}
        out: list[list[cp_model.IntVar]] = [[] for _ in range(n)]
        into: list[list[cp_model.IntVar]] = [[] for _ in range(n)]
        for (d, e), variable in used.items():
            out[d].append(variable)
            into[e].append(variable)
        for d in range(n):
            # every device of the smaller side is matched
            leaves, enters = total(out[d]), total(into[d])
            if sizes[j] <= sizes[j + 1]:
                model.add(leaves == x[d][j])
            else:
                model.add(leaves <= x[d][j])
            if sizes[j + 1] <= sizes[j]:
                model.add(enters == x[d][j + 1])
            else:
                model.add(enters <= x[d][j + 1])
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 1
    solver.parameters.max_deterministic_time = effort
    if math.isfinite(limit_s):
        solver.parameters.max_time_in_seconds = max(limit_s, 0.01)
    status = solve_interruptibly(solver, model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return True
    return False if status == cp_model.INFEASIBLE else None
