"""A relaxation of the path problem that ignores collisions away from the start devices.

Every microbatch chooses its devices under CC1, CC2, CC3 and TC1. The relaxation keeps the chain of
each microbatch, the order of F and of B on its start device, and the load of the other devices. The
constraints left out can only delay, so the optimum is a lower bound. It is solved in seconds where
the full problem takes minutes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ortools.sat.python import cp_model

from planner.mapf.arrays import PathArrays
from planner.mapf.job_shop_model import proven_bound_s
from planner.mapf.path_enumeration import Path, chain_s
from planner.mapf.start_turnover import earliest_begins_s
from planner.search.cp_sat import solve_interruptibly

STEPS = 1 << 22
"""Integer steps of the horizon."""


def cheapest_orders(arrays: PathArrays, paths: Sequence[Path]) -> list[Path]:
    """Of the paths over the same devices, the one with the shortest chain; it dominates."""
    best: dict[tuple[int, ...], tuple[float, Path]] = {}
    for path in paths:
        devices, cost = tuple(sorted(path)), chain_s(arrays, path)
        if devices not in best or cost < best[devices][0]:
            best[devices] = (cost, path)
    return [path for _, path in best.values()]


def collision_free_bound_s(
    arrays: PathArrays,
    candidate_paths: dict[int, list[Path]],
    horizon_s: float,
    solver: cp_model.CpSolver,
) -> float:
    """A proven lower bound, in seconds, on plans with a makespan of at most ``horizon_s``."""
    model = cp_model.CpModel()
    tick = horizon_s / STEPS
    makespan = model.new_int_var(0, STEPS, "makespan")
    through: list[list[cp_model.IntVar]] = [[] for _ in arrays.stage]

    def ticks(seconds: float) -> int:
        return math.floor(seconds / tick * (1 - 1e-12))

    for start in dict.fromkeys(arrays.starts.tolist()):
        count = int((arrays.starts == start).sum())
        paths = cheapest_orders(arrays, candidate_paths[start])
        chains = [chain_s(arrays, path) for path in paths]
        shortest = min(chains)
        f, b = float(arrays.forward[start]), float(arrays.backward[start])
        memory = int(arrays.memory[start])
        earliest_begin = [ticks(x) for x in earliest_begins_s(f, b, memory, count, shortest)]
        earliest_end = [ticks(x) for x in earliest_begins_s(b, f, memory, count, shortest)]
        rank = [[model.new_bool_var("") for _ in range(count)] for _ in range(count)]
        chain_lengths = []
        for i in range(count):
            x = [model.new_bool_var("") for _ in paths]
            model.add_exactly_one(x)
            model.add_exactly_one(rank[i])
            model.add_exactly_one(row[i] for row in rank)
            for path, literal in zip(paths, x, strict=True):
                for d in path[1:]:
                    through[d].append(literal)
            chain = cp_model.LinearExpr.weighted_sum(x, [ticks(c) for c in chains])
            tail = cp_model.LinearExpr.weighted_sum(rank[i], earliest_end)
            model.add(makespan >= earliest_begin[i] + chain + tail)
            chain_lengths.append(chain)
        # energy argument: at most `capacity` chains run at a time, staggered at both ends
        capacity = min(memory, count)
        model.add(
            capacity * makespan
            >= sum(chain_lengths) + sum(earliest_begin[:capacity]) + sum(earliest_end[:capacity])
        )
    for s in range(1, len(arrays.min_visits)):
        group = arrays.members[arrays.stage_ptr[s] : arrays.stage_ptr[s + 1]].tolist()
        model.add_linear_constraint(
            sum(x for d in group for x in through[d]),
            int(arrays.min_visits[s]),
            int(arrays.max_visits[s]),
        )
        for d in group:
            if len(through[d]) > 0:
                model.add(sum(through[d]) <= int(arrays.capacity[d]))
                busy = ticks(arrays.forward[d]) + ticks(arrays.backward[d])
                model.add(makespan >= busy * sum(through[d]))
    model.minimize(makespan)
    return proven_bound_s(solver, solve_interruptibly(solver, model), tick)
