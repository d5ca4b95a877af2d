"""Whether an answer is made of what it must be, which who writes a solver may first get wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import singledispatch
from numbers import Integral, Real
from typing import Any

import numpy as np

from planner.checker.violation import Violation
from planner.network.values import short
from planner.problems.answers import (
    ArrangedPathPlan,
    AssignmentPlan,
    AveragingPlan,
    PathOp,
    PathPlan,
)


@singledispatch
def form_violations(plan: Any) -> Iterator[Violation]:
    """Fields that are something else than they must be.

    Parameters
    ----------
    plan
        Part of a plan.

    Yields
    ------
    Violation
        One, or none: the rest presumes that there is none.
    """
    yield from ()


@form_violations.register
def _(plan: AssignmentPlan) -> Iterator[Violation]:
    found = _lists("groups", plan.groups)
    grid = plan.grid
    whole = isinstance(grid, np.ndarray) and grid.ndim == 2 and grid.dtype.kind in "iu"
    if found is None and not (grid is None or whole):
        found = _wrong("grid", "whole numbers in rows and columns, or None", grid)
    yield from () if found is None else (found,)


@form_violations.register
def _(plan: AveragingPlan) -> Iterator[Violation]:
    for name in ("computes", "rates", "samples_per_step"):
        array = getattr(plan, name)
        if array.ndim != 1:
            yield _wrong(name, "one number a peer", array)
            return
    if not _number(plan.steps_per_s):
        yield _wrong("steps_per_s", "a number", plan.steps_per_s)


@form_violations.register
def _(plan: PathPlan) -> Iterator[Violation]:
    found = _lists("paths", plan.paths) or _operations(plan.ops)
    yield from () if found is None else (found,)


@form_violations.register
def _(plan: ArrangedPathPlan) -> Iterator[Violation]:
    found = _lists("groups", plan.groups)
    if found is None and not isinstance(plan.paths, PathPlan):
        found = _wrong("paths", "a PathPlan", plan.paths)
    yield from form_violations(plan.paths) if found is None else (found,)


def _operations(ops: Any) -> Violation | None:
    if not isinstance(ops, list | tuple):
        return _wrong("ops", "a list of operations", ops)
    for k, op in enumerate(ops):
        right = isinstance(op, PathOp) and isinstance(op.kind, str)
        if not right or not all(map(_whole, op[:2])) or not all(map(_number, op[3:])):
            return _wrong(f"ops[{k}]", "an operation: two whole numbers, a kind, two times", op)
    return None


def _lists(where: str, rows: Any) -> Violation | None:
    """Lists of devices."""
    if not isinstance(rows, list | tuple):
        return _wrong(where, "lists of devices", rows)
    for k, row in enumerate(rows):
        if not isinstance(row, list | tuple):
            return _wrong(f"{where}[{k}]", "a list of devices", row)
        strange: Iterable[Any] = (d for d in row if not _whole(d))
        for d in strange:
            return _wrong(f"{where}[{k}]", "whole numbers", d)
    return None


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _wrong(where: str, wanted: str, found: object) -> Violation:
    return Violation("form", where, f"must be {wanted}, found {short(found)}")
