"""Methods of the open benchmark: functions from a problem to a solution."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.bench.problem import ProblemFamily

Run = Callable[[Any, int, float], Any]
"""Maps ``(problem, seed, effort)`` to a plan, a `planner.Result` or a solution's JSON form.

A unit of effort is about one core-second, counted in the method's own steps, so that a busy machine
gives the same solution. Methods without a search ignore it.
"""


class MethodKind(enum.StrEnum):
    """Origin of a method."""

    OURS = "ours"
    PAPER = "paper"
    RULE = "rule"
    OTHER = "other"


@dataclass(frozen=True)
class BenchMethod:
    """A method for the problems of one or several families.

    Attributes
    ----------
    name
        Name in tables, unique within a family.
    kind
        Origin: ours, a paper's, a common rule, or the user's.
    seeded
        Whether the seed changes the solution; otherwise only the first seed is run.
    about
        Description for tables.
    """

    name: str
    families: frozenset[ProblemFamily]
    run: Run
    kind: MethodKind
    seeded: bool = False
    about: str = ""

    @classmethod
    def for_family(
        cls,
        family: ProblemFamily,
        name: str,
        run: Run,
        kind: MethodKind,
        about: str,
        *,
        seeded: bool = False,
    ) -> BenchMethod:
        """Build a method for one family."""
        return cls(name, frozenset({family}), run, kind, seeded, about)


def foreign_method(reference: str) -> BenchMethod:
    """Import a user's function, named ``package.module:function``.

    Its attribute ``families`` may list the families that it solves; the default is all.
    """
    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        raise ValueError(
            f"--method must be package.module:function, found {reference!r}; correct it"
        )
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # of a user's module
        absent = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        remedy = "give a function on PYTHONPATH" if absent else f"correct the module {name}"
        message = " ".join(str(error).split())
        raise ValueError(
            f"--method {reference}: {type(error).__name__}: {message}; {remedy}"
        ) from error
    run = getattr(module, attribute, None)
    if not callable(run):
        raise ValueError(f"--method {reference}: {name} has no function {attribute}; give one")
    try:
        families = frozenset(
            ProblemFamily(name) for name in getattr(run, "families", tuple(ProblemFamily))
        )
    except (TypeError, ValueError):
        raise ValueError(
            f"--method {reference}: its families must be among {', '.join(ProblemFamily)}; "
            "correct them"
        ) from None
    return BenchMethod(reference, families, run, MethodKind.OTHER, True, "user's method")
