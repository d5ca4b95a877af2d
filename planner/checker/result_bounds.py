"""Recomputes the bound of a solver's result from its witness."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.checker import assignment_bounds, averaging_bounds, path_bounds
from planner.checker.violation import Violation
from planner.problems import AssignmentProblem, AveragingProblem
from planner.search.certificate import Witness

TOLERANCE = 1e-9
"""Relative difference between two computations of a bound that counts as rounding."""


def recomputed_bound(witness: Witness, problem: Any) -> float | None:
    """The bound that a witness proves for a problem; None if it proves none."""
    if isinstance(problem, AveragingProblem):
        return averaging_bounds.recomputed_bound(witness, problem)
    if isinstance(problem, AssignmentProblem):
        return assignment_bounds.recomputed_bound_s(
            witness,
            problem.network,
            problem.stage_sizes,
            problem.activation_bytes,
            problem.gradient_bytes,
        )
    return path_bounds.recomputed_bound_s(witness, problem)


def bound_violations(
    bound: float | None, witness: Witness | None, problem: Any
) -> Iterator[Violation]:
    """Report a bound that claims more than its witness proves."""
    if bound is None or witness is None:
        return
    recomputed = recomputed_bound(witness, problem)
    if recomputed is None:
        yield Violation("bound", "result.witness", f"{witness!r} proves nothing here")
        return
    maximised = isinstance(problem, AveragingProblem)
    excess = recomputed - bound if maximised else bound - recomputed
    if not excess <= TOLERANCE * abs(recomputed):
        yield Violation(
            "bound", "result.bound", f"its witness proves {recomputed:.9g}, found {bound:.9g}"
        )
