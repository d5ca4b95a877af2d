"""Type checks of plans and results, whose origin is not trusted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.checker.violation import Violation
from planner.problems.answers import AssignmentPlan, AveragingPlan
from planner.search.certificate import is_json
from planner.search.result import Result
from planner.utils.type_check import TypeMismatch, type_mismatch


def answer_type_violations(answer: Any, kind: type) -> list[Violation]:
    """Report the first field of an answer that has a wrong type."""
    wrong = type_mismatch(answer, kind) or next(_dimensions(answer), None)
    return _violations(wrong)


def result_type_violations(result: Result[Any]) -> list[Violation]:
    """Report the first field of a `Result` that has a wrong type."""
    wrong = type_mismatch(result, Result)
    if wrong is None and not is_json(result.witness):  # it is written to plan files
        wrong = TypeMismatch(".witness", "what JSON can hold", result.witness)
    return _violations(wrong)


def _violations(wrong: TypeMismatch | None) -> list[Violation]:
    if wrong is None:
        return []
    return [Violation("form", wrong.where.removeprefix("."), str(wrong))]


def _dimensions(plan: Any) -> Iterator[TypeMismatch]:
    """Arrays with a wrong number of dimensions, which annotations cannot express."""
    expected: tuple[tuple[str, int, str], ...] = ()
    if isinstance(plan, AssignmentPlan):
        expected = (("grid", 2, "rows and columns"),)
    if isinstance(plan, AveragingPlan):
        names = ("computes", "rates", "samples_per_step")
        expected = tuple((name, 1, "one number a peer") for name in names)
    for name, dimensions, description in expected:
        array = getattr(plan, name)
        if getattr(array, "ndim", dimensions) != dimensions:
            yield TypeMismatch(f".{name}", description, array)
