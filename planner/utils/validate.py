"""Validation of user input: numbers, counts and objects, with errors of one line."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Kind = TypeVar("Kind")
Choice = TypeVar("Choice", bound=enum.StrEnum)
Error = type[ValueError]
SMALLEST, LARGEST = 1e-30, 1e30
"""Range of quantities other than 0, in SI units: beyond it, arithmetic may overflow."""


def in_safe_range(values: Any) -> NDArray[np.bool_]:
    """Mask of numbers that are 0 or in the safe range."""
    size = np.abs(np.asarray(values, dtype=float))
    return np.asarray((size == 0) | ((size >= SMALLEST) & (size <= LARGEST)))


def real(
    field: str,
    value: Any,
    least: float = -math.inf,
    *,
    above: bool = False,
    error: Error = ValueError,
) -> float:
    """A finite number, at least ``least``; with ``above``, more than that."""
    rule = "a number" if least == -math.inf else f"a number {'>' if above else '>='} {least:g}"
    try:
        if type(value) is not float and (
            isinstance(value, (bool, np.bool_, str, bytes)) or np.ndim(value) > 0
        ):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number >= least) or (above and number == least):
        raise error(f"{field} is {short_repr(value)}; it must be {rule}, finite")
    if number and not SMALLEST <= abs(number) <= LARGEST:
        raise error(f"{field} is {number:g}; it must be 0 or {SMALLEST:g} to {LARGEST:g} in size")
    return number


def reals(
    field: str, values: Any, least: float = -math.inf, *, error: Error = ValueError
) -> tuple[float, ...]:
    """A tuple of finite numbers; fast if all are floats."""
    row = sequence(field, values, error=error)
    if set(map(type, row)) == {float}:
        array = np.array(row)
        if (np.isfinite(array) & (array >= least) & in_safe_range(array)).all():
            return row
    return tuple(real(field, x, least, error=error) for x in row)


def count(
    field: str,
    value: Any,
    least: int = 1,
    most: float = math.inf,
    *,
    error: Error = ValueError,
) -> int:
    """A whole number of at least ``least``; 2.0 is one, 2.5 and True are not."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if isinstance(value, (float, np.floating)):
        is_integer = float(value).is_integer()
    if not is_integer or value < least:
        raise error(
            f"{field} is {short_repr(value)}; it must be a whole number of at least {least}"
        )
    if value > most:
        raise error(f"{field} is {short_repr(value)}; it must be at most {most:,.0f}")
    return int(value)


def numbers(values: Any) -> NDArray[np.float64]:
    """A new array of real numbers; None stands for NaN."""
    array = np.asarray(values)
    kinds = {type(x) for x in array.ravel().tolist()} if array.dtype.kind == "O" else set()
    if array.dtype.kind not in "iufO" or kinds & {str, bytes, bool, complex}:
        raise TypeError("text, truth values and complex numbers are none")
    try:
        return np.array(array, dtype=np.float64)
    except OverflowError:
        raise ValueError("a number is beyond 1e308") from None


def instance_of(kind: type[Kind], value: Any, field: str, *, error: Error = ValueError) -> Kind:
    """The value, which must be an instance of ``kind``."""
    if not isinstance(value, kind):
        raise error(f"{field} must be of type {kind.__name__}, found {short_repr(value)}")
    return value


def mapping(field: str, value: Any, *, error: Error = ValueError) -> dict[Any, Any]:
    """The value, which must be a mapping, as a dict."""
    if not isinstance(value, Mapping):
        raise error(
            f"{field} must be a mapping, found {short_repr(value)}; give such as {{'a': 1}}"
        )
    return dict(value)


def sequence(field: str, value: Any, *, error: Error = ValueError) -> tuple[Any, ...]:
    """The items of an iterable."""
    if not isinstance(value, Iterable) or (isinstance(value, np.ndarray) and value.ndim == 0):
        raise error(f"{field} must be a list, found {short_repr(value)}; give one entry each")
    return tuple(value)


def choice(kind: type[Choice], field: str, value: Any, *, error: Error = ValueError) -> Choice:
    """A member of an enum, given by its value."""
    try:
        return kind(value)
    except ValueError:
        options = ", ".join(kind)
        raise error(f"{field} {short_repr(value)} is unknown; choose one of {options}") from None


def short_repr(value: Any) -> str:
    """The value for a message of one line."""
    text = repr(value)
    if len(text) > 40 or "\n" in text:
        return f"a value of type {type(value).__name__}"
    return text
