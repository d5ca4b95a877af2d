"""Lower bounds on the makespan over all arrangements."""

from __future__ import annotations

import math

import numpy as np

from planner.mapf.bounds import PathBound
from planner.mapf.start_turnover import turnover_s
from planner.problems import ArrangedPathProblem


def arranged_bound_s(problem: ArrangedPathProblem) -> float:
    """`arranged_bound` in seconds, without its witness."""
    return arranged_bound(problem).seconds


def arranged_bound(problem: ArrangedPathProblem) -> PathBound:
    """The larger of the work of all devices and the turnover of the start devices."""
    work = PathBound(
        _work_s(problem), "work of all devices, each on its quickest stage", {"kind": "work"}
    )
    turnover = PathBound(
        _start_s(problem),
        f"turnover of start devices, the best {problem.stage_sizes[0]} of all",
        {"kind": "turnover of start devices"},
    )
    return max(work, turnover, key=lambda bound: bound.seconds)


def _work_s(problem: ArrangedPathProblem) -> float:
    """Total work: every device is busy all the time on the stage where it is fastest."""
    busy = problem.forward_s + problem.backward_s
    count = problem.stage_sizes[0] * problem.microbatches_per_start
    with np.errstate(divide="ignore"):
        rate = float((1.0 / busy.min(axis=0)).sum())
    return count * problem.path_stages / rate if math.isfinite(rate) else 0.0


def _start_s(problem: ArrangedPathProblem) -> float:
    """Turnover of the slowest start device if the fastest devices are chosen.

    A chain costs at least the cheapest closed walk over as many devices, ignoring stages.
    """
    n, per_start = len(problem), problem.microbatches_per_start
    transfers = problem.transfer_s + problem.transfer_s.T
    np.fill_diagonal(transfers, math.inf)
    busy = problem.forward_s + problem.backward_s
    spans = []
    least_busy_s = busy[1:].min(axis=0, initial=math.inf)
    for d in range(n):
        memory = int(problem.memory[0, d]) if problem.live_memory else per_start
        if problem.memory[0, d] < (1 if problem.live_memory else per_start):
            continue
        walk_s = np.full(n, math.inf)
        walk_s[d] = 0.0
        for _ in range(problem.path_stages - 1):
            walk_s = (walk_s[:, None] + transfers).min(axis=0) + least_busy_s
        return_s = float((walk_s + np.where(np.arange(n) == d, 0.0, transfers[:, d])).min())
        busy_s = float(busy[0, d] + problem.head_s[d])
        f, h, b = problem.forward_s[0, d], problem.head_s[d], problem.backward_s[0, d]
        spans.append(turnover_s(float(f), float(h), float(b), memory, per_start, return_s + busy_s))
    spans.sort()
    return spans[problem.stage_sizes[0] - 1] if len(spans) >= problem.stage_sizes[0] else 0.0
