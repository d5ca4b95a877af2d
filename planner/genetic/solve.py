"""`solve_assignment`: one entry for every way to place devices."""

from __future__ import annotations

from functools import cache

import numpy as np

from planner.genetic.bounds import STAR_AND_FOREST, quick_bound
from planner.genetic.evolution import Evolution, EvolutionParams
from planner.genetic.greedy import region_greedy
from planner.genetic.incumbent_stop import AssignmentIncumbent, plan_of
from planner.genetic.local_search import Gain, improve_circular, improve_pairs
from planner.genetic.search import AssignmentSearch, AssignmentSearchParams
from planner.genetic.tables import Tables, tables_of
from planner.network.network import Network
from planner.problems import AssignmentProblem, ProblemError
from planner.problems.answers import AssignmentPlan
from planner.problems.assignment_method import Method
from planner.problems.quantities import instance_of, seed_of
from planner.search.incumbent import Incumbent
from planner.search.result import Result
from planner.search.stop import MaxIterations, StoppingCriterion, started
from planner.utils.validate import short_repr

MOVES_PER_EFFORT = 6e6
OFFSPRING_PER_EFFORT = 1e3
"""Annealing moves, and offspring times devices, in a unit of effort: about a second of one core."""

EVOLUTIONS = {
    Method.GENETIC: EvolutionParams(),
    Method.KERNIGHAN_LIN: EvolutionParams(gain=Gain.KERNIGHAN_LIN),
    Method.RANDOM: EvolutionParams(gain=Gain.NONE, mutation=1.0),
}
"""The methods of DT-FM's Figure 4."""


def solve_assignment(
    problem: AssignmentProblem,
    stop: StoppingCriterion,
    seed: int = 0,
    method: str = "auto",
) -> Result[AssignmentPlan]:
    """Place devices on stages and pipelines so that eq. 1 is smallest.

    Parameters
    ----------
    problem
        Network, shape and bytes.
    stop
        When to end. One iteration is one step of the method: a round of annealing moves for
        ``search``, one offspring for ``genetic``. Proofs do not count as iterations: ``auto`` under
        a limit on iterations also does a fixed amount of proving. A limit in seconds beside one on
        iterations only cuts the solve off.
    seed
        Of the random generator. The same problem, seed and limit on iterations give the same plan
        in any process.
    method
        ``"auto"`` or another `Method`.

    Returns
    -------
    Result
        ``objective`` is ``problem.cost(plan.groups)`` in seconds; ``bound`` is proven for every
        method.

    Raises
    ------
    ProblemError
        ``problem`` is none, or there is no such method.
    ValueError
        ``stop`` is no stopping rule.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), section 3.
    """
    try:
        chosen = Method(method)
    except ValueError:
        words = ", ".join(Method)
        raise ProblemError(f"method is {short_repr(method)}; it must be one of {words}") from None
    instance_of(AssignmentProblem, problem)
    seed = seed_of(seed)
    # CP-SAT comes with the methods that use it, before the simulator starts
    from planner.genetic.auto import Auto, prove_by_classes
    from planner.genetic.classes import interchangeable

    compile_kernels(chosen in EVOLUTIONS)
    tables = tables_of(problem)
    run = started(stop, steps_per_effort(chosen, tables))
    incumbent = AssignmentIncumbent(run, problem, method=chosen, seed=seed)
    incumbent.tables = tables
    search = AssignmentSearch(tables, incumbent)
    with run.interruptible():
        incumbent.raise_bound(quick_bound(tables), STAR_AND_FOREST, {"kind": STAR_AND_FOREST})
        match chosen:
            case Method.AUTO:
                Auto(problem, search).run()
            case Method.CLASSES:
                prove_by_classes(search, interchangeable(problem))
            case Method.SEARCH:
                search.run()
            case Method.REGION_GREEDY:
                search.offer(region_greedy(problem, tables))
            case _:
                Evolution(tables, incumbent, EVOLUTIONS[chosen]).run()
    plan = plan_of(problem, tables, search.best)
    return incumbent.result(plan, problem.cost(plan.groups), exhausted="done")


def steps_per_effort(method: Method, tables: Tables) -> float:
    """Iterations in one unit of `planner.search.stop.Effort`."""
    devices = len(tables.stage)
    if method in EVOLUTIONS:
        return OFFSPRING_PER_EFFORT / devices
    params = AssignmentSearchParams.for_problem(devices, len(tables.sizes))
    return MOVES_PER_EFFORT / (params.replicas * params.moves_per_device * devices)


@cache
def compile_kernels(evolution: bool) -> None:
    """Compile before the simulator starts, once per process and from the disk cache if it is there.

    The first solve of a new installation waits some seconds here, so that a time limit is spent on
    the problem.
    """
    far = np.ones((4, 4))
    problem = AssignmentProblem(Network(far, far), 2, 2, 1.0, 1.0)
    tables = tables_of(problem)
    AssignmentSearch(
        tables, Incumbent(MaxIterations(1).start(), problem, method="search", seed=0)
    ).run()
    if evolution:
        group_of, order = tables.stage.copy(), np.arange(2)
        improve_pairs(tables.hop[0], group_of, order)
        improve_circular(tables.hop[0], group_of, tables.sizes, order)
