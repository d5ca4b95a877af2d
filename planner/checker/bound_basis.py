"""What the bounds of a plan rest on: recomputed, or taken from a solver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.checker.plan_bounds import recomputed_s
from planner.search.certificate import Witness
from planner.training_plan.model import TrainingPlan


@dataclass(frozen=True)
class BoundBasis:
    """One certificate's bound.

    Attributes
    ----------
    bound
        As stored, None where there is none.
    recomputed
        The checker's own figure from the witness; None where the solver's word stands.
    basis
        What the file says of it.
    argument
        What its witness says.
    """

    part: str
    bound: float | None
    recomputed: float | None
    basis: str
    argument: str = ""

    def __str__(self) -> str:
        if self.bound is None:
            return f"{self.part}: no bound"
        bound = f"{self.part}: bound {self.bound:.6g} {'$' if self.part == 'cost' else 's'}"
        if self.recomputed is None:
            return f"{bound} on the solver's word: {self.basis or 'not said'}"
        return f"{bound} recomputed: {self.argument}"


def argument_of(witness: Witness | None) -> str:
    """A witness in words; free text of the file is not repeated for what was recomputed."""
    found = witness or {}
    kind = str(found.get("kind"))
    if isinstance(found.get("shapes"), list):
        count = len(found["shapes"])
        return f"{kind}, the least of {count} shapes" if count > 1 else kind
    if isinstance(found.get("schedules"), list):
        parts = [argument_of(part) for part in found["schedules"]]
        limits = f"at most {found.get('max_swaps')} swaps"
        if found.get("in_flight") is not None:
            limits += f", {found['in_flight']} in flight"
        return f"{kind} of {', '.join(parts)}; {limits}"
    rest = [
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in found.items()
        if key != "kind" and not isinstance(value, (list, dict))
    ]
    return f"{kind} ({', '.join(rest)})" if rest else kind


def bound_bases(plan: TrainingPlan) -> Iterator[BoundBasis]:
    """One for each certificate of a valid plan."""
    for part, certificate in plan.certificates.items():
        again = None if certificate.witness is None else recomputed_s(plan, part)
        yield BoundBasis(
            part, certificate.bound, again, certificate.basis, argument_of(certificate.witness)
        )
