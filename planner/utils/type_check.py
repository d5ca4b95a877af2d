"""Checks at run time that objects match their type annotations, entry by entry."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from numbers import Integral, Real
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np

from planner.utils.validate import short_repr


class TypeMismatch(NamedTuple):
    """A value that does not match its annotation.

    Attributes
    ----------
    where
        Path below the checked object, such as ``.groups[0][3]``.
    wanted
        What is expected.
    found
        The value.
    """

    where: str
    wanted: str
    found: Any

    def __str__(self) -> str:
        return f"must be {self.wanted}, found {short_repr(self.found)}"


Look = Callable[[Any], TypeMismatch | None]


def type_mismatch(value: Any, kind: Any) -> TypeMismatch | None:
    """The first entry of an object that does not match its annotation."""
    return _look(kind)(value)


@cache
def _look(kind: Any) -> Look:
    """A checker for a type, cached."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in SCALARS:
        return partial(_scalar, kind)
    if origin in (Union, types.UnionType):
        return partial(_any_of, tuple(map(_look, inner)))
    if origin is tuple and inner[1:] == (Ellipsis,):
        return partial(_row, inner[0], _look(inner[0]))
    if origin is tuple and inner:
        return partial(_fixed, tuple(map(_look, inner)))
    if origin is np.ndarray:
        (dtype,) = get_args(inner[-1]) or (None,)
        return partial(_array, dtype) if dtype in ARRAYS else _anything
    if origin is Mapping and len(inner) == 2:
        return partial(_mapping, *map(_look, inner))
    if not isinstance(kind, type):
        return _anything
    if is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return partial(_fields, kind)
    if issubclass(kind, enum.Enum) or kind is types.NoneType:
        return partial(_instance, kind)
    return _anything


def _anything(_: Any) -> TypeMismatch | None:
    return None


def _scalar(kind: type, value: Any) -> TypeMismatch | None:
    kinds, description = SCALARS[kind]
    right = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
    if right and kind is float:
        try:
            float(value)
        except OverflowError:
            right = False
    return None if right else TypeMismatch("", description, value)


def _instance(kind: type, value: Any) -> TypeMismatch | None:
    return None if isinstance(value, kind) else TypeMismatch("", f"a {kind.__name__}", value)


def _any_of(looks: tuple[Look, ...], value: Any) -> TypeMismatch | None:
    """The mismatch of the first alternative: the others mostly are None."""
    mismatches = [look(value) for look in looks]
    return None if None in mismatches else mismatches[0]


def _row(kind: Any, look: Look, value: Any) -> TypeMismatch | None:
    if not isinstance(value, tuple | list):
        return TypeMismatch("", "a list", value)
    if kind in SCALARS and set(map(type, value)) <= {kind}:
        return None
    return _first(value, [look] * len(value))


def _fixed(looks: tuple[Look, ...], value: Any) -> TypeMismatch | None:
    if not isinstance(value, tuple) or len(value) != len(looks):
        return TypeMismatch("", f"a tuple of {len(looks)}", value)
    return _first(value, looks)


def _first(values: Iterable[Any], looks: Iterable[Look]) -> TypeMismatch | None:
    for k, (value, look) in enumerate(zip(values, looks, strict=True)):
        if wrong := look(value):
            return _inside(f"[{k}]", wrong)
    return None


def _array(dtype: type, value: Any) -> TypeMismatch | None:
    kinds, description = ARRAYS[dtype]
    right = isinstance(value, np.ndarray) and value.dtype.kind in kinds
    return None if right else TypeMismatch("", f"an array of {description}", value)


def _mapping(key: Look, look: Look, value: Any) -> TypeMismatch | None:
    if not isinstance(value, Mapping):
        return TypeMismatch("", "a mapping", value)
    for name, item in value.items():
        if wrong := key(name):
            return wrong._replace(wanted=f"a mapping whose keys are {wrong.wanted}")
        if wrong := look(item):
            return _inside(f".{name}", wrong)
    return None


def _fields(kind: type, value: Any) -> TypeMismatch | None:
    if not isinstance(value, kind):
        return TypeMismatch("", f"of type {kind.__name__}", value)
    for name, look in _field_looks(kind):
        if wrong := look(getattr(value, name)):
            return _inside(f".{name}", wrong)
    return None


@cache
def _field_looks(kind: type) -> tuple[tuple[str, Look], ...]:
    hints = get_type_hints(kind)
    names = [f.name for f in fields(kind)] if is_dataclass(kind) else getattr(kind, "_fields", ())
    return tuple((name, _look(hints[name])) for name in names)


def _inside(where: str, wrong: TypeMismatch) -> TypeMismatch:
    return wrong._replace(where=where + wrong.where)


SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((Integral,), "a whole number"),
    float: ((Real,), "a number"),
    bool: ((bool, np.bool_), "true or false"),
    str: ((str,), "text"),
}
ARRAYS: dict[Any, tuple[str, str]] = {
    np.float64: ("f", "numbers"),
    np.int64: ("iu", "whole numbers"),
    np.bool_: ("b", "truth values"),
}
