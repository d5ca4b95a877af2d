"""DT-FM's rule as a planner of its own: the least communication cost (eq. 1) decides."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.compose.arranging import arrange
from planner.compose.degrees import candidates
from planner.compose.fixed_trials import ORDERS, FixedPlan, Start, best_of
from planner.compose.rank_order import open_question
from planner.compose.request import Question
from planner.compose.shape import shape_of
from planner.problems import ProblemError
from planner.search.stop import StoppingCriterion


@dataclass(frozen=True)
class DtfmRule:
    """What DT-FM's rule decides, priced on the clock.

    Attributes
    ----------
    plan
        Its stages, with the faster of the two orders.
    cost_s
        Of eq. 1, the least of all shapes that memory holds.
    refused
        Numbers of stages that memory does not hold.
    """

    plan: FixedPlan
    cost_s: float
    refused: int


def dtfm_rule(question: Question, stop: StoppingCriterion) -> DtfmRule:
    """The number of stages and the placement whose communication cost is least.

    The paper takes equal stages and straight pipelines, and knows no computation and no clock:
    neither has a say here. Its authors tried degrees one by one (10.2); of those that divide the
    devices, eq. 1 chooses here too. The workload's own microbatches. Ours are the price, the order
    (the faster of 1F1B and eager 1F1B), and layers that follow unlike devices.

    Parameters
    ----------
    question
        What is asked, of what; its shape and order are left aside.
    stop
        For the assignments of all shapes together.

    Returns
    -------
    DtfmRule
        Under a limit that counts, the same for the same arguments.

    Raises
    ------
    ProblemError
        No shape fits these devices.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), eq. 1 and section 3.
    """
    own = question.workload.microbatch_samples
    blank = open_question(question)
    asked = candidates(replace(blank, request=blank.request.replace(microbatch_samples=own)))
    found: list[tuple[float, int, list[Start]]] = []
    refusals: list[str] = []
    for one in asked:
        try:
            arranged = arrange(one, shape_of(one), stop.portion(1 / len(asked)))
            grid = arranged.assignment.grid
            assert grid is not None and arranged.certificate.objective is not None
            starts = [
                Start("dtfm", replace(one, request=one.request.replace(schedule=order)), grid)
                for order in ORDERS
            ]
            starts[0].fitted()
        except ProblemError as error:
            refusals.append(str(error))
            continue
        found.append((arranged.certificate.objective, len(found), starts))
    if not found:
        why = refusals[0] if refusals else "no number of stages divides devices and layers"
        raise ProblemError(f"no shape of DT-FM's rule fits: {why}")
    cost_s, _, starts = min(found)
    return DtfmRule(best_of(starts).best["dtfm"], cost_s, len(refusals))
