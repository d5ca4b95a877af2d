"""Placement of straight pipelines that average every H steps, which eq. 1 does not model.

Even with fewer bytes, eq. 1 counts the latencies of averaging in every step, and keeps devices that
average close together where pipelines should be. Several placements are therefore simulated.
"""

from __future__ import annotations

import numpy as np

from planner.matching.stages import match_stages
from planner.planning.baselines.rank_order import Outermost, ranks_grid, region_order
from planner.planning.evaluation import straight_plan
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Shape, assignment_problem
from planner.planning.straight.placement import Placement, evaluate_placement, place_stages
from planner.problems import AssignmentProblem
from planner.problems.answers import AssignmentPlan
from planner.search.stop import MaxIterations, StoppingCriterion


def place_for_local_sgd(
    problem: PlanningProblem, shape: Shape, stop: StoppingCriterion
) -> Placement:
    """The best of several placements of equal devices in the simulator.

    The optimum of eq. 1, that of eq. 1 with the mean bytes averaged per step, and ranks region by
    region with either degree of parallelism outermost.
    """
    from planner.genetic.solve import solve_assignment

    half_limit = stop.portion(0.5)
    first = place_stages(problem, shape, half_limit)
    reason = first.certificate.stop_reason
    subproblem = assignment_problem(problem.cluster, problem.workload, shape)
    infrequent = AssignmentProblem(
        problem.cluster.network,
        stage_sizes=shape.sizes,
        activation_bytes=subproblem.activation_bytes,
        gradient_bytes=np.array(subproblem.gradient_bytes) / problem.request.sync_every,
    )
    limit = MaxIterations(0) if reason == "interrupted" else half_limit
    second = solve_assignment(infrequent, limit, problem.seed, problem.request.method).plan
    assert second is not None
    ranks = region_order(problem.cluster.network)
    grids = [ranks_grid(ranks, shape.stages, outermost) for outermost in Outermost]
    # the stages of ranks, matched into pipelines by eq. 3
    by_rank = [match_stages(subproblem, AssignmentPlan.of_grid(grid).groups) for grid in grids]
    assignments = [first.assignment, second, *by_rank]
    plans = [straight_plan(problem, shape, assignment) for assignment in assignments]
    fastest = min(range(len(plans)), key=lambda k: plans[k].predicted.step_s)
    certificate = (
        evaluate_placement(problem, shape, assignments[fastest], reason)
        if fastest
        else first.certificate
    )
    return Placement(shape, assignments[fastest], certificate, plans[fastest])
