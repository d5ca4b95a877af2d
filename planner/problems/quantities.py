"""Validation of problem fields: scalars, or one value per item."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.problems.error import ProblemError
from planner.utils import validate
from planner.utils.validate import Choice, Kind, numbers, short_repr


def per_item(field: str, value: ArrayLike, count: int, item: str) -> NDArray[np.float64]:
    """An array of ``count`` values, each ``>= 0`` and finite, from a scalar or an array.

    Returns
    -------
    ndarray
        ``float[count]``, a copy.
    """
    try:
        values = numbers(value)
    except (TypeError, ValueError):
        raise ProblemError(
            f"{field} must be one number or {count} of them, found {short_repr(value)}"
        ) from None
    if values.shape not in ((), (count,)):
        raise ProblemError(
            f"{field} must be one number or {count} of them, found shape {values.shape}"
        )
    array = np.array(np.broadcast_to(values, (count,)))
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(bad):
        raise ProblemError(
            f"{field} of {item} {bad[0]} is {array[bad[0]]:g}; it must be >= 0 and finite"
        )
    return array + 0.0


def positive(field: str, value: Any) -> float:
    """Convert to a finite number ``> 0``."""
    number = real(field, value)
    if not (np.isfinite(number) and number > 0):
        raise ProblemError(f"{field} is {value}; it must be > 0 and finite")
    return number


def real(field: str, value: Any) -> float:
    """Convert to a number; text, booleans, arrays and None are refused."""
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)) or np.ndim(value) > 0:
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ProblemError(f"{field} must be a number, found {short_repr(value)}") from None


def seed_of(value: Any) -> int:
    """Convert to a seed, a whole number >= 0."""
    seed = whole("seed", value)
    if seed < 0:
        raise ProblemError(f"seed is {seed}; it must be a whole number >= 0")
    return seed


def instance_of(kind: type[Kind], value: Any, field: str = "problem") -> Kind:
    """Return the value if it has the required type."""
    return validate.instance_of(kind, value, field, error=ProblemError)


def choice(kind: type[Choice], field: str, value: Any) -> Choice:
    """Convert to a member of an enum."""
    return validate.choice(kind, field, value, error=ProblemError)


def device_groups(groups: Any) -> tuple[tuple[int, ...], ...]:
    """Convert to one tuple of device numbers per stage, each sorted."""
    try:
        return tuple(tuple(sorted(whole("a device of groups", d) for d in one)) for one in groups)
    except TypeError:
        raise ProblemError(
            f"groups are {short_repr(groups)}; give a list of devices for every stage"
        ) from None


def whole(field: str, value: Any) -> int:
    """Convert to a whole number."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ProblemError(f"{field} must be a whole number, found {short_repr(value)}") from None
