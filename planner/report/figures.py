"""Metrics of a plan: throughput, utilization, memory, duration and cost of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.training_plan.model import TrainingPlan
from planner.workload.costs import BACKWARD_TO_FORWARD, split_costs

DAY_S = 86400.0
TOKENS_PER_PARAMETER = 100
"""Default length of the training run whose duration and cost are reported."""


@dataclass(frozen=True)
class StageMemory:
    """Highest memory use and capacity of a device, in bytes."""

    device: int
    live: int
    need_bytes: float
    have_bytes: float

    @property
    def reserve_bytes(self) -> float:
        """Free memory at the highest use, in bytes."""
        return self.have_bytes - self.need_bytes


def memory(plan: TrainingPlan) -> list[StageMemory]:
    """Return the highest memory use of every device with a stage, over all schedules."""
    costs = split_costs(plan.workload, plan.stage_layers, plan.head_stage, plan.recompute)
    peaks = [s.most_live() for s in plan.schedules]
    rows = []
    for d, j in sorted(plan.stage_of.items()):
        live = max(peak[d] for peak in peaks)
        available = float(plan.cluster.memory_bytes[d])
        rows.append(StageMemory(d, live, costs[j].need_bytes(live), available))
    return rows


def parameters(plan: TrainingPlan) -> list[float]:
    """Return the parameters of each stage, including the head's on its stage."""
    w = plan.workload
    return [
        w.stage(*layers).parameters + (w.head_parameters(layers[0]) * (j == plan.head_stage))
        for j, layers in enumerate(plan.stage_layers)
    ]


def samples(plan: TrainingPlan) -> float:
    """Return the mean number of samples per step over the cycle."""
    paths = sum(len(plan.schedules[k].paths) for k in plan.cycle) / len(plan.cycle)
    return paths * plan.workload.microbatch_samples


def tokens_per_s(plan: TrainingPlan) -> float | None:
    """Return tokens per second; None if tokens per sample are unknown or a step takes no time."""
    arch = plan.workload.architecture
    if arch is None or plan.predicted.step_s <= 0:
        return None
    return samples(plan) * arch.sequence / plan.predicted.step_s


def least(plan: TrainingPlan) -> float:
    """Return the objective's value in the plan: seconds or dollars per step."""
    certificate = plan.certificates.get("cost", plan.certificates.get("step"))
    return (
        plan.predicted.step_s
        if certificate is None or certificate.objective is None
        else certificate.objective
    )


def utilization(plan: TrainingPlan) -> float:
    """Return the FLOPs of a step relative to the attainable FLOPs of all computing devices.

    Attainable FLOP/s are stated or measured. Recomputation does not count as useful FLOPs.
    """
    return _part_of(plan, plan.cluster.flops)


def mfu(plan: TrainingPlan) -> float | None:
    """Return model FLOPs utilization, relative to the GPUs' peaks; None if these are unknown."""
    peaks = plan.cluster.devices.peak_flops
    if peaks is None:
        return None
    return _part_of(plan, np.asarray(peaks))


def _part_of(plan: TrainingPlan, flops: NDArray[np.float64]) -> float:
    """Return the model's FLOPs per step over what devices with ``flops`` FLOP/s could do in it."""
    w, stage_of = plan.workload, plan.stage_of
    loads = [w.stage(*layers).forward_flops for layers in plan.stage_layers]
    visited = sum(
        w.head.forward_flops + sum(loads[stage_of[d]] for d in path)
        for k in plan.cycle
        for path in plan.schedules[k].paths
    ) / len(plan.cycle)
    done = (1 + BACKWARD_TO_FORWARD) * w.microbatch_samples * visited
    could = float(flops[np.asarray(plan.cluster.devices.can_compute)].sum())
    return done / (plan.predicted.step_s * could)


def digits(value: float, count: int = 4) -> str:
    """Format a number with ``count`` significant digits, and large numbers as whole ones."""
    return f"{value:,.0f}" if value >= 10 ** (count - 1) else f"{value:.{count}g}"


def seconds(value: float) -> str:
    """Format seconds with four significant digits."""
    return f"{digits(value)} s"


def days(plan: TrainingPlan, tokens: float) -> float | None:
    """Return the days that so many tokens take; None if tokens per step are unknown."""
    rate = tokens_per_s(plan)
    return None if rate is None else tokens / rate / DAY_S


def dollars(plan: TrainingPlan, tokens: float) -> float | None:
    """Return the cost of so many tokens; None if prices or tokens are unknown."""
    price = None if plan.cost is None else plan.cost.usd_per_billion_tokens
    return None if price is None else tokens * price / 1e9


def training_tokens(plan: TrainingPlan) -> float:
    """Return the tokens of the default training run."""
    return TOKENS_PER_PARAMETER * plan.workload.parameters


def headline(plan: TrainingPlan, tokens: float | None = None) -> dict[str, Any]:
    """Return the main metrics of a plan, JSON-ready; None where one is unknown."""
    arch, tokens_trained = plan.workload.architecture, tokens or training_tokens(plan)
    sequence = None if arch is None else arch.sequence
    return {
        "step_s": plan.predicted.step_s,
        "samples_per_step": samples(plan),
        "sequence": sequence,
        "positions": None if arch is None else arch.position_rows,
        "tokens_per_step": None if sequence is None else samples(plan) * sequence,
        "tokens_per_s": tokens_per_s(plan),
        "mfu": mfu(plan),
        "training_tokens": tokens_trained,
        "days": days(plan, tokens_trained),
        "dollars": dollars(plan, tokens_trained),
    }
