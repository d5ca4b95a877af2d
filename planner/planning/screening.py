"""How choices that need a plan each are compared: all are screened, the best searched further."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.network.error import NetworkError
from planner.problems import ProblemError
from planner.search.result import Result, objective_or_inf
from planner.search.stop import INTERRUPTED, StoppingCriterion, started
from planner.training_plan.alternative import Alternative
from planner.training_plan.model import TrainingPlan

REFUSALS = (ProblemError, NetworkError)
"""Errors that refuse a choice. Others, such as a deadlock in the simulator, are bugs."""
SCREENING_SHARE, SCREENING_TIME_SHARE = 0.1, 0.5
"""Shares of the limit: in addition to it for screening each choice, and of a limit in seconds for
screening all."""
SHOWN_VARIATIONS = 2


@dataclass(frozen=True)
class Choice:
    """Fields of a request, and what they mean in words."""

    fields: Mapping[str, Any]
    words: str


def best_of(
    choices: Sequence[Choice],
    stop: StoppingCriterion,
    plan_with: Callable[[Mapping[str, Any], StoppingCriterion, bool], Result[TrainingPlan]],
    variations: Sequence[Callable[[Mapping[str, Any]], Sequence[Choice]]] = (),
    most_variations: int = 0,
) -> Result[TrainingPlan]:
    """The best plan over some choices, with the others as alternatives.

    Parameters
    ----------
    choices
        With later ones a device needs less memory.
    plan_with
        Plans with the fields of one of them within a limit, with baselines or without.
    variations
        Give other choices from the fields of the best one so far, in turn after ``choices``.
    most_variations
        How many these are at most.
    """
    run, every, last = started(stop), list(choices), len(choices) - 1
    if len(choices) == 1 and not variations:
        return plan_with(choices[0].fields, stop, True)
    screening = stop.portion(SCREENING_SHARE)
    if math.isfinite(run.remaining_s):
        seconds = SCREENING_TIME_SHARE * run.remaining_s / (len(choices) + most_variations)
        screening = stop.portion(SCREENING_SHARE, seconds)
    interrupted = False
    screened: dict[int, Result[TrainingPlan]] = {}
    refused: dict[int, ProblemError | NetworkError] = {}

    def is_over() -> bool:
        """Whether a limit is reached, or Ctrl-C has ended the last search."""
        newest = next(reversed(screened.values()), None)
        stopped = newest is not None and INTERRUPTED in newest.stop_reason
        return interrupted or stopped or run.check() is not None

    def best_screened() -> int:
        every_screened = sorted(screened)
        return min(every_screened, key=lambda k: objective_or_inf(screened[k]), default=last)

    def to_screen() -> Iterator[int]:
        """First those that need least memory, last variations that were not tried."""
        yield from reversed(range(len(choices)))
        for vary in variations:
            known = [choice.fields for choice in every]
            every.extend(c for c in vary(every[best_screened()].fields) if c.fields not in known)
            yield from range(len(known), len(every))

    for k in to_screen():
        try:
            screened[k] = plan_with(every[k].fields, screening, False)
        except REFUSALS as error:
            refused[k] = error
        except KeyboardInterrupt:
            if not screened:
                raise
            interrupted = True
            break
        if screened and is_over():
            break
    if not screened:
        raise refused[last]
    best_choice = best_screened()
    taken, best = every[best_choice].words, screened[best_choice]
    if not is_over():
        limit = stop.portion(1.0, run.remaining_s)
        try:
            refined = plan_with(every[best_choice].fields, limit, True)
        except (*REFUSALS, KeyboardInterrupt):
            refined = best
        best = replace(min(refined, best, key=objective_or_inf), baselines=refined.baselines)
    if best.plan is None:
        return best
    measured_in = "$" if "cost" in best.plan.certificates else "s"
    by_objective = sorted(screened, key=lambda k: objective_or_inf(screened[k]))
    varied = [k for k in by_objective if k >= len(choices)]
    shown = [k for k in (*range(len(choices)), *varied[:SHOWN_VARIATIONS]) if k != best_choice]
    others = [
        Alternative(
            taken,
            f"{every[k].words}{_bounded(screened[k], measured_in)}",
            screened[k].objective,
            measured_in,
        )
        if k in screened
        else Alternative(taken, every[k].words, None, measured_in, _reason(refused.get(k)))
        for k in shown
    ]
    alternatives = (*others, *best.plan.alternatives)
    return replace(best, plan=best.plan.replace(alternatives=alternatives), runtime_s=run.elapsed_s)


def _bounded(result: Result[TrainingPlan], measured_in: str) -> str:
    """The bound of other plans with the same number, if there is one."""
    return "" if result.bound is None else f" (>= {result.bound:.4g} {measured_in})"


def _reason(refusal: Exception | None) -> str:
    """A refusal without its remedy; without one, the search ended before."""
    return "not tried: the search ended before" if refusal is None else str(refusal).split(";")[0]
