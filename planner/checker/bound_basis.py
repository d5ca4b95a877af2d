"""Basis of a plan's bounds: recomputed from a witness, or stated by a solver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.checker.plan_bounds import recomputed_bound
from planner.search.certificate import Witness
from planner.training_plan.model import TrainingPlan


@dataclass(frozen=True)
class BoundBasis:
    """Basis of one certificate's bound.

    Attributes
    ----------
    bound
        Stored bound; None if there is none.
    recomputed
        Bound that the checker recomputes from the witness; None without a witness.
    basis
        Free text of the file.
    argument
        Description of the witness.
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
            return f"{bound} stated by the solver, not verified: {self.basis or 'no reason given'}"
        return f"{bound} recomputed: {self.argument}"


def describe_witness(witness: Witness | None) -> str:
    """Describe a witness in words."""
    entries = witness or {}
    kind = str(entries.get("kind"))
    if isinstance(entries.get("shapes"), list):
        count = len(entries["shapes"])
        return f"{kind}, the least of {count} shapes" if count > 1 else kind
    if isinstance(entries.get("schedules"), list):
        descriptions = [describe_witness(schedule) for schedule in entries["schedules"]]
        limits = f"at most {entries.get('max_swaps')} swaps"
        if entries.get("in_flight") is not None:
            limits += f", {entries['in_flight']} in flight"
        return f"{kind} of {', '.join(descriptions)}; {limits}"
    numbers = [
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in entries.items()
        if key != "kind" and not isinstance(value, (list, dict))
    ]
    return f"{kind} ({', '.join(numbers)})" if numbers else kind


def bound_bases(plan: TrainingPlan) -> Iterator[BoundBasis]:
    """Yield one basis for each certificate of a valid plan."""
    for part, certificate in plan.certificates.items():
        recomputed = None if certificate.witness is None else recomputed_bound(plan, part)
        yield BoundBasis(
            part,
            certificate.bound,
            recomputed,
            certificate.basis,
            describe_witness(certificate.witness),
        )
