"""The bounds in a plan's certificates, computed again where a witness says from what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from planner.checker.assignment import recomputed_bound_s
from planner.checker.step_bound import straight_step_bound_s
from planner.checker.violation import Violation
from planner.training_plan.choices import Head
from planner.training_plan.model import TrainingPlan

EXCESS = 1e-9
"""Relative excess of a stored bound over the recomputed one that is rounding."""


def recomputed_s(plan: TrainingPlan, part: str) -> float | None:
    """The bound of a certificate with a witness; None where the witness says nothing."""
    witness = plan.certificates[part].witness or {}
    kind = witness.get("kind")
    if part == "step" and kind == "straight step":
        return straight_step_bound_s(witness, plan)
    if part == "assignment":
        return _assignment_bound_s(witness, plan)
    return None


def _assignment_bound_s(witness: Mapping[str, Any], plan: TrainingPlan) -> float | None:
    """On the plan's own stages and bytes."""
    w = plan.workload
    gradients = [sum(layer.parameters for layer in w.layers[a:b]) for a, b in plan.stage_layers]
    gradients[0] += w.stem.parameters
    gradients[0 if plan.schedules[0].head is Head.FIRST else -1] += w.head.parameters
    return recomputed_bound_s(
        witness,
        plan.cluster.network,
        [len(group) for group in plan.assignment.groups],
        [w.layers[b - 1].output_bytes * w.microbatch_samples for _, b in plan.stage_layers[:-1]],
        [count * w.gradient_bytes_per_parameter for count in gradients],
    )


def check_bounds(plan: TrainingPlan) -> Iterator[Violation]:
    """Witnesses that prove less than the certificate claims."""
    for part, certificate in plan.certificates.items():
        if certificate.witness is None or certificate.bound is None:
            continue
        where = f"certificates.{part}.bound"
        again = recomputed_s(plan, part)
        if again is None:
            kind = certificate.witness.get("kind")
            yield Violation("bound", where, f"its witness of kind {kind!r} proves nothing here")
        elif certificate.bound > again * (1 + EXCESS):
            yield Violation(
                "bound", where, f"its witness proves {again:.9g} s, found {certificate.bound:.9g} s"
            )
