"""Random placements to compare a plan with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.planning.evaluation import straight_step_s
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Shape, assignment_problem
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan


@dataclass(frozen=True)
class RandomPlacements:
    """Means over random grids; stages are not rematched into pipelines.

    Attributes
    ----------
    count, refused
        Placements that fit in memory, and those that do not.
    mean_cost_s
        Mean cost by eq. 1; None if no placement fits.
    mean_step_s
        Mean simulated step.
    """

    count: int
    refused: int
    mean_cost_s: float | None
    mean_step_s: float | None


def random_placements(
    problem: PlanningProblem,
    shape: Shape,
    count: int = 20,
    over: Callable[[], bool] = lambda: False,
) -> RandomPlacements:
    """Random placements with the same layers and order of operations as a plan."""
    rng = np.random.default_rng(problem.seed)
    subproblem = assignment_problem(problem.cluster, problem.workload, shape)
    hops = [subproblem.hop_s(j) for j in range(shape.stages - 1)]
    costs, steps, tried = [], [], 0
    for _ in range(count):
        if tried and over():
            break
        tried += 1
        grid = rng.permutation(len(problem.cluster)).reshape(shape.pipelines, shape.stages)
        drawn = AssignmentPlan.of_grid(grid)
        try:
            step_s = straight_step_s(problem, shape, drawn)
        except ProblemError:
            continue
        pipeline = sum(
            2 * float(hop[grid[:, j], grid[:, j + 1]].max()) for j, hop in enumerate(hops)
        )
        costs.append(subproblem.data_parallel_s(drawn.groups) + pipeline)
        steps.append(step_s)
    if not steps:
        return RandomPlacements(0, tried, None, None)
    refused = tried - len(steps)
    return RandomPlacements(len(steps), refused, float(np.mean(costs)), float(np.mean(steps)))
