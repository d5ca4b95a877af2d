"""The path problem without collisions away from the start devices: a lower bound.

Every microbatch chooses its devices; CC1, CC2, CC3 and TC1 hold; of the times there remain the
chain of each microbatch, the order of F and of B on its start device, and the load of the others.
What is left out only ever delays, so the optimum is a lower bound. It is solved in seconds where
the whole problem takes minutes, and its paths have the right structure: who goes far, and where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ortools.sat.python import cp_model

from planner.mapf.chains import Path, chain_s
from planner.mapf.tables import Tables
from planner.mapf.turnover import waits
from planner.search.cp_sat import solve_interruptibly

STEPS = 1 << 22
"""Integer steps of the horizon."""


def cheapest_orders(tables: Tables, options: Sequence[Path]) -> list[Path]:
    """Of the paths over the same devices, the shortest chain; no other counts here."""
    best: dict[tuple[int, ...], tuple[float, Path]] = {}
    for path in options:
        devices, cost = tuple(sorted(path)), chain_s(tables, path)
        if devices not in best or cost < best[devices][0]:
            best[devices] = (cost, path)
    return [path for _, path in best.values()]


def relaxed(
    tables: Tables,
    options: dict[int, list[Path]],
    horizon_s: float,
    *,
    workers: int,
    seed: int,
    max_s: float,
    max_work: float,
) -> float:
    """A proven bound in seconds, over all paths that can end within ``horizon_s``."""
    model = cp_model.CpModel()
    tick = horizon_s / STEPS
    makespan = model.new_int_var(0, STEPS, "makespan")
    through: list[list[cp_model.IntVar]] = [[] for _ in tables.stage]

    def ticks(seconds: float) -> int:
        return math.floor(seconds / tick * (1 - 1e-12))

    for start in dict.fromkeys(tables.starts.tolist()):
        count = int((tables.starts == start).sum())
        paths = cheapest_orders(tables, options[start])
        chains = [chain_s(tables, path) for path in paths]
        shortest = min(chains)
        f, b = float(tables.forward[start]), float(tables.backward[start])
        memory = int(tables.memory[start])
        before = [ticks(x) for x in waits(f, b, memory, count, shortest)]
        behind = [ticks(x) for x in waits(b, f, memory, count, shortest)]
        rank = [[model.new_bool_var("") for _ in range(count)] for _ in range(count)]
        total = []
        for i in range(count):
            x = [model.new_bool_var("") for _ in paths]
            model.add_exactly_one(x)
            model.add_exactly_one(rank[i])
            model.add_exactly_one(row[i] for row in rank)
            for path, literal in zip(paths, x, strict=True):
                for d in path[1:]:
                    through[d].append(literal)
            chain = cp_model.LinearExpr.weighted_sum(x, [ticks(c) for c in chains])
            after = cp_model.LinearExpr.weighted_sum(rank[i], behind)
            model.add(makespan >= before[i] + chain + after)
            total.append(chain)
        # at most `memory` chains at a time, one F and one B after the other at either end
        room = min(memory, count)
        model.add(room * makespan >= sum(total) + sum(before[:room]) + sum(behind[:room]))
    for s in range(1, len(tables.fewest)):
        group = tables.members[tables.first[s] : tables.first[s + 1]].tolist()
        model.add_linear_constraint(
            sum(x for d in group for x in through[d]), int(tables.fewest[s]), int(tables.most[s])
        )
        for d in group:
            if len(through[d]) > 0:
                model.add(sum(through[d]) <= int(tables.room[d]))
                busy = ticks(tables.forward[d]) + ticks(tables.backward[d])
                model.add(makespan >= busy * sum(through[d]))
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    if math.isfinite(max_s):
        solver.parameters.max_time_in_seconds = max(0.01, max_s)
    if math.isfinite(max_work):
        solver.parameters.max_deterministic_time = max_work
    status = solve_interruptibly(solver, model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        return 0.0
    return max(0.0, float(solver.best_objective_bound) * tick)
