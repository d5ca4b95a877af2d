"""Lower bound on the cost of a step, for every plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.planning.cost import HOUR_S
from planner.planning.problem import PlanningProblem
from planner.planning.step_bound import StepBound
from planner.workload.costs import stage_costs


def cost_bound(problem: PlanningProblem, step: StepBound | None) -> StepBound | None:
    """Dollars: every FLOP on the device that does it for least, plus the value of the shortest
    step.

    A device is paid for the whole step, but works for part of it at most.
    """
    cluster, workload, request = problem.cluster, problem.workload, problem.request
    if request.calibration is not None:
        return None
    costs = stage_costs(workload, 0, len(workload.layers), with_head=True)
    microbatches = workload.batch_samples // workload.microbatch_samples
    flops = microbatches * (costs.forward_flops + costs.backward_flops + costs.head_flops)
    cheapest = float((np.asarray(cluster.devices.usd_per_hour) / HOUR_S / cluster.flops).min())
    dollars = flops * cheapest
    basis = "computing on the devices with most FLOPs a dollar"
    columns = np.stack([cluster.flops, np.asarray(cluster.devices.usd_per_hour)], axis=1)
    rows, counts = np.unique(columns, axis=0, return_counts=True)
    witness: dict[str, Any] = {
        "kind": "cost",
        "devices": [
            {"count": count, "flops": rate, "usd_per_hour": price}
            for (rate, price), count in zip(rows.tolist(), counts.tolist(), strict=True)
        ],
    }
    if step is not None and request.hour_usd > 0:
        dollars += request.hour_usd / HOUR_S * step.value
        basis += "; waiting for the shortest step"
        witness |= {"step_s": step.value, "step": step.witness}
    return StepBound(dollars, basis, witness)
