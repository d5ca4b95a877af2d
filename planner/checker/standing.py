"""What the bounds of a plan stand on: what was computed again, and whose word was taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.checker.plan_bounds import recomputed_s
from planner.training_plan.model import TrainingPlan


@dataclass(frozen=True)
class Standing:
    """One certificate's bound.

    Attributes
    ----------
    part
        Such as ``step``.
    bound
        As stored, None where there is none.
    recomputed
        The checker's own figure from the witness; None where the solver's word stands.
    basis
        The argument, or the solver.
    """

    part: str
    bound: float | None
    recomputed: float | None
    basis: str

    def __str__(self) -> str:
        if self.bound is None:
            return f"{self.part}: no bound"
        how = "on the solver's word" if self.recomputed is None else "recomputed"
        return f"{self.part}: bound {self.bound:.6g} s {how}: {self.basis or 'not said'}"


def standings(plan: TrainingPlan) -> Iterator[Standing]:
    """One for each certificate of a valid plan.

    Parameters
    ----------
    plan
        What is judged.

    Yields
    ------
    Standing
        In the plan's order.
    """
    for part, certificate in plan.certificates.items():
        again = None if certificate.witness is None else recomputed_s(plan, part)
        yield Standing(part, certificate.bound, again, certificate.basis)
