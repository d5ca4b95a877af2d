"""Packing bound: a lower bound on eq. 1 for equal stages, of any number.

Take a level t of eq. 3, and the links of at most t. If all boundaries but k have links of at most
t, these k cut the order of the stages into k + 1 parts. Every pipeline runs through the stages of a
part by such links, so that its devices there lie in one connected component. So all components must
be filled exactly by runs: of each part one per pipeline, as long as the part. If no split of the
stages into k + 1 parts allows that, the (k + 1)-th largest level is above t.

A component with v runs of a part has v devices in each of its stages. A device there has v - 1
partners in the component and the others outside, which costs at least the cheapest of these in
eq. 2. With eq. 2 at most D, this excludes numbers of runs. The cost of eq. 2 is unknown, so that
its range is divided into intervals: in each one the bound is its lower end plus the levels that
follow from its upper end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from planner.genetic.bounds import star_bound
from planner.genetic.data import AssignmentData
from planner.search.arrays import Bools, Floats
from planner.search.cp_sat import solver_for

PACKING = "packing"
"""Kind of the witness: intervals of eq. 2, each with the levels that exceed it."""
FIRST_INTERVALS = 6
MIN_WIDTH = 2e-3
"""Least width of an interval, relative to the upper bound."""
WORK_OF_A_MODEL = 0.25
"""Limit on CP-SAT's deterministic time of a packing; undecided ones count as possible."""
MAX_MODELS = 2_000
"""Limit on packings that CP-SAT decides; all others count as possible."""


@dataclass(frozen=True)
class _Component:
    """Devices that are connected by links of at most a level.

    Attributes
    ----------
    partner_s
        ``float[c, v]``: least cost of eq. 2 of each device, with v devices of the component in its
        stage; infinite if impossible.
    """

    size: int
    partner_s: Floats


class _Choices(NamedTuple):
    """Numbers of runs of a part that a component may have, with eq. 2 at most a cap.

    Attributes
    ----------
    numbers
        Those that some device allows.
    needed
        Those that the device with the fewest allows; all others allow as many at least.
    """

    size: int
    numbers: tuple[int, ...]
    needed: tuple[int, ...]


@dataclass(frozen=True)
class Interval:
    """Assignments whose eq. 2 lies between two costs.

    Attributes
    ----------
    levels
        Largest first: lower bounds on the levels of the boundaries; None if there are no such
        assignments.
    """

    floor: float
    top: float
    levels: tuple[float, ...] | None

    @property
    def bound(self) -> float:
        """Least cost of eq. 1 of these assignments."""
        return np.inf if self.levels is None else self.floor + sum(self.levels)


class PackingBound:
    """The bound, refined interval by interval.

    Parameters
    ----------
    upper
        Cost of a known assignment; eq. 2 of a better one is below.
    max_models
        Limit on packings that are decided.
    is_over
        Whether to decide no more.
    """

    def __init__(
        self,
        data: AssignmentData,
        upper: float,
        max_models: int = MAX_MODELS,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.stages, self.pipelines = len(data.sizes), int(data.sizes[0])
        self.hop_s, self.exchange_s = data.pp_cost[0], data.dp_cost[0]
        self.levels = np.unique(self.hop_s[np.triu_indices(len(self.hop_s), 1)])
        self._components: dict[int, list[_Component]] = {}
        self._models_left, self._is_over = max_models, is_over
        self._upper = upper
        ends = np.linspace(min(star_bound(data), upper), upper, FIRST_INTERVALS + 1).tolist()
        self.intervals = [Interval(a, b, self._levels_above(b)) for a, b in pairwise(ends)]

    @staticmethod
    def applies(data: AssignmentData) -> bool:
        """Whether stages are equal, of several devices, and any order of them costs as much."""
        return data.free_order and len(data.sizes) > 1 and int(data.sizes[0]) > 1

    @property
    def bound(self) -> float:
        """Lower bound on eq. 1 in seconds."""
        return min(self._upper, *(interval.bound for interval in self.intervals))

    def bound_at(self, data_parallel_s: float) -> float:
        """Lower bound on the cost of assignments with this eq. 2."""
        return max(
            (x.bound for x in self.intervals if x.floor <= data_parallel_s <= x.top),
            default=-np.inf,
        )

    @property
    def witness(self) -> dict[str, object]:
        """What the checker needs to recompute the bound."""
        return {
            "kind": PACKING,
            "intervals": [
                [each.floor, each.top, None if each.levels is None else list(each.levels)]
                for each in self.intervals
            ],
        }

    def refine(self) -> bool:
        """Halve the interval with the lowest bound; False if that cannot raise the bound."""
        weakest = min(self.intervals, key=lambda each: each.bound)
        is_narrow = weakest.top - weakest.floor < MIN_WIDTH * self._upper
        if is_narrow or weakest.bound >= self._upper or self._is_limited():
            return False
        middle = (weakest.floor + weakest.top) / 2
        k = self.intervals.index(weakest)
        self.intervals[k : k + 1] = [
            Interval(weakest.floor, middle, self._levels_above(middle)),
            Interval(middle, weakest.top, weakest.levels),
        ]
        return True

    def _is_limited(self) -> bool:
        return self._models_left <= 0 or self._is_over()

    def _levels_above(self, cap_s: float) -> tuple[float, ...] | None:
        """Least levels of the boundaries, largest first, with eq. 2 at most ``cap_s``."""
        highest = len(self.levels) - 1
        if not self._fits(highest, 0, cap_s):
            return None
        found = []
        for k in range(self.stages - 1):
            low, high = 0, highest
            while low < high:
                middle = (low + high) // 2
                if self._fits(middle, k, cap_s):
                    high = middle
                else:
                    low = middle + 1
            found.append(float(self.levels[low]))
            highest = low
        return tuple(found)

    def _fits(self, level: int, k: int, cap_s: float) -> bool:
        """Whether all boundaries but k may be at most a level, as far as this bound knows."""
        components = self._components_at(level)
        links = sum(component.size - 1 for component in components)
        if links < self.pipelines * (self.stages - 1 - k):
            return False
        allowed: list[Bools] = [component.partner_s <= cap_s for component in components]
        # every device needs some number of runs
        if any(not flags[:, 1:].any(axis=1).all() for flags in allowed):
            return False
        choices = []
        for component, flags in zip(components, allowed, strict=True):
            strictest = flags[int(flags.sum(axis=1).argmin())]
            numbers, needed = (
                tuple(np.flatnonzero(which).tolist()) for which in (flags.any(axis=0), strictest)
            )
            choices.append(_Choices(component.size, numbers, needed))
        for parts in partitions(self.stages, k + 1):
            if self._is_limited() or self._packs(choices, parts):
                return True
        return False

    def _packs(self, choices: Sequence[_Choices], parts: tuple[int, ...]) -> bool:
        """Whether runs of these lengths may fill all components."""
        kinds = {(size, numbers) for size, numbers, _ in choices}
        if not all(_may_fill_alone(*kind, parts) for kind in kinds):
            return False
        self._models_left -= 1
        model = cp_model.CpModel()
        runs_of_part: list[list[cp_model.IntVar]] = [[] for _ in parts]
        for size, numbers, needed in choices:
            runs = []
            for length, of_part in zip(parts, runs_of_part, strict=True):
                domain = [0, *(v for v in numbers if v * length <= size)]
                number = model.new_int_var_from_domain(cp_model.Domain.from_values(domain), "")
                runs.append(number)
                of_part.append(number)
            model.add(sum(a * v for a, v in zip(parts, runs, strict=True)) == size)
            if len(needed) < len(numbers):
                holds = [model.new_bool_var("") for _ in runs]
                for number, flag in zip(runs, holds, strict=True):
                    domain = cp_model.Domain.from_values(needed)
                    model.add_linear_expression_in_domain(number, domain).only_enforce_if(flag)
                model.add_bool_or(holds)
        for of_part in runs_of_part:
            model.add(sum(of_part) == self.pipelines)
        return solver_for(max_work=WORK_OF_A_MODEL).solve(model) != cp_model.INFEASIBLE

    def _components_at(self, level: int) -> list[_Component]:
        found = self._components.get(level)
        if found is None:
            linked = self.hop_s <= self.levels[level]
            np.fill_diagonal(linked, False)
            count, label = connected_components(csr_array(linked), directed=False)
            found = self._components[level] = [
                self._component(np.flatnonzero(label == c), np.flatnonzero(label != c))
                for c in range(count)
            ]
        return found

    def _component(self, inside: np.ndarray, outside: np.ndarray) -> _Component:
        size, most = len(inside), min(len(inside), self.pipelines)
        away = np.where(np.eye(size, dtype=bool), np.inf, self.exchange_s[np.ix_(inside, inside)])
        near = _least_sums(np.sort(away, axis=1)[:, : size - 1])
        far = _least_sums(np.sort(self.exchange_s[np.ix_(inside, outside)], axis=1))
        partner_s = np.full((size, most + 1), np.inf)
        for v in range(1, most + 1):
            others = self.pipelines - v
            if others < far.shape[1]:
                partner_s[:, v] = near[:, v - 1] + far[:, others]
        return _Component(size, partner_s)


@cache
def _may_fill_alone(size: int, numbers: tuple[int, ...], parts: tuple[int, ...]) -> bool:
    """Whether numbers of runs of some of the parts fill a component, whatever the others hold."""
    # bit s: runs of the parts so far may fill s devices
    sums, whole = 1, (1 << (size + 1)) - 1
    for length in parts:
        with_runs = sums
        for number in numbers:
            with_runs |= sums << (number * length)
        sums = with_runs & whole
    return bool(sums >> size & 1)


def _least_sums(ascending: Floats) -> Floats:
    """Sums of the 0, 1, 2, ... first values of each row."""
    return np.concatenate([np.zeros((len(ascending), 1)), ascending.cumsum(axis=1)], axis=1)


def partitions(total: int, parts: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    """Ways to write a number as a sum of so many parts, largest first."""
    largest = total if largest is None else largest
    if parts == 1:
        if total <= largest:
            yield (total,)
        return
    for first in range(min(largest, total - parts + 1), 0, -1):
        for rest in partitions(total - first, parts - 1, first):
            yield (first, *rest)
