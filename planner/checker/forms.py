"""Whether an answer is made of what it must be, which who writes a solver may first get wrong."""

from __future__ import annotations

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
def form_violations(plan: Any) -> list[Violation]:
    """Fields that are something else than they must be.

    Parameters
    ----------
    plan
        Part of a plan.

    Returns
    -------
    list[Violation]
        The first; empty: the rest may presume that there is none.
    """
    return []


@form_violations.register
def _(plan: AssignmentPlan) -> list[Violation]:
    grid = plan.grid
    whole = isinstance(grid, np.ndarray) and grid.ndim == 2 and grid.dtype.kind in "iu"
    wrong = _lists("groups", plan.groups)
    if not wrong and not (grid is None or whole):
        wrong = _wrong("grid", "whole numbers in rows and columns, or None", grid)
    return wrong


@form_violations.register
def _(plan: AveragingPlan) -> list[Violation]:
    for name in ("computes", "rates", "samples_per_step"):
        array = getattr(plan, name)
        if array.ndim != 1:
            return _wrong(name, "one number a peer", array)
    if not _number(plan.steps_per_s):
        return _wrong("steps_per_s", "a number", plan.steps_per_s)
    return []


@form_violations.register
def _(plan: PathPlan) -> list[Violation]:
    return _lists("paths", plan.paths) or _operations(plan.ops)


@form_violations.register
def _(plan: ArrangedPathPlan) -> list[Violation]:
    wrong = _lists("groups", plan.groups)
    if not wrong and not isinstance(plan.paths, PathPlan):
        wrong = _wrong("paths", "a PathPlan", plan.paths)
    return wrong or form_violations(plan.paths)


def _operations(ops: Any) -> list[Violation]:
    if not isinstance(ops, list | tuple):
        return _wrong("ops", "a list of operations", ops)
    for k, op in enumerate(ops):
        right = isinstance(op, PathOp) and isinstance(op.kind, str)
        if not right or not all(map(_whole, op[:2])) or not all(map(_number, op[3:])):
            wanted = "an operation: two whole numbers, a kind, two times"
            return _wrong(f"ops[{k}]", wanted, op)
    return []


def _lists(where: str, rows: Any) -> list[Violation]:
    """Lists of devices."""
    if not isinstance(rows, list | tuple):
        return _wrong(where, "lists of devices", rows)
    for k, row in enumerate(rows):
        if not isinstance(row, list | tuple):
            return _wrong(f"{where}[{k}]", "a list of devices", row)
        for device in row:
            if not _whole(device):
                return _wrong(f"{where}[{k}]", "whole numbers", device)
    return []


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _wrong(where: str, wanted: str, found: object) -> list[Violation]:
    return [Violation("form", where, f"must be {wanted}, found {short(found)}")]
