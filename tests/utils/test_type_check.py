"""Values of dataclasses, checked against their annotations."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.utils.type_check import type_mismatch


class Colour(enum.StrEnum):
    """Colour of a box."""

    RED = "red"


class Pair(NamedTuple):
    """A pair of numbers."""

    first: int
    second: float


@dataclass
class Inner:
    """A nested dataclass."""

    size: int


@dataclass
class Box:
    """A dataclass with a field of each kind."""

    rows: tuple[tuple[int, ...], ...] = ((0, 1), (2,))
    ends: tuple[str, int] = ("F", 1)
    flag: bool = True
    colour: Colour = Colour.RED
    array: NDArray[np.int64] | None = None
    pairs: tuple[Pair, ...] = (Pair(1, 2.0),)
    inner: Inner | None = None
    named: Mapping[str, Inner] | None = None
    limit: float | None = None
    anything: Any = None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rows": [[0, np.int64(1)], []]},
        {"flag": np.bool_(False)},
        {"array": np.zeros((2, 2), dtype=np.uint8)},
        {"inner": Inner(3), "named": {"a": Inner(1)}, "limit": 3},
        {"limit": np.float32(0.5), "anything": object()},
        {"limit": float("nan")},
    ],
)
def test_valid_values(changes: dict[str, Any]) -> None:
    """Lists for tuples of any length, and NumPy's numbers."""
    assert type_mismatch(Box(**changes), Box) is None


@pytest.mark.parametrize(
    ("changes", "where", "wanted"),
    [
        ({"rows": None}, ".rows", "a list"),
        ({"rows": "ab"}, ".rows", "a list"),
        ({"rows": ((0, 1), (2, True))}, ".rows[1][1]", "a whole number"),
        ({"rows": ((0, 1.0),)}, ".rows[0][1]", "a whole number"),
        ({"ends": ("F", "1")}, ".ends[1]", "a whole number"),
        ({"ends": ["F", 1]}, ".ends", "a tuple of 2"),
        ({"ends": ("F", 1, 2)}, ".ends", "a tuple of 2"),
        ({"flag": 1}, ".flag", "true or false"),
        ({"colour": "red"}, ".colour", "a Colour"),
        ({"array": [[1]]}, ".array", "an array of whole numbers"),
        ({"array": np.ones(2)}, ".array", "an array of whole numbers"),
        ({"pairs": ((1, 2.0),)}, ".pairs[0]", "of type Pair"),
        ({"pairs": (Pair(1, "2"),)}, ".pairs[0].second", "a number"),  # type: ignore[arg-type]
        ({"inner": 3}, ".inner", "of type Inner"),
        ({"named": {"a": Inner(1), "b": Inner("x")}}, ".named.b.size", "a whole number"),  # type: ignore[arg-type]
        ({"named": [Inner(1)]}, ".named", "a mapping"),
        ({"named": {1: Inner(1)}}, ".named", "a mapping whose keys are text"),
        ({"limit": Fraction(10**400)}, ".limit", "a number"),
        ({"limit": 1j}, ".limit", "a number"),
        ({"limit": 10**400}, ".limit", "a number"),
        ({"limit": True}, ".limit", "a number"),
    ],
)
def test_invalid_values(changes: dict[str, Any], where: str, wanted: str) -> None:
    """Position and rule."""
    found = type_mismatch(Box(**changes), Box)
    assert found is not None
    assert (found.where, found.wanted) == (where, wanted)
    assert str(found).startswith(f"must be {wanted}, found ")


def test_unchecked_annotations() -> None:
    """Annotations that are not supported are not checked."""
    for kind in (
        NDArray[Any],
        NDArray[np.uint8],
        np.ndarray,
        np.ndarray[Any, Any],
        tuple[()],
        tuple,
        Mapping,
        Counter[str],
        Box | Any,
        "Box",
        object,
    ):
        assert type_mismatch(object(), kind) is None


def test_fields_of_dataclasses_only() -> None:
    """Neither constructor-only parameters nor class attributes."""

    @dataclass
    class Seeded:
        """From a seed."""

        seed: InitVar[int]
        size: int = 1
        limit: ClassVar[int] = 3

    assert type_mismatch(Seeded(5), Seeded) is None
