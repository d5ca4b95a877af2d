"""Verify and evaluate your own assignment solver on the benchmark's instances.

A solver is a function from a problem to an answer. `pl.check` verifies the answer independently of
any solver and returns the violated rules; `problem.cost` evaluates it.
"""

from __future__ import annotations

import numpy as np

import planner as pl
from planner.bench.assignment_instances import dtfm_case


def nearest_together(problem: pl.AssignmentProblem) -> pl.AssignmentPlan:
    """Build each stage from one remaining device and its nearest neighbours by bandwidth."""
    speed = problem.network.bandwidth_bytes_per_s
    left = list(range(len(problem.network)))
    groups = []
    for size in problem.stage_sizes:
        first = left[0]
        group = sorted(left, key=lambda d: -speed[first, d])[:size]
        groups.append(group)
        left = [d for d in left if d not in group]
    order = pl.open_path(np.array([[_hop(problem, a, b) for b in groups] for a in groups])).plan
    return pl.match_stages(problem, [groups[k] for k in order])


def _hop(problem: pl.AssignmentProblem, a: list[int], b: list[int]) -> float:
    return 0.0 if a is b else pl.bottleneck_assignment(problem.hop_s(0)[np.ix_(a, b)])[0]


for case in range(1, 6):
    problem = dtfm_case(case)
    mine = nearest_together(problem)
    violations = pl.check(mine, problem)
    ours = pl.solve_assignment(problem, pl.Effort(0.5))
    print(
        f"case {case}: own {problem.cost(mine.groups):8.3f} s ({len(violations)} violations), "
        f"planner {ours.objective:8.3f} s, bound {ours.bound:8.3f} s"
    )

broken = pl.AssignmentPlan.of_groups([[0] * 8] * 8)
print("a wrong answer:", pl.check(broken, problem)[0])
