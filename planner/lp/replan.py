"""Replan averaging when peers join or leave."""

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
    previous_index: Sequence[int | None],
    stop: StoppingCriterion | None = None,
) -> Result[AveragingPlan]:
    """The best plan for the peers of ``problem``, warm-started from the previous plan.

    In the first incumbent, previous contributors and all new peers contribute. The result is
    deterministic, so that every peer can compute it locally; a new peer needs only the previous
    plan. ``previous_index`` is each peer's index in the previous plan, None for a new peer.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.1.
    """
    instance_of(AveragingProblem, problem)
    if len(previous_index) != len(problem):
        raise ProblemError(
            f"`previous_index` has {len(previous_index)} entries for {len(problem)} peers; give "
            "each peer's former index, or None"
        )
    former = [k for k in previous_index if k is not None]
    if len(set(former)) != len(former) or any(not 0 <= k < len(previous.computes) for k in former):
        raise ProblemError(
            f"`previous_index` must name different peers of the previous plan (0 to "
            f"{len(previous.computes) - 1}), found {list(previous_index)}"
        )
    start = np.array([k is None or bool(previous.computes[k]) for k in previous_index])
    return solve_from(problem, start & problem.contributors, stop)
