"""Assignment of heterogeneous devices.

DT-FM's cost knows the network only (its own stated limitation, section 8). Here layers follow the
devices (`planner.planning.layer_split`), and devices of different speed are exchanged as long as
network and computation together get faster.
"""

from __future__ import annotations

import numpy as np

from planner.planning.layer_split import balanced_split
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Shape, assignment_problem
from planner.problems import ProblemError
from planner.search.stop import SearchRun

Groups = tuple[tuple[int, ...], ...]


def estimated_step_s(problem: PlanningProblem, shape: Shape, groups: Groups) -> float:
    """Communication of eq. 1 plus the busiest stage's computation, with layers split for the
    groups.

    Averaging counts with its share of a step if only every H-th step averages.
    """
    cluster, workload = problem.cluster, problem.workload
    try:
        layers = balanced_split(cluster, workload, groups, shape.head_stage, shape.recompute)
    except ProblemError:
        return float("inf")
    fitted = shape.with_layers(layers)
    microbatches = -(-shape.microbatches // shape.pipelines)
    busiest = max(
        microbatches * costs.busy_s(min(float(cluster.flops[d]) for d in group))
        for group, costs in zip(groups, fitted.costs(workload), strict=True)
    )
    subproblem = assignment_problem(cluster, workload, fitted)
    skipped_share = 1 - 1 / problem.request.sync_every
    return subproblem.cost(groups) - skipped_share * subproblem.data_parallel_s(groups) + busiest


def improve_groups(
    problem: PlanningProblem, shape: Shape, groups: Groups, run: SearchRun
) -> Groups:
    """Exchange different devices of two stages as long as that lowers `estimated_step_s`."""
    cluster = problem.cluster
    kind = list(zip(cluster.flops.tolist(), cluster.memory_bytes.tolist(), strict=True))
    best, cost = groups, estimated_step_s(problem, shape, groups)
    improved = True
    with run.interruptible():
        while improved and run.update() is None:
            improved = False
            pairs = [
                (a, b)
                for i, left in enumerate(best)
                for right in best[i + 1 :]
                for a in left
                for b in right
                if kind[a] != kind[b]
            ]
            for a, b in pairs:
                # a limit on effort counts trials; other limits count sweeps
                if run.spend(1 / run.steps_per_effort) is not None:
                    break
                stage_of = {d: j for j, group in enumerate(best) for d in group}
                if stage_of[a] == stage_of[b]:
                    continue
                swap = {a: b, b: a}
                tried = tuple(tuple(sorted(swap.get(d, d) for d in group)) for group in best)
                step_s = estimated_step_s(problem, shape, tried)
                if step_s < cost * (1 - 1e-9):
                    best, cost, improved = tried, step_s, True
    return best


def sorted_by_speed(problem: PlanningProblem, shape: Shape) -> Groups:
    """Stages of similar devices, slowest first; an initial solution that ignores the network."""
    order = np.lexsort((problem.cluster.memory_bytes, problem.cluster.flops))
    stages = order.reshape(shape.stages, shape.pipelines).tolist()
    return tuple(tuple(sorted(map(int, group))) for group in stages)
