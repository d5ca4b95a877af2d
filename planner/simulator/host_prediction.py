"""Predicted time and memory of a plan whose ranks all run on this machine."""

from __future__ import annotations

import numpy as np

from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.simulator.simulator import cycle_steps_s
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.workload.calibration import Calibration
from planner.workload.costs import stage_costs
from planner.workload.host_memory import USABLE, available_bytes
from planner.workload.workload import Workload

PROCESS_BYTES = 350e6
"""Memory of a Python process with torch imported, before any tensor."""


def executable_workload(plan: TrainingPlan) -> Workload:
    """The plan's workload; raises `PlanError` if the executor cannot build it."""
    w = plan.workload
    if w.architecture is None or w.architecture.unexecuted:
        raise PlanError(w.unexecuted)
    return w


def required_bytes(plan: TrainingPlan, workload: Workload) -> float:
    """Memory of all ranks in total: processes, weights, gradients, moments, activations."""
    total = sum(plan.gpu_counts) * PROCESS_BYTES
    resident = [s.most_live() for s in plan.schedules]
    stage_of = plan.stage_of
    heads = {stage_of[s.head_device(b)] for s in plan.schedules for b in range(len(s.paths))}
    for d, j in stage_of.items():
        costs = stage_costs(
            workload, *plan.stage_layers[j], with_head=j in heads, recomputed=plan.recompute[j]
        )
        total += costs.need_bytes(max(h[d] for h in resident))
    vectors = workload.gradient_bytes(plan.stage_layers, plan.head_stage)
    total += sum(vectors[j] for j in plan.averages_for.values())
    # through which the processes of a worker exchange
    return total + sum(vectors[j] for d, j in stage_of.items() if plan.gpu_counts[d] > 1)


def require_memory(plan: TrainingPlan, workload: Workload) -> None:
    """Raise `PlanError` if the plan's ranks do not fit into this machine's memory."""
    need, have = required_bytes(plan, workload), available_bytes()
    processes = sum(plan.gpu_counts)
    if need > USABLE * have:
        raise PlanError(
            f"the plan's {processes} processes need about {need / 1e9:.1f} GB, this "
            f"machine has {have / 1e9:.1f} GB available and {USABLE:.0%} of it may be "
            "used; plan a smaller model, sequence or batch, or fewer devices, or run on several "
            "machines"
        )


def predict_on_host(
    plan: TrainingPlan, workload: Workload, calibration: Calibration
) -> list[float]:
    """Step time of every iteration of the cycle on this machine.

    Uses measured compute times, shared cores or GPUs, and the machine's own links.
    """
    n = len(plan.cluster)
    off = np.ones((n, n))
    network = Network(
        off * calibration.link_latency_s,
        off * calibration.link_bandwidth_bytes_per_s,
        plan.cluster.network.ids,
    )
    times = calibration.compute_times(
        network.ids,
        workload,
        plan.assignment.groups,
        plan.stage_layers,
        plan.recompute,
        plan.head_stage,
    )
    # the limits of the plan's devices and sites do not apply on this machine
    host = Cluster(network, Devices(plan.cluster.flops, plan.cluster.memory_bytes))
    local = plan.replace(compute_times=times)
    return cycle_steps_s(local, host, workload, cores=calibration.at_once)
