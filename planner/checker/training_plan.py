"""Independent verifier of a whole training plan: form, memory, times, certificates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from planner.checker.assignment import assignment_cost_s, grid_violations
from planner.checker.certificates import TOLERANCE, check_certificate, compare_stored
from planner.checker.cost import cost_violations
from planner.checker.memory import stage_memory
from planner.checker.paths import even_visits_violations
from planner.checker.plan_bounds import check_bounds
from planner.checker.plan_network import (
    device_rates,
    gradient_bytes,
    sites_around,
    stage_parameters,
)
from planner.checker.step_simulation import paths_makespan_s, simulated_times
from planner.checker.violation import Violation
from planner.checker.workers import workers_of_plan
from planner.network.cluster import Cluster
from planner.search.certificate import Certificate, Status
from planner.training_plan.model import MEAN_STEP, TrainingPlan
from planner.training_plan.validation import contradictions
from planner.workload.compute_times import FROM_FLOPS


def check_training_plan(plan: TrainingPlan, cluster: Cluster | None) -> Iterator[Violation]:
    """Report every rule that a plan breaks on a cluster; None: the plan's own."""
    for text in contradictions(plan):
        where, _, message = text.partition(": ")
        yield Violation("form", where, message)
        return  # the other rules need a consistent plan
    if cluster is not None:
        yield from _same_cluster(plan, cluster)
    yield from _assignment(plan)
    yield from _formats(plan)
    yield from _memory(plan)
    yield from _visits(plan)
    yield from _compute_times(plan)
    yield from _times(plan)
    for part, certificate in plan.certificates.items():
        where = f"certificates.{part}"
        yield from check_certificate(certificate, where)
        if certificate.status not in (Status.OPTIMAL, Status.FEASIBLE):
            yield Violation("status", where, f"a plan is there, found {certificate.status}")
    if "paths" in plan.certificates:
        yield from _paths_certificate(plan, plan.certificates["paths"])
    for part in ("step", MEAN_STEP):
        if part in plan.certificates:
            yield from _step_certificate(plan, part, plan.certificates[part])
    yield from cost_violations(plan)
    yield from check_bounds(plan)


def _same_cluster(plan: TrainingPlan, cluster: Cluster) -> Iterator[Violation]:
    """Check that the plan's devices are a subset of the cluster's, with equal data.

    FLOP/s of workers are compared up to rounding.
    """
    if plan.workload.tensor_parallel == 1:
        yield from _same_devices(plan, cluster)
        return
    found: list[Violation] = []
    for workers in workers_of_plan(plan, cluster):
        violations = list(_same_devices(plan, workers))
        if not violations:
            return
        found = found or violations
    yield from found or [
        Violation(
            "tensor parallel",
            "workload.tensor_parallel",
            f"no machine of the cluster has {plan.workload.tensor_parallel} GPUs with known links; "
            "plan again for this cluster",
        )
    ]


def _same_devices(plan: TrainingPlan, cluster: Cluster) -> Iterator[Violation]:
    """As `_same_cluster`, with workers in place of GPUs."""
    plan_cluster, names = plan.cluster, plan.cluster.network.ids
    index_of = {name: d for d, name in enumerate(cluster.network.ids)}
    other = Violation(
        "network", "network.hash", "the plan was made for another network; plan again for this"
    )
    if any(name not in index_of for name in names):
        yield other
        return
    unknown = set(index_of) - set(names)
    wrong = sorted(unknown ^ set(plan.left_out))
    if wrong:
        state = "has no part and is not listed" if wrong[0] in unknown else "is not in the cluster"
        yield Violation(
            "left out",
            "assignment.left_out",
            f"device {wrong[0]!r} {state}; plan again for this cluster",
        )
        return
    if plan_cluster.network.content_hash != cluster.network.subset(names).content_hash:
        yield other
        return
    indices = [index_of[name] for name in names]
    # FLOP/s of measured times are derived from them
    flops = ("flops",) if plan.compute_times.source == FROM_FLOPS else ()
    for name in (*flops, "memory_bytes", "can_compute", "can_aggregate", "sites", "gpu_counts"):
        cluster_value: Any = getattr(cluster.devices, name)
        if cluster_value is not None:
            cluster_value = np.asarray(cluster_value)[indices]
        plan_value: Any = getattr(plan_cluster.devices, name)
        same = np.array_equal(plan_value, cluster_value)
        if name == "flops" and plan.workload.tensor_parallel > 1:
            same = np.allclose(plan_value, cluster_value, rtol=TOLERANCE, atol=0.0)
        if not same:
            yield _other_devices(name)
    names_of_rates = "upload_bytes_per_s", "download_bytes_per_s"
    both = device_rates(plan_cluster), device_rates(cluster)
    for name, of_plan, of_cluster in zip(names_of_rates, *both, strict=True):
        if not np.array_equal(of_plan, of_cluster[indices]):
            yield _other_devices(name)
    around = sites_around(cluster.devices, len(cluster))
    named = {site for k in indices for site in around[k]}
    for name in ("site_upload_bytes_per_s", "site_download_bytes_per_s", "site_within"):
        lines = getattr(cluster.devices, name) or {}
        used = {site: line for site, line in lines.items() if site in named}
        if (getattr(plan_cluster.devices, name) or {}) != used:
            yield _other_devices(name)


def _other_devices(name: str) -> Violation:
    message = "the plan was made for other devices; plan again"
    return Violation("devices", f"devices.{name}", message)


def _step_certificate(plan: TrainingPlan, part: str, c: Certificate) -> Iterator[Violation]:
    where, label = f"certificates.{part}.objective", "must be predicted.step_s,"
    yield from compare_stored(plan.predicted.step_s, c.objective, "step time", where, label=label)
    if c.bound is not None and not 0 <= c.bound <= plan.predicted.step_s * (1 + TOLERANCE):
        yield Violation(
            "bound",
            f"certificates.{part}.bound",
            f"must be 0 to the step time {plan.predicted.step_s:g} s, found {c.bound:g} s",
        )


def _paths_certificate(plan: TrainingPlan, c: Certificate) -> Iterator[Violation]:
    """Check the mean makespan over the cycle in the path solver's model."""
    where = "certificates.paths"
    mean = paths_makespan_s(plan)
    if mean is None:
        yield Violation("order", where, "devices wait for each other: a deadlock")
        return
    yield from compare_stored(mean, c.objective, "timeline", f"{where}.objective")
    if c.bound is not None and not 0 <= c.bound <= mean * (1 + TOLERANCE):
        yield Violation(
            "bound", f"{where}.bound", f"must be 0 to the makespan {mean:g} s, found {c.bound:g} s"
        )


def _compute_times(plan: TrainingPlan) -> Iterator[Violation]:
    """Check compute times whose source is FLOPs."""
    if plan.compute_times.source != FROM_FLOPS:
        return
    w = plan.workload
    for d, j in plan.stage_of.items():
        start, stop = plan.stage_layers[j]
        flops = sum(layer.forward_flops for layer in w.layers[start:stop])
        flops += w.stem.forward_flops if j == 0 else 0.0
        forward = flops * w.microbatch_samples / float(plan.cluster.flops[d])
        head = 3 * w.head.forward_flops * w.microbatch_samples / float(plan.cluster.flops[d])
        # the backward pass includes the forward pass of layers that are recomputed
        again = sum(layer.forward_flops for layer in w.layers[start : start + plan.recompute[j]])
        again += w.stem.forward_flops if j == 0 and plan.recompute[j] else 0.0
        backward = 2 * forward + again * w.microbatch_samples / float(plan.cluster.flops[d])
        for name, value in (
            ("forward_s", forward),
            ("backward_s", backward),
            ("head_s", head),
            ("update_s", 0.0),
        ):
            stored = getattr(plan.compute_times, name)[d]
            yield from compare_stored(value, stored, "FLOPs", f"compute_times.{name}[{d}]")


def _assignment(plan: TrainingPlan) -> Iterator[Violation]:
    grid = plan.assignment.grid
    certificate = plan.certificates.get("assignment")
    if certificate is None:
        return
    # eq. 1 applies to pipelines; with equal groups they are the grid's rows
    if grid is None and len({len(group) for group in plan.assignment.groups}) == 1:
        yield Violation("grid", "assignment.grid", "equal groups need a grid, found none")
    samples = plan.workload.microbatch_samples
    activations = [
        plan.workload.layers[stop - 1].output_bytes * samples for _, stop in plan.stage_layers[:-1]
    ]
    gradients = [gradient_bytes(plan, j) for j in range(len(plan.stage_layers))]
    cost = assignment_cost_s(plan.assignment.groups, plan.cluster.network, activations, gradients)
    yield from compare_stored(
        cost, certificate.objective, "eq. 1", "certificates.assignment.objective"
    )
    if certificate.bound is not None and not 0 <= certificate.bound <= cost * (1 + TOLERANCE):
        yield Violation(
            "bound",
            "certificates.assignment.bound",
            f"must be 0 to the cost {cost:g} s, found {certificate.bound:g} s",
        )
    if grid is not None:
        yield from grid_violations(plan.assignment, plan.cluster.network, activations)


def _formats(plan: TrainingPlan) -> Iterator[Violation]:
    """Check that every device supports the number format of compute."""
    compute = plan.workload.precision.compute
    for d in plan.cluster.lacks(compute):
        if d in plan.stage_of:
            gpu = (plan.cluster.devices.gpus or ())[d]
            yield Violation(
                "format",
                "workload.precision.compute",
                f"device {plan.cluster.network.ids[d]!r} has a {gpu}, which has no {compute}; "
                "plan with --precision fp16",
            )


def _memory(plan: TrainingPlan) -> Iterator[Violation]:
    """Check TC1 with live memory: activations between F and B, weights, optimizer state."""
    w = plan.workload
    stage_of = plan.stage_of
    # devices of one stage hold the same parameters, whether they run H or not
    needs = [
        stage_memory(w, *span, runs_head=j == plan.head_stage)
        for j, span in enumerate(plan.stage_layers)
    ]
    for k, s in enumerate(plan.schedules):
        for d, order in enumerate(s.order):
            if d not in stage_of:
                continue
            j = stage_of[d]
            live = peak = 0
            for kind, _ in order:
                live += {"F": 1, "H": 0, "B": -1}[kind]
                peak = max(peak, live)
            state, saved, operation = needs[j]
            need = state + peak * saved[plan.recompute[j]] + operation[plan.recompute[j]]
            available = float(plan.cluster.memory_bytes[d])
            if need > available * (1 + 1e-9):
                yield Violation(
                    "memory",
                    f"paths.schedules[{k}].order[{d}]",
                    f"device {plan.cluster.network.ids[d]!r} needs {need / 1e9:.3g} GB for "
                    f"{peak} live microbatches, it has {available / 1e9:.3g} GB",
                )

    for j, rounds in enumerate(plan.averaging if w.optimizer_shards > 1 else ()):
        for group in rounds[-1]:
            for d, share in zip(group.members, group.shares, strict=True):
                if d in stage_of:
                    continue  # counted with at most one part in so many
                # the fp32 vector of the stage, and of its share fp32 parameters and moments
                parameters = stage_parameters(plan, j)
                need, available = (4 + 12 * share) * parameters, float(plan.cluster.memory_bytes[d])
                if need > available * (1 + 1e-9):
                    yield Violation(
                        "memory",
                        f"averaging.stages[{j}]",
                        f"device {plan.cluster.network.ids[d]!r} needs {need / 1e9:.3g} GB for "
                        f"its share of the optimizer state, it has {available / 1e9:.3g} GB",
                    )


def _visits(plan: TrainingPlan) -> Iterator[Violation]:
    """Check CC3 for paths that skip stages."""
    stages = len(plan.stage_layers)
    for k, s in enumerate(plan.schedules):
        for v in even_visits_violations(s.paths, plan.stage_of, stages):
            yield Violation(v.rule, f"paths.schedules[{k}], {v.where}", v.message)


def _times(plan: TrainingPlan) -> Iterator[Violation]:
    actual, stored_times = simulated_times(plan), plan.predicted
    if actual is None:
        yield Violation("order", "paths.schedules", "devices wait for each other: a deadlock")
        return
    yield from compare_stored(
        actual.pipeline_s, stored_times.pipeline_s, "timeline", "predicted.pipeline_s"
    )
    yield from compare_stored(
        actual.averaging_s, stored_times.averaging_s, "averaging", "predicted.averaging_s"
    )
    yield from compare_stored(actual.step_s, stored_times.step_s, "step time", "predicted.step_s")
