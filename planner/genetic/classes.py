"""Interchangeable devices, and the exact class model (CP-SAT).

Devices i and j are interchangeable if exchanging them changes no entry of latency or bandwidth.
Such devices form classes, and a plan is determined up to symmetry by integer counts: ``x[c, j]``
devices of class c in group j, flows between consecutive groups, one bottleneck level per boundary.

The same model over *clusters* of different devices, with elementwise smallest costs between
clusters, is a relaxation: its optimum is a lower bound for networks without classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.genetic.bounds import SAFETY, Forest
from planner.genetic.tables import Floats, Ints, Tables
from planner.problems import AssignmentProblem

PRECISION = 1e-7
"""Relative error that rounding costs down to integers may cause in the bound."""


def interchangeable(problem: AssignmentProblem) -> list[list[int]]:
    """The classes of interchangeable devices, each ascending, in order of their first device."""
    latency, bandwidth = problem.network.latency_s, problem.network.bandwidth_bytes_per_s
    n = len(latency)
    # equivalent devices see the same multiset of links: compare in full only where that agrees
    fingerprint = np.concatenate([np.sort(latency, axis=1), np.sort(bandwidth, axis=1)], axis=1)
    buckets: dict[bytes, list[list[int]]] = {}
    for i in range(n):
        classes = buckets.setdefault(fingerprint[i].tobytes(), [])
        for members in classes:
            j = members[0]
            others = np.ones(n, dtype=bool)
            others[[i, j]] = False
            if np.array_equal(latency[i, others], latency[j, others]) and np.array_equal(
                bandwidth[i, others], bandwidth[j, others]
            ):
                members.append(i)
                break
        else:
            classes.append([i])
    return sorted(members for classes in buckets.values() for members in classes)


@dataclass(frozen=True)
class ClassCosts:
    """Costs between clusters: never above the cost of any pair they stand for.

    Attributes
    ----------
    members
        Devices of each cluster.
    exchange
        ``[kind, C, C]`` smallest summand of eq. 2 between two clusters; on the diagonal 0 for
        single devices.
    hop
        ``[kind, C, C]`` smallest ``2 (latency + bytes / bandwidth)``.
    """

    members: tuple[tuple[int, ...], ...]
    exchange: Floats
    hop: Floats

    @classmethod
    def of(cls, tables: Tables, clusters: Sequence[Sequence[int]]) -> ClassCosts:
        """Elementwise smallest costs; exact if the clusters are interchangeability classes."""
        members = tuple(tuple(c) for c in clusters)
        return cls(members, _smallest(tables.exchange, members), _smallest(tables.hop, members))

    @property
    def counts(self) -> Ints:
        """Devices per cluster."""
        return np.array([len(m) for m in self.members], dtype=np.int64)


def _smallest(matrices: Floats, members: Sequence[Sequence[int]]) -> Floats:
    small = np.zeros((len(matrices), len(members), len(members)))
    for kind, matrix in enumerate(matrices):
        off = matrix + np.where(np.eye(len(matrix), dtype=bool), np.inf, 0.0)
        rows = np.stack([off[list(m)].min(axis=0) for m in members])
        block = np.stack([rows[:, list(m)].min(axis=1) for m in members], axis=1)
        small[kind] = np.where(np.isfinite(block), block, 0.0)
    return small


@dataclass(frozen=True)
class ClassOutcome:
    """What CP-SAT returned.

    Attributes
    ----------
    counts
        ``x[c, j]``, None if no solution was found.
    bound
        Proven lower bound of the problem in seconds.
    """

    counts: Ints | None
    bound: float


def solve_classes(
    tables: Tables,
    costs: ClassCosts,
    *,
    upper: float,
    runtime_s: float,
    workers: int = 2,
    hint: Ints | None = None,
    effort: float | None = None,
) -> ClassOutcome:
    """Minimise eq. 1 over class counts with CP-SAT.

    Parameters
    ----------
    upper
        Cost of a known plan; only better plans or equal ones are looked for.
    runtime_s, effort
        Limit in seconds, or (``effort``) in CP-SAT's deterministic time, which gives the same
        answer in any process.
    hint
        ``x[c, j]`` of a known plan.
    """
    from ortools.sat.python import cp_model

    from planner.search.cp_sat import solve_interruptibly

    sizes = tables.sizes
    stages, classes = len(sizes), len(costs.members)
    # every rounded term loses less than one unit: largest group for eq. 2, S - 1 boundaries
    unit = max(upper, 1e-300) * PRECISION / (int(sizes.max()) + 2 * stages)
    limit = math.ceil(upper / unit * (1 + 1e-9)) + 1

    def whole(value: float) -> int:
        return min(math.floor(value / unit), limit + 1)

    model = cp_model.CpModel()
    x = [
        [model.new_int_var(0, int(min(len(m), sizes[j])), f"x{c},{j}") for j in range(stages)]
        for c, m in enumerate(costs.members)
    ]
    for c, members in enumerate(costs.members):
        model.add(sum(x[c]) == len(members))
    for j in range(stages):
        model.add(sum(x[c][j] for c in range(classes)) == int(sizes[j]))
    # eq. 2: a device of class c in group j pays for the others in its group
    slowest = model.new_int_var(0, limit, "data parallel")
    for j in range(stages):
        exchange = costs.exchange[tables.exchange_of[j]]
        for c in range(classes):
            present = model.new_bool_var(f"in{c},{j}")
            model.add(x[c][j] >= 1).only_enforce_if(present)
            model.add(x[c][j] == 0).only_enforce_if(~present)
            terms = sum(whole(exchange[c, e]) * x[e][j] for e in range(classes))
            model.add(terms - whole(exchange[c, c]) <= slowest).only_enforce_if(present)
    # eq. 3: flows between consecutive groups, allowed only below the boundary's level
    objective: list[cp_model.LinearExprT] = [slowest]
    above: list[tuple[list[float], list[int], list[Any]]] = []
    for j in range(stages - 1):
        hop = costs.hop[tables.hop_of[j]]
        priced = {
            (c, e): whole(hop[c, e])
            for c in range(classes)
            for e in range(classes)
            if c != e or len(costs.members[c]) > 1
        }
        levels = sorted(set(priced.values()))
        reached: list[Any] = [None] + [
            model.new_bool_var(f"level{j},{k}") for k in range(1, len(levels))
        ]
        for low, high in itertools.pairwise(reached[1:]):
            model.add_implication(high, low)
        flow = {}
        for (c, e), price in priced.items():
            most = int(min(len(costs.members[c]), len(costs.members[e]), sizes[j], sizes[j + 1]))
            flow[c, e] = model.new_int_var(0, most, f"f{c},{e},{j}")
            if levels.index(price):
                model.add(flow[c, e] <= most * reached[levels.index(price)])
        for c in range(classes):
            out = sum(v for (a, _), v in flow.items() if a == c)
            into = sum(v for (_, b), v in flow.items() if b == c)
            # every device of the smaller side is matched
            if sizes[j] <= sizes[j + 1]:
                model.add(out == x[c][j])
            else:
                model.add(out <= x[c][j])
            if sizes[j + 1] <= sizes[j]:
                model.add(into == x[c][j + 1])
            else:
                model.add(into <= x[c][j + 1])
        objective.append(levels[0])
        objective += [
            (high - low) * literal
            for low, high, literal in zip(levels, levels[1:], reached[1:], strict=False)
        ]
        above.append((sorted({float(hop[pair]) for pair in priced}), levels, reached))
    if tables.free_order:
        # a plan read backwards is the same plan
        model.add(x[0][0] <= x[0][stages - 1])
        forest = Forest(tables)
        for price in above[0][1][:-1] if above else []:
            # eq. 4: only so many boundaries find enough links at or below a level
            level = max(v for v in above[0][0] if whole(v) == price)
            kept = forest.most_pairs(level) // int(sizes[0])
            place = above[0][1].index(price) + 1
            model.add(sum(reached[place] for _, _, reached in above) >= stages - 1 - kept)
    model.minimize(sum(objective))
    model.add(sum(objective) <= limit)
    if hint is not None:
        for c in range(classes):
            for j in range(stages):
                model.add_hint(x[c][j], int(hint[c, j]))
    solver = cp_model.CpSolver()
    # clause learning proves this model; its linear relaxation is weak and slows the search
    solver.parameters.linearization_level = 0
    if effort is None:
        solver.parameters.num_workers = workers
        solver.parameters.subsolvers.extend(["no_lp", "quick_restart_no_lp"])
        solver.parameters.max_time_in_seconds = max(runtime_s, 0.01)
    else:
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = effort
    status = solve_interruptibly(solver, model)
    counts = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        counts = np.array([[solver.value(v) for v in row] for row in x], dtype=np.int64)
    if status == cp_model.INFEASIBLE:
        # nothing at or below the known plan's cost
        return ClassOutcome(None, upper * (1 - SAFETY))
    proven = solver.best_objective_bound * unit
    return ClassOutcome(counts, max(0.0, proven * (1 - SAFETY)))


def expand(costs: ClassCosts, counts: Ints) -> list[list[int]]:
    """Groups with ``counts[c, j]`` devices of class c in group j, taken in ascending order."""
    groups: list[list[int]] = [[] for _ in range(counts.shape[1])]
    for members, row in zip(costs.members, counts, strict=True):
        taken = 0
        for j, count in enumerate(row):
            groups[j] += members[taken : taken + count]
            taken += count
    return groups


def counts_of(costs: ClassCosts, groups: Sequence[Sequence[int]]) -> Ints:
    """``x[c, j]`` of given groups."""
    stage_of = {d: j for j, group in enumerate(groups) for d in group}
    counts = np.zeros((len(costs.members), len(groups)), dtype=np.int64)
    for c, members in enumerate(costs.members):
        for d in members:
            counts[c, stage_of[d]] += 1
    return counts
