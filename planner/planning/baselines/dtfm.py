"""DT-FM as a planner: minimises communication cost (eq. 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.planning.baselines.rank_order import unconstrained
from planner.planning.baselines.search import (
    ORDERS,
    BaselineCandidate,
    BaselinePlan,
    search_baselines,
)
from planner.planning.problem import PlanningProblem
from planner.planning.shape import shape_of
from planner.planning.straight.parallelism_candidates import NO_SHAPE, candidates
from planner.planning.straight.placement import place_stages
from planner.problems import ProblemError
from planner.search.stop import StoppingCriterion


@dataclass(frozen=True)
class DtfmRule:
    """Plans of DT-FM's rule, evaluated in the simulator.

    Attributes
    ----------
    plan
        With the least cost by eq. 1, over all numbers of stages that fit in memory.
    tried
        With the shortest step, over the placements of least cost for each number of stages.
    cost_s
        Cost of ``plan`` by eq. 1.
    refused
        Numbers of stages that do not fit in memory.
    """

    plan: BaselinePlan
    tried: BaselinePlan
    cost_s: float
    refused: int


def dtfm_rule(problem: PlanningProblem, stop: StoppingCriterion) -> DtfmRule:
    """Placements with the least communication cost.

    The paper uses equal stages and straight pipelines; its cost includes neither computation nor
    time. The number of stages is chosen by the user, who tries all (10.2): ``tried``; or chosen by
    eq. 1 among those that divide the devices: ``plan``. Microbatches are the workload's. Added
    here: evaluation, the order of operations (the faster of 1F1B and eager 1F1B), and layers that
    follow heterogeneous devices.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), eq. 1, sections 3 and 10.2.
    """
    own = problem.workload.microbatch_samples
    blank = unconstrained(problem)
    variants = candidates(replace(blank, request=blank.request.replace(microbatch_samples=own)))
    placed: list[tuple[float, int, list[BaselineCandidate]]] = []
    refusals: list[str] = []
    for variant in variants:
        try:
            placement = place_stages(variant, shape_of(variant), stop.portion(1 / len(variants)))
            grid = placement.assignment.grid
            assert grid is not None and placement.certificate.objective is not None
            starts = [
                BaselineCandidate(
                    "dtfm", replace(variant, request=variant.request.replace(schedule=order)), grid
                )
                for order in ORDERS
            ]
            starts[0].fitted()
        except ProblemError as error:
            refusals.append(str(error))
            continue
        placed.append((placement.certificate.objective, len(placed), starts))
    placed.sort(key=lambda shape: shape[:2])
    while placed:
        cost_s, _, starts = placed.pop(0)
        chosen = search_baselines(starts)
        if not chosen.best:
            refusals.append(chosen.refusal)
            continue
        others = search_baselines(start for _, _, rest in placed for start in rest)
        steps = [chosen.best["dtfm"], *others.best.values()]
        return DtfmRule(steps[0], min(steps, key=lambda plan: plan.step_s), cost_s, len(refusals))
    why = refusals[0] if refusals else NO_SHAPE
    raise ProblemError(f"no shape of DT-FM's rule fits: {why}")
