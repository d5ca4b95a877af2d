"""Numbers of a report: head line, stages, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.training_plan.model import TrainingPlan
from planner.workload.costs import BACKWARD_TO_FORWARD, split_costs

DAY_S = 86400.0
TOKENS_PER_PARAMETER = 100
"""Of the training whose days and dollars are stated, unless its tokens are given."""


@dataclass(frozen=True)
class StageMemory:
    """What a device needs at its fullest, and has; bytes."""

    device: int
    live: int
    need_bytes: float
    have_bytes: float

    @property
    def reserve_bytes(self) -> float:
        """What is left."""
        return self.have_bytes - self.need_bytes


def memory(plan: TrainingPlan) -> list[StageMemory]:
    """Of every device that holds a stage, in the fullest of the plan's schedules."""
    costs = split_costs(plan.workload, plan.stage_layers, plan.head_stage, plan.recompute)
    held = [s.most_live() for s in plan.schedules]
    found = []
    for d, j in sorted(plan.stage_of.items()):
        live = max(each[d] for each in held)
        have = float(plan.cluster.memory_bytes[d])
        found.append(StageMemory(d, live, costs[j].need_bytes(live), have))
    return found


def parameters(plan: TrainingPlan) -> list[float]:
    """Parameters of each stage, with the head's where it runs."""
    w = plan.workload
    return [
        w.stage(*layers).parameters + (w.head_parameters(layers[0]) * (j == plan.head_stage))
        for j, layers in enumerate(plan.stage_layers)
    ]


def samples(plan: TrainingPlan) -> float:
    """Samples that a step trains on, in the mean over the cycle."""
    paths = sum(len(plan.schedules[k].paths) for k in plan.cycle) / len(plan.cycle)
    return paths * plan.workload.microbatch_samples


def tokens_per_s(plan: TrainingPlan) -> float | None:
    """None: the workload does not say how many tokens a sample has, or a step takes no time."""
    arch = plan.workload.architecture
    if arch is None or plan.predicted.step_s <= 0:
        return None
    return samples(plan) * arch.sequence / plan.predicted.step_s


def least(plan: TrainingPlan) -> float:
    """What was to be least, seconds or dollars of a step, as the plan has it."""
    of = plan.certificates.get("cost", plan.certificates.get("step"))
    return plan.predicted.step_s if of is None or of.objective is None else of.objective


def utilization(plan: TrainingPlan) -> float:
    """FLOPs of forward and backward passes over what all devices' FLOP/s, stated or measured, do.

    Recomputation does not count: it is what a device does, not the model; nor do devices that
    cannot compute.
    """
    return _part_of(plan, plan.cluster.flops)


def mfu(plan: TrainingPlan) -> float | None:
    """Model FLOPs utilization: the same over what the GPUs' peaks do; None: they are not known."""
    peaks = plan.cluster.devices.peak_flops
    if peaks is None:
        return None
    return _part_of(plan, np.asarray(peaks))


def _part_of(plan: TrainingPlan, flops: NDArray[np.float64]) -> float:
    """The model's FLOPs of a step, in the mean over the cycle, of what devices could do in it."""
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
    """So many significant digits, and all of large whole numbers."""
    return f"{value:,.0f}" if value >= 10 ** (count - 1) else f"{value:.{count}g}"


def seconds(value: float) -> str:
    """A time with four digits."""
    return f"{digits(value)} s"


def days(plan: TrainingPlan, tokens: float) -> float | None:
    """Days for so many tokens at the predicted rate; None where tokens are not known."""
    rate = tokens_per_s(plan)
    return None if rate is None else tokens / rate / DAY_S


def dollars(plan: TrainingPlan, tokens: float) -> float | None:
    """Dollars for so many tokens; None where prices or tokens are not known."""
    price = None if plan.cost is None else plan.cost.usd_per_billion_tokens
    return None if price is None else tokens * price / 1e9


def training_tokens(plan: TrainingPlan) -> float:
    """A hundred tokens a parameter."""
    return TOKENS_PER_PARAMETER * plan.workload.parameters


def headline(plan: TrainingPlan, tokens: float | None = None) -> dict[str, Any]:
    """The figures that a plan is judged by, JSON-ready; None where one is not known."""
    arch, most = plan.workload.architecture, tokens or training_tokens(plan)
    sequence = None if arch is None else arch.sequence
    return {
        "step_s": plan.predicted.step_s,
        "samples_per_step": samples(plan),
        "sequence": sequence,
        "positions": None if arch is None else arch.position_rows,
        "tokens_per_step": None if sequence is None else samples(plan) * sequence,
        "tokens_per_s": tokens_per_s(plan),
        "mfu": mfu(plan),
        "training_tokens": most,
        "days": days(plan, most),
        "dollars": dollars(plan, most),
    }
