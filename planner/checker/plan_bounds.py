"""Recomputes the bounds in a plan's certificates from their witnesses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from planner.checker.assignment_bounds import recomputed_bound_s as assignment_bound_s
from planner.checker.cost import cost_bound_usd
from planner.checker.joint_bound import whole_step_bound_s
from planner.checker.mean_bound import mean_step_bound_s
from planner.checker.memory import stage_memory
from planner.checker.path_bounds import recomputed_bound_s
from planner.checker.paths import swaps_of
from planner.checker.plan_network import largest_message_bytes, mean_links, most_live
from planner.checker.step_bound import straight_step_bound_s
from planner.checker.violation import Violation
from planner.problems import PathProblem, ProblemError
from planner.training_plan.choices import Head
from planner.training_plan.model import MEAN_STEP, TrainingPlan

TOLERANCE = 1e-9
"""Relative excess of a stored bound over the recomputed one that counts as rounding."""


def recomputed_bound(plan: TrainingPlan, part: str) -> float | None:
    """The bound that a certificate's witness proves; None if it proves none."""
    witness = plan.certificates[part].witness or {}
    kind = witness.get("kind")
    if part == "step" and kind == "straight step":
        return straight_step_bound_s(witness, plan)
    if part == "step" and kind == "whole step":
        claimed = plan.certificates[part].bound
        return None if claimed is None else whole_step_bound_s(witness, plan, claimed)
    if part == MEAN_STEP:
        claimed = plan.certificates[part].bound
        return None if claimed is None else mean_step_bound_s(witness, plan, claimed)
    if part == "cost" and kind == "cost":
        return cost_bound_usd(witness, plan)
    if part == "assignment":
        return _assignment_bound_s(witness, plan)
    if part == "paths" and kind == "cycle":
        return _cycle_bound_s(witness, plan)
    return None


def _cycle_bound_s(witness: Mapping[str, Any], plan: TrainingPlan) -> float | None:
    """The mean over the cycle of the bounds that the schedules' witnesses prove.

    ``in_flight`` and ``max_swaps`` are limits of the request; the bound holds within them.
    """
    schedules, in_flight, swaps = (witness.get(k) for k in ("schedules", "in_flight", "max_swaps"))
    if not isinstance(schedules, list) or len(schedules) != len(plan.schedules):
        return None
    if not isinstance(swaps, int) or not (in_flight is None or isinstance(in_flight, int)):
        return None
    # a witness whose limits the plan exceeds proves nothing about it
    if in_flight is not None and any(most_live(s) > in_flight for s in plan.schedules):
        return None
    stage_of = plan.stage_of
    for k, s in enumerate(plan.schedules):
        allowed = 0 if k == 1 else swaps
        for path in s.paths:
            swaps_made = swaps_of([stage_of[d] for d in path[1:]])
            if swaps_made is None or swaps_made > allowed:
                return None
    total = 0.0
    for k, schedule in enumerate(schedules):
        problem = _path_problem(plan, k, in_flight, swaps)
        proven = None if problem is None else recomputed_bound_s(schedule, problem)
        if proven is None:
            return None
        total += proven * plan.cycle.count(k) / len(plan.cycle)
    return total


def _path_problem(
    plan: TrainingPlan, schedule: int, in_flight: int | None, max_swaps: int
) -> PathProblem | None:
    """The path problem of a schedule with skipped stages, from the plan's numbers."""
    n, groups = len(plan.cluster), plan.assignment.groups
    paths = plan.schedules[schedule].paths
    away, rate = mean_links(plan)
    np.fill_diagonal(rate, np.inf)
    link = largest_message_bytes(plan) / rate
    np.fill_diagonal(away, 0.0)
    max_live = [_max_live(plan, d) for d in range(n)]
    if in_flight is not None:
        max_live = [min(count, in_flight) for count in max_live]
    try:
        return PathProblem(
            away + link,
            groups,
            plan.compute_times.forward_s,
            plan.compute_times.backward_s,
            plan.compute_times.head_s,
            len(paths[0]),
            max_live,
            len(paths) // len(groups[0]),
            # the second schedule of a cycle is the full one, without swaps
            max_swaps=0 if schedule == 1 else max_swaps,
            live_memory=True,
            link_s=link,
        )
    except ProblemError:
        return None


def _max_live(plan: TrainingPlan, d: int) -> int:
    """Microbatches that fit into a device's memory beside its stage."""
    w, j = plan.workload, plan.stage_of[d]
    needs = stage_memory(w, *plan.stage_layers[j], runs_head=j == 0)
    saved, operation = needs.saved[plan.recompute[j]], needs.operation[plan.recompute[j]]
    available = float(plan.cluster.memory_bytes[d]) - operation - needs.state
    microbatches = len(plan.schedules[0].paths)
    return microbatches if saved == 0 else max(0, min(microbatches, int(available // saved)))


def _assignment_bound_s(witness: Mapping[str, Any], plan: TrainingPlan) -> float | None:
    """The bound on eq. 1 with the plan's stages and bytes."""
    w = plan.workload
    gradients = [sum(layer.parameters for layer in w.layers[a:b]) for a, b in plan.stage_layers]
    gradients[0] += w.stem.parameters
    last = 0 if plan.schedules[0].head is Head.FIRST else len(gradients) - 1
    gradients[last] += w.head.parameters + (w.tied_parameters if last > 0 else 0)
    return assignment_bound_s(
        witness,
        plan.cluster.network.subset(sorted(plan.stage_of)),
        [len(group) for group in plan.assignment.groups],
        [w.layers[b - 1].output_bytes * w.microbatch_samples for _, b in plan.stage_layers[:-1]],
        [count * w.gradient_bytes_per_parameter for count in gradients],
    )


def check_bounds(plan: TrainingPlan) -> Iterator[Violation]:
    """Report certificates that claim more than their witnesses prove."""
    for part, certificate in plan.certificates.items():
        if certificate.witness is None or certificate.bound is None:
            continue
        where, unit = f"certificates.{part}.bound", "$" if part == "cost" else "s"
        recomputed = recomputed_bound(plan, part)
        if recomputed is None:
            kind = certificate.witness.get("kind")
            yield Violation("bound", where, f"its witness of kind {kind!r} proves nothing here")
        elif certificate.bound > recomputed * (1 + TOLERANCE):
            yield Violation(
                "bound",
                where,
                f"its witness proves {recomputed:.9g} {unit}, found {certificate.bound:.9g} {unit}",
            )
