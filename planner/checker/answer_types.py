"""Type checks of answers, which may come from anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.checker.violation import Violation
from planner.problems.answers import AssignmentPlan, AveragingPlan
from planner.search.certificate import is_json
from planner.search.result import Result
from planner.utils.type_check import TypeMismatch, type_mismatch


def answer_form(answer: Any, kind: type) -> list[Violation]:
    """The first field of an answer that is something else than it must be."""
    wrong = type_mismatch(answer, kind) or next(_dimensions(answer), None)
    return _violations(wrong)


def result_form(result: Result[Any]) -> list[Violation]:
    """The same of what surrounds it, but for history and candidates, from which nothing follows."""
    wrong = type_mismatch(result, Result)
    if wrong is None and not is_json(result.witness):  # goes into files
        wrong = TypeMismatch(".witness", "what JSON can hold", result.witness)
    return _violations(wrong)


def _violations(wrong: TypeMismatch | None) -> list[Violation]:
    if wrong is None:
        return []
    return [Violation("form", wrong.where.removeprefix("."), str(wrong))]


def _dimensions(plan: Any) -> Iterator[TypeMismatch]:
    """Those of arrays, which annotations do not say."""
    wanted: tuple[tuple[str, int, str], ...] = ()
    if isinstance(plan, AssignmentPlan):
        wanted = (("grid", 2, "rows and columns"),)
    if isinstance(plan, AveragingPlan):
        names = ("computes", "rates", "samples_per_step")
        wanted = tuple((name, 1, "one number a peer") for name in names)
    for name, dimensions, words in wanted:
        array = getattr(plan, name)
        if getattr(array, "ndim", dimensions) != dimensions:
            yield TypeMismatch(f".{name}", words, array)
