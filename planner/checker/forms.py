"""Whether an answer is made of what it must be, which who writes a solver may first get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.checker.violation import Violation
from planner.network.annotations import Misfit, misfit
from planner.problems.answers import AssignmentPlan, AveragingPlan
from planner.search.certificate import is_json
from planner.search.result import Result


def form_violations(plan: Any) -> list[Violation]:
    """The first field that is something else than it must be.

    Parameters
    ----------
    plan
        An answer, or the result that holds it.

    Returns
    -------
    list[Violation]
        At most one; empty: the rest may presume that there is none.
    """
    answer = plan.plan if isinstance(plan, Result) else plan
    looks = (
        misfit(answer, type(answer)),
        *_dimensions(answer),
        misfit(plan, type(plan)),
        *_witness(plan),
    )
    return [
        Violation("form", wrong.where.removeprefix("."), str(wrong)) for wrong in looks if wrong
    ][:1]


def _dimensions(plan: Any) -> Iterator[Misfit]:
    """Those of arrays, which annotations do not say."""
    wanted: tuple[tuple[str, int, str], ...] = ()
    if isinstance(plan, AssignmentPlan):
        wanted = (("grid", 2, "rows and columns"),)
    if isinstance(plan, AveragingPlan):
        names = ("computes", "rates", "samples_per_step")
        wanted = tuple((name, 1, "one number a peer") for name in names)
    for name, dimensions, words in wanted:
        array = getattr(plan, name, None)
        if getattr(array, "ndim", dimensions) != dimensions:
            yield Misfit(f".{name}", words, array)


def _witness(plan: Any) -> Iterator[Misfit]:
    """What bounds are recomputed from goes into files."""
    if isinstance(plan, Result) and not is_json(plan.witness):
        yield Misfit(".witness", "what JSON can hold", plan.witness)
