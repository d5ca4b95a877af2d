"""Numbers that problems are made of: whole ones, and one for all or one per item."""

from __future__ import annotations

import enum
import operator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.problems.error import ProblemError

Kind = TypeVar("Kind")
Choice = TypeVar("Choice", bound=enum.StrEnum)


def per_item(field: str, value: ArrayLike, count: int, item: str) -> NDArray[np.float64]:
    """An array of ``count`` values, each ``>= 0`` and finite, from a scalar or an array.

    Parameters
    ----------
    item
        What an entry belongs to, for the message: "peer", "device", "stage".
    """
    try:
        given = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ProblemError(
            f"{field} must be one number or {count} of them, found {short(value)}"
        ) from None
    if given.shape not in ((), (count,)):
        raise ProblemError(
            f"{field} must be one number or {count} of them, found shape {given.shape}"
        )
    array = np.array(np.broadcast_to(given, (count,)))
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(bad):
        raise ProblemError(
            f"{field} of {item} {bad[0]} is {array[bad[0]]:g}; it must be >= 0 and finite"
        )
    return array + 0.0


def positive(field: str, value: Any) -> float:
    """A finite number ``> 0``, refused if it is not one."""
    number = real(field, value)
    if not (np.isfinite(number) and number > 0):
        raise ProblemError(f"{field} is {value}; it must be > 0 and finite")
    return number


def real(field: str, value: Any) -> float:
    """A number, refused if it is text, a truth value, an array or nothing."""
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)) or np.ndim(value) > 0:
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ProblemError(f"{field} must be a number, found {short(value)}") from None


def of_kind(kind: type[Kind], value: Any, field: str = "problem") -> Kind:
    """A value of the kind that a function takes, refused if it is something else."""
    if not isinstance(value, kind):
        raise ProblemError(f"{field} must be of type {kind.__name__}, found {short(value)}")
    return value


def choice(kind: type[Choice], field: str, value: Any) -> Choice:
    """One of an enum's words, refused if it is none of them."""
    try:
        return kind(value)
    except ValueError:
        raise ProblemError(
            f"{field} {short(value)} is unknown; choose one of {', '.join(kind)}"
        ) from None


def short(value: Any) -> str:
    """The value for a message of one line."""
    text = repr(value)
    if len(text) > 40 or "\n" in text:
        return f"a value of type {type(value).__name__}"
    return text


def whole(field: str, value: Any) -> int:
    """A whole number, refused if it is not one."""
    try:
        return operator.index(value)
    except TypeError:
        raise ProblemError(f"{field} must be a whole number, found {short(value)}") from None
