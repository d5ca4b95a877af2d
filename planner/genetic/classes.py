"""Interchangeable devices, and the exact class model (CP-SAT).

Devices i and j are interchangeable if exchanging them changes no entry of latency or bandwidth.
Such devices form classes, and a plan is determined up to symmetry by integer counts: ``x[c, j]``
devices of class c in group j, flows between consecutive groups, one bottleneck level per boundary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from planner.genetic.bounds import Forest
from planner.genetic.cover import cover_smaller_side
from planner.genetic.tables import Tables
from planner.network.alike import alike_devices
from planner.problems import AssignmentProblem
from planner.search.arrays import Floats, Ints
from planner.search.cp_sat import solve_interruptibly, solver_for, work_of

PRECISION = 1e-7
"""Relative error that rounding costs down to integers may cause in the bound."""


def interchangeable(problem: AssignmentProblem) -> list[list[int]]:
    """The classes of interchangeable devices, each ascending, in order of their first device."""
    return alike_devices(problem.network.latency_s, problem.network.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class ClassCosts:
    """Costs between classes, the same for any pair of devices that they stand for.

    Attributes
    ----------
    members
        Devices of each class.
    exchange
        ``float[kind, C, C]`` summands of eq. 2; 0 on the diagonal for single devices.
    hop
        ``float[kind, C, C]``, ``2 (latency + bytes / bandwidth)``; likewise.
    """

    members: tuple[tuple[int, ...], ...]
    exchange: Floats
    hop: Floats

    @classmethod
    def of(cls, tables: Tables, classes: Sequence[Sequence[int]]) -> ClassCosts:
        """Costs between the classes of `interchangeable`."""
        first = [members[0] for members in classes]
        second = [members[-1] for members in classes]
        return cls(
            tuple(tuple(members) for members in classes),
            *(
                np.where(
                    np.eye(len(first), dtype=bool),
                    # within a class between two devices; the diagonal of a matrix is 0
                    matrices[:, first, second][:, None, :],
                    matrices[:, first][:, :, first],
                )
                for matrices in (tables.exchange, tables.hop)
            ),
        )


class ClassOutcome(NamedTuple):
    """What CP-SAT returned.

    Attributes
    ----------
    counts
        ``x[c, j]``, None if no solution was found.
    bound
        Lower bound in seconds as computed.
    work
        CP-SAT's deterministic time that it took.
    """

    counts: Ints | None
    bound: float
    work: float


def solve_classes(
    tables: Tables,
    costs: ClassCosts,
    *,
    upper: float,
    hint: Ints,
    max_s: float = math.inf,
    effort: float = math.inf,
) -> ClassOutcome:
    """Minimise eq. 1 over class counts with CP-SAT.

    Parameters
    ----------
    hint
        ``x[c, j]`` of that plan.
    """
    asked = _ClassModel(tables, costs, upper)
    asked.hint(hint)
    counted = math.isfinite(effort)
    solver = solver_for(seed=1, workers=1 if counted else 2, max_s=max_s, max_work=effort)
    # clause learning proves this model; its linear relaxation is weak and slows the search
    solver.parameters.linearization_level = 0
    if not counted:
        solver.parameters.subsolvers.extend(["no_lp", "quick_restart_no_lp"])
    status = solve_interruptibly(solver, asked.model)
    work = work_of(solver)
    if status == cp_model.INFEASIBLE:
        # says that all plans cost more than the known one, which the model contains: whoever
        # takes this bound sees the contradiction
        return ClassOutcome(None, asked.limit * asked.unit, work)
    counts = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        counts = np.array([[solver.value(v) for v in row] for row in asked.x], dtype=np.int64)
    return ClassOutcome(counts, solver.best_objective_bound * asked.unit, work)


class _Boundary(NamedTuple):
    """The levels that a boundary may have, ascending, and whether each is reached."""

    prices: list[int]
    reached: list[Any]


class _ClassModel:
    """Eq. 1 over class counts, in units so small that rounding down does not matter.

    Attributes
    ----------
    unit
        Seconds of one unit.
    limit
        Units that no plan of interest costs more than.
    x
        Counts of every class in every stage.
    """

    def __init__(self, tables: Tables, costs: ClassCosts, upper: float) -> None:
        self.tables, self.costs = tables, costs
        sizes = tables.sizes
        stages = len(sizes)
        # every rounded term loses less than one unit: largest group for eq. 2, S - 1 boundaries
        self.unit = max(upper, 1e-300) * PRECISION / (int(sizes.max()) + 2 * stages)
        self.limit = math.ceil(upper / self.unit * (1 + 1e-9)) + 1
        self.model = cp_model.CpModel()
        self.x = [
            [self._variable(min(len(m), sizes[j]), f"x{c},{j}") for j in range(stages)]
            for c, m in enumerate(costs.members)
        ]
        for row, members in zip(self.x, costs.members, strict=True):
            self.model.add(sum(row) == len(members))
        for j in range(stages):
            self.model.add(sum(row[j] for row in self.x) == int(sizes[j]))
        objective: list[cp_model.LinearExprT] = [self._data_parallel()]
        boundaries = [self._boundary(j, objective) for j in range(stages - 1)]
        if tables.free_order:
            self._symmetry(boundaries)
        self.model.minimize(sum(objective))
        self.model.add(sum(objective) <= self.limit)

    def hint(self, counts: Ints) -> None:
        """Counts to begin with."""
        for row, hinted in zip(self.x, counts, strict=True):
            for variable, count in zip(row, hinted, strict=True):
                self.model.add_hint(variable, int(count))

    def _variable(self, most: int, name: str) -> cp_model.IntVar:
        return self.model.new_int_var(0, int(most), name)

    def _whole(self, seconds: float) -> int:
        """Units, rounded down; more than the limit is all the same."""
        return math.floor(min(seconds / self.unit, self.limit + 1))

    def _data_parallel(self) -> cp_model.IntVar:
        """Eq. 2: a device of class c in group j pays for the others in its group."""
        slowest = self._variable(self.limit, "data parallel")
        for j in range(len(self.tables.sizes)):
            exchange = self.costs.exchange[self.tables.exchange_of[j]]
            for c, row in enumerate(self.x):
                present = self.model.new_bool_var(f"in{c},{j}")
                self.model.add(row[j] >= 1).only_enforce_if(present)
                self.model.add(row[j] == 0).only_enforce_if(~present)
                terms = sum(
                    self._whole(price) * other[j]
                    for price, other in zip(exchange[c], self.x, strict=True)
                )
                paid = terms - self._whole(exchange[c, c])
                self.model.add(paid <= slowest).only_enforce_if(present)
        return slowest

    def _boundary(self, j: int, objective: list[cp_model.LinearExprT]) -> _Boundary:
        """Eq. 3: flows between consecutive groups, allowed only below the boundary's level."""
        model, members, sizes = self.model, self.costs.members, self.tables.sizes
        hop = self.costs.hop[self.tables.hop_of[j]]
        classes = range(len(members))
        priced = {
            (c, e): self._whole(hop[c, e])
            for c in classes
            for e in classes
            if c != e or len(members[c]) > 1
        }
        prices = sorted(set(priced.values()))
        # the lowest level is always paid for
        reached: list[Any] = [None] + [
            model.new_bool_var(f"level{j},{k}") for k in range(1, len(prices))
        ]
        for low, high in itertools.pairwise(reached[1:]):
            model.add_implication(high, low)
        flow = {}
        for (c, e), price in priced.items():
            most = int(min(len(members[c]), len(members[e]), sizes[j], sizes[j + 1]))
            flow[c, e] = self._variable(most, f"f{c},{e},{j}")
            if prices.index(price):
                model.add(flow[c, e] <= most * reached[prices.index(price)])
        for c in classes:
            out = sum(v for (a, _), v in flow.items() if a == c)
            into = sum(v for (_, b), v in flow.items() if b == c)
            cover_smaller_side(model, sizes, j, out, into, self.x[c][j], self.x[c][j + 1])
        objective.append(prices[0])
        objective += [
            (high - low) * literal
            for low, high, literal in zip(prices, prices[1:], reached[1:], strict=False)
        ]
        return _Boundary(prices, reached)

    def _symmetry(self, boundaries: Sequence[_Boundary]) -> None:
        """Where the order is free: half of the plans, and what the links below a level allow."""
        stages, pipelines = len(self.tables.sizes), int(self.tables.sizes[0])
        # a plan read backwards is the same plan
        self.model.add(self.x[0][0] <= self.x[0][stages - 1])
        forest = Forest(self.tables)
        if not boundaries:
            return
        highest = {self._whole(float(v)): float(v) for v in forest.levels}
        for place, price in enumerate(boundaries[0].prices[:-1], start=1):
            # eq. 4: only so many boundaries find enough links at or below a level
            kept = forest.most_pairs(highest[price]) // pipelines
            above = sum(reached[place] for _, reached in boundaries)
            self.model.add(above >= stages - 1 - kept)


def expand(costs: ClassCosts, counts: Ints) -> list[list[int]]:
    """Groups with ``counts[c, j]`` devices of class c in group j, taken in ascending order.

    Parameters
    ----------
    counts
        ``int[C, S]``.
    """
    groups: list[list[int]] = [[] for _ in range(counts.shape[1])]
    for members, row in zip(costs.members, counts, strict=True):
        taken = 0
        for j, count in enumerate(row):
            groups[j] += members[taken : taken + count]
            taken += count
    return groups


def counts_of(costs: ClassCosts, groups: Sequence[Sequence[int]]) -> Ints:
    """``x[c, j]`` of given groups.

    Returns
    -------
    ndarray
        ``int[C, S]``.
    """
    stage_of = {d: j for j, group in enumerate(groups) for d in group}
    counts = np.zeros((len(costs.members), len(groups)), dtype=np.int64)
    for c, members in enumerate(costs.members):
        for d in members:
            counts[c, stage_of[d]] += 1
    return counts
