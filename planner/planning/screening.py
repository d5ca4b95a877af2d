"""How choices that need a plan each are compared: all are screened, the best searched further."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.network.error import NetworkError
from planner.problems import ProblemError
from planner.search.result import Result, objective_or_inf
from planner.search.stop import INTERRUPTED, StoppingCriterion, started
from planner.training_plan.alternative import Alternative
from planner.training_plan.model import TrainingPlan

REFUSALS = (ProblemError, NetworkError)
"""Errors that refuse a choice. Others, such as a deadlock in the simulator, are bugs."""
SCREENING_SHARE = 0.5
"""Share of the limit for screening all choices; the best one gets the rest."""


def best_of(
    choices: Sequence[int],
    words: Callable[[int], str],
    stop: StoppingCriterion,
    plan_with: Callable[[int, StoppingCriterion], Result[TrainingPlan]],
) -> Result[TrainingPlan]:
    """The best plan over some numbers, with the others as alternatives.

    Parameters
    ----------
    choices
        The numbers, ascending: with larger ones a device needs less memory.
    words
        A number with what it counts.
    plan_with
        Plans with one of them within a limit.
    """
    run = started(stop)
    if len(choices) == 1:
        return plan_with(choices[0], stop)
    screened: dict[int, Result[TrainingPlan]] = {}
    refused: dict[int, ProblemError | NetworkError] = {}

    def is_over() -> bool:
        """Whether a limit is reached, or Ctrl-C has ended the last search."""
        last = next(reversed(screened.values()), None)
        interrupted = last is not None and INTERRUPTED in last.stop_reason
        return interrupted or run.check() is not None

    # first those that need least memory
    for number in reversed(choices):
        try:
            screened[number] = plan_with(number, stop.portion(SCREENING_SHARE / len(choices)))
        except REFUSALS as error:
            refused[number] = error
        except KeyboardInterrupt:
            if not screened:
                raise
            break
        if screened and is_over():
            break
    if not screened:
        raise refused[choices[-1]]
    best_choice = min(screened, key=lambda number: objective_or_inf(screened[number]))
    best = screened[best_choice]
    if not is_over():
        limit = stop.portion(1 - SCREENING_SHARE, run.remaining_s)
        refined = plan_with(best_choice, limit)
        if objective_or_inf(refined) < objective_or_inf(best):
            best = refined
    if best.plan is None:
        return best
    measured_in = "$" if "cost" in best.plan.certificates else "s"
    others = [
        Alternative(
            words(best_choice),
            f"{words(number)}{_bounded(screened[number], measured_in)}",
            screened[number].objective,
            measured_in,
        )
        if number in screened
        else Alternative(
            words(best_choice),
            words(number),
            None,
            measured_in,
            _reason(refused.get(number)),
        )
        for number in choices
        if number != best_choice
    ]
    alternatives = (*others, *best.plan.alternatives)
    return replace(best, plan=best.plan.replace(alternatives=alternatives), runtime_s=run.elapsed_s)


def _bounded(result: Result[TrainingPlan], measured_in: str) -> str:
    """The bound of other plans with the same number, if there is one."""
    return "" if result.bound is None else f" (>= {result.bound:.4g} {measured_in})"


def _reason(refusal: Exception | None) -> str:
    """A refusal without its remedy; without one, the search ended before."""
    return "not tried: the search ended before" if refusal is None else str(refusal).split(";")[0]
