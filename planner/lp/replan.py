"""Replanning when peers join or leave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.lp.solve import solve_from
from planner.problems import AveragingProblem, ProblemError
from planner.problems.answers import AveragingPlan
from planner.problems.quantities import instance_of
from planner.search.result import Result
from planner.search.stop import StoppingCriterion


def replan_averaging(
    problem: AveragingProblem,
    previous: AveragingPlan,
    was: Sequence[int | None],
    stop: StoppingCriterion | None = None,
) -> Result[AveragingPlan]:
    """The best plan for the peers of ``problem``, warm from the plan that was running.

    Those who contributed go on contributing in the first incumbent, next to every newcomer. The
    same problem and previous plan give the same bytes on every peer, so a newcomer fetches the
    running plan with the parameters and then solves for itself.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.1.
    """
    instance_of(AveragingProblem, problem)
    if len(was) != len(problem):
        raise ProblemError(
            f"`was` has {len(was)} entries for {len(problem)} peers; give each peer's former "
            "index, or None"
        )
    known = [k for k in was if k is not None]
    if len(set(known)) != len(known) or any(not 0 <= k < len(previous.computes) for k in known):
        raise ProblemError(
            f"`was` must name different peers of the previous plan (0 to "
            f"{len(previous.computes) - 1}), found {list(was)}"
        )
    start = np.array([k is None or bool(previous.computes[k]) for k in was])
    return solve_from(problem, start & problem.contributors, stop)
