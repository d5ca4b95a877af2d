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
from planner.genetic.data import AssignmentData
from planner.genetic.matching_constraint import add_matching_constraint
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
    """Costs between classes, equal for all pairs of their devices.

    Attributes
    ----------
    members
        Devices of each class.
    dp_cost
        ``float[kind, C, C]`` terms of eq. 2; 0 on the diagonal for single devices.
    pp_cost
        ``float[kind, C, C]``, ``2 (latency + bytes / bandwidth)``; likewise.
    """

    members: tuple[tuple[int, ...], ...]
    dp_cost: Floats
    pp_cost: Floats

    @classmethod
    def of(cls, data: AssignmentData, classes: Sequence[Sequence[int]]) -> ClassCosts:
        """Costs between the classes of `interchangeable`."""
        first = [members[0] for members in classes]
        second = [members[-1] for members in classes]
        return cls(
            tuple(tuple(members) for members in classes),
            *(
                np.where(
                    np.eye(len(first), dtype=bool),
                    # within a class, the cost between two of its devices
                    matrices[:, first, second][:, None, :],
                    matrices[:, first][:, :, first],
                )
                for matrices in (data.dp_cost, data.pp_cost)
            ),
        )


class ClassModelResult(NamedTuple):
    """Result of the class model.

    Attributes
    ----------
    counts
        ``x[c, j]``, None if no solution was found.
    bound
        Lower bound in seconds.
    work
        CP-SAT's deterministic time.
    """

    counts: Ints | None
    bound: float
    work: float


def solve_classes(
    data: AssignmentData,
    costs: ClassCosts,
    *,
    upper: float,
    hint: Ints,
    max_s: float = math.inf,
    max_work: float = math.inf,
) -> ClassModelResult:
    """Minimise eq. 1 over class counts with CP-SAT.

    Parameters
    ----------
    hint
        ``x[c, j]`` of a plan of cost ``upper``.
    """
    model = _ClassModel(data, costs, upper)
    model.hint(hint)
    counted = math.isfinite(max_work)
    solver = solver_for(seed=1, workers=1 if counted else 2, max_s=max_s, max_work=max_work)
    # clause learning proves this model; its linear relaxation is weak and only slows the search
    solver.parameters.linearization_level = 0
    if not counted:
        solver.parameters.subsolvers.extend(["no_lp", "quick_restart_no_lp"])
    status = solve_interruptibly(solver, model.model)
    work = work_of(solver)
    if status == cp_model.INFEASIBLE:
        # the model contains a plan of cost `upper`, so this bound will raise an error
        return ClassModelResult(None, model.limit * model.unit, work)
    counts = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        counts = np.array([[solver.value(v) for v in row] for row in model.x], dtype=np.int64)
    return ClassModelResult(counts, solver.best_objective_bound * model.unit, work)


class _Boundary(NamedTuple):
    """Possible costs of a boundary, ascending, and a literal for each that is reached."""

    level_costs: list[int]
    level_used: list[Any]


class _ClassModel:
    """CP-SAT model of eq. 1 over class counts, in units so small that rounding is negligible.

    Attributes
    ----------
    unit
        Seconds of one unit.
    limit
        Upper bound on the objective in units.
    x
        Counts of every class in every stage.
    """

    def __init__(self, data: AssignmentData, costs: ClassCosts, upper: float) -> None:
        self.data, self.costs = data, costs
        sizes = data.sizes
        stages = len(sizes)
        # rounding loses less than one unit per term: largest group in eq. 2, S - 1 boundaries
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
        if data.free_order:
            self._break_symmetry(boundaries)
        self.model.minimize(sum(objective))
        self.model.add(sum(objective) <= self.limit)

    def hint(self, counts: Ints) -> None:
        """Add counts as a solution hint."""
        for row, hinted in zip(self.x, counts, strict=True):
            for variable, count in zip(row, hinted, strict=True):
                self.model.add_hint(variable, int(count))

    def _variable(self, upper: int, name: str) -> cp_model.IntVar:
        return self.model.new_int_var(0, int(upper), name)

    def _to_units(self, seconds: float) -> int:
        """Seconds in units, rounded down and capped above the limit."""
        return math.floor(min(seconds / self.unit, self.limit + 1))

    def _data_parallel(self) -> cp_model.IntVar:
        """Eq. 2: a device of class c in group j pays for all others in its group."""
        slowest = self._variable(self.limit, "data parallel")
        for j in range(len(self.data.sizes)):
            dp_cost = self.costs.dp_cost[self.data.dp_kind[j]]
            for c, row in enumerate(self.x):
                present = self.model.new_bool_var(f"in{c},{j}")
                self.model.add(row[j] >= 1).only_enforce_if(present)
                self.model.add(row[j] == 0).only_enforce_if(~present)
                terms = sum(
                    self._to_units(cost) * other[j]
                    for cost, other in zip(dp_cost[c], self.x, strict=True)
                )
                paid = terms - self._to_units(dp_cost[c, c])
                self.model.add(paid <= slowest).only_enforce_if(present)
        return slowest

    def _boundary(self, j: int, objective: list[cp_model.LinearExprT]) -> _Boundary:
        """Eq. 3: flows between consecutive groups, allowed only below the boundary's level."""
        model, members, sizes = self.model, self.costs.members, self.data.sizes
        pp_cost = self.costs.pp_cost[self.data.pp_kind[j]]
        classes = range(len(members))
        link_costs = {
            (c, e): self._to_units(pp_cost[c, e])
            for c in classes
            for e in classes
            if c != e or len(members[c]) > 1
        }
        level_costs = sorted(set(link_costs.values()))
        # the lowest level is always paid for
        level_used: list[Any] = [None] + [
            model.new_bool_var(f"level{j},{k}") for k in range(1, len(level_costs))
        ]
        for low, high in itertools.pairwise(level_used[1:]):
            model.add_implication(high, low)
        flow = {}
        for (c, e), cost in link_costs.items():
            max_flow = int(min(len(members[c]), len(members[e]), sizes[j], sizes[j + 1]))
            flow[c, e] = self._variable(max_flow, f"f{c},{e},{j}")
            if level_costs.index(cost):
                model.add(flow[c, e] <= max_flow * level_used[level_costs.index(cost)])
        for c in classes:
            out = sum(v for (a, _), v in flow.items() if a == c)
            into = sum(v for (_, b), v in flow.items() if b == c)
            add_matching_constraint(model, sizes, j, out, into, self.x[c][j], self.x[c][j + 1])
        objective.append(level_costs[0])
        objective += [
            (high - low) * literal
            for low, high, literal in zip(
                level_costs, level_costs[1:], level_used[1:], strict=False
            )
        ]
        return _Boundary(level_costs, level_used)

    def _break_symmetry(self, boundaries: Sequence[_Boundary]) -> None:
        """With free stage order: break the reversal symmetry and add forest bounds."""
        stages, pipelines = len(self.data.sizes), int(self.data.sizes[0])
        # a plan and its reverse are equivalent
        self.model.add(self.x[0][0] <= self.x[0][stages - 1])
        forest = Forest(self.data)
        if not boundaries:
            return
        highest = {self._to_units(float(v)): float(v) for v in forest.levels}
        for level, cost in enumerate(boundaries[0].level_costs[:-1], start=1):
            # eq. 4: the links up to a level suffice for so many boundaries
            max_boundaries = forest.max_pairs(highest[cost]) // pipelines
            above = sum(level_used[level] for _, level_used in boundaries)
            self.model.add(above >= stages - 1 - max_boundaries)


def groups_from_counts(costs: ClassCosts, counts: Ints) -> list[list[int]]:
    """Groups with ``counts[c, j]`` devices of class c in group j, taken in ascending order.

    Parameters
    ----------
    counts
        ``int[C, S]``.
    """
    groups: list[list[int]] = [[] for _ in range(counts.shape[1])]
    for members, row in zip(costs.members, counts, strict=True):
        num_taken = 0
        for j, count in enumerate(row):
            groups[j] += members[num_taken : num_taken + count]
            num_taken += count
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
