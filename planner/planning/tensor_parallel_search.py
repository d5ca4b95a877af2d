"""Plans for every number of GPUs per worker, of which the best is searched further."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.network.cluster import Cluster
from planner.network.error import NetworkError
from planner.planning.screening import REFUSALS, SCREENING_SHARE
from planner.planning.workers import degrees
from planner.problems import ProblemError
from planner.problems.quantities import instance_of
from planner.search.result import Result, objective_or_inf
from planner.search.stop import INTERRUPTED, StoppingCriterion, started
from planner.training_plan.alternative import Alternative
from planner.training_plan.model import TrainingPlan
from planner.utils.text import counted
from planner.workload.workload import Workload


def plan_for_best_degree(
    cluster: Cluster,
    workload: Workload,
    stop: StoppingCriterion,
    with_degree: Callable[[int, StoppingCriterion], Result[TrainingPlan]],
) -> Result[TrainingPlan]:
    """The best plan over all degrees of tensor parallelism, with the others as alternatives.

    Parameters
    ----------
    with_degree
        Plans for a degree within a limit.
    """
    instance_of(Cluster, cluster, "cluster")
    instance_of(Workload, workload, "workload")
    run = started(stop)
    choices = degrees(cluster, workload)

    if len(choices) == 1:
        return with_degree(1, stop)
    screened: dict[int, Result[TrainingPlan]] = {}
    refused: dict[int, ProblemError | NetworkError] = {}

    def is_over() -> bool:
        """Whether a limit is reached, or Ctrl-C has ended the last search."""
        last = next(reversed(screened.values()), None)
        interrupted = last is not None and INTERRUPTED in last.stop_reason
        return interrupted or run.check() is not None

    # many GPUs per worker need least memory each
    for degree in reversed(choices):
        try:
            screened[degree] = with_degree(degree, stop.portion(SCREENING_SHARE / len(choices)))
        except REFUSALS as error:
            refused[degree] = error
        except KeyboardInterrupt:
            if not screened:
                raise
            break
        if screened and is_over():
            break
    if not screened:
        raise refused[choices[-1]]
    best_degree = min(screened, key=lambda degree: objective_or_inf(screened[degree]))
    best = screened[best_degree]
    if not is_over():
        limit = stop.portion(1 - SCREENING_SHARE, run.remaining_s)
        refined = with_degree(best_degree, limit)
        if objective_or_inf(refined) < objective_or_inf(best):
            best = refined
    if best.plan is None:
        return best
    unit = "$" if "cost" in best.plan.certificates else "s"
    others = [
        Alternative(
            _words(best_degree),
            f"{_words(degree)}{_bounded(screened[degree], unit)}",
            screened[degree].objective,
            unit,
        )
        if degree in screened
        else Alternative(
            _words(best_degree), _words(degree), None, unit, _reason(refused.get(degree))
        )
        for degree in choices
        if degree != best_degree
    ]
    alternatives = (*others, *best.plan.alternatives)
    return replace(best, plan=best.plan.replace(alternatives=alternatives), runtime_s=run.elapsed_s)


def _words(degree: int) -> str:
    return f"{counted(degree, 'GPU')} a worker"


def _bounded(result: Result[TrainingPlan], unit: str) -> str:
    """The bound of other plans with as many GPUs per worker, if there is one."""
    return "" if result.bound is None else f" (>= {result.bound:.4g} {unit})"


def _reason(refusal: Exception | None) -> str:
    """A refusal without its remedy; without one, the search ended before."""
    return "not tried: the search ended before" if refusal is None else str(refusal).split(";")[0]
