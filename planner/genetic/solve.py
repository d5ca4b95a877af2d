"""`solve_assignment`: the entry point for all assignment methods."""

from __future__ import annotations

from functools import cache

import numpy as np

from planner.genetic.bounds import STAR_AND_FOREST, quick_bound
from planner.genetic.data import AssignmentData, assignment_data
from planner.genetic.evolution import Evolution, EvolutionParams
from planner.genetic.greedy import region_greedy
from planner.genetic.incumbent import AssignmentIncumbent, build_plan
from planner.genetic.local_search import LocalSearch, circular_swap_pass, greedy_swap_pass
from planner.genetic.stage_order import has_best_order
from planner.genetic.tempering import ParallelTempering, TemperingParams
from planner.network.network import Network
from planner.problems import AssignmentProblem, ProblemError
from planner.problems.answers import AssignmentPlan
from planner.problems.assignment_method import AssignmentMethod
from planner.problems.quantities import instance_of, seed_of
from planner.search.incumbent import Incumbent
from planner.search.result import Result
from planner.search.stop import MaxIterations, StoppingCriterion, started
from planner.utils.validate import short_repr

MOVES_PER_EFFORT = 6e6
OFFSPRING_PER_EFFORT = 1e4
GENES_PER_EFFORT = 3e5
ORDERS_PER_EFFORT = 5e8
"""Annealing moves, and offspring, their devices and steps of Held-Karp for the order of their
stages, in a unit of effort: about a second of one core."""

EVOLUTIONS = {
    AssignmentMethod.GENETIC: EvolutionParams(),
    AssignmentMethod.KERNIGHAN_LIN: EvolutionParams(local_search=LocalSearch.KERNIGHAN_LIN),
    AssignmentMethod.RANDOM: EvolutionParams(local_search=LocalSearch.NONE, mutation=1.0),
}
"""The methods of DT-FM's Figure 4."""


def solve_assignment(
    problem: AssignmentProblem,
    stop: StoppingCriterion,
    seed: int = 0,
    method: str = "auto",
) -> Result[AssignmentPlan]:
    """Assign devices to stages and pipelines to minimise eq. 1.

    Parameters
    ----------
    problem
        Network, shape, and bytes of activations and gradients.
    stop
        When to stop. One iteration is one step of the method: a round of annealing moves for
        ``search``, one offspring for ``genetic``. Proofs do not count as iterations: ``auto`` under
        a limit on iterations also does a fixed amount of proving. A time limit combined with an
        iteration limit only ends the solve early.
    seed
        Seed of the random generator. The same problem, seed and limit on iterations give the same
        plan in any process.
    method
        ``"auto"`` or another `AssignmentMethod`.

    Returns
    -------
    Result
        ``objective`` is ``problem.cost(plan.groups)`` in seconds; ``bound`` is proven for every
        method.

    Raises
    ------
    ProblemError
        ``problem`` is not an `AssignmentProblem`, or ``method`` is unknown.
    ValueError
        ``stop`` is not a stopping criterion.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), section 3.
    """
    try:
        chosen = AssignmentMethod(method)
    except ValueError:
        words = ", ".join(AssignmentMethod)
        raise ProblemError(f"method is {short_repr(method)}; it must be one of {words}") from None
    instance_of(AssignmentProblem, problem)
    seed = seed_of(seed)
    # import CP-SAT before the time limit starts
    from planner.genetic.auto import AutoSolver, prove_by_classes
    from planner.genetic.classes import interchangeable

    compile_kernels(chosen in EVOLUTIONS)
    data = assignment_data(problem)
    run = started(stop, steps_per_effort(chosen, data))
    incumbent = AssignmentIncumbent(run, problem, method=chosen, seed=seed)
    incumbent.data = data
    search = ParallelTempering(data, incumbent)
    with run.interruptible():
        incumbent.offer_bound(quick_bound(data), STAR_AND_FOREST, {"kind": STAR_AND_FOREST})
        match chosen:
            case AssignmentMethod.AUTO:
                AutoSolver(problem, search).run()
            case AssignmentMethod.CLASSES:
                prove_by_classes(search, interchangeable(problem))
            case AssignmentMethod.SEARCH:
                search.run()
            case AssignmentMethod.REGION_GREEDY:
                search.offer(region_greedy(problem, data))
            case _:
                Evolution(data, incumbent, EVOLUTIONS[chosen]).run()
    plan = build_plan(problem, data, search.best)
    return incumbent.result(plan, problem.cost(plan.groups), exhausted="done")


def steps_per_effort(method: AssignmentMethod, data: AssignmentData) -> float:
    """Iterations in one unit of `planner.search.stop.Effort`."""
    devices = len(data.stage_of_slot)
    if method in EVOLUTIONS:
        stages = len(data.sizes)
        order_effort = 0.0
        if has_best_order(data):
            order_effort = stages**2 * 2**stages / ORDERS_PER_EFFORT
        return 1 / (1 / OFFSPRING_PER_EFFORT + devices / GENES_PER_EFFORT + order_effort)
    params = TemperingParams.for_problem(devices, len(data.sizes))
    return MOVES_PER_EFFORT / (params.replicas * params.moves_per_device * devices)


@cache
def compile_kernels(evolution: bool) -> None:
    """Compile kernels once per process, or load them from the disk cache.

    The first solve of a new installation takes some seconds here, so that compilation does not
    count against a time limit.
    """
    far = np.ones((4, 4))
    problem = AssignmentProblem(Network(far, far), 2, 2, 1.0, 1.0)
    data = assignment_data(problem)
    ParallelTempering(
        data, Incumbent(MaxIterations(1).start(), problem, method="search", seed=0)
    ).run()
    if evolution:
        group_of, order = data.stage_of_slot.copy(), np.arange(2)
        greedy_swap_pass(data.pp_cost[0], group_of, order)
        circular_swap_pass(data.pp_cost[0], group_of, data.sizes, order)
