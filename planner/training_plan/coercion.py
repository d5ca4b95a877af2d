"""Coerces a plan's fields to plain Python: tuples, ints, floats and strings.

Equal plans thus have equal hashes and are immutable. Values of a wrong type are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from planner.problems.answers import AssignmentPlan
from planner.search.certificate import Certificate
from planner.training_plan.error import PlanError
from planner.utils.type_check import type_mismatch
from planner.utils.validate import count, instance_of, mapping, sequence, short_repr

Kind = TypeVar("Kind")
KINDS = frozenset("FHB")


def numbers(field: str, values: Any) -> tuple[int, ...]:
    """A tuple of whole numbers from 0."""
    row = sequence(field, values, error=PlanError)
    if set(map(type, row)) <= {int} and min(row, default=0) >= 0:
        return row  # plans have many, which were so mostly
    return tuple(count(f"an entry of {field}", x, 0, error=PlanError) for x in row)


def lists_of_numbers(field: str, values: Any) -> tuple[tuple[int, ...], ...]:
    """A tuple of tuples of whole numbers from 0."""
    rows = sequence(field, values, error=PlanError)
    if set(map(type, rows)) <= {tuple}:
        flat = tuple(chain.from_iterable(rows))
        if set(map(type, flat)) <= {int} and min(flat, default=0) >= 0:
            return rows  # plans have many, which were so mostly
    return tuple(numbers(field, row) for row in rows)


def flags(field: str, values: Any) -> tuple[bool, ...]:
    """A tuple of booleans."""
    return tuple(flag(f"an entry of {field}", x) for x in sequence(field, values, error=PlanError))


def recomputed(values: Any, layers: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Numbers of recomputed layers; true stands for all of a stage, false for none."""
    row = sequence("recompute", values, error=PlanError) or (False,) * len(layers)
    sizes = [*(stop - start for start, stop in layers), *[0] * (len(row) - len(layers))]
    return tuple(
        size * bool(x)
        if isinstance(x, (bool, np.bool_))
        else count("an entry of recompute", x, 0, error=PlanError)
        for x, size in zip(row, sizes, strict=False)
    )


def flag(field: str, value: Any) -> bool:
    """A boolean."""
    if isinstance(value, np.bool_):
        return bool(value)
    return instance_of(bool, value, field, error=PlanError)


def operations(field: str, values: Any) -> tuple[tuple[str, int], ...]:
    """Operations of a device, ``(kind, microbatch)``."""
    row = sequence(field, values, error=PlanError)
    if row and set(map(type, row)) == {tuple} and set(map(len, row)) == {2}:
        kinds, microbatches = zip(*row, strict=True)
        valid = set(map(type, kinds)) == {str} and KINDS.issuperset(kinds)
        if valid and set(map(type, microbatches)) == {int} and min(microbatches) >= 0:
            return row  # plans have many, which were so mostly
    return tuple(_operation(field, op) for op in row)


def _operation(field: str, value: Any) -> tuple[str, int]:
    pair = sequence(f"an entry of {field}", value, error=PlanError)
    if len(pair) != 2 or not isinstance(pair[0], str) or pair[0] not in KINDS:
        raise PlanError(
            f"an entry of {field} is {short_repr(value)}; give F, H or B, and the microbatch"
        )
    return str(pair[0]), count(f"a microbatch of {field}", pair[1], 0, error=PlanError)


def pairs(field: str, values: Any) -> tuple[tuple[int, int], ...]:
    """Ranges of whole numbers."""
    result = []
    for value in sequence(field, values, error=PlanError):
        ends = numbers(f"a range of {field}", value)
        if len(ends) != 2:
            raise PlanError(
                f"a range of {field} is {short_repr(value)}; give where it starts and stops"
            )
        result.append((ends[0], ends[1]))
    return tuple(result)


def all_of(kind: type[Kind], field: str, values: Any) -> tuple[Kind, ...]:
    """A tuple of instances of a class."""
    row: Iterable[Any] = sequence(field, values, error=PlanError)
    return tuple(instance_of(kind, item, f"an entry of {field}", error=PlanError) for item in row)


def assignment(value: AssignmentPlan) -> AssignmentPlan:
    """Validated groups and grid."""
    value = instance_of(AssignmentPlan, value, "assignment", error=PlanError)
    grid = value.grid
    if grid is not None:
        array = instance_of(np.ndarray, grid, "assignment.grid", error=PlanError)
        if array.ndim != 2 or array.dtype.kind not in "iu":
            raise PlanError(
                f"assignment.grid is {short_repr(grid)}; give whole numbers in rows and columns"
            )
    groups = sequence("assignment.groups", value.groups, error=PlanError)
    return AssignmentPlan(
        tuple(numbers(f"assignment.groups[{j}]", group) for j, group in enumerate(groups)), grid
    )


def certificates(value: Any) -> dict[str, Certificate]:
    """Certificates by part of the plan."""
    named: Mapping[Any, Any] = mapping("certificates", value, error=PlanError)
    return {
        instance_of(str, name, "a key of certificates", error=PlanError): _certificate(
            name, certificate
        )
        for name, certificate in named.items()
    }


def _certificate(certified: str, value: Any) -> Certificate:
    if wrong := type_mismatch(value, Certificate):
        raise PlanError(f"certificates.{certified}{wrong.where} {wrong}; make the plan again")
    certificate: Certificate = value
    values = {f.name: getattr(value, f.name) for f in fields(Certificate)}
    python_numbers = {name: x.item() for name, x in values.items() if isinstance(x, np.generic)}
    return replace(certificate, **python_numbers) if python_numbers else certificate
