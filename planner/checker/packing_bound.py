"""Recomputes the packing bound on DT-FM's cost, by integer programs of HiGHS.

A witness divides the range of eq. 2 into intervals. Of each it claims levels: whichever k
boundaries are left out, the others cannot all have links below the k-th claimed level (counted from
0), if the cost of eq. 2 is at most the interval's upper end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ROUNDING = 1e-9
"""Relative tolerance for sums of the same costs in another order."""


def packing_s(
    witness: Mapping[str, Any], hop_s: Floats, exchange_s: Floats, stages: int, star_s: float
) -> float | None:
    """The bound that the witness proves; None if a claim is wrong or missing."""
    try:
        intervals = [(float(a), float(b), levels) for a, b, levels in witness["intervals"]]
    except (KeyError, TypeError, ValueError):
        return None
    claims = _Claims(hop_s, exchange_s, stages)
    reached, best = star_s * (1 + ROUNDING), math.inf
    for floor, top, levels in intervals:
        # no cost of eq. 2 lies between two intervals, or below the first one
        if not floor <= reached or not top >= floor:
            return None
        reached = top
        if levels is None:
            if claims.may_pack(math.inf, 0, top):
                return None
            continue
        if len(levels) > stages - 1:
            return None
        for k, level in enumerate(levels):
            if claims.may_pack(float(level), k, top):
                return None
        best = min(best, floor + sum(map(float, levels)))
    # above the last interval eq. 2 alone costs as much
    return min(best, reached) if intervals else None


class _Claims:
    """Decides claims about links and runs; see `planner.genetic.packing_bound`."""

    def __init__(self, hop_s: Floats, exchange_s: Floats, stages: int) -> None:
        self.hop_s, self.exchange_s, self.stages = hop_s, exchange_s, stages
        self.pipelines = len(hop_s) // stages

    def may_pack(self, level: float, k: int, cap_s: float) -> bool:
        """Whether all boundaries but k may have links below a level, with eq. 2 at most a cap."""
        components = list(self._components(level))
        if sum(len(c) - 1 for c in components) < self.pipelines * (self.stages - 1 - k):
            return False
        choices = []
        for component in components:
            of_devices = [set(self._numbers(d, component, cap_s)) for d in component]
            if not all(of_devices):
                return False
            choices.append((len(component), set.union(*of_devices), min(of_devices, key=len)))
        return any(self._may_fill(choices, parts) for parts in _parts(self.stages, k + 1))

    def _components(self, level: float) -> Iterator[list[int]]:
        """Devices that are connected by links below a level."""
        remaining = set(range(len(self.hop_s)))
        while remaining:
            found, edge = [], [remaining.pop()]
            while edge:
                d = edge.pop()
                found.append(d)
                near = {e for e in remaining if self.hop_s[d, e] < level * (1 - ROUNDING)}
                remaining -= near
                edge += near
            yield sorted(found)

    def _numbers(self, d: int, component: list[int], cap_s: float) -> Iterator[int]:
        """Numbers of devices of the component that may be in a device's stage, itself included."""
        inside = sorted(float(self.exchange_s[d, e]) for e in component if e != d)
        others = set(range(len(self.hop_s))) - set(component)
        outside = sorted(float(self.exchange_s[d, e]) for e in others)
        for number in range(1, min(len(component), self.pipelines) + 1):
            away = self.pipelines - number
            if away > len(outside):
                continue
            if sum(inside[: number - 1]) + sum(outside[:away]) <= cap_s * (1 + ROUNDING):
                yield number

    def _may_fill(
        self, choices: Sequence[tuple[int, set[int], set[int]]], parts: Sequence[int]
    ) -> bool:
        """Whether runs of these lengths, of each one a pipeline, can fill all components.

        A variable is 1 if a component has so many runs of a part.
        """
        # plans are read where SciPy is not installed
        from scipy.optimize import Bounds, LinearConstraint, milp

        columns = [
            (c, p, number)
            for c, (size, allowed, _) in enumerate(choices)
            for p, length in enumerate(parts)
            for number in (0, *sorted(allowed))
            if number * length <= size
        ]
        component, part, runs = (np.array(column) for column in zip(*columns, strict=True))
        rows, least, most = [], [], []

        def require(row: Floats, low: float, high: float) -> None:
            rows.append(row)
            least.append(low)
            most.append(high)

        for c, (size, _, needed) in enumerate(choices):
            here = component == c
            require(np.where(here, runs * np.array(parts)[part], 0), size, size)
            require(np.where(here & np.isin(runs, list(needed)), 1.0, 0.0), 1, math.inf)
            for p in range(len(parts)):
                require(np.where(here & (part == p), 1.0, 0.0), 1, 1)
        for p in range(len(parts)):
            require(np.where(part == p, runs, 0), self.pipelines, self.pipelines)
        solved = milp(
            np.zeros(len(columns)),
            constraints=LinearConstraint(np.array(rows, dtype=float), least, most),
            integrality=np.ones(len(columns)),
            bounds=Bounds(0, 1),
        )
        # 2: infeasible; anything else leaves it possible
        return bool(solved.status != 2)


def _parts(total: int, count: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Ways to write a number as a sum of so many parts, smallest first."""
    if count == 1:
        yield (total,)
        return
    for first in range(least, total // count + 1):
        for rest in _parts(total - first, count - 1, first):
            yield (first, *rest)
