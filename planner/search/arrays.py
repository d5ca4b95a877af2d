"""Annotations of kernel arguments: element type and number of dimensions of arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Words = NDArray[np.uint64]
Floats2 = Annotated[NDArray[np.float64], 2]
Bools2 = Annotated[NDArray[np.bool_], 2]
Floats3 = Annotated[NDArray[np.float64], 3]
Ints2 = Annotated[NDArray[np.int64], 2]
"""Arrays are one-dimensional unless the name has a number."""


@cache
def array_type(kind: Any) -> tuple[np.dtype[Any], int] | None:
    """Dtype and number of dimensions of an array annotation; None for any other annotation."""
    dimensions = 1
    if get_origin(kind) is Annotated:
        kind, dimensions = get_args(kind)
    if get_origin(kind) is not np.ndarray:
        return None
    return np.dtype(get_args(get_args(kind)[1])[0]), dimensions


def is_tuple(kind: Any) -> bool:
    """Whether an annotation is a named tuple."""
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


@cache
def types_of(named: Any) -> dict[str, Any]:
    """Annotations of a function or of a named tuple, in order."""
    return get_type_hints(named, include_extras=True)


def checked(function: Callable[..., Any], compiled: FunctionT) -> FunctionT:
    """Wrap a compiled function so that its arguments are checked against the annotations.

    For tests: code compiled ahead of time misinterprets arrays of another type.
    """
    kinds = types_of(function)

    def call(*arguments: Any) -> Any:
        for (name, kind), value in zip(kinds.items(), arguments, strict=False):
            _check(name, value, kind)
        return compiled(*arguments)

    return cast("FunctionT", call)


def _check(name: str, value: Any, kind: Any) -> None:
    expected = array_type(kind)
    if expected is not None:
        assert (value.dtype, value.ndim) == expected, (name, value.dtype, value.ndim)
        assert value.flags.c_contiguous and value.flags.aligned, name
    elif is_tuple(kind):
        assert type(value) is kind, (name, type(value))
        inside: Any = kind
        for (field, inner), part in zip(types_of(inside).items(), value, strict=True):
            _check(f"{name}.{field}", part, inner)
    else:
        assert isinstance(value, (int, float, np.number, np.bool_)), (name, type(value))
