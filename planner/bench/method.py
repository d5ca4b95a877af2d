"""What a method of the open benchmark is: one function from a problem to an answer."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.bench.problem import ProblemFamily

Run = Callable[[Any, int, float], Any]
"""``(problem, seed, effort)`` to a plan, a `planner.Result` or an answer's JSON form.

One unit of effort is about a second of one core, counted in the method's own steps, so that a busy
machine gives the same answer, only later. A method that takes none of it ignores it.
"""


class MethodKind(enum.StrEnum):
    """Where a method comes from."""

    OURS = "ours"
    PAPER = "paper"
    RULE = "rule"
    OTHER = "other"


@dataclass(frozen=True)
class BenchMethod:
    """A way to answer one family's problems, or several families'.

    Attributes
    ----------
    name
        In tables, unique within a family.
    kind
        Ours, a paper's, a rule that people use, or somebody else's.
    seeded
        Whether the seed changes the answer: otherwise it runs with the first one only.
    about
        A line for the tables.
    """

    name: str
    families: frozenset[ProblemFamily]
    run: Run
    kind: MethodKind
    seeded: bool = False
    about: str = ""

    @classmethod
    def of(
        cls,
        family: ProblemFamily,
        name: str,
        run: Run,
        kind: MethodKind,
        about: str,
        *,
        seeded: bool = False,
    ) -> BenchMethod:
        """Of one family."""
        return cls(name, frozenset({family}), run, kind, seeded, about)


def foreign_method(reference: str) -> BenchMethod:
    """Somebody else's function, named ``package.module:function``.

    It may say in an attribute ``families`` which it answers; otherwise it is asked for all.
    """
    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        raise ValueError(f"--method {reference!r}: give package.module:function")
    try:
        run = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--method {reference}: {error}; give a function on PYTHONPATH") from None
    if not callable(run):
        raise ValueError(f"--method {reference}: is no function; give one")
    try:
        families = frozenset(
            ProblemFamily(one) for one in getattr(run, "families", tuple(ProblemFamily))
        )
    except (TypeError, ValueError):
        raise ValueError(
            f"--method {reference}: its families must be of {', '.join(ProblemFamily)}; correct "
            "them"
        ) from None
    return BenchMethod(reference, families, run, MethodKind.OTHER, True, "somebody else's")
